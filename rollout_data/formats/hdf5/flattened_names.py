"""Attributes that our robomimic writer adds, so that our reader restores the original names."""

from __future__ import annotations

#: Attribute of `data`: JSON that maps each renamed key of `obs` to the original name.
OBS_NAMES = "obs_names"
#: Key in `ep_meta`: the observations whose last row of `next_obs` repeats the last row of `obs`.
REPEATED = "repeated_next_obs"


def flat_key(name: str) -> str:
    """Return the key of a nested observation: "images_front" for "images/front"."""
    return name.replace("/", "_")
