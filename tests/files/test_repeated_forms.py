"""A step with the form of the previous step is not checked again.

The file must be the same as with all checks.
"""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_data import RolloutWriter
from storage.errors import RolloutDataError
from tests.files.readback import trajectories_of

N = 3


def packed(array: np.ndarray) -> np.ndarray:
    """Copy an array so that its strides are no multiple of its item size."""
    records = np.zeros(array.shape, [("before", "i1"), ("value", array.dtype)])
    records["value"] = array
    return records["value"]


#: Memory layouts of a float array.
DRESSES = {
    "array": lambda array: array,
    "tensor": lambda array: torch.from_numpy(array.copy()),
    "with a gradient": lambda array: torch.from_numpy(array.copy()).requires_grad_(),
    "reversed": lambda array: array[::-1].copy()[::-1],
    "packed": packed,
    "of the other byte order": lambda array: array.astype(">f4"),
    "negated": lambda array: (
        torch.complex(torch.zeros(array.shape), torch.from_numpy(-array)).conj().imag
    ),
}


@st.composite
def records(draw):
    """Draw steps that mostly repeat one form, with changes of form and names, and with errors."""
    flags = draw(st.sampled_from([("done",), ("done", "timeout"), ("terminated", "truncated"), ()]))
    nested, with_final = draw(st.booleans()), draw(st.booleans())
    result = []
    for t in range(draw(st.integers(2, 8))):
        dress = DRESSES[draw(st.sampled_from(["tensor"] * 3 + sorted(DRESSES)))]
        row = np.arange(N * 2, dtype=np.float32).reshape(N, 2) + 10 * t
        item = {
            "observation": {"a": dress(row), "b": torch.from_numpy(row[:, 0].copy())}
            if nested
            else dress(row),
            "action": row[:, :1].copy(),
            "reward": torch.from_numpy(
                np.where(draw(st.booleans()), np.nan, row[:, 1]).astype(np.float32)
            ),
        }
        for name in flags:
            bits = np.array(draw(st.lists(st.booleans(), min_size=N, max_size=N)))
            item[name] = draw(
                st.sampled_from([lambda x: x, torch.from_numpy, lambda x: x[:, None]])
            )(bits)
        if with_final:
            item["final_observation"] = (
                {"a": row + 0.5, "b": row[:, 0] + 0.5} if nested else row + 0.5
            )
        if draw(st.booleans()):
            item["policy_version"] = draw(st.sampled_from([t, np.int64(t), 2**70]))
        mistake = draw(
            st.sampled_from([None] * 12 + ["shape", "dtype", "missing", "extra", "mask"])
        )
        if mistake == "shape":
            item["action"] = np.zeros((N, 2), np.float32)
        elif mistake == "dtype":
            item["action"] = np.zeros((N, 1), np.float64)
        elif mistake == "missing":
            del item["reward"]
        elif mistake == "extra":
            item["extra"] = row
        elif mistake == "mask":
            item["env_mask"] = np.array([True, False, True])
        result.append(item)
    return result


def recorded(folder, steps, with_changing_forms):
    """Record steps. To vary the form, add a mask of all envs, of one dtype and then of another."""
    errors = []
    with RolloutWriter(folder, N, writer_name="w") as writer:
        for t, item in enumerate(steps):
            mask = {"env_mask": np.ones(N, (bool, "u1")[t % 2])} if with_changing_forms else {}
            try:
                writer.add(**{**mask, **item})
                errors.append(None)
            except RolloutDataError as error:
                errors.append(f"{type(error).__name__}: {error}")
        counts = writer.num_frames, writer.num_trajectories, writer.num_nonfinite_rewards
    content = [
        (
            trajectory.number,
            trajectory.flags,
            {n: trajectory.column(n).tobytes() for n in trajectory.fields},
            str(trajectory.finals),
        )
        for trajectory in trajectories_of(folder)
    ]
    return errors, counts, content


@settings(max_examples=30, deadline=None)
@given(steps=records())
def test_a_step_does_not_depend_on_the_form_of_the_step_before_it(tmp_path_factory, steps):
    same, changing = tmp_path_factory.mktemp("same"), tmp_path_factory.mktemp("changing")
    assert recorded(same, steps, False) == recorded(changing, steps, True)


def test_a_repeated_step_is_copied(tmp_path):
    observation, done = torch.zeros(N, 4), np.zeros(N, bool)
    with RolloutWriter(tmp_path, N, obs_segments={"a": (2,), "b": (1, 2)}) as writer:
        for t in range(5):
            observation.fill_(t)  # the caller may change its memory after each call
            done[:] = t == 2
            writer.add(observation=observation, action=torch.zeros(N), done=done)
    for trajectory in trajectories_of(tmp_path):
        start = 0 if trajectory.length == 3 else 3
        expected = np.arange(start, start + trajectory.length, dtype=np.float32)
        assert (trajectory.column("observation/b") == expected[:, None, None]).all()
