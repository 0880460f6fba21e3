"""Edit recordings: drop, tag, merge, split, pack and repair."""
