"""Buffers of items, and their manager; `storage/MANAGED.md` shows them."""
