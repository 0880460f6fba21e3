"""Processes that read one dataset: who reads what, what they agree on, and the memory that they share."""
