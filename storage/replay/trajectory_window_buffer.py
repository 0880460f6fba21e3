"""`TrajectoryDictBufferMultiDim`: ring sampled as windows. `motion_priorities`: episode weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ..core import arguments
from ..core.fields import Schema
from ..core.memory import on_device
from ..core.records import Key, RecordReader, flat_name, numbers
from ..errors import SchemaError, UsageError
from ..ring.row_store import RowOptions
from ..ring.trajectory_ends import Places, end_places
from ..ring.window_sampler import WindowRequest, draw_windows, list_windows
from ..saving.buffer_store import KEY_SEPARATOR
from .dict_buffer import DictBuffer

#: Default end flags. Fields missing from the rows are ignored.
DEFAULT_END_KEYS = ("terminated", "truncated", "done", "time_outs")


class TrajectoryDictBufferMultiDim(DictBuffer):
    """Ring buffer of rows of one or many environments, sampled as windows of consecutive rows.

    Args:
        capacity: Number of rows, per lane if `n_dim=2`. A lane is the stream of one environment.
        device: Device of the rows.
        n_dim: 1 for leaves `[n, *event]`, the consecutive steps of one environment; 2 for
            `[n, lanes, *event]`. The first `extend` fixes the number of lanes.
        seq_length: Default number of rows of a window.
        output_key_t: Fields to return from every row of a window.
        output_key_tp1: Fields to return from the row after each row, below `next`; [] for none.
        end_key: Fields that end a trajectory in a row with any value other than 0: a name, a tuple
            of nested names, or a list of names and tuples. None for terminated, truncated, done and
            time_outs, if rows have these fields.
        start_mode: "uniform" draws uniformly from all valid windows. "trajectory" draws a
            trajectory uniformly, then one of its windows.
        at_end: Treatment of windows whose last row ends a trajectory, if no final observation was
            passed to `extend`. The next row of such a window is unknown. "exclude" never draws such
            windows. "mark" draws them, repeats the last row as the next row, and adds the field
            `next_valid`, `[rows, 1]` bool.
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
        nested_key_separator: str = KEY_SEPARATOR,
        auto_unsqueeze: bool = False,
        narrow: bool = False,
        contiguous: bool = False,
        output_device: torch.device | str | None = None,
        generator: torch.Generator | int | None = None,
        num_envs: int = 1,
    ) -> None:
        arguments.choice("n_dim", n_dim, (1, 2))
        arguments.choice("start_mode", start_mode, ("uniform", "trajectory"))
        arguments.choice("at_end", at_end, ("exclude", "mark"))
        if arguments.whole("num_envs", num_envs, 1) != 1:
            raise UsageError(
                f"num_envs must be 1, got {num_envs!r}. Pass n_dim=2 for several environments."
            )
        check_length(seq_length)
        if seq_length > arguments.whole("capacity", capacity, 1):
            raise UsageError(
                f"seq_length must be at most the capacity of {capacity}, got {seq_length}."
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
        """Draw windows of consecutive rows with replacement.

        Args:
            batch_size: Total number of rows, a multiple of the window length.
            seq_length: Number of rows of a window; None for `seq_length` of the buffer.

        Returns:
            Fields of `output_key_t` and, below `next`, fields of `output_key_tp1` one row later,
            each `[batch_size, *event]`. Windows follow one another, time fastest. The tensors are
            copies.

        Raises:
            UsageError: `batch_size` is not a multiple of the window length, or no window is valid.
            BufferEmptyError: The buffer has no rows.
        """
        length = self.seq_length if seq_length is None else seq_length
        num_windows = count_windows(batch_size, length)
        with self._lock:
            self._filled()
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
        """Copy every row with a following row in its trajectory, in the layout of `sample`.

        Rows are ordered lane by lane, oldest first, for both values of `order`.
        `DictBuffer.get_full_buffer(buffer)` returns all slots instead.

        Raises:
            UsageError: `order` is not "ring" or "time", or `copy` is False.
        """
        copy = arguments.flag("copy", copy)
        if order not in ("ring", "time") or not copy:
            raise UsageError(
                f"order must be 'ring' or 'time', with copy=True, got {order!r} and copy={copy}."
            )
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

    def _in_public_shape(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.n_dim == 2 else rows.squeeze(1)

    def _public_index(self, slots: torch.Tensor, lanes: torch.Tensor) -> Any:
        return (slots, lanes) if self.n_dim == 2 else slots

    def _row_options(self) -> RowOptions:
        keeps_segments = self.start_mode == "trajectory"
        find_ends = partial(_end_flags, end_key=self.end_key)
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


def _end_flags(schema: Schema, end_key: str | list[str] | None) -> Places:
    """Return the fields of a schema that mark the last row of a trajectory.

    If `end_key` is None, these are the fields of the schema with a name in `DEFAULT_END_KEYS`.
    """
    if end_key is not None:
        return end_places(schema, end_key)
    names = [name for name in DEFAULT_END_KEYS if name in schema]
    if not names:
        raise SchemaError(
            f"the rows have no end flag ({', '.join(DEFAULT_END_KEYS)}) among their fields "
            f"{', '.join(schema)}. Pass end_key."
        )
    return end_places(schema, names)


def as_list(keys: Sequence[Key], argument: str) -> list[str]:
    """Return keys as a list of flat names. A str becomes a list with one name."""
    listed = [keys] if isinstance(keys, str) else keys
    arguments.instance(argument, listed, "a list of names", Iterable)
    return [flat_name(key, argument) for key in listed]


def check_length(length: Any) -> int:
    """Return a window length as an int. Raises `UsageError` if it is not an integer >= 1."""
    return arguments.whole("seq_length", length, 1)


def count_windows(batch_size: int, length: int) -> int:
    """Return the number of windows of `length` rows in `batch_size` rows."""
    length = check_length(length)
    if not arguments.is_whole(batch_size) or batch_size < length or batch_size % length:
        raise UsageError(
            f"batch_size must be a multiple of seq_length {length}, got {batch_size!r}."
        )
    return int(batch_size) // length


def _one_over_bin_size(scores: torch.Tensor) -> torch.Tensor:
    bins = scores.floor()
    ordered = bins.sort().values
    # `torch.unique` would make the host wait for a GPU.
    sizes = torch.searchsorted(ordered, bins, right=True) - torch.searchsorted(ordered, bins)
    return 1.0 / sizes.to(scores.dtype)


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
        scores: Tracking error per episode, `[E]`, for example an earth mover's distance.
        mode: Function of x = scale * clamp(score, min_value, max_value). "exp": the priority is
            2 ** x. "bin": episodes are grouped into bins by floor(x), and all bins are equally
            likely. None: the priority is x.
        min_value, max_value: Limits to which scores are clamped.
        scale: Factor after clamping.

    Returns:
        Priorities `[E]`, not normalized: a new tensor on the device of the scores, with their
        floating dtype (float32 for integers and lists). On a GPU, the priority of a score that is
        not finite is NaN; see `update_priorities`.

    Raises:
        UsageError: A score on the CPU is not finite, or an argument is invalid.
    """
    arguments.choice("mode", mode, _MODES)
    for name, number in (("min_value", min_value), ("max_value", max_value), ("scale", scale)):
        arguments.real(name, number, "a number", lambda x: True)
    if not min_value <= max_value:
        raise UsageError(f"min_value must be at most max_value, got {min_value} and {max_value}.")
    values = numbers("scores", scores)
    if values.dim() != 1:
        raise UsageError(
            f"scores has shape {list(values.shape)}, expected [E], a score for each trajectory."
        )
    if not values.is_floating_point() or not isinstance(scores, (torch.Tensor, np.ndarray)):
        values = values.to(torch.float32)
    is_finite = torch.isfinite(values)
    if not values.is_cuda and not is_finite.all():
        place = int((~is_finite).nonzero()[0])
        raise UsageError(f"scores must be finite, got {float(values[place])} at index {place}.")
    priorities = _MODES[mode](values.clamp(min_value, max_value) * scale)
    return priorities.where(is_finite, torch.nan) if values.is_cuda else priorities
