"""Statistics equal numpy's; their cache is used only for what it was made from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_data import RolloutWriter, WindowDataset
from rollout_data.windows import normalization
from rollout_data.windows.quantiles import ByteCounts, KeptRows, QuantileSketch
from storage.errors import UsageError
from tests.files import coded, recorded

LEVELS = (0.0, 0.01, 0.37, 0.5, 0.99, 1.0)


def record(folder, num_steps=60, num_envs=3):
    rng = np.random.default_rng(0)
    arrays = {
        "state": rng.normal(3, 5, (num_steps, num_envs, 4)).astype(np.float32),
        "wide": rng.normal(1e6, 1, (num_steps, num_envs, 2)),
        "rgb": rng.integers(0, 256, (num_steps, num_envs, 6, 5, 3), np.uint8),
        "depth": rng.random((num_steps, num_envs, 1, 4, 5), np.float32),
        "plane": rng.random((num_steps, num_envs, 4, 5), np.float32),
        "steps": rng.integers(-100, 2**40, (num_steps, num_envs, 2)),
    }
    reward = rng.random((num_steps, num_envs)).astype(np.float32)
    with RolloutWriter(folder, num_envs, durable=False, writer_name="w") as writer:
        for step in range(num_steps):
            done = np.full(num_envs, step % 20 == 19)
            writer.add(
                observation={name: array[step] for name, array in arrays.items()},
                action=np.full((num_envs, 2), 7, np.float32),
                reward=reward[step],
                done=done,
            )
            if step % 7 == 6:
                writer.flush()
    return {**{f"observation/{name}": array for name, array in arrays.items()}, "reward": reward}


AXES = {"rgb": (0, 1, 2, 3), "depth": (0, 1, 3, 4), "plane": (0, 1, 2, 3)}


@pytest.mark.parametrize("portion_bytes", [1, 700, 8 << 20])
def test_statistics_equal_those_of_numpy(tmp_path, monkeypatch, portion_bytes):
    monkeypatch.setattr(normalization, "_PORTION_BYTES", portion_bytes)
    arrays = record(tmp_path)
    found = WindowDataset(tmp_path, 4).statistics(LEVELS, progress=False, use_cache=False)
    assert set(found) == {*arrays, "action"}
    for name, array in arrays.items():
        one, axes = found[name], AXES.get(name.rpartition("/")[2], (0, 1))
        wide = array.astype(np.float64)
        keep = {"axis": axes, "keepdims": True}
        expected = {
            "mean": wide.mean(**keep),
            "std": wide.std(**keep),
            "min": wide.min(**keep),
            "max": wide.max(**keep),
        }
        for part, value in expected.items():
            result = getattr(one, part)
            assert result.shape == value.shape[2:]
            assert result.dtype == (torch.float64 if name.endswith(("wide", "steps")) else torch.float32)
            np.testing.assert_allclose(result.numpy(), value[0, 0], rtol=1e-6, err_msg=f"{name} {part}")
        quantiles = np.quantile(wide, LEVELS, **keep)[:, 0, 0]
        np.testing.assert_allclose(one.quantiles.numpy(), quantiles, rtol=1e-6, err_msg=name)
        assert one.quantile_error == 0 and one.num_frames == 180 and one.levels == LEVELS
    assert found["action"].std.tolist() == [0, 0] and found["action"].mean.tolist() == [7, 7]


@pytest.mark.filterwarnings("ignore:invalid value")  # of numpy, about the infinities below
@pytest.mark.parametrize("portion_bytes", [1, 100, 8 << 20])
@pytest.mark.parametrize("exact_bytes", [0, 64 << 20])
def test_values_that_are_not_finite_are_taken_as_numpy_takes_them(tmp_path, monkeypatch, portion_bytes, exact_bytes):
    monkeypatch.setattr(normalization, "_PORTION_BYTES", portion_bytes)
    monkeypatch.setattr("rollout_data.windows.quantiles.EXACT_BYTES", exact_bytes)
    monkeypatch.setattr(QuantileSketch.__init__, "__defaults__", (8,))
    values = np.random.default_rng(0).random((60, 1, 5))
    values[3, 0, 0] = np.inf
    values[[5, 50], 0, 1] = np.inf, -np.inf
    values[7, 0, 2] = np.nan
    values[9, 0, 3] = -np.inf
    with RolloutWriter(tmp_path, 1, durable=False) as writer:
        for step, row in enumerate(values):
            done = [step == len(values) - 1]
            writer.add(observation=row, action=np.zeros((1, 1)), reward=np.zeros(1), done=done)
    found = WindowDataset(tmp_path, fields=["observation"]).statistics((0.5,), progress=False, use_cache=False)
    one = found["observation"]
    for part in ("mean", "std", "min", "max"):
        np.testing.assert_allclose(getattr(one, part).numpy(), getattr(values, part)(axis=0)[0], err_msg=part)
    assert torch.isnan(one.quantiles[0]).tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("portion_bytes", [1, 100, 8 << 20])
def test_constants_have_a_deviation_of_zero(tmp_path, monkeypatch, portion_bytes):
    monkeypatch.setattr(normalization, "_PORTION_BYTES", portion_bytes)
    values = np.array([[0.1, 3.3e-5, -0.7, 1e6 + 0.1, 1e200]])
    with RolloutWriter(tmp_path, 1, durable=False) as writer:
        for step in range(1000):
            writer.add(observation=values, action=np.zeros((1, 1)), reward=np.zeros(1), done=[step == 999])
    one = WindowDataset(tmp_path, fields=["observation"]).statistics(progress=False, use_cache=False)["observation"]
    assert one.std.tolist() == [0] * 5
    np.testing.assert_allclose(one.mean.numpy(), values[0], rtol=1e-12)


def test_a_split_has_statistics_of_its_own_frames(tmp_path):
    recorded.record(tmp_path, [4, 9, 6, 5], num_envs=2)
    for split in ("train", "validation"):
        dataset = WindowDataset(tmp_path, split=split, validation_fraction=0.5)
        values = dataset.__getitems__(range(len(dataset)))["observation"][:, 0].double()
        found = dataset.statistics(progress=False)["observation"]
        torch.testing.assert_close(found.mean.double(), values.mean(0), rtol=1e-6, atol=0)
        torch.testing.assert_close(found.std.double(), values.std(0, correction=0), rtol=1e-6, atol=0)


def test_coded_components_are_decoded_for_statistics(tmp_path):
    coded.record(tmp_path)
    dataset = WindowDataset(tmp_path, fields=["observation/depth", "observation/image"])
    values = dataset.__getitems__(range(len(dataset)))["observation"]
    found = dataset.statistics(progress=False)
    for name in ("depth", "image"):
        torch.testing.assert_close(
            found[f"observation/{name}"].mean.flatten()[0], values[name].mean(), rtol=1e-5, atol=0
        )


# The cache


@pytest.fixture
def counted(monkeypatch):
    calls, compute = [], normalization._compute
    monkeypatch.setattr(normalization, "_compute", lambda *args: (calls.append(1), compute(*args))[1])
    return calls


def test_the_cache_is_used_until_the_data_or_the_question_change(tmp_path, counted):
    recorded.record(tmp_path, [4, 9], writer_name="w")
    dataset = WindowDataset(tmp_path, 2)
    first = dataset.statistics(progress=False)
    again = WindowDataset(tmp_path, 3).statistics(progress=False)  # other windows, the same frames
    assert len(counted) == 1
    for name, one in first.items():
        for part in ("mean", "std", "min", "max", "quantiles"):
            assert torch.equal(getattr(one, part), getattr(again[name], part))
        assert (one.levels, one.quantile_error, one.num_frames) == (
            again[name].levels, again[name].quantile_error, again[name].num_frames,
        )  # fmt: skip
    dataset.statistics((0.5,), progress=False)
    WindowDataset(tmp_path, split="train", validation_fraction=0.5).statistics(progress=False)
    assert len(counted) == 3
    dataset.statistics(progress=False)
    assert len(counted) == 3
    recorded.record(tmp_path, [5], writer_name="w", first_number=7)
    assert WindowDataset(tmp_path).statistics(progress=False)["reward"].max == 7004
    assert len(counted) == 4


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "folder", "garbage"])
def test_a_damaged_cache_is_made_anew(tmp_path, counted, damage):
    recorded.record(tmp_path, [4, 9])
    dataset = WindowDataset(tmp_path)
    first = dataset.statistics(progress=False)
    (path,) = tmp_path.glob(".statistics_*")
    content = path.read_bytes()
    if damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        middle = content.index(b"mean.npy") + 100
        damaged = {
            "cut": content[: len(content) // 2],
            "flip": content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :],
            "empty": b"",
            "garbage": b"\0" * 500,
        }
        path.write_bytes(damaged[damage])
    assert torch.equal(dataset.statistics(progress=False)["observation"].mean, first["observation"].mean)
    assert len(counted) == 2


def test_a_folder_for_reading_only_costs_time_and_nothing_else(tmp_path, counted, monkeypatch):
    recorded.record(tmp_path, [4, 9])

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(normalization, "replace_file", refuse)
    dataset = WindowDataset(tmp_path)
    first, second = (dataset.statistics(progress=False)["reward"].mean for _ in range(2))
    assert torch.equal(first, second) and len(counted) == 2
    assert not list(tmp_path.glob(".statistics*"))


@pytest.mark.filterwarnings("ignore:there is no window")
def test_wrong_levels_and_no_frames_are_refused(tmp_path):
    recorded.record(tmp_path, [4])
    for wrong in ([1.5], 0.5, [0.5, "a"], [None], [float("nan")]):
        with pytest.raises(UsageError, match="levels in \\[0, 1\\]"):
            WindowDataset(tmp_path).statistics(wrong)
    with pytest.raises(UsageError, match="at least one frame"):
        WindowDataset(tmp_path, split="validation", validation_fraction=0).statistics()


# Quantiles


@settings(max_examples=30)
@given(
    num=st.integers(1, 3000),
    num_rows=st.integers(2, 64),
    portion=st.integers(1, 500),
    kind=st.sampled_from(["normal", "sorted", "few"]),
    seed=st.integers(0, 99),
)
def test_the_sketch_keeps_its_error_bound(num, num_rows, portion, kind, seed):
    rng = np.random.default_rng(seed)
    values = {"normal": rng.normal(size=(num, 2)), "few": rng.integers(0, 4, (num, 2)).astype(float)}
    values["sorted"] = np.sort(values["normal"], axis=0)
    sketch = QuantileSketch(2, np.dtype(np.float64), num_rows)
    for start in range(0, num, portion):
        sketch.add(values[kind][start : start + portion])
    bound = sketch.error * num + 1e-9
    assert sketch.error <= max(0, np.log2(max(1, num / num_rows))) / (2 * num_rows) + 1e-12
    for level, row in zip(LEVELS, sketch.at(LEVELS), strict=True):
        for column, value in enumerate(row):
            own = values[kind][:, column]
            below, upto = (own < value).sum(), (own <= value).sum()
            assert below - bound <= level * num <= upto + bound or (level == 0 and below <= bound)


@settings(max_examples=30)
@given(num=st.integers(1, 200), is_signed=st.booleans(), seed=st.integers(0, 99))
def test_exact_quantiles_equal_those_of_numpy(num, is_signed, seed):
    dtype = np.dtype(np.int8 if is_signed else np.uint8)
    info = np.iinfo(dtype)
    values = np.random.default_rng(seed).integers(info.min, info.max, (num, 2), dtype, endpoint=True)
    expected = np.quantile(values.astype(np.float64), LEVELS, axis=0)
    for found in (ByteCounts(2, dtype), KeptRows(num, 2, dtype)):
        found.add(values[: num // 3])
        found.add(values[num // 3 :])
        np.testing.assert_allclose(found.at(LEVELS), expected, atol=1e-9)


def test_large_fields_get_a_sketch_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("rollout_data.windows.quantiles.EXACT_BYTES", 1000)
    arrays = record(tmp_path)
    found = WindowDataset(tmp_path).statistics((0.5,), progress=False)["observation/state"]
    assert found.quantile_error == 0  # less than one buffer
    expected = np.sort(arrays["observation/state"].reshape(-1, 4), axis=0)[89]
    np.testing.assert_array_equal(found.quantiles[0].numpy(), expected)
