"""Rollout storages on a GPU: host tensors, returns and mini-batches are right although no call
waits.

On the pretended device events complete late, so that a test fails if host memory is read or written
too early.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from storage import QueueRolloutStorage, RolloutStorage, SarsaRolloutStorage
from storage.errors import FieldTypeError, UsageError
from tests.pretend_cuda import PretendCuda
from tests.storage.rollouts import columns_of, make_storage, make_transition

pytestmark = pytest.mark.gpu

KINDS = (RolloutStorage, QueueRolloutStorage, SarsaRolloutStorage)
NUM_ENVS, NUM_STEPS = 5, 6


@pytest.fixture(autouse=True)
def late_device(cuda_device: PretendCuda | None) -> PretendCuda | None:
    """The pretended device, on which events complete after 40 operations; None on a real one."""
    if cuda_device is not None:
        cuda_device.lateness = 40
    return cuda_device


def transition(step: int, kind: type = RolloutStorage) -> Any:
    made = make_transition(step, NUM_ENVS, done=torch.arange(NUM_ENVS) % 3 == step % 3)
    if step % 2:
        made.time_outs = made.dones & (torch.arange(NUM_ENVS) % 2 == 0)
    made.rewards = made.rewards.double()
    made.values = made.values.squeeze(1)
    made.hidden_states = torch.full((2, NUM_ENVS, 3), float(step))
    if kind is SarsaRolloutStorage:
        later = make_transition(step + 1, NUM_ENVS)
        made.next_observations = later.observations
        made.next_critic_observations = later.critic_observations
    return made


def tensors_of(made: Any) -> list[torch.Tensor]:
    return [value for value in vars(made).values() if isinstance(value, torch.Tensor)]


def filled(
    device: str, kind: type = RolloutStorage, is_on_device: bool = False, changes: bool = False
) -> Any:
    storage = make_storage(NUM_ENVS, NUM_STEPS, kind, device=device)
    for step in range(NUM_STEPS):
        made = transition(step, kind)
        if is_on_device:
            made.observations = made.observations.to(device)
            made.dones = made.dones.to(device)
        storage.add_transitions(made)
        if changes:
            for tensor in tensors_of(made):
                tensor.fill_(1)
    return storage


def assert_same_columns(mine: Any, other: Any) -> None:
    expected = columns_of(other)
    actual = columns_of(mine)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        if torch.cuda.is_available() and value.is_floating_point():
            # A real device rounds sums by itself
            torch.testing.assert_close(actual[name].cpu(), value)
        else:
            assert torch.equal(actual[name].cpu(), value), name


@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_on_device", [False, True])
def test_host_tensors_may_change_after_they_were_added(kind: type, is_on_device: bool) -> None:
    mine = filled("cuda", kind, is_on_device, changes=True)
    torch.cuda.synchronize()
    assert_same_columns(mine, filled("cpu", kind))


def test_a_step_of_host_tensors_is_one_copy_and_no_wait(late_device: PretendCuda | None) -> None:
    storage = filled("cuda")
    if late_device is None:
        pytest.skip("copies are counted on the pretended device")
    storage.clear()
    torch.cuda.synchronize()
    late_device.reset()
    storage.add_transitions(transition(0))
    counts = late_device.reset()
    assert counts.launches["copy_"] == 1
    assert counts.num_waits == counts.pageable_copies.total() == 0


def test_waits_for_busy_pinned_buffers_are_counted(late_device: PretendCuda | None) -> None:
    storage = filled("cuda")
    if late_device is not None:
        late_device.lateness = 10_000
    for _ in range(4):
        storage.clear()
        for step in range(NUM_STEPS):
            storage.add_transitions(transition(step))
    assert late_device is None or storage.num_buffer_waits > 0
    torch.cuda.synchronize()
    assert_same_columns(storage, filled("cpu"))


def test_storages_on_the_cpu_use_no_pinned_buffers() -> None:
    assert filled("cpu").num_buffer_waits == 0


# Returns.


def returns_of(
    device: str, gamma: Any, lam: Any, truncation: str = "cut", num_rewards: int = 1
) -> torch.Tensor:
    storage = make_storage(NUM_ENVS, NUM_STEPS, num_rewards=num_rewards, device=device)
    for step in range(NUM_STEPS):
        made = transition(step)
        made.rewards = made.values = (
            torch.linspace(-1, 1, NUM_ENVS * num_rewards).view(NUM_ENVS, -1) * step
        )
        made.bootstrap_values = torch.full((NUM_ENVS, num_rewards), 3.0 + step)
        storage.add_transitions(made)
    storage.compute_returns(torch.ones(NUM_ENVS, num_rewards), gamma, lam, truncation=truncation)
    return torch.cat([storage.returns, storage.advantages]).cpu()


@pytest.mark.each_value
@pytest.mark.parametrize("truncation", ["cut", "value", "final"])
@pytest.mark.parametrize("num_rewards", [1, 2])
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_returns_with_factors_as_tensors_equal_those_of_the_cpu(
    truncation: str, num_rewards: int, where: str
) -> None:
    gamma = torch.linspace(0.9, 0.8, num_rewards)
    lam = torch.tensor(0.7, dtype=torch.float64)
    expected = returns_of("cpu", gamma, lam, truncation, num_rewards)
    actual = returns_of("cuda", gamma.to(where), lam.to(where), truncation, num_rewards)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def compute(storage: Any, gamma: Any = 0.9, **options: Any) -> None:
    storage.compute_returns(torch.ones(NUM_ENVS, 1, device="cuda"), gamma, 0.8, **options)


@pytest.mark.parametrize("value", [1.5, -0.1, torch.nan])
def test_a_factor_on_the_device_that_is_out_of_range_raises_at_a_later_call(value: float) -> None:
    storage = filled("cuda")
    compute(storage, torch.tensor([value], device="cuda"))
    torch.cuda.synchronize()
    with pytest.raises(UsageError, match=r"gamma was outside \[0, 1\] in an earlier call"):
        storage.mini_batch_generator(2)
    compute(storage)
    torch.cuda.synchronize()
    compute(storage)  # the error is raised once


def test_a_factor_on_the_device_that_is_out_of_range_is_used() -> None:
    storage = filled("cuda")
    returns = []
    for gamma in (1.0, 1.5):
        compute(storage, torch.tensor([gamma], device="cuda"), normalize=None)
        returns.append(storage.returns.cpu())
    is_open = storage.dones[-1].cpu().flatten() == 0
    # The value after the last step is 1, so its return grows by the difference of the discounts.
    torch.testing.assert_close(
        (returns[1] - returns[0])[-1, is_open].flatten(), torch.full((int(is_open.sum()),), 0.5)
    )
    assert is_open.any()


def test_a_factor_that_is_out_of_range_raises_after_each_call() -> None:
    storage = filled("cuda")
    gamma = torch.tensor([1.5], device="cuda")
    for _ in range(3):
        compute(storage, gamma)
        with pytest.raises(UsageError, match="gamma was outside"):
            storage.raise_deferred(wait=True)


def test_a_factor_on_the_device_is_checked_again_after_it_changed(
    late_device: PretendCuda | None,
) -> None:
    storage = filled("cuda")
    gamma = torch.tensor([0.5], device="cuda")
    for _ in range(3):
        compute(storage, gamma)
    gamma.fill_(2)
    compute(storage, gamma)
    torch.cuda.synchronize()
    with pytest.raises(UsageError, match="gamma"):
        compute(storage, gamma)


def test_factors_that_did_not_change_are_not_checked_again(late_device: PretendCuda | None) -> None:
    if late_device is None:
        pytest.skip("launches are counted on the pretended device")
    storage = filled("cuda")
    gamma = torch.tensor([0.5], device="cuda")
    launches = []
    for _ in range(2):
        late_device.reset()
        compute(storage, gamma)
        launches.append(late_device.reset().num_launches)
        torch.cuda.synchronize()
    assert launches[1] < launches[0]


def test_missing_bootstrap_values_raise_at_a_later_call_and_add_nothing() -> None:
    storage = filled("cuda")
    assert storage.bootstrap_values is None
    compute(storage, truncation="final")
    actual = storage.returns.cpu()
    torch.cuda.synchronize()
    with pytest.raises(UsageError, match=r"bootstrap_values.*earlier call"):
        storage.add_transitions(transition(0))
    compute(storage, truncation="cut")
    assert torch.equal(actual, storage.returns.cpu())


def test_numbers_on_the_device_that_are_out_of_range_raise_at_a_later_call() -> None:
    storage = make_storage(NUM_ENVS, NUM_STEPS, device="cuda")
    made = transition(0)
    made.rewards = torch.full((NUM_ENVS, 1), 1e300, dtype=torch.float64, device="cuda")
    made.rewards[0] = 4
    storage.add_transitions(made)
    torch.cuda.synchronize()
    with pytest.raises(
        FieldTypeError, match=r"in an earlier call, which were stored as 0. Their count is 4"
    ):
        storage.add_transitions(transition(1))
    assert storage.step == 1
    assert storage.rewards[0].flatten().tolist() == [4, 0, 0, 0, 0]
    storage.add_transitions(transition(1))


def test_saving_raises_the_errors_that_no_other_call_has_raised(
    tmp_path: Path, late_device: PretendCuda | None
) -> None:
    storage = make_storage(NUM_ENVS, NUM_STEPS, device="cuda")
    made = transition(0)
    made.rewards = torch.full((NUM_ENVS, 1), 1e300, dtype=torch.float64, device="cuda")
    storage.add_transitions(made)
    storage.clear()
    with pytest.raises(FieldTypeError, match=r"count is 5\. The save is complete\."):
        storage.save(tmp_path / "storage")
    assert RolloutStorage.load(tmp_path / "storage").step == 0
    storage.save(tmp_path / "storage")


#: Launches of one `compute_returns` before it was changed for GPUs, by truncation.
MOST_LAUNCHES = {"cut": 38, "value": 45, "final": 52}


@pytest.mark.parametrize("truncation", MOST_LAUNCHES)
def test_returns_take_no_more_launches_than_before(
    truncation: str, late_device: PretendCuda | None
) -> None:
    if late_device is None:
        pytest.skip("launches are counted on the pretended device")
    storage = filled("cuda")
    last_values = torch.ones(NUM_ENVS, 1, device="cuda")
    late_device.reset()
    storage.compute_returns(last_values, 0.9, 0.8, truncation=truncation)
    assert late_device.reset().num_launches <= MOST_LAUNCHES[truncation]


# Mini-batches.


@pytest.mark.parametrize("generator", [None, 3])
def test_a_new_generator_is_on_the_device_of_the_storage(generator: int | None) -> None:
    assert make_storage(generator=generator, device="cuda").rng.device.type == "cuda"
    assert make_storage(generator=generator).rng.device.type == "cpu"
    generator_of_user = torch.Generator()
    assert make_storage(generator=generator_of_user, device="cuda").rng is generator_of_user


def drawn(storage: Any, recurrent: bool) -> list[Any]:
    if recurrent:
        return list(storage.recurrent_mini_batch_generator(2, 2))
    return [
        *storage.mini_batch_generator(2, 2),
        *storage.mini_batch_generator(2, 1, reshuffle="once", drop_last=False),
    ]


@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recurrent", [False, True])
def test_mini_batches_equal_those_of_the_cpu(kind: type, recurrent: bool) -> None:
    results = []
    for device in ("cpu", "cuda"):
        storage = filled(device, kind)
        storage.rng = torch.Generator().manual_seed(0)
        storage.emit_next_valid = True
        storage.compute_returns(torch.ones(NUM_ENVS, 1), 0.9, 0.8)
        results.append(drawn(storage, recurrent))
    for on_cpu, on_device in zip(*results, strict=True):
        for expected, actual in zip(on_cpu, on_device, strict=True):
            if isinstance(expected, torch.Tensor):
                torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_an_epoch_drawn_on_the_device_has_each_row_once() -> None:
    storage = filled("cuda")
    storage.compute_returns(torch.ones(NUM_ENVS, 1), 0.9, 0.8)
    for options in ({}, {"reshuffle": "once"}):
        batches = list(storage.mini_batch_generator(3, 2, drop_last=False, **options))
        epochs = [
            torch.cat([batch.obs[:, 0] for batch in part]).cpu()
            for part in (batches[:3], batches[3:])
        ]
        for epoch in epochs:
            assert torch.equal(
                epoch.sort().values, storage.observations[..., 0].flatten().cpu().sort().values
            )
        assert torch.equal(*epochs) == bool(options)


@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_mini_batches_wait_once_per_update(
    kind: type, late_device: PretendCuda | None
) -> None:
    if late_device is None:
        pytest.skip("waits are counted on the pretended device")
    storage = filled("cuda", kind)
    storage.compute_returns(torch.ones(NUM_ENVS, 1), 0.9, 0.8)
    late_device.reset()
    list(storage.recurrent_mini_batch_generator(2, 3))
    counts = late_device.reset()
    assert counts.num_waits == 1
    assert counts.pageable_copies.total() == 0


def test_final_observations_are_right_before_and_after_their_count_is_copied(
    late_device: PretendCuda | None,
) -> None:
    expected = filled("cpu", SarsaRolloutStorage)
    for lateness in (0, 5, 10_000):
        if late_device is not None:
            late_device.lateness = lateness
        storage = filled("cuda", SarsaRolloutStorage)
        for made in (storage, expected):
            made.rng = torch.Generator().manual_seed(0)
            made.compute_returns(torch.ones(NUM_ENVS, 1), 0.9, 0.8)
        for mine, other in zip(drawn(storage, False), drawn(expected, False), strict=True):
            assert torch.equal(mine.next_obs.cpu(), other.next_obs)
        loaded = make_storage(NUM_ENVS, NUM_STEPS, SarsaRolloutStorage)
        loaded.load_state_dict(storage.state_dict())
        assert_same_columns(loaded, expected)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_copies_draw_the_same_rows_on_every_generator_device(device: str) -> None:
    storage = make_storage(
        NUM_ENVS, NUM_STEPS, device="cuda", generator=torch.Generator(device).manual_seed(4)
    )
    for step in range(NUM_STEPS):
        storage.add_transitions(transition(step))
    storage.compute_returns(torch.ones(NUM_ENVS, 1), 0.9, 0.8)
    copied = copy.deepcopy(storage)
    for mine, other in zip(drawn(storage, False), drawn(copied, False), strict=True):
        assert torch.equal(mine.obs, other.obs)


@pytest.mark.parametrize("compat", [True, False])
def test_the_storage_for_rsl_rl_waits_for_nothing(compat: bool) -> None:
    pytest.importorskip("tensordict", exc_type=ImportError)
    from storage.adapters.rsl_rl import RslRlStorage

    observations = {"policy": torch.ones(NUM_ENVS, 3, device="cuda")}
    storage = RslRlStorage(
        "rl", NUM_ENVS, NUM_STEPS, observations, (2,), device="cuda", compat=compat
    )
    last_values = torch.ones(NUM_ENVS, 1, device="cuda")
    made = storage.Transition(
        observations=observations, actions=torch.ones(NUM_ENVS, 2, device="cuda")
    )
    made.rewards = torch.ones(NUM_ENVS, device="cuda")
    made.dones = torch.zeros(NUM_ENVS, device="cuda")
    made.values = torch.ones(NUM_ENVS, 1, device="cuda")
    made.actions_log_prob = torch.zeros(NUM_ENVS, device="cuda")
    made.distribution_params = (made.actions, made.actions)

    def update() -> int:
        storage.clear()
        for _ in range(NUM_STEPS):
            storage.add_transition(made)
        storage.compute_returns(last_values, 0.9, 0.8)
        return len(list(storage.mini_batch_generator(2, 2)))

    update()  # the first call may allocate
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert update() == 4
    finally:
        torch.cuda.set_sync_debug_mode("default")
