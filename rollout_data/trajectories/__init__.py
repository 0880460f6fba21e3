"""Inside `TrajectoryReplayBuffer`: rows, files, index, cache, windows and saving of whole trajectories."""
