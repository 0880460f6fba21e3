"""Replay of whole trajectories, on disk and cached."""
