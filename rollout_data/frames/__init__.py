"""Rows of frames as tensors, from files or from memory."""
