"""Normalizer: normalizing, its inverse, arguments, errors, and its state in a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import rollout_data
from rollout_data import Normalizer, RolloutDataset, RolloutWriter, WindowDataset, WindowMixture
from storage.errors import MissingFieldError, UsageError

MODES = ("mean_std", "min_max", "quantiles")


def record(folder: Path, num_steps: int = 50, scale: float = 3.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(num_steps)
    shapes = {"pose": (3,), "height": (), "image": (4, 5, 3)}
    result: dict[str, list[np.ndarray]] = {}
    with RolloutWriter(folder, 2, durable=False) as writer:
        for t in range(num_steps):
            values = {
                name: rng.normal(7, scale, (2, *shape)).astype(np.float32)
                for name, shape in shapes.items()
            }
            values["pose"][:, 1] = 2.5  # a constant feature
            step = {
                "action": rng.normal(size=(2, 2)),
                "reward": rng.normal(size=2).astype(np.float32),
            }
            writer.add(observation=values, **step, mode="slow", done=[t % 9 == 8] * 2)
            for name, value in {**values, **step}.items():
                result.setdefault(name, []).append(value)
    return {name: np.concatenate(values) for name, values in result.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data")
    record(path)
    return path


def batch_of(dataset: WindowDataset) -> dict:
    return dict(dataset.__getitems__(range(len(dataset))))


@pytest.mark.parametrize("mode", MODES)
def test_unnormalize_restores_a_normalized_batch(folder, mode):
    windows = WindowDataset(folder, 1)
    statistics, batch = windows.statistics(quantiles=(0.1, 0.9), progress=False), batch_of(windows)
    scale = Normalizer(statistics, mode)
    normal = scale.normalize(batch)
    back = scale.unnormalize(normal)
    for tensor, name in (
        (batch["observation"][key], f"observation/{key}") for key in ("pose", "height", "image")
    ):
        key, values = name.split("/")[1], normal["observation"][name.split("/")[1]]
        assert values.dtype == tensor.dtype and torch.equal(scale.normalize(tensor, name), values)
        assert torch.allclose(back["observation"][key], tensor, atol=1e-5)
        varying = values[..., 0] if key == "pose" else values
        if mode == "mean_std":
            assert (
                abs(float(varying.mean())) < 1e-5
                and abs(float(varying.std(unbiased=False)) - 1) < 0.1
            )
        elif mode == "min_max":
            assert abs(float(varying.min()) + 1) < 1e-5 and abs(float(varying.max()) - 1) < 1e-5
        elif key != "image":
            assert abs(float((varying.abs() <= 1).float().mean()) - 0.8) < 0.03
    assert normal["observation"]["pose"][..., 1].abs().max() < 1e-5, "a constant is only shifted"
    assert normal["action"].dtype == torch.float64 and torch.allclose(
        back["action"], batch["action"], atol=1e-12
    )
    assert torch.equal(normal["done"], batch["done"]) and torch.equal(normal["mode"], batch["mode"])
    assert torch.equal(batch["observation"]["pose"], batch_of(windows)["observation"]["pose"]), (
        "a new tensor"
    )


def test_each_field_has_its_own_mode_and_other_fields_do_not_change(folder):
    windows = WindowDataset(folder, 1, next_observations=True)
    statistics, batch = windows.statistics(progress=False), batch_of(windows)
    scale = Normalizer(statistics, {"observation/pose": "min_max", "action": "mean_std"})
    normal = scale(batch)
    assert scale.fields == ["observation/pose", "action"] and torch.equal(
        normal["reward"], batch["reward"]
    )
    assert torch.equal(normal["observation"]["height"], batch["observation"]["height"])
    following = batch["next_observation"]["pose"]
    assert torch.equal(
        normal["next_observation"]["pose"], scale.normalize(following, "observation/pose")
    )


def test_components_joined_along_the_last_axis_are_one_tensor(folder, tmp_path):
    with RolloutWriter(tmp_path, 1, durable=False) as writer:
        for t in range(20):
            pose = {"pose": np.full((1, 3), t, np.float32), "height": np.full(1, -t, np.float32)}
            writer.add(observation=pose, action=np.zeros((1, 2), np.float32))
    windows = WindowDataset(tmp_path, 1, flatten_observations=True)
    scale = Normalizer(windows.statistics(progress=False), {"observation": "min_max"})
    joined = scale.normalize(batch_of(windows))["observation"]
    assert joined.shape == (20, 1, 4) and float(joined.min()) == -1 and float(joined.max()) == 1
    assert torch.allclose(
        scale.unnormalize(joined, "observation"), batch_of(windows)["observation"], atol=1e-5
    )
    part = Normalizer(windows.statistics(progress=False), {"observation/height": "min_max"})
    with pytest.raises(UsageError, match="4"):
        part.normalize(batch_of(windows))


class LikeTensorDict:
    """The mapping methods of a TensorDict, in another class."""

    def __init__(self, values):
        self.values_ = values

    def keys(self):
        return self.values_.keys()

    def items(self):
        return self.values_.items()

    def copy(self):
        return LikeTensorDict(dict(self.values_))

    def __getitem__(self, key):
        return self.values_[key]

    def __setitem__(self, key, value):
        self.values_[key] = value


def test_batches_may_be_stream_batches_named_tuples_or_tensordicts(folder):
    dataset = RolloutDataset(folder, 2, device="cpu", flatten_observations=False)
    statistics = dataset.statistics(progress=False)
    windows = WindowDataset(folder, 1).statistics(progress=False)
    assert statistics.keys() == windows.keys() and "mode" not in statistics
    assert all(torch.equal(statistics[name].mean, windows[name].mean) for name in windows)
    scale, batch = Normalizer(statistics), dataset.get_batch(5)
    normal = scale.normalize(batch)
    assert type(normal) is type(batch) and normal.extras.keys() == batch.extras.keys()
    expected = scale.normalize(batch.observation["pose"], "observation/pose")
    assert torch.equal(normal.observation["pose"], expected)
    assert torch.equal(scale.unnormalize(normal).done, batch.done)
    alike = LikeTensorDict(
        {"observation": LikeTensorDict(dict(batch.observation)), "other": torch.ones(2)}
    )
    actual = scale.normalize(alike)
    assert type(actual) is LikeTensorDict and torch.equal(actual["observation"]["pose"], expected)
    assert torch.equal(alike["observation"]["pose"], batch.observation["pose"])


def test_statistics_of_a_mixture_are_those_of_all_frames_of_its_members(folder, tmp_path):
    there = record(tmp_path / "a", 30, 1.0), record(tmp_path / "b", 70, 5.0)
    members = [WindowDataset(tmp_path / name, 2) for name in "ab"]
    statistics = WindowMixture(members, weights=[0.9, 0.1]).statistics(
        use_cache=False, progress=False
    )
    for name in ("pose", "height"):
        values = np.concatenate([item[name] for item in there]).astype(np.float64)
        actual = statistics[f"observation/{name}"]
        np.testing.assert_allclose(actual.mean, values.mean(0), rtol=1e-6)
        np.testing.assert_allclose(actual.std, values.std(0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            actual.quantiles, np.quantile(values, (0.01, 0.99), axis=0), rtol=1e-5
        )
        assert actual.num_frames == 200
    assert Normalizer(rollout_data.open(tmp_path / "a").statistics(progress=False)).fields


def test_statistics_are_buffers_of_the_state_dict(folder):
    windows = WindowDataset(folder, 1)
    scale, batch = Normalizer(windows.statistics(progress=False)), batch_of(windows)
    model = torch.nn.ModuleDict({"scale": scale, "net": torch.nn.Linear(3, 2)})
    assert not list(scale.parameters()) and set(model.state_dict()) > {
        "scale.offset:action",
        "scale.scale:action",
    }
    made = Normalizer.from_state_dict(scale.state_dict())
    assert made.fields == scale.fields and torch.equal(
        made.normalize(batch)["reward"], scale(batch)["reward"]
    )
    assert all(buffer.device.type == "meta" for buffer in scale.to("meta").buffers())


def test_field_names_may_have_dots(tmp_path):
    with RolloutWriter(tmp_path, 1, durable=False) as writer:
        writer.add(
            observation={"a.b": np.ones((1, 2), np.float32)}, action=np.ones((1, 1), np.uint8)
        )
    scale = Normalizer(WindowDataset(tmp_path, 1).statistics(progress=False))
    assert (
        Normalizer.from_state_dict(scale.state_dict()).fields
        == scale.fields
        == ["observation/a.b", "action"]
    )
    moved = scale.normalize(torch.ones(4, 1, dtype=torch.uint8), "action")
    assert moved.dtype == torch.float32 and moved.tolist() == [[0.0]] * 4


def test_fields_that_cannot_be_normalized_raise(folder, tmp_path):
    statistics = WindowDataset(folder, 1).statistics(progress=False)
    with pytest.raises(UsageError, match="'mean_std'"):
        Normalizer(statistics, "mean")
    with pytest.raises(MissingFieldError, match="'observation/pose'"):
        Normalizer(statistics, {"observation/pse": "mean_std"})
    scale = Normalizer(statistics, {"action": "min_max"})
    for value in (
        (torch.ones(2), None),
        (torch.ones(2), "reward"),
        ({"action": torch.ones(2)}, "action"),
        (3, None),
    ):
        with pytest.raises((MissingFieldError, UsageError)):
            scale.normalize(*value)
    with pytest.raises(UsageError, match=r"shape \(4, 3\), expected \[..., 2\]"):
        scale.normalize({"action": torch.ones(4, 3)})
    with pytest.raises(UsageError, match="the mode 'quantiles' requires at least two"):
        Normalizer(WindowDataset(folder, 1).statistics([0.5], progress=False), "quantiles")
    with RolloutWriter(tmp_path, 1, durable=False) as writer:
        writer.add(
            observation=np.full((1, 2), np.nan, np.float32), action=np.ones((1, 1), np.float32)
        )
    with pytest.raises(UsageError, match="are NaN or infinite"):
        Normalizer(WindowDataset(tmp_path, 1).statistics(progress=False))


def held_joint(num_steps: int = 2000) -> np.ndarray:
    """Record an arm whose second joint does not move, whose gripper closes in 0.5 % of the frames,
    and whose last joint is off.
    """
    rng = np.random.default_rng(0)
    is_closed = np.arange(num_steps) % 200 == 7
    columns = (
        rng.normal(-1, 0.1, num_steps),
        1.5691 + rng.normal(0, 0.0003, num_steps),
        is_closed,
        0 * is_closed,
    )
    return np.stack(columns, 1).astype(np.float32)


@pytest.fixture(scope="module")
def arm(tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp("arm")
    with RolloutWriter(path, 1, durable=False) as writer:
        for t, row in enumerate(held_joint()):
            writer.add(
                observation=row[None],
                action=row[None],
                reward=np.zeros(1),
                terminated=[t % 100 == 99],
            )
    return {"path": path, "statistics": WindowDataset(path).statistics(progress=False)}


def test_a_dimension_with_narrow_quantiles_is_only_shifted(arm):
    scale = Normalizer(arm["statistics"], {"action": "quantiles"})
    rows = torch.tensor([[-1.0, 1.5691, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    low, *_, high = arm["statistics"]["action"].quantiles
    normal = scale.normalize(rows, "action")
    middle = (low + high) / 2
    assert torch.allclose(normal[:, 1:], rows[:, 1:] - middle[1:])
    assert torch.allclose(
        normal[:, 0], (rows[:, 0] - middle[0]) / ((high[0] - low[0]) / 2), atol=1e-5
    )
    assert torch.allclose(scale.unnormalize(normal, "action"), rows, atol=1e-6)
    again = Normalizer.from_state_dict(scale.state_dict())
    assert torch.equal(again.normalize(rows, "action"), normal)


@pytest.mark.parametrize("given", [0, 0.0, {"action": 0}, {"action": 1e-4, "observation": 9}])
def test_min_range_overrides_the_default_limit(arm, given):
    scale = Normalizer(arm["statistics"], {"action": "quantiles"}, min_range=given)
    normal = scale.normalize(torch.zeros(1, 4), "action")
    assert float(normal[0, 1]) < -1000 and normal[0, 2:].tolist() == [0, 0], (
        "equal quantiles stay constants"
    )


def test_a_larger_min_range_makes_more_dimensions_constant(arm):
    scale = Normalizer(arm["statistics"], "quantiles", min_range=10)
    low, *_, high = arm["statistics"]["action"].quantiles
    rows = torch.rand(3, 4)
    assert torch.allclose(scale.normalize(rows, "action"), rows - (low + high) / 2)


@pytest.mark.parametrize("wrong", [-1, float("nan"), "a", {"action": None}])
def test_a_wrong_min_range_raises(arm, wrong):
    with pytest.raises(UsageError, match="min_range must be >= 0"):
        Normalizer(arm["statistics"], "quantiles", min_range=wrong)
    with pytest.raises(
        MissingFieldError, match=r"min_range names the field .* The fields are 'action'"
    ):
        Normalizer(arm["statistics"], "quantiles", min_range={"acton": 1})


@pytest.mark.parametrize("mode", MODES)
def test_the_scale_of_a_dimension_does_not_depend_on_the_others(arm, mode):
    together = Normalizer(arm["statistics"], {"action": mode}).normalize(torch.ones(1, 4), "action")
    for dim in range(4):
        alone = {}
        for name in ("mean", "std", "min", "max", "quantiles"):
            alone[name] = getattr(arm["statistics"]["action"], name)[..., dim : dim + 1]
        statistics = replace(arm["statistics"]["action"], **alone)
        normal = Normalizer({"action": statistics}, mode).normalize(torch.ones(1, 1), "action")
        assert torch.equal(normal[0, 0], together[0, dim])


def test_the_doctor_names_a_dimension_with_narrow_quantiles(arm):
    actual = {
        finding.field: finding
        for finding in rollout_data.doctor(arm["path"], only=["VAL18"]).findings
    }
    assert set(actual) == {"action", "observation"} and actual["action"].severity == "info"
    assert "'action'[1] lie within 1.568" in actual["action"].message
    assert actual["action"].evidence["dimensions"] == [1]
