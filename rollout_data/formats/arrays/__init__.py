"""Formats that are arrays in an archive or folder: npz, zarr, torch files."""
