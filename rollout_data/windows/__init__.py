"""Datasets of fixed-length windows of trajectories: each window has a number."""
