"""From columns to mini-batches: one permutation, few gathers, no row copied twice.

One rule: all rows are chosen by index and moved by one gather. Narrow fields are first laid side by side, so that a
row of all of them is one piece of memory; a gather of many narrow columns costs twice as much (T=24, N=4096, nine
fields of 832 bytes: 105 against 50 ms for 20 mini-batches). What a mini-batch is called and which columns it has is
decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

import torch

from ..core.arguments import whole
from ..core.devices import Delivery
from ..core.memory import lasting
from ..errors import UsageError
from .padding import find_segments, gather_padded

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
        self._count_changes, self._num_changes = count_changes, count_changes()
        self._names = list(columns)
        limit = _WIDE_ROW_BYTES if num_gathers > 2 else _WIDE_ROW_BYTES_TWICE
        # Rows of no bytes too: they have nothing to lie beside others, and no strides to be viewed as another dtype.
        self._wide = {name: x for name, x in columns.items() if not 0 < _row_bytes(x) < limit}
        self._is_live = any(x.numel() for x in self._wide.values())
        # The largest items first, so that each stands aligned to its own size.
        narrow = [(name, x) for name, x in columns.items() if name not in self._wide]
        narrow.sort(key=lambda item: -item[1].element_size())
        self._layout = [(name, x.dtype, x.shape[1:]) for name, x in narrow]
        if narrow:
            self._packed, self._widths = self._pack([x for _, x in narrow])

    def gather(self, index: torch.Tensor) -> dict[str, torch.Tensor]:
        """Give `[len(index), ...]` of every column; narrow ones are strided views of one new tensor.

        Raises:
            UsageError: Wide columns were changed since the construction.
        """
        if self._is_live and self._count_changes() != self._num_changes:
            expected = "the rollout as it was when the first mini-batch was drawn"
            raise UsageError(GENERATE, "", expected, "one that was changed", "Draw all of them before you add steps")
        found = {name: self._select(x, index) for name, x in self._wide.items()}
        if self._layout:
            parts = self._select(self._packed, index).split_with_sizes(self._widths, 1)
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
    whole(GENERATE, "num_mini_batches", num_mini_batches, 1)
    whole(GENERATE, "num_epochs", num_epochs, 1)
    if num_mini_batches > num_items:
        expected = f"num_mini_batches <= {num_items}, one {item} each"
        raise UsageError(GENERATE, "", expected, str(num_mini_batches), "Ask for fewer mini-batches")
    size, remainder = divmod(num_items, num_mini_batches)
    num_longer = 0 if drop_last else remainder
    return list(pairwise(accumulate((size + (i < num_longer) for i in range(num_mini_batches)), initial=0)))


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
    num_steps, segments = len(dones), find_segments(dones)
    parts = [segments.of_envs(start, stop) for start, stop in bounds]
    source = torch.cat([part.source for part in parts])
    padding = (~torch.cat([part.masks.flatten() for part in parts])).nonzero().squeeze(1)
    sizes = {True: [x.masks.shape[1] for x in parts], False: [stop - start for start, stop in bounds]}
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


def _row_bytes(x: torch.Tensor) -> int:
    return x.element_size() * x[:1].numel()


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.view(len(x), x[:1].numel())
