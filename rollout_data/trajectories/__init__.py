"""Replay buffer of whole trajectories, stored on disk and cached in memory."""
