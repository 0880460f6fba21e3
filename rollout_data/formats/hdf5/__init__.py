"""Formats of HDF5 files, and the code that all of their readers and writers share."""
