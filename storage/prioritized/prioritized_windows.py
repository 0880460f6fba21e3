"""`PrioritizedWindows`: windows of consecutive steps, drawn by priority.

Each window is identified by its last row. That row has a weight above 0 while the window is inside
one trajectory and all of its rows are live. (Kapturowski et al. 2019, "Recurrent experience replay
in distributed reinforcement learning".)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ..core import arguments
from ..core.fields import Schema, map_leaves
from ..core.memory import float32_of
from ..core.random_indices import generator_on
from ..core.records import Key, RecordReader, normal
from ..errors import BufferEmptyError, UsageError
from ..ring.ring_store import RingStore
from ..ring.row_store import RowFront, RowOptions, RowStore
from ..ring.trajectory_ends import end_places
from ..ring.window_bounds import Boundaries
from ..saving.saved_store import State, Store, checked_count, checked_tensor
from .prioritized_ring import PrioritizedRing
from .priority_rules import PriorityRule

_MAX_TOTAL = 1 << 62


class PrioritizedWindows(RowFront, Store):
    """Ring of steps of one or many environments, sampled by priority as windows of steps.

    Args:
        capacity: Steps of each environment.
        seq_length: Steps of a window.
        stride: Steps between the starts of two windows of a trajectory; `seq_length // 2` for
            windows that overlap by half. The last window of a trajectory can always be drawn.
        end_key: Fields that end a trajectory if any of them is not 0: a name, a tuple of nested
            names, or a list of names or tuples. An empty list: trajectories never end.
        alpha, beta, anneal_step, eps: See `PriorityRule`.
        device: Device of the steps and priorities.
        generator: Draws the samples: a `torch.Generator` on `device` or a seed. None: seeded from
            `torch.initial_seed()` and the number of objects created since that seed changed.

    Store the hidden state of a recurrent learner as a field. Thread-safe.
    """

    def __init__(
        self,
        capacity: int,
        seq_length: int,
        *,
        stride: int = 1,
        end_key: Key | list[Key] = "done",
        alpha: float = 0.6,
        beta: float = 0.4,
        anneal_step: float = 1e5,
        eps: float = 1e-5,
        device: torch.device | str = "cpu",
        generator: torch.Generator | int | None = None,
    ) -> None:
        self.capacity = arguments.whole("capacity", capacity, 1)
        self.seq_length = arguments.whole("seq_length", seq_length, 1)
        self.stride = arguments.whole("stride", stride, 1)
        if seq_length > capacity:
            raise UsageError(f"capacity must be at least seq_length, {seq_length}, got {capacity}.")
        self.end_key = normal(end_key, "end_key")
        self.rule = PriorityRule(alpha, beta, anneal_step, eps)
        self.device = arguments.device("device", device)
        options = RowOptions(
            self.capacity, partial(end_places, end_key=self.end_key), self.seq_length
        )
        reader = RecordReader(None, True, False, False)
        self._use(RowStore(options, reader, self.device, generator_on(generator, self.device)))
        # The ring has one lane until the first `extend` fixes the number of lanes.
        self._windows = self._new_windows(1, 0)

    def __len__(self) -> int:
        """Return the number of windows that may be drawn."""
        return len(self._windows)

    @property
    def max_priority(self) -> float:
        """Largest priority so far, without eps; 1 at first."""
        return self._windows.max_priority

    @property
    def num_dead_updates(self) -> int:
        """Number of priority updates of windows that were already overwritten."""
        return self._windows.num_dead_updates

    @torch.no_grad()
    def extend(self, data: Any) -> None:
        """Append steps; new windows get the largest priority so far.

        Args:
            data: Nested mapping of leaves `[n, num_envs, *event]`, any n.

        Raises:
            MissingFieldError, SchemaError, FieldTypeError: A leaf does not fit. The message names
                the leaf; nothing is written.
        """
        with self._lock, self._order.writes:
            rows = self._rows
            total = 0 if rows.ring is None else rows.ring.total
            is_new = rows.ring is None
            rows.extend(data)
            if rows.ring is None or rows.ring.total == total:
                return
            if is_new:
                self._windows = self._new_windows(
                    rows.ring.num_lanes, self._windows.num_dead_updates
                )
            self._note_windows(rows.ring, max(total, rows.ring.total - self.capacity))

    @torch.no_grad()
    def sample(self, num_windows: int) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
        """Draw windows by priority, one from each of `num_windows` intervals of equal mass.

        Returns:
            (batch, weights, ids): nested dict of `[num_windows, seq_length, *event]`, new tensors;
            importance weights `[num_windows]` float32 in (0, 1]; ids `[num_windows]` int64 for
            `update_priorities`.

        Raises:
            BufferEmptyError: The buffer has no complete window.
        """
        arguments.whole("num_windows", num_windows, 1)
        # Draws exclude each other like writes, since all draws share working memory.
        with self._lock, self._order.writes:
            self._order.deferred.raise_arrived()
            ring = self._rows.ring
            drawn = self._windows.draw(num_windows, self._rows.generator)
            if ring is None or drawn is None:
                raise BufferEmptyError(
                    f"no trajectory has {self.seq_length} steps yet. Add more steps."
                )
            lane, last = ring.named(drawn.ids)
            places = ring.place(lane, last - (self.seq_length - 1))
            batch = ring.windows(places, self.seq_length, ring.cut_of(ring.names, ()))
        shape = (num_windows, self.seq_length)
        batch = map_leaves(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), batch)
        return batch, float32_of(drawn.importance), drawn.ids

    @torch.no_grad()
    def update_priorities(self, ids: Any, priorities: Any) -> Any:
        """Set the priorities of windows to `priorities + eps`; see `sequence_priorities`.

        Args:
            ids: `[n]` int64, from `sample`.
            priorities: `[n]` finite numbers >= 0, or one number for all windows.

        Returns:
            Number of updated windows; on a GPU a 0-d tensor. Removed windows are skipped and
            counted in `num_dead_updates`. If a window is named twice, its last priority stays.
        """
        with self._lock:
            return self._windows.prepare_update(ids, priorities)()

    def clear(self) -> None:
        """Remove every step; keep the fields and the memory."""
        with self._lock:
            if self._rows.ring is not None:
                self._rows.clear()
                self._windows.clear()

    def check_valid(self) -> tuple[bool, str]:
        """Check the invariants: return (whether all hold, a description of the first violation)."""
        with self._lock:
            return self._windows.check_valid()

    def raise_deferred(self, wait: bool = False) -> None:
        with self._lock:
            if wait:
                self._windows.send_draws()
            super().raise_deferred(wait)

    def _new_windows(self, num_lanes: int, num_dead_updates: int) -> PrioritizedRing:
        windows = PrioritizedRing(
            self.capacity, num_lanes, self.rule, self.device, order=self._order
        )
        windows.set_num_dead_updates(num_dead_updates)
        return windows

    def _note_windows(self, ring: RingStore, first: int) -> None:
        """Update which windows may be drawn after rows were written.

        Adds the windows that end at the new rows, which have ids from `first` on. Removes the
        windows that contain an overwritten row.
        """
        boundaries = self._boundaries()
        back = self.seq_length - 1
        lanes = torch.arange(ring.num_lanes, device=self.device).unsqueeze(1)
        new = torch.arange(first, ring.total, device=self.device)
        broken = torch.arange(ring.oldest, min(ring.oldest + back, ring.total), device=self.device)
        lane = lanes.expand(-1, len(new)).flatten()
        row = new.expand(ring.num_lanes, -1).flatten()
        past = boundaries.age(lane, row).long() - back
        is_window = (past >= 0) & (row - back >= ring.oldest)
        is_window &= (past % self.stride == 0) | boundaries.ended(lane, row)
        self._windows.renew(
            ring.key(lane, row), is_window, ring.key(lanes, broken).flatten(), ring.total
        )

    def _boundaries(self) -> Boundaries:
        boundaries = self._rows.boundaries
        assert boundaries is not None
        return boundaries

    def _get_state(self) -> State:
        arguments: dict[str, Any] = {
            "capacity": self.capacity,
            "seq_length": self.seq_length,
            "stride": self.stride,
        }
        arguments |= {"end_key": self.end_key, **vars(self.rule)}
        rows = self._rows.state()
        ring = self._rows.ring
        if rows is None or ring is None:
            return State(arguments, {"schema": None, "num_dead_updates": self.num_dead_updates}, {})
        numbers, tensors = self._windows.state(self.capacity * rows.num_lanes)
        numbers |= {
            "schema": ring.schema.to_json(),
            "num_lanes": rows.num_lanes,
            "total": rows.total,
        }
        numbers["oldest_ages"] = rows.oldest_ages
        columns = {f"column/{place}": column for place, column in enumerate(rows.columns.values())}
        return State(arguments, numbers, tensors | columns)

    def _set_state(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self._windows.send_draws()
        rows = self._rows.emptied()
        num_dead_updates = int(numbers["num_dead_updates"])
        if numbers["schema"] is None:
            self._windows = self._new_windows(1, num_dead_updates)
            self._use(rows)
            return
        schema = Schema.from_json(numbers["schema"])
        num_lanes = int(numbers["num_lanes"])
        total = checked_count(numbers, "total", 0, _MAX_TOTAL)
        num_live = min(total, self.capacity)
        columns = {}
        for place, (name, field) in enumerate(schema.items()):
            shape = [num_live, num_lanes, *field.shape]
            columns[name] = checked_tensor(tensors, f"column/{place}", field.torch_dtype, shape)
        if "ages" in tensors:  # States of earlier releases contain the ages of all rows.
            ages = checked_tensor(tensors, "ages", torch.int32, [self.capacity, num_lanes])
            oldest = (total - num_live) % self.capacity
            numbers = {**numbers, "oldest_ages": ages[oldest].tolist()}
        rows.load(schema, num_lanes, total, [(0, columns)], {"oldest_ages": numbers["oldest_ages"]})
        windows = self._new_windows(num_lanes, num_dead_updates)
        windows.restore(self.capacity * num_lanes, numbers, tensors)
        self._windows = windows
        self._use(rows)


def sequence_priorities(
    errors: torch.Tensor, eta: float = 0.9, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the priority of each window from its errors (Kapturowski et al. 2019, section 2.3).

    Args:
        errors: `[S, L]` temporal-difference errors of S windows of L steps, of any sign.
        eta: Weight of the largest absolute error; the mean absolute error has the weight `1 - eta`.
        mask: `[S, L]` bool, False for steps that only warm up the hidden state; None for all True.
            A window without True gets the priority 0.

    Returns:
        eta * max |e| + (1 - eta) * mean |e|: `[S]` of the dtype of `errors`, a new tensor.
    """
    arguments.instance("errors", errors, "a tensor [S, L]", torch.Tensor)
    arguments.real("eta", eta, "in [0, 1]", lambda share: 0 <= share <= 1)
    if mask is not None:
        arguments.instance("mask", mask, "a tensor [S, L]", torch.Tensor)
    if errors.dim() != 2 or (mask is not None and mask.shape != errors.shape):
        raise UsageError(
            f"errors and mask must have the same shape [S, L], got {list(errors.shape)} and "
            f"{None if mask is None else list(mask.shape)}."
        )
    sizes = errors.detach().abs()
    counts = torch.ones_like(sizes) if mask is None else mask.to(sizes.dtype)
    sizes = sizes * counts
    # Running sums are equal on every processor, unlike `sum`. Draws are therefore reproducible.
    sums = sizes.cumsum(1)[:, -1]
    return eta * sizes.amax(1) + (1 - eta) * sums / counts.sum(1).clamp(min=1)
