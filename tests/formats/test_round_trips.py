"""A recording that is written in a format and read again is equal in every field of that format.

The report lists the other fields.
"""

from __future__ import annotations

import warnings
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout_data
from rollout_data import RolloutDataWarning, RolloutWriter
from rollout_data.formats.registry import FORMATS, WRITERS

OURS = "rollout-data"
OPTIONS: dict[str, dict[str, Any]] = {"robomimic": {"next_obs": True}, "lerobot": {"fps": 30}}
READ_BACK = [name for name in (OURS, *WRITERS) if name in (*FORMATS, OURS, "trajectory-folders")]
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.bool,
)
TASKS = ("", "pick up the cube", "поднять куб", "立方体を拾う")


@st.composite
def recordings(draw: Any) -> dict[str, Any]:
    """Draw recordings: lengths, fields, ends and notes of episodes."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    names = draw(
        st.lists(
            st.sampled_from(["a", "b/c", "b/d", "picture"]), min_size=1, max_size=4, unique=True
        )
    )
    shapes = st.sampled_from([(1,), (3,), (2, 3)])
    fields = {name: (draw(shapes), draw(st.sampled_from(DTYPES))) for name in names}
    return {
        "lengths": lengths,
        "fields": draw(st.sampled_from([fields, {"": ((3,), draw(st.sampled_from(DTYPES[:2])))}])),
        "action": (draw(st.sampled_from([(1,), (2,)])), draw(st.sampled_from(DTYPES[:2]))),
        "ends": [draw(st.sampled_from(["terminated", "truncated"])) for _ in lengths],
        "tasks": [draw(st.sampled_from(TASKS)) for _ in lengths],
        "success": [draw(st.sampled_from([True, False])) for _ in lengths],
        "seed": draw(st.integers(0, 1000)),
    }


def values(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.rand(1, *shape, generator=generator) < 0.5
    if dtype.is_floating_point:
        return torch.randn(1, *shape, generator=generator).to(dtype)
    return torch.randint(0, 127, (1, *shape), generator=generator).to(dtype)


def record(folder: Any, plan: dict[str, Any]) -> Any:
    generator = torch.Generator().manual_seed(plan["seed"])

    def observation() -> Any:
        made: dict[str, Any] = {}
        for name, (shape, dtype) in plan["fields"].items():
            *above, last = name.split("/")
            node = made
            for part in above:
                node = node.setdefault(part, {})
            node[last] = values(generator, shape, dtype)
        return made.get("", made)

    with RolloutWriter(folder, 1, durable=False) as writer:
        for number, length in enumerate(plan["lengths"]):
            now = observation()
            for frame in range(length):
                following, is_last = observation(), torch.tensor([frame == length - 1])
                end = {plan["ends"][number]: is_last}
                notes = {"task": plan["tasks"][number], "success": plan["success"][number]}
                writer.add(
                    observation=now,
                    action=values(generator, *plan["action"]),
                    reward=torch.randn(1, generator=generator),
                    **end,
                    **({"final_observation": following, "episode": notes} if is_last else {}),
                )
                now = following
    return rollout_data.open(folder)


def flat(fields: Any) -> dict[str, np.ndarray[Any, Any]]:
    actual = fields if isinstance(fields, dict) else {"": fields}
    return {name: np.asarray(value) for name, value in actual.items()}


def check_same(mine: Any, theirs: Any, where: str) -> None:
    expected, actual = flat(mine), flat(theirs)
    if list(expected) == [""] and len(actual) == 1:  # it has a name there
        actual = {"": next(iter(actual.values()))}
    assert expected.keys() == actual.keys(), where
    for name, tensor in expected.items():
        assert tensor.dtype == actual[name].dtype and tensor.shape == actual[name].shape, (
            where,
            name,
            tensor.dtype,
            actual[name].dtype,
        )
        assert tensor.tobytes() == np.ascontiguousarray(actual[name]).tobytes(), (where, name)


@pytest.mark.parametrize("name", READ_BACK)
def test_a_round_trip_through_each_format_restores_the_recording(tmp_path_factory, name):
    numbers = count()

    @settings(max_examples=4, deadline=None)
    @given(plan=recordings())
    def check(plan: dict[str, Any]) -> None:
        folder = tmp_path_factory.mktemp(f"{name}_{next(numbers)}")
        source = record(folder / "ours", plan)
        report = rollout_data.convert(
            source, folder / "theirs.hdf5", name, progress=False, **OPTIONS.get(name, {})
        )
        changes = " ".join(report.changes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RolloutDataWarning)
            back = rollout_data.open(folder / "theirs.hdf5")
        assert [len(item) for item in back] == plan["lengths"] and not report.problems
        for mine, theirs in zip(source, back, strict=True):
            if not any(
                word in changes for word in ("joined", "as float32", "is called", "is read as")
            ):
                check_same(mine.observation, theirs.observation, "observation")
            if "as float32" not in changes:
                check_same(mine.action, theirs.action, "action")
                assert np.asarray(mine.reward).tobytes() == np.asarray(theirs.reward).tobytes()
            if (
                "after the last step is left out" not in changes
                and "joined" not in changes
                and "is called" not in changes
            ):
                check_same(mine.final_observation, theirs.final_observation, "final")
            if "ended" not in changes and "isaaclab" not in back.format:
                assert (mine.terminated, mine.truncated) == (theirs.terminated, theirs.truncated)
            if "texts and metadata" not in changes:
                assert mine.task == theirs.task

    check()
