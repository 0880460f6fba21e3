"""Buffers that give windows of trajectories: `TrajectoryDictBufferMultiDim` and `TrajectoryDictBuffer`.

One rule: a window never leaves its trajectory. In the ring that is decided by ages (`ring/window_bounds.py`);
in the read-only buffer by the lengths of the episodes it was made from. How often an episode should be drawn is a pure
function of its scores, `motion_priorities`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ..core import arguments
from ..core.fields import Schema, unflatten
from ..core.memory import tensor_of
from ..core.records import Key, flat_name, names_below, numbers
from ..errors import SchemaError, UsageError
from ..ring.ring_store import RingStore
from ..ring.trajectory_ends import Places
from ..ring.window_bounds import Boundaries, Extent
from .dict_buffer import DictBuffer
from .ring_buffer import on_device

#: Fields that end trajectories unless `end_key` says otherwise: those of these that there are.
DEFAULT_END_KEYS = ("terminated", "truncated", "done", "time_outs")
_ACTION = "sample windows"


class TrajectoryDictBufferMultiDim(DictBuffer):
    """A ring of rows of one or many environments, sampled as windows of consecutive rows.

    Args:
        capacity: Rows that are kept; with `n_dim=2` rows per lane.
        device: Where they are kept.
        n_dim: 1 for leaves `[n, *event]`, the consecutive steps of one environment; 2 for
            `[n, lanes, *event]`. Lanes are fixed by the first `extend`.
        seq_length: Rows of a window, unless `sample` is told otherwise.
        output_key_t: What is given of every row of a window.
        output_key_tp1: What is given, below `next`, of the row after it; [] for nothing.
        end_key: Fields of which any that is not 0 ends a trajectory: a name, a tuple of nested names,
            or a list of those. None takes those of terminated, truncated, done and time_outs that
            there are.
        start_mode: "uniform" draws uniformly over all valid windows; "trajectory" first a
            trajectory, uniformly, then one of its windows.
        at_end: Windows whose next row is not known, because their trajectory ended with them and no
            final observation was given: "exclude" never draws them; "mark" does, with the last row
            itself in the place of the next, and gives `next_valid`, `[rows, 1]` bool.
        nested_key_separator, auto_unsqueeze, narrow, contiguous, output_device, generator: As for `DictBuffer`.
    """

    _ARGUMENTS = (
        "capacity",
        "end_key",
        "auto_unsqueeze",
        "narrow",
        "contiguous",
        "n_dim",
        "seq_length",
        "output_key_t",
        "output_key_tp1",
        "start_mode",
        "at_end",
    )

    def __init__(
        self,
        capacity: int,
        device: torch.device | str = "cpu",
        *,
        n_dim: int = 1,
        seq_length: int = 1,
        output_key_t: Sequence[Key] = ("observation",),
        output_key_tp1: Sequence[Key] = ("observation",),
        end_key: Key | list[Key] | None = None,
        start_mode: str = "uniform",
        at_end: str = "exclude",
        nested_key_separator: str = "-",
        auto_unsqueeze: bool = False,
        narrow: bool = False,
        contiguous: bool = False,
        output_device: torch.device | str | None = None,
        generator: torch.Generator | int | None = None,
        num_envs: int = 1,
    ) -> None:
        action = arguments.creating(self)
        arguments.choice(action, "n_dim", n_dim, (1, 2))
        arguments.choice(action, "start_mode", start_mode, ("uniform", "trajectory"))
        arguments.choice(action, "at_end", at_end, ("exclude", "mark"))
        if arguments.whole(action, "num_envs", num_envs, 1) != 1:
            raise UsageError(action, "", "n_dim=2 for several environments", f"num_envs={num_envs!r}")
        check_length(seq_length, action)
        if seq_length > arguments.whole(action, "capacity", capacity, 1):
            raise UsageError(action, "", f"a seq_length of at most capacity, {capacity}", str(seq_length))
        self.n_dim = n_dim
        self._has_lane_axis = n_dim == 2
        self.seq_length = int(seq_length)
        self.output_key_t = as_list(output_key_t, "output_key_t")
        self.output_key_tp1 = as_list(output_key_tp1, "output_key_tp1")
        self.start_mode = start_mode
        self.at_end = at_end
        super().__init__(
            capacity,
            device,
            nested_key_separator,
            end_key=end_key,
            auto_unsqueeze=auto_unsqueeze,
            narrow=narrow,
            contiguous=contiguous,
            output_device=output_device,
            generator=generator,
        )

    def size(self) -> int:
        """Rows of all lanes that are held."""
        return 0 if self._ring is None else self._ring.num_live * self._ring.num_lanes

    def sample(self, batch_size: int = 1, seq_length: int | None = None) -> dict[str, Any]:
        """Draw windows.

        Args:
            batch_size: Rows in all: a multiple of the window's length.
            seq_length: Rows of a window, instead of the buffer's own.

        Returns:
            Fields of `output_key_t`, and below `next` those of `output_key_tp1` one row later, each
            `[batch_size, *event]`: windows one after another, time fastest. Nothing is shared with
            the buffer.

        Raises:
            UsageError: The sizes do not fit, or no window is valid.
            BufferEmptyError: Nothing was added yet.
        """
        length = self.seq_length if seq_length is None else seq_length
        num_windows = count_windows(batch_size, length)
        with self._lock:
            ring = self._filled("sample windows")
            self._order.wait(is_write=False)
            found = self._draw(ring, num_windows, length)
            self._order.record(is_write=False)
            return on_device(found, self.output_device)

    @torch.no_grad()
    def get_full_buffer(self, order: str = "ring", copy: bool = True) -> dict[str, Any]:
        """Return every row that is followed by another of its trajectory, and that one, as `sample` returns windows.

        Rows come lane by lane, oldest first, whatever the order asked for. (`DictBuffer.get_full_buffer(buffer)`
        gives all slots.)

        Raises:
            UsageError: Another order than "ring" and "time", or `copy=False`, which cannot be.
        """
        copy = arguments.flag("get the full buffer", "copy", copy)
        if order not in ("ring", "time") or not copy:
            expected = "order 'ring' or 'time', and copy=True"
            raise UsageError("get the full buffer", "", expected, f"{order!r} and copy={copy}")
        with self._lock:
            if self._ring is None or self._boundaries is None:
                return {}
            offset = 1 if self.output_key_tp1 else 0
            self._order.wait(is_write=False)
            lane, last = self._boundaries.list_all(1 + offset)
            found = self._gather(self._boundaries, lane, last - offset, 1)
            self._order.record(is_write=False)
            return on_device(unflatten(found), self.output_device)

    @property
    def _has_lanes_in_file(self) -> bool:
        return self.n_dim == 2

    def _shown(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.n_dim == 2 else rows.squeeze(1)

    def _shown_index(self, slots: torch.Tensor, lanes: torch.Tensor) -> Any:
        return (slots, lanes) if self.n_dim == 2 else slots

    def _find_ends(self, schema: Schema) -> Places:
        if self.end_key is not None:
            return super()._find_ends(schema)
        names = list(schema)
        found = [(names.index(name), schema[name].num_elements) for name in DEFAULT_END_KEYS if name in schema]
        if not found:
            expected = "one of " + ", ".join(DEFAULT_END_KEYS)
            raise SchemaError("find what ends a trajectory", "", expected, ", ".join(names), "Give end_key")
        return found

    def _make_ring(self, schema: Schema, num_lanes: int) -> tuple[RingStore, Boundaries | None]:
        ring = RingStore(self._num_slots, num_lanes, schema, self.device, num_guards=self.seq_length)
        return ring, Boundaries(ring, keeps_segments=self.start_mode == "trajectory")

    def _draw(self, ring: RingStore, num_windows: int, length: int) -> dict[str, Any]:
        """Draw windows; give them nested."""
        boundaries = self._boundaries
        drawn = None
        num_later = offset = 1 if self.output_key_tp1 else 0
        assert boundaries is not None
        is_marked = self.at_end == "mark"
        later = self._later(ring) if is_marked or boundaries.finals is not None else []
        ends = boundaries.ends_for(later, is_marked) if offset else "never"
        #: Whether windows may end where their trajectory does.
        goes_to_ends = ends != "never"
        if self.start_mode == "trajectory":
            drawn = boundaries.draw_by_trajectory(num_windows, length + offset, self.generator, ends)
        elif goes_to_ends:
            around = boundaries.draw(num_windows, Extent(length - 1, 1, 1, ends), self.generator)
            drawn = None if around is None else (around.lane, around.row)
            offset = 0
        else:
            places = boundaries.draw_places(num_windows, length + offset, self.generator)
            if places is not None:
                self._last_drawn = tensor_of(places), length
                return ring.windows(places, length, ring.cut_of(*self._keys(), self.contiguous, apart=True))
        if drawn is None:
            expected = f"a stretch of {length + num_later} rows in one trajectory"
            raise UsageError(_ACTION, f"of {length}", expected, "shorter ones only", "Add more rows")
        lane, last = drawn
        self._last_drawn = ring.place(lane, last - offset - (length - 1)), length
        return unflatten(self._gather(boundaries, lane, last - offset, length, goes_to_ends))

    def _keys(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return tuple(self.output_key_t), tuple(self.output_key_tp1)

    def _later(self, ring: RingStore) -> list[str]:
        """List the fields that are given one row later."""
        return [
            name for key in self.output_key_tp1 for name in names_below(ring.schema, key, _ACTION, "output_key_tp1")
        ]

    def _gather(
        self, boundaries: Boundaries, lane: torch.Tensor, last: torch.Tensor, length: int, goes_to_ends: bool = False
    ) -> dict[str, torch.Tensor]:
        """Copy windows of `length` rows that end at `last`, and what comes one row later."""
        ring = boundaries.ring
        cut = ring.cut_of(*self._keys(), self.contiguous, nested=False, apart=True)
        found = ring.windows(ring.place(lane, last - (length - 1)), length, cut)
        if goes_to_ends:
            later = self._later(ring)
            following = {name: found[f"next/{name}"].unflatten(0, (-1, length))[:, -1] for name in later}
            places = ring.place(lane, last)

            def last_rows(name: str, rows: torch.Tensor | None) -> torch.Tensor:
                return ring.column(name).index_select(0, places if rows is None else places[rows])

            drawn = boundaries.follow(lane, last)
            follows = boundaries.put_finals(following, last_rows, drawn, self.at_end == "mark")
            if self.at_end == "mark":
                assert follows is not None
                flags = torch.ones((len(lane), length), dtype=torch.bool, device=lane.device)
                flags[:, -1] = follows
                found["next_valid"] = flags.view(-1, 1)
        return found


def as_list(keys: Sequence[Key], argument: str) -> list[str]:
    """Return keys as a list of flat names; one name alone is a list of one."""
    listed = [keys] if isinstance(keys, str) else keys
    arguments.instance(_ACTION, argument, listed, "as a list of names", Iterable)
    return [flat_name(key, argument) for key in listed]


def check_length(length: Any, action: str = _ACTION) -> int:
    """Return a number of rows as an int; raise `UsageError` if it is not one."""
    return arguments.whole(action, "seq_length", length, 1)


def count_windows(batch_size: int, length: int) -> int:
    """Return how many windows of `length` rows make `batch_size` rows."""
    length = check_length(length)
    if not arguments.is_whole(batch_size) or batch_size < length or batch_size % length:
        raise UsageError(_ACTION, "", f"a batch_size that is a multiple of seq_length {length}", repr(batch_size))
    return int(batch_size) // length


def _one_over_bin_size(scores: torch.Tensor) -> torch.Tensor:
    _, bin_of, sizes = torch.unique(scores.floor(), return_inverse=True, return_counts=True)
    shares: torch.Tensor = 1.0 / sizes.to(scores.dtype)
    return shares[bin_of]


_MODES: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": torch.exp2,
    "bin": _one_over_bin_size,
    None: torch.clone,
}


def motion_priorities(
    scores: Any, mode: str | None = "exp", min_value: float = 0.5, max_value: float = 2.0, scale: float = 2.0
) -> torch.Tensor:
    """Turn tracking errors per trajectory into priorities for `TrajectoryDictBuffer.update_priorities`.

    Args:
        scores: `[E]`, larger is tracked worse (for example an earth mover's distance).
        mode: With x = scale * clamp(score, min_value, max_value): "exp" gives 2 ** x; "bin" sorts
            into bins by floor(x) and makes all bins equally likely; None gives x itself.
        min_value, max_value: Where scores are clamped.
        scale: Factor after clamping.

    Returns:
        `[E]` of the scores' floating dtype (float32 for integers and lists) and device; a new tensor, not
        normalized.
    """
    action = "turn scores into priorities"
    arguments.choice(action, "mode", mode, _MODES)
    for name, number in (("min_value", min_value), ("max_value", max_value), ("scale", scale)):
        arguments.real(action, name, number, "as a number", lambda x: True)
    if not min_value <= max_value:
        raise UsageError(action, "", "min_value <= max_value", f"{min_value} and {max_value}")
    values = numbers(action, "scores", scores)
    if values.dim() != 1:
        raise UsageError(action, "", "scores of shape [E], one per trajectory", str(list(values.shape)))
    if not values.is_floating_point() or not isinstance(scores, (torch.Tensor, np.ndarray)):
        values = values.to(torch.float32)
    wrong = (~torch.isfinite(values)).nonzero()
    if len(wrong):
        place = int(wrong[0])
        raise UsageError(action, f"at index {place}", "finite scores", str(float(values[place])))
    return _MODES[mode](values.clamp(min_value, max_value) * scale)
