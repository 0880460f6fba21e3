"""Coordination of processes that read one dataset: shards, folder scans and shared memory."""
