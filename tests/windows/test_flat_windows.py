"""Joined observations: the components of the windows, concatenated as in `RolloutDataset`."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from rollout_data import RolloutDataset, RolloutWriter, WindowDataset, WindowLoader, WindowMixture
from storage.core.fields import flatten
from storage.errors import UsageError
from tests.files import coded, recorded

SEGMENTS = {"joint": (3,), "depth": (4, 4), "goal": ()}
#: Component -> codec; with none of them the components stand side by side and are joined without a
#: copy.
CODECS = {"raw": {}, "coded": {"depth": "lz4"}, "lossy": {"depth": "normalized_image"}}


def record(folder, codecs, num_envs=2, with_final=True):
    """Record flat observations of 20 values.

    The first encodes env and step. Env 0 ends at step 4.
    """
    values = np.random.default_rng(0).random((11, num_envs, 20)).astype(np.float32)
    values[:, :, 0] = np.arange(11)[:, None] + 100 * np.arange(num_envs)
    with RolloutWriter(
        folder, num_envs, obs_segments=SEGMENTS, obs_disassemble_mapping=codecs, durable=False
    ) as writer:
        for t in range(10):
            done = np.arange(num_envs) == (0 if t == 4 else num_envs)
            options = {"final_observation": values[t + 1] / 2} if with_final else {}
            writer.add(
                observation=values[t], privileged_observation={"a": values[t, :, :2], "b": values[t, :, 5]},
                action=values[t, :, :1], done=done, **options,
            )  # fmt: skip
    return folder


def joined(components, leading=2):
    """Return the expected joined observation, computed by torch."""
    wide = {torch.uint16: torch.int32}
    parts = [part.to(wide.get(part.dtype, part.dtype)) for part in components.values()]
    sizes = [int(np.prod(part.shape[leading:])) for part in parts]
    return torch.cat(
        [
            part.reshape(*part.shape[:leading], size)
            for part, size in zip(parts, sizes, strict=True)
        ],
        -1,
    )


def check_joined(flat, by_name):
    """Check that a flat batch equals a batch by names."""
    assert list(flat) == list(by_name)
    for name, values in by_name.items():
        if not isinstance(values, dict) or "mask" in name:
            continue
        wanted = joined(values)
        assert flat[name].dtype == wanted.dtype and torch.equal(flat[name], wanted), name


@pytest.mark.each_value
@pytest.mark.parametrize("codecs", CODECS)
@pytest.mark.parametrize("padding", ["none", "repeat", "zero"])
@pytest.mark.parametrize("contiguous", [False, True])
def test_joined_observations_are_the_components_side_by_side(tmp_path, codecs, padding, contiguous):
    record(tmp_path, CODECS[codecs])
    options = {"length": 3, "padding": padding, "next_observations": True, "contiguous": contiguous}
    by_name, flat = (
        WindowDataset(tmp_path, **options, flatten_observations=flag) for flag in (False, True)
    )
    assert len(flat) == len(by_name) > 0
    for windows in (range(len(flat)), [0, 1], []):
        ours, theirs = flat.__getitems__(windows), by_name.__getitems__(windows)
        check_joined(ours, theirs)
        assert torch.equal(ours["mask"], theirs["mask"])
        assert torch.equal(
            ours["next_mask"]["observation"], theirs["next_mask"]["observation"]["joint"]
        )
        assert not contiguous or all(tensor.is_contiguous() for tensor in flatten(ours).values())
    assert flat[0]["observation"].shape == (3, 20) and flat[0][
        "next_privileged_observation"
    ].shape == (3, 3)


def test_adjacent_components_are_joined_without_a_copy(tmp_path):
    batch = WindowDataset(record(tmp_path, {}), 2, flatten_observations=True)[0]
    assert batch["observation"].data_ptr() != batch["action"].data_ptr()
    assert (
        batch["observation"].untyped_storage().data_ptr()
        == batch["action"].untyped_storage().data_ptr()
    )


@pytest.mark.parametrize("codecs", CODECS)
def test_windows_are_as_flat_as_a_stream(tmp_path, codecs):
    record(tmp_path, CODECS[codecs], num_envs=1)
    stream = RolloutDataset(tmp_path, 1, device="cpu").get_batch(5)
    window = WindowDataset(tmp_path, 5, next_observations=True, flatten_observations=True)[0]
    for name in ("observation", "privileged_observation", "next_observation"):
        assert window[name].dtype == getattr(stream, name).dtype
        assert torch.equal(window[name], getattr(stream, name)[:, 0]), name


def test_components_of_several_dtypes_are_promoted_as_in_a_stream(tmp_path):
    coded.record(tmp_path, num_steps=9, num_envs=2)
    by_name, flat = (
        WindowDataset(tmp_path, 9, flatten_observations=flag) for flag in (False, True)
    )
    check_joined(flat.__getitems__([0, 1]), by_name.__getitems__([0, 1]))
    stream = RolloutDataset(tmp_path, 2, device="cpu").get_batch(9).observation
    assert stream.dtype == torch.float64 and torch.equal(
        flat.__getitems__([0, 1])["observation"].transpose(0, 1), stream
    )


def test_chosen_components_are_joined_in_order_and_flat_recordings_do_not_change(tmp_path):
    record(tmp_path / "a", {})
    fields = ["observation/goal", "observation/joint", "action"]
    dataset = WindowDataset(tmp_path / "a", 2, fields=fields, flatten_observations=True)
    whole = WindowDataset(tmp_path / "a", 2, flatten_observations=True)
    assert torch.equal(dataset[1]["observation"], whole[1]["observation"][:, [0, 1, 2, 19]])
    recorded.record(tmp_path / "b", [5])
    plain, flat = (
        WindowDataset(tmp_path / "b", 2, flatten_observations=flag) for flag in (False, True)
    )
    assert torch.equal(plain[0]["observation"], flat[0]["observation"]) and plain.form == flat.form


def test_components_that_are_joined_have_one_mask_and_the_same_frames(tmp_path):
    record(tmp_path, {"depth": "lz4"})
    delta = {"observation": [-1, 0], "action": range(3)}
    options = {"padding": "zero", "next_observations": True}
    flat = WindowDataset(tmp_path, delta=delta, flatten_observations=True, **options)
    by_name = WindowDataset(tmp_path, delta=delta, **options)
    ours, theirs = (dataset.__getitems__(range(len(flat))) for dataset in (flat, by_name))
    check_joined(ours, theirs)
    assert torch.equal(ours["mask"]["observation"], theirs["mask"]["observation"]["goal"])
    assert ours["mask"]["action"].shape[1] == 3 and not ours["mask"]["observation"].all()
    delta = {"observation": [-1, 0], "observation/depth": [0]}
    wanted = r"'observation/depth' has \[0\], and 'observation/\w+' has \[-1, 0\]"
    with pytest.raises(UsageError, match=wanted):
        WindowDataset(tmp_path, delta=delta, flatten_observations=True)
    assert WindowDataset(tmp_path, delta=delta)[0]["observation"]["depth"].shape == (1, 4, 4)


@pytest.mark.parametrize("codecs", ["raw", "coded"])
def test_workers_loaders_and_mixtures_read_joined_observations(tmp_path, codecs):
    for name in ("a", "b"):
        record(tmp_path / name, CODECS[codecs], num_envs=2 if name == "a" else 3)
    options = {
        "length": 3,
        "padding": "repeat",
        "next_observations": True,
        "flatten_observations": True,
    }
    first, second = (WindowDataset(tmp_path / name, **options) for name in ("a", "b"))
    mixture = WindowMixture([first, second])
    wanted = torch.cat(
        [dataset.__getitems__(range(len(dataset)))["observation"] for dataset in (first, second)]
    )
    assert wanted.shape[1:] == (3, 20)
    size = len(first) - 1  # a batch of both members
    loaders = [DataLoader(mixture, size, collate_fn=mixture.collate, num_workers=n) for n in (0, 1)]
    for loader in (*loaders, WindowLoader(mixture, size, shuffle=False)):
        assert torch.equal(torch.cat([batch["observation"] for batch in loader]), wanted)
    again = pickle.loads(pickle.dumps(first))
    assert torch.equal(again[1]["next_observation"], first[1]["next_observation"])
    with pytest.raises(UsageError, match="observation joined"):
        WindowMixture(
            [first, WindowDataset(tmp_path / "b", **{**options, "flatten_observations": False})]
        )


def test_joining_changes_neither_statistics_nor_splits(tmp_path):
    record(tmp_path, {"depth": "lz4"})
    options = {"split": "train", "validation_fraction": 0.3}
    by_name, flat = (
        WindowDataset(tmp_path, 2, flatten_observations=flag, **options) for flag in (False, True)
    )
    ours, theirs = (
        dataset.statistics(progress=False, use_cache=False) for dataset in (flat, by_name)
    )
    assert list(ours) == list(theirs) and "observation/joint" in ours
    assert all(np.array_equal(ours[name].mean, theirs[name].mean) for name in ours)
    assert flat.trajectories.tolist() == by_name.trajectories.tolist()
