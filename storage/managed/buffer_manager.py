"""`BufferManager`: several buffers in one object: push by name, sample by ratio, update by id.

A call changes all of its buffers or no buffer. It holds the locks of all its buffers and checks the
arguments for each buffer before it changes the first one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch

from ..core import arguments
from ..core.memory import StreamOrder
from ..core.random_indices import generator_on
from ..errors import ClosedError, SchemaError, UsageError, nearest
from ..saving.saved_store import State, Store
from .advanced_buffer import AdvancedReplayBuffer
from .episode_replay_buffer import EpisodeReplayBuffer
from .item_store import as_items, raise_unknown
from .managed_buffer import (
    Act,
    ManagedBuffer,
    NaiveReplayBuffer,
    Request,
    call_if_admitted,
    call_when_admitted,
    locked,
)
from .sample_shares import checked_ratio, share_out_sample, share_out_update
from .used_data import UsedQueue

_Self = TypeVar("_Self", bound="BufferManager")
#: Number of items: in total, or by name of the buffer.
Sizes = int | Mapping[str, int]
#: Shares of a sample, by name of the buffer.
Shares = Mapping[str, float]
#: One name of a buffer, or several names.
Names = str | Sequence[str] | None

#: Buffer classes by the value of `type` in a configuration.
_KINDS: dict[str, type[ManagedBuffer]] = {
    "advanced": AdvancedReplayBuffer,
    "naive": NaiveReplayBuffer,
    "episode": EpisodeReplayBuffer,
}
#: Keys of a configuration that are not names of buffers.
_RESERVED = ("buffer_name", "sample_ratio")


class BufferManager(Store):
    """Several buffers with names.

    Thread-safe: threads may push, sample and update while another thread waits for a limiter.

    Args:
        cfg: Configuration. `buffer_name` is a list of buffer names, non-empty strings. Each name is
            also a key: its value has the arguments of the buffer, and `type`: "advanced"
            (default), "naive" or "episode". `sample_ratio` maps names to shares of a sample, >= 0,
            with sum 1; the share of a missing name is 0. `sample_ratio` is optional with one
            buffer.
        device: Device of buffers without a `device` argument.
        generator: Random generator that chooses among the buffers: a `torch.Generator` on the CPU
            or a seed. None: seeded from `torch.initial_seed()` and the number of objects created
            since that seed changed. Each buffer has a generator for its own draws.
    """

    def __init__(
        self,
        cfg: Mapping[str, Any],
        *,
        device: torch.device | str = "cpu",
        generator: torch.Generator | int | None = None,
    ) -> None:
        self.device = arguments.device("device", device)
        self.rng = generator_on(generator, torch.device("cpu"))
        self._lock = threading.RLock()
        # The manager itself stores no tensors on a device; each buffer has an order of its own.
        self._order = StreamOrder(torch.device("cpu"))
        #: Lock held while a call chooses buffers and calls their limiters, but not while a thread
        #: waits for a limiter.
        self._choice_lock = threading.Lock()
        self._buffers = _make_buffers(cfg, self.device)
        ratio = cfg.get("sample_ratio")
        if ratio is None and len(self._buffers) == 1:
            ratio = dict.fromkeys(self._buffers, 1.0)
        self._ratio = None if ratio is None else checked_ratio(ratio, self._buffers)
        self._is_closed = False

    @property
    def buffer_name(self) -> list[str]:
        """Names of the buffers, in order."""
        return list(self._buffers)

    @property
    def sample_ratio(self) -> dict[str, float] | None:
        """Copy of the configured shares; None if several buffers were configured without shares."""
        return None if self._ratio is None else dict(self._ratio)

    def __getitem__(self, name: str) -> Any:
        """Return the buffer with a name."""
        if not isinstance(name, str) or name not in self._buffers:
            raise_unknown(name, self._buffers)
        return self._buffers[name]

    # Adding items.

    def push_data(self, data: Any, buffer_name: Names = None) -> None:
        """Add an item, or a list of items, to one or several buffers.

        If an error is raised, no buffer is changed.

        Args:
            data: Items, as for `push` of the buffers.
            buffer_name: A name, or a list of names. None: the key `buffer_name` of each item is the
                name, or the list of names. An item without this key is added to the only buffer.

        Raises:
            KeyError: No buffer has this name.
            ValueError: There are several buffers, and an item has no key `buffer_name`.
            MissingFieldError, SchemaError, FieldTypeError: An item does not match the earlier items
                of a buffer.
        """
        self._check_open()
        if buffer_name is not None:
            arguments.instance("buffer_name", buffer_name, "a name or a list of names", Iterable)
        start_s = time.monotonic()
        items = self._routed(data, buffer_name)
        numbers = {buffer: len(part) for buffer, part in items.items()}
        call_when_admitted(
            numbers,
            True,
            lambda: [buffer.prepare_push(part, start_s) for buffer, part in items.items()],
        )

    def push(self, data: Any, buffer_name: Names = None) -> None:
        """Add an item or a list of items; see `push_data`."""
        self.push_data(data, buffer_name)

    def append(self, data: Any, buffer_name: Names = None) -> None:
        """Add one item."""
        self.push_data([data], buffer_name)

    def extend(self, data: Iterable[Any], buffer_name: Names = None) -> None:
        """Add several items."""
        items = arguments.instance("data", data, "an iterable of items", Iterable)
        self.push_data(list(items), buffer_name)

    # Drawing.

    def sample_check(
        self, batch_size: Sizes, cur_learner_iter: int = 0, sample_ratio: Shares | None = None
    ) -> bool:
        """Return whether `sample` would return items without waiting. Stale items are removed."""
        Request.checked(0, cur_learner_iter)
        with self._choice_lock:
            before = self.rng.get_state()
            _, sizes = self._divided_sample(batch_size, sample_ratio)
            # Restore the random state, so that the next `sample` draws the same sizes.
            self.rng.set_state(before)
            with locked(self[name] for name in sizes):
                are_ready = [
                    self[name].sample_check(size, cur_learner_iter) for name, size in sizes.items()
                ]
        return all(are_ready) and not self._is_closed

    def sample(
        self, batch_size: Sizes, cur_learner_iter: int = 0, sample_ratio: Shares | None = None
    ) -> Any:
        """Draw items from all requested buffers or from none.

        Args:
            batch_size: Total number of items, or a number by name. A total is divided by the
                shares with systematic sampling: one buffer is drawn from each of `batch_size` equal
                intervals. The count of each buffer is within two items of its share.
            cur_learner_iter: Current iteration of the learner.
            sample_ratio: Shares for this call instead of the configured shares.

        Returns:
            A list of `batch_size` items in random order, or a list of items by name if `batch_size`
            is a mapping. None if a buffer has too few items or its limiter rejects the sample. In
            this case only stale items were removed.

        Raises:
            KeyError: No buffer has this name.
            ValueError: The shares are negative, or do not sum to 1.
        """
        order, samples = self._draw(batch_size, cur_learner_iter, sample_ratio, are_tensors=False)
        if samples is None or order is None:
            return samples
        items = [item for part in samples.values() for item in part]
        return [items[place] for place in order]

    def sample_tensors(
        self, batch_size: Sizes, cur_learner_iter: int = 0, sample_ratio: Shares | None = None
    ) -> dict[str, Any] | None:
        """Draw batches of tensors from prioritized buffers, in the way of `sample`.

        Returns:
            A dict by name: (batch, weights, ids) of `AdvancedReplayBuffer.sample_tensors`, for each
            buffer with at least one drawn row. The ids are arguments of `update_priorities`. None
            in the same cases as for `sample`.
        """
        return self._draw(batch_size, cur_learner_iter, sample_ratio, are_tensors=True)[1]

    # Updating.

    def update(self, info: Mapping[str, Any]) -> int:
        """Update priorities of items of several buffers; see `AdvancedReplayBuffer.update`.

        The name of an item's buffer is the part of its id before the last "_". A `used_id` names no
        buffer, so every prioritized buffer releases it. A buffer without this id ignores it.

        Returns:
            Number of applied priorities.

        Raises:
            KeyError: No buffer has this name. Nothing is changed in any buffer.
            ValueError: A priority is negative or not finite, or the numbers of priorities and ids
                differ.
        """
        tracking = [
            name
            for name, buffer in self._buffers.items()
            if isinstance(buffer, AdvancedReplayBuffer)
        ]
        parts = share_out_update(info, self._buffers, tracking)
        with locked(self[name] for name in parts):
            acts = [self[name].prepare_update(part) for name, part in parts.items()]
            return sum(act() for act in acts)

    def update_priorities(self, ids: Mapping[str, Any], priorities: Mapping[str, Any]) -> Any:
        """Set priorities of rows.

        Args:
            ids: Ids of `sample_tensors`, by name of the buffer.
            priorities: Priorities of the rows, by name of the buffer.

        Returns:
            Number of applied priorities. On a GPU a 0-d tensor: `int()` of the tensor waits for
            the GPU.
        """
        if set(ids) != set(priorities):
            raise UsageError(
                f"ids and priorities must have the same buffers, got {sorted(ids)} and "
                f"{sorted(priorities)}."
            )
        buffers = {name: self._prioritized(name) for name in ids}
        with locked(buffers.values()):
            acts = [
                buffer.prepare_priorities(ids[name], priorities[name])
                for name, buffer in buffers.items()
            ]
            return sum(act() for act in acts)

    def used_data(self, buffer_name: str | None = None) -> UsedQueue:
        """Return a buffer's queue of `data_id`s that are no longer used.

        `buffer_name=None` means the only buffer.
        """
        name = self._only() if buffer_name is None else buffer_name
        return self._prioritized(name).used_data()

    # Counting and closing.

    def count(self, buffer_name: str | None = None) -> int:
        """Return the number of items in the buffer `buffer_name`.

        For None, return the number of items in the buffer with the fewest items.
        """
        if buffer_name is not None:
            return len(self[buffer_name])
        return min(map(len, self._buffers.values()))

    def clear(self, buffer_names: Names = None) -> None:
        """Remove the items of some buffers; None for all buffers."""
        names = self.buffer_name if buffer_names is None else _names(buffer_names)
        # All names are checked before the first buffer is cleared.
        buffers = [self[name] for name in names]
        for buffer in buffers:
            buffer.clear()

    def start(self) -> None:
        """Do nothing, because there are no threads. Code may call `start` on all its objects."""

    def run(self) -> None:
        """Do nothing; see `start`."""
        self.start()

    def close(self) -> None:
        """Close every buffer. Idempotent."""
        self._is_closed = True
        for buffer in self._buffers.values():
            buffer.close()

    def __enter__(self: _Self) -> _Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Saving.

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load a `state_dict`. If an error is raised, no buffer is changed.

        Args:
            state: Result of `state_dict`.
            strict: Whether the state must have the same buffers and ratio. If False, only buffers
                that exist in the state and in this manager are loaded, and their arguments must be
                equal. The ratio and the generator of this manager are then unchanged.
        """
        if strict:
            super().load_state_dict(state)
            return
        self.check_form(state)
        saved_cfg = state["arguments"].get("cfg")
        if saved_cfg is None:
            raise SchemaError(f"the state belongs to a {state['class']}, expected a BufferManager.")
        with locked(self._buffers.values()):
            places = {
                name: place
                for place, name in enumerate(saved_cfg["buffer_name"])
                if name in self._buffers
            }
            for name in places:
                arguments = {key: value for key, value in saved_cfg[name].items() if key != "type"}
                self[name].check_equal(type(self[name]).__name__, {**arguments, "name": name})
            self._load_buffers(places, state["numbers"], state["tensors"])

    def raise_deferred(self, wait: bool = False) -> None:
        for buffer in self._buffers.values():
            buffer.raise_deferred(wait)

    def _get_state(self) -> State:
        cfg: dict[str, Any] = {"buffer_name": self.buffer_name, "sample_ratio": self.sample_ratio}
        numbers: dict[str, Any] = {}
        with self._choice_lock, locked(self._buffers.values()):
            # Read the random state under the lock, so that it belongs to the state of the buffers.
            tensors = {"rng": self.rng.get_state()}
            for place, (name, buffer) in enumerate(self._buffers.items()):
                # A copy is needed, since other calls change the buffer after the locks are
                # released.
                state = buffer.copy_state()
                type_name = next(
                    type_name
                    for type_name, buffer_type in _KINDS.items()
                    if type(buffer) is buffer_type
                )
                cfg[name] = {
                    "type": type_name,
                    **{key: x for key, x in state.arguments.items() if key != "name"},
                }
                numbers[name] = state.numbers
                tensors.update({f"buffer/{place}/{key}": x for key, x in state.tensors.items()})
        return State({"cfg": cfg}, {"buffers": numbers}, tensors)

    def _set_state(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        with locked(self._buffers.values()):
            self._load_buffers(
                {name: place for place, name in enumerate(self._buffers)}, numbers, tensors
            )

    def _load_buffers(
        self,
        places: Mapping[str, int],
        numbers: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        """Load some buffers, all or none. `places` maps names to positions in the state."""
        with ExitStack() as stack:
            for name, place in places.items():
                buffer = self._buffers[name]
                prefix = f"buffer/{place}/"
                stack.enter_context(buffer.unchanged_on_failure())
                of_buffer = {
                    key.removeprefix(prefix): x
                    for key, x in tensors.items()
                    if key.startswith(prefix)
                }
                buffer.take_state(numbers["buffers"][name], of_buffer)

    # Private methods.

    def _prioritized(self, name: str) -> AdvancedReplayBuffer:
        buffer = self[name]
        if not isinstance(buffer, AdvancedReplayBuffer):
            raise UsageError(
                f"buffer {name!r} must have the type 'advanced', got {type(buffer).__name__}."
            )
        return buffer

    def _only(self) -> str:
        if len(self._buffers) > 1:
            raise UsageError(
                "buffer_name is missing, and there are several buffers: "
                f"{', '.join(map(repr, self._buffers))}. Pass buffer_name."
            )
        return next(iter(self._buffers))

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the manager is closed. Create a new BufferManager.")

    def _routed(self, data: Any, buffer_name: Names) -> dict[ManagedBuffer, list[Any]]:
        """Choose the buffers of each pushed item, and return the items by buffer."""
        items = as_items(data) if buffer_name is None else []
        names = [item.get("buffer_name") if isinstance(item, Mapping) else None for item in items]
        if buffer_name is None and len(self._buffers) == 1 and all(name is None for name in names):
            buffer_name = self._only()
        if buffer_name is not None:
            return {self[name]: self[name].as_list(data) for name in _names(buffer_name)}
        routed: dict[ManagedBuffer, list[Any]] = {}
        for item, named in zip(items, names, strict=True):
            targets = [self._only()] if named is None else _names(named)
            for name in targets:
                routed.setdefault(self[name], []).append(item)
        return routed

    def _divided_sample(
        self, batch_size: Sizes, ratio: Shares | None
    ) -> tuple[list[int] | None, dict[str, int]]:
        """Return the order of the items in the sample, and the number of items by buffer name.

        The order is as in `share_out_sample`; None if `batch_size` is a mapping.
        """
        if isinstance(batch_size, Mapping):
            sizes = {}
            for name, number in batch_size.items():
                sizes[name] = arguments.whole(f"batch_size of {name!r}", number, 0)
            return None, sizes
        size = arguments.whole("batch_size", batch_size, 0)
        shares = self._ratio if ratio is None else checked_ratio(ratio, self._buffers)
        if shares is None:
            raise UsageError("sample_ratio is missing. Pass it here or in the configuration.")
        return share_out_sample(size, shares, self.rng)

    def _draw(
        self, batch_size: Sizes, iteration: int, ratio: Shares | None, are_tensors: bool
    ) -> tuple[list[int] | None, dict[str, Any] | None]:
        """Draw from all requested buffers, or from none. Waits for the rate limiters.

        Returns:
            (order, samples), or (None, None) if nothing was drawn. `order` is as in
            `share_out_sample`; None if `batch_size` is a mapping. `samples` are the samples by
            buffer name.
        """
        request = Request.checked(0, iteration)._replace(are_tensors=are_tensors)
        start_s = time.monotonic()
        while True:
            self._check_open()
            with self._choice_lock:
                before = self.rng.get_state()
                order, sizes = self._divided_sample(batch_size, ratio)
                sizes = {name: size for name, size in sizes.items() if size or not are_tensors}
                numbers = {
                    self._prioritized(name) if are_tensors else self[name]: x
                    for name, x in sizes.items()
                }
                samples, refusing = call_if_admitted(
                    numbers, False, partial(_prepare_samples, request, numbers)
                )
                if samples is not None:
                    return order, dict(zip(sizes, samples, strict=True))
                self.rng.set_state(before)
            # While this thread waits, it holds no lock and its items are not counted. Other threads
            # can therefore proceed.
            if refusing is None or not refusing.wait_until_admitted(
                numbers[refusing], False, start_s
            ):
                return None, None


def _prepare_samples(request: Request, numbers: Mapping[ManagedBuffer, int]) -> list[Act | None]:
    """Remove the stale items of every buffer, and return a function per buffer that draws items.

    The function is None for a buffer with too few items. The order is that of `numbers`.
    """
    return [buffer.prepare_sample(request._replace(size=size)) for buffer, size in numbers.items()]


def _make_buffers(cfg: Any, device: torch.device) -> dict[str, ManagedBuffer]:
    """Create the buffers of a configuration, by name; see `BufferManager`."""
    if not isinstance(cfg, Mapping):
        raise UsageError(f"cfg must be a mapping, got {type(cfg).__name__}.")
    names = cfg.get("buffer_name")
    if isinstance(names, str) or not isinstance(names, Sequence) or not names:
        raise UsageError(f"cfg['buffer_name'] must be a list of names, got {names!r}.")
    buffers: dict[str, ManagedBuffer] = {}
    for name in names:
        if not isinstance(name, str) or not name:
            raise UsageError(f"names in cfg['buffer_name'] must be non-empty str, got {name!r}.")
        if name in buffers:
            raise UsageError(f"cfg['buffer_name'] has the duplicate name {name!r}.")
        if name in _RESERVED:
            raise UsageError(f"the name {name!r} in cfg['buffer_name'] is reserved.")
        options = cfg.get(name)
        if not isinstance(options, Mapping):
            raise UsageError(f"cfg[{name!r}] must be the arguments of the buffer, got {options!r}.")
        options = {"device": device, **options}
        type_name = options.pop("type", "advanced")
        arguments.choice(f"type of {name!r}", type_name, _KINDS)
        try:
            buffers[name] = _KINDS[type_name](**options, name=name)
        except TypeError as cause:
            raise UsageError(
                f"cfg[{name!r}] has invalid arguments for {_KINDS[type_name].__name__}: {cause}."
            ) from cause
    unknown = sorted(set(map(str, cfg)) - set(buffers) - set(_RESERVED))
    if unknown:
        raise UsageError(
            f"cfg has the unknown key {unknown[0]!r}. "
            f"The keys are {nearest(unknown[0], [*buffers, *_RESERVED])}."
        )
    return buffers


def _names(buffer_name: Any) -> list[str]:
    """Convert one name or several names to a list without repetitions."""
    if isinstance(buffer_name, str):
        return [buffer_name]
    expected = "a name or a list of names"
    names = list(arguments.instance("buffer_name", buffer_name, expected, Iterable))
    # Entries that are not str may not be hashable; `__getitem__` rejects them later.
    return list(dict.fromkeys(names)) if all(isinstance(name, str) for name in names) else names
