"""Saves and loads the state of any store as a folder, atomically and with all checks; knows no particular store."""
