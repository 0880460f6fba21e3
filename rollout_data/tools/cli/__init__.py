"""The command `rollout-data`: one table of commands, and a function for each."""
