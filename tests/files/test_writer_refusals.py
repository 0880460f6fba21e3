"""RolloutWriter: rejected steps, their errors, and recording after an error."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from rollout_data import RolloutWriter
from storage.errors import (
    ClosedError,
    FieldTypeError,
    MissingFieldError,
    RolloutDataError,
    SchemaError,
    UsageError,
)
from tests.files.readback import trajectories_of

N = 3


def step(t: int = 0, **changes: Any) -> dict[str, Any]:
    values = {
        "observation": np.full((N, 4), t, np.float32),
        "action": np.full((N, 2), t, np.float32),
        "reward": np.full(N, t, np.float32),
        "done": np.zeros(N, bool),
    }
    return {name: value for name, value in {**values, **changes}.items() if value is not None}


def make(folder, **options):
    return RolloutWriter(folder, N, durable=False, **options)


def frames_in(folder):
    return sum(trajectory.length for trajectory in trajectories_of(folder))


LOOP: dict[str, Any] = {}
LOOP["again"] = LOOP


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (
            {"observation": np.zeros((2, 4), np.float32)},
            SchemaError,
            "field 'observation' has shape (2, 4), expected the leading size (3,) (num_envs).",
        ),
        (
            {"reward": np.zeros((4,), np.float32)},
            SchemaError,
            "field 'reward' has shape (4,), expected the leading size (3,) (num_envs).",
        ),
        (
            {"action": np.zeros((N, 3), np.float32)},
            SchemaError,
            "field 'action' has rows of shape (3,), expected (2,).",
        ),
        (
            {"action": np.zeros((N, 2), np.float64)},
            FieldTypeError,
            "field 'action' has dtype float64, expected float32 as in the first record.",
        ),
        (
            {"reward": None},
            MissingFieldError,
            "RolloutWriter.add: field 'reward' is missing: expected the fields observation, action, "
            "reward, got observation, action.",
        ),
        (
            {"mu": np.zeros(N)},
            MissingFieldError,
            "RolloutWriter.add: unknown field 'mu': expected the fields observation, action, reward, "
            "got observation, action, reward, mu.",
        ),
        (
            {"action": None},
            MissingFieldError,
            "RolloutWriter.add: field 'action' is missing, got only",
        ),
        (
            {"done": np.zeros((N, 2))},
            SchemaError,
            "flag 'done' has shape (3, 2), expected (3,) or (3, 1).",
        ),
        (
            {"action": np.array(["a"] * N)},
            FieldTypeError,
            "of field 'action' is not supported. Convert the values to one of bool, uint8",
        ),
        (
            {"action": [[1], [1, 2], [3]]},
            SchemaError,
            "RolloutWriter.add: field 'action' is no array: ",
        ),
        ({"action": np.zeros((N, 2), complex)}, FieldTypeError, "complex128"),
        (
            {"policy_version": 0.5},
            FieldTypeError,
            "policy_version must be integers, got float64.",
        ),
        (
            {"policy_version": [1, 2]},
            SchemaError,
            "policy_version has shape (2,), expected one integer or shape (3,).",
        ),
        (
            {"final_observation": np.zeros((2, 4), np.float32), "done": [1, 0, 0]},
            SchemaError,
            "'final_observation' has shape (2, 4), "
            "expected (3, 4), or (1, 4) for the ends of this record.",
        ),
        ({"final_observation": np.zeros((N, 4), int)}, FieldTypeError, "expected float32"),
        (
            {"final_privileged_observation": np.zeros((N, 4))},
            MissingFieldError,
            "'privileged_observation'",
        ),
        (
            {"timeout": [1, 0, 0], "truncated": [0, 0, 0]},
            UsageError,
            "timeout and truncated have different values",
        ),
        (
            {"done": [1, 0, 0], "terminated": [0, 0, 0], "truncated": [0, 0, 0]},
            UsageError,
            "done differs from terminated | truncated.",
        ),
        (
            {"actions": np.zeros((N, 2), np.float32)},
            UsageError,
            "both set 'action'",
        ),
    ],
)
def test_a_wrong_record_raises_and_the_writer_continues(tmp_path, change, kind, text):
    with make(tmp_path) as writer:
        writer.add(**step(1))
        with pytest.raises(kind) as caught:
            writer.add(**step(2, **change))
        assert text in str(caught.value) and isinstance(caught.value, RolloutDataError)
        rollout = {name: np.asarray(value)[None] for name, value in step(2).items()}
        rollout |= {name: None if value is None else [value] for name, value in change.items()}
        if "policy_version" not in change:
            with pytest.raises(RolloutDataError):
                writer.add_rollout(
                    **{name: value for name, value in rollout.items() if value is not None}
                )
        writer.add(**step(3))
    assert [
        trajectory.column("observation")[:, 0].tolist() for trajectory in trajectories_of(tmp_path)
    ] == [[1, 3]] * N


@pytest.mark.parametrize(
    ("options", "changes", "text"),
    [
        (
            {"obs_segments": {"a": (3,)}},
            {},
            "field 'observation' has shape (3, 4), "
            "expected 3 values in the last dimension, the sum of obs_segments.",
        ),
        (
            {"obs_segments": {"a": (3,)}},
            {"observation": {"b": np.zeros((N, 3))}},
            "RolloutWriter.add: field 'observation/a' is missing: expected the fields observation/a, "
            "got observation/b.",
        ),
        (
            {"obs_disassemble_mapping": {"dpth": "raw"}},
            {"observation": {"depth": np.zeros((N, 3))}},
            "obs_disassemble_mapping has the unknown component 'dpth'. Components: 'depth'.",
        ),
        (
            {"obs_disassemble_mapping": {"depth": "normalized_image"}},
            {"observation": {"depth": np.zeros((N, 3), int)}},
            "field 'observation/depth' has dtype int64. Codec 'normalized_image' needs a floating "
            "dtype or uint8.",
        ),
        ({}, {"frames": np.zeros(N)}, "field name 'frames' is invalid"),
        (
            {},
            {"sim": np.zeros((N, 0))},
            "field 'sim' has shape (0,), expected at least one value per frame.",
        ),
    ],
)
def test_a_wrong_first_record_writes_no_file(tmp_path, options, changes, text):
    with make(tmp_path, **options) as writer:
        with pytest.raises(SchemaError) as caught:
            writer.add(**step(**changes))
        assert text in str(caught.value)
        assert not [path for path in tmp_path.iterdir() if not path.name.endswith(".journal")]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"writer_name": "a_b"},
            "writer_name must consist of 1 to 100 letters, digits and '-', got 'a_b'.",
        ),
        ({"writer_name": "../x"}, "writer_name must consist of"),
        ({"block_bytes": 0}, "block_bytes must be >= 1, got 0."),
        (
            {"max_pending_blocks": 1.5},
            "max_pending_blocks must be an integer >= 1, got 1.5.",
        ),
        (
            {"nonfinite_rewards": "x"},
            "nonfinite_rewards must be one of 'accept', 'refuse', got 'x'.",
        ),
        (
            {"obs_segments": {"a": (0,)}},
            "obs_segments has an empty name, or a size below 1: 'a': (0,).",
        ),
        (
            {"obs_segments": {"a": (1,)}, "obs_disassemble_mapping": {"a": "nrmalized_image"}},
            "obs_disassemble_mapping of 'a': codec 'nrmalized_image' has the unknown stage",
        ),
        (
            {"obs_segments": {"a": (1,)}, "obs_disassemble_mapping": {"b": "raw"}},
            "has the name 'b', which is not in obs_segments ('a')",
        ),
    ],
)
def test_wrong_options_raise_before_a_folder_is_created(tmp_path, options, text):
    with pytest.raises(UsageError) as caught:
        make(tmp_path / "new", **options)
    assert text in str(caught.value)
    assert not (tmp_path / "new").exists()
    with pytest.raises(UsageError, match=r"num_envs must be (an integer )?in 1:"):
        RolloutWriter(tmp_path / "new", 0)


def test_a_second_writer_with_another_schema_raises_with_the_difference(tmp_path):
    with make(tmp_path) as writer:
        writer.add(**step())
    before = sorted(path.name for path in tmp_path.iterdir())
    other = {"action": np.zeros((N, 5), np.float32)}
    with make(tmp_path) as writer:
        with pytest.raises(SchemaError) as caught:
            writer.add(**step(**other))
        assert str(caught.value) == (
            f"RolloutWriter.add: the fields differ from the fields in {str(tmp_path)!r}: "
            "field 'action' is float32[5] instead of float32[2]. Record into another folder."
        )
        writer.add(**step())  # it may still do right
    after = sorted(path.name for path in tmp_path.iterdir())
    assert len(after) == len(before) + 1
    with (
        make(tmp_path, obs_segments={"a": (4,)}) as writer,
        pytest.raises(SchemaError, match="'observation' is missing"),
    ):
        writer.add(**step())


def test_calls_of_a_closed_writer_raise(tmp_path):
    writer = make(tmp_path)
    writer.add(**step())
    writer.close()
    writer.close()
    for call in (lambda: writer.add(**step()), writer.flush, lambda: writer.discard([0])):
        with pytest.raises(ClosedError, match=r"the writer of .* is closed"):
            call()


def test_an_unclosed_writer_is_closed_at_exit(tmp_path):
    code = (
        "import sys, numpy as np\nfrom rollout_data import RolloutWriter\n"
        "w = RolloutWriter(sys.argv[1], 2)\nw.add(observation=np.zeros((2, 1)), action=np.zeros(2))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert frames_in(tmp_path) == 2
    assert not list(tmp_path.glob(".rollout_*.journal"))


@pytest.mark.parametrize(
    "options",
    [
        {"block_bytes": "x"},
        {"block_bytes": float("nan")},
        {"max_pending_blocks": 0},
        {"block_age_s": "x"},
        {"block_age_s": float("nan")},
        {"metadata": 5},
        {"metadata": {("a", 1): 2}},
        {"metadata": {"a": LOOP}},
        {"writer_name": 5},
        {"nonfinite_rewards": "drop"},
        {"obs_segments": 5},
        {"obs_segments": {"a": "x"}},
        {"obs_segments": {"a": (-3, -1)}},
        {"obs_segments": {"a": (3.7,)}},
        {"obs_disassemble_mapping": 5},
    ],
    ids=str,
)
def test_wrong_arguments_raise_before_a_folder_is_created(tmp_path, options):
    with pytest.raises(UsageError, match=f"RolloutWriter: .*{next(iter(options))}.*(got|empty)"):
        RolloutWriter(tmp_path / "data", N, **options)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("num_envs", [0, -1, 1.5, True, "3", None, float("nan"), 2**40])
def test_an_invalid_num_envs_raises(tmp_path, num_envs):
    with pytest.raises(UsageError, match=r"num_envs must be (an integer )?in 1:"):
        RolloutWriter(tmp_path / "data", num_envs)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"done": np.array([np.nan, 0, 1])},
            "flag 'done' contains NaN, expected True and False",
        ),
        (
            {"reward": np.ma.array(np.ones(N, np.float32), mask=[1, 0, 0])},
            "field 'reward' has masked values",
        ),
        (
            {"policy_version": np.uint64(2**63)},
            "policy_version must be below 2\\*\\*63",
        ),
        ({"policy_version": 2**70}, "of policy_version is not supported"),
        (
            {"frames": np.zeros(N)},
            "field name 'frames' is invalid: .* Rename the field",
        ),
        ({"a\0b": np.zeros(N)}, "Unicode text without NUL"),
        ({"a\udc80": np.zeros(N)}, "Unicode text without NUL"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_invalid_values_of_a_step_raise(tmp_path, change, text):
    with make(tmp_path) as writer:
        with pytest.raises(RolloutDataError, match=text):
            writer.add(**step(0, **change))
        writer.add(**step(1))
        writer.add(**step(2))
        if not any(name in change for name in ("frames", "a\0b", "a\udc80")):
            with pytest.raises(RolloutDataError, match=text):
                writer.add(**step(3, **change))  # also behind steps of a known form
    assert frames_in(tmp_path) == 2 * N


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_nonfinite_rewards_raise_in_nested_rewards_too(tmp_path, bad):
    with RolloutWriter(tmp_path, 1, nonfinite_rewards="refuse") as writer:
        rewards = {"walk": torch.zeros(1), "energy": torch.zeros(1)}
        # The first record declares the fields, the others go the short way
        for value in (
            0.0,
            bad,
            1.0,
            bad,
        ):
            rewards["energy"] = torch.full((1,), value)
            if value == bad or value != value:
                with pytest.raises(
                    UsageError,
                    match="'reward/energy' has 1 NaN or infinite",
                ):
                    writer.add(
                        observation=torch.zeros(1, 2), action=torch.zeros(1, 2), reward=rewards
                    )
            else:
                writer.add(observation=torch.zeros(1, 2), action=torch.zeros(1, 2), reward=rewards)
        assert writer.num_frames == 2 and writer.num_nonfinite_rewards == 0
