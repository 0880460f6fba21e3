"""Buffers in actors of Ray: batches, replies of many batches, pushes, and sampling while other
processes push.

A row has 348 float32 values. The limit of a batch is a bare actor that returns the same bytes, plus
the time to sample in process: "bare call + sampling". The limit of a push is an actor that receives
the same bytes and does nothing. All actors run on one machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from storage import DictBuffer
from storage.remote import RemoteBuffer

from . import peers
from .harness import LIMIT, OURS, PEER, Call, Case, Contender

WIDTHS = {"observation": 310, "action": 36, "reward": 1, "done": 1}
ROW_BYTES = 4 * sum(WIDTHS.values())
NO_CPUS = {"actor_options": {"num_cpus": 0}}
#: Batch size -> promised time of torchrl's buffer, as a multiple of ours.
LEAST_OVER_PEER = {256: 1.3, 4096: 2.5}
NUM_IN_REPLY, PUSH_ROWS = 32, 1024


def cases(quick: bool) -> Iterator[Case]:
    """Yield batches at two sizes, many batches in a reply, pushes, and sampling during pushes."""
    ray = peers.load("ray")
    if not ray.is_initialized():
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=1 << 30,
            log_to_driver=False,
            logging_level="ERROR",
        )
    capacity = 10_000 if quick else 200_000
    for batch_size in (256,) if quick else LEAST_OVER_PEER:
        yield batches(ray, capacity, batch_size)
    yield replies(capacity)
    yield pushes(ray, capacity)
    yield pressed(ray, capacity, 0.5 if quick else 3.0)
    yield beside_draws(ray, capacity, 0.5 if quick else 3.0)


def rows(num_rows: int) -> dict[str, torch.Tensor]:
    """Create random transitions."""
    return {name: torch.randn(num_rows, width) for name, width in WIDTHS.items()}


def remote(capacity: int, **options: Any) -> RemoteBuffer:
    """Create a full buffer in an actor."""
    buffer = RemoteBuffer(partial(DictBuffer, capacity=capacity), **NO_CPUS, **options)
    for _ in range(0, capacity, 10_000):
        buffer.extend(rows(10_000))
    buffer.flush()
    return buffer


class Bare:
    """An actor that returns bytes and receives bytes."""

    def __init__(self, num_bytes: int = 0) -> None:
        self.data = np.zeros(num_bytes, np.uint8)

    def give(self) -> np.ndarray:
        return self.data

    def take(self, data: np.ndarray) -> None:
        pass


def closing(prepare: Callable[[], tuple[Call, Call]]) -> dict[str, Any]:
    """Return `prepare` and `close` of a contender, from one function that creates both."""
    calls: list[Call] = []

    def first() -> Call:
        call, close = prepare()
        calls.append(close)
        return call

    return {"prepare": first, "close": lambda: [close() for close in calls]}


def batches(ray: Any, capacity: int, batch_size: int) -> Case:
    """Measure one batch at a time."""

    def bare_and_sampling() -> tuple[Call, Call]:
        actor = ray.remote(Bare).options(num_cpus=0).remote(batch_size * ROW_BYTES)
        local = DictBuffer(capacity=capacity)
        local.extend(rows(capacity))
        return lambda: (ray.get(actor.give.remote()), local.sample(batch_size)), partial(
            ray.kill, actor
        )

    def ours() -> tuple[Call, Call]:
        buffer = remote(capacity, prefetch=0)
        return lambda: buffer.sample(batch_size), buffer.close

    def ahead() -> tuple[Call, Call]:
        buffer = remote(capacity, prefetch=1)
        return lambda: buffer.sample(batch_size), buffer.close

    def torchrl() -> tuple[Call, Call]:
        data, tensordict = peers.load("torchrl", "data"), peers.load("tensordict")
        buffer = data.RayReplayBuffer(
            storage=partial(data.LazyTensorStorage, capacity),
            batch_size=batch_size,
            remote_config={"num_cpus": 0},
        )
        for _ in range(0, capacity, 10_000):
            buffer.extend(tensordict.TensorDict(rows(10_000), [10_000]))
        return lambda: buffer.sample(), buffer.close

    return Case(
        f"a batch of {batch_size}",
        num_bytes=batch_size * ROW_BYTES,
        num_repeats=11,
        contenders=(
            Contender("bare call + sampling in process", **closing(bare_and_sampling), role=LIMIT),
            Contender("RemoteBuffer", **closing(ours), role=OURS, reach=1.2),
            Contender("RemoteBuffer, prefetch=1", **closing(ahead), role=OURS),
            Contender(
                f"torchrl (at least {LEAST_OVER_PEER[batch_size]} x ours)",
                **closing(torchrl),
                role=PEER,
            ),
        ),
    )


def replies(capacity: int) -> Case:
    """Measure 32 batches of 256 rows, with one batch per reply and with all in one reply."""

    def drawing(batches_per_reply: int) -> tuple[Call, Call]:
        buffer = remote(capacity, prefetch=0, batches_per_reply=batches_per_reply)
        return lambda: [buffer.sample(256) for _ in range(NUM_IN_REPLY)], buffer.close

    return Case(
        f"{NUM_IN_REPLY} batches of 256",
        num_bytes=NUM_IN_REPLY * 256 * ROW_BYTES,
        contenders=(
            Contender("one batch per reply", **closing(partial(drawing, 1)), role=LIMIT),
            Contender(
                "all in a reply", **closing(partial(drawing, NUM_IN_REPLY)), role=OURS, reach=1 / 8
            ),
        ),
    )


def pushes(ray: Any, capacity: int) -> Case:
    """Measure 8 pushes of 1,024 rows by one collector."""
    pushed = rows(PUSH_ROWS)

    def bare() -> tuple[Call, Call]:
        actor, data = (
            ray.remote(Bare).options(num_cpus=0).remote(),
            np.zeros(PUSH_ROWS * ROW_BYTES, np.uint8),
        )
        return lambda: ray.get([actor.take.remote(data) for _ in range(8)]), partial(
            ray.kill, actor
        )

    def ours() -> tuple[Call, Call]:
        buffer = remote(capacity, max_pending=8)

        def push() -> None:
            for _ in range(8):
                buffer.extend(pushed)
            buffer.flush()

        return push, buffer.close

    return Case(
        f"8 pushes of {PUSH_ROWS} rows",
        num_bytes=8 * PUSH_ROWS * ROW_BYTES,
        contenders=(
            Contender("actor that only receives", **closing(bare), role=LIMIT),
            Contender("RemoteBuffer", **closing(ours), role=OURS, reach=1 / 0.7),
        ),
    )


def push_for(buffer: RemoteBuffer, seconds: float) -> int:
    """Push as fast as possible, and return the number of pushes."""
    pushed, num, stop_s = rows(PUSH_ROWS), 0, time.monotonic() + seconds
    while time.monotonic() < stop_s:
        buffer.extend(pushed)
        num += 1
    buffer.flush()
    return num


def pressed(ray: Any, capacity: int, seconds: float) -> Case:
    """Measure a batch of 256 rows without pushes, and while two collectors push as fast as
    possible.
    """

    def drawing(num_collectors: int) -> tuple[Call, Call]:
        buffer = remote(capacity, prefetch=0)
        push = ray.remote(push_for).options(num_cpus=0)
        # They exist when the clock starts.
        ray.get([push.remote(buffer, 0.0) for _ in range(num_collectors)])

        def draw() -> float:
            collectors = [push.remote(buffer, seconds + 0.5) for _ in range(num_collectors)]
            time.sleep(0.25)
            num, start_s = 0, time.perf_counter()
            while time.perf_counter() - start_s < seconds:
                buffer.sample(256)
                num += 1
            per_batch_s = (time.perf_counter() - start_s) / num
            ray.get(collectors)
            return per_batch_s

        return draw, buffer.close

    return Case(
        "a batch of 256 beside collectors",
        num_bytes=256 * ROW_BYTES,
        contenders=(
            Contender("none", **closing(partial(drawing, 0)), role=LIMIT, own_clock=True),
            Contender(
                "two that press",
                **closing(partial(drawing, 2)),
                role=OURS,
                own_clock=True,
                reach=1 / 0.4,
            ),
        ),
    )


def beside_draws(ray: Any, capacity: int, seconds: float) -> Case:
    """Measure a push of two collectors without draws, and while a learner draws as fast as
    possible.
    """

    def pushing(draws: bool) -> tuple[Call, Call]:
        buffer = remote(capacity, prefetch=0)
        push = ray.remote(push_for).options(num_cpus=0)
        ray.get([push.remote(buffer, 0.0) for _ in range(2)])

        def press() -> float:
            collectors = [push.remote(buffer, seconds) for _ in range(2)]
            while len(ray.wait(collectors, num_returns=2, timeout=0 if draws else seconds)[0]) < 2:
                if draws:
                    buffer.sample(256)
            return seconds / sum(ray.get(collectors))

        return press, buffer.close

    return Case(
        f"a push of {PUSH_ROWS} rows by two collectors",
        num_bytes=PUSH_ROWS * ROW_BYTES,
        contenders=(
            Contender(
                "nobody draws", **closing(partial(pushing, False)), role=LIMIT, own_clock=True
            ),
            Contender(
                "beside a learner",
                **closing(partial(pushing, True)),
                role=OURS,
                own_clock=True,
                reach=1 / 0.4,
            ),
        ),
    )
