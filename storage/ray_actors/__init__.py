"""Buffers in Ray actors: the actor, the connection of a client, and the encoding of results."""
