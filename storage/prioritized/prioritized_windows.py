"""`PrioritizedWindows`: sequence replay, windows of consecutive steps drawn by priority.

One rule: a window is named by its last row. That row has a weight while the window lies inside one
trajectory and all of its rows are live, which `ring/window_bounds.py` decides; otherwise its weight is 0.
(Kapturowski et al. 2019, "Recurrent experience replay in distributed reinforcement learning".)
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch

from ..core import arguments
from ..core.fields import Schema, map_leaves
from ..core.memory import StreamOrder, float32_of, sent_together
from ..core.random_indices import generator_on
from ..core.records import Key, RecordReader, normal
from ..errors import BufferEmptyError, UsageError
from ..ring.ring_store import RingStore
from ..ring.trajectory_ends import end_places, find_ends
from ..ring.window_bounds import Boundaries
from ..saving.saved_store import State, Store, checked_tensor
from .prioritized_ring import PrioritizedRing
from .priority_rules import PriorityRule


class PrioritizedWindows(Store):
    """A ring of steps of one or many environments, sampled as windows of `seq_length` steps by priority.

    Args:
        capacity: Steps that are kept of each environment.
        seq_length: Steps of a window.
        stride: Steps of a trajectory from the start of a window to that of the next: `seq_length // 2` for windows that
            overlap by half. The last window of a trajectory, up to its end, is there in any case.
        end_key: Fields of which any that is not 0 ends a trajectory: a name, a tuple of nested names, or a
            list of those; an empty list if nothing does.
        alpha, beta, anneal_step, eps: See `PriorityRule`.
        device: Where everything is.
        generator: Draws the samples: a `torch.Generator` on `device` or a seed. None: seeded from
            `torch.initial_seed()` and the number of objects made since that changed.

    What a recurrent learner needs at the first step of a window (its hidden state then) is a field like
    any other. All methods may be called from any thread.
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
        action = arguments.creating(self)
        self.capacity = arguments.whole(action, "capacity", capacity, 1)
        self.seq_length = arguments.whole(action, "seq_length", seq_length, 1)
        self.stride = arguments.whole(action, "stride", stride, 1)
        if seq_length > capacity:
            raise UsageError(action, "", f"a capacity of at least {seq_length}, one window", str(capacity))
        self.end_key = normal(end_key, "end_key")
        self.rule = PriorityRule(alpha, beta, anneal_step, eps)
        self.device = arguments.device(action, "device", device)
        self.rng = generator_on(generator, self.device, action)
        self._reader = RecordReader(None, True, False, False)
        self._lock = threading.RLock()
        self._order = StreamOrder(self.device)
        self._ring: RingStore | None = None
        #: Of one lane, until the first steps show how many there are.
        self._windows = PrioritizedRing(self.capacity, 1, self.rule, self.device)

    def __len__(self) -> int:
        """Windows that may be drawn."""
        return len(self._windows)

    @property
    def max_priority(self) -> float:
        """The largest priority so far, without eps; 1 at first."""
        return self._windows.max_priority

    @property
    def num_dead_updates(self) -> int:
        """Updates so far of windows that were gone."""
        return self._windows.num_dead_updates

    @torch.no_grad()
    def extend(self, data: Any) -> None:
        """Append steps: nested mapping of `[n, num_envs, *event]`, any n; new windows get the largest priority.

        Raises:
            MissingFieldError, SchemaError, FieldTypeError: Naming the leaf that does not fit; nothing is
                written.
        """
        with self._lock:
            rows = self._reader.rows_again(data) or self._reader.read(data)
            if rows is None or not rows.num_rows:
                return
            tensors = sent_together(rows.tensors, self.device)
            ends = find_ends(tensors, end_places(rows.schema, self.end_key))
            ring = self._ring or self._create(rows.schema, rows.tensors[0].shape[1])
            self._order.wait(is_write=True)
            first = max(ring.total, ring.total + rows.num_rows - self.capacity)
            self._boundaries.note(ends)
            ring.write(tensors)
            self._note_windows(ring, first)
            self._order.record(is_write=True)

    @torch.no_grad()
    def sample(self, num_windows: int) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
        """Draw windows by priority, one from each of `num_windows` intervals of equal mass.

        Returns:
            (batch, weights, ids): nested dict of `[num_windows, seq_length, *event]`, new tensors; importance
            weights `[num_windows]` float32 in (0, 1]; ids `[num_windows]` int64 for `update_priorities`.

        Raises:
            BufferEmptyError: There is no window yet.
        """
        arguments.whole("sample windows", "num_windows", num_windows, 1)
        with self._lock:
            self._order.wait(is_write=True)  # a draw writes memory that the next one uses again
            drawn = self._windows.draw(num_windows, self.rng)
            if self._ring is None or drawn is None:
                raise BufferEmptyError("sample windows", "", f"{self.seq_length} steps of a trajectory", "fewer")
            lane, last = self._ring.named(drawn.ids)
            places = self._ring.place(lane, last - (self.seq_length - 1))
            cut = self._ring.cut_of(self._ring.names, ())
            found = self._ring.windows(places, self.seq_length, cut)
            self._order.record(is_write=True)
        shape = (num_windows, self.seq_length)
        found = map_leaves(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), found)
        return found, float32_of(drawn.importance), drawn.ids

    @torch.no_grad()
    def update_priorities(self, ids: Any, priorities: Any) -> Any:
        """Set the priorities of windows to `priorities + eps`; see `sequence_priorities`.

        Args:
            ids: `[n]` int64, as `sample` gives them.
            priorities: `[n]` finite numbers >= 0, or one for all.

        Returns:
            How many were there; on a GPU a 0-d tensor. Windows that are gone are left out, and counted in
            `num_dead_updates`; of a window that is named twice the last priority stays.
        """
        with self._lock:
            update = self._windows.prepare_update(ids, priorities)
            self._order.wait(is_write=True)
            num_applied = update()
            self._order.record(is_write=True)
            return num_applied

    def clear(self) -> None:
        """Forget every step; fields and the memory stay."""
        with self._lock:
            if self._ring is not None:
                self._order.wait(is_write=True)
                self._ring.clear()
                self._boundaries.clear()
                self._windows.clear()
                self._order.record(is_write=True)

    def check_valid(self) -> tuple[bool, str]:
        """Check what must always hold: (whether it does, what does not)."""
        with self._lock:
            return self._windows.check_valid()

    def _create(self, schema: Schema, num_lanes: int) -> RingStore:
        ring = self._ring = RingStore(self.capacity, num_lanes, schema, self.device, num_guards=self.seq_length)
        self._boundaries = Boundaries(ring)
        earlier = self._windows
        self._windows = PrioritizedRing(self.capacity, num_lanes, self.rule, self.device)
        self._windows.take_over_updates(earlier)
        self._reader.freeze(schema, num_lanes)
        return ring

    def _note_windows(self, ring: RingStore, first: int) -> None:
        """Register the windows that end at the rows from id `first` on, and drop those that lost their first row."""
        back = self.seq_length - 1
        lanes = torch.arange(ring.num_lanes, device=self.device).unsqueeze(1)
        new = torch.arange(first, ring.total, device=self.device)
        broken = torch.arange(ring.oldest, min(ring.oldest + back, ring.total), device=self.device)
        lane = lanes.expand(-1, len(new)).flatten()
        row = new.expand(ring.num_lanes, -1).flatten()
        past = self._boundaries.age(lane, row).long() - back
        is_window = (past >= 0) & (row - back >= ring.oldest)
        is_window &= (past % self.stride == 0) | self._boundaries.ended(lane, row)
        self._windows.renew(ring.key(lane, row), is_window, ring.key(lanes, broken).flatten(), ring.total)

    def _get_state(self) -> State:
        arguments: dict[str, Any] = {"capacity": self.capacity, "seq_length": self.seq_length, "stride": self.stride}
        arguments |= {"end_key": self.end_key, **vars(self.rule)}
        ring = self._ring
        self._order.wait(is_write=False)
        if ring is None:
            return State(arguments, {"schema": None, "num_dead_updates": self.num_dead_updates}, {})
        numbers, tensors = self._windows.state(self.capacity * ring.num_lanes)
        numbers |= {"schema": ring.schema.to_json(), "num_lanes": ring.num_lanes, "total": ring.total}
        ages = torch.zeros((self.capacity, ring.num_lanes), dtype=torch.int32, device=self.device)
        ids = ring.ids()
        lanes = torch.arange(ring.num_lanes, device=self.device)
        ages[ring.slot(ids)] = self._boundaries.age(lanes, ids.unsqueeze(1))
        tensors |= {"ages": ages, "next_ages": self._boundaries.next_ages}
        columns = [ring.slots_view(name)[: ring.num_live] for name in ring.schema]
        return State(arguments, numbers, tensors | {f"column/{place}": column for place, column in enumerate(columns)})

    def _set_state(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self._ring, self._windows = None, PrioritizedRing(self.capacity, 1, self.rule, self.device)
        self._reader = RecordReader(None, True, False, False)
        self._windows.set_num_dead_updates(int(numbers["num_dead_updates"]))
        if numbers["schema"] is None:
            return
        schema = Schema.from_json(numbers["schema"])
        num_lanes = int(numbers["num_lanes"])
        total = int(numbers["total"])
        live = min(total, self.capacity)
        columns = {
            name: checked_tensor(tensors, f"column/{place}", field.torch_dtype, [live, num_lanes, *field.shape])
            for place, (name, field) in enumerate(schema.items())
        }
        ages = checked_tensor(tensors, "ages", torch.int32, [self.capacity, num_lanes])
        next_ages = checked_tensor(tensors, "next_ages", torch.int32, [num_lanes])
        self._order.wait(is_write=True)
        ring = self._create(schema, num_lanes)
        ring.put_slots(0, columns)
        ring.total = total
        ids = ring.ids()
        self._boundaries.ages[ids % len(self._boundaries.ages)] = ages.to(self.device)[ring.slot(ids)]
        self._boundaries.next_ages.copy_(next_ages)
        self._windows.restore(self.capacity * num_lanes, numbers, tensors)
        self._order.record(is_write=True)


def sequence_priorities(errors: torch.Tensor, eta: float = 0.9, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Turn errors of the steps of windows into one priority each (Kapturowski et al. 2019, section 2.3).

    Args:
        errors: `[S, L]` temporal-difference errors, of any sign.
        eta: Share of the largest; the rest is of the mean.
        mask: `[S, L]` bool, the steps that count (not those that only warm up the hidden state); None for all.
            A window without any gets 0.

    Returns:
        `[S]` of the errors' dtype: eta * max |e| + (1 - eta) * mean |e|; a new tensor.
    """
    action = "turn errors into priorities"
    arguments.instance(action, "errors", errors, "as a tensor [S, L]", torch.Tensor)
    arguments.real(action, "eta", eta, "in [0, 1]", lambda share: 0 <= share <= 1)
    if mask is not None:
        arguments.instance(action, "mask", mask, "as a tensor [S, L]", torch.Tensor)
    if errors.dim() != 2 or (mask is not None and mask.shape != errors.shape):
        got = str([list(x.shape) for x in (errors, mask) if x is not None])
        raise UsageError(action, "", "errors [S, L], a mask like them", got)
    sizes = errors.detach().abs()
    counts = torch.ones_like(sizes) if mask is None else mask.to(sizes.dtype)
    sizes = sizes * counts
    # `sum` depends on how many numbers a processor adds at once; a priority decides draws.
    sums = sizes.cumsum(1)[:, -1]
    return eta * sizes.amax(1) + (1 - eta) * sums / counts.sum(1).clamp(min=1)
