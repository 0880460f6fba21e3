"""Buffers of items: prioritized, uniform, by episode, several under one manager. `storage/MANAGED.md` shows them."""

__all__: list[str] = []
