"""Editing, uniting, dividing and mending recordings."""
