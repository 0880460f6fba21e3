"""Tools for recordings: command line, doctor, edits and report."""
