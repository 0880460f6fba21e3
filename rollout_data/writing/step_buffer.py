"""Step buffers: the staged values of a block, as they came in, and the rows that are made of them.

One rule: a step is copied once, in the order in which it came, which is the cheapest way to leave
the caller; the rows of a trajectory are brought together only when a block is written, by the
thread that writes it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from storage.codecs.codecs import codec_of
from storage.codecs.quantizers import image_error
from storage.core.buffer_pool import BufferPool
from storage.core.work_split import WorkSplit

from ..format.schema import Column, RowLayout

#: Whoever adds many steps at once waits for the copy: a second thread makes it quicker, where there is a processor.
_splits = WorkSplit(2)
_MIN_SPLIT_BYTES = 4 << 20


class StepBuffer:
    """The stored values of all fields of a table while they grow: field -> `[capacity, *lead, *shape]`.

    Args:
        layout: Of the table's rows.
        lead: `(num_envs,)` for steps of all envs; `()` for single rows.
        capacity: How many steps there is room for at first.
        pool: Where the memory comes from.

    Attributes:
        arrays: Field -> its stored values as an array, the unused steps included.
        max_errors: Field -> largest error that its codec made of the values put so far, where it loses.
    """

    def __init__(self, layout: RowLayout, lead: tuple[int, ...], capacity: int, pool: BufferPool) -> None:
        self.layout = layout
        self.lead = lead
        self.capacity = 0
        self._pool = pool
        self.max_errors: dict[str, float] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self.arrays: dict[str, np.ndarray] = {}
        self._flat: dict[str, np.ndarray] = {}
        self.reserve(capacity)

    def reserve(self, capacity: int, used: int = 0) -> None:
        """Make room for `capacity` steps, keeping the first `used`."""
        if capacity <= self.capacity:
            return
        for name, field in self.layout.stored.items():
            tensor = self._pool.empty((capacity, *self.lead, *field.shape), field.torch_dtype)
            if used:
                tensor[:used] = self._tensors[name][:used]
            self._tensors[name], self.arrays[name] = tensor, as_array(tensor)
            self._flat[name] = self.arrays[name].reshape(capacity, -1)
        self.capacity = capacity

    def put(self, start: int, fields: Mapping[str, torch.Tensor | np.ndarray]) -> None:
        """Copy `[T, *lead, *shape]` of every field to the steps from `start` on; coded, unless it is an array."""
        num_steps = len(next(iter(fields.values())))
        if not num_steps:
            return
        if num_steps == 1:  # without more ado: its code comes from memory when an environment has computed meanwhile
            for name, values in fields.items():
                source = values if type(values) is np.ndarray else self._coded(name, values)
                if source.flags.c_contiguous:
                    self._flat[name][start] = source.reshape(-1)
                else:
                    self.arrays[name][start] = source[0]
            return
        pairs = [self._pair(name, start, self._coded(name, values)) for name, values in fields.items()]

        # numpy, not torch: with two threads and a busy neighbour torch's copies took 4 ms instead of 0.2.
        def copy(low: int, high: int) -> None:
            for target, source in pairs:
                np.copyto(target[low:high], source[low:high], casting="no")

        num_bytes = sum(source.nbytes for _, source in pairs)
        if num_bytes >= _MIN_SPLIT_BYTES:
            _splits.run(copy, num_steps, num_bytes)
        else:
            copy(0, num_steps)

    def _pair(self, name: str, start: int, source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Give the steps from `start` on and what goes there, where possible with one axis for each step's values.

        So numpy copies a step at a time, which took 5 ms for 50 MB: rows of envs took 6, as did all at once.
        """
        stop = start + len(source)
        if not source.flags.c_contiguous:
            return self.arrays[name][start:stop], source
        return self._flat[name][start:stop], source.reshape(len(source), -1)

    def _coded(self, name: str, values: torch.Tensor | np.ndarray) -> np.ndarray:
        if not isinstance(values, torch.Tensor):
            return values
        codec = codec_of(self.layout.schema[name])
        if codec.stored_dtype is not None:
            self.max_errors[name] = max(self.max_errors.get(name, 0.0), image_error(values))
        return as_array(codec.encode(values).cpu())

    def field(self, name: str, used: int) -> torch.Tensor:
        """View the stored values of a field in the first `used` steps."""
        return self._tensors[name][:used]


class StagedRows:
    """Rows of one column, env by env: row `env * used + step` (a `RowSource`)."""

    def __init__(self, buffer: StepBuffer, column: Column, used: int) -> None:
        (num_envs,) = buffer.lead
        self.num_rows, self.row_bytes = num_envs * used, column.row_bytes
        self._used = used
        self._arrays = {name: buffer.arrays[name][:used] for name in column.offsets}
        self._dtype = buffer.layout.numpy_dtype(column)
        self._gaps = _gaps(buffer.layout, column)

    def read(self, start: int, stop: int, out: np.ndarray) -> np.ndarray:
        """Gather rows: the end of one env, whole envs, the beginning of another."""
        for low, high in self._gaps:
            out[:, low:high] = 0
        records, used = out.reshape(-1).view(self._dtype), self._used
        row = start
        while row < stop:
            env, step = divmod(row, used)
            num_envs = (stop - row) // used if step == 0 else 0
            num_steps = used if num_envs else min(used - step, stop - row)
            num_envs = max(1, num_envs)
            part = records[row - start : row - start + num_envs * num_steps].reshape(num_envs, num_steps)
            for name, values in self._arrays.items():
                np.copyto(part[name], values[step : step + num_steps, env : env + num_envs].swapaxes(0, 1))
            row += num_envs * num_steps
        return out


class ChosenRows:
    """Single rows of one column, in the order of `places` (a `RowSource`).

    Args:
        buffer: Where they are.
        column: Of which rows are made.
        places: `[R]` int64, `step * num_envs + env`, or the row's number where there are no envs.
    """

    def __init__(self, buffer: StepBuffer, column: Column, places: np.ndarray) -> None:
        self.num_rows, self.row_bytes = len(places), column.row_bytes
        self._places = places
        lead = 1 + len(buffer.lead)
        self._arrays = {n: buffer.arrays[n].reshape(-1, *buffer.arrays[n].shape[lead:]) for n in column.offsets}
        self._dtype = buffer.layout.numpy_dtype(column)
        self._gaps = _gaps(buffer.layout, column)

    def read(self, start: int, stop: int, out: np.ndarray) -> np.ndarray:
        for low, high in self._gaps:
            out[:, low:high] = 0
        records = out.reshape(-1).view(self._dtype)
        for name, values in self._arrays.items():
            records[name] = values[self._places[start:stop]]
        return out


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """View a tensor as an array of the same bytes: bfloat16, which numpy lacks, as uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _gaps(layout: RowLayout, column: Column) -> list[tuple[int, int]]:
    """Bytes of a row that belong to no field; they are zeroed, so that files hold no stray memory."""
    gaps, end = [], 0
    for name, offset in sorted(column.offsets.items(), key=lambda item: item[1]):
        gaps.append((end, offset))
        end = offset + layout.stored[name].row_bytes
    return [(start, stop) for start, stop in [*gaps, (end, column.row_bytes)] if stop > start]
