"""Buffers of items under one manager: prioritized, uniform and by episode; see MANAGED.md beside the package."""
