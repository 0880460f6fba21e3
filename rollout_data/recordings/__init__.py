"""Recordings of any format as episodes that one can list, select and hold."""
