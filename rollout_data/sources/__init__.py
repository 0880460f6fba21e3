"""The places that episodes come from, and their rows as tensors."""
