"""Replay buffer that stores trajectories on disk and caches the newest in memory."""
