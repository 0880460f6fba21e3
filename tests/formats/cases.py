"""Files of other systems with their expected content:
`tests/data/formats/<folder>/<name>.case.json` and `.expected.npz`.

A case names its file (`path`, below `tests/data/formats`), its `format`, the arguments of `open`,
and of each episode T, kind of end and metadata; the arrays are `<episode>/obs/<field>`, `/action`,
`/reward` and `/final/<field>`. `tol` holds the fields that were stored with loss: the mean of each
half of a picture, left and right, is off by at most that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollout_data
from rollout_data.formats.registry import FORMATS

ROOT = Path(__file__).parents[1] / "data" / "formats"
CASES = sorted(ROOT.glob("*/*.case.json"))
#: Format -> packages of extras that its files may need.
PACKAGES = {
    "aloha": ("PIL",),
    "lerobot": ("pyarrow", "PIL", "av"),
    "mcap": ("lz4", "zstandard"),
    "minari": ("pyarrow", "PIL"),
    "rlds": ("PIL",),
    "zarr": ("numcodecs",),
}
#: Kind of end -> (terminated, truncated).
ENDS = {"terminated": (True, False), "truncated": (False, True), "unknown": (None, None)}


def load(path: Path) -> dict[str, Any]:
    """Read a case. Skip the test if its format or a needed package is missing."""
    case: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if not set(case["format"]) & set(FORMATS):
        pytest.skip(f"{case['format'][0]} is not read")
    for package in {item for name in case["format"] for item in PACKAGES.get(name, ())}:
        pytest.importorskip(package, reason=f"its files need the package {package}")
    return case


def open_case(case: Mapping[str, Any]) -> rollout_data.Recording:
    """Open the files of a case."""
    return rollout_data.open(ROOT / case["path"], **case["open"])


def expected_arrays(case: Mapping[str, Any]) -> list[dict[str, np.ndarray]]:
    """Return our name -> array for each episode: "observation/<field>", "action", "reward",
    "final/<field>".
    """
    actual: list[dict[str, np.ndarray]] = [{} for _ in case["episodes"]]
    with np.load(ROOT / case["expected"]) as arrays:
        for key in arrays.files:
            number, _, name = key.partition("/")
            kind, _, field = name.partition("/")
            field = field.removeprefix("observation.").strip("/")
            ours = {"obs": "observation"}.get(kind, kind) + (f"/{field}" if field else "")
            actual[int(number)][ours] = arrays[key]
    return actual


def named(group: str, value: Any, expected: Mapping[str, Any]) -> dict[str, Any]:
    """Return an observation by flat names. A single array gets the only expected name."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return {f"{group}/{name}": array for name, array in value.items()}
    names = [name for name in expected if name.startswith(group)]
    assert len(names) == 1, f"one array where {names} are expected"
    return {names[0]: value}


def check_array(name: str, got: Any, expected: np.ndarray, tolerance: float | None) -> None:
    """Compare an array: exactly, dtype included, or within the tolerance of a lossy field."""
    got = np.asarray(got)
    assert got.shape == expected.shape, name
    assert got.dtype == expected.dtype, name
    if tolerance is None:
        np.testing.assert_array_equal(got, expected, err_msg=name)
        return
    width_axis = -2 if expected.ndim >= 3 and expected.shape[-1] in (1, 3, 4) else -1
    for mine, theirs in zip(
        np.array_split(got, 2, width_axis), np.array_split(expected, 2, width_axis), strict=True
    ):
        axes = tuple(range(1, mine.ndim))
        off = np.abs(mine.mean(axes, dtype=np.float64) - theirs.mean(axes, dtype=np.float64))
        assert off.max() <= tolerance, f"{name} is off by {off.max()}"


def check_case(case: Mapping[str, Any], recording: rollout_data.Recording) -> None:
    """Compare everything in a case with the opened recording."""
    assert recording.format in case["format"]
    assert len(recording) == len(case["episodes"])
    tolerances = {name.removeprefix("observation."): value for name, value in case["tol"].items()}
    for about, expected, episode in zip(
        case["episodes"], expected_arrays(case), recording, strict=True
    ):
        got = {
            **named("observation", episode.observation, expected),
            **named("final", episode.final_observation, expected),
            **({} if episode.action is None else named("action", episode.action, expected)),
            **({} if episode.reward is None else {"reward": episode.reward}),
        }
        assert set(got) == set(expected)
        for name, array in expected.items():
            check_array(name, got[name], array, tolerances.get(name.partition("/")[2]))
        assert len(episode) == episode.length == about["T"]
        assert (episode.terminated, episode.truncated) == ENDS[about["end"]]
        assert (episode.reward is not None, episode.action is not None) == (
            about["reward"],
            about["action"],
        )
        assert (episode.final_observation is not None) == about["final"]
        assert {name: episode.metadata.get(name) for name in about["meta"]} == about["meta"]
