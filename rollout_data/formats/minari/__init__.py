"""Minari datasets, in their three kinds of files."""
