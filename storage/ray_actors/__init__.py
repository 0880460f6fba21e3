"""Buffers in actors of Ray: how samples and pushes travel, the actor, and a client's connection to one."""
