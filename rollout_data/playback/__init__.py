"""Frames in order, per environment."""
