"""Rows in ring memory, and the valid windows of rows. Only these modules wrap indices."""
