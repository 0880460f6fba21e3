"""Edit recordings: drop and tag trajectories; merge, split, pack and repair folders."""
