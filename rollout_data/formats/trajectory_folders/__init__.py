"""The older layout of trajectory folders as plain arrays and tables; executes nothing that a pickle contains."""
