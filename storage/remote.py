"""`RemoteBuffer`: any buffer of this package in actors of Ray, with the buffer's own methods.

One rule: sampling happens beside the data, and what travels is memory as it lies there. Which rows
a sample has is the buffer's affair; here is decided only how many of them each shard gives. Ray
moves, restarts and shares memory.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from .core.arguments import path, whole
from .core.random_indices import generator_on, uniform
from .errors import BufferEmptyError, ClosedError, UsageError
from .ray_actors.buffer_shard import GROUPS, UPDATES, Ack, RemoteOptions, Shard, Traits, unit_of
from .ray_actors.packed_results import join, unpack
from .ray_actors.shard_link import Link, LostActorError

#: Method of a buffer -> what a client does instead.
_ACTS = {
    **dict.fromkeys(
        ("add", "append", "extend", "extend_tensors", "insert", "push", "push_data"), "_push"
    ),
    **dict.fromkeys(("sample", "sample_tensors", "sample_transitions", "sample_windows"), "_draw"),
    **dict.fromkeys(UPDATES, "_update"),
}
#: What buffers call the first argument of a draw.
_SIZES = ("batch_size", "num_windows", "num", "size")
#: Kinds of draws whose requests may be ahead at once.
_MAX_KINDS = 4
#: An actor that starts may take so long.
_START_S = 60.0


class RemoteBuffer:
    """A client of K shards, each a buffer in an actor of Ray.

    Args:
        make: Makes the buffer of a shard: `functools.partial(DictBuffer, capacity=100_000)`.
        num_shards: K.
        options: Those of `RemoteOptions`.

    Raises:
        UsageError: It has no `sample`, or a rate limiter of its own, or is a `BufferManager` for
            more than one shard.

    It has those methods of the buffer that add rows (`extend`, `add`, `push`, ...), draw (`sample`,
    `sample_transitions`, `sample_tensors`) and tell what a learner found (`update_priorities`,
    `update`: pushes, too). Passed to a task or another actor it is another client of the same
    shards. A client is for one thread.

    Draws: each row comes from a shard with probability rows of the shard / rows of all; a batch has
    the rows of one shard after those of another. With `prefetch` a batch was drawn up to that many
    replies earlier. Large samples of one shard are memory that processes share: torch does not know
    that it is read-only, so give `copy=True` to change samples in place.

    Pushes: each goes to one shard, in turns, or to the one that `pin` says. They return before they
    are applied; what is wrong with one is raised by a later call, at the latest by `flush`. With
    `checkpoint_dir` a killed actor is restarted from its last checkpoint, and clients send again,
    at their next call, what it does not hold: nothing that was answered is missing or doubled. A
    client that dies together with the actor loses its pushes since then.

    A shard that does not answer within `timeout_s` raises `WaitTimeoutError`, one that is gone
    `BackgroundError`.
    """

    _links: list[Link]
    _traits: Traits
    _version: int | None = None
    _home: int | None = None
    _is_owner: bool = True

    def __init__(self, make: Callable[[], Any], num_shards: int = 1, **options: Any) -> None:
        import ray

        told = RemoteOptions(**options)
        whole("num_shards", num_shards, 1)
        for method, group in GROUPS.items():
            ray.method(concurrency_group=group)(getattr(Shard, method))
        kind: Any = ray.remote(concurrency_groups=dict.fromkeys(GROUPS.values(), 1))(Shard)
        given = {"max_restarts": 0 if told.checkpoint_dir is None else -1, **told.actor_options}
        actors = []
        for number in range(num_shards):
            folder = told.checkpoint_dir and _below(told.checkpoint_dir, f"shard {number:03d}")
            actors.append(kind.options(**given).remote(make, (number, num_shards), folder, told))
        self._set_up(actors, told)
        try:
            for link, answer in [(link, link.start("about")) for link in self._links]:
                self._traits = link.answer(answer, _START_S)
        except BaseException:
            self._end()
            raise

    def __getattr__(self, name: str) -> Any:
        if name not in _ACTS:
            raise AttributeError(
                f"a RemoteBuffer has no {name!r}. Use call({name!r}, ...) to call it on each buffer."
            )
        if not self._links:
            raise ClosedError(
                f"the buffer is closed, and {name!r} needs an open buffer. Create a new RemoteBuffer."
            )
        return lambda *args, **options: getattr(self, _ACTS[name])(name, args, options)

    def __len__(self) -> int:
        """Rows of all shards, with all that this client pushed."""
        self.flush()
        return sum(self._num_rows())

    def __reduce__(self) -> tuple[Any, ...]:
        return _another_client, (self.actors, self._options, self._traits)

    def __enter__(self) -> RemoteBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def actors(self) -> list[Any]:
        """Handles of the shards' actors."""
        return [link.actor for link in self._links]

    def set_version(self, version: int) -> None:
        """Set the policy version of the learner; batches that are under way are dropped."""
        self._version = whole("version", version, 0)
        self._ahead.clear()

    def pin(self, shard: int) -> None:
        """Send all later pushes of this client to one shard: those of steps that follow each other."""
        self._home = whole("shard", shard, 0, len(self._links) - 1)

    def flush(self) -> None:
        """Wait until all pushes and updates of this client are applied; raise what was wrong with one."""
        for link in self._links:
            link.flush()

    def checkpoint(self) -> None:
        """Flush, then let each shard save itself in `checkpoint_dir`; its pushes wait meanwhile."""
        self.flush()
        for link in self._links:
            link.checkpoint()

    def save(self, folder: str) -> None:
        """Flush, then let each buffer save itself below `folder`, one after another."""
        self.flush()
        for link in self._links:
            link.ask("call", "save", (_below(folder, link.where),), {})

    def load(self, folder: str) -> None:
        """Replace the content of all shards by what as many saved."""
        self.flush()
        self._ahead.clear()
        for link in self._links:
            link.ask("load", _below(folder, link.where))

    def feed_forward_generator(self, num_mini_batch: int, mini_batch_size: int) -> Iterator[Any]:
        """Yield `num_mini_batch` samples, as a `ReplayBuffer` does."""
        return (self.sample(mini_batch_size) for _ in range(num_mini_batch))

    def call(self, name: str, *args: Any, **options: Any) -> list[Any]:
        """Call a method of each shard's buffer, or read an attribute; give the results, copies.

        What it changes is in no checkpoint before the next one.
        """
        self.flush()
        return [unpack(link.ask("call", name, args, options), copy=True) for link in self._links]

    def close(self) -> None:
        """Flush; save a checkpoint if there are any; the client that made the actors ends them. May be called twice."""
        try:
            if self._links:
                self.flush()
            for link in self._links if self._options.checkpoint_dir is not None else ():
                link.checkpoint(is_anew=self._is_owner)
        finally:
            self._end()

    def _end(self) -> None:
        import ray

        links = self._links
        self._links = []
        for link in links if self._is_owner else ():
            ray.kill(link.actor)

    def _set_up(self, actors: list[Any], options: RemoteOptions) -> None:
        name = secrets.token_hex(8)
        num = len(actors)
        self._options = options
        self._num_pushes = 0
        self._rng = generator_on(None)
        self._links = [
            Link(actor, name, f"shard {at} of {num}", options) for at, actor in enumerate(actors)
        ]
        #: What is drawn -> batches that are here, and requests that are under way.
        self._ahead: dict[str, tuple[deque[Any], deque[Any]]] = {}

    def _num_rows(self) -> list[int]:
        """Ask how many rows the shards hold."""
        for link in self._links:
            link.has_restarted(link.ask("hello", ""))
        return [0 if link.told is None else link.told.num_rows for link in self._links]

    def _push(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        home = self._home
        num_shards = len(self._links)
        if (
            home is None
            and num_shards > 1
            and not self._options.whole_trajectories
            and self._traits.has_steps
        ):
            raise UsageError(
                "steps of one trajectory must go to one shard. Call pin(shard) first, or push "
                "whole trajectories and pass whole_trajectories=True."
            )
        self._links[self._num_pushes % num_shards if home is None else home].push(
            name, args, options
        )
        self._num_pushes += 1

    def _draw(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        size = args[0] if args else next((options.pop(one) for one in _SIZES if one in options), 1)
        if not isinstance(size, Mapping):  # numbers by name, of a manager
            size = whole("the number of rows", size, 1)
        asked = name, size, args[1:], options
        try:
            return self._links[0].lasting(lambda: self._next(asked))
        except BufferEmptyError:  # perhaps the first pushes are under way
            self.flush()
            return self._links[0].lasting(lambda: self._next(asked))

    def _next(self, asked: tuple[str, Any, tuple[Any, ...], dict[str, Any]]) -> Any:
        """Request as many batches as may be ahead, and give the next one; where that fails, forget what was ahead."""
        ready, requests = self._ahead.pop(kind := repr(asked), (deque(), deque()))
        for link in self._links:
            link.catch_up()
        while len(requests) < self._options.prefetch + (not ready):
            requests.append(self._request(asked))
        if not ready:
            ready.extend(self._received(requests.popleft()))
        while len(self._ahead) >= _MAX_KINDS:
            del self._ahead[next(iter(self._ahead))]
        self._ahead[kind] = ready, requests
        return ready.popleft()

    def _request(self, asked: tuple[str, Any, tuple[Any, ...], dict[str, Any]]) -> list[Any]:
        """Ask each shard for its part of some batches; give (shard, reference to the answer, sizes of the parts)."""
        name, size, args, options = asked
        links = self._links
        sizes = [[size] * self._options.batches_per_reply]
        if len(links) > 1:
            unit = unit_of(self._traits, name, args, options)
            sizes = self._parts(size, size if size % unit else unit)
        asks = [(name, part, args, options, self._version) for part in sizes]
        return [
            (link, link.start("draw", ask), part)
            for link, ask, part in zip(links, asks, sizes, strict=True)
        ]

    def _parts(self, size: int, unit: int) -> list[list[int]]:
        """Draw for each shard how many rows of each batch come from it, in proportion to its rows."""
        rows = [0 if link.told is None else link.told.num_rows for link in self._links]
        if not all(rows):  # our pushes may be under way, and others may have pushed
            self.flush()
            rows = self._num_rows()
            rows[0] += not sum(rows)  # where there is nothing the first buffer says so in its way
        num_batches = self._options.batches_per_reply
        num_units = size // unit
        num_shards = len(rows)
        drawn = uniform(sum(rows), num_batches * num_units, self._rng).numpy()
        shard = np.searchsorted(np.cumsum(rows), drawn, side="right").reshape(
            num_batches, num_units
        )
        counts = [np.bincount(one, minlength=num_shards) for one in shard]
        parts: list[list[int]] = (unit * np.stack(counts, axis=1)).tolist()
        return parts

    def _received(self, request: list[Any]) -> list[Any]:
        """Wait for the parts of some batches, and join them."""
        batches: list[list[Any]] = [[] for _ in range(self._options.batches_per_reply)]
        for link, reference, sizes in request:
            told, packed = link.answer(reference)
            if link.has_restarted(Ack(*told)):
                raise LostActorError(f"The actor of {link.where} restarted during the request.")
            wanted = (batch for batch, size in zip(batches, sizes, strict=True) if size)
            for batch, part in zip(wanted, packed, strict=True):
                batch.append(unpack(part, self._options.copy))
        return [join(parts) for parts in batches]

    def _update(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        for link in self._links:  # each takes what is its own
            link.push(name, args, options)


def _another_client(actors: list[Any], options: RemoteOptions, traits: Traits) -> RemoteBuffer:
    made = RemoteBuffer.__new__(RemoteBuffer)
    made._set_up(actors, options)
    made._traits = traits
    made._is_owner = False
    return made


def _below(folder: Any, shard: str) -> str:
    """Name the folder of a shard, as all processes know it."""
    return str(path("", folder).absolute() / shard.replace(" ", "_"))
