"""From columns to mini-batches: shuffled rows for feed-forward networks, trajectories side by side for recurrent ones.

One rule: rows are chosen by index and moved by one gather. Narrow fields are first laid side by side, so that a row of
all of them is one piece of memory; a gather of many narrow columns costs twice as much (T=24, N=4096, nine fields of
832 bytes: 105 against 50 ms for 20 mini-batches). Trajectories stand env by env, then in time, so that those of a range
of envs are a range of trajectories. What a mini-batch is called and which columns it has is decided elsewhere.
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

#: What could not be done, in every error about mini-batches.
GENERATE = "generate mini-batches"
#: Rows from this size on are gathered from their own column: at memory speed, and never copied twice.
_WIDE_ROW_BYTES = 1024
#: The same where all rows are gathered once or twice: laying them side by side must pay at once. T=24, N=4096, nine
#: fields of 832 bytes, one epoch: 25 instead of 34 ms; two: 44 instead of 49; three: the same.
_WIDE_ROW_BYTES_TWICE = 128
#: Dtypes of each size: bytes move as the largest that divides every field of a packed row. torch
#: has its fast concatenation for floating ones only; moved, not computed with, they keep every bit.
_UNITS = {8: torch.float64, 4: torch.float32, 2: torch.bfloat16, 1: torch.uint8}
_Empty = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


class Delivery:
    """Memory for results on one device, which are wanted on another or on the same.

    Args:
        device: Where results are made. On the CPU their memory is pinned for CUDA, else from a pool.
        output_device: Where they are wanted; None for the same.
    """

    def __init__(self, device: torch.device, output_device: torch.device | None = None) -> None:
        self.device = device
        self.output_device = device if output_device is None else output_device
        self._pool = BufferPool(max_buffers=16)
        self._stream: torch.cuda.Stream | None = None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a result, on `device`."""
        if self.device.type != "cpu":
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        if self.output_device.type == "cuda":
            return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)
        return self._pool.empty(shape, dtype)

    def deliver(self, x: torch.Tensor) -> torch.Tensor:
        """Bring a result to `output_device`, on a stream of its own; `x` itself if it is there."""
        if x.device == self.output_device:
            return x
        if self.output_device.type != "cuda" or not x.is_pinned():
            return x.to(self.output_device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.output_device)  # type: ignore[no-untyped-call]
        consumer = torch.cuda.current_stream(self.output_device)
        with torch.cuda.stream(self._stream):
            moved = x.to(self.output_device, non_blocking=True)
        consumer.wait_stream(self._stream)
        moved.record_stream(consumer)
        return moved


class RowGather:
    """Gather rows of contiguous columns `[num_rows, ...]` by index, each of them `num_gathers` times.

    Narrow columns are read once, here, and wide ones at each gather: then `count_changes` must say the same number.
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
        # Rows of no bytes too: they have nothing to lie beside others, and no strides to be viewed as another dtype.
        self._wide = {name: x for name, x in columns.items() if not 0 < _row_bytes(x) < limit}
        self._is_live = any(x.numel() for x in self._wide.values())
        # The largest items first, so that each stands aligned to its own size.
        narrow = [(name, x) for name, x in columns.items() if name not in self._wide]
        narrow.sort(key=lambda item: -item[1].element_size())
        #: The narrow columns side by side.
        self.packed = torch.empty(0, device=delivery.device)
        self._layout = [(name, x.dtype, x.shape[1:]) for name, x in narrow]
        if narrow:
            self.packed, self._widths = self._pack([x for _, x in narrow])

    def gather(self, index: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return `[len(index), ...]` of every column; narrow ones are strided views of one new tensor.

        Raises:
            UsageError: Wide columns were changed since the construction.
        """
        if self._is_live and self._count_changes() != self._num_changes:
            expected = "the rollout as it was when the first mini-batch was drawn"
            raise UsageError(GENERATE, "", expected, "one that was changed", "Draw all of them before you add steps")
        found = {name: self._select(x, index) for name, x in self._wide.items()}
        if self._layout:
            parts = self._select(self.packed, index).split_with_sizes(self._widths, 1)
            for part, (name, dtype, shape) in zip(parts, self._layout, strict=False):
                typed = part if part.dtype is dtype else part.view(dtype)
                found[name] = typed if len(shape) == 1 else typed.view(len(index), *shape)
        return {name: found[name] for name in self._names}

    def _pack(self, columns: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
        """Lay columns side by side, in units of one size; every row starts where the largest item may stand.

        Give them, and the width of each column and of the padding behind them.
        """
        size = next(size for size in _UNITS if all(_row_bytes(x) % size == 0 for x in columns))
        parts = [_flat(x).view(_UNITS[size]) for x in columns]
        if padding := -sum(map(_row_bytes, columns)) % columns[0].element_size() // size:
            parts.append(parts[0].new_zeros(len(parts[0]), padding))
        widths = [part.shape[1] for part in parts]
        packed = self._delivery.empty((len(parts[0]), sum(widths)), _UNITS[size])
        torch.cat(parts, 1, out=packed)  # in one pass; copying column by column takes 1.6 times as long
        return packed, widths

    def _select(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        flat = _flat(x)
        out = self._delivery.empty((len(index), flat.shape[1]), x.dtype)
        torch.index_select(flat, 0, index, out=out)
        return self._delivery.deliver(out.view(len(index), *x.shape[1:]))


def batch_bounds(
    num_items: int, item: str, num_mini_batches: int, num_epochs: int, drop_last: bool
) -> list[tuple[int, int]]:
    """Cut `range(num_items)` into mini-batches, half-open; refuse numbers that cannot be.

    With `drop_last` all have the same size and the remainder is left over; without, the first ones have one item more.
    """
    arguments.whole(GENERATE, "num_mini_batches", num_mini_batches, 1)
    arguments.whole(GENERATE, "num_epochs", num_epochs, 1)
    if num_mini_batches > num_items:
        expected = f"num_mini_batches <= {num_items}, one {item} each"
        raise UsageError(GENERATE, "", expected, str(num_mini_batches), "Ask for fewer mini-batches")
    size, remainder = divmod(num_items, num_mini_batches)
    num_longer = 0 if drop_last else remainder
    return list(pairwise(accumulate((size + (i < num_longer) for i in range(num_mini_batches)), initial=0)))


def _row_bytes(x: torch.Tensor) -> int:
    return x.element_size() * x[:1].numel()


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.view(len(x), x[:1].numel())


# -- trajectories ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segments:
    """Where the trajectories of some envs of a `[T, B]` rollout stand."""

    #: B.
    num_envs: int
    #: `[T, n]` bool, False on padding.
    masks: torch.Tensor
    #: `[n]` int64, row `t * B + b` of each trajectory's first step.
    starts: torch.Tensor
    #: Trajectories before each env, and all of them.
    bounds: list[int]

    @cached_property
    def source(self) -> torch.Tensor:
        """`[T * n]` int64, the row that each padded place shows; any row on padding."""
        offset = torch.arange(len(self.masks), device=self.masks.device).unsqueeze(1)
        return torch.where(self.masks, self.starts + offset * self.num_envs, self.starts).flatten()

    def of_envs(self, start: int, stop: int) -> Segments:
        """Return the trajectories of a range of envs."""
        part = slice(self.bounds[start], self.bounds[stop])
        bounds = [bound - self.bounds[start] for bound in self.bounds[start : stop + 1]]
        return Segments(self.num_envs, self.masks[:, part], self.starts[part], bounds)


def true_places(mask: torch.Tensor, count: int) -> torch.Tensor:
    """Return the places of the `count` True values of `[n]` bool in order; on a device `nonzero` would wait."""
    if mask.is_cpu:
        return mask.nonzero().squeeze(1)
    place = torch.where(mask, mask.cumsum(0) - 1, count)
    found = torch.empty(count + 1, dtype=torch.int64, device=mask.device)  # the last one takes the places of False
    return found.scatter_(0, place, torch.arange(len(mask), device=mask.device))[:count]


def find_segments(dones: torch.Tensor) -> Segments:
    """Find the trajectories of `dones` `[T, B]` or `[T, B, 1]` of any dtype, not 0 on a last step."""
    arguments.instance("split trajectories", "dones", dones, "as a tensor", torch.Tensor)
    if dones.dim() == 3 and dones.shape[-1] == 1:
        dones = dones.squeeze(-1)
    if dones.dim() != 2 or not dones.numel():
        expected = "dones of shape [T, B] or [T, B, 1], at least one step of one env"
        raise SchemaError("split trajectories", "", expected, str(list(dones.shape)))
    num_steps, num_envs = dones.shape
    is_first = torch.ones(num_envs, num_steps, dtype=torch.bool, device=dones.device)
    is_first[:, 1:] = (dones[:-1] != 0).T
    bounds = [0, *is_first.sum(1).cumsum(0).tolist()]  # on a device this waits, and is the only wait
    first = true_places(is_first.flatten(), bounds[-1])  # b * T + t
    env = torch.div(first, num_steps, rounding_mode="floor")
    lengths = torch.diff(first, append=first.new_full((1,), num_envs * num_steps))
    masks = torch.arange(num_steps, device=dones.device).unsqueeze(1) < lengths
    return Segments(num_envs, masks, (first - env * num_steps) * num_envs + env, bounds)


def gather_padded(
    x: torch.Tensor, source: torch.Tensor, padding: torch.Tensor, empty: _Empty | None = None
) -> torch.Tensor:
    """Gather rows `source` of `[T, B, *event]`, with zeros at the places `padding`: `[len(source), *event]`.

    Gradients flow through, unless `empty` gives the memory of the result.
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
    """Split every env at its dones and lay the trajectories side by side.

    Args:
        x: `[T, B, *event]` of any dtype, or a nested dict of such.
        dones: `[T, B]` or `[T, B, 1]`, not 0 on the last step of a trajectory.

    Returns:
        `[T, n, *event]` with zeros after each trajectory's end, env by env and then in time, and
        `[T, n]` bool that is True where there is data. New tensors.
    """
    segments = find_segments(dones)
    num_steps = len(segments.masks)
    num_padded = segments.masks.numel() - num_steps * segments.num_envs
    padding = true_places(~segments.masks.flatten(), num_padded)

    def pad(leaf: torch.Tensor) -> torch.Tensor:
        _check_steps("split trajectories", leaf, num_steps, segments.num_envs)
        return gather_padded(leaf, segments.source, padding).view(*segments.masks.shape, *leaf.shape[2:])

    return map_leaves(pad, x), segments.masks


def unpad_trajectories(padded: Any, masks: torch.Tensor) -> Any:
    """Undo `split_and_pad_trajectories`.

    Args:
        padded: `[T, n, *event]`, or a nested dict of such; what a recurrent network gives back too.
        masks: `[T, n]` bool from the split, or a range of its trajectories that covers whole envs.

    Returns:
        `[T, B, *event]`; gradients flow through.

    Raises:
        SchemaError: The masks are not `[T, n]`, or do not add up to whole envs.
    """
    if not isinstance(masks, torch.Tensor) or masks.dim() != 2:
        got = str(list(masks.shape)) if isinstance(masks, torch.Tensor) else type(masks).__name__
        raise SchemaError("join trajectories", "", "masks of shape [T, n]", got)
    num_steps, num_trajectories = masks.shape
    # The true places trajectory by trajectory, which is env by env and in time.
    places = masks.T.flatten().nonzero().squeeze(1)
    if not len(places) or len(places) % num_steps:
        expected = f"masks with a multiple of {num_steps} True values"
        raise SchemaError("join trajectories", "", expected, str(len(places)))
    trajectory = torch.div(places, num_steps, rounding_mode="floor")
    rows = (places - trajectory * num_steps) * num_trajectories + trajectory
    order = rows.view(-1, num_steps).T.flatten()

    def join(leaf: torch.Tensor) -> torch.Tensor:
        _check_steps("join trajectories", leaf, num_steps, num_trajectories)
        joined = signed(leaf).flatten(0, 1).index_select(0, order)
        return _as(leaf.dtype, joined).view(num_steps, -1, *leaf.shape[2:])

    return map_leaves(join, padded)


def _as(dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == dtype else x.view(dtype)  # no gradient flows through a view as the same dtype either


def _check_steps(action: str, x: Any, num_steps: int, num_columns: int) -> None:
    if not isinstance(x, torch.Tensor):
        raise SchemaError(action, "", f"x as a tensor of shape [{num_steps}, {num_columns}, ...]", type(x).__name__)
    if tuple(x.shape[:2]) != (num_steps, num_columns):
        raise SchemaError(action, "", f"a tensor of shape [{num_steps}, {num_columns}, ...]", str(list(x.shape)))


@lasting
def env_groups(
    columns: Sequence[tuple[str, torch.Tensor, bool]],
    states: Sequence[torch.Tensor],
    dones: torch.Tensor,
    bounds: Sequence[tuple[int, int]],
    delivery: Delivery,
) -> list[tuple[dict[str, torch.Tensor], list[torch.Tensor], torch.Tensor]]:
    """Make the recurrent mini-batches of one epoch: ranges of envs, cut at dones and padded.

    Columns are `[T, B, ...]`; padded ones become `[T, n_traj, ...]`, others stay `[T, envs, ...]`. States `[T, layers,
    B, *H]` become those of each trajectory's first step. Gives for each mini-batch fields by name, leaves of the
    states, and masks; all contiguous, so that `flatten(0, 1)` is a view, as the first layer of a network wants it.
    """
    num_steps = len(dones)
    segments = find_segments(dones)
    parts = [segments.of_envs(start, stop) for start, stop in bounds]
    source = torch.cat([part.source for part in parts])
    sizes = {True: [x.masks.shape[1] for x in parts], False: [stop - start for start, stop in bounds]}
    num_padded = num_steps * (sum(sizes[True]) - sum(sizes[False]))
    padding = true_places(~torch.cat([part.masks.flatten() for part in parts]), num_padded)
    fields: list[dict[str, torch.Tensor]] = [{} for _ in bounds]
    for name, x, is_padded in columns:  # all groups of a column in one piece of memory, one after the other
        if is_padded:
            made = gather_padded(x, source, padding, delivery.empty)
        else:
            made = delivery.empty((num_steps * sum(sizes[False]), *x.shape[2:]), x.dtype)
        split = made.split_with_sizes([num_steps * size for size in sizes[is_padded]])
        for field, part, size, (start, stop) in zip(fields, split, sizes[is_padded], bounds, strict=True):
            view = part.view(num_steps, size, *x.shape[2:])
            field[name] = delivery.deliver(view if is_padded else view.copy_(x[:, start:stop]))
    leaves = [[delivery.deliver(_first_states(x, part.starts)) for x in states] for part in parts]
    return list(zip(fields, leaves, [delivery.deliver(x.masks.contiguous()) for x in parts], strict=True))


def _first_states(x: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Pick from `[T, layers, B, *H]` the states at each trajectory's first step: `[layers, n_traj, *H]`."""
    _, num_layers, num_envs = x.shape[:3]
    step = torch.div(starts, num_envs, rounding_mode="floor")
    layer = torch.arange(num_layers, device=x.device).unsqueeze(1)
    index = (step * num_layers + layer) * num_envs + starts - step * num_envs
    return x.flatten(0, 2).index_select(0, index.flatten()).view(num_layers, len(step), *x.shape[3:])
