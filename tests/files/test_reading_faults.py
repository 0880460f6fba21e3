"""Damaged, foreign, deleted and growing files beside intact files.

Every source returns the same batches.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from rollout_data import RolloutDataset, RolloutWriter, WindowDataset
from rollout_data.blocks.block_folder import INDEX_CACHE_NAME, BlockFolder, save_index_cache
from rollout_data.blocks.block_header import METADATA_NAME, open_block, read_header
from rollout_data.blocks.folder_metadata import ENDS, UNKNOWN
from rollout_data.sources.live_source import LiveSource
from storage.errors import CorruptFileError, ForeignFileError, RolloutDataWarning, UsageError
from tests.files.recorded import drain, frames_of, record


def numbers_of(dataset, num_steps=4):
    return sorted(
        {number for batch in drain(dataset, num_steps) for *_, number, _ in frames_of(batch)}
    )


def record_blocks(data_dir, num_blocks=3):
    """Record one trajectory per block. Return the files in order."""
    record(data_dir, [4] * num_blocks, flush_every=4)
    return sorted(data_dir.glob("rollout_*.h5"))


def opened(data_dir, num_envs=1, **options):
    return RolloutDataset(data_dir, num_envs, device="cpu", **options)


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("has_cache", [True, False])
def test_a_truncated_block_is_named_and_the_others_are_streamed(tmp_path, has_cache):
    paths = record_blocks(tmp_path)
    if not has_cache:
        (tmp_path / INDEX_CACHE_NAME).unlink()
    paths[1].write_bytes(paths[1].read_bytes()[:-100])
    dataset = opened(tmp_path)
    with pytest.warns(RolloutDataWarning, match=paths[1].name):
        assert numbers_of(dataset) == [0, 2]
    assert [type(problem) for problem in dataset.problems] == [CorruptFileError]


def test_verify_reports_flipped_rows(tmp_path):
    paths = record_blocks(tmp_path)
    offset, _ = open_block(paths[1]).locations["data"]["frames"]
    flip(paths[1], offset + 5)
    with pytest.warns(
        RolloutDataWarning,
        match=rf"Frames 0:1 of trajectory 1 in '.*{paths[1].name}'.*checksum",
    ):
        assert numbers_of(opened(tmp_path, verify_on_open=True)) == [0, 2]


def test_foreign_files_are_named_and_other_files_ignored(tmp_path):
    record_blocks(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "text.h5").write_text("hello")
    with h5py.File(tmp_path / "other.hdf5", "w") as file:
        file["x"] = np.zeros(3)
    dataset = opened(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert numbers_of(dataset) == [0, 1, 2]
    assert [type(problem) for problem in dataset.problems] == [ForeignFileError] * 2
    assert sorted(Path(str(w.message).split("'")[1]).name for w in caught) == [
        "other.hdf5",
        "text.h5",
    ]


def test_a_problem_is_reported_once(tmp_path):
    record_blocks(tmp_path)
    (tmp_path / "text.h5").write_text("hello")
    dataset = opened(tmp_path, dataset_loops=5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        drain(dataset, 4)
    assert len(caught) == len(dataset.problems) == 1


def test_a_copied_block_does_not_deliver_its_frames_twice(tmp_path):
    paths = record_blocks(tmp_path)
    shutil.copy(paths[0], tmp_path / "zz_copy.h5")
    with pytest.warns(RolloutDataWarning, match="is a duplicate of"):
        assert sum(len(frames_of(batch)) for batch in drain(opened(tmp_path), 4)) == 12


def test_a_later_copy_of_a_cached_block_is_reported(tmp_path):
    paths = record_blocks(tmp_path)
    folder = BlockFolder(tmp_path)
    folder.refresh()
    assert folder.built is not None, "the blocks are known from the cache"
    shutil.copy(paths[1], tmp_path / "zz_copy.h5")
    assert folder.refresh() and list(folder.problems) == ["zz_copy.h5"]
    paths[1].unlink()
    (tmp_path / "zz_copy.h5").rename(tmp_path / "zz_moved.h5")
    assert folder.refresh() and not folder.problems and "zz_moved.h5" in folder.blocks


def test_opening_many_blocks_compares_known_blocks_once(tmp_path):
    """The work of opening grows linearly with the number of blocks."""
    counts = []

    class Counted(dict):
        def items(self):
            counts.append(len(self))
            return super().items()

    record_blocks(tmp_path, 12)
    (tmp_path / INDEX_CACHE_NAME).unlink()
    folder = BlockFolder(tmp_path)
    folder.blocks = Counted()
    assert folder.refresh() and len(folder.blocks) == 12
    assert counts[0] == 0 and len(counts) <= 2


def test_a_block_with_other_fields_is_left_out(tmp_path):
    record_blocks(tmp_path / "a")
    with RolloutWriter(tmp_path / "b", 1, durable=False) as writer:
        writer.add(
            observation=np.zeros((1, 5), np.float32),
            action=np.zeros((1, 2), np.float32),
            done=[True],
        )
    other = next((tmp_path / "b").glob("rollout_*.h5"))
    other.rename(tmp_path / "a" / "zz.h5")
    with pytest.warns(
        RolloutDataWarning, match=r"field 'observation' is float32\[5\] instead of float32\[3\]"
    ):
        assert numbers_of(opened(tmp_path / "a")) == [0, 1, 2]


def test_a_block_that_vanishes_between_listing_and_opening_is_skipped(tmp_path):
    paths = record_blocks(tmp_path)
    source = LiveSource(tmp_path)
    source.refresh()
    paths[1].unlink()
    assert source.snapshot().index.number.tolist() == [0, 2]
    assert source.num_vanished_blocks == 1


def test_blocks_removed_while_they_are_played_are_played_to_their_end(tmp_path):
    paths = record_blocks(tmp_path)
    dataset = opened(tmp_path, dataset_loops=0)
    assert frames_of(dataset.get_batch(1)) == [(0, 0, 0, 0)]
    paths[0].unlink()
    paths[1].unlink()
    # This pass still has them. The next pass finds that they are deleted.
    batch = dataset.get_batch(14)
    assert [(number, frame) for *_, number, frame in frames_of(batch)] == [
        (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3), (2, 0), (2, 1), (2, 2),
    ]  # fmt: skip
    dataset.reset()
    assert numbers_of(opened(tmp_path)) == [2]


def test_a_trajectory_that_is_being_played_survives_the_removal_of_its_block(tmp_path):
    record(tmp_path, [2, 30], flush_every=2, num_envs=2)
    dataset = opened(tmp_path, 2, dataset_loops=0)
    dataset.get_batch(1)
    record(tmp_path, [3], first_number=7)
    for path in sorted(tmp_path.glob("rollout_*.h5"))[:3]:
        if open_block(path).sequence == 1:
            path.unlink()
    batch = dataset.get_batch(25)
    assert batch.observation[:, 1, :2].tolist() == [[1, frame] for frame in range(1, 26)]


def test_an_emptied_folder_raises_at_the_next_pass(tmp_path):
    paths = record_blocks(tmp_path)
    dataset = opened(tmp_path, dataset_loops=0)
    dataset.get_batch(2)
    for path in paths:
        path.unlink()
    with pytest.raises(UsageError, match="has no trajectories left for the next pass"):
        for _ in range(10):
            dataset.get_batch(4)


def test_new_trajectories_join_at_the_next_pass(tmp_path):
    record(tmp_path, [3, 3])
    dataset = opened(tmp_path, dataset_loops=2)
    first = [number for batch in [dataset.get_batch(5)] for *_, number, _ in frames_of(batch)]
    record(tmp_path, [2], first_number=9)
    rest = [number for batch in drain(dataset, 4) for *_, number, _ in frames_of(batch)]
    assert first + rest == [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 9, 9]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-50]),
        lambda path: path.write_bytes(b"PK\x03\x04" + bytes(500)),
        lambda path: flip(path, path.stat().st_size // 2),
        lambda path: np.savez(path, about=np.array([{"x": 1}], dtype=object)),
    ],
)
def test_a_damaged_index_cache_is_ignored(tmp_path, spoil):
    record_blocks(tmp_path)
    cache = tmp_path / INDEX_CACHE_NAME
    spoil(cache)
    if cache.with_suffix(".npz.npz").exists():
        cache.with_suffix(".npz.npz").rename(cache)
    assert numbers_of(opened(tmp_path)) == [0, 1, 2]


@pytest.mark.parametrize("name", ["index", "places"])
def test_a_forged_index_cache_reads_no_memory_outside_the_files(tmp_path, name):
    record_blocks(tmp_path)
    cache = tmp_path / INDEX_CACHE_NAME
    save_index_cache(tmp_path)
    with np.load(cache) as file:
        arrays = dict(file)
    for place in range(arrays[name].size):
        forged = arrays[name].copy()
        forged.reshape(-1)[place] += 1 << 50
        with open(cache, "wb") as file:
            np.savez(file, **{**arrays, name: forged})
        assert numbers_of(opened(tmp_path)) == [0, 1, 2]


def test_reading_changes_no_file(tmp_path):
    record_blocks(tmp_path)
    (tmp_path / INDEX_CACHE_NAME).unlink()
    before = {
        path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.iterdir()
    }
    drain(opened(tmp_path, cache="ram"), 4)
    assert {
        path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.iterdir()
    } == before


@pytest.mark.parametrize("variant", ["without_maps", "cold_files", "ram"])
def test_every_way_of_reading_returns_the_same_batches(tmp_path, request, variant):
    record(tmp_path, [9, 1, 30, 4, 17, 2, 8], num_envs=2, flush_every=5, with_final=True)
    arguments = {
        "dataset_loops": 3,
        "random_shuffle_traj_order": True,
        "starting_frame_range": (0, 4),
    }
    expected = drain(opened(tmp_path, 3, **arguments), 6)
    if variant != "ram":
        request.getfixturevalue(variant)
    dataset = opened(tmp_path, 3, cache="ram" if variant == "ram" else "none", **arguments)
    for batch, other in zip(expected, drain(dataset, 6), strict=True):
        for item, two in zip(batch, other, strict=True):
            assert torch.equal(item, two) if isinstance(item, torch.Tensor) else item == two


def test_a_dataset_larger_than_memory_is_not_cached(tmp_path, little_memory):
    record_blocks(tmp_path)
    with pytest.raises(UsageError, match="Pass cache='none'"):
        opened(tmp_path, cache="ram").reset()


def test_workers_forked_from_a_process_that_reads_ahead_read_ahead_themselves(tmp_path, cold_files):
    record(tmp_path, [9] * 6)
    dataset = opened(tmp_path, num_transitions_per_env=4)
    dataset.get_batch(4)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, num_workers=2, multiprocessing_context="fork"
    )
    assert sum(len(frames_of(batch)) for batch in loader) == 54


def test_a_stale_index_cache_of_other_files_with_the_same_names_is_ignored(tmp_path):
    def record_one_env(dones):
        with RolloutWriter(tmp_path, 1, writer_name="w", durable=False) as writer:
            for frame, done in enumerate(dones):
                writer.add(observation=[[float(frame)]], action=[[0.0]], done=[done])

    record_one_env([0, 0, 1] + [0] * 8 + [1])
    (tmp_path / "rollout_w_000000.h5").unlink()
    record_one_env([0] * 8 + [1] + [0, 0, 1])
    dataset = opened(tmp_path)
    dataset.reset()
    assert dataset.source.snapshot().index.lengths.tolist() == [9, 3]


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(8, 40))]
)
def test_a_flipped_bit_in_the_index_cache_hides_no_trajectory(tmp_path, seed):
    record_blocks(tmp_path)
    cache = tmp_path / INDEX_CACHE_NAME
    rng = np.random.default_rng(seed)
    for _ in range(20):
        data = bytearray(cache.read_bytes())
        place = int(
            rng.integers(len(data) - 1500 * (seed % 2), len(data))
            if seed % 2
            else rng.integers(len(data))
        )
        data[place] ^= 1 << int(rng.integers(8))
        (tmp_path / "spoilt").mkdir(exist_ok=True)
        for path in [*tmp_path.glob("rollout_*"), tmp_path / "metadata.json"]:
            if not (tmp_path / "spoilt" / path.name).exists():
                shutil.copy2(path, tmp_path / "spoilt" / path.name)
        (tmp_path / "spoilt" / INDEX_CACHE_NAME).write_bytes(bytes(data))
        assert opened(tmp_path / "spoilt").num_frames == 12


def test_a_path_that_is_not_a_file_is_reported_without_waiting(tmp_path):
    record_blocks(tmp_path)
    (tmp_path / INDEX_CACHE_NAME).unlink()
    os.mkfifo(tmp_path / INDEX_CACHE_NAME)
    os.mkfifo(tmp_path / "pipe.h5")
    (tmp_path / "folder.h5").mkdir()
    os.symlink("loop.h5", tmp_path / "loop.h5")
    os.symlink("/etc/hostname", tmp_path / "outside.h5")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert numbers_of(opened(tmp_path)) == [0, 1, 2]
    named = sorted(Path(str(w.message).split("'")[1]).name for w in caught)
    assert named == ["folder.h5", "loop.h5", "outside.h5", "pipe.h5"]


def test_a_differing_block_that_sorts_first_does_not_exclude_the_others(tmp_path):
    record_blocks(tmp_path / "a")
    with RolloutWriter(tmp_path / "b", 1, durable=False) as writer:
        writer.add(
            observation=np.zeros((1, 5), np.float32),
            action=np.zeros((1, 2), np.float32),
            done=[True],
        )
    next((tmp_path / "b").glob("rollout_*.h5")).rename(tmp_path / "a" / "aa.h5")
    (tmp_path / "a" / INDEX_CACHE_NAME).unlink()
    with pytest.warns(RolloutDataWarning, match=r"aa.h5.*float32\[5\] instead of float32\[3\]"):
        assert numbers_of(opened(tmp_path / "a")) == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "code", "lines"),
    [
        (["return", "spawn"], 0, []),
        (["exit"], 3, []),
        (["raise"], 1, ["RuntimeError: raised by the script"]),
    ],
)
def test_a_script_that_ends_with_open_iterators_prints_only_its_own_error(
    tmp_path, options, code, lines
):
    record(tmp_path, [50] * 4)
    ended = subprocess.run(
        [sys.executable, "-m", "tests.files.left_open", str(tmp_path), *options],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=Path(__file__).parents[2],
    )
    assert (ended.returncode, ended.stdout) == (code, "")
    printed = re.sub(r"^Traceback .*\n( .*\n)*", "", ended.stderr, count=1)
    assert printed.splitlines() == lines


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_envs": 1 << 40}, {"starting_frame_range": 5}, {"starting_frame_range": (3, 3)}, {"seed": 1.5},
        {"starting_frame_range": (0.5, 1.9)}, {"dataset_loops": 0.5}, {"keep_latest_n_trajs": "2"}, {"cache": None},
        {"wait_timeout_s": float("nan")}, {"device": "quantum"}, {"interpolation": "cubic"},
        {"keep_latest_n_trajs": -1},
    ],
)  # fmt: skip
def test_wrong_arguments_raise_at_once_with_their_name(tmp_path, arguments):
    with pytest.raises(
        UsageError,
        match=f"RolloutDataset: {'device' if 'device' in arguments else next(iter(arguments))}",
    ):
        RolloutDataset(tmp_path, **{"num_envs": 1, **arguments})


def test_blocks_are_opened_after_an_interrupted_scan(tmp_path, monkeypatch):
    record(tmp_path, [3] * 12, num_envs=2, flush_every=4)
    opened, whole = [], BlockFolder(tmp_path)
    whole.refresh()

    open_file = h5py.File.__init__

    def interrupted(file, *arguments, **options):
        opened.append(file)
        if len(opened) == 2:
            raise KeyboardInterrupt
        open_file(file, *arguments, **options)

    monkeypatch.setattr(h5py.File, "__init__", interrupted)
    (tmp_path / INDEX_CACHE_NAME).unlink(missing_ok=True)
    looking = BlockFolder(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        looking.refresh()
    assert looking.refresh() and not looking.problems
    assert looking.blocks.keys() == whole.blocks.keys() and len(whole.blocks) > 2
    assert not looking.refresh()


def test_a_block_that_is_removed_before_its_notes_are_read_is_left_out(tmp_path, monkeypatch):
    record(tmp_path, [3] * 12, num_envs=2, flush_every=4)
    document = json.loads((tmp_path / METADATA_NAME).read_text())
    (tmp_path / METADATA_NAME).write_text(json.dumps({**document, ENDS: UNKNOWN}))
    deleted = min(tmp_path.glob("rollout_*.h5"))

    def late(folder, block):
        deleted.unlink(missing_ok=True)
        return read_header(block.path)

    monkeypatch.setattr(BlockFolder, "header_of", late)
    with pytest.warns(UserWarning):
        dataset = WindowDataset(tmp_path, 1)
    assert 0 < dataset.num_trajectories < 12
