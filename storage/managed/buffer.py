"""`ManagedBuffer`: what all buffers of a manager share: checked pushes, ids, rates, monitors, saved state.

One rule: a push is read and checked whole, then written; both under the buffer's lock. Who is drawn
is each buffer's own affair.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from ..core.arguments import check_count
from ..core.fields import Field, Schema
from ..core.records import COMPLEX_DTYPES, make_field
from ..core.samplers import generator_on
from ..errors import ClosedError, CorruptFileError, SchemaError, UsageError
from ..live.rates import RateLimitedError, RateLimiter
from ..saving.store import Store
from .item_ids import SLOT, UNIQUE_ID, UnknownNameError, as_items, check_iteration, check_range, split_unique_id
from .item_leaves import from_json, to_json
from .items import ItemStore
from .monitor import BufferMonitor

_Self = TypeVar("_Self", bound="ManagedBuffer")


class ManagedBuffer(Store):
    """Items by row, under one lock.

    Args:
        replay_buffer_size: Items that fit, at least 1.
        name: First part of the ids that items get; any non-empty string.
        device: Where tensors are kept.
        output_device: Where samples are given; None for where they are kept.
        generator: Draws the samples: a `torch.Generator` on `device`, a seed, or None for one of its
            own that is seeded once from torch's.
        monitor: Is told what comes and goes; None for nobody.
        rate_limiter: Lets pushes and samples pass, wait, or not; or the arguments of one.
    """

    def __init__(
        self,
        replay_buffer_size: int,
        *,
        name: str = "buffer",
        device: torch.device | str = "cpu",
        output_device: torch.device | str | None = None,
        generator: torch.Generator | int | None = None,
        monitor: BufferMonitor | None = None,
        rate_limiter: RateLimiter | Mapping[str, Any] | None = None,
    ) -> None:
        self.replay_buffer_size = check_count("create a buffer", "replay_buffer_size", replay_buffer_size, 1)
        if not isinstance(name, str) or not name:
            raise UsageError("create a buffer", "", "a name that is a non-empty str", repr(name))
        self.name = name
        self.device = torch.device(device)
        self.output_device = None if output_device is None else torch.device(output_device)
        self.rng = generator_on(generator, self.device)
        self.monitor = monitor
        self.rate_limiter = RateLimiter(**rate_limiter) if isinstance(rate_limiter, Mapping) else rate_limiter
        self._store = self._make_store()
        self._lock = threading.RLock()
        self._is_closed = False

    # What comes in.

    def push(self, data: Any) -> None:
        """Add an item, or a list of items; copies are kept.

        Raises:
            MissingFieldError, SchemaError, FieldTypeError: Naming the first leaf that does not fit the
                items before; nothing is added.
            RateLimitedError: The rate limiter did not let it pass.
            ClosedError: After `close`.
        """
        items = as_items(data)
        self._add(items, len(items))

    def append(self, data: Any) -> None:
        """Add one item."""
        self.push([data])

    def extend(self, data: Iterable[Any]) -> None:
        """Add several items."""
        self.push(list(data))

    # What is there.

    def count(self) -> int:
        """Items that can be given."""
        with self._lock:
            return self._store.num_live

    def __len__(self) -> int:
        return self.count()

    @property
    def push_count(self) -> int:
        """Items that were ever added, since creation or `clear`."""
        return self._store.total

    def sample_check(
        self, size: int, cur_learner_iter: int = 0, sample_range: slice | None = None, replace: bool = False
    ) -> bool:
        """Tell whether `sample` with these arguments would give items now, without waiting; stale items are removed."""
        size, cur_learner_iter = check_count("sample", "size", size, 0), check_iteration(cur_learner_iter)
        check_range(sample_range)
        with self._lock:
            passes = self.rate_limiter is None or self.rate_limiter.may_sample(size)
            return self._has(size, cur_learner_iter, sample_range, replace) and passes and not self._is_closed

    def sample(
        self, size: int, cur_learner_iter: int = 0, sample_range: slice | None = None, replace: bool = False
    ) -> list[Any] | None:
        """Draw items; uniformly, unless the buffer says otherwise.

        Args:
            size: How many; 0 gives [].
            cur_learner_iter: Where the learner is, for buffers that know staleness.
            sample_range: Only these, counted by age: `slice(0, 5)` the five oldest, `slice(-5, None)` the
                five newest; None for all.
            replace: Whether an item may be drawn more than once.

        Returns:
            A list of copies; None if there are fewer than `size`, or none, or the rate limiter refuses.
        """
        size, cur_learner_iter = check_count("sample", "size", size, 0), check_iteration(cur_learner_iter)
        check_range(sample_range)
        try:
            with self._admitted(size, is_push=False):
                found = self._take(size, cur_learner_iter, sample_range, replace)
                if found is None:
                    self._undo(size, is_push=False)
                return found
        except RateLimitedError:
            return None

    def update(self, info: Mapping[str, Any]) -> int:
        """Take what a learner found; gives the number of items that it was applied to."""
        with self._lock:
            return self._apply_update(self._read_update(info))

    def _read_update(self, info: Mapping[str, Any]) -> Any:
        """Check an update; give what `_apply_update` takes."""
        if isinstance(info, Mapping):
            self._rows_of(info.get(UNIQUE_ID))
        return None

    def _apply_update(self, read: Any) -> int:
        """Take a checked update."""
        return 0

    def clear(self) -> None:
        """Forget every item; ids count from 0 again."""
        with self._lock:
            self._clear()
            if self.rate_limiter is not None:
                self.rate_limiter.reset()

    # Its life.

    def start(self) -> None:
        """Do nothing: no buffer needs a thread. For callers that start what they use."""

    def close(self) -> None:
        """Let go of all items and of whoever waits; pushing and sampling raise from now on. May be called twice."""
        self._is_closed = True  # first: whoever the limiter lets go of must see it
        if self.rate_limiter is not None:
            self.rate_limiter.close()
        with self._lock:
            self._clear()
            self._release()

    def __enter__(self: _Self) -> _Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # For the manager, which checks all of its buffers before any of them is changed.

    def _admit(self, num_items: int, is_push: bool) -> bool:
        """Count what the limiter lets pass at once; False if it does not. The lock is held."""
        self._check_open("push into" if is_push else "sample from")
        limiter = self.rate_limiter
        return limiter is None or (limiter.insert if is_push else limiter.sample)(num_items, waits=False)

    def _undo(self, num_items: int, is_push: bool) -> None:
        """Take back what `_admit` counted. The lock is still held, so that no other thread went by it."""
        if self.rate_limiter is not None:
            self.rate_limiter.undo(*((num_items, 0) if is_push else (0, num_items)))

    def _await(self, num_items: int, is_push: bool, start_s: float) -> None:
        """Wait until the limiter would let it pass, or raise `RateLimitedError`. No lock is held."""
        if self.rate_limiter is None or self.rate_limiter.wait(num_items, is_push, start_s):
            return
        self._check_open("push into" if is_push else "sample from")
        advice = "Sample first, or raise the tolerance"
        raise RateLimitedError("push into", repr(self.name), "draws to keep up", f"{num_items} more items", advice)

    @contextmanager
    def _admitted(self, num_items: int, is_push: bool) -> Iterator[None]:
        """Hold the lock, when the limiter has let it pass; take that back if the block raises."""
        start_s = time.monotonic()
        while True:
            with self._lock:
                if self._admit(num_items, is_push):
                    try:
                        yield
                    except BaseException:  # Ctrl-C too: the other side would wait for what never was
                        self._undo(num_items, is_push)
                        raise
                    return
            self._await(num_items, is_push, start_s)

    def _has(self, size: int, iteration: int, sample_range: slice | None = None, replace: bool = False) -> bool:
        """Tell whether there are enough for `_take`. The lock is held."""
        return size == 0 or len(range(self.count())[sample_range or slice(None)]) >= (1 if replace else size)

    @abstractmethod
    def _take(
        self, size: int, iteration: int, sample_range: slice | None = None, replace: bool = False
    ) -> list[Any] | None:
        """Check and draw; None if there are not enough. The lock is held, the limiter has let it pass."""

    @abstractmethod
    def _read(self, items: Sequence[Any]) -> Any:
        """Check items; give what `_write` takes."""

    @abstractmethod
    def _write(self, read: Any) -> None:
        """Add checked items."""

    def _add(self, items: Sequence[Any], num_items: int) -> None:
        start_s = time.perf_counter()
        with self._admitted(num_items, is_push=True):
            read = self._read(items)
            self._write(read)
        if self.monitor is not None:
            self.monitor.note_push(num_items, time=time.perf_counter() - start_s, **self._push_values(read))

    # For buffers.

    def _make_store(self) -> ItemStore:
        return ItemStore(self.replay_buffer_size, self.device)

    def _push_values(self, read: Any) -> dict[str, Any]:
        """Say what a monitor is told of a push."""
        return {}

    def _clear(self) -> None:
        self._store.clear()

    def _release(self) -> None:
        """Let go of the memory."""
        self._store = self._make_store()

    def _check_open(self, action: str) -> None:
        if self._is_closed:
            raise ClosedError(action, repr(self.name), "an open buffer", "a closed one", "Make a new one")

    def _ids_of(self, slots: torch.Tensor) -> dict[str, list[Any]]:
        """Name the items in some slots, as samples do."""
        prefix = self.name + "_"
        return {UNIQUE_ID: [f"{prefix}{row}" for row in self._store.ids(slots).tolist()], SLOT: slots.tolist()}

    def _rows_of(self, unique_ids: Any) -> list[int]:
        """Give the row ids that are in unique ids (None is none); raise if one is of another buffer."""
        rows: list[int] = []
        if unique_ids is None:
            return rows
        for unique_id in [unique_ids] if isinstance(unique_ids, str) else list(unique_ids):
            name, row = split_unique_id(unique_id)
            if name != self.name:
                raise UnknownNameError("update", "a buffer", f"ids of {self.name!r}", repr(unique_id))
            rows.append(row)
        return rows

    def _store_state(self, store: ItemStore) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Take the store and the limiter apart: numbers and tensors. Objects become JSON."""
        schema = None if store.schema is None else store.schema.to_json()
        columns = store.live_columns()
        objects = store.live_objects_view()
        tensors = {f"column/{place}": leaf for place, leaf in enumerate(columns.values())}
        if objects is not None:
            text = to_json(objects, f"of {self.name!r}")
            tensors["objects"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        limiter = None if self.rate_limiter is None else self.rate_limiter.state_dict()
        numbers = {"total": store.total, "schema": schema, "arrays": sorted(store.arrays), "rate_limiter": limiter}
        return numbers, {**tensors, "rng": self.rng.get_state()}

    def _checked_store(
        self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], capacity: int
    ) -> tuple[int, Schema | None, frozenset[str], dict[str, torch.Tensor], Any]:
        """Check what `_store_state` gave; give what `ItemStore.restore` takes. Nothing is changed."""
        total = numbers["total"]
        schema = None if numbers["schema"] is None else _schema_of(numbers["schema"])
        if not isinstance(total, int) or not 0 <= total < 1 << 62:
            raise SchemaError("load a state", "", "a total >= 0", repr(total))
        live = min(total, capacity)
        columns = {}
        for place, (name, field) in enumerate((schema or {}).items()):
            leaf = tensors[f"column/{place}"]
            if leaf.dtype != field.torch_dtype or leaf.shape != (live, *field.shape):
                expected = f"{field.dtype} {[live, *field.shape]}"
                raise SchemaError("load a state", f"with {name!r}", expected, f"{leaf.dtype} {list(leaf.shape)}")
            columns[name] = leaf
        objects = None
        if "objects" in tensors:
            objects = from_json(tensors["objects"].cpu().numpy().tobytes(), f"of {self.name!r}")
            if not isinstance(objects, list) or len(objects) != live or not all(isinstance(x, dict) for x in objects):
                raise CorruptFileError("read objects", f"of {self.name!r}", f"{live} of them", "others")
        return total, schema, frozenset(numbers["arrays"]), columns, objects

    def _restore_counts(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over the limiter's counts and the random state."""
        if self.rate_limiter is not None and numbers["rate_limiter"] is not None:
            self.rate_limiter.load_state_dict(numbers["rate_limiter"])
        self.rng.set_state(tensors["rng"].cpu())

    @abstractmethod
    def _prepare(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """Check a state; give what takes it over and cannot fail."""

    def _set_state(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self._prepared(numbers, tensors)()

    def _prepared(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """Do what `_prepare` does, and see to the random state."""
        own = self.rng.get_state()
        if tensors["rng"].shape != own.shape:  # of a generator on another kind of device
            tensors = {**tensors, "rng": own}
        torch.Generator(self.rng.device).set_state(tensors["rng"].cpu())
        return self._prepare(numbers, tensors)

    def _arguments(self) -> dict[str, Any]:
        """Give the arguments that make an equal buffer, as JSON."""
        limiter = None if self.rate_limiter is None else self.rate_limiter.to_json()
        return {"replay_buffer_size": self.replay_buffer_size, "name": self.name, "rate_limiter": limiter}

    def _take_state(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        own, given = self.rng.get_state(), tensors.get("rng")
        if isinstance(given, torch.Tensor) and given.shape != own.shape:  # of a generator on another kind of device
            tensors = {**tensors, "rng": own}
        super()._take_state(numbers, tensors)

    @classmethod
    def _from_arguments(cls, arguments: Mapping[str, Any], device: torch.device) -> Any:
        made: Any = cls
        return made(**arguments, device=device, generator=0)  # the saved random state comes next


def _schema_of(items: Iterable[Mapping[str, Any]]) -> Schema:
    """Build a schema from `to_json`'s form, of any dtype that a buffer can hold."""
    return Schema(
        make_field(item["name"], item["shape"], item["dtype"])
        if item.get("dtype") in COMPLEX_DTYPES
        else Field.from_json(item)
        for item in items
    )
