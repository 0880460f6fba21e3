"""Notes of our writer in robomimic files. The reader restores names and final rows from them."""

from __future__ import annotations

#: Attribute of `data`: key of `obs` -> name of the observation, if they differ, as JSON.
OBS_NAMES = "obs_names"
#: Entry of `ep_meta`: keys of `next_obs` whose last row repeats the last row of `obs`.
REPEATED = "repeated_next_obs"


def flat_key(name: str) -> str:
    """Return the key of a nested observation: "images_front" for "images/front"."""
    return name.replace("/", "_")
