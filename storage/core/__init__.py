"""Shared types and functions, independent of stores and file formats."""
