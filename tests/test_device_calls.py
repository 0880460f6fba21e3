"""Calls on a device that do not make the host wait, and their results against those of the CPU.

The table `CALLS` names public calls that need no wait. Each runs with
`set_sync_debug_mode("error")`, on a real device or on the pretended one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from storage import (
    ActionLabelRollout,
    AdvancedReplayBuffer,
    DictBuffer,
    PrioritizedWindows,
    QueueRolloutStorage,
    ReplayBuffer,
    RolloutStorage,
    SarsaRolloutStorage,
    TrajectoryDictBuffer,
    TrajectoryDictBufferMultiDim,
)
from tests.pretend_cuda import PretendCuda

pytestmark = pytest.mark.gpu

NUM_ENVS, NUM_STEPS = 5, 7


@contextmanager
def no_waits() -> Iterator[None]:
    """Raise within the block wherever the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def transitions(device: str, not_finite: bool = False) -> list[RolloutStorage.Transition]:
    """Draw the steps of a rollout; with `not_finite`, values and rewards after some dones are NaN or infinite."""
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
    device: str, kind: type = RolloutStorage, not_finite: bool = False, generator: Any = 0
) -> RolloutStorage:
    storage = kind(NUM_ENVS, NUM_STEPS, (3,), None, (2,), device=device, generator=generator)
    for step in transitions(device, not_finite):
        if kind is SarsaRolloutStorage:
            step.next_observations = step.observations + 1
        if kind is ActionLabelRollout:
            step.action_labels = step.actions
        storage.add_transitions(step)
    return storage


def adding(device: str) -> Callable[[], Callable[[], Any]]:
    def prepare() -> Callable[[], Any]:
        storage = RolloutStorage(NUM_ENVS, NUM_STEPS, (3,), None, (2,), device="cuda")
        steps = transitions(device)

        def call() -> None:
            storage.clear()
            for step in steps:
                storage.add_transitions(step)

        return call

    return prepare


def returns(
    truncation: str, factors: str = "", values: str = "cuda"
) -> Callable[[], Callable[[], Any]]:
    """Prepare `compute_returns` with numbers as factors, or with tensors on a device, and last values on a device."""

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
    """Prepare the mini-batches of a full storage; `generator` is one, a seed, or makes one."""

    def prepare() -> Callable[[], Any]:
        given = generator() if callable(generator) else generator
        storage = full_storage("cuda", kind, generator=given)
        storage.compute_returns(torch.ones(NUM_ENVS, 1, device="cuda"), 0.9, 0.8)
        return lambda: list(storage.mini_batch_generator(2, 2, **options))

    return prepare


def adding_next_observations() -> Callable[[], Any]:
    storage = full_storage("cuda", SarsaRolloutStorage)
    steps = transitions("cuda")

    def call() -> None:
        storage.clear()
        for step in steps:
            step.next_observations = step.observations
            storage.add_transitions(step)

    return call


def records() -> dict[str, torch.Tensor]:
    return {
        "observation": torch.ones(6, 3, device="cuda"),
        "reward": torch.zeros(6, 1, device="cuda"),
    }


def extending() -> Callable[[], Any]:
    buffer = DictBuffer(capacity=32, device="cuda")
    buffer.extend(records())
    rows = records()
    return lambda: buffer.extend(rows)


def sampling(num_envs: int) -> Callable[[], Callable[[], Any]]:
    def prepare() -> Callable[[], Any]:
        buffer = DictBuffer(capacity=32, device="cuda", num_envs=num_envs)
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


#: Call -> function that prepares it and returns it.
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
    "SarsaRolloutStorage.add_transitions": adding_next_observations,
    "SarsaRolloutStorage.mini_batch_generator": batches(kind=SarsaRolloutStorage),
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
}
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
        CALLS[f"{name}.extend"] = windows_of_a_ring(has_finals, is_extended=True, start_mode=mode)
        for end in ("exclude", "mark"):
            CALLS[f"{name}.sample({end!r})"] = windows_of_a_ring(
                has_finals, start_mode=mode, at_end=end
            )


#: Call -> largest number of launches, counted on the pretended device.
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


@pytest.mark.parametrize("name", CALLS)
def test_the_host_does_not_wait(name: str) -> None:
    call = CALLS[name]()
    call()  # the first call may allocate
    with no_waits():
        call()


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
