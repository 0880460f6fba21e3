"""Editing recordings: leave trajectories out, say things of them, unite, divide and mend folders; sources stay."""
