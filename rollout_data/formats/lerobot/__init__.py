"""Reader and writer of LeRobot datasets."""
