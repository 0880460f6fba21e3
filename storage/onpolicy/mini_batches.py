"""From columns to mini-batches: one permutation, few gathers, no row copied twice.

One rule: integers decide, a gather moves the bytes. Narrow fields are first laid side by side,
so that a row of all of them is one piece of memory; a gather of many narrow columns costs twice
as much (T=24, N=4096, nine fields of 832 bytes: 105 against 50 ms for 20 mini-batches).
What a mini-batch is called and which columns it has is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import torch

from ..core.arguments import whole
from ..core.delivery import Delivery
from ..core.modes import lasting
from ..core.work_split import WorkSplit
from ..errors import UsageError
from .padding import Segments, find_segments, pad

#: What could not be done, in every error about mini-batches.
GENERATE = "generate mini-batches"
#: Rows from this size on are gathered from their own column: at memory speed, and never copied twice.
WIDE_ROW_BYTES = 1024
#: The same where all rows are gathered only once or twice, so that laying them side by side must pay at once.
WIDE_ROW_BYTES_ONCE = 128
#: Dtypes of each size: bytes move as the largest that divides every field of a packed row. torch
#: has its fast concatenation for floating ones only; moved, not computed with, they keep every bit.
_UNITS = {8: torch.float64, 4: torch.float32, 2: torch.bfloat16, 1: torch.uint8}
#: Whoever asks for a mini-batch waits for it: a second thread makes large ones quicker, where there is a processor.
_splits = WorkSplit(2)
_MIN_SPLIT_BYTES, _NUM_PARTS = 4 << 20, 16


class RowGather:
    """Gather rows of several columns by index.

    Args:
        columns: Name -> contiguous `[num_rows, ...]` tensors on one device. They are read during
            the construction (narrow ones) and at each gather (wide ones).
        delivery: Where results get their memory, and where they go.
        wide_row_bytes: Columns with rows of this size or more are not packed.
        count_changes: Says how often the columns were changed so far.

    Raises:
        UsageError: From `gather`: wide columns were changed since the construction.
    """

    @lasting
    def __init__(
        self,
        columns: Mapping[str, torch.Tensor],
        delivery: Delivery,
        wide_row_bytes: int = WIDE_ROW_BYTES,
        count_changes: Callable[[], int] = int,
    ) -> None:
        self._delivery = delivery
        self._count_changes, self._num_changes = count_changes, count_changes()
        self._names = list(columns)
        # Rows of no bytes too: they have nothing to lie beside others, and no strides to be viewed as another dtype.
        self._wide = {name: x for name, x in columns.items() if not 0 < _row_bytes(x) < wide_row_bytes}
        self._is_live = any(x.numel() for x in self._wide.values())
        narrow = {name: x for name, x in columns.items() if name not in self._wide}
        self._layout: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
        self._widths: list[int] = []
        self._packed = self._pack(narrow) if narrow else None

    def gather(self, index: torch.Tensor) -> dict[str, torch.Tensor]:
        """Give `[len(index), ...]` of every column; narrow ones are strided views of one new tensor."""
        if self._is_live and self._count_changes() != self._num_changes:
            expected = "the rollout as it was when the first mini-batch was drawn"
            raise UsageError(GENERATE, "", expected, "one that was changed", "Draw all of them before you add steps")
        deliver = self._delivery.deliver
        found = {name: deliver(self._select(x, index)) for name, x in self._wide.items()}
        if self._packed is not None:
            rows = deliver(self._select(self._packed, index))
            for part, (name, dtype, shape) in zip(rows.split_with_sizes(self._widths, 1), self._layout, strict=False):
                typed = part if part.dtype is dtype else part.view(dtype)
                found[name] = typed if len(shape) == 1 else typed.view(len(index), *shape)
        return {name: found[name] for name in self._names}

    def _pack(self, columns: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Lay columns side by side, the largest items first, so that each stands aligned to its own size."""
        ordered = sorted(columns.items(), key=lambda item: -item[1].element_size())
        size = next(size for size in _UNITS if all(_row_bytes(x) % size == 0 for x in columns.values()))
        largest = max(x.element_size() for x in columns.values())
        width = sum(_row_bytes(x) for x in columns.values())
        width = -(-width // largest) * largest  # every row starts where the largest item may stand
        num_rows = len(ordered[0][1])
        parts = [_flat(x).view(_UNITS[size]) for _, x in ordered]
        padding = width // size - sum(part.shape[1] for part in parts)
        if padding:
            parts.append(parts[0].new_zeros(num_rows, padding))
        self._layout = [(name, x.dtype, tuple(x.shape[1:])) for name, x in ordered]
        self._widths = [part.shape[1] for part in parts]
        packed = self._delivery.empty((num_rows, width // size), _UNITS[size])

        def pack(low: int, high: int) -> None:  # one pass; copying column by column takes 1.6 times as long
            torch.cat([part[low:high] for part in parts], 1, out=packed[low:high])

        _in_parts(pack, packed, "pack")
        return packed

    def _select(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        flat = _flat(x)
        out = self._delivery.empty((len(index), flat.shape[1]), x.dtype)

        def select(low: int, high: int) -> None:
            torch.index_select(flat, 0, index[low:high], out=out[low:high])

        _in_parts(select, out, "select")
        return out if x.dim() == 2 else out.view(len(index), *x.shape[1:])


def _in_parts(function: Callable[[int, int], None], out: torch.Tensor, kind: str) -> None:
    """Call `function(low, high)` for ranges that cover the rows of `out`; in two threads where that was faster.

    Only what is large, and what torch does in one thread: with several it splits such calls by itself.
    """
    num_rows = len(out)
    if not out.is_cpu or out.nbytes < _MIN_SPLIT_BYTES or num_rows < _NUM_PARTS or torch.get_num_threads() > 1:
        function(0, num_rows)
        return
    mode = torch.is_inference_mode_enabled()

    def work(start: int, stop: int) -> None:
        with torch.inference_mode(mode):  # a thread has its own
            function(num_rows * start // _NUM_PARTS, num_rows * stop // _NUM_PARTS)

    _splits.run(work, _NUM_PARTS, out.nbytes, kind)


def wide_row_bytes(num_epochs: int) -> int:
    """From which size on rows are best gathered from their own column, if that happens so many times."""
    # T=24, N=4096, nine fields of 832 bytes, one epoch: 25 instead of 34 ms; two: 44 instead of 49; three: the same.
    return WIDE_ROW_BYTES if num_epochs > 2 else WIDE_ROW_BYTES_ONCE


def check_counts(num_mini_batches: int, num_epochs: int, num_items: int, item: str) -> None:
    """Refuse numbers of mini-batches and epochs that cannot be, before anything is generated."""
    for name, value in (("num_mini_batches", num_mini_batches), ("num_epochs", num_epochs)):
        whole(GENERATE, name, value, 1)
    if num_mini_batches > num_items:
        expected = f"num_mini_batches <= {num_items}, one {item} each"
        raise UsageError(GENERATE, "", expected, str(num_mini_batches), "Ask for fewer mini-batches")


def batch_bounds(num_rows: int, num_mini_batches: int, drop_last: bool) -> list[tuple[int, int]]:
    """Cut `range(num_rows)` into mini-batches, half-open.

    With `drop_last` all have `num_rows // num_mini_batches` rows and the remainder is left over;
    without, the first ones have one row more, so that none is.
    """
    size, remainder = divmod(num_rows, num_mini_batches)
    if drop_last:
        return [(i * size, (i + 1) * size) for i in range(num_mini_batches)]
    starts = [i * size + min(i, remainder) for i in range(num_mini_batches + 1)]
    return list(pairwise(starts))


def permutation(num_rows: int, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    """Draw a permutation on the generator's device and give it as an index on `device`."""
    # int32 halves the cost of drawing: 0.3 instead of 0.7 ms for 100,000 rows.
    dtype = torch.int32 if num_rows < 2**31 else torch.int64
    drawn = torch.randperm(num_rows, generator=generator, device=generator.device, dtype=dtype)
    return drawn.to(device)


def row_batches(
    gather: RowGather,
    bounds: list[tuple[int, int]],
    num_rows: int,
    num_epochs: int,
    generator: torch.Generator,
    device: torch.device,
    once: bool,
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield every mini-batch of every epoch; with `once`, views of one shuffled copy."""
    shuffled: dict[str, torch.Tensor] | None = None
    for _ in range(num_epochs):
        if once and shuffled is None:
            shuffled = lasting(gather.gather)(permutation(num_rows, generator, device))
        index = None if once else permutation(num_rows, generator, device)
        for start, stop in bounds:
            if shuffled is not None:
                yield {name: x[start:stop] for name, x in shuffled.items()}
            else:
                assert index is not None
                yield gather.gather(index[start:stop])


class EnvGroups:
    """Recurrent mini-batches: whole envs, cut at dones and padded, computed once for all epochs.

    Args:
        padded: Name -> `[T, B, ...]`, what the network reads: becomes `[T, n_traj, ...]`.
        whole: Name -> `[T, B, ...]`, what only the loss reads: stays `[T, envs, ...]`.
        states: `[T, layers, B, *H]` leaves; become those of each trajectory's first step.
        dones: `[T, B, 1]`.
        delivery: Where results get their memory, and where they go.
    """

    @lasting
    def __init__(
        self,
        padded: Mapping[str, torch.Tensor],
        whole: Mapping[str, torch.Tensor],
        states: Sequence[torch.Tensor],
        dones: torch.Tensor,
        delivery: Delivery,
    ) -> None:
        self.segments = find_segments(dones)
        empty, deliver = delivery.empty, delivery.deliver
        self._padded = {name: deliver(pad(x, self.segments, empty)) for name, x in padded.items()}
        self._whole = {name: deliver(empty(x.shape, x.dtype).copy_(x)) for name, x in whole.items()}
        self._states = [deliver(first_states(x, self.segments)) for x in states]
        self._masks = deliver(self.segments.masks)

    def group(self, start: int, stop: int) -> tuple[dict[str, torch.Tensor], list[torch.Tensor], torch.Tensor]:
        """Give the batch of envs `start` to `stop`: fields by name, leaves of the states, masks."""
        first, last = self.segments.bounds[start], self.segments.bounds[stop]
        fields = {name: x[:, first:last] for name, x in self._padded.items()}
        fields.update((name, x[:, start:stop]) for name, x in self._whole.items())
        states = [x[:, first:last].contiguous() for x in self._states]
        return fields, states, self._masks[:, first:last]


def first_states(x: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Pick from `[T, layers, B, *H]` the states at each trajectory's first step: `[layers, n_traj, *H]`."""
    _, num_layers, num_envs = x.shape[:3]
    step = torch.div(segments.starts, num_envs, rounding_mode="floor")
    env = segments.starts - step * num_envs
    layer = torch.arange(num_layers, device=x.device).unsqueeze(1)
    index = (step * num_layers + layer) * num_envs + env
    picked = x.flatten(0, 2).index_select(0, index.flatten())
    return picked.view(num_layers, len(step), *x.shape[3:])


def _row_bytes(x: torch.Tensor) -> int:
    return x.element_size() * x[:1].numel()


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x.view(len(x), x[:1].numel())
