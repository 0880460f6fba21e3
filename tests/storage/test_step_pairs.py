"""`StepPairs`: steps with next observations in a buffer that stores each observation once."""

from __future__ import annotations

import pytest
import torch

from storage import DictBuffer
from storage.adapters.step_pairs import StepPairs
from storage.errors import RolloutDataError

Columns = dict[str, torch.Tensor]
NUM_ENVS = 4


def step(number: int, width: int = 3) -> tuple[Columns, Columns]:
    """Return the fields of one step and the observation after it, which begins the next step."""
    observations = torch.full((1, NUM_ENVS, width), float(number))
    fields = {
        "observation": observations,
        "action": torch.zeros(1, NUM_ENVS, 2),
        "done": torch.zeros(1, NUM_ENVS, 1, dtype=torch.bool),
    }
    return fields, {"observation": observations + 1}


def without(name: str) -> tuple[Columns, Columns]:
    fields, following = step(2)
    del fields[name]
    return fields, following


def with_extra_field() -> tuple[Columns, Columns]:
    fields, following = step(2)
    return {**fields, "extra": torch.zeros(1, NUM_ENVS, 1)}, following


@pytest.mark.parametrize(
    "wrong",
    [without("action"), with_extra_field(), step(2, width=5)],
    ids=["fewer", "more", "width"],
)
def test_a_wrong_step_raises_at_once_and_the_next_steps_are_added(
    wrong: tuple[Columns, Columns],
) -> None:
    buffer = DictBuffer(80, num_envs=NUM_ENVS, end_key="done", generator=0)
    pairs = StepPairs(buffer, ("done",))
    pairs.add(*step(0))
    pairs.add(*step(1))
    with pytest.raises(RolloutDataError):
        pairs.add(*wrong)
    for number in (2, 3):
        pairs.add(*step(number))
    assert len(buffer) == 3 * NUM_ENVS
    assert sorted(set(buffer.sample(200)["observation"][:, 0].tolist())) == [0, 1, 2]


@pytest.mark.parametrize("num_steps", [1, 2, 3, 7])
def test_steps_in_calls_of_any_length_give_the_same_rows(num_steps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    observations = torch.randn(22, NUM_ENVS, 3, generator=generator)
    done = torch.rand(21, NUM_ENVS, 1, generator=generator) < 0.2
    # After some steps without an end flag the environment was reset, too.
    is_reset = torch.rand(21, NUM_ENVS, 1, generator=generator) < 0.2
    following = torch.where(done | is_reset, observations[1:] + 10, observations[1:])
    fields = {"observation": observations[:-1], "done": done}

    buffers = []
    for size in (21, num_steps):
        buffer = DictBuffer(400, num_envs=NUM_ENVS, end_key="done", generator=0)
        pairs = StepPairs(buffer, ("done",))
        for start in range(0, 21, size):
            part = slice(start, start + size)
            pairs.add(
                {name: x[part].clone() for name, x in fields.items()},
                {"observation": following[part].clone()},
            )
        buffers.append(buffer)
    draws = [buffer.sample_transitions(200, next_keys=("observation",)) for buffer in buffers]
    assert torch.equal(draws[0]["observation"], draws[1]["observation"])
    assert torch.equal(draws[0]["next"]["observation"], draws[1]["next"]["observation"])
    assert torch.equal(draws[0]["done"], draws[1]["done"])
    # Every drawn transition is a step of the environments.
    starts = observations[:-1].reshape(-1, 3)
    place = (draws[0]["observation"][:, None] == starts).all(2).int().argmax(1)
    assert torch.equal(draws[0]["next"]["observation"], following.reshape(-1, 3)[place])
