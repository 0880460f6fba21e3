"""T steps of N environments between two updates."""
