"""The bytes of a block file, the blocks of a folder and the trajectories in them."""
