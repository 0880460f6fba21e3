"""`Shard`: Ray actor with one buffer and its checkpoints.

A collector is a client that adds rows by pushes. It numbers its pushes from 0, and the shard
applies each push once, in this order. The due number of a collector is the number of the next push
to apply. A repeated push is skipped. If a push arrives too early, the answer contains the due
number, and the collector sends its pushes again from this number.

A checkpoint contains the buffer, and the due number of each collector at the time of the save. Ray
runs draws in one thread, pushes in a second thread and other calls in a third. The lock of the
buffer synchronizes draws and pushes.
"""

from __future__ import annotations

import inspect
import secrets
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..core.arguments import is_whole, real, whole
from ..core.durable_files import read_json, replace_file, write_json
from ..core.fields import flatten
from ..core.memory import BufferPool
from ..core.random_indices import seeds_from
from ..errors import BufferEmptyError, UsageError
from ..live.rate_limiter import RateLimitedError, RateLimiter
from .packed_results import Packed, is_numbers, join, map_tree, pack, unpack

#: Concurrency group (thread) of the actor for each method. Other methods run in the main thread.
GROUPS = {"draw": "drawing", "push_update": "drawing", "push": "pushing"}
#: Methods by which a learner changes a buffer, such as new priorities. They are sent like pushes.
UPDATES = ("update", "update_priorities")
#: Maximum number of draws to fill one batch if stale rows are dropped.
_MAX_DRAWS = 64
_STATE = "shard.json"
_ROWS = "rows_"
_ID = "replay_unique_id"


@dataclass(frozen=True)
class RemoteOptions:
    """Options of `RemoteBuffer`."""

    #: Number of replies to request ahead of their use. 0: request a reply when it is needed.
    prefetch: int = 2
    #: Number of batches that a shard draws per request.
    batches_per_reply: int = 1
    #: Whether samples are copies. Otherwise large samples are read-only shared memory.
    copy: bool = False
    #: Maximum number of unanswered pushes and updates of a client per shard.
    #: Draws wait longer if this number is high.
    max_pending: int = 1
    #: Folder of checkpoints, on a file system that all machines share. None: no checkpoints.
    #: If the folder already contains checkpoints, each shard loads its own.
    checkpoint_dir: str | None = None
    #: Maximum bytes that a client has pushed to a shard since its last checkpoint.
    #: A push beyond this limit saves a checkpoint first.
    max_unsaved_bytes: int = 256 << 20
    #: Arguments of the `RateLimiter` that each shard creates. It counts rows.
    rate_limiter: Mapping[str, Any] | None = None
    #: Maximum difference between the learner's policy version and that of a drawn row.
    #: `set_version` sets the version of the learner. None: no limit.
    max_staleness: int | None = None
    #: Field with the policy version of each row, an integer. `max_staleness` needs this field.
    version_key: str = "policy_version"
    #: Whether each push consists of whole trajectories, so that pushes may go to any shard.
    whole_trajectories: bool = False
    #: Time limit for one answer, in seconds.
    timeout_s: float = 60.0
    #: Seed of the random draws of all shards.
    seed: int = 0
    #: Options of the Ray actors, such as `num_cpus` and `resources`.
    actor_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        least = {"prefetch": 0, "batches_per_reply": 1, "max_pending": 1}
        for name, low in {**least, "max_unsaved_bytes": 1, "seed": 0}.items():
            whole(name, getattr(self, name), low)
        whole("max_staleness", 0 if self.max_staleness is None else self.max_staleness, 0)
        real("timeout_s", self.timeout_s, "> 0 seconds", lambda seconds: 0 < seconds < inf)


class Ack(NamedTuple):
    """Answer of a shard to a collector.

    Attributes:
        life: Random id of the process of the actor. It changes with each restart.
        num_rows: Number of rows in the buffer.
        due: Number of the next push of the collector that the shard will apply.
        unsaved: Number of the collector's first push that the last checkpoint does not contain.
    """

    life: str
    num_rows: int
    due: int
    unsaved: int


class Traits(NamedTuple):
    """Properties of the buffer of a shard that clients need.

    Attributes:
        has_steps: Whether consecutive rows are steps of a trajectory.
        unit: Default number of rows per drawn window. 0 if the method `sample` of the buffer has no
            argument `seq_length`.
    """

    has_steps: bool
    unit: int


class Shard:
    """Actor with one buffer and its checkpoints.

    Args:
        make: Function that creates the buffer.
        place: (number of this shard, number of shards).
        folder: Folder of the checkpoints; None for no checkpoints.
        options: Options of `RemoteBuffer`.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        place: tuple[int, int],
        folder: str | None,
        options: RemoteOptions,
    ) -> None:
        torch.set_num_threads(1)
        self._place = place
        self._folder = folder
        self._options = options
        self._life = secrets.token_hex(8)
        self._limiter = (
            None if options.rate_limiter is None else RateLimiter(**options.rate_limiter)
        )
        #: Memory pool for the batches of a reply. New memory for each batch takes 4 times as long.
        self._pool = (
            BufferPool(2 * options.batches_per_reply) if options.batches_per_reply > 1 else None
        )
        #: Due number of each collector: the number of its next push to apply.
        self._due: dict[str, int] = {}
        #: Due numbers in the last checkpoint.
        self._saved: dict[str, int] = {}
        #: Id of the collector whose push added rows last.
        self._last: str | None = None
        #: Lock held during a push, and while the buffer and the due numbers are saved.
        self._applying = threading.Lock()
        self._created: Any = None
        self._names: list[str] = []
        self._failure: Exception | None = None
        try:
            with seeds_from(options.seed * place[1] + place[0]):
                self._created = self._checked(make())
            self._has_ids = _has(self._created, "update_priorities", "ids")
            has_windows = _has(self._created, "sample", "seq_length")
            has_end_key = getattr(self._created, "end_key", None) is not None
            self._traits = Traits(
                has_steps=has_end_key or hasattr(self._created, "seq_length"),
                unit=int(self._created.seq_length or 1) if has_windows else 0,
            )
            if folder is not None and (Path(folder) / _STATE).exists():
                self._read(folder)
        # Store the error, so that each later call raises it. Ray would end the actor after an
        # error of the constructor, and report only the text of the error.
        except Exception as error:  # noqa: BLE001
            self._failure = error

    @property
    def _buffer(self) -> Any:
        if self._failure is not None:
            raise self._failure
        return self._created

    def _checked(self, buffer: Any) -> Any:
        """Check that a buffer can be used in an actor, and make its name unique among the shards.

        Raises:
            UsageError: The buffer has no method `sample`, has its own rate limiter, or cannot be
                divided into shards.
        """
        type_name = type(buffer).__name__
        at, num_shards = self._place
        parts = _parts_of(buffer)
        problem = ""
        if not hasattr(buffer, "sample"):
            problem = f"a {type_name} has no method sample and cannot be used in an actor."
        elif buffer not in parts and num_shards > 1:
            problem = (
                f"a {type_name} cannot be divided into {num_shards} shards. Create one "
                "RemoteBuffer for each of its buffers."
            )
        elif any(getattr(part, "rate_limiter", None) for part in parts):
            problem = (
                "the buffer has a rate_limiter, which would block its actor. Pass rate_limiter to "
                "RemoteBuffer."
            )
        if problem:
            raise UsageError(problem)
        if num_shards > 1 and hasattr(buffer, "name"):
            self._names = [f"{buffer.name}_{number}" for number in range(num_shards)]
            buffer.name = self._names[at]
        return buffer

    # Drawing.

    def draw(
        self, request: tuple[str, list[int], tuple[Any, ...], dict[str, Any], int | None]
    ) -> Any:
        """Draw batches by a method of the buffer, and pack them for the client.

        Args:
            request: (name of the method, sizes of the batches, other arguments of the method, its
                options, policy version of the learner). The size is the first argument of the
                method. A size of 0 draws no batch. One tuple is passed, because each argument of a
                Ray call takes 60 us.

        Returns:
            The fields of an `Ack`, and the packed batches.
        """
        name, sizes, args, options, version = request
        method = getattr(self._buffer, name)
        results = []
        limiter = self._limiter
        unit = unit_of(self._traits, name, args, options)
        for size in filter(None, sizes):
            num_rows = sum(size.values()) if isinstance(size, Mapping) else size
            result = None
            if limiter is not None and not limiter.sample(num_rows):
                raise RateLimitedError(
                    f"The rate limiter refused a draw of {num_rows} rows until more rows are "
                    f"pushed: {limiter.snapshot()}."
                )
            try:
                result = self._fresh(partial(method, size, *args, **options), unit, version)
            finally:
                if result is None and limiter is not None:
                    limiter.undo(num_sampled=num_rows)
            if self._place[1] > 1 and self._has_ids and isinstance(result, tuple):
                result = *result[:-1], result[-1] * self._place[1] + self._place[0]
            results.append(pack(result, self._pool))
        return tuple(self.acknowledge("")), results

    def _fresh(self, draw: Callable[[], Any], unit: int, version: int | None) -> Any:
        """Draw repeatedly, without windows of outdated policies, until a batch is full.

        A window of `unit` rows is dropped if the policy version of a row is more than
        `max_staleness` below `version`. All other windows remain equally likely.
        """
        limit = self._options.max_staleness
        key = self._options.version_key
        parts = []
        num_kept = 0
        if limit is None or version is None:
            return draw()
        for _ in range(_MAX_DRAWS):
            drawn = draw()
            batch = drawn[0] if isinstance(drawn, tuple) else drawn
            fields = flatten(batch) if isinstance(batch, dict) else {}
            if key not in fields:
                raise UsageError(
                    "max_staleness needs the policy version of each row, but samples have no "
                    f"field {key!r}. They have the fields {', '.join(fields) or '(none)'}."
                )
            size = len(fields[key])
            fresh = (
                (fields[key] >= version - limit)
                .reshape(size // unit, -1)
                .all(1)
                .repeat_interleave(unit)
            )
            parts.append(_rows_of(drawn, fresh))
            num_kept += int(fresh.sum())
            if num_kept >= size:
                return _rows_of(join(parts), slice(size))
        raise BufferEmptyError(
            f"only {num_kept} of {size} rows had policy version {version - limit} or later in "
            f"{_MAX_DRAWS} draws. Push newer rows."
        )

    # Pushing.

    def push(
        self, collector: str, number: int, content: tuple[str, Packed | None]
    ) -> tuple[Ack, Exception | None]:
        """Apply a push of a collector, unless it is a repeated push or arrives too early.

        Args:
            collector: Id of the collector.
            number: Number of the push. Only the due number is applied.
            content: (name of a method of the buffer, packed arguments of the method). With the name
                "", the push is counted, but no method is called.

        Returns:
            An `Ack`, and the error of the method or None.
        """
        due = self._due.get(collector, 0)
        if number != due:
            return self.acknowledge(collector), None
        name, packed = content
        args, options = ((), {}) if packed is None else unpack(packed)
        error = None
        num_rows = 0 if name in ("", *UPDATES) else _num_rows(self._buffer, name, args)
        limiter = self._limiter
        if limiter is not None and num_rows and not limiter.insert(num_rows):
            raise RateLimitedError(
                f"The rate limiter refused an insertion of {num_rows} rows until more rows are "
                f"drawn: {limiter.snapshot()}."
            )
        with self._applying:
            try:
                if name in UPDATES:
                    self._update(name, args, options)
                elif name:
                    self._check_alone(collector)
                    getattr(self._buffer, name)(*args, **options)
            except Exception as cause:  # noqa: BLE001 - The collector raises this error.
                error = cause
                if limiter is not None:
                    limiter.undo(num_inserted=num_rows)
            self._due[collector] = due + 1
        return self.acknowledge(collector), error

    def push_update(
        self, collector: str, number: int, content: tuple[str, Packed | None]
    ) -> tuple[Ack, Exception | None]:
        """Apply an update of a collector, such as new priorities, in the thread of draws.

        Arguments and result are those of `push`. In the thread of draws, an update does not wait
        for a push that the rate limiter delays.
        """
        return self.push(collector, number, content)

    def _check_alone(self, collector: str) -> None:
        """Raise `UsageError` if two collectors push steps of trajectories alternately.

        The buffer would treat the steps of both collectors as one trajectory.
        """
        is_between = self._last not in (None, collector) and self._due.get(collector, 0)
        if is_between and self._traits.has_steps and not self._options.whole_trajectories:
            raise UsageError(
                "two collectors push steps to one shard alternately. Create more shards, or push "
                "whole trajectories and pass whole_trajectories=True."
            )
        self._last = collector

    def _update(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Apply an update, such as new priorities, to the rows or items that this shard stores."""
        if self._place[1] > 1 and name == "update_priorities" and self._has_ids:
            args = self._own_rows(*args, **options)
            options = {}
        elif name == "update" and self._names:
            args = (self._own_items(*args, **options),)
            options = {}
        getattr(self._buffer, name)(*args, **options)

    def _own_rows(self, ids: Any, priorities: Any) -> tuple[Any, Any]:
        ids = torch.as_tensor(ids)
        priorities = torch.as_tensor(priorities)
        mine = ids % self._place[1] == self._place[0]
        return ids[mine] // self._place[1], priorities[mine] if priorities.dim() else priorities

    def _own_items(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """Remove the items that other shards store from the argument of an update.

        Items that no shard stores remain in the argument of the first shard, whose buffer raises an
        error for them.
        """
        names = [str(item_id).rpartition("_")[0] for item_id in info.get(_ID) or ()]
        mine = [
            (self._names.index(name) if name in self._names else 0) == self._place[0]
            for name in names
        ]
        lists = {key: info[key] for key in (_ID, "priority") if info.get(key) is not None}
        cut = {
            key: [x for x, is_mine in zip(values, mine, strict=True) if is_mine]
            for key, values in lists.items()
        }
        return {**info, **cut}

    # Other calls.

    def acknowledge(self, collector: str) -> Ack:
        """Return the number of rows, and which pushes of a collector are applied and saved.

        `collector` is the id of the collector, or "" to request only the number of rows.
        """
        num_rows = sum(map(len, _parts_of(self._buffer)))
        return Ack(self._life, num_rows, self._due.get(collector, 0), self._saved.get(collector, 0))

    def traits(self) -> Traits:
        """Return properties of the buffer. If the constructor failed, raise its error."""
        assert self._buffer is not None
        return self._traits

    def call(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Packed:
        """Call a method of the buffer, or read an attribute. Pack the result for the client."""
        with self._applying:
            attribute = getattr(self._buffer, name)
            return pack(attribute(*args, **options) if callable(attribute) else attribute)

    def save(self, collector: str, number: int = 0) -> Ack:
        """Save a checkpoint, unless the last checkpoint already contains all pushes of a collector.

        Args:
            collector: Id of the collector.
            number: Number of the collector's next push, which the checkpoint need not contain. 0 to
                save in any case.
        """
        if number == 0 or self._saved.get(collector, 0) < number:
            with self._applying:
                self._write()
        return self.acknowledge(collector)

    def load(self, folder: str) -> None:
        """Replace the buffer by a saved buffer. The counts of pushes stay unchanged."""
        with self._applying:
            self._created = type(self._buffer).load(folder, self._buffer.device)
            if self._folder is not None:
                self._write()

    def _write(self) -> None:
        """Save the buffer and the due numbers as a checkpoint.

        Each checkpoint saves the buffer in a new folder, and then replaces the file `shard.json`,
        which names this folder. After a crash, either the old or the new checkpoint is complete.
        """
        if self._folder is None:
            raise UsageError(
                "no checkpoint can be saved, because the RemoteBuffer was created without "
                "checkpoint_dir. Pass checkpoint_dir to its constructor."
            )
        place = Path(self._folder)
        rows = secrets.randbelow(1 << 48)
        self._buffer.save(place / f"{_ROWS}{rows}")
        with replace_file(place / _STATE) as path:
            write_json(path, {"place": list(self._place), "rows": rows, "due": self._due})
        self._saved = dict(self._due)
        # The pattern also matches folders of interrupted saves.
        for other in place.glob(f"*{_ROWS}*"):
            if other.name != f"{_ROWS}{rows}":
                shutil.rmtree(other, ignore_errors=True)

    def _read(self, folder: str) -> None:
        """Load a checkpoint: the buffer and the due numbers.

        Raises:
            UsageError: The checkpoint is from another shard, or from another number of shards.
        """
        state = read_json(Path(folder) / _STATE)
        place = state.get("place")
        rows = state.get("rows")
        due = state.get("due")
        is_state = isinstance(due, dict) and all(map(is_whole, [rows, *due.values()]))
        if due is None or place != list(self._place) or not is_state:
            number, num_shards = self._place
            raise UsageError(
                f"{folder!r} must contain a checkpoint of shard {number} of {num_shards}, got a "
                f"checkpoint with [shard, number of shards] = {place}. Create as many shards as "
                "were saved, or choose another checkpoint_dir."
            )
        self._created = type(self._created).load(
            Path(folder) / f"{_ROWS}{rows}", self._created.device
        )
        self._saved = dict(due)
        self._due = due


def unit_of(traits: Traits, name: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> int:
    """Return the number of consecutive rows that are drawn as one window; 1 for single rows.

    `args` and `options` are the arguments of the method `name` after the batch size.
    """
    unit = options.get("seq_length") or next(iter(args), None) or traits.unit
    return unit if name == "sample" and traits.unit else 1


def _has(buffer: Any, method: str, argument: str) -> bool:
    """Return whether a buffer has a method with an argument of this name."""
    function = getattr(buffer, method, None)
    return function is not None and argument in inspect.signature(function).parameters


def _parts_of(buffer: Any) -> list[Any]:
    """Return the buffers in a `BufferManager`, or a list of one buffer for any other buffer."""
    if hasattr(buffer, "buffer_name"):
        return [buffer[name] for name in buffer.buffer_name]
    return [buffer]


def _num_rows(buffer: Any, name: str, args: tuple[Any, ...]) -> int:
    """Return the number of rows that a call of the method `name` adds to a buffer.

    This is the length of a list in the first argument, or of the first axis of tensors.
    """
    first_argument = args[0] if args else None
    if isinstance(first_argument, list) and name != "append":
        return len(
            buffer.as_list(first_argument)
            if name == "push" and hasattr(buffer, "as_list")
            else first_argument
        )
    sizes: list[int] = []
    if name not in ("append", "push", "push_data"):
        map_tree(
            lambda leaf: sizes.append(len(leaf) if leaf.ndim else 1), first_argument, is_numbers
        )
    return sizes[0] if sizes else 1


def _rows_of(tree: Any, rows: Any) -> Any:
    return map_tree(lambda leaf: leaf[rows], tree)
