"""Reader and writer of trajectory folders, the pickle format that block files replaced."""
