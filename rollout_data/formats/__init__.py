"""Readers and writers of other formats; nothing that a file contains is executed."""
