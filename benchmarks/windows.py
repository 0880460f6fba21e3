"""Windows: draw 8 consecutive steps and their next steps from a ring.

A row is added before every draw.

The limit is one gather of windows of 9 packed rows into one reused output. Its indices are given,
and it adds no row. `flat` draws 128 windows from 5,000 x 1,024 rows; its limit is the same at 50 x
1,024. The time includes the added row. "draw alone" excludes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import cycle
from typing import Any

import torch

from storage import TrajectoryDictBufferMultiDim

from . import harness, peers
from .harness import LIMIT, OURS, PEER, Call, Case, Contender
from .rescan import RescanRing

OBS, ACTIONS, LENGTH = 348, 17, 8
FLAT_OBS, FLAT_LANES = 64, 1024
#: Windows per draw -> promised time divided by the limit.
REACH = {128: 2.7, 1024: 1.4}
REACH_FLAT = 2.0
END_SHARE = 0.01
#: Windows that are drawn before the clock starts: more than fit into any cache or its page tables.
NUM_INDICES = 1 << 18


def cases(quick: bool) -> Iterator[Case]:
    """Yield draws of 128 and 1024 windows, and draws from a ring a hundred times as large."""
    slots, lanes = (100, 16) if quick else (5000, 256)
    for num_windows in (128,) if quick else (128, 1024):
        yield drawing(slots, lanes, num_windows)
    yield flat(quick)


def ours(slots: int, lanes: int, num_observations: int, num_windows: int) -> tuple[Call, Call]:
    """Fill a ring of ours. Return a call that adds a row and a call that draws."""
    buffer = empty_ring(slots)
    step = min(slots, 50)
    for _ in range(slots // step):
        buffer.extend(rows(step, lanes, num_observations))
    row = rows(1, lanes, num_observations)
    return lambda: buffer.extend(row), lambda: buffer.sample(num_windows * LENGTH)


def empty_ring(slots: int) -> TrajectoryDictBufferMultiDim:
    """Create a ring of ours for windows of `LENGTH` rows."""
    return TrajectoryDictBufferMultiDim(
        capacity=slots,
        n_dim=2,
        seq_length=LENGTH,
        output_key_t=["observation", "action"],
        end_key="done",
        generator=0,
    )


def rows(num_rows: int, lanes: int, num_observations: int) -> dict[str, torch.Tensor]:
    """Create random rows."""
    return {
        "observation": torch.randn(num_rows, lanes, num_observations),
        "action": torch.randn(num_rows, lanes, ACTIONS),
        "reward": torch.randn(num_rows, lanes, 1),
        "done": torch.rand(num_rows, lanes, 1) < END_SHARE,
    }


def drawing(slots: int, lanes: int, num_windows: int) -> Case:
    """Draw windows."""
    width = OBS + ACTIONS + 2

    def bare() -> Call:
        packed, out = (
            torch.randn(slots * lanes, width),
            torch.empty(num_windows, width * (LENGTH + 1)),
        )
        source = packed.as_strided((slots * lanes - LENGTH, width * (LENGTH + 1)), (width, 1))
        indices = cycle(
            torch.randint(len(source), (NUM_INDICES // num_windows, num_windows)).unbind()
        )
        return lambda: torch.index_select(source, 0, next(indices), out=out)

    size = (slots, lanes, OBS, num_windows)
    return Case(
        f"{num_windows} windows of {LENGTH}+1 from {slots} x {lanes}",
        (
            Contender("gather packed windows", bare, LIMIT),
            Contender("sample only", lambda: ours(*size)[1], OURS),
            Contender(
                "extend and sample",
                lambda: _in_turn(*ours(*size)),
                OURS,
                reach=REACH.get(num_windows),
            ),
            Contender("torchrl", lambda: _in_turn(*_torchrl(*size)), PEER),
            Contender("tianshou", lambda: _in_turn(*_tianshou(*size)), PEER),
            *(
                Contender(name, lambda name=name: _without_windows(name), PEER)
                for name in ("cpprb", "SB3")
            ),
        ),
        num_bytes=num_windows * (LENGTH + 1) * width * 4,
        warm_up_s=0.0 if slots < 1000 else 8.0,
    )


def flat(quick: bool) -> Case:
    """Compare a ring with a ring a hundred times as large, and with a search of all end flags."""
    few, many = (50, 500) if quick else (50, 5000)
    num_windows = 128

    @cache
    def ours_of(slots: int) -> tuple[Call, Call]:
        return ours(slots, FLAT_LANES, FLAT_OBS, num_windows)

    @cache
    def rescan(lean: bool) -> tuple[Call, Call]:
        ring = RescanRing(rows(many, FLAT_LANES, FLAT_OBS), LENGTH, lean)
        row = rows(1, FLAT_LANES, FLAT_OBS)
        return lambda: ring.extend(row), lambda: ring.draw(num_windows)

    @cache
    def torchrl() -> tuple[Call, Call]:
        return _torchrl(many, FLAT_LANES, FLAT_OBS, num_windows)

    ways: list[tuple[str, str, Callable[[], tuple[Call, Call]], int]] = [
        (OURS, f"ours, {many} x {FLAT_LANES}", lambda: ours_of(many), 200),
        (PEER, "look through all end flags", lambda: rescan(False), 5),
        (PEER, "the same, the shortest way", lambda: rescan(True), 20),
        (PEER, "torchrl", torchrl, 5),
    ]
    alone = [
        Contender(f"{name}, draw alone", _alone(make, n), role, own_clock=True)
        for role, name, make, n in ways
    ]
    return Case(
        f"flat {num_windows} windows of {LENGTH}+1",
        (
            Contender(f"ours, {few} x {FLAT_LANES}", lambda: _in_turn(*ours_of(few)), LIMIT),
            Contender(ways[0][1], lambda: _in_turn(*ours_of(many)), OURS, reach=REACH_FLAT),
            *(
                Contender(name, lambda make=make: _in_turn(*make()), role)
                for role, name, make, _ in ways[1:]
            ),
            *alone,
        ),
    )


def _in_turn(extend: Call, draw: Call) -> Call:
    def call() -> None:
        extend()
        draw()

    return call


def _alone(make: Callable[[], tuple[Call, Call]], num_draws: int) -> Callable[[], Call]:
    """Return a call that returns the seconds of a draw, without those of the row that is added
    before.
    """

    def prepare() -> Call:
        extend, draw = make()

        def call() -> float:
            total_s = 0.0
            for _ in range(num_draws):
                extend()
                start_s = harness.clock()
                draw()
                total_s += harness.clock() - start_s
            return total_s / num_draws

        return call

    return prepare


def _torchrl(slots: int, lanes: int, num_observations: int, num_windows: int) -> tuple[Call, Call]:
    data, tensordict = peers.load("torchrl", "data"), peers.load("tensordict")
    sampler = data.SliceSampler(num_slices=num_windows, end_key="done", cache_values=False)
    buffer = data.ReplayBuffer(
        storage=data.LazyTensorStorage(slots * lanes, ndim=2),
        sampler=sampler,
        batch_size=num_windows * (LENGTH + 1),
    )
    columns = rows(slots, lanes, num_observations)
    buffer.extend(tensordict.TensorDict(columns, batch_size=[slots, lanes]).transpose(0, 1))
    row = tensordict.TensorDict(rows(1, lanes, num_observations), batch_size=[1, lanes]).transpose(
        0, 1
    )
    return lambda: buffer.extend(row), buffer.sample


def _tianshou(slots: int, lanes: int, num_observations: int, num_windows: int) -> tuple[Call, Call]:
    buffer, step = _tianshou_filled(slots, lanes, num_observations)
    return lambda: buffer.add(step), lambda: buffer.sample(num_windows)


@cache
def _tianshou_filled(slots: int, lanes: int, num_observations: int) -> tuple[Any, Any]:
    """Fill the other library's ring, which takes 20 s, and return a step to add."""
    data = peers.load("tianshou", "data")
    # Windows that begin before their episode repeat its first frame. Excluding them
    # (`sample_avail`) takes 20 times as long.
    buffer = data.VectorReplayBuffer(slots * lanes, lanes, stack_num=LENGTH, ignore_obs_next=True)
    steps = [_tianshou_step(data, lanes, num_observations) for _ in range(min(slots, 50))]
    for slot in range(slots):
        buffer.add(steps[slot % len(steps)])
    return buffer, steps[0]


def _tianshou_step(data: Any, lanes: int, num_observations: int) -> Any:
    row = {name: column[0].numpy() for name, column in rows(1, lanes, num_observations).items()}
    done = row["done"][:, 0]
    return data.Batch(
        obs=row["observation"],
        act=row["action"],
        rew=row["reward"][:, 0],
        terminated=done,
        truncated=done & False,
        obs_next=row["observation"],
        info={},
    )


def _without_windows(name: str) -> Call:
    raise peers.PeerMissing(f"{name} draws single transitions only")
