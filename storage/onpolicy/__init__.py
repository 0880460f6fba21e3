"""Rollout storages: the steps of all environments between two updates of a learner."""
