"""The command-line program `rollout-data`, with one function per command."""
