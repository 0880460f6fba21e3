"""Visuomotor cloning runs with either camera and prints its results.

Its full run shows how well it learns.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_data import WindowDataset
from tests.examples.running import EXAMPLES, run, started


def test_the_example_prints_sizes_throughput_and_returns_and_draws_them(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    pytest.importorskip("matplotlib")
    text = run(tmp_path, "visuomotor_cloning.py", "--quick", "--camera", "synthetic")
    assert "images by the synthetic renderer" in text
    rows = {line.split("  ")[0]: line for line in text.splitlines()}
    for name, error in (("rgb", "none"), ("depth", " m "), ("segmentation", "none")):
        before, after, ratio = map(float, re.findall(r"[\d.]+", rows[name])[:3])
        assert abs(before - ratio * after) < 0.1 * before and ratio > 4 and error in rows[name]
    for name in (
        "RolloutWriter, raw",
        "RolloutWriter, coded",
        "WindowLoader, raw",
        "WindowLoader, coded",
    ):
        assert all(float(figure.replace(",", "")) > 0 for figure in rows[name].split()[-2:])
    shares = {
        name: int(rows[name].split()[-1][:-1])
        for name in ("random", "expert", "clone, from images")
    }
    assert (shares["random"], shares["expert"]) == (0, 100) and shares["clone, from images"] <= 100
    assert rows["expert"].split()[-2] == "8"
    assert (tmp_path / "demo" / "visuomotor_cloning.png").stat().st_size > 30_000
    dataset = WindowDataset(
        tmp_path / "demo" / "visuomotor" / "data", delta={"observation": (-2, 0)}, padding="repeat"
    )
    window = dataset[1]["observation"]
    assert (
        len(dataset) == 16 * 50
        and window["rgb"].shape == (2, 64, 64, 3)
        and window["depth"].shape == (2, 64, 64)
    )


@pytest.fixture
def cameras(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("gymnasium")
    pytest.importorskip("mujoco")
    monkeypatch.syspath_prepend(EXAMPLES)
    import arm_cameras

    return arm_cameras


def test_the_expert_reaches_its_targets(cameras: Any) -> None:
    import visuomotor_cloning as example

    envs = example.make_arms(20, 1_000_000)
    returns = np.sum(
        [example.step(envs, example.expert(envs)) for _ in range(example.NUM_STEPS)], axis=0
    )
    assert returns.mean() > -5  # random actions reach -43
    tips, targets = (
        [env.unwrapped.get_body_com(name) for env in envs] for name in ("fingertip", "target")
    )
    assert np.linalg.norm(np.subtract(tips, targets), axis=-1).max() < 0.01


LOOK = """
import numpy as np
from arm_cameras import make_camera
from visuomotor_cloning import make_arms
camera, envs = make_camera({kind!r}), make_arms(3, 0)
images = camera(envs)
about = {{name: (image.dtype.name, image.shape) for name, image in images.items()}}
assert about == {{
    "rgb": ("uint8", (3, 64, 64, 3)), "depth": ("float32", (3, 64, 64)), "segmentation": ("int16", (3, 64, 64))
}}, about
target = envs[0].unwrapped.model.geom("target").id
ground = envs[0].unwrapped.model.geom("ground").id
for env, rgb, depth, what in zip(envs, *images.values()):
    rows, columns = np.nonzero(what == target)
    x, y = env.unwrapped.data.qpos[2:4]
    assert np.sign(columns.mean() - 31.5) == np.sign(x) and np.sign(31.5 - rows.mean()) == np.sign(y)
    red, green = rgb[what == target][..., 0].mean(), rgb[what == target][..., 1].mean()
    assert red > green + 50 and 0.4 < depth.min() < depth.max() < 1
    nearest = [depth[rows, column][what[rows, column] == target].min() for column in columns[:1]]
    assert nearest[0] < depth[what == ground].max()
again = camera(envs)
assert all(np.array_equal(image, again[name]) for name, image in images.items())
print(camera.name)
"""


@pytest.mark.parametrize("kind", ["auto", "synthetic"])
def test_cameras_show_the_target_where_it_is(tmp_path: Path, cameras: Any, kind: str) -> None:
    # In another process, because MuJoCo selects its renderer when it is imported.
    assert run(tmp_path, "-c", LOOK.format(kind=kind)).startswith(
        ("MuJoCo, drawn by", "the synthetic renderer")
    )


def test_the_synthetic_renderer_replaces_mujoco_without_a_display(
    tmp_path: Path, cameras: Any
) -> None:
    name = run(tmp_path, "-c", LOOK.format(kind="auto"), MUJOCO_GL="off")
    assert name.startswith("the synthetic renderer")
    done = started(
        tmp_path, "visuomotor_cloning.py", "--quick", "--camera", "mujoco", MUJOCO_GL="off"
    )
    assert (
        done.returncode == 1
        and "take --camera synthetic" in done.stderr
        and not (tmp_path / "demo").exists()
    )
