"""The command `rollout-data`: look at, check, repair, pack and prune data folders."""
