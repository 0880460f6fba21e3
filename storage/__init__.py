"""Reinforcement-learning experience in memory: rollout storages and replay buffers."""
