"""Statistics equal those of numpy. Their cache is used only for the same data."""

from __future__ import annotations

import resource

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_data import RolloutWriter, WindowDataset
from rollout_data.sources.recordings.field_statistics import (
    ByteCounts,
    QuantileSketch,
    quantiles_of,
)
from storage.errors import UsageError
from tests.files import coded, recorded
from tests.formats import folders

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


def test_statistics_equal_those_of_numpy(tmp_path):
    arrays = record(tmp_path)
    actual = WindowDataset(tmp_path, 4).statistics(LEVELS, progress=False, use_cache=False)
    assert set(actual) == {*arrays, "action"}
    for name, array in arrays.items():
        item, axes = actual[name], AXES.get(name.rpartition("/")[2], (0, 1))
        wide = array.astype(np.float64)
        keep = {"axis": axes, "keepdims": True}
        expected = {
            "mean": wide.mean(**keep),
            "std": wide.std(**keep),
            "min": wide.min(**keep),
            "max": wide.max(**keep),
        }
        for part, value in expected.items():
            result = getattr(item, part)
            assert result.shape == value.shape[2:]
            assert result.dtype == (
                torch.float64 if name.endswith(("wide", "steps")) else torch.float32
            )
            np.testing.assert_allclose(
                result.numpy(), value[0, 0], rtol=1e-6, err_msg=f"{name} {part}"
            )
        quantiles = np.quantile(wide, LEVELS, **keep)[:, 0, 0]
        np.testing.assert_allclose(item.quantiles.numpy(), quantiles, rtol=1e-6, err_msg=name)
        assert item.quantile_error == 0 and item.num_frames == 180 and item.levels == LEVELS
    assert actual["action"].std.tolist() == [0, 0] and actual["action"].mean.tolist() == [7, 7]


CONSTANTS = np.array([0.1, 3.3e-5, -0.7, 1e6 + 0.1, 1e200])


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """More frames than are read at once, 24 MB: random values, some values that are not finite, and
    constants.
    """
    folder, shape = tmp_path_factory.mktemp("long"), (1500, 4)
    rng = np.random.default_rng(0)
    odd = rng.random((*shape, 5))
    odd[3, 0, 0] = np.inf
    odd[[5, 1400], 0, 1] = np.inf, -np.inf
    odd[7, 0, 2] = np.nan
    odd[900, 0, 3] = -np.inf
    arrays = {"filling": rng.normal(3, 5, (*shape, 480)), "odd": odd}
    done = np.zeros(shape, bool)
    done[-1] = True
    with RolloutWriter(folder, shape[1], durable=False) as writer:
        action = np.broadcast_to(CONSTANTS, (*shape, 5))
        writer.add_rollout(
            observation=arrays, action=action, reward=np.zeros(shape, np.float32), done=done
        )
    actual = WindowDataset(folder).statistics(LEVELS, progress=False, use_cache=False)
    return {name: array.reshape(-1, array.shape[-1]) for name, array in arrays.items()}, actual


def test_statistics_of_several_portions_equal_those_of_numpy(long):
    arrays, actual = long
    item, values = actual["observation/filling"], arrays["filling"]
    for part in ("mean", "std", "min", "max"):
        np.testing.assert_allclose(
            getattr(item, part).numpy(), getattr(values, part)(axis=0), rtol=1e-9, err_msg=part
        )
    np.testing.assert_allclose(
        item.quantiles.numpy(), np.quantile(values, LEVELS, axis=0), rtol=1e-9
    )


@pytest.mark.filterwarnings("ignore:invalid value")  # of numpy, about the infinities
def test_statistics_of_non_finite_values_equal_those_of_numpy(long):
    arrays, actual = long
    item = actual["observation/odd"]
    for part in ("mean", "std", "min", "max"):
        np.testing.assert_allclose(
            getattr(item, part).numpy(), getattr(arrays["odd"], part)(axis=0), err_msg=part
        )
    assert torch.isnan(item.quantiles[LEVELS.index(0.5)]).tolist() == [
        False,
        False,
        True,
        False,
        False,
    ]


def test_a_sketch_of_non_finite_values_equals_numpy():
    values = np.random.default_rng(0).random((60, 3))
    values[[5, 50], 0], values[7, 1] = (np.inf, -np.inf), np.nan
    sketch = QuantileSketch(3, values.dtype, 8)
    sketch.add(values)
    assert np.isnan(sketch.at([0.5])).tolist() == [[False, True, False]]


def test_constants_have_a_deviation_of_zero(long):
    item = long[1]["action"]
    assert item.std.tolist() == [0] * 5
    np.testing.assert_allclose(item.mean.numpy(), CONSTANTS, rtol=1e-12)


def test_a_split_has_statistics_of_its_own_frames(tmp_path):
    recorded.record(tmp_path, [4, 9, 6, 5], num_envs=2)
    for split in ("train", "validation"):
        dataset = WindowDataset(tmp_path, split=split, validation_fraction=0.5)
        values = dataset.__getitems__(range(len(dataset)))["observation"][:, 0].double()
        actual = dataset.statistics(progress=False)["observation"]
        torch.testing.assert_close(actual.mean.double(), values.mean(0), rtol=1e-6, atol=0)
        torch.testing.assert_close(
            actual.std.double(), values.std(0, correction=0), rtol=1e-6, atol=0
        )


def test_coded_components_are_decoded_for_statistics(tmp_path):
    coded.record(tmp_path)
    dataset = WindowDataset(tmp_path, fields=["observation/depth", "observation/image"])
    values = dataset.__getitems__(range(len(dataset)))["observation"]
    actual = dataset.statistics(progress=False)
    for name in ("depth", "image"):
        torch.testing.assert_close(
            actual[f"observation/{name}"].mean.flatten()[0], values[name].mean(), rtol=1e-5, atol=0
        )


# The cache


@pytest.fixture
def is_computed(capsys):
    """Return whether statistics were computed, which shows a progress bar."""

    def ask(dataset, *args):
        capsys.readouterr()
        dataset.statistics(*args)
        return "statistics" in capsys.readouterr().err

    return ask


def test_the_cache_is_used_until_the_data_or_the_arguments_change(tmp_path, is_computed):
    recorded.record(tmp_path, [4, 9], writer_name="w")
    dataset = WindowDataset(tmp_path, 2)
    first = dataset.statistics(progress=False)
    other_windows = WindowDataset(tmp_path, 3)
    assert not is_computed(other_windows)
    for name, item in other_windows.statistics().items():
        for part in ("mean", "std", "min", "max", "quantiles"):
            assert torch.equal(getattr(item, part), getattr(first[name], part))
        same = ("levels", "quantile_error", "num_frames")
        assert [getattr(item, part) for part in same] == [
            getattr(first[name], part) for part in same
        ]
    train = WindowDataset(tmp_path, split="train", validation_fraction=0.5)
    assert is_computed(dataset, (0.5,)) and is_computed(train)
    assert not is_computed(dataset) and not is_computed(dataset, (0.5,)) and not is_computed(train)
    recorded.record(tmp_path, [5], writer_name="w", first_number=7)
    grown = WindowDataset(tmp_path)
    assert is_computed(grown) and grown.statistics()["reward"].max == 7004


def test_the_cache_of_other_formats_is_in_the_cache_folder_of_the_user(
    tmp_path, is_computed, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = folders.NaiveFolder(tmp_path / "data")
    folder.chunk(0, 0, 6, done=True)
    files = sorted(folder.data_dir.rglob("*"))
    assert is_computed(WindowDataset(folder.data_dir)) and not is_computed(
        WindowDataset(folder.data_dir)
    )
    assert sorted(folder.data_dir.rglob("*")) == files
    assert len(list((tmp_path / "cache" / "rollout_data").iterdir())) == 1


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "folder", "garbage"])
def test_a_damaged_cache_is_rebuilt(tmp_path, is_computed, damage):
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
    assert is_computed(dataset)
    assert torch.equal(
        dataset.statistics(progress=False)["observation"].mean, first["observation"].mean
    )


def test_an_unwritable_cache_changes_no_result(tmp_path, is_computed):
    recorded.record(tmp_path, [4, 9])
    dataset = WindowDataset(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # as on a full disk
    try:
        assert is_computed(dataset) and is_computed(dataset)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.glob(".statistics*"))


@pytest.mark.filterwarnings("ignore:there is no window")
def test_wrong_levels_and_empty_data_raise(tmp_path):
    recorded.record(tmp_path, [4])
    for wrong in ([1.5], 0.5, [0.5, "a"], [None], [float("nan")]):
        with pytest.raises(UsageError, match="levels in \\[0, 1\\]"):
            WindowDataset(tmp_path).statistics(wrong)
    with pytest.raises(UsageError, match="the data have no frames"):
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
def test_the_error_of_the_sketch_is_within_its_bound(num, num_rows, portion, kind, seed):
    rng = np.random.default_rng(seed)
    values = {
        "normal": rng.normal(size=(num, 2)),
        "few": rng.integers(0, 4, (num, 2)).astype(float),
    }
    values["sorted"] = np.sort(values["normal"], axis=0)
    sketch = QuantileSketch(2, np.dtype(np.float64), num_rows)
    for start in range(0, num, portion):
        sketch.add(values[kind][start : start + portion])
    bound = sketch.error * num + 1e-9
    assert sketch.error <= max(0, np.log2(max(1, num / num_rows))) / (2 * num_rows) + 1e-12
    if sketch.error == 0:
        np.testing.assert_allclose(
            sketch.at(LEVELS), np.quantile(values[kind], LEVELS, axis=0), atol=1e-12
        )
        return
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
    values = np.random.default_rng(seed).integers(
        info.min, info.max, (num, 2), dtype, endpoint=True
    )
    expected = np.quantile(values.astype(np.float64), LEVELS, axis=0)
    for actual in (ByteCounts(2, dtype), QuantileSketch(2, dtype, num)):
        actual.add(values[: num // 3])
        actual.add(values[num // 3 :])
        np.testing.assert_allclose(actual.at(LEVELS), expected, atol=1e-9)


def test_large_fields_use_a_sketch_with_bounded_memory():
    dtype = np.dtype(np.float32)
    portion = np.zeros((1 << 20, 2), dtype)
    for num_rows, is_exact in ((8 << 20, True), ((8 << 20) + 1, False)):  # 64 MiB, and more
        actual = quantiles_of(num_rows, 2, dtype)
        for start in range(0, num_rows, len(portion)):
            actual.add(portion[: num_rows - start])
        assert (actual.error == 0) == is_exact
    assert isinstance(quantiles_of(1 << 40, 2, np.dtype(np.uint8)), ByteCounts)
