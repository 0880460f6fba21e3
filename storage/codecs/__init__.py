"""Compression of arrays and frames. Each codec states its largest error."""
