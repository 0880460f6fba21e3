"""One sample: check what is asked for, draw steps, bring them together.

One rule: a sample that raises has drawn nothing: the random numbers are where they were.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch

from storage.errors import MissingFieldError, UsageError, nearest
from storage.records import Key, flat_name

from .cache import TrajectoryCache
from .gather import Gatherer
from .index import Entry
from .live import LiveTrajectories
from .rows import TrajectoryLayout
from .window import Int64s, Window


class Request(NamedTuple):
    """What is asked for; see `TrajectoryReplayBuffer.sample`."""

    num_steps: int
    keys: Collection[Key] | None = None
    min_weights_version: int | None = None
    is_contiguous: bool = False


def draw_sample(
    request: Request, live: LiveTrajectories, cache: TrajectoryCache | None, gatherer: Gatherer, rng: torch.Generator
) -> dict[str, Any]:
    """Draw steps and give them as a nested dict of new tensors `[num_steps, ...]`.

    Raises:
        BufferEmptyError: There is nothing to draw from.
        MissingFieldError: No trajectory that may be drawn has a key, or one that was drawn does not.
        SchemaError, UsageError: A key is neither a str nor a tuple of them, or the keys are no collection of them.
    """
    window = live.window(cache, request.min_weights_version)
    names = None if request.keys is None else _names_of(window, request.keys)
    if cache is not None and window.is_one_block and not request.is_contiguous:
        return gatherer.sample_one_block(window, cache, request.num_steps, rng, names)
    before = rng.get_state()
    try:
        if cache is not None and window.is_one_block:
            return gatherer.sample_one_block(window, cache, request.num_steps, rng, names, contiguous=True)
        which, row = window.draw(request.num_steps, rng)
        _check_drawn(window, names, which)
        if cache is not None and not window.is_cached and gatherer.fill(window, cache, which):
            # The same steps, where they lie now.
            moved = live.window(cache, request.min_weights_version)
            row += moved.shift[which] - window.shift[which]
            window = moved
        return gatherer.sample(window, cache, which, row, names, request.is_contiguous)
    except BaseException:  # Ctrl-C too
        rng.set_state(before)
        raise


def _names_of(window: Window, keys: Collection[Key]) -> tuple[str, ...]:
    """List the leaves that keys mean: each itself, or all below it that any trajectory of a window has."""
    is_list = isinstance(keys, Collection) and not isinstance(keys, str)
    if not is_list or not all(isinstance(key, (str, tuple)) for key in keys):
        raise UsageError("choose the keys of a sample", "", "a list of keys", repr(keys))
    found: dict[str, None] = {}
    for key in keys:
        name = flat_name(key)
        below = [name] if any(name in layout.names for layout in window.layouts) else _below(window, name)
        if not below:
            raise _missing(name, window.layouts[0], window.entries[0])
        found.update(dict.fromkeys(below))
    return tuple(found)


def _below(window: Window, group: str) -> list[str]:
    """List the leaves of a nested mapping that any trajectory has, in the order of their schemas."""
    names = dict.fromkeys(name for layout in window.layouts for name in layout.names)
    return [name for name in names if name.startswith(f"{group}/")]


def _check_drawn(window: Window, names: tuple[str, ...] | None, which: Int64s) -> None:
    """Raise if a drawn trajectory does not have one of the names."""
    if len(window.layouts) > 1:
        for name in names or ():
            if (entry := window.lacking(name, which)) is not None:
                raise _missing(name, entry.layout, entry)


def _missing(name: str, layout: TrajectoryLayout, entry: Entry) -> MissingFieldError:
    where = f"{name!r} of trajectory {entry.trajectory_id}"
    return MissingFieldError("sample the key", where, nearest(name, layout.names), "none")
