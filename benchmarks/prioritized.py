"""Prioritized replay: draw a batch by priority with importance weights, and update the priorities.

The capacity is 10^6.

A row has two observations of 17 floats, 6 floats of action, a reward and a flag: 42 floats. Every
contender stores the same rows, and draws in proportion to priority ** 0.6 with beta 0.4. It returns
the batch and receives new priorities, which exist before the clock starts. The limit is one gather
of packed rows with the indices given.

The limit of adding one item is a copy of one packed row. Adding a step of 16 environments to
`PrioritizedWindows` is compared with the same ring without priorities. "by hand" writes the step,
and the weights of the new windows into a heap of pairs.

The cases of structures draw and update weights without rows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import numpy as np
import torch

from storage import AdvancedReplayBuffer, NaiveReplayBuffer, PrioritizedWindows
from storage.prioritized.sum_tree import SumTree

from . import peers
from .harness import LIMIT, OURS, PEER, Call, Case, Contender
from .windows import LENGTH, empty_ring

OBS, ACTIONS = 17, 6
FLOATS = 2 * OBS + ACTIONS + 2
ALPHA, BETA = 0.6, 0.4
#: Batch size -> promised seconds. No peer may be faster in the same run.
REACH_S = {256: 125e-6, 4096: 900e-6}
#: Steps and environments of a ring of windows, and windows of a batch.
SLOTS, LANES, NUM_WINDOWS = 10_000, 16, 32
#: Promised seconds for adding one item, and one step of `LANES` environments.
REACH_PUSH_S = {"NaiveReplayBuffer": 150e-6, "AdvancedReplayBuffer": 200e-6}
REACH_WINDOWS_S = 400e-6
#: Batches of priorities that are drawn before the clock starts.
NUM_BATCHES = 50


def cases(quick: bool) -> Iterator[Case]:
    """Yield sampling with updates at two sizes, and the structures for weights."""
    capacity = 20_000 if quick else 1_000_000
    for batch_size in (32, 256) if quick else (32, 256, 4096):
        yield learning(capacity, batch_size)
    yield pushing(capacity)
    slots = 100 if quick else SLOTS
    yield adding_windows(slots)
    yield learning_windows(slots)
    for batch_size in (256,) if quick else (256, 4096):
        yield structures(capacity, batch_size)


def rows(num_rows: int) -> dict[str, torch.Tensor]:
    """Create random transitions."""
    return {
        "observation": torch.randn(num_rows, OBS),
        "next_observation": torch.randn(num_rows, OBS),
        "action": torch.randn(num_rows, ACTIONS),
        "reward": torch.randn(num_rows, 1),
        "done": torch.zeros(num_rows, 1),
    }


def learning(capacity: int, batch_size: int) -> Case:
    """Draw a batch and update its priorities."""
    priorities = torch.rand(NUM_BATCHES, batch_size)

    def bare() -> Call:
        packed, out = torch.randn(capacity, FLOATS), torch.empty(batch_size, FLOATS)
        indices = cycle([torch.randint(capacity, (batch_size,)) for _ in range(NUM_BATCHES)])
        return lambda: torch.index_select(packed, 0, next(indices), out=out)

    def ours() -> Call:
        buffer = AdvancedReplayBuffer(capacity, alpha=ALPHA, beta=BETA, anneal_step=0, generator=0)
        for _ in range(10):
            buffer.extend_tensors(rows(capacity // 10), torch.rand(capacity // 10))
        next_priorities = cycle(priorities)

        def step() -> None:
            _, _, ids = buffer.sample_tensors(batch_size)
            buffer.update_priorities(ids, next(next_priorities))

        return step

    arrays = [x.numpy() for x in priorities]
    return Case(
        f"sample and update {batch_size}",
        (
            Contender("gather packed rows", bare, LIMIT),
            Contender("AdvancedReplayBuffer", ours, OURS, reach_s=REACH_S.get(batch_size)),
            Contender(
                "per-item Python lists",
                lambda: PerItem(capacity).learning(batch_size, arrays),
                PEER,
            ),
            Contender("cpprb", lambda: _cpprb(capacity, batch_size, arrays), PEER),
            Contender("tianshou", lambda: _tianshou(capacity, batch_size, arrays), PEER),
            Contender("torchrl", lambda: _torchrl(capacity, batch_size, priorities), PEER),
        ),
        num_bytes=batch_size * FLOATS * 4,
        # The first calls after another contender take twice as long. A single call would make the
        # repetitions too short.
        warm_up_s=2.0,
    )


def pushing(capacity: int) -> Case:
    """Add one item."""
    item = {name: leaf[0] for name, leaf in rows(1).items()}
    arrays = {name: leaf.numpy() for name, leaf in item.items()}

    def bare() -> Call:
        packed, row = torch.zeros(capacity, FLOATS), torch.ones(FLOATS)
        places = cycle(range(capacity))
        return lambda: packed[next(places)].copy_(row)

    def ours(kind: type[NaiveReplayBuffer] | type[AdvancedReplayBuffer]) -> Contender:
        def prepare() -> Call:
            buffer = kind(capacity, generator=0)
            return lambda: buffer.push(item)

        reach_s = REACH_PUSH_S[kind.__name__]
        return Contender(f"{kind.__name__}.push", prepare, OURS, reach_s=reach_s)

    def cpprb() -> Call:
        columns = {name: {"shape": leaf.shape} for name, leaf in arrays.items()}
        buffer = peers.load("cpprb").PrioritizedReplayBuffer(capacity, columns, alpha=ALPHA)
        return lambda: buffer.add(**arrays)

    def tianshou() -> Call:
        module = peers.load("tianshou", "data")
        buffer = module.PrioritizedReplayBuffer(capacity, alpha=ALPHA, beta=BETA)
        step = module.Batch(
            obs=arrays["observation"],
            obs_next=arrays["next_observation"],
            act=arrays["action"],
            rew=0.0,
            terminated=False,
            truncated=False,
            info={},
        )
        return lambda: buffer.add(step)

    return Case(
        "add one item",
        (
            Contender("copy one packed row", bare, LIMIT),
            ours(NaiveReplayBuffer),
            ours(AdvancedReplayBuffer),
            Contender("cpprb", cpprb, PEER),
            Contender("tianshou", tianshou, PEER),
        ),
        num_bytes=FLOATS * 4,
    )


def steps(num_steps: int) -> dict[str, torch.Tensor]:
    """Create random steps of `LANES` environments."""
    return {
        "observation": torch.randn(num_steps, LANES, OBS),
        "action": torch.randn(num_steps, LANES, ACTIONS),
        "reward": torch.randn(num_steps, LANES, 1),
        "done": torch.rand(num_steps, LANES, 1) < 0.01,
    }


def _filled_windows(slots: int) -> PrioritizedWindows:
    buffer = PrioritizedWindows(slots, LENGTH, alpha=ALPHA, beta=BETA, anneal_step=0, generator=0)
    for _ in range(10):
        buffer.extend(steps(slots // 10))
    return buffer


def adding_windows(slots: int) -> Case:
    """Add a step of `LANES` environments to a ring of windows."""
    step = steps(1)
    width = OBS + ACTIONS + 2

    def bare() -> Call:
        packed, row = torch.zeros(slots, LANES, width), torch.ones(LANES, width)
        places = cycle(range(slots))
        return lambda: packed[next(places)].copy_(row)

    def uniform() -> Call:
        buffer = empty_ring(slots)
        for _ in range(10):
            buffer.extend(steps(slots // 10))
        return lambda: buffer.extend(step)

    def prioritized() -> Call:
        buffer = _filled_windows(slots)
        return lambda: buffer.extend(step)

    def by_hand() -> Call:
        packed, row = np.zeros((slots, LANES, width), np.float32), np.ones(width, np.float32)
        heap = PairHeap(np.ones(slots * LANES))
        weights = np.ones(LANES)
        places = cycle(range(slots))

        def call() -> None:
            place = next(places)
            packed[place] = row
            heap.write(np.arange(LANES) + place * LANES, weights)

        return call

    return Case(
        f"PrioritizedWindows, add a step of {LANES} environments",
        (
            Contender("copy packed rows", bare, LIMIT),
            Contender("PrioritizedWindows", prioritized, OURS, reach_s=REACH_WINDOWS_S),
            Contender("TrajectoryDictBufferMultiDim", uniform, OURS),
            Contender("by hand", by_hand, PEER),
            Contender("torchrl", lambda: _torchrl_windows(slots)[0], PEER),
        ),
        num_bytes=LANES * width * 4,
    )


def learning_windows(slots: int) -> Case:
    """Draw windows by priority and update their priorities."""
    width = OBS + ACTIONS + 2
    priorities = torch.rand(NUM_BATCHES, NUM_WINDOWS)

    def bare() -> Call:
        packed, out = torch.randn(slots * LANES, width), torch.empty(NUM_WINDOWS, LENGTH * width)
        pieces = packed.as_strided((slots * LANES - LENGTH, LENGTH * width), (width, 1))
        indices = cycle([torch.randint(len(pieces), (NUM_WINDOWS,)) for _ in range(NUM_BATCHES)])
        return lambda: torch.index_select(pieces, 0, next(indices), out=out)

    def ours() -> Call:
        buffer, new = _filled_windows(slots), cycle(priorities)

        def step() -> None:
            _, _, ids = buffer.sample(NUM_WINDOWS)
            buffer.update_priorities(ids, next(new))

        return step

    def by_hand() -> Call:
        rows_in_memory = torch.randn(slots * LANES, width)
        heap, new = PairHeap(np.random.rand(slots * LANES)), cycle(priorities.numpy())
        offsets = torch.arange(LENGTH)

        def step() -> None:
            first = heap.draw(NUM_WINDOWS)
            numbers = torch.from_numpy(first)[:, None] + offsets
            rows_in_memory[numbers.clamp_(max=len(rows_in_memory) - 1)]
            heap.write(first, next(new))

        return step

    return Case(
        f"PrioritizedWindows, sample and update {NUM_WINDOWS} x {LENGTH}",
        (
            Contender("gather packed windows", bare, LIMIT),
            Contender("PrioritizedWindows", ours, OURS),
            Contender("by hand", by_hand, PEER),
            Contender("torchrl", lambda: _torchrl_windows(slots)[1], PEER),
        ),
        num_bytes=NUM_WINDOWS * LENGTH * width * 4,
    )


def _torchrl_windows(slots: int) -> tuple[Call, Call]:
    """Fill torchrl's ring of prioritized slices.

    Return a function that adds a step and a function that draws.
    """
    torchrl, tensordict = peers.load("torchrl", "data"), peers.load("tensordict")
    try:
        sampler = torchrl.PrioritizedSliceSampler(
            slots * LANES, alpha=ALPHA, beta=BETA, num_slices=NUM_WINDOWS, end_key="done"
        )
    except (RuntimeError, ImportError, NameError) as error:
        raise peers.PeerMissing(f"torchrl: its extension does not load here: {error}") from error
    buffer = torchrl.TensorDictReplayBuffer(
        storage=torchrl.LazyTensorStorage(slots * LANES, ndim=2),
        sampler=sampler,
        batch_size=NUM_WINDOWS * LENGTH,
    )
    filler = tensordict.TensorDict(steps(slots), batch_size=[slots, LANES])
    buffer.extend(filler.transpose(0, 1))
    step = tensordict.TensorDict(steps(1), batch_size=[1, LANES]).transpose(0, 1)
    return lambda: buffer.extend(step), buffer.sample


def structures(capacity: int, batch_size: int) -> Case:
    """Draw by weight and write weights, with each structure that we compared."""
    weights = torch.rand(capacity, dtype=torch.float64)
    values = torch.rand(NUM_BATCHES, batch_size, dtype=torch.float64)

    def bare() -> Call:
        places = cycle([torch.randint(capacity, (batch_size,)) for _ in range(NUM_BATCHES)])
        target, out = weights.clone(), torch.empty(batch_size, dtype=torch.float64)

        def step() -> None:
            place = next(places)
            torch.index_select(target, 0, place, out=out)
            target.index_copy_(0, place, out)

        return step

    def ours() -> Call:
        tree, generator, new = SumTree(capacity), torch.Generator().manual_seed(0), cycle(values)
        tree.rebuild(weights)

        def step() -> None:
            drawn = tree.draw(batch_size, generator)
            assert drawn is not None
            tree.write(drawn, next(new))

        return step

    def heap() -> Call:
        pairs, new = PairHeap(weights.numpy()), cycle(values.numpy())
        return lambda: pairs.write(pairs.draw(batch_size), next(new))

    def rejecting(power: int) -> Call:
        skewed, new = weights**power, cycle(values)
        generator = torch.Generator().manual_seed(0)

        def step() -> None:
            places = draw_by_rejection(skewed, batch_size, generator)
            skewed.index_copy_(0, places, next(new) ** power)

        return step

    return Case(
        f"structure {batch_size}",
        (
            Contender("read and write in place", bare, LIMIT),
            Contender("SumTree", ours, OURS),
            Contender("heap of pairs", heap, PEER),
            Contender("rejection, even weights", lambda: rejecting(1), PEER),
            Contender("rejection, weights ** 20", lambda: rejecting(20), PEER),
        ),
        num_bytes=batch_size * 16,
    )


class PairHeap:
    """A binary tree of sums in one array. All draws descend together."""

    def __init__(self, weights: Any) -> None:
        self.size = 1 << (len(weights) - 1).bit_length()
        self.sums = np.zeros(2 * self.size)
        self.sums[self.size : self.size + len(weights)] = weights
        width = self.size
        while width > 1:
            self.sums[width // 2 : width] = self.sums[width : 2 * width].reshape(-1, 2).sum(1)
            width //= 2

    def draw(self, num_draws: int) -> Any:
        masses = (np.arange(num_draws) + np.random.rand(num_draws)) * (self.sums[1] / num_draws)
        node = np.ones(num_draws, np.int64)
        while node[0] < self.size:
            node = 2 * node
            left = self.sums[node]
            is_right = masses >= left
            masses = np.where(is_right, masses - left, masses)
            node += is_right
        return node - self.size

    def write(self, index: Any, weights: Any) -> None:
        node = index + self.size
        self.sums[node] = weights
        while node[0] > 1:
            node = node >> 1
            self.sums[node] = self.sums[2 * node] + self.sums[2 * node + 1]


def draw_by_rejection(
    weights: torch.Tensor, num_draws: int, generator: torch.Generator
) -> torch.Tensor:
    """Propose rows uniformly, and accept each in proportion to its weight.

    The largest possible weight is 1.
    """
    result: list[torch.Tensor] = []
    missing, share = num_draws, 0.5
    while missing:
        candidate = torch.randint(
            len(weights), (int(missing / share * 1.05) + 8,), generator=generator
        )
        luck = torch.rand(len(candidate), dtype=torch.float64, generator=generator)
        accepted = candidate[luck < weights.index_select(0, candidate)]
        share = max(0.01, len(accepted) / len(candidate))
        result.append(accepted[:missing])
        missing -= len(result[-1])
    return torch.cat(result)


class PerItem:
    """A list of items that are copied one by one, and a binary tree of sums in an array, with one
    path at a time.
    """

    def __init__(self, capacity: int) -> None:
        self.size = 1 << (capacity - 1).bit_length()
        item = {name: leaf[0] for name, leaf in rows(1).items()}
        self.items = [item] * capacity
        self.sums = PairHeap(np.random.rand(capacity) ** ALPHA).sums

    def learning(self, batch_size: int, priorities: list[Any]) -> Call:
        new = cycle([x.tolist() for x in priorities])
        return lambda: self.step(batch_size, next(new))

    def step(self, batch_size: int, priorities: list[float]) -> dict[str, torch.Tensor]:
        luck = np.random.rand(batch_size)
        places, drawn = [], []
        for number in range(batch_size):
            mass, node = (number + luck[number]) / batch_size * self.sums[1], 1
            while node < self.size:
                node *= 2
                if mass > self.sums[node] and self.sums[node + 1] > 0:
                    mass -= self.sums[node]
                    node += 1
            places.append(node)
            item = copy.deepcopy(self.items[node - self.size])
            item["IS"] = (self.sums[node] / self.sums[1] * len(self.items)) ** -BETA
            drawn.append(item)
        batch = {name: torch.stack([item[name] for item in drawn]) for name in self.items[0]}
        for node, priority in zip(places, priorities, strict=True):
            self.sums[node] = priority**ALPHA
            while node > 1:
                node //= 2
                self.sums[node] = self.sums[2 * node] + self.sums[2 * node + 1]
        return batch


def _cpprb(capacity: int, batch_size: int, priorities: list[Any]) -> Call:
    cpprb = peers.load("cpprb")
    columns = {name: {"shape": leaf.shape[1]} for name, leaf in rows(1).items()}
    buffer = cpprb.PrioritizedReplayBuffer(capacity, columns, alpha=ALPHA)
    for _ in range(10):
        data = {name: leaf.numpy() for name, leaf in rows(capacity // 10).items()}
        buffer.add(**data, priorities=np.random.rand(capacity // 10))
    new = cycle(priorities)

    def step() -> None:
        batch = buffer.sample(batch_size, beta=BETA)
        buffer.update_priorities(batch["indexes"], next(new))

    return step


def _tianshou(capacity: int, batch_size: int, priorities: list[Any]) -> Call:
    tianshou = peers.load("tianshou", "data")
    buffer = tianshou.PrioritizedReplayBuffer(capacity, alpha=ALPHA, beta=BETA)
    row = {name: leaf[0].numpy() for name, leaf in rows(1).items()}
    names = {"obs": "observation", "obs_next": "next_observation", "act": "action"}
    data = {key: row[name] for key, name in names.items()}
    buffer.add(tianshou.Batch(**data, rew=0.0, terminated=False, truncated=False, info={}))
    buffer._size = capacity
    # Pages that were never written would all be read from one page of zeros.
    for (
        key,
        name,
    ) in names.items():
        buffer._meta[key][:] = np.tile(rows(1000)[name].numpy(), (-(-capacity // 1000), 1))[
            :capacity
        ]
    for key in ("rew", "terminated", "truncated", "done"):
        buffer._meta[key][:] = 0
    buffer.update_weight(np.arange(capacity), np.random.rand(capacity))
    new = cycle(priorities)

    def step() -> None:
        _, indices = buffer.sample(batch_size)
        buffer.update_weight(indices, next(new))

    return step


def _torchrl(capacity: int, batch_size: int, priorities: torch.Tensor) -> Call:
    torchrl, tensordict = peers.load("torchrl", "data"), peers.load("tensordict")
    try:
        sampler = torchrl.PrioritizedSampler(capacity, alpha=ALPHA, beta=BETA)
    except (RuntimeError, ImportError, NameError) as error:
        raise peers.PeerMissing(f"torchrl: its extension does not load here: {error}") from error
    storage = torchrl.LazyTensorStorage(capacity)
    buffer = torchrl.TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=batch_size)
    for _ in range(10):
        indices = buffer.extend(
            tensordict.TensorDict(rows(capacity // 10), batch_size=[capacity // 10])
        )
        buffer.update_priority(indices, torch.rand(capacity // 10))
    new = cycle(priorities)

    def step() -> None:
        batch = buffer.sample()
        buffer.update_priority(batch["index"], next(new))

    return step
