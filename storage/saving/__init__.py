"""Saves of buffers and storages as folders: atomic writing and checked loading."""
