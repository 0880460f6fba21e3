"""Checkpoints of trajectories in RLinf's layout, which `TrajectoryReplayBuffer` also writes."""
