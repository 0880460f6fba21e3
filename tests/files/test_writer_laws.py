"""Recorded steps are read back unchanged, for any pattern of ends, masks, versions and block
sizes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_data.writing.rollout_writer import RolloutWriter
from tests.files.readback import end_of, trajectories_of

SETTINGS = settings(max_examples=12, deadline=None)


def make_steps(
    rng: np.random.Generator, num_steps: int, num_envs: int, has_mask: bool
) -> dict[str, np.ndarray]:
    """Create `[T, N, ...]` values that encode step and env."""
    t, n = np.meshgrid(np.arange(num_steps), np.arange(num_envs), indexing="ij")
    code = (t * 1000 + n).astype(np.float32)
    done = rng.random((num_steps, num_envs)) < 0.15
    values: dict[str, Any] = {
        "observation": {"state": np.stack([code, -code], axis=-1), "flag": (t + n) % 2 == 0},
        "privileged_observation": (code + 0.5)[..., None].astype(np.float64),
        "action": (t * 10 + n).astype(np.int64),
        "reward": code[..., None] / 8,
        "done": done,
        "timeout": done & (rng.random(done.shape) < 0.4),
        "label": torch.from_numpy(code).to(torch.bfloat16)[..., None, None],
        "policy_version": np.broadcast_to((t // 7) + 0 * n, t.shape),
        "final_observation": {"state": np.stack([code + 0.25, code], axis=-1), "flag": n % 2 == 0},
        "final_privileged_observation": (code + 0.75)[..., None].astype(np.float64),
    }
    if has_mask:
        values["env_mask"] = rng.random(done.shape) < 0.7
    return values


def at(value: Any, index: Any) -> Any:
    return (
        {key: at(item, index) for key, item in value.items()}
        if isinstance(value, dict)
        else value[index]
    )


def naive_trajectories(
    values: dict[str, Any], success_only: bool, discards: dict[int, list[int]] | None = None
) -> list[dict[str, Any]]:
    """Split `[T, N]` steps into trajectories, one frame at a time.

    `discards` contains the envs to discard after a step.
    """
    done, timeout = values["done"], values["timeout"]
    mask = values.get("env_mask", np.ones_like(done))
    current: dict[int, dict[str, Any]] = {}
    kept, num_started = [], 0
    for t in range(len(done)):
        for n in range(done.shape[1]):
            if not mask[t, n]:
                continue
            if n not in current:
                current[n] = {"env": n, "frames": [], "end": "open", "number": num_started}
                num_started += 1
            current[n]["frames"].append((t, n))
            if done[t, n]:
                current[n]["end"] = "truncated" if timeout[t, n] else "terminated"
                kept.append(current.pop(n))
        for n in (discards or {}).get(t, []):
            current.pop(n, None)
    kept += current.values()
    if success_only:
        kept = [item for item in kept if item["end"] == "truncated"]
    return sorted(kept, key=lambda item: item["number"])


def check_same(
    folder: Path,
    values: dict[str, Any],
    success_only: bool,
    discards: dict[int, list[int]] | None = None,
) -> None:
    expected = naive_trajectories(values, success_only, discards)
    got = trajectories_of(folder)
    assert len(got) == len(expected)
    by_key = {
        (trajectory.env, float(trajectory.column("observation/state")[0, 0])): trajectory
        for trajectory in got
    }
    for trajectory in expected:
        frames = tuple(np.array(trajectory["frames"]).T)
        item = by_key[(trajectory["env"], float(values["observation"]["state"][frames][0, 0]))]
        assert end_of(item) == trajectory["end"]
        assert item.versions == values["policy_version"][frames].tolist()
        for name, value in (
            ("observation/state", values["observation"]["state"]),
            ("observation/flag", values["observation"]["flag"]),
            ("privileged_observation", values["privileged_observation"]),
            ("action", values["action"]),
            ("reward", values["reward"]),
            ("label", values["label"].float().numpy()),
        ):
            column = item.column(name)
            assert column.dtype == value.dtype and column.shape[1:] == value.shape[2:]
            np.testing.assert_array_equal(column, value[frames], err_msg=name)
        np.testing.assert_allclose(
            item.reward_sum, values["reward"][frames].astype(np.float64).sum(axis=0)
        )
        last = trajectory["frames"][-1]
        if trajectory["end"] == "open":
            assert item.finals is None
        else:
            np.testing.assert_array_equal(
                item.finals["observation/state"], values["final_observation"]["state"][last]
            )
            assert (
                item.finals["privileged_observation"]
                == values["final_privileged_observation"][last]
            )


def check_counts(writer: RolloutWriter, expected: list[dict[str, Any]]) -> None:
    ended = [item for item in expected if item["end"] != "open"]
    assert writer.num_trajectories == len(ended)
    assert writer.num_finished_frames == sum(len(item["frames"]) for item in ended)
    assert writer.num_frames == sum(len(item["frames"]) for item in expected)


CASES: dict[str, Any] = dict(  # noqa: C408
    seed=st.integers(0, 2**31),
    num_steps=st.integers(1, 60),
    num_envs=st.sampled_from([1, 2, 5]),
    has_mask=st.booleans(),
    success_only=st.booleans(),
    block_bytes=st.sampled_from([1, 700, 5000, 1 << 20]),
    pending=st.sampled_from([1, 2, 3]),
)


@SETTINGS
@given(**CASES)
def test_recorded_steps_are_read_back_unchanged(
    seed, num_steps, num_envs, has_mask, success_only, block_bytes, pending
):
    rng = np.random.default_rng(seed)
    values = make_steps(rng, num_steps, num_envs, has_mask)
    with tempfile.TemporaryDirectory() as folder:
        writer = RolloutWriter(
            folder,
            num_envs,
            block_bytes=block_bytes,
            max_pending_blocks=pending,
            success_only=success_only,
            durable=False,
        )
        discards: dict[int, list[int]] = {}
        with writer:
            for t in range(num_steps):
                writer.add(
                    **at(values, t),
                    **({"success": at(values["timeout"], t)} if success_only else {}),
                )
                if rng.random() < 0.05:
                    writer.flush()
                if rng.random() < 0.1:
                    discards[t] = np.flatnonzero(rng.random(num_envs) < 0.5).tolist()
                    writer.discard(discards[t])
                if rng.random() < 0.1:
                    check_counts(
                        writer, naive_trajectories(at(values, slice(t + 1)), success_only, discards)
                    )
        check_same(Path(folder), values, success_only, discards)
        expected = naive_trajectories(values, success_only, discards)
        assert writer.num_trajectories == len(expected)
        assert writer.num_frames == sum(len(item["frames"]) for item in expected)


@SETTINGS
@given(**CASES)
def test_rollouts_of_any_length_equal_single_steps(
    seed, num_steps, num_envs, has_mask, success_only, block_bytes, pending
):
    rng = np.random.default_rng(seed)
    values = make_steps(rng, num_steps, num_envs, has_mask)
    with tempfile.TemporaryDirectory() as folder:
        with RolloutWriter(
            folder,
            num_envs,
            block_bytes=block_bytes,
            max_pending_blocks=pending,
            success_only=success_only,
            durable=False,
        ) as writer:
            start = 0
            while start < num_steps:
                stop = min(num_steps, start + int(rng.integers(0, 20)))
                part = at(values, slice(start, stop))
                is_end = part["done"] & part.get("env_mask", np.ones_like(part["done"]))
                if rng.random() < 0.5:  # only the rows of the ends
                    for name in ("final_observation", "final_privileged_observation"):
                        part[name] = at(part[name], is_end)
                writer.add_rollout(part, **({"success": part["timeout"]} if success_only else {}))
                start = stop
        check_same(Path(folder), values, success_only)
