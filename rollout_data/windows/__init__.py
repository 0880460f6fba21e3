"""Fixed-length windows by index."""
