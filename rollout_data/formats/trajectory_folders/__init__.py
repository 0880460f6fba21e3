"""Reader and writer of the older layout of trajectory folders. No code in a pickle is run."""
