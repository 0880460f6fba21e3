"""Mini-batches from columns: shuffled rows, or padded trajectories for recurrent networks.

Rows are copied by one gather. Narrow columns are first packed side by side, so that a row of all
narrow columns is contiguous. A gather of each column takes twice as long: 105 instead of 50 ms for
20 mini-batches with T=24, N=4096 and nine fields of 832 bytes. Trajectories are sorted by env, then
by time, so that a range of envs is a range of trajectories.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch

from ..core import arguments
from ..core.fields import map_leaves, signed
from ..core.memory import BufferPool, lasting
from ..errors import SchemaError, UsageError

#: Columns with rows of at least this number of bytes are not packed. Without packing they are
#: gathered at memory speed, and without a second copy.
_WIDE_ROW_BYTES = 1024
#: Limit in place of `_WIDE_ROW_BYTES` if all rows are gathered once or twice, since packing then
#: saves less time. With T=24, N=4096 and nine fields of 832 bytes, one epoch takes 25 instead of
#: 34 ms and two epochs 44 instead of 49 ms. For three epochs there is no difference.
_WIDE_ROW_BYTES_TWICE = 128
#: Packed rows consist of units: numbers of the largest size that divides the row size of every
#: packed column. Dtype of a unit by its size in bytes. Most are floating dtypes, since torch
#: concatenates them fast. Copies keep every bit.
_UNITS = {8: torch.float64, 4: torch.float32, 2: torch.bfloat16, 1: torch.uint8}
_Empty = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


class Delivery:
    """Allocates results on the device of the storage and copies them to the device of the learner.

    Args:
        device: Device of the results before the copy. Results on the CPU use pinned memory if the
            copies go to CUDA, and otherwise reuse memory of earlier results.
        output_device: Device of the copies; None for `device`.
    """

    def __init__(self, device: torch.device, output_device: torch.device | None = None) -> None:
        self.device = device
        self.output_device = device if output_device is None else output_device
        self._pool = BufferPool(max_buffers=16)
        self._stream: torch.cuda.Stream | None = None

    @property
    def shared_device(self) -> torch.device:
        """Device whose streams may read memory that several mini-batches share.

        It is `output_device` if that is a CUDA device, and else `device`.
        """
        return self.output_device if self.output_device.type == "cuda" else self.device

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a result, on `device`."""
        if self.device.type != "cpu":
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        if self.output_device.type == "cuda":
            return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)
        return self._pool.empty(shape, dtype)

    def deliver(self, x: torch.Tensor) -> torch.Tensor:
        """Copy `x` to `output_device` on a separate stream; return `x` if it is there already."""
        if self.output_device.type != "cuda" or not x.is_cpu:
            return x.to(self.output_device)
        x = x.pin_memory()  # Returns pinned memory as it is.
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.output_device)  # type: ignore[no-untyped-call]
        consumer = torch.cuda.current_stream(self.output_device)
        with torch.cuda.stream(self._stream):
            moved = x.to(self.output_device, non_blocking=True)
        consumer.wait_stream(self._stream)
        moved.record_stream(consumer)
        return moved


class RowGather:
    """Copies rows of contiguous columns `[num_rows, ...]` by index, for mini-batches.

    The constructor packs narrow columns: it copies them side by side into one tensor. Each gather
    reads wide columns from their own memory, so they must not change between the gathers.

    Args:
        columns: Columns by name.
        delivery: Allocates the results and copies them to the device of the learner.
        num_gathers: Number of times that all rows are gathered. Packing pays for wider columns if
            it is large.
        count_changes: Function that returns the number of changes of the columns so far.
    """

    @lasting
    def __init__(
        self,
        columns: Mapping[str, torch.Tensor],
        delivery: Delivery,
        num_gathers: int,
        count_changes: Callable[[], int] = int,
    ) -> None:
        self._delivery = delivery
        self._count_changes = count_changes
        self._num_changes = count_changes()
        self._names = list(columns)
        limit = _WIDE_ROW_BYTES if num_gathers > 2 else _WIDE_ROW_BYTES_TWICE
        # Rows of 0 bytes count as wide: they cannot be viewed as another dtype.
        self._wide = {name: x for name, x in columns.items() if not 0 < _row_bytes(x) < limit}
        self._is_live = any(x.numel() for x in self._wide.values())
        # Columns are sorted by item size, largest first, so that each is aligned to its item size.
        narrow = [(name, x) for name, x in columns.items() if name not in self._wide]
        narrow.sort(key=lambda item: -item[1].element_size())
        #: The narrow columns side by side.
        self.packed = torch.empty(0, device=delivery.device)
        self._layout = [(name, x.dtype, x.shape[1:]) for name, x in narrow]
        if narrow:
            self.packed, self._widths = self._pack([x for _, x in narrow])

    def gather(self, index: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return `[len(index), ...]` of every column. Narrow columns are views of one new tensor.

        Raises:
            UsageError: Wide columns were changed since the construction.
        """
        if self._is_live and self._count_changes() != self._num_changes:
            raise UsageError(
                "the rollout was changed after the first mini-batch was drawn. Draw all "
                "mini-batches before you add steps."
            )
        gathered = {name: self._select(x, index) for name, x in self._wide.items()}
        if self._layout:
            parts = self._select(self.packed, index).split_with_sizes(self._widths, 1)
            for part, (name, dtype, shape) in zip(parts, self._layout, strict=False):
                typed = part if part.dtype is dtype else part.view(dtype)
                gathered[name] = typed if len(shape) == 1 else typed.view(len(index), *shape)
        return {name: gathered[name] for name in self._names}

    def _pack(self, columns: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
        """Copy columns side by side into one tensor of units; see `_UNITS`.

        The items of the first column are the largest. Rows are padded to a multiple of them, so
        that every item is aligned.

        Returns:
            The packed tensor `[num_rows, width]`, and the number of units per row of each column,
            then of the padding if there is any.
        """
        size = next(size for size in _UNITS if all(_row_bytes(x) % size == 0 for x in columns))
        parts = [_flat(x).view(_UNITS[size]) for x in columns]
        padding_bytes = -sum(map(_row_bytes, columns)) % columns[0].element_size()
        padding = padding_bytes // size
        if padding:
            parts.append(parts[0].new_zeros(len(parts[0]), padding))
        widths = [part.shape[1] for part in parts]
        packed = self._delivery.empty((len(parts[0]), sum(widths)), _UNITS[size])
        # Copying column by column takes 1.6 times as long.
        torch.cat(parts, 1, out=packed)
        return packed, widths

    def _select(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        flat = _flat(x)
        out = self._delivery.empty((len(index), flat.shape[1]), x.dtype)
        torch.index_select(flat, 0, index, out=out)
        return self._delivery.deliver(out.view(len(index), *x.shape[1:]))


def batch_bounds(
    num_items: int, item: str, num_mini_batches: int, num_epochs: int, drop_last: bool
) -> list[tuple[int, int]]:
    """Divide `range(num_items)` into mini-batches; return the bounds (start, stop) of each.

    With `drop_last`, all mini-batches have the same size, and the remainder is left out. Otherwise
    each item of the remainder makes one of the first mini-batches larger by one. Raises
    `UsageError` for invalid numbers.
    """
    arguments.whole("num_mini_batches", num_mini_batches, 1)
    arguments.whole("num_epochs", num_epochs, 1)
    if num_mini_batches > num_items:
        raise UsageError(
            f"num_mini_batches must be at most {num_items}, one {item} each, got "
            f"{num_mini_batches}."
        )
    size, remainder = divmod(num_items, num_mini_batches)
    num_longer = 0 if drop_last else remainder
    sizes = [size + (i < num_longer) for i in range(num_mini_batches)]
    return list(pairwise(accumulate(sizes, initial=0)))


def _row_bytes(x: torch.Tensor) -> int:
    return x.element_size() * x[:1].numel()


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.view(len(x), x[:1].numel())


# -- trajectories ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segments:
    """The positions of the trajectories of some envs in a `[T, B]` rollout."""

    #: Number of envs, B.
    num_envs: int
    #: bool `[T, n]`, False on padding, for n trajectories.
    masks: torch.Tensor
    #: `[n]` int64, row `t * B + b` of each trajectory's first step.
    starts: torch.Tensor
    #: Number of trajectories of all envs before each env, then the number of all trajectories:
    #: `num_envs + 1` numbers.
    bounds: list[int]

    @cached_property
    def source(self) -> torch.Tensor:
        """Row of the rollout for each position of the padded trajectories: int64 `[T * n]`.

        Positions on padding have an arbitrary row.
        """
        offset = torch.arange(len(self.masks), device=self.masks.device).unsqueeze(1)
        return torch.where(self.masks, self.starts + offset * self.num_envs, self.starts).flatten()

    def of_envs(self, start: int, stop: int) -> Segments:
        """Return the trajectories of a range of envs."""
        part = slice(self.bounds[start], self.bounds[stop])
        bounds = [bound - self.bounds[start] for bound in self.bounds[start : stop + 1]]
        return Segments(self.num_envs, self.masks[:, part], self.starts[part], bounds)


def true_places(mask: torch.Tensor, count: int) -> torch.Tensor:
    """Return the positions of the `count` True values of a bool tensor `[n]`, ascending.

    Unlike `nonzero`, this function does not wait for the device.
    """
    if mask.is_cpu:
        return mask.nonzero().squeeze(1)
    place = torch.where(mask, mask.cumsum(0) - 1, count)
    # The last entry receives the positions of all False values and is cut off.
    positions = torch.empty(count + 1, dtype=torch.int64, device=mask.device)
    return positions.scatter_(0, place, torch.arange(len(mask), device=mask.device))[:count]


def find_segments(dones: torch.Tensor) -> Segments:
    """Compute the positions of trajectories from `dones`.

    `dones` is `[T, B]` or `[T, B, 1]` of any dtype, not 0 on the last step of a trajectory.
    """
    arguments.instance("dones", dones, "a tensor", torch.Tensor)
    if dones.dim() == 3 and dones.shape[-1] == 1:
        dones = dones.squeeze(-1)
    if dones.dim() != 2 or not dones.numel():
        raise SchemaError(
            f"dones have shape {tuple(dones.shape)}, expected (T, B) or (T, B, 1) with at least "
            "one step of one environment."
        )
    num_steps, num_envs = dones.shape
    is_first = torch.ones(num_envs, num_steps, dtype=torch.bool, device=dones.device)
    is_first[:, 1:] = (dones[:-1] != 0).T
    # `tolist` is the only wait for the device.
    bounds = [0, *is_first.sum(1).cumsum(0).tolist()]
    # `first` is the index b * T + t of the first step of each trajectory.
    first = true_places(is_first.flatten(), bounds[-1])
    env = torch.div(first, num_steps, rounding_mode="floor")
    lengths = torch.diff(first, append=first.new_full((1,), num_envs * num_steps))
    masks = torch.arange(num_steps, device=dones.device).unsqueeze(1) < lengths
    return Segments(num_envs, masks, (first - env * num_steps) * num_envs + env, bounds)


def gather_padded(
    x: torch.Tensor, source: torch.Tensor, padding: torch.Tensor, empty: _Empty | None = None
) -> torch.Tensor:
    """Gather rows of `x`, and write zeros to the positions on padding.

    Args:
        x: `[T, B, *event]`.
        source: `[n]` int64, the row `t * B + b` of `x` for each position of the result.
        padding: `[m]` int64, the positions of the result that become zeros.
        empty: Function that allocates the result, which then has no gradients. None allocates
            memory through which gradients flow.

    Returns:
        `[n, *event]`.
    """
    flat = signed(x).reshape(len(x) * x.shape[1], x[:1, :1].numel())
    if empty is None:
        padded = flat.index_select(0, source)
    else:
        padded = empty((len(source), flat.shape[1]), flat.dtype)
        torch.index_select(flat, 0, source, out=padded)
    padded.index_fill_(0, padding, 0)
    return _as(x.dtype, padded).view(len(source), *x.shape[2:])


def split_and_pad_trajectories(x: Any, dones: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Split every env at its dones, and pad the trajectories to one length.

    Args:
        x: `[T, B, *event]` of any dtype, or a nested dict of such tensors.
        dones: `[T, B]` or `[T, B, 1]`, not 0 on the last step of a trajectory.

    Returns:
        `[T, n, *event]` with zeros after each trajectory's end, sorted by env and then by time, and
        `[T, n]` bool, True on data and False on padding. New tensors.
    """
    segments = find_segments(dones)
    num_steps = len(segments.masks)
    num_padded = segments.masks.numel() - num_steps * segments.num_envs
    padding = true_places(~segments.masks.flatten(), num_padded)

    def pad(leaf: torch.Tensor) -> torch.Tensor:
        _check_steps(leaf, num_steps, segments.num_envs)
        return gather_padded(leaf, segments.source, padding).view(
            *segments.masks.shape, *leaf.shape[2:]
        )

    return map_leaves(pad, x), segments.masks


def unpad_trajectories(padded: Any, masks: torch.Tensor) -> Any:
    """Join padded trajectories into envs: the inverse of `split_and_pad_trajectories`.

    Args:
        padded: `[T, n, *event]`, or a nested dict of such tensors, for example the output of a
            recurrent network.
        masks: `[T, n]` bool, the masks of `split_and_pad_trajectories`, or a range of their columns
            with all trajectories of some envs.

    Returns:
        `[T, B, *event]`; gradients flow through.

    Raises:
        SchemaError: The masks are not `[T, n]`, or do not add up to whole envs.
    """
    if not isinstance(masks, torch.Tensor) or masks.dim() != 2:
        is_tensor = isinstance(masks, torch.Tensor)
        form = f"shape {tuple(masks.shape)}" if is_tensor else type(masks).__name__
        raise SchemaError(f"masks must be a tensor of shape (T, n), got {form}.")
    num_steps, num_trajectories = masks.shape
    # The positions of data are sorted by trajectory, and thus by env and then by time.
    places = masks.T.flatten().nonzero().squeeze(1)
    if not len(places) or len(places) % num_steps:
        raise SchemaError(
            f"masks have {len(places)} True values, expected a multiple of {num_steps}, the "
            "number of steps."
        )
    trajectory = torch.div(places, num_steps, rounding_mode="floor")
    rows = (places - trajectory * num_steps) * num_trajectories + trajectory
    order = rows.view(-1, num_steps).T.flatten()

    def join(leaf: torch.Tensor) -> torch.Tensor:
        _check_steps(leaf, num_steps, num_trajectories)
        joined = signed(leaf).flatten(0, 1).index_select(0, order)
        return _as(leaf.dtype, joined).view(num_steps, -1, *leaf.shape[2:])

    return map_leaves(join, padded)


def _as(dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    # A view would lose the gradient, even a view as the same dtype.
    return x if x.dtype == dtype else x.view(dtype)


def _check_steps(x: Any, num_steps: int, num_columns: int) -> None:
    if not isinstance(x, torch.Tensor):
        raise SchemaError(
            f"x must be a tensor of shape ({num_steps}, {num_columns}, ...), got "
            f"{type(x).__name__}."
        )
    if tuple(x.shape[:2]) != (num_steps, num_columns):
        raise SchemaError(
            f"x has shape {tuple(x.shape)}, expected ({num_steps}, {num_columns}, ...)."
        )


@lasting
def env_groups(
    columns: Sequence[tuple[str, torch.Tensor, bool]],
    states: Sequence[torch.Tensor],
    dones: torch.Tensor,
    bounds: Sequence[tuple[int, int]],
    delivery: Delivery,
) -> list[tuple[dict[str, torch.Tensor], list[torch.Tensor], torch.Tensor]]:
    """Return the recurrent mini-batches of one epoch: ranges of envs, split at dones and padded.

    Columns are `[T, B, ...]`. Padded columns become `[T, n_traj, ...]`, all other columns
    `[T, envs, ...]`. States are `[T, layers, B, *H]`. Only the states at the first step of each
    trajectory are copied.

    Returns:
        Fields by name, flat tensors of the states, and masks of each mini-batch. All tensors are
        contiguous. Therefore `flatten(0, 1)`, the input of a network's first layer, is a view.
    """
    num_steps = len(dones)
    segments = find_segments(dones)
    parts = [segments.of_envs(start, stop) for start, stop in bounds]
    source = torch.cat([part.source for part in parts])
    sizes = {
        True: [x.masks.shape[1] for x in parts],
        False: [stop - start for start, stop in bounds],
    }
    num_padded = num_steps * (sum(sizes[True]) - sum(sizes[False]))
    padding = true_places(~torch.cat([part.masks.flatten() for part in parts]), num_padded)
    fields: list[dict[str, torch.Tensor]] = [{} for _ in bounds]
    for name, x, is_padded in columns:
        # All mini-batches of a column share one allocation, one after the other.
        if is_padded:
            groups = gather_padded(x, source, padding, delivery.empty)
        else:
            groups = delivery.empty((num_steps * sum(sizes[False]), *x.shape[2:]), x.dtype)
        split = groups.split_with_sizes([num_steps * size for size in sizes[is_padded]])
        for field, part, size, (start, stop) in zip(
            fields, split, sizes[is_padded], bounds, strict=True
        ):
            view = part.view(num_steps, size, *x.shape[2:])
            field[name] = delivery.deliver(view if is_padded else view.copy_(x[:, start:stop]))
    leaves = [[delivery.deliver(_first_states(x, part.starts)) for x in states] for part in parts]
    masks = [delivery.deliver(part.masks.contiguous()) for part in parts]
    return list(zip(fields, leaves, masks, strict=True))


def _first_states(x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Copy the states at first steps: `[layers, n_traj, *H]` from `[T, layers, B, *H]`."""
    _, num_layers, num_envs = x.shape[:3]
    step = torch.div(starts, num_envs, rounding_mode="floor")
    layer = torch.arange(num_layers, device=x.device).unsqueeze(1)
    index = (step * num_layers + layer) * num_envs + starts - step * num_envs
    return (
        x.flatten(0, 2).index_select(0, index.flatten()).view(num_layers, len(step), *x.shape[3:])
    )
