"""Readers and writers of other formats. Code in a data file is never executed."""
