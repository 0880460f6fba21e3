"""A step of a known form is taken on a short road: the same file must come of it as on the long one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_data import RolloutWriter
from rollout_data.writing import repeated_step
from storage.errors import RolloutDataError
from tests.files.readback import trajectories_of

N = 3


def dressed(array: np.ndarray, kind: str):
    return {
        "array": array,
        "tensor": torch.from_numpy(array.copy()),
        "list": array.tolist(),
        "grad": torch.from_numpy(array.copy()).requires_grad_() if array.dtype.kind == "f" else array,
        "reversed": array[::-1].copy()[::-1],
        "packed": packed(array),
        "negated": torch.complex(torch.zeros(array.shape), torch.from_numpy(-array)).conj().imag
        if array.dtype.kind == "f"
        else array,
    }[kind]


def packed(array: np.ndarray) -> np.ndarray:
    """Lay out an array so that its strides are no multiple of its item size."""
    records = np.zeros(array.shape, [("before", "i1"), ("value", array.dtype)])
    records["value"] = array
    return records["value"]


@st.composite
def records(draw):
    """Steps that mostly repeat one form, with changes of form, of names and mistakes among them."""
    flags = draw(st.sampled_from([("done",), ("done", "timeout"), ("terminated", "truncated"), ()]))
    nested, with_final = draw(st.booleans()), draw(st.booleans())
    found = []
    for t in range(draw(st.integers(2, 8))):
        kind = draw(
            st.sampled_from(["tensor", "tensor", "tensor", "array", "list", "grad", "reversed", "packed", "negated"])
        )
        row = np.arange(N * 2, dtype=np.float32).reshape(N, 2) + 10 * t
        if kind == "list" and found:
            kind = "array"  # lists are float64: another dtype than declared
        observation = dressed(row, kind if kind != "list" else "array")
        one = {
            "observation": {"a": observation, "b": dressed(row[:, 0].copy(), "tensor")} if nested else observation,
            "action": dressed(row[:, :1].copy(), "array"),
            "reward": dressed(np.where(draw(st.booleans()), np.nan, row[:, 1]).astype(np.float32), "tensor"),
        }
        for name in flags:
            bits = np.array(draw(st.lists(st.booleans(), min_size=N, max_size=N)))
            one[name] = dressed(bits, draw(st.sampled_from(["array", "tensor", "reversed"])))
        if with_final:
            one["final_observation"] = {"a": row + 0.5, "b": row[:, 0] + 0.5} if nested else row + 0.5
        if draw(st.booleans()):
            one["policy_version"] = draw(st.sampled_from([t, np.int64(t), 2**70]))
        mistake = draw(st.sampled_from([None] * 12 + ["shape", "dtype", "missing", "extra", "mask"]))
        if mistake == "shape":
            one["action"] = np.zeros((N, 2), np.float32)
        elif mistake == "dtype":
            one["action"] = np.zeros((N, 1), np.float64)
        elif mistake == "missing":
            del one["reward"]
        elif mistake == "extra":
            one["extra"] = row
        elif mistake == "mask":
            one["env_mask"] = np.array([True, False, True])
        found.append(one)
    return found


def recorded(folder, steps, monkeypatch, short: bool):
    errors = []
    with monkeypatch.context() as patch:
        if not short:
            patch.setattr("rollout_data.writing.writer.form_of", lambda *args: None)
        with RolloutWriter(folder, N, writer_name="w") as writer:
            for one in steps:
                try:
                    writer.add(**one)
                    errors.append(None)
                except RolloutDataError as error:
                    errors.append(f"{type(error).__name__}: {error}")
            counts = writer.num_frames, writer.num_trajectories, writer.num_nonfinite_rewards
    found = trajectories_of(folder)
    content = [
        (one.number, one.flags, {n: one.column(n).tobytes() for n in one.fields}, str(one.finals)) for one in found
    ]
    return errors, counts, content


@settings(max_examples=60, deadline=None)
@given(steps=records())
def test_the_short_road_ends_where_the_long_one_does(tmp_path_factory, steps):
    with pytest.MonkeyPatch.context() as patch:
        short = recorded(tmp_path_factory.mktemp("short"), steps, patch, True)
        long = recorded(tmp_path_factory.mktemp("long"), steps, patch, False)
    assert short == long


def test_a_repeated_step_takes_the_short_road_and_is_copied(tmp_path, monkeypatch):
    taken = []
    original = repeated_step.RepeatedStep.read

    def read(self, values):
        taken.append(original(self, values) is not None)
        return original(self, values)

    monkeypatch.setattr(repeated_step.RepeatedStep, "read", read)
    observation = torch.zeros(N, 4)
    with RolloutWriter(tmp_path, N, obs_segments={"a": (2,), "b": (1, 2)}) as writer:
        for t in range(5):
            observation.fill_(t)  # the caller's memory is its own again after each call
            writer.add(observation=observation, action=torch.zeros(N), done=np.array([t == 2] * N))
    assert taken == [True] * 4
    for one in trajectories_of(tmp_path):
        start = 0 if one.length == 3 else 3
        expected = np.arange(start, start + one.length, dtype=np.float32)
        assert (one.column("observation/b") == expected[:, None, None]).all()
