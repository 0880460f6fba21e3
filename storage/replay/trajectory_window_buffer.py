"""`TrajectoryDictBufferMultiDim`: a ring sampled as windows of trajectories; `motion_priorities`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ..core import arguments
from ..core.fields import Schema
from ..core.records import Key, RecordReader, flat_name, numbers
from ..errors import SchemaError, UsageError
from ..ring.row_store import RowOptions
from ..ring.trajectory_ends import Places, end_places
from ..ring.window_sampler import WindowRequest, draw_windows, list_windows
from .dict_buffer import DictBuffer
from .row_buffer import on_device

#: Fields that end trajectories by default, if rows have them.
DEFAULT_END_KEYS = ("terminated", "truncated", "done", "time_outs")
_ACTION = "sample windows"


class TrajectoryDictBufferMultiDim(DictBuffer):
    """A ring of rows of one or many environments, sampled as windows of consecutive rows.

    Args:
        capacity: Number of rows; with `n_dim=2` per lane.
        device: Device of the rows.
        n_dim: 1 for leaves `[n, *event]`, the consecutive steps of one environment; 2 for
            `[n, lanes, *event]`. Lanes are fixed by the first `extend`.
        seq_length: Rows of a window; `sample` may use another number.
        output_key_t: Fields of every row of a window.
        output_key_tp1: Fields of the row after each row, below `next`; [] for none.
        end_key: Fields that end a trajectory where any of them is not 0: a name, a tuple of nested
            names, or a list of those. None takes terminated, truncated, done and time_outs, if rows
            have them.
        start_mode: "uniform" draws uniformly over all valid windows; "trajectory" first a
            trajectory, uniformly, then one of its windows.
        at_end: Windows whose next row is not known, because their trajectory ended with them and no
            final observation was given. "exclude" never draws them. "mark" draws them with the last
            row in the place of the next, and adds `next_valid`, `[rows, 1]` bool.
        nested_key_separator, auto_unsqueeze, narrow, contiguous, output_device, generator: As for
        `DictBuffer`.
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
            raise UsageError(
                action, "", "n_dim=2 for several environments", f"num_envs={num_envs!r}"
            )
        check_length(seq_length, action)
        if seq_length > arguments.whole(action, "capacity", capacity, 1):
            raise UsageError(
                action, "", f"a seq_length of at most capacity, {capacity}", str(seq_length)
            )
        self.n_dim = n_dim
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
        """Return the number of rows of all lanes."""
        return self._rows.num_live

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
            self._filled("sample windows")
            boundaries = self._rows.boundaries
            assert boundaries is not None
            with self._order.reads:
                windows = draw_windows(
                    boundaries, num_windows, self._request(length), self._rows.generator
                )
            self._last_drawn = windows.places, length
            return on_device(windows.fields, self.output_device)

    @torch.no_grad()
    def get_full_buffer(self, order: str = "ring", copy: bool = True) -> dict[str, Any]:
        """Return every row that is followed by another of its trajectory, and that one, as `sample` returns windows.

        Rows come lane by lane, oldest first, whatever the order asked for.
        (`DictBuffer.get_full_buffer(buffer)` gives all slots.)

        Raises:
            UsageError: Another order than "ring" and "time", or `copy=False`, which cannot be.
        """
        copy = arguments.flag("get the full buffer", "copy", copy)
        if order not in ("ring", "time") or not copy:
            expected = "order 'ring' or 'time', and copy=True"
            raise UsageError("get the full buffer", "", expected, f"{order!r} and copy={copy}")
        with self._lock:
            boundaries = self._rows.boundaries
            if boundaries is None:
                return {}
            with self._order.reads:
                rows = list_windows(boundaries, self._request(1))
            return on_device(rows, self.output_device)

    @property
    def _has_lanes_in_file(self) -> bool:
        return self.n_dim == 2

    def _shown(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.n_dim == 2 else rows.squeeze(1)

    def _shown_index(self, slots: torch.Tensor, lanes: torch.Tensor) -> Any:
        return (slots, lanes) if self.n_dim == 2 else slots

    def _row_options(self) -> RowOptions:
        keeps_segments = self.start_mode == "trajectory"
        find_ends = partial(_end_places, end_key=self.end_key)
        return RowOptions(self.capacity, find_ends, self.seq_length, keeps_segments)

    def _reader(self) -> RecordReader:
        has_lane_axis = self.n_dim == 2
        num_lanes = None if has_lane_axis else 1
        return RecordReader(num_lanes, has_lane_axis, self.auto_unsqueeze, self.narrow)

    def _request(self, length: int) -> WindowRequest:
        return WindowRequest(
            length,
            tuple(self.output_key_t),
            tuple(self.output_key_tp1),
            self.start_mode == "trajectory",
            self.at_end == "mark",
            self.contiguous,
        )


def _end_places(schema: Schema, end_key: str | list[str] | None) -> Places:
    """Find the fields that end trajectories; None takes the default ones."""
    if end_key is not None:
        return end_places(schema, end_key)
    names = [name for name in DEFAULT_END_KEYS if name in schema]
    if not names:
        expected = "one of " + ", ".join(DEFAULT_END_KEYS)
        raise SchemaError(
            "find what ends a trajectory", "", expected, ", ".join(schema), "Give end_key"
        )
    return end_places(schema, names)


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
        raise UsageError(
            _ACTION, "", f"a batch_size that is a multiple of seq_length {length}", repr(batch_size)
        )
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
    scores: Any,
    mode: str | None = "exp",
    min_value: float = 0.5,
    max_value: float = 2.0,
    scale: float = 2.0,
) -> torch.Tensor:
    """Compute priorities for `TrajectoryDictBuffer.update_priorities` from tracking errors.

    Args:
        scores: `[E]`, larger is tracked worse (for example an earth mover's distance).
        mode: With x = scale * clamp(score, min_value, max_value): "exp" gives 2 ** x; "bin" sorts
            into bins by floor(x) and makes all bins equally likely; None gives x itself.
        min_value, max_value: Where scores are clamped.
        scale: Factor after clamping.

    Returns:
        `[E]` of the scores' floating dtype (float32 for integers and lists) and device; a new
        tensor, not normalized.
    """
    action = "turn scores into priorities"
    arguments.choice(action, "mode", mode, _MODES)
    for name, number in (("min_value", min_value), ("max_value", max_value), ("scale", scale)):
        arguments.real(action, name, number, "as a number", lambda x: True)
    if not min_value <= max_value:
        raise UsageError(action, "", "min_value <= max_value", f"{min_value} and {max_value}")
    values = numbers(action, "scores", scores)
    if values.dim() != 1:
        raise UsageError(
            action, "", "scores of shape [E], one per trajectory", str(list(values.shape))
        )
    if not values.is_floating_point() or not isinstance(scores, (torch.Tensor, np.ndarray)):
        values = values.to(torch.float32)
    wrong = (~torch.isfinite(values)).nonzero()
    if len(wrong):
        place = int(wrong[0])
        raise UsageError(action, f"at index {place}", "finite scores", str(float(values[place])))
    return _MODES[mode](values.clamp(min_value, max_value) * scale)
