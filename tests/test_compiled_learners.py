"""A learner step compiled with `fullgraph=True` takes the batches of every generator and sampler as one graph.

Batches of one source have the same shapes and strides each time, so that nothing is compiled again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rollout_data
import storage as storage_package
from rollout_data import (
    RolloutDataset,
    RolloutWriter,
    TrajectoryReplayBuffer,
    WindowDataset,
    WindowLoader,
    WindowMixture,
    loader,
)
from storage import (
    ActionLabelRollout,
    AdvancedReplayBuffer,
    BufferManager,
    DictBuffer,
    EpisodeReplayBuffer,
    PrioritizedWindows,
    QueueRolloutStorage,
    ReplayBuffer,
    RolloutStorage,
    SarsaRolloutStorage,
    TrajectoryDictBuffer,
    TrajectoryDictBufferMultiDim,
    ZBuffer,
)
from tests.storage.rollouts import make_storage, make_transition

NUM_ENVS, NUM_STEPS = 8, 6
NUM_BATCHES = 4
STORAGES = (RolloutStorage, QueueRolloutStorage, SarsaRolloutStorage, ActionLabelRollout)


def leaves_of(batch: Any) -> list[torch.Tensor]:
    """List the tensors of a batch."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    if hasattr(batch, "items"):  # A dict or a TensorDict
        return [leaf for value in batch.values() for leaf in leaves_of(value)]
    if isinstance(batch, (tuple, list)):
        return [leaf for value in batch for leaf in leaves_of(value)]
    return []


def rollout(kind: type, **options: Any) -> Any:
    storage = make_storage(NUM_ENVS, NUM_STEPS, kind, **options)
    for step in range(NUM_STEPS):
        # The trajectories of all environments end at the same step. So all mini-batches have the
        # same number of trajectories, and the same shape.
        done = torch.full((NUM_ENVS, 1), step == 2)
        made = make_transition(
            step, NUM_ENVS, done=done, hidden_states=torch.full((1, NUM_ENVS, 3), float(step))
        )
        if kind is SarsaRolloutStorage:
            later = make_transition(step + 1, NUM_ENVS)
            made.next_observations = later.observations
            made.next_critic_observations = later.critic_observations
        if kind is ActionLabelRollout:
            made.action_labels = made.actions
        storage.add_transitions(made)
    storage.compute_returns(torch.ones(NUM_ENVS, 1), 0.9, 0.8)
    return storage


def rows(num: int = 60, lanes: int = 0) -> dict[str, Any]:
    number = torch.arange(float(num)).unsqueeze(1)
    made = {
        "observation": {
            "state": number.expand(num, 5).clone(),
            "goal": number.expand(num, 3).clone(),
        },
        "action": number.expand(num, 2).clone(),
        "reward": number.clone(),
        "done": number % 10 == 9,
    }
    if not lanes:
        return made

    def with_lanes(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: with_lanes(leaf) for name, leaf in value.items()}
        return value.unsqueeze(1).expand(-1, lanes, *value.shape[1:]).clone()

    return with_lanes(made)  # type: ignore[no-any-return]


def ring(with_finals: bool = False, **options: Any) -> DictBuffer:
    buffer = DictBuffer(100, end_key="done", generator=0, **options)
    data = rows()
    buffer.extend(data, final={"observation": data["observation"]} if with_finals else None)
    return buffer


def windows(**options: Any) -> TrajectoryDictBufferMultiDim:
    keys = ["observation", "action", "reward"]
    buffer = TrajectoryDictBufferMultiDim(
        100, n_dim=2, seq_length=3, output_key_t=keys, output_key_tp1=["observation"], end_key="done", generator=0,
        **options,
    )  # fmt: skip
    buffer.extend(rows(lanes=2))
    return buffer


def prioritized() -> AdvancedReplayBuffer:
    buffer = AdvancedReplayBuffer(100, generator=0)
    buffer.extend_tensors(rows())
    return buffer


def prioritized_windows() -> PrioritizedWindows:
    buffer = PrioritizedWindows(100, 3, generator=0)
    buffer.extend(rows(lanes=2))
    return buffer


def episodes() -> EpisodeReplayBuffer:
    buffer = EpisodeReplayBuffer(100, generator=0)
    for _ in range(3):
        buffer.push({"x": torch.rand(8, 3)})
    return buffer


def pairs() -> ReplayBuffer:
    buffer = ReplayBuffer(3, 40, generator=0)
    buffer.insert(torch.rand(30, 3), torch.rand(30, 3))
    return buffer


def vectors() -> ZBuffer:
    buffer = ZBuffer(40, 3, generator=0)
    buffer.add(torch.rand(30, 3))
    return buffer


def expert() -> TrajectoryDictBuffer:
    return TrajectoryDictBuffer([rows(10), rows(10)], seq_length=2, end_key="done", generator=0)


def manager() -> BufferManager:
    names = ("walk", "run")
    config: dict[str, Any] = {
        name: {"type": "advanced", "replay_buffer_size": 100, "generator": 0} for name in names
    }
    made = BufferManager(
        {"buffer_name": [*names], "sample_ratio": dict.fromkeys(names, 0.5), **config}
    )
    for name in names:
        made[name].extend_tensors(rows())
    return made


def trajectories() -> TrajectoryReplayBuffer:
    buffer = TrajectoryReplayBuffer(seed=0)
    for _ in range(3):
        buffer.add(rows(10, lanes=2))
    return buffer


GENERATORS: dict[str, Callable[[Any], Iterator[Any]]] = {
    "mini_batch_generator": lambda storage: storage.mini_batch_generator(4, 2),
    "mini_batch_generator, shuffled once": (
        lambda storage: storage.mini_batch_generator(4, 2, reshuffle="once")
    ),
    "recurrent_mini_batch_generator": (
        lambda storage: storage.recurrent_mini_batch_generator(4, 2)
    ),
}
#: "Class.method, options" -> function that makes a buffer, and function that draws a batch from it.
SAMPLERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "DictBuffer.sample": (ring, lambda buffer: buffer.sample(8)),
    "DictBuffer.sample, contiguous": (
        lambda: ring(contiguous=True),
        lambda buffer: buffer.sample(8),
    ),
    "DictBuffer.sample_transitions": (ring, lambda buffer: buffer.sample_transitions(8)),
    "DictBuffer.sample_transitions, with gamma": (
        ring,
        lambda buffer: buffer.sample_transitions(8, gamma=0.9),
    ),
    "DictBuffer.sample_transitions, 3 steps": (
        ring,
        lambda buffer: buffer.sample_transitions(8, num_steps=3),
    ),
    "DictBuffer.sample_transitions, 2 frames, marked": (
        ring,
        lambda buffer: buffer.sample_transitions(8, num_frames=2, at_end="mark"),
    ),
    "DictBuffer.sample_transitions, final observations": (
        lambda: ring(with_finals=True),
        lambda buffer: buffer.sample_transitions(8),
    ),
    "DictBuffer.sample_transitions, 3 steps, final observations": (
        lambda: ring(with_finals=True),
        lambda buffer: buffer.sample_transitions(8, num_steps=3),
    ),
    "TrajectoryDictBufferMultiDim.sample": (windows, lambda buffer: buffer.sample(12)),
    "TrajectoryDictBufferMultiDim.sample, by trajectory": (
        lambda: windows(start_mode="trajectory"),
        lambda buffer: buffer.sample(12),
    ),
    "TrajectoryDictBufferMultiDim.sample, marked": (
        lambda: windows(at_end="mark"),
        lambda buffer: buffer.sample(12),
    ),
    "TrajectoryDictBufferMultiDim.sample_transitions": (
        windows,
        lambda buffer: buffer.sample_transitions(8),
    ),
    "AdvancedReplayBuffer.sample_tensors": (prioritized, lambda buffer: buffer.sample_tensors(8)),
    "BufferManager.sample_tensors": (manager, lambda buffer: buffer.sample_tensors(8)),
    "PrioritizedWindows.sample": (prioritized_windows, lambda buffer: buffer.sample(8)),
    "EpisodeReplayBuffer.sample_windows": (episodes, lambda buffer: buffer.sample_windows(4, 3)),
    "ReplayBuffer.sample": (pairs, lambda buffer: buffer.sample(8)),
    "ReplayBuffer.feed_forward_generator": (
        pairs,
        lambda buffer: next(buffer.feed_forward_generator(1, 8)),
    ),
    "ZBuffer.sample": (vectors, lambda buffer: buffer.sample(8)),
    "TrajectoryDictBuffer.sample": (expert, lambda buffer: buffer.sample(8)),
    "TrajectoryReplayBuffer.sample": (trajectories, lambda buffer: buffer.sample(8)),
}
#: Methods whose names begin like those of samplers, but which return no batch of tensors.
NO_BATCHES = {
    f"{name}.{method}"
    for name in (
        "AdvancedReplayBuffer",
        "BufferManager",
        "EpisodeReplayBuffer",
        "NaiveReplayBuffer",
    )
    for method in ("sample", "sample_check")  # Lists of items, and whether there are enough
} | {"RateLimiter.sample", "WindowMixture.sampler"}


def assert_one_graph(batches: Iterator[Any]) -> None:
    """Check that a compiled learner accepts all batches without being compiled again.

    All batches must have the same shapes, strides and dtypes.
    """
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    def learn(batch: Any) -> torch.Tensor:
        total = torch.zeros(())
        for leaf in leaves_of(batch):
            total = total + (leaf.float() * 0.5).sum()
        return total

    torch._dynamo.reset()
    compiled = torch.compile(learn, backend=count, fullgraph=True)
    layouts = set()
    num_batches = 0
    for batch in batches:
        torch.testing.assert_close(compiled(batch), learn(batch))
        layouts.add(tuple((leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves_of(batch)))
        num_batches += 1
    assert num_batches >= NUM_BATCHES
    assert len(layouts) == 1
    assert len(graphs) == 1


@pytest.mark.each_value
@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize("generator", GENERATORS)
def test_a_compiled_learner_takes_mini_batches_as_one_graph(kind: type, generator: str) -> None:
    assert_one_graph(GENERATORS[generator](rollout(kind)))


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_compiled_learner_takes_samples_as_one_graph(name: str) -> None:
    make, draw = SAMPLERS[name]
    buffer = make()
    assert_one_graph(draw(buffer) for _ in range(NUM_BATCHES))


def test_every_sampler_and_generator_has_a_case() -> None:
    tried = {name.partition(",")[0] for name in SAMPLERS}
    for storage in STORAGES:
        tried |= {f"{storage.__name__}.{name.partition(',')[0]}" for name in GENERATORS}
    for package in (storage_package, rollout_data):
        for class_name in package.__all__:
            made = getattr(package, class_name)
            for name in dir(made) if inspect.isclass(made) else ():
                # The misspelled "reccurent" is an alias, for compatibility with other libraries.
                is_sampler = name.startswith("sample") or name.endswith("batch_generator")
                is_sampler = is_sampler or name.endswith("forward_generator")
                if is_sampler and not name.startswith("reccurent"):
                    is_field = not callable(getattr(made, name))
                    assert is_field or f"{class_name}.{name}" in tried | NO_BATCHES


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    with RolloutWriter(tmp_path / "walk", num_envs=4) as writer:
        for step in range(60):
            state = torch.full((4, 3), float(step))
            done = torch.full((4,), step % 20 == 19)
            writer.add(observation=state, action=state, reward=state[:, 0], done=done, timeout=done)
    return tmp_path / "walk"


@pytest.mark.parametrize("num_steps", [1, 5])
@pytest.mark.parametrize("cache", ["none", "ram"])
def test_a_compiled_learner_takes_playback_as_one_graph(
    recording: Path, num_steps: int, cache: str
) -> None:
    dataset = RolloutDataset(recording, num_envs=4, num_transitions_per_env=num_steps, cache=cache)
    assert_one_graph(batch for batch, _ in zip(dataset, range(NUM_BATCHES), strict=False))


@pytest.mark.parametrize("num_steps", [1, 5])
def test_a_compiled_learner_takes_batches_of_a_loader_as_one_graph(
    recording: Path, num_steps: int
) -> None:
    dataset = RolloutDataset(recording, num_envs=4, num_transitions_per_env=num_steps)
    batches = loader(dataset, num_workers=0)
    assert_one_graph(batch for batch, _ in zip(batches, range(NUM_BATCHES), strict=False))


def test_a_compiled_learner_takes_transition_batches_as_one_graph(recording: Path) -> None:
    dataset = RolloutDataset(recording, num_envs=4)
    dataset.reset()
    assert_one_graph(dataset.get_transition_batch() for _ in range(NUM_BATCHES))


def test_a_compiled_learner_takes_windows_of_a_mixture_as_one_graph(recording: Path) -> None:
    mixture = WindowMixture([recording, recording], length=4, next_observations=True)
    batches = WindowLoader(mixture, batch_size=8, seed=0)
    assert_one_graph(batch for batch, _ in zip(batches, range(NUM_BATCHES), strict=False))


def test_a_compiled_learner_takes_windows_of_a_recording_as_one_graph(recording: Path) -> None:
    loader = WindowLoader(WindowDataset(recording, length=4), batch_size=8, seed=0)
    assert_one_graph(batch for batch, _ in zip(loader, range(NUM_BATCHES), strict=False))
