"""Records into a data folder, and its retention."""
