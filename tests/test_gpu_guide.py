"""The launches, bytes and waits in the guide for GPUs equal those that the tests count."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.device import TRANSITIONS, TransitionSizes
from rollout_data import RolloutWriter, record_demonstrations
from storage import (
    AdvancedReplayBuffer,
    BufferMonitor,
    DictBuffer,
    EpisodeReplayBuffer,
    NaiveReplayBuffer,
    PrioritizedWindows,
    RolloutStorage,
    SarsaRolloutStorage,
    TrajectoryDictBufferMultiDim,
    generalized_advantage,
    load_store,
)
from storage.adapters.fast_td3 import SimpleReplayBuffer
from tests.files.simulator_fakes import IsaacLab, on_a_gpu
from tests.pretend_cuda import PretendCuda
from tests.test_device_calls import (
    CALLS,
    NUM_ENVS,
    NUM_STEPS,
    full_storage,
    ring_of_steps,
    steps_of_a_ring,
    transitions,
)

pytestmark = pytest.mark.gpu

GUIDE = (Path(__file__).parents[1] / "storage" / "GPU.md").read_text(encoding="utf-8")


def rows_of(header: str) -> dict[str, list[str]]:
    """Return the rows of the table with a header: first cell -> the other cells."""
    result = {}
    table = GUIDE.partition(f"\n| {header} |")[2].partition("\n\n")[0]
    for line in table.splitlines()[2:]:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        result[name] = cells
    return result


LAUNCHES = rows_of("call | launches")
BYTES = rows_of("sizes | ours | FastTD3's fields | torchrl's fields")


def extending_pairs() -> Callable[[], Any]:
    buffer = SimpleReplayBuffer(4, 20, 3, 2, 3, n_steps=3, device="cuda", generator=0)
    observations = torch.ones(4, 3, device="cuda")
    flags = torch.zeros(4, device="cuda")
    ends = {"rewards": flags, "dones": flags, "truncations": flags}
    step = {
        "observations": observations,
        "actions": torch.ones(4, 2, device="cuda"),
        "next": {"observations": observations, **ends},
    }
    return lambda: buffer.extend(step)


def computing_returns(num_envs: int) -> Callable[[], Any]:
    storage = RolloutStorage(num_envs, 24, (3,), None, (2,), device="cuda", generator=0)
    step = RolloutStorage.Transition()
    sizes = {"observations": 3, "actions": 2, "action_mean": 2, "action_sigma": 2}
    for name in ("rewards", "values", "actions_log_prob", "dones"):
        sizes[name] = 1
    for name, size in sizes.items():
        setattr(step, name, torch.zeros(num_envs, size, device="cuda"))
    for _ in range(24):
        storage.add_transitions(step)
    last_values = torch.ones(num_envs, 1, device="cuda")
    return lambda: storage.compute_returns(last_values, 0.9, 0.8)


#: Row of the guide -> function that prepares the call, and how often the call does it.
COUNTED: dict[str, tuple[Callable[[], Callable[[], Any]], int]] = {
    "`RolloutStorage.add_transitions`, one step": (
        CALLS["RolloutStorage.add_transitions"],
        NUM_STEPS,
    ),
    "`RolloutStorage.compute_returns`, 24 steps": (lambda: computing_returns(5), 1),
    "`RolloutStorage.mini_batch_generator`, 2 x 2 mini-batches": (
        CALLS["RolloutStorage.mini_batch_generator(a seed)"],
        1,
    ),
    "`DictBuffer.extend` without `end_key`": (CALLS["DictBuffer.extend"], 1),
    "`DictBuffer.extend` with `end_key`": (CALLS["DictBuffer.extend(end_key)"], 1),
    "`DictBuffer.extend` with final observations": (CALLS["DictBuffer.extend(final=)"], 1),
    "`DictBuffer.sample`": (CALLS["DictBuffer.sample(envs)"], 1),
    "`sample_transitions`": (CALLS["DictBuffer.sample_transitions({})"], 1),
    "`sample_transitions`, 3 steps, with final observations": (
        CALLS["DictBuffer.sample_transitions({'num_steps': 3}), final observations"],
        1,
    ),
    "`AdvancedReplayBuffer.sample_tensors` and `update_priorities`": (
        CALLS["AdvancedReplayBuffer.sample and update"],
        1,
    ),
    "`SimpleReplayBuffer.extend` of `storage.adapters.fast_td3`": (extending_pairs, 1),
}


def test_every_row_of_launches_is_counted() -> None:
    assert set(LAUNCHES) == set(COUNTED)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="launches are counted on the pretended device"
)
@pytest.mark.parametrize("name", COUNTED)
def test_a_call_needs_no_more_launches_than_the_guide_says(name: str) -> None:
    prepare, num_calls = COUNTED[name]
    call = prepare()
    for _ in range(3):
        call()
    device = PretendCuda.active()
    device.reset()
    call()
    counts = device.reset()
    assert counts.num_waits == 0
    assert counts.num_launches / num_calls <= int(LAUNCHES[name][0])


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="launches are counted on the pretended device"
)
def test_more_environments_need_no_more_launches() -> None:
    device = PretendCuda.active()
    counts = []
    for num_envs in (5, 64):
        call = computing_returns(num_envs)
        call()
        device.reset()
        call()
        counts.append(device.reset().num_launches)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("sizes", TRANSITIONS, ids=str)
def test_the_bytes_of_a_transition_are_those_of_the_guide(sizes: TransitionSizes) -> None:
    actual = [round(num_bytes) for num_bytes in sizes.bytes("cuda").values()]
    assert actual == [int(cell) for cell in BYTES[str(sizes)]]
    ours, of_pairs, _ = actual
    assert ours <= 0.6 * of_pairs


def test_every_row_of_bytes_is_counted() -> None:
    assert set(BYTES) == set(map(str, TRANSITIONS))


Call = Callable[[], Any]


def ring_of_windows() -> TrajectoryDictBufferMultiDim:
    ring = TrajectoryDictBufferMultiDim(30, "cuda", n_dim=2, seq_length=3, generator=0)
    steps = {name: leaf.view(3, 2, -1) for name, leaf in steps_of_a_ring().items()}
    for _ in range(9):
        ring.extend(steps)
    return ring


def first_draws(tmp_path: Path) -> list[Call]:
    ring = ring_of_steps(has_finals=False)
    return [
        lambda: ring.sample_transitions(16),
        lambda: ring.sample_transitions(16, num_steps=2),
        partial(ring_of_windows().sample, 6),
    ]


def draws_of_rare_rows(tmp_path: Path) -> list[Call]:
    """Return draws after the first draw, of a ring with one valid row in 100."""
    ring = DictBuffer(6000, "cuda", end_key="done", generator=0)
    ends = (torch.arange(6000, device="cuda") % 100 > 0).unsqueeze(1)
    ring.extend({"observation": torch.ones(6000, 3, device="cuda"), "done": ends})
    ring.sample_transitions(1024)
    return [lambda: ring.sample_transitions(1024)] * 3


def filled_by_priority(**options: Any) -> AdvancedReplayBuffer:
    buffer = AdvancedReplayBuffer(40, device="cuda", generator=0, **options)
    buffer.extend_tensors({"x": torch.ones(30, 3, device="cuda")})
    return buffer


def windows_by_priority() -> PrioritizedWindows:
    windows = PrioritizedWindows(30, 3, device="cuda", generator=0)
    steps = torch.ones(9, 2, 1, device="cuda")
    windows.extend({"x": steps, "done": torch.zeros_like(steps)})
    return windows


def first_draws_by_priority(tmp_path: Path) -> list[Call]:
    cleared = filled_by_priority()
    cleared.sample_tensors(8)
    cleared.clear()
    cleared.extend_tensors({"x": torch.ones(30, 3, device="cuda")})
    buffers = [filled_by_priority(), cleared]
    draws: list[Call] = [partial(buffer.sample_tensors, 8) for buffer in buffers]
    return [*draws, partial(windows_by_priority().sample, 8)]


def first_windows(tmp_path: Path) -> list[Call]:
    windows = PrioritizedWindows(30, 3, device="cuda", generator=0)
    steps = torch.ones(9, 2, 1, device="cuda")
    return [lambda: windows.extend({"x": steps, "done": torch.zeros_like(steps)})]


def large_calls(tmp_path: Path) -> list[Call]:
    ring = DictBuffer(640, "cuda", end_key="done", generator=0)
    ends = torch.ones(200, 1, device="cuda")
    ring.extend({"x": ends[:1], "done": ends[:1]}, final={"x": ends[:1]})
    windows = TrajectoryDictBufferMultiDim(
        320, "cuda", n_dim=2, seq_length=3, start_mode="trajectory", generator=0
    )
    steps = {
        "x": torch.ones(200, 2, 1, device="cuda"),
        "done": torch.ones(200, 2, 1, device="cuda"),
    }
    windows.extend({name: leaf[:1] for name, leaf in steps.items()})
    return [
        lambda: ring.extend({"x": ends, "done": ends}, final={"x": ends}),
        partial(windows.extend, steps),
    ]


def recurrent_batches(tmp_path: Path) -> list[Call]:
    storage = full_storage("cuda")
    storage.compute_returns(torch.ones(NUM_ENVS, 1, device="cuda"), 0.9, 0.8)
    return [lambda: list(storage.recurrent_mini_batch_generator(2, 2))]


def steps_on_the_host(tmp_path: Path) -> list[Call]:
    PretendCuda.active().lateness = 1 << 40
    steps = transitions("cpu")
    storage = full_storage("cuda")

    def add_steps() -> None:
        storage.clear()
        for step in steps:
            storage.add_transitions(step)
        assert storage.num_buffer_waits > 0

    return [add_steps]


def step_of_a_simulator() -> dict[str, torch.Tensor]:
    shapes = {"observation": (NUM_ENVS, 3), "action": (NUM_ENVS, 2), "reward": (NUM_ENVS,)}
    step = {name: torch.ones(shape, device="cuda") for name, shape in shapes.items()}
    return {**step, "done": torch.zeros(NUM_ENVS, dtype=torch.bool, device="cuda")}


def before_closing(writer: RolloutWriter, call: Call) -> Call:
    """Return a function that makes a call, checks that it has waited, and closes the writer."""

    def call_and_close() -> None:
        call()
        assert PretendCuda.active().counts.num_waits > 0
        writer.close()

    return call_and_close


def steps_of_a_simulator(tmp_path: Path) -> list[Call]:
    PretendCuda.active().lateness = 1 << 40
    writer = RolloutWriter(tmp_path, NUM_ENVS, durable=False)

    def add_steps() -> None:
        for _ in range(4):
            writer.add(**step_of_a_simulator())
        assert writer.num_waits == 1

    return [before_closing(writer, add_steps)]


def rollouts_on_the_device(tmp_path: Path) -> list[Call]:
    writer = RolloutWriter(tmp_path, NUM_ENVS, durable=False)
    rollout = {name: leaf.unsqueeze(0) for name, leaf in step_of_a_simulator().items()}
    return [before_closing(writer, lambda: writer.add_rollout(**rollout))]


def demonstrations(tmp_path: Path) -> list[Call]:
    device = PretendCuda.active()
    device.lateness = 1 << 40
    env = on_a_gpu(lambda: IsaacLab("torch"))

    def record() -> None:
        num_waits = []

        def policy(observation: Any) -> torch.Tensor:
            num_waits.append(device.counts.num_waits)
            return observation["policy"][:, 1:]

        record_demonstrations(env, policy, tmp_path, min_timesteps=60, show_progress=False)
        assert num_waits == list(range(20))  # three environments

    return [record]


def pending_steps(tmp_path: Path) -> list[Call]:
    PretendCuda.active().lateness = 1 << 40
    writers = [RolloutWriter(tmp_path / name, NUM_ENVS, durable=False) for name in "abc"]
    for writer in writers:
        writer.add(**step_of_a_simulator())
        writer.add(**step_of_a_simulator())
    calls: list[Call] = [writers[0].flush, writers[1].close, lambda: writers[2].num_frames]
    return [before_closing(writer, call) for writer, call in zip(writers, calls, strict=True)]


def transitions_with_a_new_discount(tmp_path: Path) -> list[Call]:
    ring = ring_of_steps(has_finals=False)
    gamma = torch.tensor([0.9], device="cuda")
    ring.sample_transitions(16, num_steps=2, gamma=gamma)
    return [lambda: ring.sample_transitions(16, num_steps=2, gamma=gamma)]


def advantages(tmp_path: Path) -> list[Call]:
    values = torch.zeros(4, 3, 1, device="cuda")
    dones = torch.zeros_like(values, dtype=torch.bool)
    gamma = torch.tensor([0.9], device="cuda")
    return [lambda: generalized_advantage(values, values, values, dones, gamma, 0.8)]


def validated_steps(tmp_path: Path) -> list[Call]:
    storage = SarsaRolloutStorage(
        NUM_ENVS, NUM_STEPS, (3,), None, (2,), device="cuda", validate=True, generator=0
    )
    steps = transitions("cuda")
    for step in steps:
        step.next_observations = step.observations
        step.dones = torch.ones_like(step.dones)
    storage.add_transitions(steps[0])
    return [lambda: storage.add_transitions(steps[1])]


def samples_on_the_host(tmp_path: Path) -> list[Call]:
    buffer = DictBuffer(30, "cuda", output_device="cpu", generator=0)
    buffer.extend({"x": torch.ones(9, 3, device="cuda")})
    buffer.sample(4)
    return [partial(buffer.sample, 4)]


def calls_with_items(tmp_path: Path) -> list[Call]:
    buffer = AdvancedReplayBuffer(40, device="cuda", generator=0)
    naive = NaiveReplayBuffer(40, device="cuda", generator=0)
    item = {"x": torch.ones(3, device="cuda"), "name": "walk"}
    for items in (buffer, naive):
        items.push([item] * 4)
        items.sample(4)
    calls: list[Call] = []
    for items in (buffer, naive):
        calls += [partial(items.push, item), partial(items.sample, 4)]
    return calls


def windows_of_episodes(tmp_path: Path) -> list[Call]:
    episodes = EpisodeReplayBuffer(4, device="cuda", generator=0)
    episodes.push({"x": torch.ones(9, 3, device="cuda")})
    episodes.sample_windows(2, 3)
    return [partial(episodes.sample_windows, 2, 3)]


def limited_draws(tmp_path: Path) -> list[Call]:
    used = filled_by_priority(max_use=2)
    stale = filled_by_priority(max_staleness=3)
    for buffer in (used, stale):
        buffer.sample_tensors(8)
    return [partial(used.sample_tensors, 30), partial(stale.sample_tensors, 8, 2)]


def monitored_calls(tmp_path: Path) -> list[Call]:
    buffer = filled_by_priority(monitor=BufferMonitor())
    buffer.sample_tensors(8)
    rows = {"x": torch.ones(2, 3, device="cuda")}
    return [partial(buffer.extend_tensors, rows), partial(buffer.sample_tensors, 8)]


def saves_and_loads(tmp_path: Path) -> list[Call]:
    buffer = filled_by_priority()
    buffer.save(tmp_path / "saved")
    return [
        partial(buffer.save, tmp_path / "again"),
        partial(load_store, tmp_path / "saved", "cuda"),
    ]


def python_numbers(tmp_path: Path) -> list[Call]:
    buffer = filled_by_priority()
    num_updated = buffer.update_priorities(
        buffer.sample_tensors(8)[2], torch.ones(8, device="cuda")
    )
    windows = windows_by_priority()
    ring = ring_of_steps(has_finals=True)
    return [
        lambda: int(num_updated),
        lambda: buffer.max_priority,
        lambda: buffer.num_dead_updates,
        lambda: ring.num_lost_finals,
        lambda: len(windows),
    ]


#: Row of the table of waits -> functions that prepare calls, each of which waits.
WAITING: dict[str, list[Callable[[Path], list[Call]]]] = {
    "draws of transitions and windows": [first_draws, draws_of_rare_rows],
    "draws by priority": [first_draws_by_priority],
    "`PrioritizedWindows.extend`": [first_windows],
    '`extend` with final observations, or with `start_mode="trajectory"`': [large_calls],
    "`recurrent_mini_batch_generator`": [recurrent_batches],
    "`add_transitions` of tensors on the host": [steps_on_the_host],
    "`RolloutWriter.add`": [steps_of_a_simulator],
    "`RolloutWriter.add_rollout`": [rollouts_on_the_device],
    "`record_demonstrations`": [demonstrations],
    "`flush`, `close` and the counters of a writer": [pending_steps],
    "`sample_transitions`": [transitions_with_a_new_discount],
    "`generalized_advantage` and similar functions": [advantages],
    "`SarsaRolloutStorage(validate=True)`": [validated_steps],
    'samples with `output_device="cpu"`': [samples_on_the_host],
    "`push` and `sample` of items": [calls_with_items],
    "`EpisodeReplayBuffer.sample_windows`": [windows_of_episodes],
    "`max_use` and `max_staleness`": [limited_draws],
    "buffers with a `monitor`": [monitored_calls],
    "saving and loading": [saves_and_loads],
    "Python numbers that only the device knows": [python_numbers],
}


def test_every_row_of_waits_is_counted() -> None:
    assert set(rows_of("call | it waits")) == set(WAITING)


@pytest.mark.skipif(torch.cuda.is_available(), reason="waits are counted on the pretended device")
@pytest.mark.parametrize(
    "prepare", [prepare for row in WAITING.values() for prepare in row], ids=lambda x: x.__name__
)
def test_the_calls_in_the_table_of_waits_wait(
    prepare: Callable[[Path], list[Call]], tmp_path: Path
) -> None:
    device = PretendCuda.active()
    for number, call in enumerate(prepare(tmp_path)):
        device.reset()
        call()
        assert device.reset().num_waits > 0, number
