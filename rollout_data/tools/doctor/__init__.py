"""Examining recordings of any format: one table of rules, one pass over the data, nothing changed."""
