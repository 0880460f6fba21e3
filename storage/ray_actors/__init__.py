"""Buffers in Ray actors: the actor, a client's connection to an actor, and packed results."""
