"""RLinf's trajectory checkpoints: reading and writing them."""
