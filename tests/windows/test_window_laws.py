"""Windows equal those that are joined frame by frame, for all trajectories, deltas and paddings."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_data import RolloutDataWarning, RolloutWriter, WindowDataset
from storage.errors import CorruptFileError
from tests.files import coded, recorded
from tests.formats import folders
from tests.windows import model

LENGTHS = st.lists(st.integers(1, 14), min_size=1, max_size=6)
DELTAS = st.lists(st.integers(-4, 5), min_size=1, max_size=4)


def check(
    dataset: WindowDataset,
    done: list[recorded.Recorded],
    deltas: dict[str, list[int]],
    stride,
    padding,
):
    """Compare every window with the model: all windows, each once."""
    by_number = {item.number: item for item in done}
    keys, anchor = dataset.locate(np.arange(len(dataset)))
    numbers = [number for _, number in keys]
    all_deltas = [delta for values in deltas.values() for delta in values]
    wanted = [
        (item.number, t)
        for item in done
        for t in model.anchors(item.length, all_deltas, stride, padding)
    ]
    assert sorted(zip(numbers, anchor.tolist(), strict=True)) == sorted(wanted)
    batch = dataset.__getitems__(list(range(len(dataset))))
    for k, (number, t) in enumerate(zip(numbers, anchor.tolist(), strict=True)):
        item = by_number[number]
        for name, field_deltas in deltas.items():
            expected = model.window(item, t, field_deltas, padding)
            mask = batch["mask"] if isinstance(batch["mask"], torch.Tensor) else batch["mask"][name]
            assert (mask[k].numpy() == expected.mask).all()
            actual = batch[name][k].numpy()
            if name == "action":
                assert (actual == expected.values[:, :2] * 10).all()
            elif name == "privileged_observation":
                assert (actual == -expected.values).all()
            else:
                assert (
                    actual
                    == {"done": expected.done, "timeout": expected.timeout}.get(
                        name, expected.values
                    )
                ).all()
        if "next_observation" in batch:
            rows, mask = model.next_window(item, t, deltas["observation"], padding)
            assert (batch["next_observation"][k].numpy() == rows).all()
            assert (batch["next_mask"]["observation"][k].numpy() == mask).all()


@pytest.mark.filterwarnings("ignore:there is no window")
@settings(max_examples=20)
@given(
    lengths=LENGTHS,
    num_envs=st.integers(1, 3),
    flush_every=st.sampled_from([None, 1, 3]),
    length=st.integers(1, 5),
    stride=st.integers(1, 3),
    padding=st.sampled_from(["none", "repeat", "zero"]),
    ends=st.data(),
    with_final=st.booleans(),
)
def test_windows_equal_those_of_a_naive_model(
    lengths, num_envs, flush_every, length, stride, padding, ends, with_final
):
    ended = [ends.draw(st.sampled_from(["terminated", "truncated"])) for _ in lengths]
    with tempfile.TemporaryDirectory() as folder:
        done = recorded.record(
            Path(folder), lengths, num_envs, ended, with_final, flush_every=flush_every
        )
        dataset = WindowDataset(folder, length, stride, padding=padding, next_observations=True)
        deltas = list(range(length))
        names = ("observation", "action", "privileged_observation", "done", "timeout")
        check(dataset, done, dict.fromkeys(names, deltas), stride, padding)
        assert dataset.num_frames == sum(lengths) and dataset.num_trajectories == len(lengths)


@pytest.mark.filterwarnings("ignore:there is no window")
@settings(max_examples=20)
@given(
    lengths=LENGTHS,
    flush_every=st.sampled_from([None, 2]),
    observation=DELTAS,
    action=DELTAS,
    stride=st.integers(1, 3),
    padding=st.sampled_from(["none", "edge", "zero"]),
    with_final=st.booleans(),
)
def test_delta_lists_equal_those_of_a_naive_model(
    lengths, flush_every, observation, action, stride, padding, with_final
):
    with tempfile.TemporaryDirectory() as folder:
        done = recorded.record(
            Path(folder), lengths, 2, with_final=with_final, flush_every=flush_every
        )
        delta = {"observation": observation, "action": action}
        fields = ["action", "observation", "done"]
        dataset = WindowDataset(
            folder, 2, stride, delta=delta, padding=padding, fields=fields, next_observations=True
        )
        assert list(dataset[0] if len(dataset) else dataset.__getitems__([])) == [
            "observation", "action", "done", "next_observation", "mask", "next_mask",
        ]  # fmt: skip
        check(dataset, done, {**delta, "done": [0, 1]}, stride, padding)


def test_the_last_window_of_a_trajectory_is_included(tmp_path):
    recorded.record(tmp_path, [6])
    dataset = WindowDataset(tmp_path, 2)
    assert dataset.__getitems__(range(len(dataset)))["observation"][:, 0, 1].tolist() == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert len(WindowDataset(tmp_path, 6)) == 1
    with pytest.warns(RolloutDataWarning):
        assert len(WindowDataset(tmp_path, 7)) == 0


def test_an_open_trajectory_has_windows_and_ends_by_timeout(tmp_path):
    done = recorded.record(tmp_path, [4, 5], ends=["terminated", "open"])
    check(
        WindowDataset(tmp_path, 2),
        done,
        {"observation": [0, 1], "done": [0, 1], "timeout": [0, 1]},
        1,
        "none",
    )


def test_a_recording_without_kept_trajectories_has_no_window(tmp_path):
    with RolloutWriter(tmp_path, 1, success_only=True, durable=False) as writer:
        for step in range(4):
            writer.add(
                observation=np.ones((1, 3)),
                action=np.zeros((1, 2)),
                done=[step == 3],
                success=[False],
            )
            writer.flush()
    with pytest.warns(RolloutDataWarning, match="no trajectory is selected"):
        assert len(WindowDataset(tmp_path)) == 0


def test_dropped_and_undecided_trajectories_have_no_windows(tmp_path):
    with RolloutWriter(tmp_path, 3, success_only=True, durable=False) as writer:
        for step in range(8):
            writer.add(
                observation=recorded.observation_of(0, step)[None].repeat(3, 0)
                + np.arange(3)[:, None],
                action=np.zeros((3, 2)),
                done=np.array([step == 3, step == 5, False]),
                timeout=np.array([step == 3, False, False]),
                success=[True, False, True],
            )
            if step % 2:
                writer.flush()
    dataset = WindowDataset(tmp_path, 2)
    # Env 0 until its timeout; env 1 failed, nothing else ended
    assert dataset.num_trajectories == 1
    assert dataset.__getitems__([0, 1, 2])["observation"][:, 0, 1].tolist() == [0, 1, 2]


@pytest.mark.parametrize("padding", ["none", "repeat", "zero"])
def test_windows_of_coded_components_equal_windows_of_raw_components(tmp_path, padding):
    folder, raw = coded.record(tmp_path / "coded"), coded.record(tmp_path / "raw", codecs={})
    options = {
        "delta": {"observation": [-2, 0, 5], "action": range(3)},
        "padding": padding,
        "next_observations": True,
    }
    ours, theirs = (WindowDataset(path, **options) for path in (folder, raw))
    assert len(ours) == len(theirs) > 0
    batch, expected = (dataset.__getitems__(range(len(dataset))) for dataset in (ours, theirs))
    for group in ("observation", "next_observation", "mask", "next_mask"):
        actual, wanted = batch[group], expected[group]
        if group.endswith("mask"):
            actual, wanted = actual["observation"], wanted["observation"]
        for name in coded.COMPONENTS:
            assert actual[name].shape == (
                len(ours),
                3,
                *(coded.COMPONENTS[name][0] if "mask" not in group else ()),
            )
            if name in coded.LOSSY and "mask" not in group:
                torch.testing.assert_close(actual[name], wanted[name], atol=0.01, rtol=0)
            else:
                assert torch.equal(actual[name], wanted[name]), (group, name)


def test_only_the_requested_coded_components_are_read(tmp_path):
    with RolloutWriter(
        tmp_path, 1, obs_disassemble_mapping=dict.fromkeys("ab", "lz4"), durable=False
    ) as writer:
        noise = np.random.default_rng(0).random((2, 6, 1, 32, 32), np.float32)  # is stored as it is
        for step in range(6):
            observation = {"a": noise[0, step], "b": noise[1, step]}
            writer.add(
                observation=observation,
                action=np.zeros((1, 1)),
                reward=np.zeros(1),
                done=[step == 5],
            )
    (path,) = tmp_path.glob("rollout_*")
    content = bytearray(path.read_bytes())
    content[content.index(noise[1, 3].tobytes()[:64]) + 8] ^= 1
    path.write_bytes(bytes(content))
    dataset = WindowDataset(tmp_path, 2, fields=["observation/a", "action"])
    assert torch.equal(dataset[3]["observation"]["a"], torch.from_numpy(noise[0, 3:5, 0]))
    assert set(dataset[3]["observation"]) == {"a"} and "reward" not in dataset[3]
    with pytest.raises(CorruptFileError):
        WindowDataset(tmp_path, 2)[3]


def test_trajectory_folders_have_windows(tmp_path):
    older = folders.NaiveFolder(tmp_path)
    older.chunk(0, 0, 3)
    older.chunk(0, 3, 5, done=True)
    older.chunk(1, 0, 4, done=True)
    dataset = WindowDataset(tmp_path, 4, padding="repeat", fields=["observation", "action", "done"])
    assert len(dataset) == 9
    batch = dataset.__getitems__(range(9))
    lengths = [5, 4] if dataset.locate([0])[0][0][0].endswith("trajectory_0") else [4, 5]
    places = [(n, t) for n in range(2) for t in range((5, 4)[n])] if lengths[0] == 5 else []
    for k, (number, anchor) in enumerate(places):
        frames = np.minimum(np.arange(anchor, anchor + 4), (5, 4)[number] - 1)
        for field, name, width in ((1, "observation", 3), (3, "action", 2)):
            expected = np.concatenate(
                [folders.values(field, number, f, f + 1, width) for f in frames]
            )
            assert (batch[name][k].numpy() == expected).all()
    assert lengths == [5, 4]


def test_several_folders_are_one_dataset(tmp_path):
    first = recorded.record(tmp_path / "a", [4, 6])
    second = recorded.record(tmp_path / "b", [5], first_number=10)
    dataset = WindowDataset([tmp_path / "a", tmp_path / "b"], 3)
    seen = {
        (int(n), int(f))
        for n, f in dataset.__getitems__(range(len(dataset)))["observation"][:, 0, :2]
    }
    assert seen == {(item.number, t) for item in first + second for t in range(item.length - 2)}


@pytest.mark.filterwarnings("ignore:there is no window")
@settings(max_examples=25)
@given(
    num=st.integers(1, 40),
    fraction=st.floats(0, 1),
    seed=st.integers(0, 5),
    num_envs=st.integers(1, 4),
)
def test_splits_are_exact_disjoint_complete_and_decided_by_the_seed(num, fraction, seed, num_envs):
    with tempfile.TemporaryDirectory() as folder:
        recorded.record(Path(folder), [2] * num, num_envs)
        parts = {}
        for split in ("train", "validation"):
            options = {"split": split, "validation_fraction": fraction, "seed": seed}
            dataset = WindowDataset(folder, 1, **options)
            parts[split] = set(dataset.trajectories.tolist())
            assert parts[split] == set(
                WindowDataset(folder, 2, fields=["reward"], **options).trajectories.tolist()
            )
            seen = {
                int(n) for n in dataset.__getitems__(range(len(dataset)))["observation"][:, 0, 0]
            }
            assert len(seen) == len(parts[split])
        assert len(parts["validation"]) == int(np.floor(num * fraction + 0.5))
        assert not parts["train"] & parts["validation"]
        assert parts["train"] | parts["validation"] == set(range(num))


def test_splits_differ_by_seed_and_more_data_move_few_trajectories(tmp_path):
    recorded.record(tmp_path, [2] * 50, 5, writer_name="w")
    splits = [set(WindowDataset(tmp_path, split="validation", validation_fraction=0.2, seed=s).trajectories.tolist())
              for s in range(5)]  # fmt: skip
    assert len({frozenset(split) for split in splits}) == 5
    before = WindowDataset(tmp_path, split="validation", validation_fraction=0.2)
    kept = {key for key, _ in zip(*before.locate(range(len(before))), strict=True)}
    recorded.record(tmp_path, [2] * 10, 5, writer_name="w")
    after = WindowDataset(tmp_path, split="validation", validation_fraction=0.2)
    now = {key for key, _ in zip(*after.locate(range(len(after))), strict=True)}
    assert len(kept & now) >= len(kept) - 4


def test_a_split_of_several_folders_equals_the_splits_of_each_folder(tmp_path):
    item, copy, other = (tmp_path / name for name in ("one", "copy", "other"))
    for folder, writer in ((item, "a"), (other, "b")):
        recorded.record(folder, [2] * 60, num_envs=3, writer_name=writer)
    shutil.copytree(item, copy)

    def validation(folders):
        dataset = WindowDataset(folders, split="validation", validation_fraction=0.2)
        keys, _ = dataset.locate(range(len(dataset)))
        return [
            {number for writer, number in keys if writer.startswith(label)}
            for label in ("0:", "1:", "")
        ]

    alone = validation(item)[2]
    assert validation([item, copy])[:2] == [alone, alone] and len(alone) == 12
    for mixed, own in zip(validation([other, item]), (validation(other)[2], alone), strict=False):
        assert mixed <= own or mixed >= own
