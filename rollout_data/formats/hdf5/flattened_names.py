"""Attributes that this library adds to robomimic files, so that its reader restores observations.

A key of `obs` must not contain "/", so the writer flattens the names of nested observations.
"""

from __future__ import annotations

#: Attribute of `data`: JSON object that maps each flattened key of `obs` to the original name.
OBS_NAMES = "obs_names"
#: Key in `ep_meta` with a list of observations that are unknown after the last step. The last row of
#: `next_obs` then repeats the last row of `obs`.
REPEATED = "repeated_next_obs"


def flat_key(name: str) -> str:
    """Return the key of a nested observation: "images_front" for "images/front"."""
    return name.replace("/", "_")
