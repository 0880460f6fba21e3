"""One sample: check what is asked for, draw steps, bring them together.

One rule: a sample that raises has drawn nothing: the random numbers are where they were.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch

from storage.errors import MissingFieldError, nearest

from .cache import TrajectoryCache
from .gather import Gatherer
from .index import Entry
from .live import LiveTrajectories
from .rows import TrajectoryLayout
from .window import Int64s, Window


class Request(NamedTuple):
    """What is asked for; see `TrajectoryReplayBuffer.sample`."""

    num_steps: int
    names: Collection[str] | None = None
    min_weights_version: int | None = None
    is_contiguous: bool = False


def draw_sample(
    request: Request, live: LiveTrajectories, cache: TrajectoryCache | None, gatherer: Gatherer, rng: torch.Generator
) -> dict[str, Any]:
    """Draw steps and give them as a nested dict of new tensors `[num_steps, ...]`.

    Raises:
        BufferEmptyError: There is nothing to draw from.
        MissingFieldError: No trajectory that may be drawn has a name, or one that was drawn does not.
    """
    window = live.window(cache, request.min_weights_version)
    _check_names(window, request.names)
    before = rng.get_state()
    try:
        if cache is not None and window.is_one_block:
            rows = window.draw_rows(request.num_steps, rng)
            return gatherer.sample_one_block(window, cache, rows, request.names, request.is_contiguous)
        which, row = window.draw(request.num_steps, rng)
        _check_drawn(window, request.names, which)
        if cache is not None and not window.is_cached and gatherer.fill(window, cache, which):
            # The same steps, where they lie now.
            moved = live.window(cache, request.min_weights_version)
            row += moved.shift[which] - window.shift[which]
            window = moved
        return gatherer.sample(window, cache, which, row, request.names, request.is_contiguous)
    except BaseException:  # Ctrl-C too
        rng.set_state(before)
        raise


def _check_names(window: Window, names: Collection[str] | None) -> None:
    """Raise if no trajectory of a window has one of the names."""
    for name in names or ():
        if not any(name in layout.names for layout in window.layouts):
            raise _missing(name, window.layouts[0], window.entries[0])


def _check_drawn(window: Window, names: Collection[str] | None, which: Int64s) -> None:
    """Raise if a drawn trajectory does not have one of the names."""
    if len(window.layouts) > 1:
        for name in names or ():
            if (entry := window.lacking(name, which)) is not None:
                raise _missing(name, entry.layout, entry)


def _missing(name: str, layout: TrajectoryLayout, entry: Entry) -> MissingFieldError:
    where = f"{name!r} of trajectory {entry.trajectory_id}"
    return MissingFieldError("sample the key", where, nearest(name, layout.names), "none")
