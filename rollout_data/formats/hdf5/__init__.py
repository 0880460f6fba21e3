"""Formats that are HDF5 files, and what reads all of them."""
