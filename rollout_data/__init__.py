"""Reinforcement-learning experience in files: record it, stream it back."""
