"""Foreign formats: one file per format, read without executing anything that a file contains."""
