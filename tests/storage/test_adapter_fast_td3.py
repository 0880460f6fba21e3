"""The adapter for FastTD3: a loop with its calls sees the transitions of a slow reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

from storage import SchemaError, UsageError
from storage.adapters.fast_td3 import SimpleReplayBuffer
from tests.buffers.streams import chi_square, chi_square_bound
from tests.test_compiled_learners import assert_one_graph

pytest.importorskip("tensordict", exc_type=ImportError)

from tensordict import TensorDict

NUM_ENVS, NUM_SLOTS = 3, 20
NUM_OBSERVED, NUM_ACTIONS, NUM_PRIVILEGED = 2, 1, 2
GAMMA = 0.5


@contextmanager
def no_waits(is_strict: bool) -> Iterator[None]:
    """Raise within the block if the host waits for a device, if `is_strict`."""
    if is_strict:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if is_strict:
            torch.cuda.set_sync_debug_mode("default")


class Step(NamedTuple):
    """A step of one environment."""

    number: float
    following: float
    reward: float
    done: bool
    truncated: bool


class Loop:
    """The calls of a training loop. Every observation is a different number."""

    #: Whether tensors are overwritten after they were added.
    changes_tensors = False
    #: Whether `extend` raises where it waits for a device.
    may_not_wait = False

    def __init__(self, device: str = "cpu", **options: Any) -> None:
        self.device = device
        self.is_asymmetric = options.get("asymmetric_obs", False)
        self.buffer = SimpleReplayBuffer(
            n_env=NUM_ENVS,
            buffer_size=NUM_SLOTS,
            n_obs=NUM_OBSERVED,
            n_act=NUM_ACTIONS,
            n_critic_obs=NUM_OBSERVED + NUM_PRIVILEGED,
            gamma=GAMMA,
            device=device,
            generator=0,
            **options,
        )
        self.num_seen = 0
        self.steps: list[list[Step]] = [[] for _ in range(NUM_ENVS)]
        self.observation = self.new_observations()

    def new_observations(self) -> torch.Tensor:
        """Return observations that no environment had before, `[NUM_ENVS]`."""
        first = self.num_seen
        self.num_seen += NUM_ENVS
        return torch.arange(first, self.num_seen).float()

    def observed(self, numbers: torch.Tensor, size: int) -> torch.Tensor:
        """Return numbers as observations `[NUM_ENVS, size]`: number, number + 1/8, ..."""
        return (numbers.unsqueeze(1) + torch.arange(size) / 8).to(self.device)

    def step(self, dones: torch.Tensor, truncated: torch.Tensor) -> None:
        following = self.new_observations()
        steps = {
            "observations": self.observed(self.observation, NUM_OBSERVED),
            "actions": self.observed(self.observation, NUM_ACTIONS),
            "next": {
                "observations": self.observed(following, NUM_OBSERVED),
                "rewards": (-self.observation).to(self.device),
                "dones": dones.long().to(self.device),
                "truncations": truncated.long().to(self.device),
            },
        }
        if self.is_asymmetric:
            size = NUM_OBSERVED + NUM_PRIVILEGED
            steps["critic_observations"] = self.observed(self.observation, size)
            steps["next"]["critic_observations"] = self.observed(following, size)
        with no_waits(self.may_not_wait):
            self.buffer.extend(TensorDict(steps, batch_size=[NUM_ENVS]))
        if self.changes_tensors:
            for tensor in (steps["observations"], *steps["next"].values()):
                tensor.fill_(-1)
        columns = (self.observation, following, -self.observation, dones, truncated)
        for env, row in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            self.steps[env].append(Step(*row))
        self.observation = torch.where(dones, self.new_observations(), following)

    def reset(self) -> None:
        """Reset all environments, as trainers do after an evaluation."""
        self.observation = self.new_observations()

    def run(self, num_steps: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        for number in range(num_steps):
            dones = torch.rand(NUM_ENVS, generator=generator) < 0.2
            truncated = dones & (torch.rand(NUM_ENVS, generator=generator) < 0.5)
            self.step(dones, truncated)
            if number % 11 == 10:
                self.reset()

    def transitions(self, num_steps: int) -> dict[float, tuple[float, ...]]:
        """Return the transitions that may be drawn, by their first observation."""
        result = {}
        for steps in self.steps:
            for first in range(max(0, len(steps) - 1 - NUM_SLOTS), len(steps) - 1):
                reward = 0.0
                for taken in range(1, num_steps + 1):
                    last = first + taken - 1
                    if last >= len(steps) - 1:
                        break
                    step = steps[last]
                    reward += GAMMA ** (taken - 1) * step.reward
                    is_end = step.done or steps[last + 1].number != step.following
                    is_known = is_end or last + 1 < len(steps) - 1
                    if (is_end or taken == num_steps) and is_known:
                        flags = float(step.done), float(step.truncated)
                        result[steps[first].number] = (reward, *flags, step.following, float(taken))
                    if is_end:
                        break
        return result

    def drawn(self, batch: Any) -> list[tuple[float, tuple[float, ...]]]:
        """Check that the fields of a batch agree. Return its transitions."""
        following = batch["next"]
        num_rows = len(batch["observations"])
        numbers = batch["observations"][:, 0].cpu()
        next_numbers = following["observations"][:, 0].cpu()
        sizes = {"observations": NUM_OBSERVED, "critic_observations": NUM_OBSERVED + NUM_PRIVILEGED}
        for name in list(sizes)[: 1 + self.is_asymmetric]:
            for columns, expected in ((batch, numbers), (following, next_numbers)):
                seen = torch.cat([self.observed(x.view(1), sizes[name]) for x in expected])
                assert torch.equal(columns[name], seen)
        assert torch.equal(batch["actions"][:, 0].cpu(), numbers)
        values = [following[name] for name in ("rewards", "dones", "truncations")]
        assert [value.dtype for value in values] == [torch.float32, torch.int64, torch.int64]
        values += [next_numbers, following["effective_n_steps"]]
        assert all(value.shape == (num_rows,) for value in values)
        rows = zip(*(value.cpu().float().tolist() for value in values), strict=True)
        return list(zip(numbers.tolist(), rows, strict=True))


@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("num_added", [9, 70])
def test_transitions_equal_those_of_a_slow_reference(num_steps: int, num_added: int) -> None:
    loop = Loop(n_steps=num_steps)
    loop.run(num_added)
    expected = loop.transitions(num_steps)
    counts: Counter = Counter()
    for _ in range(20):
        batch = loop.buffer.sample(100)
        assert len(batch["observations"]) == NUM_ENVS * 100
        for number, transition in loop.drawn(batch):
            assert transition == pytest.approx(expected[number])
            counts[number] += 1
    assert set(counts) == set(expected)
    law = dict.fromkeys(expected, 1 / len(expected))
    assert chi_square(counts, law) < chi_square_bound(len(expected))


@pytest.mark.parametrize("playground_mode", [False, True])
def test_observations_of_the_critic_come_back_and_are_stored_without_the_first_part_in_playground_mode(
    playground_mode: bool,
) -> None:
    loop = Loop(asymmetric_obs=True, playground_mode=playground_mode, n_steps=3)
    loop.run(40)
    expected = loop.transitions(3)
    for number, transition in loop.drawn(loop.buffer.sample(50)):
        assert transition == pytest.approx(expected[number])
    stored = loop.buffer.buffer.storage["critic_observations"]
    size = NUM_PRIVILEGED if playground_mode else NUM_OBSERVED + NUM_PRIVILEGED
    assert stored.shape[1] == size


def test_playground_mode_has_no_effect_without_observations_of_the_critic() -> None:
    loop = Loop(playground_mode=True)
    loop.run(10)
    assert "critic_observations" not in loop.buffer.sample(2)


def test_an_environment_that_was_reset_without_a_flag_begins_a_new_trajectory() -> None:
    loop = Loop()
    never = torch.zeros(NUM_ENVS, dtype=torch.bool)
    for number in range(6):
        loop.step(never, never)
        if number == 2:
            before = loop.steps[0][-1]
            loop.reset()
    drawn = dict(loop.drawn(loop.buffer.sample(100)))
    assert drawn[before.number][3] == before.following
    assert drawn[before.number][1:3] == (0, 0)


def test_each_observation_is_stored_once() -> None:
    loop = Loop(asymmetric_obs=True)
    loop.run(5)
    storage = loop.buffer.buffer.storage
    assert set(storage) == {
        "observations", "actions", "critic_observations", "rewards", "dones", "truncations", "cut",
    }  # fmt: skip


def test_added_tensors_may_change_afterwards() -> None:
    loop = Loop()
    loop.changes_tensors = True
    loop.run(30)
    expected = loop.transitions(1)
    for number, transition in loop.drawn(loop.buffer.sample(50)):
        assert transition == pytest.approx(expected[number])


def test_entries_of_a_batch_may_be_replaced() -> None:
    loop = Loop()
    loop.run(10)
    batch = loop.buffer.sample(4)
    batch["observations"] = batch["observations"] / 2
    batch["next"]["observations"] = batch["next"]["observations"] / 2
    assert not torch.equal(batch["observations"], loop.buffer.sample(4)["observations"])


@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_compiled_learner_takes_batches_as_one_graph(num_steps: int) -> None:
    loop = Loop(n_steps=num_steps, asymmetric_obs=True)
    loop.run(40)
    assert_one_graph(loop.buffer.sample(4) for _ in range(4))


def test_steps_of_other_sizes_are_refused_and_an_empty_buffer_raises() -> None:
    loop = Loop()
    with pytest.raises(UsageError):
        loop.buffer.sample(1)
    with pytest.raises(SchemaError, match=r"'observations'.*\(4, 2\), expected \(3, 2\)"):
        loop.buffer.extend({"observations": torch.zeros(NUM_ENVS + 1, NUM_OBSERVED)})


@pytest.mark.parametrize("name", ["rewards", "dones", "truncations"])
def test_rewards_and_flags_of_another_number_of_environments_are_refused(name: str) -> None:
    columns = {
        "observations": torch.zeros(NUM_ENVS, NUM_OBSERVED),
        "actions": torch.zeros(NUM_ENVS, NUM_ACTIONS),
    }
    following = {
        "observations": torch.zeros(NUM_ENVS, NUM_OBSERVED),
        "rewards": torch.zeros(NUM_ENVS),
        "dones": torch.zeros(NUM_ENVS, dtype=torch.int64),
        "truncations": torch.zeros(NUM_ENVS, dtype=torch.int64),
    }
    following[name] = following[name].repeat(2)
    buffer = Loop().buffer
    with pytest.raises(SchemaError, match=rf"'{name}' has shape \(6,\), expected \(3,\)"):
        buffer.extend({**columns, "next": following})
    assert len(buffer.buffer) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.usefixtures("any_device")
def test_on_a_device_transitions_are_the_same_and_no_call_waits(num_steps: int) -> None:
    loop = Loop("cuda", n_steps=num_steps)
    loop.run(40)
    loop.buffer.sample(20)  # The first draw waits.
    loop.may_not_wait = True
    loop.run(30, seed=1)
    with no_waits(True):
        batch = loop.buffer.sample(100)
    expected = loop.transitions(num_steps)
    for number, transition in loop.drawn(batch):
        assert transition == pytest.approx(expected[number])
