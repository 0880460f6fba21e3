"""Functions that divide a sample, or an update, among several buffers."""

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

#: Tolerance of the sum of shares.
_SLACK = 1e-6


def checked_ratio(ratio: Any, names: Collection[str]) -> dict[str, float]:
    """Check shares by name and return a share for every name, 0 for a missing name.

    Raises:
        KeyError: A name is unknown.
        UsageError: A share is not in [0, 1], or the shares do not sum to 1.
    """
    if not isinstance(ratio, Mapping):
        raise UsageError(
            f"sample_ratio must be a mapping of names to shares, got {type(ratio).__name__}."
        )
    shares = dict.fromkeys(names, 0.0)
    for name, share in ratio.items():
        if name not in shares:
            raise_unknown(name, names)
        shares[name] = arguments.real(f"share of {name!r}", share, "in [0, 1]", _is_share)
    total = math.fsum(shares.values())
    if abs(total - 1) > _SLACK:
        raise UsageError(
            f"the shares of sample_ratio must add up to 1, got {total} for {dict(ratio)}."
        )
    return shares


def _is_share(number: float) -> bool:
    return 0 <= number <= 1 + _SLACK


def share_out_sample(
    size: int, ratio: Mapping[str, float], rng: torch.Generator
) -> tuple[list[int], dict[str, int]]:
    """Draw the number of items from each buffer, and the order of all items.

    Systematic sampling: one buffer is drawn from each of `size` equal intervals. Shares are first
    rounded to integers by `whole_weights`.

    Returns:
        (order, counts). `counts` is the number of items by buffer name, without the names of share
        0. Suppose that the samples of the buffers are concatenated in this order. Then `order` is a
        random permutation of the `size` items. In the permuted sample, each position has an item of
        a buffer with the probability of the buffer's share.
    """
    shares = {name: share for name, share in ratio.items() if share > 0}
    # The number of bits is limited, so that `size` times the sum of the shares fits into int64.
    num_bits = RANDOM_BITS - size.bit_length()
    ends = np.cumsum(whole_weights(list(shares.values()), num_bits))
    total = int(ends[-1])
    points = np.arange(size) * total + scaled(random_bits(size, rng).numpy(), total)
    places = np.searchsorted(ends * size, points, side="right")
    counts = np.bincount(places, minlength=len(shares)).tolist()
    order = torch.randperm(size, generator=rng, device="cpu").tolist()
    return order, dict(zip(shares, counts, strict=True))


def share_out_update(
    info: Any, names: Collection[str], tracking: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Split an update of items of several buffers into one update per buffer, in the same order.

    Args:
        info: Mapping with the optional entries `replay_unique_id`, `priority` and `used_id`.
        names: Names of the buffers.
        tracking: Names of the buffers that receive every `used_id`.

    Raises:
        KeyError: No buffer has the name in an id.
        UsageError: An id is malformed, or the numbers of priorities and ids differ.
    """
    if not isinstance(info, Mapping):
        raise UsageError(f"info must be a mapping, got {type(info).__name__}.")
    ids = listed(info.get(UNIQUE_ID))
    priorities = info.get("priority")
    values = ids if priorities is None else listed(priorities)
    if len(values) != len(ids):
        raise UsageError(f"info must have one priority per id, got {len(values)} for {len(ids)}.")
    parts: dict[str, dict[str, Any]] = {}
    for unique_id, value in zip(ids, values, strict=True):
        name, _ = split_unique_id(unique_id)
        if name not in names:
            raise_unknown(name, names)
        empty: dict[str, Any] = {UNIQUE_ID: [], "priority": None if priorities is None else []}
        part = parts.setdefault(name, empty)
        part[UNIQUE_ID].append(unique_id)
        if priorities is not None:
            part["priority"].append(value)
    used = listed(info.get("used_id"))
    if used:
        for name in tracking:
            parts.setdefault(name, {})["used_id"] = used
    return parts
