"""How samples and updates are shared out among buffers.

One rule: pure functions of names, shares, ids and a generator; no buffer is asked here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..core import arguments
from ..core.random_indices import RANDOM_BITS, random_bits, scaled, whole_weights
from ..errors import UsageError
from .item_store import UNIQUE_ID, listed, raise_unknown, split_unique_id

#: How far the sum of shares may be off.
_SLACK = 1e-6


def checked_ratio(ratio: Any, names: Collection[str], action: str) -> dict[str, float]:
    """Check shares by name; give one for every name. Errors name the `action`.

    Raises:
        KeyError: A name is not known.
        UsageError: A share is not in [0, 1], or they do not sum to 1.
    """
    if not isinstance(ratio, Mapping):
        raise UsageError(action, expected="sample_ratio as shares by name", got=type(ratio).__name__)
    shares = dict.fromkeys(names, 0.0)
    for name, share in ratio.items():
        if name not in shares:
            raise_unknown(name, names)
        shares[name] = arguments.real(action, f"share of {name!r}", share, "in [0, 1]", lambda x: 0 <= x <= 1 + _SLACK)
    total = math.fsum(shares.values())
    if abs(total - 1) > _SLACK:
        raise UsageError(action, expected="sample_ratio with shares that sum to 1", got=f"{total} of {dict(ratio)}")
    return shares


def share_out_sample(size: int, ratio: Mapping[str, float], rng: torch.Generator) -> tuple[list[int], dict[str, int]]:
    """Draw the buffer of each item, one from each of `size` equal intervals, and the order of all items.

    Shares become whole numbers first: see `whole_weights`.

    Returns:
        A uniform permutation of the items of all buffers, one buffer after another, so that every position is of each
        buffer with the probability of its share; and the number of items by name, of those with a share.
    """
    shares = {name: share for name, share in ratio.items() if share > 0}
    # So few bits that places in `size` intervals are counted in int64.
    num_bits = RANDOM_BITS - size.bit_length()
    ends = np.cumsum(whole_weights(list(shares.values()), num_bits))
    total = int(ends[-1])
    points = np.arange(size) * total + scaled(random_bits(size, rng).numpy(), total)
    places = np.searchsorted(ends * size, points, side="right")
    counts = np.bincount(places, minlength=len(shares)).tolist()
    order = torch.randperm(size, generator=rng, device="cpu").tolist()
    return order, dict(zip(shares, counts, strict=True))


def share_out_update(info: Any, names: Collection[str], tracking: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Cut an update of items of several buffers into one per buffer, in order.

    Args:
        info: `replay_unique_id` with `priority`, and `used_id`; each may be missing.
        names: The buffers.
        tracking: The buffers that are told every `used_id`.

    Raises:
        KeyError: An id is of no buffer.
        UsageError: An id is none, or there are not as many priorities.
    """
    if not isinstance(info, Mapping):
        raise UsageError("call BufferManager.update", expected="info as a mapping", got=type(info).__name__)
    ids = listed(info.get(UNIQUE_ID))
    priorities = info.get("priority")
    values = ids if priorities is None else listed(priorities)
    if len(values) != len(ids):
        raise UsageError("call BufferManager.update", expected=f"{len(ids)} priorities", got=str(len(values)))
    parts: dict[str, dict[str, Any]] = {}
    for unique_id, value in zip(ids, values, strict=True):
        name, _ = split_unique_id(unique_id)
        if name not in names:
            raise_unknown(name, names)
        part = parts.setdefault(name, {UNIQUE_ID: [], "priority": None if priorities is None else []})
        part[UNIQUE_ID].append(unique_id)
        if priorities is not None:
            part["priority"].append(value)
    if used := listed(info.get("used_id")):
        for name in tracking:
            parts.setdefault(name, {})["used_id"] = used
    return parts
