"""Priorities and limits of rows, and what is drawn by them; stores no items."""
