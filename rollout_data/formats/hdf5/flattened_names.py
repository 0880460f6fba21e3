"""Notes of our writer in robomimic's files, by which the reader restores names and final observations."""

from __future__ import annotations

#: Attribute of `data`: key of `obs` -> name of the observation, where they differ; JSON.
OBS_NAMES = "obs_names"
#: Entry of `ep_meta`: keys of `next_obs` whose last row is the last row of `obs` again.
REPEATED = "repeated_next_obs"


def flat_key(name: str) -> str:
    """Return the key of a nested observation: "images/front" is "images_front"."""
    return name.replace("/", "_")
