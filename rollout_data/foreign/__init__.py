"""Other systems' files as plain arrays and tables; executes nothing that a file contains."""
