"""Storages of this package with the interfaces of other reinforcement-learning libraries."""
