"""`python -m benchmarks.device`: time of calls with tensors on a GPU.

Prints one JSON object per line.

    python -m benchmarks.device --out device.jsonl            # on a GPU, under 4 minutes
    python -m benchmarks.device --device cpu --small          # checks the logic

Keys of a line:
    host_us      microseconds until the call was issued
    us           microseconds until the device had done it
    device_us microseconds of the device alone: events around calls that were issued behind queued
                 work; None if the calls waited for that work
    waits        what `torch.cuda.set_sync_debug_mode("warn")` reports for one call
    launches     kernels, copies and fills of one call, by torch.profiler
    of_limit     `device_us` divided by that of the limit, the bare copy of the same bytes
    bytes        device memory of the filled storage per step of one environment
A case that fails prints its error and does not end the others. `python -m benchmarks device` times
the same cases by the harness of the other workloads.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rollout_data import RolloutDataset, RolloutWriter
from storage import AdvancedReplayBuffer, DictBuffer, RolloutStorage
from storage.adapters.fast_td3 import SimpleReplayBuffer
from storage.core.fields import Field, Schema
from storage.core.packed_rows import lay_out

from . import peers
from .harness import LIMIT, OURS, PEER, Call, Case, Contender

NUM_STEPS, NUM_MINI_BATCHES, NUM_EPOCHS = 24, 4, 5
GAMMA, LAM = 0.99, 0.95
#: Share of steps that end a trajectory.
END_RATE = 0.02


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measured storages."""

    rows: tuple[int, ...] = (32, 4096)
    slots: int = 128
    observation: int = 48
    action: int = 12


FULL = Sizes()
SMALL = Sizes(rows=(8,), slots=16, observation=6, action=2)


class Device:
    """The measured device, and its clock."""

    def __init__(self, name: str) -> None:
        self.device = torch.device(name)
        self.is_cuda = self.device.type == "cuda"
        self._cycles_per_us = 0.0
        if self.is_cuda:
            torch.cuda._sleep(1_000_000)
            self._cycles_per_us = 1e7 / (
                self._elapsed_ms(lambda: torch.cuda._sleep(10_000_000)) * 1e3
            )

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def describe(self) -> dict[str, Any]:
        about: dict[str, Any] = {"torch": torch.__version__, "device": str(self.device)}
        if self.is_cuda:
            about |= {"card": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        return about

    def measure(self, call: Call, seconds: float) -> dict[str, Any]:
        """Time a call. The module lists the keys of the result."""
        for _ in range(3):
            call()
        self.synchronize()
        once_s = self._time(call, 1)[1]
        num_calls = max(2, min(200, int(seconds / 5 / max(once_s, 1e-6))))
        times = [self._time(call, num_calls) for _ in range(5)]
        host_s = statistics.median(host for host, _ in times)
        facts: dict[str, Any] = {
            "host_us": round(host_s * 1e6, 2),
            "us": round(statistics.median(whole for _, whole in times) * 1e6, 2),
        }
        if self.is_cuda:
            facts["device_us"] = self._behind(call, host_s)
            facts["waits"] = self._waits(call)
            facts["launches"] = self._launches(call)
        return facts

    def _time(self, call: Call, num_calls: int) -> tuple[float, float]:
        """Return the seconds per call until it was issued, and until the device had finished."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(num_calls):
            call()
        issued = time.perf_counter()
        self.synchronize()
        return (issued - start) / num_calls, (time.perf_counter() - start) / num_calls

    def _elapsed_ms(self, call: Call) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(stop))

    def _behind(self, call: Call, host_s: float) -> float | None:
        """Return the microseconds per call of the device alone; None if the host waited."""
        num_calls = max(1, min(20, int(0.1 / max(host_s, 1e-6))))
        times = []
        for _ in range(3):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(int(self._cycles_per_us * max(2 * num_calls * host_s * 1e6, 2000)))
            start.record()
            for _ in range(num_calls):
                call()
            stop.record()
            is_behind = not start.query()
            torch.cuda.synchronize()
            if is_behind:
                times.append(start.elapsed_time(stop) * 1e3 / num_calls)
        return round(statistics.median(times), 2) if times else None

    def _waits(self, call: Call) -> int:
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                call()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing" in str(warning.message) for warning in caught)

    def _launches(self, call: Call) -> int:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            call()
            torch.cuda.synchronize()
        return sum(
            event.device_type == torch.autograd.DeviceType.CUDA for event in profiler.events()
        )


# -- data --------------------------------------------------------------------------------------


def steps_of(num_envs: int, sizes: Sizes, device: torch.device) -> list[RolloutStorage.Transition]:
    """Create a few steps of random numbers."""
    steps = []
    for _ in range(4):
        columns = {
            "observations": torch.randn(num_envs, sizes.observation),
            "actions": torch.randn(num_envs, sizes.action),
            "rewards": torch.randn(num_envs, 1),
            "dones": torch.rand(num_envs, 1) < END_RATE,
            "values": torch.randn(num_envs, 1),
            "actions_log_prob": torch.randn(num_envs, 1),
            "action_mean": torch.randn(num_envs, sizes.action),
            "action_sigma": torch.rand(num_envs, sizes.action),
            "time_outs": torch.rand(num_envs, 1) < END_RATE,
        }
        step = RolloutStorage.Transition()
        for name, column in columns.items():
            setattr(step, name, column.to(device))
        steps.append(step)
    return steps


def rows_of(num_rows: int, sizes: Sizes, device: torch.device) -> dict[str, torch.Tensor]:
    """Create transitions of one step of all environments."""
    rows = {
        "observation": torch.randn(num_rows, sizes.observation),
        "action": torch.randn(num_rows, sizes.action),
        "reward": torch.randn(num_rows, 1),
        "terminated": torch.rand(num_rows, 1) < END_RATE,
        "truncated": torch.rand(num_rows, 1) < END_RATE,
    }
    return {name: leaf.to(device) for name, leaf in rows.items()}


def row_words(sizes: Sizes) -> int:
    """Return the size of a packed transition, in units of four bytes."""
    return sizes.observation + sizes.action + 2


def bare_gather(num_rows: int, num_source: int, num_words: int, device: torch.device) -> Call:
    """Prepare a gather of rows with given indices: the minimum work of a sample."""
    source = torch.zeros(num_source, num_words, device=device)
    index = torch.randint(num_source, (num_rows,), device=device)
    out = torch.empty(num_rows, num_words, device=device)
    return lambda: torch.index_select(source, 0, index, out=out)


class PairRing:
    """A ring written by hand, as many trainers have: `[lanes, slots, ...]` tensors with each next
    observation stored again.

    A sample draws the same number of rows of each lane. Rewards of several steps are summed up to
    the first end. The newest row counts as truncated during a draw, so that no sum includes older
    rows.
    """

    def __init__(self, num_lanes: int, sizes: Sizes, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(num_lanes, sizes.slots, *shape, dtype=dtype, device=device)

        self.observation = zeros(sizes.observation)
        self.next_observation = zeros(sizes.observation)
        self.action = zeros(sizes.action)
        self.reward = zeros()
        self.done = zeros(dtype=torch.int64)
        self.truncated = zeros(dtype=torch.int64)
        self._lane = torch.arange(num_lanes, device=device).unsqueeze(1)
        self._slots = sizes.slots
        self._num_written = 0

    def extend(self, rows: dict[str, torch.Tensor]) -> None:
        slot = self._num_written % self._slots
        self.observation[:, slot] = rows["observation"]
        self.next_observation[:, slot] = rows["observation"]
        self.action[:, slot] = rows["action"]
        self.reward[:, slot] = rows["reward"].squeeze(1)
        self.done[:, slot] = rows["terminated"].squeeze(1)
        self.truncated[:, slot] = rows["truncated"].squeeze(1)
        self._num_written += 1

    def sample(self, rows_per_lane: int, num_steps: int = 1) -> dict[str, torch.Tensor]:
        num_live = min(self._num_written, self._slots)
        shape = (len(self._lane), rows_per_lane)
        first = torch.randint(num_live, shape, device=self._lane.device)
        batch = {name: getattr(self, name)[self._lane, first] for name in ("observation", "action")}
        if num_steps == 1:
            others = ("reward", "done", "truncated", "next_observation")
            return batch | {name: getattr(self, name)[self._lane, first] for name in others}
        slots = (first.unsqueeze(-1) + torch.arange(num_steps, device=first.device)) % self._slots
        lanes = self._lane.unsqueeze(-1)
        newest = (self._num_written - 1) % self._slots
        truncated = self.truncated[lanes, slots] | (slots == newest)
        done = self.done[lanes, slots]
        has_ended = ((done | truncated) > 0).long()
        is_taken = (has_ended.cumsum(-1) - has_ended) == 0
        discounts = GAMMA ** torch.arange(num_steps, device=first.device)
        reward = (self.reward[lanes, slots] * is_taken * discounts).sum(-1)
        last = is_taken.sum(-1, keepdim=True) - 1
        last_slot = slots.gather(-1, last).squeeze(-1)
        return batch | {
            "reward": reward,
            "done": done.gather(-1, last).squeeze(-1),
            "truncated": truncated.gather(-1, last).squeeze(-1),
            "next_observation": self.next_observation[self._lane, last_slot],
            "num_steps": last.squeeze(-1) + 1,
        }


# -- cases -------------------------------------------------------------------------------------


def filled_rollout(num_envs: int, sizes: Sizes, device: torch.device) -> RolloutStorage:
    shapes = (sizes.observation,), None, (sizes.action,)
    storage = RolloutStorage(num_envs, NUM_STEPS, *shapes, device=device, generator=0)
    add_all(storage, steps_of(num_envs, sizes, device))
    storage.compute_returns(torch.zeros(num_envs, 1, device=device), GAMMA, LAM)
    return storage


def add_all(storage: RolloutStorage, steps: list[Any]) -> None:
    storage.clear()
    for step in range(NUM_STEPS):
        storage.add_transitions(steps[step % len(steps)])


def exhaust(batches: Iterator[Any]) -> None:
    for _ in batches:
        pass


def rollout_cases(num_envs: int, sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Yield the calls of on-policy learning."""
    num_words = sizes.observation + 3 * sizes.action + 5
    rollout_bytes = NUM_STEPS * num_envs * num_words * 4

    def copying(place: torch.device) -> Call:
        source = torch.zeros(NUM_STEPS, num_envs, num_words, device=place)
        target = torch.empty(NUM_STEPS, num_envs, num_words, device=device)
        if device.type == "cuda" and place.type == "cpu":
            source = source.pin_memory()
        return lambda: target.copy_(source, non_blocking=True)

    def adding(place: torch.device) -> Call:
        storage = filled_rollout(num_envs, sizes, device)
        steps = steps_of(num_envs, sizes, place)
        return lambda: add_all(storage, steps)

    for where, place in (("device", device), ("host", torch.device("cpu"))):
        contenders = [
            Contender("one copy of all steps", lambda place=place: copying(place), LIMIT),
            Contender("add_transitions", lambda place=place: adding(place), OURS),
        ]
        if where == "device":
            contenders.append(
                Contender("rsl_rl", lambda: rsl_adding(num_envs, sizes, device), PEER)
            )
        yield Case(f"add {NUM_STEPS} steps from the {where}", tuple(contenders), rollout_bytes)

    def computing(truncation: str) -> Call:
        storage = filled_rollout(num_envs, sizes, device)
        last_values = torch.zeros(num_envs, 1, device=device)
        return lambda: storage.compute_returns(last_values, GAMMA, LAM, truncation=truncation)

    for truncation in ("cut", "value"):
        yield Case(
            f"compute_returns truncation={truncation}",
            (
                Contender(
                    "read and write the columns once", lambda: columns_once(num_envs, device), LIMIT
                ),
                Contender(
                    "compute_returns", lambda truncation=truncation: computing(truncation), OURS
                ),
                Contender("a loop over the steps", lambda: looping(num_envs, device), PEER),
            ),
            NUM_STEPS * num_envs * 17,
        )

    def drawing(**options: Any) -> Call:
        storage = filled_rollout(num_envs, sizes, device)
        return lambda: exhaust(
            storage.mini_batch_generator(NUM_MINI_BATCHES, NUM_EPOCHS, **options)
        )

    def drawing_recurrent() -> Call:
        storage = filled_rollout(num_envs, sizes, device)
        return lambda: exhaust(storage.recurrent_mini_batch_generator(NUM_MINI_BATCHES, NUM_EPOCHS))

    def gathering() -> Call:
        num_rows = NUM_STEPS * num_envs
        gathers = [
            bare_gather(num_rows // NUM_MINI_BATCHES, num_rows, num_words, device)
            for _ in range(NUM_MINI_BATCHES)
        ]
        return lambda: [gather() for _ in range(NUM_EPOCHS) for gather in gathers]

    yield Case(
        f"mini-batches {NUM_MINI_BATCHES}x{NUM_EPOCHS}",
        (
            Contender("index_select of packed rows", gathering, LIMIT),
            Contender("new permutation per epoch", drawing, OURS),
            Contender("one permutation for all epochs", lambda: drawing(reshuffle="once"), OURS),
            Contender("recurrent", drawing_recurrent, OURS),
            Contender("rsl_rl", lambda: rsl_drawing(num_envs, sizes, device), PEER),
        ),
        rollout_bytes * NUM_EPOCHS,
    )


def columns_once(num_envs: int, device: torch.device) -> Call:
    source = torch.zeros(NUM_STEPS, num_envs, 4, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def looping(num_envs: int, device: torch.device) -> Call:
    """Prepare advantages by a loop over the steps, as in on-policy trainers."""
    rewards, values = torch.randn(2, NUM_STEPS, num_envs, 1, device=device)
    dones = (torch.rand(NUM_STEPS, num_envs, 1, device=device) < END_RATE).byte()
    last_values = torch.zeros(num_envs, 1, device=device)
    returns = torch.empty_like(rewards)

    def compute() -> torch.Tensor:
        advantage: Any = 0
        for step in reversed(range(NUM_STEPS)):
            next_values = last_values if step == NUM_STEPS - 1 else values[step + 1]
            is_alive = 1.0 - dones[step].float()
            delta = rewards[step] + is_alive * GAMMA * next_values - values[step]
            advantage = delta + is_alive * GAMMA * LAM * advantage
            returns[step] = advantage + values[step]
        advantages = returns - values
        return (advantages - advantages.mean()) / (advantages.std() + 1e-8)

    return compute


def rsl_filled(num_envs: int, sizes: Sizes, device: torch.device) -> tuple[Any, list[Any]]:
    """Fill a storage of rsl_rl with the same fields."""
    storage_module = peers.load("rsl-rl-lib", "storage")
    tensordict = peers.load("tensordict")
    steps = []
    for step in steps_of(num_envs, sizes, device):
        made = storage_module.RolloutStorage.Transition()
        made.observations = tensordict.TensorDict(
            {"policy": step.observations}, batch_size=[num_envs]
        )
        for name in ("actions", "values", "actions_log_prob"):
            setattr(made, name, getattr(step, name))
        made.rewards = step.rewards.squeeze(1)
        made.dones = step.dones.squeeze(1)
        made.distribution_params = (step.action_mean, step.action_sigma)
        steps.append(made)
    storage = storage_module.RolloutStorage(
        "rl", num_envs, NUM_STEPS, steps[0].observations, (sizes.action,), str(device)
    )
    for step in range(NUM_STEPS):
        storage.add_transition(steps[step % len(steps)])
    storage.returns = storage.values.clone()
    storage.advantages = storage.values.clone()
    return storage, steps


def rsl_adding(num_envs: int, sizes: Sizes, device: torch.device) -> Call:
    storage, steps = rsl_filled(num_envs, sizes, device)

    def add() -> None:
        storage.clear()
        for step in range(NUM_STEPS):
            storage.add_transition(steps[step % len(steps)])

    return add


def rsl_drawing(num_envs: int, sizes: Sizes, device: torch.device) -> Call:
    storage, _ = rsl_filled(num_envs, sizes, device)
    return lambda: exhaust(storage.mini_batch_generator(NUM_MINI_BATCHES, NUM_EPOCHS))


def filled_ring(
    num_lanes: int, sizes: Sizes, device: torch.device, with_finals: bool = False
) -> DictBuffer:
    ring = DictBuffer(
        num_lanes * sizes.slots,
        device,
        num_envs=num_lanes,
        end_key=["terminated", "truncated"],
        generator=0,
    )
    rows = rows_of(num_lanes, sizes, device)
    for _ in range(sizes.slots):
        ring.extend(rows, final={"observation": rows["observation"]} if with_finals else None)
    return ring


def filled_pairs(num_lanes: int, sizes: Sizes, device: torch.device) -> PairRing:
    ring = PairRing(num_lanes, sizes, device)
    rows = rows_of(num_lanes, sizes, device)
    for _ in range(sizes.slots):
        ring.extend(rows)
    return ring


def filled_torchrl(num_lanes: int, sizes: Sizes, device: torch.device) -> tuple[Any, Any]:
    data = peers.load("torchrl", "data")
    tensordict = peers.load("tensordict")
    storage = data.LazyTensorStorage(num_lanes * sizes.slots, device=device)
    buffer = data.ReplayBuffer(storage=storage, batch_size=num_lanes)
    rows = rows_of(num_lanes, sizes, device)
    batch = tensordict.TensorDict(
        {**rows, "next": {"observation": rows["observation"]}},
        batch_size=[num_lanes],
        device=device,
    )
    for _ in range(sizes.slots):
        buffer.extend(batch)
    return buffer, batch


def ring_cases(num_rows: int, sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Yield the calls of off-policy learning. The ring has as many lanes as a batch has rows."""
    num_source = num_rows * sizes.slots
    num_words = row_words(sizes)
    num_bytes = num_rows * num_words * 4

    def extending(with_finals: bool = False) -> Call:
        ring = filled_ring(num_rows, sizes, device, with_finals)
        rows = rows_of(num_rows, sizes, device)
        final = {"observation": rows["observation"]} if with_finals else None
        return lambda: ring.extend(rows, final=final)

    def extending_pairs() -> Call:
        ring = filled_pairs(num_rows, sizes, device)
        rows = rows_of(num_rows, sizes, device)
        return lambda: ring.extend(rows)

    def extending_torchrl() -> Call:
        buffer, batch = filled_torchrl(num_rows, sizes, device)
        return lambda: buffer.extend(batch)

    def copying() -> Call:
        source = torch.zeros(num_rows, num_words, device=device)
        target = torch.empty(num_source, num_words, device=device)
        return lambda: target[:num_rows].copy_(source)

    yield Case(
        "extend",
        (
            Contender("one copy of the rows", copying, LIMIT),
            Contender("DictBuffer", extending, OURS),
            Contender("DictBuffer, final observations", lambda: extending(with_finals=True), OURS),
            Contender("pairs by hand", extending_pairs, PEER),
            Contender("torchrl", extending_torchrl, PEER),
        ),
        num_bytes,
    )

    def drawing(name: str, with_finals: bool = False, **options: Any) -> Call:
        ring = filled_ring(num_rows, sizes, device, with_finals)
        draw = getattr(ring, name)
        return lambda: draw(num_rows, **options)

    def drawing_pairs(num_steps: int) -> Call:
        ring = filled_pairs(num_rows, sizes, device)
        return lambda: ring.sample(1, num_steps)

    def drawing_torchrl() -> Call:
        buffer, _ = filled_torchrl(num_rows, sizes, device)
        return buffer.sample

    yield Case(
        "sample",
        (
            Contender(
                "index_select of packed rows",
                lambda: bare_gather(num_rows, num_source, num_words, device),
                LIMIT,
            ),
            Contender("DictBuffer.sample", lambda: drawing("sample"), OURS),
            Contender("torchrl", drawing_torchrl, PEER),
        ),
        num_bytes,
    )
    num_pair_words = num_words + sizes.observation
    for num_steps in (1, 3):
        options = {"num_steps": num_steps}
        yield Case(
            f"sample_transitions n={num_steps}",
            (
                Contender(
                    "index_select of packed pairs",
                    lambda: bare_gather(num_rows, num_source, num_pair_words, device),
                    LIMIT,
                ),
                Contender(
                    "sample_transitions",
                    lambda options=options: drawing("sample_transitions", **options),
                    OURS,
                ),
                Contender(
                    "sample_transitions, final observations",
                    lambda options=options: drawing("sample_transitions", True, **options),
                    OURS,
                ),
                Contender(
                    "pairs by hand", lambda num_steps=num_steps: drawing_pairs(num_steps), PEER
                ),
            ),
            num_rows * num_pair_words * 4,
        )


def prioritized_cases(num_rows: int, sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Yield draws by priority, and updates of the drawn rows."""
    num_source = num_rows * sizes.slots
    num_words = row_words(sizes)

    def stepping() -> Call:
        buffer = AdvancedReplayBuffer(num_source, device=device, generator=0)
        rows = rows_of(num_rows, sizes, device)
        for _ in range(sizes.slots):
            buffer.extend_tensors(rows)
        priorities = torch.rand(num_rows, device=device)

        def step() -> None:
            _, _, ids = buffer.sample_tensors(num_rows)
            buffer.update_priorities(ids, priorities)

        return step

    def torchrl_stepping() -> Call:
        data = peers.load("torchrl", "data")
        tensordict = peers.load("tensordict")
        try:
            sampler = data.PrioritizedSampler(num_source, alpha=0.6, beta=0.4)
        except (RuntimeError, ImportError, NameError) as error:
            raise peers.PeerMissing(
                f"torchrl: its extension does not load here: {error}"
            ) from error
        storage = data.LazyTensorStorage(num_source, device=device)
        buffer = data.TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=num_rows)
        for _ in range(sizes.slots):
            buffer.extend(
                tensordict.TensorDict(rows_of(num_rows, sizes, device), batch_size=[num_rows])
            )
        priorities = torch.rand(num_rows, device=device)

        def step() -> None:
            batch = buffer.sample()
            buffer.update_priority(batch["index"], priorities)

        return step

    yield Case(
        "prioritized sample and update",
        (
            Contender(
                "index_select of packed rows",
                lambda: bare_gather(num_rows, num_source, num_words, device),
                LIMIT,
            ),
            Contender("AdvancedReplayBuffer", stepping, OURS),
            Contender("torchrl", torchrl_stepping, PEER),
        ),
        num_rows * num_words * 4,
    )


def file_cases(num_envs: int, sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Yield recording a step of all environments, and playback from the memory of the device."""
    num_words = row_words(sizes)
    row_bytes = num_words * 4
    names = {
        "observation": "observation",
        "action": "action",
        "reward": "reward",
        "done": "terminated",
    }
    rows = rows_of(num_envs, sizes, device)
    step = {name: rows[row_name] for name, row_name in names.items()}

    def copying() -> Call:
        block = torch.empty(num_envs * row_bytes, dtype=torch.uint8, device=device)
        pinned = torch.empty(
            num_envs * row_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda"
        )
        return lambda: pinned.copy_(block, non_blocking=True)

    def recording() -> Call:
        opened = ExitStack()
        folder = opened.enter_context(tempfile.TemporaryDirectory())
        writer = opened.enter_context(
            RolloutWriter(folder, num_envs, durable=False, retention={"bytes": 1 << 28})
        )

        def add() -> None:
            writer.add(**step)

        weakref.finalize(add, opened.close)
        return add

    yield Case(
        "record a step",
        (
            Contender("pinned copy of the same bytes", copying, LIMIT),
            Contender("RolloutWriter.add", recording, OURS),
        ),
        num_envs * row_bytes,
    )

    def playing(num_steps: int) -> Call:
        opened = ExitStack()
        folder = opened.enter_context(tempfile.TemporaryDirectory())
        with RolloutWriter(folder, num_envs, durable=False) as writer:
            for number in range(2 * NUM_STEPS):
                is_last = number % 20 == 19
                writer.add(**{**step, "done": torch.full((num_envs, 1), is_last, device=device)})
        dataset = RolloutDataset(folder, num_envs, device=device, cache="device", dataset_loops=0)
        dataset.reset()

        def play() -> Any:
            return dataset.get_batch(num_steps)

        weakref.finalize(play, opened.close)
        return play

    for num_steps in (1, NUM_STEPS):
        num_read = num_envs * (num_steps + 1)
        yield Case(
            f"play {num_steps} steps from the device's memory",
            (
                Contender(
                    "index_select of packed rows",
                    partial(bare_gather, num_read, num_envs * 2 * NUM_STEPS, num_words, device),
                    LIMIT,
                ),
                Contender("RolloutDataset", partial(playing, num_steps), OURS),
            ),
            num_read * row_bytes,
        )


SECTIONS: dict[str, Callable[[int, Sizes, torch.device], Iterator[Case]]] = {
    "rollout": rollout_cases,
    "ring": ring_cases,
    "prioritized": prioritized_cases,
    "files": file_cases,
}


def cases(quick: bool) -> Iterator[Case]:
    """Yield all cases for `python -m benchmarks device`, on a GPU if there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = SMALL if quick else FULL
    for make_cases in SECTIONS.values():
        for num_rows in sizes.rows:
            for case in make_cases(num_rows, sizes, device):
                contenders = [synchronized(contender, device) for contender in case.contenders]
                yield replace(
                    case, name=f"{case.name} rows={num_rows}", contenders=tuple(contenders)
                )


def synchronized(contender: Contender, device: torch.device) -> Contender:
    """Return a contender whose call ends when the device has finished."""
    if device.type != "cuda":
        return contender

    def prepare() -> Call:
        call = contender.prepare()
        return lambda: (call(), torch.cuda.synchronize())

    return replace(contender, prepare=prepare)


# -- memory ------------------------------------------------------------------------------------


def memory_lines(sizes: Sizes, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the bytes that storages need per step of one environment."""
    num_lanes = sizes.rows[-1]

    def ring(with_finals: bool) -> Call:
        return lambda: filled_ring(num_lanes, sizes, device, with_finals)

    makers: dict[str, Call] = {
        "DictBuffer": ring(False),
        "DictBuffer, final observations": ring(True),
        "pairs by hand": lambda: filled_pairs(num_lanes, sizes, device),
        "torchrl": lambda: filled_torchrl(num_lanes, sizes, device),
    }
    for name, make in makers.items():
        before = allocated_bytes(device)
        try:
            store: Any = make()
        except peers.PeerMissing as missing:
            yield {"case": name, "rows": num_lanes, "skipped": str(missing)}
            continue
        torch.cuda.synchronize() if device.type == "cuda" else None
        num_bytes = (
            allocated_bytes(device) - before
            if device.type == "cuda"
            else getattr(store, "num_bytes", None)
        )
        del store
        yield {
            "case": name,
            "rows": num_lanes,
            "bytes": num_bytes and round(num_bytes / num_lanes / sizes.slots, 2),
        }
    for transition in TRANSITIONS:
        actual = {name: round(num_bytes, 2) for name, num_bytes in transition.bytes(device).items()}
        yield {"case": f"bytes of {transition}", **actual}


@dataclass(frozen=True)
class TransitionSizes:
    """Sizes of one transition. Without observations of the critic, `critic` is 0."""

    observation: int
    critic: int
    action: int

    def __str__(self) -> str:
        return f"{self.observation} / {self.critic} / {self.action}"

    def bytes(self, device: torch.device | str) -> dict[str, float]:
        """Return the bytes per transition of our ring, and of rings that store observations twice."""
        num_words = 2 * (self.observation + self.critic) + self.action + 1
        return {
            "ours": self._bytes_of_ours(device),
            # `dones` and `truncations` are int64.
            "FastTD3's fields": 4.0 * num_words + 2 * 8,
            # `done`, `terminated` and `truncated` are bool.
            "torchrl's fields": 4.0 * num_words + 3,
        }

    def _bytes_of_ours(self, device: torch.device | str) -> float:
        num_envs = 64
        num_slots = 512
        ring = SimpleReplayBuffer(
            num_envs,
            num_slots,
            self.observation,
            self.action,
            self.critic,
            asymmetric_obs=self.critic > 0,
            device=device,
        )
        columns = {"observations": torch.zeros(num_envs, self.observation, device=device)}
        if self.critic:
            columns["critic_observations"] = torch.zeros(num_envs, self.critic, device=device)
        flags = torch.zeros(num_envs, device=device)
        ends = {"rewards": flags, "dones": flags, "truncations": flags}
        action = torch.zeros(num_envs, self.action, device=device)
        for _ in range(2):  # The first step waits for the second.
            ring.extend({**columns, "actions": action, "next": {**columns, **ends}})
        return ring.num_bytes / num_envs / num_slots


#: Transitions of the table in `storage/GPU.md`.
TRANSITIONS = (
    TransitionSizes(48, 0, 12),
    TransitionSizes(48, 235, 12),
    TransitionSizes(256, 0, 19),
    TransitionSizes(6, 0, 2),
)


def allocated_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


# -- alignment ---------------------------------------------------------------------------------

_FLAGS = (Field("terminated", (1,), "bool"), Field("truncated", (1,), "bool"))
_SCALARS = (Field("reward", (1,)), *_FLAGS)
#: Common sets of fields of one transition or one step of a rollout.
FIELD_SETS: dict[str, tuple[Field, ...]] = {
    "6 observations, 2 actions": (Field("observation", (6,)), Field("action", (2,)), *_SCALARS),
    "17 observations, 6 actions": (Field("observation", (17,)), Field("action", (6,)), *_SCALARS),
    "48 observations, 12 actions": (Field("observation", (48,)), Field("action", (12,)), *_SCALARS),
    "48 and 235 observations, 12 actions": (
        Field("observation", (48,)), Field("privileged", (235,)), Field("action", (12,)), *_SCALARS,
    ),
    "256 observations, 19 actions": (Field("observation", (256,)), Field("action", (19,)), *_SCALARS),
    "348 observations, 17 actions": (Field("observation", (348,)), Field("action", (17,)), *_SCALARS),
    "rollout, 48 observations, 12 actions": (
        Field("obs", (48,)), Field("actions", (12,)), Field("values", (1,)), Field("advantages", (1,)),
        Field("returns", (1,)), Field("log_prob", (1,)), Field("mu", (12,)), Field("sigma", (12,)),
    ),
}  # fmt: skip
_ALIGNMENT = 16


def aligned_bytes(fields: tuple[Field, ...], aligns_all: bool) -> int:
    """Return the size of a row in which fields start at multiples of 16 bytes: all fields, or
    fields of 16 bytes and more.
    """
    start = 0
    for field in sorted(fields, key=lambda field: -field.row_bytes):
        step = (
            _ALIGNMENT
            if aligns_all or field.row_bytes >= _ALIGNMENT
            else field.numpy_dtype.itemsize
        )
        start = -(-start // step) * step + field.row_bytes
    return -(-start // _ALIGNMENT) * _ALIGNMENT


def alignment_bytes() -> Iterator[dict[str, Any]]:
    """Yield the memory that aligned fields cost."""
    for name, fields in FIELD_SETS.items():
        today = sum(group.row_bytes for group in lay_out(Schema(fields)))
        wide, every = (aligned_bytes(fields, aligns_all) for aligns_all in (False, True))
        yield {
            "case": f"bytes, {name}",
            "packed": today,
            "aligned_16_bytes_or_more": wide,
            "aligned_all": every,
            "cost_percent": round(100 * (wide / today - 1), 2),
            "cost_all_percent": round(100 * (every / today - 1), 2),
        }


def alignment_steps(sizes: Sizes, measured: Device, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield a compiled learner step on batches of packed rows, for each alignment of rows and
    fields.
    """
    num_rows = 65_536 if measured.is_cuda else 256
    width = sizes.observation
    weight = torch.nn.Linear(width, 64, device=measured.device)
    mean = torch.zeros(width, device=measured.device)
    even = -(-width // 4) * 4 + 12  # words of a row whose size is a multiple of 16 bytes
    forms = {  # words of a row, and where the observation starts in it
        "contiguous": (width, 0),
        "rows at multiples of 4 bytes": (even + 1, 0),
        "rows at multiples of 8 bytes": (even + 2, 0),
        "rows at multiples of 16 bytes": (even, 0),
        "rows at multiples of 16 bytes, field at 4": (even, 1),
    }
    for name, (num_words, start) in forms.items():
        rows = torch.randn(num_rows, num_words, device=measured.device)
        batch = rows[:, start : start + width]

        def normalize(x: torch.Tensor) -> torch.Tensor:
            return ((x - mean) * 0.5).clamp(-5, 5)

        def learn(x: torch.Tensor) -> torch.Tensor:
            return torch.relu(weight((x - mean) * 0.5)).sum(-1)

        for kind, function in (("elementwise", normalize), ("Linear", learn)):
            try:
                facts = compiled_facts(function, batch, measured, seconds)
            except Exception as error:  # noqa: BLE001 - one failure must not end the others
                facts = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            yield {"case": f"{kind}, {name}", **facts}


def compiled_facts(
    function: Callable[[torch.Tensor], torch.Tensor],
    batch: torch.Tensor,
    measured: Device,
    seconds: float,
) -> dict[str, Any]:
    """Compile a function with Inductor, and describe how its code loads the batch."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    config.compile_threads = 1  # other processes would use their own folder for the code
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        caches = {
            name: os.path.join(folder, name)
            for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
        }
        before = {name: os.environ.get(name) for name in caches}
        os.environ.update(caches)
        try:
            compiled = torch.compile(function, fullgraph=True)
            _, codes = run_and_get_code(compiled, batch)
            facts = measured.measure(lambda: compiled(batch), seconds)
            code = "\n".join(codes)
            texts = [
                Path(path).read_text() for path in glob.glob(f"{folder}/**/*.ptx", recursive=True)
            ]
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
    facts |= {
        f"ptx_loads_{suffix}": sum(text.count(f".{suffix}.") for text in texts)
        for suffix in ("v2", "v4")
    }
    facts["divisibility"] = [
        line.strip()[:400] for line in code.splitlines() if "tt.divisibility" in line
    ][:2]
    facts["cpu_vector_loads"] = code.count("Vectorized<float>::loadu")
    return facts


# -- the command -------------------------------------------------------------------------------


class Lines:
    """Print lines of JSON, and append them to a file."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._start = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def write(self, section: str, **facts: Any) -> None:
        line = json.dumps(
            {"section": section, **facts, "at_s": round(self.elapsed_s, 1)}, default=str
        )
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        if self._path is not None:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(line + "\n")


def measure_case(
    lines: Lines, section: str, case: Case, num_rows: int, measured: Device, seconds: float
) -> None:
    limit: dict[str, Any] = {}
    key = "device_us" if measured.is_cuda else "us"
    for contender in case.contenders:
        about = {"case": case.name, "rows": num_rows, "who": contender.name, "role": contender.role}
        try:
            facts = measured.measure(contender.prepare(), seconds)
        except peers.PeerMissing as missing:
            lines.write(section, **about, skipped=str(missing))
            continue
        except Exception as error:  # noqa: BLE001 - one failure must not end the others
            lines.write(section, **about, error=f"{type(error).__name__}: {str(error)[:300]}")
            continue
        if contender.role == LIMIT:
            limit = facts
        elif facts[key] is not None and limit.get(key):
            facts["of_limit"] = round(facts[key] / limit[key], 2)
        lines.write(section, **about, **facts)


def write_each(
    lines: Lines, section: str, results: Iterator[dict[str, Any]], limit_s: float
) -> None:
    """Write the lines of a section up to its first failure."""
    try:
        for facts in results:
            lines.write(section, **facts)
            if lines.elapsed_s > limit_s:
                return
    except Exception as error:  # noqa: BLE001 - one failure must not end the others
        lines.write(section, error=f"{type(error).__name__}: {str(error)[:300]}")


def main(arguments: list[str] | None = None) -> int:
    """Measure all sections, the most important ones first."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--small", action="store_true", help="tiny sizes: to see that everything runs"
    )
    parser.add_argument("--out", help="file to which the lines are appended as well")
    parser.add_argument(
        "--limit-s", type=float, default=200, help="start nothing after this many seconds"
    )
    parser.add_argument("--only", default="", help="sections, comma-separated")
    options = parser.parse_args(arguments)
    sizes = SMALL if options.small else FULL
    seconds = 0.02 if options.small else 0.25
    wanted = [name for name in options.only.split(",") if name]
    lines = Lines(options.out)
    measured = Device(options.device)
    lines.write("about", **measured.describe())
    for section, make_cases in SECTIONS.items():
        if wanted and section not in wanted:
            continue
        for num_rows in reversed(sizes.rows):
            for case in make_cases(num_rows, sizes, measured.device):
                if lines.elapsed_s < options.limit_s:
                    measure_case(lines, section, case, num_rows, measured, seconds)
    if not wanted or "memory" in wanted:
        write_each(lines, "memory", memory_lines(sizes, measured.device), options.limit_s)
    if not wanted or "alignment" in wanted:
        write_each(lines, "alignment", alignment_bytes(), options.limit_s)
        if lines.elapsed_s < options.limit_s:
            write_each(
                lines, "alignment", alignment_steps(sizes, measured, seconds), options.limit_s
            )
    lines.write("end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
