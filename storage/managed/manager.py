"""`BufferManager`: several buffers under one front: push by name, sample by ratio, update by id.

One rule: a call concerns all of its buffers or none. Everything is checked in each of them, under
all of their locks, before any of them is changed. What a buffer does is its own affair.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch

from ..core.samplers import generator_on
from ..errors import ClosedError, UsageError, nearest
from ..live.rates import RateLimitedError
from ..saving.store import State, Store
from .advanced import AdvancedReplayBuffer
from .buffer import ManagedBuffer
from .config import KINDS, arguments_of, make_buffers, part_of_state
from .episodes import EpisodeReplayBuffer
from .item_ids import UnknownNameError, as_items, check_iteration
from .sample_shares import SampleShares
from .update_shares import share_out_update
from .used_data import UsedQueue

_Self = TypeVar("_Self", bound="BufferManager")


class BufferManager(Store):
    """Buffers by name.

    Args:
        cfg: `buffer_name`: the names, a list of any length of any non-empty strings. Under each name the
            arguments of its buffer, and `type`: "advanced" (default), "naive" or "episode".
            `sample_ratio`: name -> share of a sample, >= 0, together 1; names may be left out. With one
            buffer it may be missing.
        device: Where buffers are that do not say.
        generator: Chooses among the buffers: a `torch.Generator` on the CPU, a seed, or None for one of
            its own that is seeded once from torch's. Buffers have their own.

    Threads may push, sample and update at once, also while a limiter lets one of them wait.
    """

    def __init__(
        self,
        cfg: Mapping[str, Any],
        *,
        device: torch.device | str = "cpu",
        generator: torch.Generator | int | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.rng = generator_on(generator, torch.device("cpu"))
        self._lock = threading.RLock()
        #: Choosing buffers, and being let pass by their limiters at once; not held while a limiter waits.
        self._choice_lock = threading.Lock()
        self._buffers = make_buffers(cfg, self.device)
        self._shares_of_samples = SampleShares(self.buffer_name, self._buffer, cfg.get("sample_ratio"))
        self._is_closed = False

    @property
    def buffer_name(self) -> list[str]:
        """Names of the buffers, in order."""
        return list(self._buffers)

    @property
    def sample_ratio(self) -> dict[str, float] | None:
        """The configured shares, a copy; None if there are several buffers and nobody said."""
        ratio = self._shares_of_samples.ratio
        return None if ratio is None else dict(ratio)

    def __getitem__(self, name: str) -> Any:
        """Give the buffer of a name."""
        return self._buffer(name)

    # What comes in.

    def push_data(self, data: Any, buffer_name: str | Sequence[str] | None = None) -> None:
        """Add an item, or a list of items, to a buffer, or copies to several; to all of them or to none.

        Args:
            data: As the buffers' `push` takes it.
            buffer_name: A name, or a list of names. None for what each item has under `buffer_name`
                (a name or a list), or else the only buffer.

        Raises:
            KeyError: No buffer is called so.
            ValueError: There are several buffers and an item does not say which.
            As `push`: An item does not fit one of the buffers.
        """
        self._check_open("push data")
        start_s = time.monotonic()
        shares = self._shares(data, buffer_name)
        numbers = {name: len(items) for name, items in shares.items()}

        def write() -> dict[str, Any]:
            read = {name: self._buffers[name]._read(items) for name, items in shares.items()}
            for name, one in read.items():
                self._buffers[name]._write(one)
            return read

        while isinstance(found := self._in_all(numbers, True, write), str):
            self._buffers[found]._await(numbers[found], True, start_s)
        for name, one in (found or {}).items():
            buffer = self._buffers[name]
            if buffer.monitor is not None:
                buffer.monitor.note_push(numbers[name], time=time.monotonic() - start_s, **buffer._push_values(one))

    def push(self, data: Any, buffer_name: str | Sequence[str] | None = None) -> None:
        """Do what `push_data` does."""
        self.push_data(data, buffer_name)

    def append(self, data: Any, buffer_name: str | Sequence[str] | None = None) -> None:
        """Add one item."""
        self.push_data([data], buffer_name)

    def extend(self, data: Iterable[Any], buffer_name: str | Sequence[str] | None = None) -> None:
        """Add several items."""
        self.push_data(list(data), buffer_name)

    # What goes out.

    def sample_check(
        self,
        batch_size: int | Mapping[str, int],
        cur_learner_iter: int = 0,
        sample_ratio: Mapping[str, float] | None = None,
    ) -> bool:
        """Tell whether `sample` with these arguments would give items now, without waiting; stale items are removed."""
        cur_learner_iter = check_iteration(cur_learner_iter)
        with self._choice_lock:
            before = self.rng.get_state()
            _, sizes = self._shares_of_samples.share_out(batch_size, sample_ratio, self.rng)
            self.rng.set_state(before)  # the next sample shares out alike
            with self._locked(sizes):
                found = [self._buffers[name].sample_check(size, cur_learner_iter) for name, size in sizes.items()]
        return all(found) and not self._is_closed

    def sample(
        self,
        batch_size: int | Mapping[str, int],
        cur_learner_iter: int = 0,
        sample_ratio: Mapping[str, float] | None = None,
    ) -> Any:
        """Draw from the buffers, from all that are asked or from none.

        Args:
            batch_size: A number, which is shared out by ratio: the buffer of each item is drawn, one from each
                of `batch_size` equal intervals, so that shares are met to less than two items. Or a number by name.
            cur_learner_iter: Where the learner is.
            sample_ratio: Shares for this call only, in the place of the configured ones.

        Returns:
            A list of `batch_size` items in random order; or by name a list of items. None if a buffer refuses:
            then nothing has changed, but for stale items that were removed.

        Raises:
            KeyError: No buffer is called so.
            ValueError: The shares are negative, or do not sum to 1.
        """
        order, found = self._drawn(batch_size, cur_learner_iter, sample_ratio, "_take")
        if found is None or order is None:
            return found
        items = [item for part in found.values() for item in part]
        return [items[place] for place in order]

    def sample_tensors(
        self,
        batch_size: int | Mapping[str, int],
        cur_learner_iter: int = 0,
        sample_ratio: Mapping[str, float] | None = None,
    ) -> dict[str, Any] | None:
        """Draw as `sample` does, from prioritized buffers, as batches.

        Returns:
            Name -> (batch, weights, ids) of `AdvancedReplayBuffer.sample_tensors`, for each buffer that gives
            a row; `update_priorities` takes the ids. None if a buffer refuses.
        """
        return self._drawn(batch_size, cur_learner_iter, sample_ratio, "_take_tensors")[1]

    # What a learner found.

    def update(self, info: Mapping[str, Any]) -> int:
        """Take what a learner found about items, of several buffers in one list; see `AdvancedReplayBuffer.update`.

        The buffer of an id is what stands before its last "_". `used_id`s are told to every buffer.

        Returns:
            How many priorities were applied.

        Raises:
            KeyError: No buffer is called so; nothing is changed in any.
            ValueError: A priority is negative or not finite, or there are not as many.
        """
        tracking = [name for name, buffer in self._buffers.items() if isinstance(buffer, AdvancedReplayBuffer)]
        parts = share_out_update(info, self._buffer, tracking)
        with self._locked(parts):
            read = {name: self._buffers[name]._read_update(part) for name, part in parts.items()}
            return sum(self._buffers[name]._apply_update(one) for name, one in read.items())

    def update_priorities(self, ids: Mapping[str, Any], priorities: Mapping[str, Any]) -> int:
        """Set priorities of rows by name of the buffer, as `sample_tensors` gave them; gives how many were applied."""
        if set(ids) != set(priorities):
            raise UsageError("update priorities", "", f"priorities of {sorted(ids)}", str(sorted(priorities)))
        self._check_prioritized(ids)
        with self._locked(ids):
            buffers: dict[str, Any] = {name: self._buffers[name] for name in ids}
            read = {name: one._read_priorities(ids[name], priorities[name]) for name, one in buffers.items()}
            return sum(int(buffers[name]._data.update(*one)) for name, one in read.items())

    def used_data(self, buffer_name: str | None = None) -> UsedQueue:
        """Give a buffer's queue of `data_id`s that nobody needs any more; None is the only buffer."""
        buffer = self._buffer(self._only("track used data") if buffer_name is None else buffer_name)
        if not isinstance(buffer, AdvancedReplayBuffer):
            raise UsageError("track used data", f"of {buffer.name!r}", "a buffer of type 'advanced'", "another")
        return buffer.used_data()

    # What is there.

    def count(self, buffer_name: str | None = None) -> int:
        """Items in a buffer; None for the least of all buffers."""
        if buffer_name is not None:
            return self._buffer(buffer_name).count()
        return min(buffer.count() for buffer in self._buffers.values())

    def clear(self, buffer_names: str | Sequence[str] | None = None) -> None:
        """Forget the items of some buffers; None for all."""
        names = self.buffer_name if buffer_names is None else _names(buffer_names)
        for buffer in [self._buffer(name) for name in names]:
            buffer.clear()

    def start(self) -> None:
        """Do nothing: there are no threads. For callers that start what they use."""

    def run(self) -> None:
        """Do what `start` does."""
        self.start()

    def close(self) -> None:
        """Close every buffer. May be called twice."""
        self._is_closed = True
        for buffer in self._buffers.values():
            buffer.close()

    def __enter__(self: _Self) -> _Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Keeping.

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Take over what `state_dict` of an equal manager gave; nothing is changed if it does not fit.

        Args:
            state: The state.
            strict: Whether it must be of the same buffers and ratio. Otherwise those buffers are loaded that
                both have, and must be equal; ratio and random state of the choice stay.
        """
        if strict:
            super().load_state_dict(state)
            return
        its = state["arguments"]["cfg"]
        with self._locked(self._buffers):
            ready = []
            for place, name in enumerate(its["buffer_name"]):
                if name in self._buffers:
                    buffer = self._buffers[name]
                    buffer.check_equal(type(buffer).__name__, arguments_of(its[name], name))
                    ready.append(buffer._prepared(*part_of_state(state["numbers"], state["tensors"], place, name)))
            for take_over in ready:
                take_over()

    def _get_state(self) -> State:
        cfg: dict[str, Any] = {"buffer_name": self.buffer_name, "sample_ratio": self.sample_ratio}
        numbers: dict[str, Any] = {}
        with self._choice_lock, self._locked(self._buffers):
            tensors = {"rng": self.rng.get_state()}
            for place, (name, buffer) in enumerate(self._buffers.items()):
                state = buffer.copy_state()  # before the locks are let go
                kind = next(kind for kind, its in KINDS.items() if type(buffer) is its)
                cfg[name] = {"type": kind, **{key: x for key, x in state.arguments.items() if key != "name"}}
                numbers[name] = state.numbers
                tensors.update({f"buffer/{place}/{key}": x for key, x in state.tensors.items()})
        return State({"cfg": cfg}, {"buffers": numbers}, tensors)

    def _set_state(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        with self._locked(self._buffers):
            ready = [
                buffer._prepared(*part_of_state(numbers, tensors, place, name))
                for place, (name, buffer) in enumerate(self._buffers.items())
            ]
            self.rng.set_state(tensors["rng"])
            for take_over in ready:
                take_over()

    @classmethod
    def _from_arguments(cls, arguments: Mapping[str, Any], device: torch.device) -> Any:
        return cls(arguments["cfg"], device=device, generator=0)  # the saved random state comes next

    # Inside.

    def _buffer(self, name: Any) -> ManagedBuffer:
        if name not in self._buffers:
            raise UnknownNameError("find a buffer", "", nearest(str(name), self._buffers), repr(name))
        return self._buffers[name]

    def _only(self, action: str) -> str:
        if len(self._buffers) > 1:
            expected = "the name of one of " + ", ".join(map(repr, self._buffers))
            raise UsageError(action, "", expected, "none", "Give buffer_name")
        return next(iter(self._buffers))

    def _check_open(self, action: str) -> None:
        if self._is_closed:
            raise ClosedError(action, "", "an open manager", "a closed one", "Make a new one")

    def _check_prioritized(self, names: Iterable[str]) -> None:
        for name in names:
            if not isinstance(self._buffer(name), AdvancedReplayBuffer):
                raise UsageError("use tensors of", repr(name), "a buffer of type 'advanced'", "another")

    @contextmanager
    def _locked(self, names: Iterable[str]) -> Iterator[None]:
        """Hold the locks of some buffers, taken in one order by everybody."""
        wanted = set(names)
        with ExitStack() as stack:
            for name, buffer in self._buffers.items():
                if name in wanted:
                    stack.enter_context(buffer._lock)
            yield

    def _shares(self, data: Any, buffer_name: str | Sequence[str] | None) -> dict[str, list[Any]]:
        """Say which buffer gets which items."""
        if buffer_name is not None:
            names = _names(buffer_name)
            for name in names:
                self._buffer(name)
            return {name: self._items(name, data) for name in names}
        if len(self._buffers) == 1:
            only = next(iter(self._buffers))
            if not any(isinstance(item, Mapping) and item.get("buffer_name") is not None for item in as_items(data)):
                return {only: self._items(only, data)}
        shares: dict[str, list[Any]] = {}
        for item in as_items(data):
            own = item.get("buffer_name") if isinstance(item, Mapping) else None
            for name in [self._only("push data")] if own is None else _names(own):
                self._buffer(name)
                shares.setdefault(name, []).append(item)
        return shares

    def _items(self, name: str, data: Any) -> list[Any]:
        buffer = self._buffers[name]
        return buffer.as_episodes(data) if isinstance(buffer, EpisodeReplayBuffer) else as_items(data)

    def _drawn(
        self, batch_size: Any, iteration: int, ratio: Mapping[str, float] | None, method: str
    ) -> tuple[list[int] | None, dict[str, Any] | None]:
        """Draw from all buffers or from none: their order, and what `method` of each gives; (None, None) if none."""
        iteration, start_s = check_iteration(iteration), time.monotonic()
        while True:
            self._check_open("sample")
            with self._choice_lock:
                before = self.rng.get_state()
                order, sizes = self._shares_of_samples.share_out(batch_size, ratio, self.rng)
                if method == "_take_tensors":
                    sizes = {name: size for name, size in sizes.items() if size}
                    self._check_prioritized(sizes)
                found = self._in_all(sizes, False, partial(self._taken, sizes, iteration, method))
                if isinstance(found, dict):
                    return order, found
                self.rng.set_state(before)
            # Nothing is held or counted here: who waits must not keep others from what it waits for.
            if found is None:
                return None, None
            try:
                self._buffers[found]._await(sizes[found], False, start_s)
            except RateLimitedError:
                return None, None

    def _in_all(
        self, numbers: Mapping[str, int], is_push: bool, work: Callable[[], dict[str, Any] | None]
    ) -> dict[str, Any] | str | None:
        """Do `work` for so many items of each buffer; or give the name of one whose limiter does not let it pass."""
        with self._locked(numbers), ExitStack() as undo:
            for name, number in numbers.items():
                if not self._buffers[name]._admit(number, is_push):
                    return name
                undo.callback(self._buffers[name]._undo, number, is_push)
            found = work()
            if found is not None:
                undo.pop_all()
        return found

    def _taken(self, sizes: Mapping[str, int], iteration: int, method: str) -> dict[str, Any] | None:
        """Draw from all buffers or from none. Each is asked, so that all let go of what is stale."""
        answers = [self._buffers[name]._has(size, iteration) for name, size in sizes.items()]
        if not all(answers):
            return None
        return {name: getattr(self._buffers[name], method)(size, iteration) for name, size in sizes.items()}


def _names(given: Any) -> list[str]:
    """List names: one, or several, each once."""
    return [given] if isinstance(given, str) else list(dict.fromkeys(given))
