"""Tests of editing, merging, splitting and repairing recordings."""
