"""`Shard`: one buffer in an actor, its checkpoints, and which pushes of which collector it holds.

One rule: a push is applied once, in the order of its collector. Each has a number; the one that is due is applied, one
that was applied is left out, and one that comes too early is answered with the number that is due, whereupon its
collector sends again from there. A checkpoint holds the buffer and those numbers of one moment. Ray runs draws in one
thread, pushes in another, all else in a third; the buffer's own lock is enough for the first two.
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

from ..core.arguments import real, whole
from ..core.durable import read_json, replace_file, write_json
from ..core.fields import flatten
from ..errors import BufferEmptyError, UsageError
from ..live.rates import RateLimitedError, RateLimiter
from ..saving.folder import MissingFolderError
from ..saving.store import load_store
from .packed import Packed, is_numbers, join, map_tree, pack, unpack

#: Method -> thread of the actor that runs it; others run in its main thread.
GROUPS = {"draw": "drawing", "update": "drawing", "push": "pushing"}
#: So often rows are drawn anew to fill a batch with rows that are not too old.
_MAX_DRAWS = 64
_STATE, _ROWS = "shard.json", "rows_"


@dataclass(frozen=True)
class RemoteOptions:
    """Options of `RemoteBuffer`."""

    prefetch: int = 2  # replies that are requested ahead of the consumer; 0 draws when it is asked for
    batches_per_reply: int = 1  # batches that one reply brings
    copy: bool = False  # whether samples are the caller's own; otherwise large ones are shared memory, for reading only
    max_pending: int = 2  # pushes, and updates, to a shard that may be unanswered; the client waits beyond that
    checkpoint_dir: str | None = (
        None  # on a file system that all machines see; what is there is taken up; None for none
    )
    max_unsaved_bytes: int = 256 << 20  # pushes to a shard that no checkpoint holds; beyond it asks for one and waits
    rate_limiter: Mapping[str, Any] | None = None  # arguments of a `RateLimiter` of each shard, which counts rows
    max_staleness: int | None = None  # rows are drawn only if their policy version is at most so much behind ours
    version_key: str = "policy_version"  # the field with the policy version of a row, integers, in every sample
    whole_trajectories: bool = False  # whether each push ends with the end of its trajectories
    timeout_s: float = 60.0  # how long one answer may take
    seed: int = 0  # of the shards' draws
    actor_options: Mapping[str, Any] = field(default_factory=dict)  # of Ray: num_cpus, resources, ...

    def __post_init__(self) -> None:
        action, least = "make a RemoteBuffer", {"prefetch": 0, "batches_per_reply": 1, "max_pending": 1}
        for name, low in {**least, "max_unsaved_bytes": 1, "seed": 0}.items():
            whole(action, name, getattr(self, name), low)
        whole(action, "max_staleness", 0 if self.max_staleness is None else self.max_staleness, 0)
        real(action, "timeout_s", self.timeout_s, "> 0 seconds", lambda seconds: 0 < seconds < inf)


class Ack(NamedTuple):
    """What a shard tells: its actor's life, its rows, the push that is due, the first one that no checkpoint holds."""

    life: str
    num_rows: int
    due: int
    unsaved: int


class Traits(NamedTuple):
    """Whether rows follow each other, how many of a sample belong together, whether priorities are set by ids."""

    has_steps: bool
    unit: int
    has_ids: bool


class Shard:
    """One buffer: what `make` makes, in shard `place[0]` of `place[1]`, with checkpoints in `folder` if it is given."""

    def __init__(
        self, make: Callable[[], Any], place: tuple[int, int], folder: str | None, options: RemoteOptions
    ) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(options.seed * place[1] + place[0])  # every process starts with the same seed
        self._place, self._folder, self._options, self._life = place, folder, options, secrets.token_hex(8)
        self._buffer = make()
        if getattr(self._buffer, "rate_limiter", None) is not None:
            advice = "Give rate_limiter to RemoteBuffer, which waits without a lock"
            raise UsageError("keep a buffer in an actor", "", "one without a rate_limiter", "one with", advice)
        self._limiter = None if options.rate_limiter is None else RateLimiter(**options.rate_limiter)
        #: Collector -> number of its push that is due; as it is, and as of the last checkpoint; who pushed last.
        self._due: dict[str, int] = {}
        self._saved: dict[str, int] = {}
        self._last: str | None = None
        #: Held while a push is applied, and while buffer and numbers are saved.
        self._applying = threading.Lock()
        if folder is not None and (Path(folder) / _STATE).exists():
            self._buffer, self._due = self._read(folder)
            self._saved = dict(self._due)

    # Drawing.

    def draw(self, asked: tuple[str, list[int], tuple[Any, ...], dict[str, Any], int | None]) -> Any:
        """Call a method of the buffer for each size above 0, its first argument; give the fields of `Ack`, and results.

        What is asked (method, sizes, other arguments, options, policy version) is one argument: each takes 60 us.
        """
        name, sizes, args, options, version = asked
        method, found = getattr(self._buffer, name), []
        for size in filter(None, sizes):
            if self._limiter is not None and not self._limiter.sample(size):
                raise RateLimitedError(f"draw {size} rows", "", "more pushes", str(self._limiter.snapshot()))
            try:
                found.append(pack(self._fresh(partial(method, size, *args, **options), size, version)))
            except BaseException:
                if self._limiter is not None:
                    self._limiter.undo(num_sampled=size)
                raise
        return tuple(self.hello("")), found

    def update(self, name: str, packed: Packed) -> None:
        """Call a method of the buffer that tells what a learner found."""
        args, options = unpack(packed)
        getattr(self._buffer, name)(*args, **options)

    def _fresh(self, draw: Callable[[], Any], size: int, version: int | None) -> Any:
        """Draw; leave out rows that are too old and draw again until a batch is full: the others are equally likely."""
        limit, parts, num_kept, num_rows = self._options.max_staleness, [], 0, 1
        if limit is None or version is None:
            return draw()
        for _ in range(_MAX_DRAWS):
            found = draw()
            if found is None:
                return None
            unit = self.about().unit
            fresh = _are_fresh(found, self._options.version_key, version - limit, 1 if size % unit else unit)
            parts.append(found if bool(fresh.all()) else _rows_of(found, fresh))
            num_kept, num_rows = num_kept + int(fresh.sum()), len(fresh)
            if num_kept >= num_rows:
                return _rows_of(join(parts), slice(num_rows)) if len(parts) > 1 else parts[0]
        expected = f"{num_rows} rows of policy version {version - limit} or later"
        raise BufferEmptyError("draw", "", expected, f"{num_kept} in {_MAX_DRAWS} draws", "Push newer rows")

    # Pushing.

    def push(self, collector: str, number: int, given: tuple[str, Packed | None]) -> tuple[Ack, Exception | None]:
        """Call a method of the buffer if the push is due, or, without arguments, only count it; give its error back."""
        due, error, (name, packed) = self._due.get(collector, 0), None, given
        if number != due:
            return self.hello(collector), None
        args, options = ((), {}) if packed is None else unpack(packed)
        num_rows, limiter = _num_rows(args), self._limiter
        if packed is not None and limiter is not None and not limiter.insert(num_rows):
            raise RateLimitedError(f"insert {num_rows} rows", "", "more draws", str(limiter.snapshot()))
        with self._applying:
            try:
                if packed is not None:
                    self._check_alone(collector)
                    getattr(self._buffer, name)(*args, **options)
            except Exception as cause:  # noqa: BLE001 - the collector raises it
                error = cause
                if limiter is not None:
                    limiter.undo(num_inserted=num_rows)
            self._due[collector] = due + 1
        return self.hello(collector), error

    def _check_alone(self, collector: str) -> None:
        """Refuse rows that would seem to follow those of another collector, in between those of this one."""
        is_between = self._last not in (None, collector) and self._due.get(collector, 0)
        if is_between and self.about().has_steps and not self._options.whole_trajectories:
            advice = "Make more shards, or push whole trajectories and give whole_trajectories=True"
            raise UsageError("push steps", "", "one collector for each shard", "two in turns", advice)
        self._last = collector

    # All else.

    def hello(self, collector: str) -> Ack:
        """Tell how many rows there are, and where a collector's pushes are."""
        return Ack(self._life, len(self._buffer), self._due.get(collector, 0), self._saved.get(collector, 0))

    def about(self) -> Traits:
        """Tell what a client has to know of the buffer."""
        made = self._buffer
        has_steps = getattr(made, "end_key", None) is not None or hasattr(made, "seq_length")
        is_flat, has_ids = (
            hasattr(made, method) and name in inspect.signature(getattr(made, method)).parameters
            for method, name in (("sample", "seq_length"), ("update_priorities", "ids"))
        )
        return Traits(has_steps, int(made.seq_length or 1) if is_flat else 1, has_ids)

    def call(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Packed:
        """Call any method of the buffer, or give an attribute."""
        with self._applying:
            found = getattr(self._buffer, name)
            return pack(found(*args, **options) if callable(found) else found)

    def save(self, collector: str, number: int = 0, folder: str | None = None) -> Ack:
        """Save in a folder, or a checkpoint; with `number` only if none holds the pushes of a collector below it."""
        if folder is not None or number == 0 or self._saved.get(collector, 0) < number:
            with self._applying:
                self._write(folder or self._folder)
        return self.hello(collector)

    def load(self, folder: str) -> None:
        """Take over what was saved; the numbers that are due stay."""
        with self._applying:
            self._buffer = self._read(folder)[0]
            if self._folder is not None:
                self._write(self._folder)

    def _write(self, folder: str | None) -> None:
        """Save buffer and numbers; the file of numbers, which is replaced last, says which folder of rows counts."""
        if folder is None:
            raise UsageError("save a checkpoint", "", "a RemoteBuffer with checkpoint_dir", "one without")
        place, number = Path(folder), secrets.randbelow(1 << 48)
        self._buffer.save(place / f"{_ROWS}{number}")
        with replace_file(place / _STATE) as path:
            write_json(path, {"place": list(self._place), "rows": number, "due": self._due})
        if folder == self._folder:
            self._saved = dict(self._due)
        for other in place.glob(f"*{_ROWS}*"):  # those of interrupted saves too
            if other.name != f"{_ROWS}{number}":
                shutil.rmtree(other, ignore_errors=True)

    def _read(self, folder: str) -> tuple[Any, dict[str, int]]:
        action, where = "load a shard", f"from {folder!r}"
        try:
            about = read_json(Path(folder) / _STATE)
        except FileNotFoundError as cause:
            raise MissingFolderError(action, where, f"a folder with {_STATE}", "none") from cause
        if about.get("place") != list(self._place) or not isinstance(about.get("due"), dict):
            raise UsageError(action, where, f"shard {self._place[0]} of {self._place[1]}", str(about.get("place")))
        due = {name: whole(action, "a number of pushes", number, 0) for name, number in about["due"].items()}
        rows = whole(action, "the number of the rows", about.get("rows"), 0)
        found = load_store(Path(folder) / f"{_ROWS}{rows}", self._buffer.device)
        if type(found) is not type(self._buffer):
            raise UsageError(action, where, f"a {type(self._buffer).__name__}", f"a {type(found).__name__}")
        return found, due


def _num_rows(args: tuple[Any, ...]) -> int:
    """Count what is pushed: items of a list, else the first axis."""
    if args and isinstance(args[0], list):
        return len(args[0])
    sizes: list[int] = []
    map_tree(lambda leaf: sizes.append(len(leaf) if leaf.ndim else 1), args[:1], is_numbers)
    return sizes[0] if sizes else 1


def _rows_of(tree: Any, rows: Any) -> Any:
    return map_tree(lambda leaf: leaf[rows], tree)


def _are_fresh(batch: Any, key: str, oldest: int, unit: int) -> torch.Tensor:
    """Tell of each row of a batch whether no row of its unit is older than a version."""
    rows = batch[0] if isinstance(batch, tuple) else batch
    flat = flatten(rows) if hasattr(rows, "items") else {}
    if key not in flat:
        raise UsageError("bound staleness", "", f"samples with the field {key!r}", ", ".join(flat) or "others")
    versions = flat[key]
    found: torch.Tensor = (versions >= oldest).reshape(len(versions) // unit, -1).all(1).repeat_interleave(unit)
    return found
