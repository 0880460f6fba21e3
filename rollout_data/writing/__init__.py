"""Recording of steps and episodes into a data folder, and deletion of old blocks."""
