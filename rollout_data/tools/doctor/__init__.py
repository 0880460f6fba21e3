"""Examine recordings of any format for defects, by a table of rules, without changing them."""
