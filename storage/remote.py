"""`RemoteBuffer`: any buffer of this package in actors of Ray, with the buffer's own methods.

One rule: sampling happens beside the data, and what travels is memory as it lies there. Which rows a sample has is
the buffer's affair; here is decided only how many of them each shard gives. Ray moves, restarts and shares memory.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from .core.arguments import path, whole
from .errors import BufferEmptyError, UsageError
from .ray_actors.link import Link, LostActorError
from .ray_actors.packed import join, pack, unpack
from .ray_actors.shard import GROUPS, Ack, RemoteOptions, Shard, Traits

_PUSHES = ("add", "append", "extend", "extend_tensors", "insert", "push")
_DRAWS = ("sample", "sample_tensors", "sample_transitions")
_UPDATES = ("update", "update_priorities")
#: What buffers call the first argument of a draw.
_SIZES = ("batch_size", "num_windows", "num", "size")
#: Kinds of draws whose requests may be ahead at once.
_MAX_KINDS = 4


class RemoteBuffer:
    """A client of K shards, each a buffer in an actor of Ray.

    Args:
        make: Makes the buffer of a shard: `functools.partial(DictBuffer, capacity=100_000)`.
        num_shards: K.
        options: Those of `RemoteOptions`.

    It has those methods of the buffer that add rows (`extend`, `add`, `push`, ...), draw (`sample`,
    `sample_transitions`, `sample_tensors`) and tell what a learner found (`update_priorities`, `update`). Passed to a
    task or another actor it is another client of the same shards. A client is for one thread.

    Draws: each row comes from a shard with probability rows of the shard / rows of all; a batch has the rows of one
    shard after those of another. With `prefetch` a batch was drawn up to that many replies earlier. Large samples of
    one shard are memory that processes share: torch does not know that it is read-only, so give `copy=True` to change
    samples in place.

    Pushes: each goes to one shard, in turns, or to the one that `pin` says. They return before they are applied; what
    is wrong with one is raised by a later call, at the latest by `flush`. With `checkpoint_dir` a killed actor is
    restarted from its last checkpoint, and clients send again, at their next call, what it does not hold: nothing that
    was answered is missing or doubled. A client that dies together with the actor loses its pushes since then.

    A shard that does not answer within `timeout_s` raises `WaitTimeoutError`, one that is gone `BackgroundError`.
    """

    _links: list[Link]
    _version: int | None = None
    _home: int | None = None
    _known: Traits | None = None
    _is_owner: bool = False

    def __init__(self, make: Callable[[], Any], num_shards: int = 1, **options: Any) -> None:
        import ray

        told = RemoteOptions(**options)
        whole("make a RemoteBuffer", "num_shards", num_shards, 1)
        for method, group in GROUPS.items():
            ray.method(concurrency_group=group)(getattr(Shard, method))
        kind: Any = ray.remote(concurrency_groups=dict.fromkeys(GROUPS.values(), 1))(Shard)
        given = {"max_restarts": 0 if told.checkpoint_dir is None else -1, **told.actor_options}
        actors = []
        for number in range(num_shards):
            folder = None if told.checkpoint_dir is None else _folder_of(told.checkpoint_dir, number)
            actors.append(kind.options(**given).remote(make, (number, num_shards), folder, told))
        self._set_up(actors, told)
        self._is_owner = True

    def __getattr__(self, name: str) -> Any:
        for names, act in ((_PUSHES, "_push"), (_DRAWS, "_draw"), (_UPDATES, "_update")):
            if name in names:
                return lambda *args, **options: getattr(self, act)(name, args, options)
        raise AttributeError(f"a RemoteBuffer has no {name!r}; call({name!r}, ...) calls it of each buffer")

    def __len__(self) -> int:
        """Rows of all shards, with all that this client pushed."""
        self.flush()
        return sum(self._num_rows())

    def __reduce__(self) -> tuple[Any, ...]:
        return _another_client, (self.actors, self._options)

    def __enter__(self) -> RemoteBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def actors(self) -> list[Any]:
        """Handles of the shards' actors."""
        return [link.actor for link in self._links]

    def set_version(self, version: int) -> None:
        """Say at which policy version the learner is; batches that are under way are dropped."""
        self._version = whole("set the version", "version", version, 0)
        self._ahead.clear()

    def pin(self, shard: int) -> None:
        """Send all later pushes of this client to one shard: those of steps that follow each other."""
        self._home = whole("pin a client", "shard", shard, 0, len(self._links) - 1)

    def flush(self) -> None:
        """Wait until all pushes and updates of this client are applied; raise what was wrong with one."""
        while self._updates:
            self._end_update()
        for link in self._links:
            link.flush()

    def checkpoint(self) -> None:
        """Flush, then let each shard save itself in `checkpoint_dir`; its pushes wait meanwhile."""
        self.flush()
        for link in self._links:
            link.checkpoint()

    def save(self, folder: str) -> None:
        """Flush, then let each shard save itself below `folder`, one after another."""
        self.flush()
        for number, link in enumerate(self._links):
            link.ask("save", "", 0, _folder_of(folder, number))

    def load(self, folder: str) -> None:
        """Replace the content of all shards by what as many saved."""
        self.flush()
        self._ahead.clear()
        for number, link in enumerate(self._links):
            link.ask("load", _folder_of(folder, number))

    def call(self, name: str, *args: Any, **options: Any) -> list[Any]:
        """Call a method of each shard's buffer, or read an attribute; give the results, copies.

        What it changes is in no checkpoint before the next one.
        """
        self.flush()
        return [unpack(link.ask("call", name, args, options), copy=True) for link in self._links]

    def close(self) -> None:
        """Flush; save a checkpoint if there are any; the client that made the actors ends them. May be called twice."""
        import ray

        links = self._links
        try:
            if links:
                self.flush()
            for link in links if self._options.checkpoint_dir is not None else ():
                link.checkpoint(is_anew=self._is_owner)
        finally:
            self._links = []
            for link in links if self._is_owner else ():
                ray.kill(link.actor)

    def _set_up(self, actors: list[Any], options: RemoteOptions) -> None:
        name, num = secrets.token_hex(8), len(actors)
        self._options, self._num_pushes, self._rng = options, 0, np.random.default_rng()
        self._links = [Link(actor, name, f"shard {at} of {num}", options) for at, actor in enumerate(actors)]
        #: What is drawn -> batches that are here, and requests that are under way.
        self._ahead: dict[str, tuple[deque[Any], deque[Any]]] = {}
        self._updates: deque[tuple[Link, Any]] = deque()

    def _traits(self) -> Traits:
        if self._known is None:
            self._known = self._links[0].ask("about")
        return self._known

    def _num_rows(self) -> list[int]:
        """Ask how many rows the shards hold."""
        for link in self._links:
            link.has_restarted(link.ask("hello", ""))
        return [0 if link.told is None else link.told.num_rows for link in self._links]

    def _push(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        home, num_shards = self._home, len(self._links)
        if home is None and num_shards > 1 and not self._options.whole_trajectories and self._traits().has_steps:
            advice = "Or push whole trajectories, and give whole_trajectories=True"
            raise UsageError("push steps", "to several shards", "a client after pin(shard)", "one without", advice)
        self._links[self._num_pushes % num_shards if home is None else home].push(name, args, options)
        self._num_pushes += 1

    def _draw(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        size = args[0] if args else next((options.pop(one) for one in _SIZES if one in options), 1)
        asked = name, whole("sample", "the number of rows", size, 1), args[1:], options
        kind = repr(asked)
        ready, requests = self._ahead.pop(kind, (deque(), deque()))

        def act() -> None:
            try:
                for link in self._links:
                    link.catch_up()
                while len(requests) < self._options.prefetch + (not ready):
                    requests.append(self._request(asked))
                if not ready:
                    ready.extend(self._received(requests.popleft()))
            except BaseException:
                requests.clear()
                raise

        try:
            self._links[0].lasting(act)
        except BufferEmptyError:  # perhaps the first pushes are under way
            self.flush()
            self._links[0].lasting(act)
        while len(self._ahead) >= _MAX_KINDS:
            del self._ahead[next(iter(self._ahead))]
        self._ahead[kind] = ready, requests
        return ready.popleft()

    def _request(self, asked: tuple[str, int, tuple[Any, ...], dict[str, Any]]) -> list[Any]:
        """Ask each shard for its part of some batches; give (shard, reference to the answer, sizes of the parts)."""
        name, _, args, options = asked
        sizes = self._sizes(*asked)
        asks = [(name, part, args, options, self._version) for part in sizes]
        return [(at, link.start("draw", asks[at]), sizes[at]) for at, link in enumerate(self._links)]

    def _sizes(self, name: str, size: int, args: tuple[Any, ...], options: dict[str, Any]) -> list[list[int]]:
        """Draw for each shard how many rows of each batch come from it, in proportion to its rows."""
        num_batches = self._options.batches_per_reply
        if len(self._links) == 1:
            return [[size] * num_batches]
        rows = [0 if link.told is None else link.told.num_rows for link in self._links]
        if not all(rows):  # our pushes may be under way, and of a shard that has told nothing yet nothing is known
            self.flush()
            is_known = sum(rows) and all(link.told for link in self._links)
            rows = [link.told.num_rows for link in self._links if link.told] if is_known else self._num_rows()
        if not sum(rows):
            raise BufferEmptyError("sample", "from the shards", "rows", "none")
        unit = self._traits().unit if name == "sample" else 1
        if unit > 1:
            unit = options.get("seq_length") or next(iter(args), None) or unit
        unit = size if size % unit else unit
        found: list[list[int]] = self._rng.multinomial(size // unit, np.array(rows) / sum(rows), num_batches).T.tolist()
        return [[unit * part for part in parts] for parts in found]

    def _received(self, request: list[Any]) -> list[Any]:
        """Wait for the parts of some batches, and join them."""
        batches: list[list[Any]] = [[] for _ in range(self._options.batches_per_reply)]
        for at, reference, sizes in request:
            link = self._links[at]
            told, packed = link.answer(reference)
            if link.has_restarted(Ack(*told)):
                raise LostActorError("sample", f"from {link.where}", "the actor of before", "one that was restarted")
            for batch, part in zip(
                (one for one, size in zip(batches, sizes, strict=True) if size), packed, strict=True
            ):
                tree = unpack(part, self._options.copy)
                if isinstance(tree, tuple) and len(self._links) > 1:  # ids of this shard become those of all
                    tree = *tree[:-1], tree[-1] * len(self._links) + at
                batch.append(tree)
        return [join(parts) for parts in batches]

    def _update(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        num_shards = len(self._links)
        parts: list[Any] = [(args, options)]
        if num_shards > 1:
            if not self._traits().has_ids or name != "update_priorities":
                raise UsageError("update", "several shards", "update_priorities(ids, priorities)", name)
            ids, priorities = (torch.as_tensor(given) for given in (*args, *options.values()))
            mine = [ids % num_shards == at for at in range(num_shards)]
            parts = [
                ((ids[one] // num_shards, priorities[one] if priorities.dim() else priorities), {}) for one in mine
            ]
        for link, given in zip(self._links, parts, strict=True):
            self._updates.append((link, link.start("update", name, pack(given))))
        while len(self._updates) > self._options.max_pending * num_shards:
            self._end_update()

    def _end_update(self) -> None:
        link, reference = self._updates.popleft()
        with suppress(LostActorError):  # priorities since the last checkpoint went with the actor
            link.answer(reference)


def _another_client(actors: list[Any], options: RemoteOptions) -> RemoteBuffer:
    made = RemoteBuffer.__new__(RemoteBuffer)
    made._set_up(actors, options)
    return made


def _folder_of(folder: Any, number: int) -> str:
    """Name the folder of a shard, as all processes know it."""
    return str(path("save shards", "", folder).absolute() / f"shard_{number:03d}")
