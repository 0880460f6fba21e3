"""Calls on a device that do not make the host wait, and their results against those of the CPU.

The table `CALLS` names public calls that need no wait. Each runs with
`set_sync_debug_mode("error")`, on a real device or on the pretended one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from inspect import getclosurevars
from typing import Any

import numpy as np
import pytest
import torch

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
    motion_priorities,
)
from storage.adapters.rsl_rl import RslRlStorage, RslRlTransition
from storage.errors import UsageError
from storage.saving.saved_store import Store
from tests.conftest import LATENESS
from tests.pretend_cuda import PretendCuda
from tests.storage.rollouts import replace_tensordict

pytestmark = pytest.mark.gpu

NUM_ENVS, NUM_STEPS = 5, 7
#: Number of times that each call is repeated while events complete late.
NUM_CALLS = 3


@contextmanager
def no_waits() -> Iterator[None]:
    """Raise within the block if the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def transitions(device: str, not_finite: bool = False) -> list[RolloutStorage.Transition]:
    """Create the random steps of a rollout.

    With `not_finite`, the value of the first step of a trajectory is NaN, and its reward infinite.
    """
    generator = torch.Generator().manual_seed(0)
    steps = []
    is_first = torch.zeros(NUM_ENVS, 1, dtype=torch.bool)
    for _ in range(NUM_STEPS):

        def normal(size: int) -> torch.Tensor:
            return torch.randn(NUM_ENVS, size, generator=generator)

        dones = torch.rand(NUM_ENVS, 1, generator=generator) < 0.3
        values = normal(1)
        rewards = normal(1)
        if not_finite:
            values = torch.where(is_first, torch.nan, values)
            rewards = torch.where(is_first, torch.inf, rewards)
        columns = {
            "observations": normal(3),
            "actions": normal(2),
            "rewards": rewards,
            "dones": dones,
            "values": values,
            "actions_log_prob": normal(1),
            "action_mean": normal(2),
            "action_sigma": normal(2),
            "time_outs": dones & (torch.rand(NUM_ENVS, 1, generator=generator) < 0.5),
            "bootstrap_values": normal(1),
        }
        step = RolloutStorage.Transition()
        for name, column in columns.items():
            setattr(step, name, column.to(device))
        steps.append(step)
        is_first = dones
    return steps


def full_storage(
    device: str,
    kind: type = RolloutStorage,
    not_finite: bool = False,
    generator: Any = 0,
    **options: Any,
) -> RolloutStorage:
    sizes = NUM_ENVS, NUM_STEPS, (3,), None, (2,)
    storage = kind(*sizes, device=device, generator=generator, **options)
    for step in transitions(device, not_finite):
        storage.add_transitions(completed(storage, step))
    return storage


def completed(storage: RolloutStorage, step: Any) -> Any:
    """Add the fields to a step that only the class of `storage` needs."""
    if isinstance(storage, SarsaRolloutStorage):
        step.next_observations = step.observations + 1
    if isinstance(storage, ActionLabelRollout):
        step.action_labels = step.actions
    return step


def adding(device: str, kind: type = RolloutStorage) -> Callable[[], Callable[[], Any]]:
    """Prepare a call that clears a storage and fills it with steps on `device`."""

    def prepare() -> Callable[[], Any]:
        storage = kind(NUM_ENVS, NUM_STEPS, (3,), None, (2,), device="cuda", generator=0)
        steps = [completed(storage, step) for step in transitions(device)]

        def call() -> None:
            storage.clear()
            for step in steps:
                storage.add_transitions(step)
                if device == "cpu":
                    work()

        return call

    return prepare


def work() -> None:
    """Launch operations on the device as a policy does, until earlier events have completed."""
    values = torch.ones(3, device="cuda")
    for _ in range(LATENESS // 2):
        values += 1


def rollout_of_rsl_rl(training_type: str, call: str) -> Callable[[], Callable[[], Any]]:
    def prepare() -> Callable[[], Any]:
        observations = {"policy": torch.ones(NUM_ENVS, 3, device="cuda")}
        storage = RslRlStorage(
            training_type, NUM_ENVS, NUM_STEPS, observations, (2,), "cuda", generator=0
        )
        steps = []
        for step in transitions("cuda"):
            ours = RslRlTransition(
                observations=observations,
                actions=step.actions,
                rewards=step.rewards,
                dones=step.dones,
            )
            if training_type == "rl":
                ours.values = step.values
                ours.actions_log_prob = step.actions_log_prob
                ours.distribution_params = (step.action_mean, step.action_sigma)
            else:
                ours.privileged_actions = step.actions
            steps.append(ours)
            storage.add_transition(ours)

        def add() -> None:
            storage.clear()
            for step in steps:
                storage.add_transition(step)

        if training_type == "rl":
            storage.compute_returns(torch.ones(NUM_ENVS, 1, device="cuda"), 0.9, 0.8)
        calls = {
            "add_transition": add,
            "generator": lambda: list(storage.generator()),
            "mini_batch_generator": lambda: list(storage.mini_batch_generator(2, 2)),
        }
        return calls[call]

    return prepare


def returns(
    truncation: str, factors: str = "", values: str = "cuda"
) -> Callable[[], Callable[[], Any]]:
    """Prepare a call of `compute_returns`.

    The discounts are tensors on the device `factors`, or numbers if `factors` is "". The last values
    are on the device `values`.
    """

    def prepare() -> Callable[[], Any]:
        storage = full_storage("cuda")
        last_values = torch.ones(NUM_ENVS, 1, device=values)
        gamma: Any = torch.tensor([0.9], device=factors) if factors else 0.9
        lam: Any = torch.tensor(0.8, device=factors) if factors else 0.8
        return lambda: storage.compute_returns(last_values, gamma, lam, truncation=truncation)

    return prepare


def returns_with_new_factors() -> Callable[[], Any]:
    storage = full_storage("cuda")
    last_values = torch.ones(NUM_ENVS, 1, device="cuda")
    gamma = torch.tensor([0.9], device="cuda")
    return lambda: storage.compute_returns(last_values, gamma.clone(), gamma.clone())


def batches(
    generator: Any = 0, kind: type = RolloutStorage, **options: Any
) -> Callable[[], Callable[[], Any]]:
    """Prepare the mini-batches of a full storage.

    `generator` is a generator, a seed, or a function that returns a generator.
    """

    def prepare() -> Callable[[], Any]:
        own_generator = generator() if callable(generator) else generator
        storage = full_storage("cuda", kind, generator=own_generator)
        storage.compute_returns(torch.ones(NUM_ENVS, 1, device="cuda"), 0.9, 0.8)
        return lambda: list(storage.mini_batch_generator(2, 2, **options))

    return prepare


def batches_with_valid_rows() -> Callable[[], Any]:
    storage = full_storage("cuda", SarsaRolloutStorage, generator=0, emit_next_valid=True)
    storage.compute_returns(torch.ones(NUM_ENVS, 1, device="cuda"), 0.9, 0.8)
    return lambda: list(storage.mini_batch_generator(2, 2))


def records() -> dict[str, torch.Tensor]:
    return {
        "observation": torch.ones(6, 3, device="cuda"),
        "reward": torch.zeros(6, 1, device="cuda"),
    }


def extending() -> Callable[[], Any]:
    buffer = DictBuffer(capacity=32, device="cuda", generator=0)
    buffer.extend(records())
    rows = records()
    return lambda: buffer.extend(rows)


def sampling(num_envs: int) -> Callable[[], Callable[[], Any]]:
    def prepare() -> Callable[[], Any]:
        buffer = DictBuffer(capacity=32, device="cuda", num_envs=num_envs, generator=0)
        buffer.extend(records())
        return lambda: buffer.sample(4)

    return prepare


def steps_of_a_ring() -> dict[str, torch.Tensor]:
    ends = torch.tensor([[False], [False], [True], [False], [False], [False]], device="cuda")
    return {**records(), "terminated": ends, "time_outs": torch.zeros_like(ends)}


def ring_of_steps(has_finals: bool) -> DictBuffer:
    buffer = DictBuffer(60, "cuda", num_envs=2, end_key=["terminated", "time_outs"], generator=0)
    steps = steps_of_a_ring()
    for _ in range(25):
        buffer.extend(steps, final={"observation": steps["observation"]} if has_finals else None)
    return buffer


def extending_trajectories(has_finals: bool) -> Callable[[], Callable[[], Any]]:
    def prepare() -> Callable[[], Any]:
        buffer = ring_of_steps(has_finals)
        steps = steps_of_a_ring()
        final = {"observation": steps["observation"]} if has_finals else None
        return lambda: buffer.extend(steps, final=final)

    return prepare


def extending_beyond_the_places(num_rows: int) -> Callable[[], Callable[[], Any]]:
    """Prepare a call that adds more final observations than a new ring has memory for."""

    def prepare() -> Callable[[], Any]:
        buffer = DictBuffer(4 * num_rows, "cuda", num_envs=2, end_key="terminated", generator=0)
        rows = {
            "observation": torch.ones(num_rows, 3, device="cuda"),
            "terminated": (torch.arange(num_rows, device="cuda") % 5 == 0).unsqueeze(1),
        }
        return lambda: buffer.extend(rows, final={"observation": rows["observation"]})

    return prepare


def windows_beyond_the_places(num_steps: int) -> Callable[[], Callable[[], Any]]:
    """Prepare a call that adds more trajectories than a new ring has memory for."""

    def prepare() -> Callable[[], Any]:
        buffer = TrajectoryDictBufferMultiDim(
            4 * num_steps, "cuda", n_dim=2, seq_length=3, start_mode="trajectory", generator=0
        )
        ends = (torch.arange(num_steps, device="cuda") % 5 == 0).view(num_steps, 1, 1)
        rows = {
            "observation": torch.ones(num_steps, 2, 3, device="cuda"),
            "done": ends.expand(num_steps, 2, 1),
        }
        return lambda: buffer.extend(rows)

    return prepare


def transitions_of_a_ring(has_finals: bool, **options: Any) -> Callable[[], Callable[[], Any]]:
    def prepare() -> Callable[[], Any]:
        buffer = ring_of_steps(has_finals)
        return lambda: buffer.sample_transitions(16, **options)

    return prepare


def windows_of_a_ring(
    has_finals: bool, is_extended: bool = False, **options: Any
) -> Callable[[], Callable[[], Any]]:
    def prepare() -> Callable[[], Any]:
        buffer = TrajectoryDictBufferMultiDim(
            30, "cuda", n_dim=2, seq_length=3, generator=0, **options
        )
        steps = {name: leaf.view(3, 2, -1) for name, leaf in steps_of_a_ring().items()}
        final = {"observation": steps["observation"]} if has_finals else None
        for _ in range(25):
            buffer.extend(steps, final=final)
        return (
            (lambda: buffer.extend(steps, final=final))
            if is_extended
            else (lambda: buffer.sample(30))
        )

    return prepare


def pairs_of_states(generator_device: str) -> Callable[[], Callable[[], Any]]:
    def prepare() -> Callable[[], Any]:
        buffer = ReplayBuffer(3, 20, "cuda", generator=torch.Generator(generator_device))
        states = torch.ones(6, 3, device="cuda")
        buffer.insert(states, states)

        def call() -> Any:
            buffer.insert(states, states)
            return buffer.sample(4)

        return call

    return prepare


def host_rows_of_a_ring(has_finals: bool) -> Callable[[], Callable[[], Any]]:
    def prepare() -> Callable[[], Any]:
        buffer = ring_of_steps(has_finals)
        steps = {name: leaf.cpu() for name, leaf in steps_of_a_ring().items()}
        final = {"observation": steps["observation"]} if has_finals else None
        return lambda: buffer.extend(steps, final=final)

    return prepare


def rows_by_priority(call: str) -> Callable[[], Callable[[], Any]]:
    def prepare() -> Callable[[], Any]:
        buffer = AdvancedReplayBuffer(40, device="cuda", generator=0)
        rows = {"x": torch.ones(30, 3, device="cuda")}
        priorities = torch.rand(30, device="cuda")
        for _ in range(2):
            buffer.extend_tensors(rows)
        ids = buffer.sample_tensors(30)[2]
        calls = {
            "extend": lambda: buffer.extend_tensors(rows),
            "extend(priorities)": lambda: buffer.extend_tensors(rows, priorities),
            "sample": lambda: buffer.sample_tensors(30),
            "update": lambda: buffer.update_priorities(ids, priorities),
            "update(host)": lambda: buffer.update_priorities(ids, [0.5] * 30),
            "sample and update": lambda: buffer.update_priorities(
                buffer.sample_tensors(30)[2], priorities
            ),
        }
        return calls[call]

    return prepare


def windows_by_priority(call: str) -> Callable[[], Callable[[], Any]]:
    def prepare() -> Callable[[], Any]:
        buffer = PrioritizedWindows(30, 3, device="cuda", generator=0)
        steps = {
            "x": torch.ones(3, 2, 1, device="cuda"),
            "done": torch.zeros(3, 2, 1, device="cuda"),
        }
        for _ in range(25):
            buffer.extend(steps)
        ids = buffer.sample(8)[2]
        priorities = torch.rand(8, device="cuda")
        calls = {
            "extend": lambda: buffer.extend(steps),
            "sample": lambda: buffer.sample(8),
            "update": lambda: buffer.update_priorities(ids, priorities),
        }
        return calls[call]

    return prepare


def expert_priorities(is_on_host: bool) -> Callable[[], Callable[[], Any]]:
    def prepare() -> Callable[[], Any]:
        buffer = TrajectoryDictBuffer(
            [{"observation": torch.zeros(n, 2)} for n in (9, 5)], "cuda", 3, generator=0
        )
        priorities = torch.rand(2) if is_on_host else torch.rand(2, device="cuda")

        def call() -> Any:
            buffer.update_priorities(priorities)
            return buffer.sample(6)

        return call

    return prepare


def motion_scores(mode: str | None) -> Callable[[], Callable[[], Any]]:
    def prepare() -> Callable[[], Any]:
        scores = torch.rand(6, device="cuda")
        return lambda: motion_priorities(scores, mode)

    return prepare


def host_rows_by_priority(call: str) -> Callable[[], Callable[[], Any]]:
    def prepare() -> Callable[[], Any]:
        buffer = AdvancedReplayBuffer(40, device="cuda", generator=0)
        rows = {"x": torch.ones(30, 3), "n": np.arange(30)}
        buffer.extend_tensors(rows)
        ids = buffer.sample_tensors(30)[2]
        priorities = torch.rand(30)
        on_host = ids.cpu()
        calls = {
            "extend": lambda: buffer.extend_tensors(rows),
            "extend(priorities)": lambda: buffer.extend_tensors(rows, priorities),
            "extend(one priority)": lambda: buffer.extend_tensors(rows, 0.5),
            "extend(collect_iter)": lambda: buffer.extend_tensors(rows, collect_iter=range(30)),
            "extend(one collect_iter)": lambda: buffer.extend_tensors(rows, collect_iter=3),
            "update": lambda: buffer.update_priorities(on_host, priorities),
            "update(one priority)": lambda: buffer.update_priorities(ids, 0.5),
            "update(a priority on the device)": lambda: buffer.update_priorities(ids, item),
        }
        item = torch.tensor(0.5, device="cuda")
        return calls[call]

    return prepare


def host_windows_by_priority(call: str) -> Callable[[], Callable[[], Any]]:
    def prepare() -> Callable[[], Any]:
        buffer = PrioritizedWindows(30, 3, device="cuda", generator=0)
        steps = {"x": torch.ones(3, 2, 1), "done": torch.zeros(3, 2, 1)}
        for _ in range(25):
            buffer.extend(steps)
        ids = buffer.sample(8)[2]
        on_host = ids.cpu()
        priorities = torch.rand(8)
        calls = {
            "extend": lambda: buffer.extend(steps),
            "update": lambda: buffer.update_priorities(on_host, priorities),
            "update(one priority)": lambda: buffer.update_priorities(ids, 0.5),
        }
        return calls[call]

    return prepare


def host_steps_of_windows(has_finals: bool, start_mode: str) -> Callable[[], Callable[[], Any]]:
    def prepare() -> Callable[[], Any]:
        buffer = TrajectoryDictBufferMultiDim(
            30, "cuda", n_dim=2, seq_length=3, start_mode=start_mode, generator=0
        )
        steps = {name: leaf.cpu().view(3, 2, -1) for name, leaf in steps_of_a_ring().items()}
        final = {"observation": steps["observation"]} if has_finals else None
        for _ in range(25):
            buffer.extend(steps, final=final)
        return lambda: buffer.extend(steps, final=final)

    return prepare


def transitions_of_windows(**options: Any) -> Callable[[], Callable[[], Any]]:
    def prepare() -> Callable[[], Any]:
        buffer = TrajectoryDictBufferMultiDim(30, "cuda", n_dim=2, seq_length=3, generator=0)
        steps = {name: leaf.view(3, 2, -1) for name, leaf in steps_of_a_ring().items()}
        for _ in range(25):
            buffer.extend(steps)
        return lambda: buffer.sample_transitions(16, **options)

    return prepare


def batches_of_pairs() -> Callable[[], Any]:
    buffer = ReplayBuffer(3, 20, "cuda", generator=0)
    states = torch.ones(6, 3)
    buffer.insert(states, states)

    def call() -> Any:
        buffer.insert(states, states)
        return list(buffer.feed_forward_generator(2, 4))

    return call


def vectors(device: str) -> Callable[[], Callable[[], Any]]:
    def prepare() -> Callable[[], Any]:
        buffer = ZBuffer(20, 3, "cuda", generator=0)
        rows = torch.ones(6, 3, device=device)
        buffer.add(rows)

        def call() -> Any:
            buffer.add(rows)
            return buffer.sample(4)

        return call

    return prepare


def samples_of_a_manager() -> Callable[[], Any]:
    options = {"replay_buffer_size": 40, "generator": 0}
    manager = BufferManager(
        {"buffer_name": ["a", "b"], "a": options, "b": options,
         "sample_ratio": {"a": 0.5, "b": 0.5}},
        device="cuda",
        generator=0,
    )  # fmt: skip
    rows = {"x": torch.ones(30, 3, device="cuda")}
    priorities = torch.rand(30, device="cuda")
    for name in manager.buffer_name:
        manager[name].extend_tensors(rows)

    def call() -> Any:
        for name in manager.buffer_name:
            manager[name].extend_tensors(rows)
        samples = manager.sample_tensors(20)
        assert samples is not None
        ids = {name: sample[2] for name, sample in samples.items()}
        manager.update_priorities(ids, {name: priorities[: len(x)] for name, x in ids.items()})
        return samples

    return call


def returns_of(
    kind: type = RolloutStorage, num_rewards: int = 1, num_steps: int = NUM_STEPS, **options: Any
) -> Callable[[], Callable[[], Any]]:
    """Prepare a call of `compute_returns` of a storage of class `kind` with `num_steps` steps."""

    def prepare() -> Callable[[], Any]:
        storage = kind(
            NUM_ENVS, NUM_STEPS, (3,), None, (2,), num_rewards, device="cuda", generator=0
        )
        for step in transitions("cuda")[:num_steps]:
            for name in ("rewards", "values", "bootstrap_values"):
                setattr(step, name, getattr(step, name).expand(-1, num_rewards).contiguous())
            storage.add_transitions(completed(storage, step))
        last_values = torch.ones(NUM_ENVS, num_rewards, device="cuda")
        gamma: Any = [0.9] * num_rewards if num_rewards > 1 else 0.9

        def call() -> torch.Tensor:
            storage.compute_returns(last_values, gamma, 0.8, **options)
            return storage.returns

        return call

    return prepare


def sampling_to_the_device(call: str) -> Callable[[], Callable[[], Any]]:
    """Prepare the call `call` of a buffer on the CPU, which returns samples on the GPU."""

    def prepare() -> Callable[[], Any]:
        on_host = {"output_device": "cuda", "generator": 0}
        steps = {name: leaf.cpu() for name, leaf in steps_of_a_ring().items()}
        buffer = DictBuffer(60, num_envs=2, end_key=["terminated", "time_outs"], **on_host)
        windows = TrajectoryDictBufferMultiDim(30, n_dim=2, seq_length=3, **on_host)
        advanced = AdvancedReplayBuffer(40, **on_host)
        episodes = EpisodeReplayBuffer(4, **on_host)
        expert = TrajectoryDictBuffer(
            [{"observation": torch.zeros(n, 2)} for n in (9, 5)], seq_length=3, **on_host
        )
        episodes.push({"x": torch.ones(9, 3)})
        advanced.extend_tensors(steps)
        for _ in range(25):
            buffer.extend(steps)
            windows.extend({name: leaf.view(3, 2, -1) for name, leaf in steps.items()})
        calls = {
            "DictBuffer.sample": lambda: buffer.sample(4),
            "DictBuffer.sample_transitions": lambda: buffer.sample_transitions(4, num_steps=2),
            "TrajectoryDictBufferMultiDim.sample": lambda: windows.sample(6),
            "TrajectoryDictBufferMultiDim.get_full_buffer": windows.get_full_buffer,
            "TrajectoryDictBuffer.sample": lambda: expert.sample(6),
            "AdvancedReplayBuffer.sample_tensors": lambda: advanced.sample_tensors(4),
            "EpisodeReplayBuffer.sample_windows": lambda: episodes.sample_windows(2, 3),
            "EpisodeReplayBuffer.sample": lambda: episodes.sample(1),
        }
        return calls[call]

    return prepare


def batches_to_the_device(**options: Any) -> Callable[[], Callable[[], Any]]:
    """Prepare a call that draws mini-batches on the GPU from a storage on the CPU."""

    def prepare() -> Callable[[], Any]:
        storage = RolloutStorage(
            NUM_ENVS, NUM_STEPS, (3,), None, (2,), generator=0, output_device="cuda"
        )
        for step in transitions("cpu"):
            step.hidden_states = torch.ones(1, NUM_ENVS, 4)
            storage.add_transitions(step)
        storage.compute_returns(torch.ones(NUM_ENVS, 1), 0.9, 0.8)
        if options.get("recurrent"):
            return lambda: list(storage.recurrent_mini_batch_generator(2, 2))
        return lambda: list(storage.mini_batch_generator(2, 2, **options))

    return prepare


#: Map from the name of each call to a function that prepares the call and returns it.
CALLS: dict[str, Callable[[], Callable[[], Any]]] = {
    "RolloutStorage.add_transitions": adding("cuda"),
    "RolloutStorage.add_transitions(tensors on the host)": adding("cpu"),
    "RolloutStorage.compute_returns(truncation='cut')": returns("cut"),
    "RolloutStorage.compute_returns(truncation='value')": returns("value"),
    "RolloutStorage.compute_returns(truncation='final')": returns("final"),
    "RolloutStorage.compute_returns(new factors on the device)": returns_with_new_factors,
    "RolloutStorage.compute_returns(last values on the host)": returns("cut", values="cpu"),
    "RolloutStorage.mini_batch_generator(a seed)": batches(),
    "RolloutStorage.mini_batch_generator(generator=None)": batches(None),
    "RolloutStorage.mini_batch_generator(generator on the device)": batches(
        lambda: torch.Generator("cuda")
    ),
    "RolloutStorage.mini_batch_generator(generator on the host)": batches(
        lambda: torch.Generator("cpu")
    ),
    "RolloutStorage.mini_batch_generator(reshuffle='once')": batches(reshuffle="once"),
    "RolloutStorage.mini_batch_generator(drop_last=False)": batches(drop_last=False),
    "SarsaRolloutStorage.mini_batch_generator": batches(kind=SarsaRolloutStorage),
    "SarsaRolloutStorage.mini_batch_generator(emit_next_valid)": batches_with_valid_rows,
    "QueueRolloutStorage.mini_batch_generator": batches(kind=QueueRolloutStorage),
    "ActionLabelRollout.mini_batch_generator": batches(kind=ActionLabelRollout),
    "RolloutStorage.get_statistics": lambda: full_storage("cuda").get_statistics,
    "DictBuffer.extend": extending,
    "DictBuffer.sample": sampling(1),
    "DictBuffer.sample(envs)": sampling(2),
    "ReplayBuffer.sample": pairs_of_states("cuda"),
    "ReplayBuffer.sample(generator on the CPU)": pairs_of_states("cpu"),
    "DictBuffer.extend(end_key)": extending_trajectories(False),
    "DictBuffer.extend(final=)": extending_trajectories(True),
    "DictBuffer.extend(final=), more rows than places": extending_beyond_the_places(300),
    "TrajectoryDictBufferMultiDim('trajectory').extend, more rows than places": (
        windows_beyond_the_places(200)
    ),
    "ReplayBuffer.feed_forward_generator": batches_of_pairs,
    "ZBuffer.add and sample": vectors("cuda"),
    "ZBuffer.add and sample(host)": vectors("cpu"),
    "BufferManager.sample_tensors and update_priorities": samples_of_a_manager,
    "RolloutStorage.compute_returns(2 rewards)": returns_of(num_rewards=2),
    "RolloutStorage.compute_returns(2 rewards, per reward)": returns_of(
        num_rewards=2, normalize="per_reward"
    ),
    "RolloutStorage.compute_returns(normalize=None)": returns_of(normalize=None),
    "RolloutStorage.compute_returns(allow_partial=True)": returns_of(
        num_steps=4, allow_partial=True
    ),
    "SarsaRolloutStorage.compute_returns": returns_of(SarsaRolloutStorage),
    "QueueRolloutStorage.compute_returns": returns_of(QueueRolloutStorage),
    "QueueRolloutStorage.compute_returns(a part)": returns_of(QueueRolloutStorage, num_steps=4),
    "ActionLabelRollout.compute_returns": returns_of(ActionLabelRollout),
    "RolloutStorage.mini_batch_generator(output_device)": batches_to_the_device(),
    "RolloutStorage.mini_batch_generator(output_device, once)": batches_to_the_device(
        reshuffle="once"
    ),
    "RolloutStorage.recurrent_mini_batch_generator(output_device)": batches_to_the_device(
        recurrent=True
    ),
}
for kind in (SarsaRolloutStorage, QueueRolloutStorage, ActionLabelRollout):
    CALLS[f"{kind.__name__}.add_transitions"] = adding("cuda", kind)
    CALLS[f"{kind.__name__}.add_transitions(tensors on the host)"] = adding("cpu", kind)
for training_type, call in (
    ("rl", "add_transition"),
    ("rl", "mini_batch_generator"),
    ("distillation", "generator"),
):
    CALLS[f"RslRlStorage.{call}"] = rollout_of_rsl_rl(training_type, call)
for num_steps in (1, 3):
    CALLS[f"TrajectoryDictBufferMultiDim.sample_transitions({num_steps} steps)"] = (
        transitions_of_windows(num_steps=num_steps)
    )
for call in (
    "extend",
    "extend(priorities)",
    "extend(one priority)",
    "extend(collect_iter)",
    "extend(one collect_iter)",
    "update",
    "update(one priority)",
    "update(a priority on the device)",
):
    CALLS[f"AdvancedReplayBuffer.{call}, host rows"] = host_rows_by_priority(call)
for call in ("extend", "update", "update(one priority)"):
    CALLS[f"PrioritizedWindows.{call}, host rows"] = host_windows_by_priority(call)
for call in (
    "DictBuffer.sample",
    "DictBuffer.sample_transitions",
    "TrajectoryDictBufferMultiDim.sample",
    "TrajectoryDictBufferMultiDim.get_full_buffer",
    "TrajectoryDictBuffer.sample",
    "AdvancedReplayBuffer.sample_tensors",
    "EpisodeReplayBuffer.sample_windows",
    "EpisodeReplayBuffer.sample",
):
    CALLS[f"{call}(output_device)"] = sampling_to_the_device(call)
for truncation in ("cut", "value", "final"):
    for factors in ("cpu", "cuda"):
        CALLS[f"RolloutStorage.compute_returns({truncation!r}, factors: {factors})"] = returns(
            truncation, factors
        )
for call in (
    "extend",
    "extend(priorities)",
    "sample",
    "update",
    "update(host)",
    "sample and update",
):
    CALLS[f"AdvancedReplayBuffer.{call}"] = rows_by_priority(call)
for call in ("extend", "sample", "update"):
    CALLS[f"PrioritizedWindows.{call}"] = windows_by_priority(call)
for mode in ("exp", "bin", None):
    CALLS[f"motion_priorities({mode!r})"] = motion_scores(mode)
for is_on_host in (False, True):
    CALLS[f"TrajectoryDictBuffer.update_priorities and sample, {is_on_host}"] = expert_priorities(
        is_on_host
    )
for has_finals in (False, True):
    of_finals = ", final observations" * has_finals
    CALLS[f"DictBuffer.extend(host){of_finals}"] = host_rows_of_a_ring(has_finals)
    for given in (
        {},
        {"at_end": "mark"},
        {"num_steps": 3},
        {"num_steps": 3, "at_end": "mark"},
        {"num_frames": 4},
        {"num_steps": 3, "num_frames": 4},
        {"gamma": 0.9},
    ):
        CALLS[f"DictBuffer.sample_transitions({given}){of_finals}"] = transitions_of_a_ring(
            has_finals, **given
        )
    for mode in ("uniform", "trajectory"):
        name = f"TrajectoryDictBufferMultiDim({mode!r}){of_finals}"
        CALLS[f"{name}.extend(host)"] = host_steps_of_windows(has_finals, mode)
        CALLS[f"{name}.extend"] = windows_of_a_ring(has_finals, is_extended=True, start_mode=mode)
        for end in ("exclude", "mark"):
            CALLS[f"{name}.sample({end!r})"] = windows_of_a_ring(
                has_finals, start_mode=mode, at_end=end
            )


#: Maximum number of launches of a call, counted on the pretended device, by name of the call.
MAX_LAUNCHES = {
    "DictBuffer.sample": 7,
    "DictBuffer.sample(envs)": 7,
    "AdvancedReplayBuffer.sample and update": 40,
} | {name: 45 for name in CALLS if "'num_steps': 3" in name and "num_frames" not in name}


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="launches are counted on the pretended device"
)
@pytest.mark.parametrize("name", MAX_LAUNCHES)
def test_a_call_needs_few_launches(name: str) -> None:
    call = CALLS[name]()
    for _ in range(3):
        call()
    device = PretendCuda.active()
    device.reset()
    call()
    assert device.counts.num_launches <= MAX_LAUNCHES[name], device.counts.launches


@pytest.fixture(autouse=True)
def no_tensordict(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_tensordict(monkeypatch)


@pytest.mark.parametrize("name", CALLS)
def test_the_host_does_not_wait(name: str) -> None:
    call = CALLS[name]()
    call()  # The first call may wait, because it allocates memory.
    with no_waits():
        call()


#: Names of calls whose draws depend on when data arrive on the host, or on the number of objects
#: created so far. Only the shapes of their results are compared.
DRAWS = {"RolloutStorage.mini_batch_generator(generator=None)"} | {
    name for name in CALLS if ".sample_transitions(" in name or ".sample('" in name
}


def stores_of(call: Any) -> list[Store]:
    """Return the buffers and storages that a prepared call uses."""
    used = [call.__self__] if hasattr(call, "__self__") else getclosurevars(call).nonlocals.values()
    return [value for value in used if isinstance(value, Store)]


def on_host(value: Any) -> Any:
    """Copy nested results to the host."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, Mapping):
        return {name: on_host(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [on_host(part) for part in value]
    if isinstance(value, str):
        return list(value.encode())
    return on_host(vars(value)) if is_dataclass(value) else value


def shapes_of(value: Any) -> Any:
    """Replace tensors in nested results by zeros, so that only their shapes are compared."""
    if isinstance(value, Mapping):
        return {name: shapes_of(part) for name, part in value.items()}
    if isinstance(value, list):
        return [shapes_of(part) for part in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value


def results_of_calls(name: str) -> Any:
    """Repeat a call during which the host must not wait.

    Returns its results, and the states of its buffers and storages after the last call.
    """
    torch.manual_seed(0)
    call = CALLS[name]()
    call()
    with no_waits():
        results = [call() for _ in range(NUM_CALLS)]
    torch.cuda.synchronize()
    states = [on_host(store.state_dict()["tensors"]) for store in stores_of(call)]
    if name in DRAWS:
        results = shapes_of(on_host(results))
        for state in states:
            del state["rng"]
    return on_host(results), states


@pytest.mark.skipif(torch.cuda.is_available(), reason="events of a real device are not delayed")
@pytest.mark.parametrize("name", CALLS)
def test_events_that_complete_after_further_calls_change_no_result(
    name: str, cuda_device: PretendCuda
) -> None:
    expected = results_of_calls(name)
    cuda_device.lateness = LATENESS
    late = results_of_calls(name)
    torch.testing.assert_close(late, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("not_finite", [False, True])
@pytest.mark.parametrize("truncation", ["cut", "value", "final"])
def test_returns_on_a_device_equal_those_of_the_cpu(truncation: str, not_finite: bool) -> None:
    last_values = torch.linspace(-1, 1, NUM_ENVS).view(-1, 1)
    results = []
    for device in ("cpu", "cuda"):
        storage = full_storage(device, not_finite=not_finite)
        storage.compute_returns(
            last_values.to(device), 0.9, 0.8, truncation=truncation, normalize=None
        )
        results.append(storage.returns.cpu())
    assert torch.isfinite(results[0]).any()
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6, equal_nan=True)


def test_a_score_that_is_not_finite_leaves_the_priority_unchanged_and_a_later_call_raises() -> None:
    buffer = TrajectoryDictBuffer(
        [{"observation": torch.zeros(n, 2)} for n in (9, 5)], "cuda", 3, generator=0
    )
    before = buffer.priorities.cpu()
    scores = torch.tensor([1.0, torch.inf], device="cuda")
    buffer.update_priorities(motion_priorities(scores))
    with pytest.raises(UsageError, match="finite"):
        buffer.raise_deferred(wait=True)
    priorities = torch.tensor([2.0**2, float(before[1])])
    assert torch.allclose(buffer.priorities.cpu(), priorities / priorities.sum())


@pytest.mark.usefixtures("any_device")
@pytest.mark.parametrize("num_per_call", [1, 50])
def test_a_loaded_buffer_with_many_ended_rows_loses_no_final_observation(num_per_call: int) -> None:
    """The saved buffer has an ended row in each place for a final observation."""
    ended = {
        "x": torch.ones(num_per_call, 1),
        "done": torch.ones(num_per_call, 1, dtype=torch.bool),
    }
    final = {"x": ended["x"]}
    saved = DictBuffer(10_000, "cpu", end_key="done")
    for _ in range(1000 // num_per_call):
        saved.extend(ended, final=final)
    loaded = DictBuffer(10_000, "cuda", end_key="done")
    loaded.load_state_dict(saved.state_dict())
    on_device = {name: x.cuda() for name, x in ended.items()}
    for _ in range(20):
        loaded.extend(on_device, final={"x": on_device["x"]})
    assert int(loaded.num_lost_finals) == 0
