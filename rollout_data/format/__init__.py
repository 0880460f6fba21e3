"""Reads and writes the bytes of block files, with all checks."""
