"""Every class that can be saved: how tests create, fill and draw from a store of identifiable rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from storage import (
    ActionLabelRollout,
    AdvancedReplayBuffer,
    BufferManager,
    DictBuffer,
    EpisodeReplayBuffer,
    HiddenStates,
    NaiveReplayBuffer,
    PrioritizedWindows,
    QueueRolloutStorage,
    ReplayBuffer,
    RolloutStorage,
    SarsaRolloutStorage,
    TrajectoryDictBuffer,
    TrajectoryDictBufferMultiDim,
    ZBuffer,
)
from tests.managed.naive_model import item
from tests.storage.rollouts import ACTIONS, make_storage, make_transition


class Case(NamedTuple):
    """A class that can be saved.

    Attributes:
        make: Create an empty store from a seed.
        add: Add the rows of a number.
        draw: Return random draws, which also update priorities where the class has them.
        num_adds: Number of calls of `add` until the oldest rows are overwritten.
    """

    make: Callable[[int], Any]
    add: Callable[[Any, int], object]
    draw: Callable[[Any], Any]
    num_adds: int


def rollout(kind: Any, is_recurrent: bool = False, **options: Any) -> Case:
    def add(storage: Any, number: int) -> None:
        is_queue = isinstance(storage, QueueRolloutStorage)
        if not is_queue and storage.step == storage.num_transitions_per_env:
            storage.clear()
        done = torch.tensor([(number + env) % 3 == 0 for env in range(3)])
        step = make_transition(number, 3, 1, done, time_outs=done, bootstrap_values=torch.ones(3))
        if kind is ActionLabelRollout:
            step.action_labels = torch.full((3, ACTIONS), float(number))
        if kind is SarsaRolloutStorage:
            step.next_observations = step.observations + 1.5
            step.next_critic_observations = step.critic_observations + 1.5
        if is_recurrent:
            step.hidden_states = HiddenStates(torch.full((2, 3, 3), float(number)), None)
        storage.add_transitions(step)
        if is_queue and storage.step % 4 == 0:
            storage.clear()

    def draw(storage: Any) -> list[torch.Tensor]:
        storage.compute_returns(torch.zeros(3), 0.9, 0.9, allow_partial=True)
        batches = list(storage.mini_batch_generator(2, 2))
        tensors = [x for batch in batches for x in batch if isinstance(x, torch.Tensor)]
        return tensors + [batch.masks for batch in storage.recurrent_mini_batch_generator(3, 1)]

    return Case(lambda seed: make_storage(3, 4, kind, generator=seed, **options), add, draw, 9)


def replay() -> Case:
    def add(buffer: Any, number: int) -> None:
        states = torch.arange(2.0 * number, 2.0 * number + 2)[:, None].expand(2, 3)
        buffer.insert(states, states + 1000)

    def draw(buffer: Any) -> list[tuple[torch.Tensor, ...]]:
        return list(buffer.feed_forward_generator(2, 20))

    return Case(lambda seed: ReplayBuffer((3,), 5, generator=seed), add, draw, 4)


def items(kind: Any) -> Case:
    options: dict[str, Any] = {"name": "one_of_us"}
    if kind is AdvancedReplayBuffer:
        options |= {"max_use": 40, "max_staleness": 100, "anneal_step": 50}
        options |= {"enable_track_used_data": True}

    def add(buffer: Any, number: int) -> None:
        entry = item(number, collect_iter=number, data_id=f"file {number}")
        other = item(number + 1, collect_iter=1, data_id="x")
        buffer.append([entry, other] if kind is EpisodeReplayBuffer else entry)

    def draw(buffer: Any) -> list[Any]:
        drawn: list[Any] = []
        for iteration in range(8):
            actual = buffer.sample(2, 40 + iteration) or []
            steps = [entry[0] for entry in actual] if kind is EpisodeReplayBuffer else actual
            names = [step["replay_unique_id"] for step in steps]
            drawn.append((names, [step["note"] for step in steps]))
            if kind is AdvancedReplayBuffer and actual:
                drawn.append([(x["IS"], x["use"], x["priority"], x["staleness"]) for x in actual])
                priorities = [0.1 * (iteration % 7)] * len(actual)
                update = {"replay_unique_id": names, "priority": priorities}
                buffer.update({**update, "used_id": ["file 2"]})
        if kind is AdvancedReplayBuffer:
            drawn += [buffer.beta, list(buffer.used_data().queue), buffer.check_valid()]
        return drawn

    return Case(lambda seed: kind(8, generator=seed, **options), add, draw, 20)


def advanced_tensors() -> Case:
    def add(buffer: Any, number: int) -> None:
        buffer.extend_tensors({"x": torch.arange(20.0) + 20 * number}, torch.arange(20.0) + 1)

    def draw(buffer: Any) -> list[torch.Tensor]:
        drawn = []
        for step in range(5):
            batch, weights, ids = buffer.sample_tensors(16)
            buffer.update_priorities(ids, (batch["x"] * (step + 1)) % 13)
            drawn += [batch["x"], weights, ids]
        return drawn

    return Case(lambda seed: AdvancedReplayBuffer(50, generator=seed), add, draw, 4)


def windows() -> Case:
    def add(buffer: Any, number: int) -> None:
        x = torch.arange(24.0 * number, 24.0 * number + 24).view(12, 2, 1)
        buffer.extend({"x": x, "done": x % 13 == 12})

    def draw(buffer: Any) -> list[Any]:
        drawn = []
        for step in range(5):
            batch, weights, ids = buffer.sample(6)
            buffer.update_priorities(ids, batch["x"][..., 0].amax(1) % (step + 3) + 0.5)
            drawn += [batch, weights, ids]
        return [*drawn, buffer.check_valid()]

    def make(seed: int) -> PrioritizedWindows:
        return PrioritizedWindows(40, 3, stride=2, generator=seed, anneal_step=50)

    return Case(make, add, draw, 4)


def manager() -> Case:
    names = ["agent", "demo_of_a_human", "x_7"]

    def make(seed: int) -> BufferManager:
        options = {
            name: {"replay_buffer_size": 10, "generator": seed + place}
            for place, name in enumerate(names)
        }
        ratio = {"agent": 0.5, "demo_of_a_human": 0.3, "x_7": 0.2}
        config = {"buffer_name": names, "sample_ratio": ratio, **options}
        return BufferManager(config, generator=seed)

    def add(buffers: Any, number: int) -> None:
        for place, name in enumerate(names):
            rows = range(8 * number, 8 * number + 8)
            buffers.push_data([item(1000 * place + row) for row in rows], name)

    def draw(buffers: Any) -> list[Any]:
        drawn = []
        for step in range(8):
            actual = buffers.sample(12, step)
            ids = [entry["replay_unique_id"] for entry in actual]
            priorities = [0.1 + (step + place) % 5 for place in range(12)]
            buffers.update({"replay_unique_id": ids, "priority": priorities})
            drawn.append(
                [(entry["replay_unique_id"], entry["IS"], entry["use"]) for entry in actual]
            )
        return [*drawn, buffers.sample_ratio]

    return Case(make, add, draw, 3)


def ring(num_envs: int = 1) -> Case:
    def add(buffer: Any, number: int) -> None:
        rows = torch.arange(4 * number, 4 * number + 4)[:, None]
        a = torch.cat([rows, -rows], 1).float()
        final = {"observation": {"a": a + 1000}}
        data = {"observation": {"a": a}, "reward": rows.double(), "done": rows % 4 == 1}
        buffer.extend(data, final=final)

    def draw(buffer: Any) -> list[Any]:
        drawn = [buffer.sample(30), buffer.sample_transitions(30)]
        return [*drawn, buffer.get_full_buffer("time"), buffer.total]

    def make(seed: int) -> DictBuffer:
        return DictBuffer(10, num_envs=num_envs, end_key="done", generator=seed)

    return Case(make, add, draw, 4)


def lanes(start_mode: str) -> Case:
    def add(buffer: Any, number: int) -> None:
        rows = torch.arange(12.0 * number, 12.0 * number + 12).view(4, 3, 1)
        buffer.extend({"observation": rows.bfloat16(), "x": rows, "done": rows % 7 == 6})

    def draw(buffer: Any) -> list[Any]:
        return [buffer.sample(30), buffer.get_full_buffer(), buffer.total]

    def make(seed: int) -> TrajectoryDictBufferMultiDim:
        return TrajectoryDictBufferMultiDim(
            capacity=9, n_dim=2, seq_length=2, start_mode=start_mode, generator=seed
        )

    return Case(make, add, draw, 4)


def expert() -> Case:
    def make(seed: int) -> TrajectoryDictBuffer:
        episodes = [
            {"observation": torch.arange(4.0 + i).unsqueeze(1), "motion_id": 7 * i}
            for i in range(3)
        ]
        names = ["a", "b", "c"]
        return TrajectoryDictBuffer(episodes, "cpu", 2, generator=seed, file_names=names)

    def add(buffer: Any, number: int) -> None:
        buffer.update_priorities([1.0 + number], [number % 3])

    def draw(buffer: Any) -> list[Any]:
        return [buffer.sample(30), buffer.motion_ids, buffer.file_names]

    return Case(make, add, draw, 4)


def latent() -> Case:
    def add(buffer: Any, number: int) -> None:
        buffer.add(torch.arange(6.0).view(2, 3) + 6 * number)

    def make(seed: int) -> ZBuffer:
        return ZBuffer(5, 3, dtype=torch.float64, generator=seed)

    return Case(make, add, lambda buffer: buffer.sample(30), 4)


CASES: dict[str, Case] = {
    "rollout": rollout(RolloutStorage, is_recurrent=True),
    "queue": rollout(QueueRolloutStorage, buffer_dilation_ratio=1.5),
    "labels": rollout(ActionLabelRollout, buffer_dilation_ratio=2.0),
    "sarsa": rollout(SarsaRolloutStorage, emit_next_valid=True),
    "replay": replay(),
    "naive": items(NaiveReplayBuffer),
    "advanced": items(AdvancedReplayBuffer),
    "advanced, tensors": advanced_tensors(),
    "episodes": items(EpisodeReplayBuffer),
    "windows": windows(),
    "manager": manager(),
    "dict": ring(),
    "dict of two envs": ring(num_envs=2),
    "lanes by trajectory": lanes("trajectory"),
    "lanes uniform": lanes("uniform"),
    "expert": expert(),
    "z": latent(),
}
#: State of a store in tests -> number of calls of `add`; None is `num_adds`. "cleared" follows.
STATES: dict[str, int | None] = {"empty": 0, "partly filled": 2, "overwritten": None}


def store_of(name: str, state: str, seed: int = 0) -> Any:
    """Create a store: "empty", "partly filled", "overwritten", or "cleared" after that."""
    case = CASES[name]
    store = case.make(seed)
    num_adds = STATES.get(state)
    for number in range(case.num_adds if num_adds is None else num_adds):
        case.add(store, number)
    if num_adds != 0:
        case.draw(store)  # The random state is in the middle of its sequence.
    if state == "cleared":
        store.clear()
    return store


def states_of(name: str) -> list[str]:
    """Return the states that the stores of a case can have."""
    has_clear = hasattr(CASES[name].make(0), "clear")
    return [*STATES, "cleared"] if has_clear else [*STATES]


def continued(name: str, store: Any) -> list[Any]:
    """Add rows to a store and draw, several times; return the draws."""
    case = CASES[name]
    drawn = []
    for number in range(30, 36, 2):
        case.add(store, number)
        case.add(store, number + 1)
        drawn.append(case.draw(store))
    return drawn


def exact(tree: Any) -> Any:
    """Convert a tree to values that are equal only if every tensor has the same dtype and bytes."""
    if isinstance(tree, torch.Tensor):
        content = tree.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return str(tree.dtype), tuple(tree.shape), content.numpy().tobytes()
    if isinstance(tree, dict):
        return {key: exact(value) for key, value in tree.items()}
    return [exact(part) for part in tree] if isinstance(tree, (list, tuple)) else tree
