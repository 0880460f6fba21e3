"""Compression; each codec states its loss."""
