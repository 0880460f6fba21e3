"""Block files: their layout in bytes, the folders that contain them, and the trajectory index."""
