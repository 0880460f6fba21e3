"""Buffers with uniform or per-episode sampling."""
