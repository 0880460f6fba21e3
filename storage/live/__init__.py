"""Monitors, prefetching and rate limits for use during training."""
