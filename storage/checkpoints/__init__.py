"""Saves any object to one file in the background."""
