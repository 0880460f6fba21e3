"""Checkpoints: one file per object, written in the background."""
