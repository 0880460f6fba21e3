"""Windows: consecutive rows of one trajectory, drawn together with the rows one step later."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..core.fields import unflatten
from ..core.memory import tensor_of
from ..core.records import names_below
from ..errors import UsageError
from .ring_store import RingStore
from .window_bounds import Boundaries, Extent


class WindowRequest(NamedTuple):
    """Contents of windows: length, fields, and treatment of trajectory ends.

    Attributes:
        length: Number of rows of a window.
        keys: Fields to copy from every row.
        next_keys: Fields to copy from the row after each row, returned below `next`; may be empty.
        draws_trajectories: Whether to draw a trajectory uniformly, then one of its windows.
            Otherwise windows are drawn uniformly.
        is_marked: Whether windows at the end of a trajectory are also drawn if the row after them is
            unknown. The result then has the field `next_valid`.
        contiguous: Whether the fields of the result are contiguous tensors.
    """

    length: int
    keys: tuple[str, ...]
    next_keys: tuple[str, ...]
    draws_trajectories: bool
    is_marked: bool
    contiguous: bool


class Windows(NamedTuple):
    """A sample of windows.

    Attributes:
        fields: Nested dict of `[num_windows * length, *event]`, time fastest.
        places: `[num_windows]` int64, positions of the first rows in the memory of the ring.
    """

    fields: dict[str, Any]
    places: torch.Tensor


def draw_windows(
    boundaries: Boundaries, num_windows: int, request: WindowRequest, generator: torch.Generator
) -> Windows:
    """Draw windows with replacement, uniformly over all valid windows or by trajectory.

    Raises:
        UsageError: No window is valid.
    """
    ring = boundaries.ring
    length = request.length
    num_later = 1 if request.next_keys else 0
    ends = _ends_for(boundaries, request)
    drawn: tuple[torch.Tensor, torch.Tensor] | None = None
    if request.draws_trajectories:
        drawn = boundaries.draw_by_trajectory(num_windows, length + num_later, generator, ends)
        last_shift = num_later
    elif ends != "never":
        rows = boundaries.draw(num_windows, Extent(length - 1, 1, 1, ends), generator)
        drawn = None if rows is None else (rows.lane, rows.row)
        last_shift = 0
    else:
        places = boundaries.draw_places(num_windows, length + num_later, generator)
        if places is not None:
            cut = ring.cut_of(request.keys, request.next_keys, request.contiguous, apart=True)
            return Windows(ring.windows(places, length, cut), tensor_of(places))
    if drawn is None:
        raise UsageError(
            f"no trajectory has {length + num_later} rows, which a window of {length} rows needs. "
            "Add more rows."
        )
    lane, last = drawn
    last = last - last_shift
    places = ring.place(lane, last - (length - 1))
    return Windows(_copy_windows(boundaries, lane, last, request, ends), places)


def list_windows(boundaries: Boundaries, request: WindowRequest) -> dict[str, Any]:
    """Copy every window inside one trajectory, lane by lane, oldest first.

    If `request.next_keys` is not empty, the row after the window must be in the trajectory too.
    """
    num_later = 1 if request.next_keys else 0
    lane, last = boundaries.list_all(request.length + num_later)
    return _copy_windows(boundaries, lane, last - num_later, request, "never")


def _ends_for(boundaries: Boundaries, request: WindowRequest) -> str:
    """Return whether a window may contain the last row of its trajectory.

    The result is "never", "known" (if the final observation is stored) or "always".
    """
    if not request.next_keys:
        return "never"
    if request.is_marked:
        return "always"
    if boundaries.finals is None:
        return "never"
    return boundaries.ends_for(_next_names(boundaries.ring, request), is_marked=False)


def _next_names(ring: RingStore, request: WindowRequest) -> list[str]:
    """Return the flat names of the fields below `request.next_keys`."""
    names = []
    for key in request.next_keys:
        names += names_below(ring.schema, key, "output_key_tp1")
    return names


def _copy_windows(
    boundaries: Boundaries,
    lane: torch.Tensor,
    last: torch.Tensor,
    request: WindowRequest,
    ends: str,
) -> dict[str, Any]:
    """Copy windows and, below `next`, the rows one step later, as a nested dict.

    Args:
        boundaries: Boundaries of the ring.
        lane, last: `[n]` int64, lane and id of the last row of each window.
        request: Length and fields of the windows.
        ends: Whether windows may contain a last row: "never", "known" or "always".
    """
    ring = boundaries.ring
    length = request.length
    cut = ring.cut_of(request.keys, request.next_keys, request.contiguous, nested=False, apart=True)
    fields = ring.windows(ring.place(lane, last - (length - 1)), length, cut)
    if ends == "never":
        return unflatten(fields)
    following = {}
    for name in _next_names(ring, request):
        following[name] = fields[f"next/{name}"].unflatten(0, (-1, length))[:, -1]
    places = ring.place(lane, last)

    def last_rows(name: str, rows: torch.Tensor | None) -> torch.Tensor:
        return ring.column(name).index_select(0, places if rows is None else places[rows])

    drawn = boundaries.follow(lane, last)
    is_known = boundaries.put_finals(following, last_rows, drawn, request.is_marked)
    if request.is_marked:
        assert is_known is not None
        flags = torch.ones((len(lane), length), dtype=torch.bool, device=lane.device)
        flags[:, -1] = is_known
        fields["next_valid"] = flags.view(-1, 1)
    return unflatten(fields)
