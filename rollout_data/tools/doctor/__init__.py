"""Examine recordings of any format by a table of rules. Nothing is changed."""
