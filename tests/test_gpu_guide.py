"""The tables of the guide for GPUs are those that the code counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.device import TRANSITIONS, TransitionSizes
from storage import RolloutStorage
from storage.adapters.fast_td3 import SimpleReplayBuffer
from tests.pretend_cuda import PretendCuda
from tests.test_device_calls import CALLS, NUM_STEPS

pytestmark = pytest.mark.gpu

GUIDE = (Path(__file__).parents[1] / "storage" / "GPU.md").read_text(encoding="utf-8")


def rows_of(header: str) -> dict[str, list[str]]:
    """Return the rows of the table with a header: first cell -> the other cells."""
    found = {}
    table = GUIDE.partition(f"\n| {header} |")[2].partition("\n\n")[0]
    for line in table.splitlines()[2:]:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        found[name] = cells
    return found


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
    found = [round(num_bytes) for num_bytes in sizes.bytes("cuda").values()]
    assert found == [int(cell) for cell in BYTES[str(sizes)]]
    ours, of_pairs, _ = found
    assert ours <= 0.6 * of_pairs


def test_every_row_of_bytes_is_counted() -> None:
    assert set(BYTES) == set(map(str, TRANSITIONS))
