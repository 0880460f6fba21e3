"""`RemoteBuffer`: divides a buffer among Ray actors, and keeps the methods of the buffer.

The rows are divided among shards. A shard is one buffer in one actor, which draws the rows of a
sample and sends them as raw memory. This module only chooses how many rows come from each shard.
Ray sends and shares memory, and restarts actors.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from .core.arguments import path, whole
from .core.lru_cache import LruCache
from .core.random_indices import generator_on, uniform
from .errors import BufferEmptyError, ClosedError, UsageError
from .ray_actors.buffer_shard import GROUPS, UPDATES, Ack, RemoteOptions, Shard, Traits, unit_of
from .ray_actors.packed_results import join, unpack
from .ray_actors.shard_link import Link, LostActorError

__all__ = ["LostActorError", "RemoteBuffer", "RemoteOptions"]

#: Name of the private method of `RemoteBuffer` for each public method of a buffer.
_METHODS = {
    **dict.fromkeys(
        ("add", "append", "extend", "extend_tensors", "insert", "push", "push_data"), "_push"
    ),
    **dict.fromkeys(("sample", "sample_tensors", "sample_transitions", "sample_windows"), "_draw"),
    **dict.fromkeys(UPDATES, "_update"),
}
#: Names of the argument with the number of rows or windows, in the methods that draw.
_SIZES = ("batch_size", "num_windows", "num", "size")
#: Maximum number of different draws (method and arguments) for which batches are requested ahead.
_MAX_DRAWS = 4
#: Seconds to wait at least for the start of an actor.
_START_S = 60.0


#: Arguments of a draw: name of the method, number of rows or windows, other arguments, options.
_Draw = tuple[str, Any, tuple[Any, ...], dict[str, Any]]


class RemoteBuffer:
    """Buffer that is divided among K Ray actors.

    Args:
        make: Function that creates the buffer of a shard, such as
            `functools.partial(DictBuffer, capacity=100_000)`.
        num_shards: Number of actors, K. The buffer in one actor is a shard.
        options: Fields of `RemoteOptions`.

    Raises:
        UsageError: The buffer has no method `sample`, has its own rate limiter, or is a
            `BufferManager` although there are several shards.

    A `RemoteBuffer` is a client of the actors. It has these methods of the buffer: methods that add
    rows (`extend`, `add`, `push`, ...), methods that draw (`sample`, `sample_transitions`,
    `sample_tensors`), and methods for results of a learner (`update_priorities`, `update`). If a
    client is passed to a Ray task or another actor, a second client of the same shards is created
    there. Use each client in one thread.

    Draws: The probability that a row comes from a shard is the shard's share of all rows. The rows
    of a batch are ordered by shard. With `prefetch`, a batch may be drawn up to that many replies
    before its use. Large samples of a single shard are read-only memory that processes share. torch
    does not detect this: pass `copy=True` to change samples in place.

    Pushes: Each push goes to one shard. The shards take turns, unless `pin` selects one. A push
    returns before it is applied. If a push fails, a later call raises the error, at the latest
    `flush`. With `checkpoint_dir`, a killed actor restarts from its last checkpoint. Clients then
    send again, at their next call, the pushes that the checkpoint does not contain. No answered
    push is lost or applied twice. If a client dies together with the actor, its pushes since the
    checkpoint are lost.

    If a shard does not answer within `timeout_s`, the call raises `WaitTimeoutError`. If the actor
    of a shard has died, the call raises `BackgroundError`.
    """

    _links: list[Link]
    _traits: Traits
    _version: int | None = None
    _home: int | None = None
    _is_owner: bool = True

    def __init__(self, make: Callable[[], Any], num_shards: int = 1, **options: Any) -> None:
        import ray

        remote_options = RemoteOptions(**options)
        whole("num_shards", num_shards, 1)
        for method, group in GROUPS.items():
            ray.method(concurrency_group=group)(getattr(Shard, method))
        actor_class: Any = ray.remote(concurrency_groups=dict.fromkeys(GROUPS.values(), 1))(Shard)
        actor_options = {
            "max_restarts": 0 if remote_options.checkpoint_dir is None else -1,
            **remote_options.actor_options,
        }
        actors = []
        for number in range(num_shards):
            folder = remote_options.checkpoint_dir and _below(
                remote_options.checkpoint_dir, f"shard {number:03d}"
            )
            actors.append(
                actor_class.options(**actor_options).remote(
                    make, (number, num_shards), folder, remote_options
                )
            )
        self._set_up(actors, remote_options)
        try:
            for link, answer in [(link, link.start("traits")) for link in self._links]:
                self._traits = link.answer(answer, _START_S)
        except BaseException:
            self._end()
            raise

    def __getattr__(self, name: str) -> Any:
        if name not in _METHODS:
            raise AttributeError(
                f"a RemoteBuffer has no {name!r}. Use call({name!r}, ...) to call it on each "
                "buffer."
            )
        if not self._links:
            raise ClosedError(
                f"the buffer is closed, and {name!r} needs an open buffer. Create a new "
                "RemoteBuffer."
            )
        return lambda *args, **options: getattr(self, _METHODS[name])(name, args, options)

    def __len__(self) -> int:
        """Return the number of rows of all shards, including all pushes of this client."""
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
        """Handles of the Ray actors of the shards."""
        return [link.actor for link in self._links]

    def set_version(self, version: int) -> None:
        """Set the policy version of the learner; drop all batches that were drawn in advance."""
        self._version = whole("version", version, 0)
        self._ahead.clear()

    def pin(self, shard: int) -> None:
        """Send all rows that this client adds later to one shard.

        This is necessary if successive calls add consecutive steps of a trajectory.
        """
        self._home = whole("shard", shard, 0, len(self._links) - 1)

    def flush(self) -> None:
        """Wait until all pushes and updates of this client are applied; raise their first error."""
        for link in self._links:
            link.flush()

    def checkpoint(self) -> None:
        """Flush, and save a checkpoint of each shard in `checkpoint_dir`.

        A shard does not change during its save.
        """
        self.flush()
        for link in self._links:
            link.checkpoint()

    def save(self, folder: str) -> None:
        """Flush, and save each shard in a subfolder of `folder`, one after another."""
        self.flush()
        for link in self._links:
            link.ask("call", "save", (_below(folder, link.where),), {})

    def load(self, folder: str) -> None:
        """Replace all rows by the rows in a saved folder with the same number of shards."""
        self.flush()
        self._ahead.clear()
        for link in self._links:
            link.ask("load", _below(folder, link.where))

    def feed_forward_generator(self, num_mini_batch: int, mini_batch_size: int) -> Iterator[Any]:
        """Yield `num_mini_batch` random samples of the size `mini_batch_size`."""
        return (self.sample(mini_batch_size) for _ in range(num_mini_batch))

    def call(self, name: str, *args: Any, **options: Any) -> list[Any]:
        """Call a method, or read an attribute, of the buffer of each shard. Return copied results.

        If an actor restarts, changes that the method made since the last checkpoint are lost.
        """
        self.flush()
        return [unpack(link.ask("call", name, args, options), copy=True) for link in self._links]

    def close(self) -> None:
        """Flush, and save a checkpoint if there is a `checkpoint_dir`. Idempotent.

        The client that created the actors stops them, even if an error is raised.
        """
        try:
            if self._links:
                self.flush()
            for link in self._links if self._options.checkpoint_dir is not None else ():
                link.checkpoint(is_forced=self._is_owner)
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
        #: Received batches, and unanswered requests, by the method and arguments of the draw.
        self._ahead: LruCache[str, tuple[deque[Any], deque[Any]]] = LruCache(_MAX_DRAWS)

    def _num_rows(self) -> list[int]:
        """Request the number of rows of each shard."""
        for link in self._links:
            link.has_restarted(link.ask("acknowledge", ""))
        return [0 if link.last_ack is None else link.last_ack.num_rows for link in self._links]

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
        size = (
            args[0]
            if args
            else next((options.pop(option) for option in _SIZES if option in options), 1)
        )
        # For a `BufferManager`, `size` may be a mapping of sizes by name.
        if not isinstance(size, Mapping):
            size = whole("the number of rows", size, 1)
        draw = name, size, args[1:], options
        try:
            return self._links[0].retried(lambda: self._next(draw))
        except BufferEmptyError:
            # The shards may only be empty because pushes of this client are not applied yet.
            self.flush()
            return self._links[0].retried(lambda: self._next(draw))

    def _next(self, draw: _Draw) -> Any:
        """Return the next batch, and request further batches with the same arguments in advance.

        If an error is raised, all requested and received batches with these arguments are dropped.
        """
        key = repr(draw)
        ready, requests = self._ahead.pop(key) or (deque(), deque())
        for link in self._links:
            link.catch_up()
        while len(requests) < self._options.prefetch + (not ready):
            requests.append(self._request(draw))
        if not ready:
            ready.extend(self._received(requests.popleft()))
        self._ahead.put(key, (ready, requests))
        return ready.popleft()

    def _request(self, draw: _Draw) -> list[Any]:
        """Request `batches_per_reply` batches from the shards, without a wait for the answers.

        Returns (link, reference to the answer, number of rows in each batch) for each shard.
        """
        name, size, args, options = draw
        links = self._links
        sizes = [[size] * self._options.batches_per_reply]
        if len(links) > 1:
            unit = unit_of(self._traits, name, args, options)
            # If `size` is no multiple of `unit`, one shard gets the request and raises the error.
            sizes = self._sizes_per_shard(size, size if size % unit else unit)
        request = []
        for link, sizes_of_shard in zip(links, sizes, strict=True):
            reference = link.start("draw", (name, sizes_of_shard, args, options, self._version))
            request.append((link, reference, sizes_of_shard))
        return request

    def _sizes_per_shard(self, size: int, unit: int) -> list[list[int]]:
        """Draw how many rows each shard contributes to each batch: `[num_shards][num_batches]`.

        Each window of `unit` rows comes from a shard with a probability in proportion to the rows
        of the shard.
        """
        rows = [0 if link.last_ack is None else link.last_ack.num_rows for link in self._links]
        # The last acknowledgement of a shard does not count unanswered pushes of this client, and
        # later pushes of other clients.
        if not all(rows):
            self.flush()
            rows = self._num_rows()
            # If all shards are empty, request all rows from shard 0, whose buffer raises the error.
            if not any(rows):
                rows[0] = 1
        num_batches = self._options.batches_per_reply
        num_units = size // unit
        num_shards = len(rows)
        drawn = uniform(sum(rows), num_batches * num_units, self._rng).numpy()
        shard = np.searchsorted(np.cumsum(rows), drawn, side="right").reshape(
            num_batches, num_units
        )
        counts = [np.bincount(numbers, minlength=num_shards) for numbers in shard]
        parts: list[list[int]] = (unit * np.stack(counts, axis=1)).tolist()
        return parts

    def _received(self, request: list[Any]) -> list[Any]:
        """Wait for the answers of the shards to a request, and join their rows to batches."""
        batches: list[list[Any]] = [[] for _ in range(self._options.batches_per_reply)]
        for link, reference, sizes in request:
            ack, packed = link.answer(reference)
            if link.has_restarted(Ack(*ack)):
                raise LostActorError(f"The actor of {link.where} restarted during the request.")
            # The answer of a shard omits the batches to which it contributes no rows.
            batches_of_shard = [batch for batch, size in zip(batches, sizes, strict=True) if size]
            for batch, part in zip(batches_of_shard, packed, strict=True):
                batch.append(unpack(part, self._options.copy))
        return [join(parts) for parts in batches]

    def _update(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        # Send all updates to each shard, which applies only the updates of its own rows.
        for link in self._links:
            link.push(name, args, options)


def _another_client(actors: list[Any], options: RemoteOptions, traits: Traits) -> RemoteBuffer:
    made = RemoteBuffer.__new__(RemoteBuffer)
    made._set_up(actors, options)
    made._traits = traits
    made._is_owner = False
    return made


def _below(folder: Any, shard: str) -> str:
    """Return the absolute path of the folder of one shard in `folder`."""
    return str(path("", folder).absolute() / shard.replace(" ", "_"))
