"""Atomic saves and checked loads of stores as folders, independent of the class of the store."""
