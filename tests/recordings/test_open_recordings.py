"""An open recording is a snapshot: edits, writers and `prune` change nothing of it, except removed
files.
"""

from __future__ import annotations

import filecmp
import os
import pickle
import re
import shutil
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rollout_data
from rollout_data import (
    convert,
    doctor,
    drop,
    keep,
    merge,
    prune,
    repair,
    split,
    tag,
    undrop,
    untag,
)
from rollout_data.blocks.block_header import read_header
from storage.errors import (
    DataFileError,
    MissingFolderError,
    RolloutDataError,
    RolloutDataWarning,
    UsageError,
)
from tests.editing.folders import content, folder_of
from tests.files.recorded import record


@pytest.fixture
def walk(tmp_path: Path) -> Path:
    """Ten trajectories of one writer in several blocks, one of them tagged."""
    path = folder_of(tmp_path / "walk", writers=("a",), num_envs=1)
    tag(path, ["a:0"], task="push", reviewer="ada")
    return path


def test_damaged_rows_are_found_by_their_checksums_in_the_selected_episodes(tmp_path: Path) -> None:
    record(tmp_path / "walk", [3, 4, 5])
    (path,) = (tmp_path / "walk").glob("*.h5")
    recording = rollout_data.open(tmp_path / "walk")
    names = recording.ids
    assert recording.damaged() == {}
    header = read_header(path)
    raw = bytearray(path.read_bytes())
    row_bytes = header.layouts["data"].columns["frames"].row_bytes
    raw[header.locations["data"]["frames"][0] + 4 * row_bytes] ^= 1
    path.write_bytes(raw)
    damaged = recording.damaged()
    assert list(damaged) == names[1:2] and "Frames 1:2 of trajectory 1" in str(damaged[names[1]])
    assert recording.select([names[0], names[2]]).damaged() == {}
    assert recording.select([names[1]]).damaged().keys() == damaged.keys()
    path.unlink()
    assert recording.damaged() == {} and recording.removed().keys() == set(names)


def seen(recording: rollout_data.Recording) -> list[tuple[str, str, dict, list]]:
    listed = [
        (episode.id, episode.task, dict(episode.metadata), np.asarray(episode.observation).tolist())
        for episode in recording
    ]
    assert recording.table["task"].tolist() == [task for _, task, _, _ in listed]
    return listed


@pytest.mark.parametrize("is_read_first", [False, True])
def test_edits_and_writers_change_an_open_recording_only_when_it_is_refreshed(
    walk: Path, is_read_first: bool
) -> None:
    before, recording, chosen = (
        seen(rollout_data.open(walk)),
        rollout_data.open(walk),
        rollout_data.open(walk),
    )
    chosen = chosen.select(["a:0", "a:1", "a:3"])
    if is_read_first:
        seen(recording)
    tag(walk, ["a:0", "a:2"], task="pull")
    drop(walk, "a:1")
    keep(walk, ["a:0", "a:2", "a:3"])
    record(walk, [3, 4], writer_name="later")
    assert seen(recording) == before and recording[0].metadata["reviewer"] == "ada"
    assert [item[0] for item in seen(chosen)] == ["a:0", "a:1", "a:3"]
    assert recording.refresh() is recording and recording.ids == [
        "a:0",
        "a:2",
        "a:3",
        "later:0",
        "later:1",
    ]
    assert [episode.task for episode in recording][:3] == ["pull", "pull", ""]
    assert chosen.refresh().ids == ["a:0", "a:3"], (
        "a selection takes no others, and keeps those still there"
    )
    undrop(walk), untag(walk)
    assert [episode.task for episode in recording][:2] == ["pull", "pull"]
    assert len(recording.refresh()) == 12 and {episode.task for episode in recording} == {""}


def test_a_removed_episode_is_named_and_the_rest_is_read_and_converted(
    walk: Path, tmp_path: Path
) -> None:
    whole, recording = content(walk), rollout_data.open(walk)
    prune(walk, trajectories=4)
    left = rollout_data.open(walk).ids
    dropped = [name for name in recording.ids if name not in left]
    assert dropped and left and set(recording.removed()) == set(dropped)
    for place, name in enumerate(recording.ids):
        if name in left:
            assert recording[place].observation.tolist() == whole[name][0]["observation"]
            continue
        with pytest.raises(DataFileError, match=rf"Episode '{name}' of .*removed, as by prune"):
            _ = recording[place]
    done = convert(recording, tmp_path / "own", progress=False)
    assert [problem.episode for problem in done.problems] == dropped and done.num_episodes == len(
        left
    )
    assert sorted(
        episode.metadata["id"] for episode in rollout_data.open(tmp_path / "own")
    ) == sorted(left)
    assert recording.refresh().ids == left and recording.removed() == {}


def test_reading_an_open_episode_raises_after_its_removal(
    walk: Path,
) -> None:
    episode = rollout_data.open(walk)[0]
    prune(walk, trajectories=1)
    for read in (
        lambda: episode.observation,
        lambda: episode.final_observation,
        lambda: episode.read("action", 0, 1),
    ):
        with pytest.raises(DataFileError, match=f"Episode {episode.id!r} of .* cannot be read"):
            read()


def test_prune_and_tag_beside_readers_raise_library_errors_only(tmp_path: Path) -> None:
    path, unexpected, stop = tmp_path / "walk", list[BaseException](), threading.Event()
    record(path, [4] * 10, writer_name="w0", num_envs=1)

    def read() -> None:
        while not stop.is_set():
            try:
                recording = rollout_data.open(path)
                assert len(recording.table) == len(recording)
                for place in range(len(recording)):
                    _ = recording[place].observation
                list(
                    rollout_data.RolloutDataset(
                        path, 1, device="cpu", num_transitions_per_env=4, texts=True
                    )
                )
                assert len(rollout_data.WindowDataset(path, length=2, texts=True).texts) > 0
            except RolloutDataError:
                continue
            except BaseException as error:  # noqa: BLE001 - the test is about its type
                unexpected.append(error)
                return

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for number in range(1, 12):
            record(path, [4] * 6, first_number=100 * number, writer_name=f"w{number}", num_envs=1)
            tag(path, [f"w{number}:0"], task=f"task {number}")
            prune(path, trajectories=5)
        stop.set()
        for reader in readers:
            reader.join()
    assert unexpected == []


@pytest.mark.parametrize("is_selection", [False, True])
def test_merge_split_and_repair_leave_out_removed_and_replaced_episodes_by_name(
    walk: Path, tmp_path: Path, is_selection: bool
) -> None:
    tag(walk, ["a:9"], task="pull")
    whole, recording = content(walk), rollout_data.open(walk)
    if is_selection:
        recording = recording.select(recording.ids[::2])
    prune(walk, trajectories=5)
    block = next(block for block in recording.blocks if 8 in block.fragments["trajectory"])
    left_by_prune = rollout_data.open(walk).ids
    os.utime(block.path)
    removed = set(recording.removed())
    left = set(recording.ids) - removed
    assert removed & set(left_by_prune) and removed - set(left_by_prune) and left
    merged = merge(recording, tmp_path / "merged")
    assert content(merged.path) == {name: whole[name] for name in left}
    assert {problem.episode for problem in merged.problems} == removed
    parts = split(recording, {"a": 0.5, "b": 0.5}, tmp_path / "parts")
    expected = recording.split({"a": 0.5, "b": 0.5})
    for name, part in parts.items():
        ids = set(expected[name].ids)
        assert {problem.episode for problem in part.problems} == ids & removed
        assert part.num_trajectories == len(ids - removed)
    plan = repair(recording, tmp_path / "repaired", only=["FIL"], dry_run=True)
    repaired = repair(recording, tmp_path / "repaired", only=["FIL"])
    assert set(plan.problems) == set(repaired.problems) == removed
    assert content(repaired.path) == {name: whole[name] for name in left}


@pytest.mark.parametrize("is_selection", [False, True])
def test_consumers_raise_if_a_file_of_the_recording_was_removed(
    walk: Path, tmp_path: Path, is_selection: bool
) -> None:
    recording = rollout_data.open(walk)
    if is_selection:
        recording = recording.select(recording.ids[:4])
    prune(walk, trajectories=8)
    calls = {
        "play": lambda: rollout_data.RolloutDataset(
            recording, 1, device="cpu", num_transitions_per_env=4
        ),
        "windows": lambda: rollout_data.WindowDataset(recording, length=2),
        "statistics": lambda: recording.statistics(),
    }
    for name, call in calls.items():
        with pytest.raises(DataFileError, match="'a:0'") as caught:
            call()
        assert "refresh()" in str(caught.value), name
    left = len(recording.refresh())
    assert merge([recording], tmp_path / "merged").num_trajectories == left


def test_reading_a_replaced_file_raises_with_the_name_of_its_episode(
    walk: Path, tmp_path: Path
) -> None:
    recording = rollout_data.open(walk)
    block = recording.blocks[0].path
    other = folder_of(tmp_path / "other", writers=("a",), num_envs=1, num=4)
    (other / block.name).replace(block)
    done = merge([recording], tmp_path / "merged")
    assert done.problems[0].episode == "a:0"
    assert re.search(r"'a:0' of .* its file .* was replaced", str(done.problems[0]))
    assert "a:0" not in rollout_data.open(tmp_path / "merged").ids


def rows_of(recording: rollout_data.Recording) -> list[tuple[int, str, bytes]]:
    """Return length, task and actions of each episode, sorted, so that format and names do not
    matter.
    """
    return sorted(
        (len(episode), episode.task, np.asarray(episode.action, np.float32).tobytes())
        for episode in recording
    )


def played(dataset: rollout_data.RolloutDataset) -> list[bytes]:
    """Return the actions of one epoch, sorted."""
    return sorted(
        row.numpy().tobytes() for batch in dataset for row in batch.action[batch.valid.squeeze(-1)]
    )


def grown(
    walk: Path, tmp_path: Path, to: str, **options: int
) -> tuple[Path, rollout_data.Recording, rollout_data.Recording]:
    """Return a folder of ten episodes, a recording of it opened at six episodes, and a recording of
    a copy of these six.
    """
    source, path = rollout_data.open(walk), tmp_path / f"grown-{to}"
    part = source.select(source.ids[:6])
    convert(part, path, to=to, progress=False, **options)
    convert(part, tmp_path / "before", to=to, progress=False, **options)
    recording = rollout_data.open(path)
    assert len(recording) == 6
    whole = tmp_path / "whole"
    convert(source, whole, to=to, progress=False, **options)
    # Files of the same bytes stay as they are
    for file in (path for path in whole.rglob("*") if path.is_file()):
        target = path / file.relative_to(whole)
        if not target.exists() or not filecmp.cmp(file, target, shallow=False):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
    assert len(rollout_data.open(path)) == 10
    return path, recording, rollout_data.open(tmp_path / "before")


def check_consumers(
    recording: rollout_data.Recording, before: rollout_data.Recording, tmp_path: Path
) -> None:
    """Compare the results of each consumer of a recording with the rows, tasks and statistics of
    another recording.
    """
    expected, lengths = rows_of(before), [len(item) for item in before]
    merge([recording], tmp_path / "merged")
    assert rows_of(rollout_data.open(tmp_path / "merged")) == expected
    parts = split(recording, {"a": 0.5, "b": 0.5}, tmp_path / "parts")
    assert (
        sorted(row for part in parts.values() for row in rows_of(rollout_data.open(part.path)))
        == expected
    )
    repair(recording, tmp_path / "repaired", only=["FIL"])
    assert rows_of(rollout_data.open(tmp_path / "repaired")) == expected
    convert(recording, tmp_path / "converted", progress=False)
    assert rows_of(rollout_data.open(tmp_path / "converted")) == expected
    options = {"device": "cpu", "num_transitions_per_env": 4, "texts": True}
    dataset, other = (
        rollout_data.RolloutDataset(item, 1, **options) for item in (recording, before)
    )
    assert played(dataset) == played(other) and set(dataset.texts.values()) == set(
        other.texts.values()
    )
    windows = rollout_data.WindowDataset(recording, texts=True)
    assert len(windows) == sum(lengths)
    assert set(windows.texts.values()) == {"", *(item.task for item in before)}
    actual, wanted = recording.statistics(progress=False), before.statistics(progress=False)
    assert actual["action"].num_frames == wanted["action"].num_frames
    np.testing.assert_array_equal(actual["action"].mean, wanted["action"].mean)
    assert rows_of(pickle.loads(pickle.dumps(recording))) == expected
    assert rows_of(rollout_data.open(recording)) == expected
    assert recording.table["length"].tolist() == lengths


@pytest.mark.parametrize(
    "options",
    [{}, {"obs_segments": {"low": (2,), "high": (1,)}, "obs_disassemble_mapping": {"low": "lz4"}}],
)
def test_consumers_read_the_episodes_and_tags_of_the_snapshot(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    path = folder_of(tmp_path / "walk", writers=("a",), num_envs=1, **options)
    tag(path, ["a:0", "a:2"], task="push")
    shutil.copytree(path, tmp_path / "before")
    recording, before = rollout_data.open(path), rollout_data.open(tmp_path / "before")
    record(path, [3, 4], writer_name="later", with_final=True, **options)
    tag(path, ["a:0", "a:3", "later:0"], task="pull", reviewer="ada")
    drop(path, ["a:1"])
    keep(path, ["a:0", "a:2", "a:3", "later:0"])
    check_consumers(recording, before, tmp_path)
    assert recording.refresh().ids == ["a:0", "a:2", "a:3", "later:0"]


@pytest.mark.parametrize(
    ("to", "options"), [("trajectory-folders", {}), ("lerobot", {"fps": 10}), ("rlinf", {})]
)
def test_consumers_ignore_episodes_added_to_other_formats_after_opening(
    walk: Path, tmp_path: Path, to: str, options: dict[str, int]
) -> None:
    _, recording, before = grown(walk, tmp_path, to, **options)
    check_consumers(recording, before, tmp_path)
    assert len(recording.refresh()) == 10


def constant_folder(path: Path, action: float) -> Path:
    """Record two episodes of 4 and 6 frames whose actions are all one number."""
    with rollout_data.RolloutWriter(path, 1, durable=False, writer_name="a") as writer:
        for step in range(10):
            row = np.full((1, 2), action, np.float32)
            writer.add(
                observation=row, action=row, reward=row[:, 0], terminated=np.array([step in (3, 9)])
            )
    return path


def test_repair_ignores_blocks_that_were_written_after_opening(tmp_path: Path) -> None:
    path = constant_folder(tmp_path / "walk", 1.0)
    recording = rollout_data.open(path)
    with rollout_data.RolloutWriter(path, 1, durable=False, writer_name="later") as writer:
        for step in range(10):
            row = np.full((1, 2), 2.0 + step, np.float32)
            writer.add(
                observation=row, action=row, reward=row[:, 0], terminated=np.array([step in (3, 9)])
            )
    (block,) = path.glob("rollout_later_*.h5")
    last = np.full(2, 11.0, np.float32).tobytes()
    block.write_bytes(block.read_bytes().replace(last, np.full(2, 12.0, np.float32).tobytes()))
    rollout_data.repair(recording, tmp_path / "kept")
    assert rollout_data.open(tmp_path / "kept").ids == recording.ids == ["a:0", "a:1"]
    rollout_data.repair(path, tmp_path / "all")
    assert rollout_data.open(tmp_path / "all").ids == ["a:0", "a:1", "later:0"]


@pytest.mark.each_value
@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize(
    ("to", "options"),
    [
        ("robomimic", {}),
        ("minari", {}),
        ("lerobot", {"fps": 10}),
        ("rlinf", {}),
        ("trajectory-folders", {}),
    ],
)
def test_replaced_or_removed_files_of_other_formats_raise(
    tmp_path: Path, to: str, options: dict[str, int], is_replaced: bool
) -> None:
    path, other = tmp_path / "data", tmp_path / "other"
    convert(constant_folder(tmp_path / "one", 1), path, to=to, progress=False, **options)
    convert(constant_folder(tmp_path / "two", 2), other, to=to, progress=False, **options)
    recording = rollout_data.open(path)
    pickled = pickle.dumps(recording)
    windows = rollout_data.WindowDataset(rollout_data.open(path))
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if is_replaced:
        other.rename(path)

    def check(actions: Callable[[], Any]) -> None:
        """Check that actions are those of the opened files, or that an error names the files."""
        try:
            actual = np.asarray(actions())
        except DataFileError as error:
            assert str(path) in str(error)
        except MissingFolderError:
            assert not is_replaced
        else:
            assert (actual == 1).all()

    for place in range(2):
        check(lambda place=place: recording[place].action)
        check(lambda place=place: pickle.loads(pickled)[place].action)
    check(lambda: windows[0]["action"])
    converted = tmp_path / "converted"
    with suppress(DataFileError):
        merge([recording], tmp_path / "merged")
        check(lambda: rollout_data.open(tmp_path / "merged")[0].action)
    with suppress(DataFileError):
        convert(recording, converted, progress=False)
        check(lambda: rollout_data.open(converted)[0].action)
    if is_replaced:
        assert (recording.refresh()[0].action == 2).all()


def test_a_stream_of_an_open_recording_reads_no_replaced_chunk(
    tmp_path: Path,
) -> None:
    path, other = tmp_path / "data", tmp_path / "other"
    convert(constant_folder(tmp_path / "one", 1), path, to="trajectory-folders", progress=False)
    convert(constant_folder(tmp_path / "two", 2), other, to="trajectory-folders", progress=False)
    dataset = rollout_data.RolloutDataset(
        rollout_data.open(path), 1, device="cpu", num_transitions_per_env=1
    )
    chunk = Path("trajectory_0") / "traj_000000_000004.pickle"
    (other / chunk).replace(path / chunk)
    with pytest.warns(
        RolloutDataWarning, match=r"trajectory_0.*has changed since it was opened.*refresh\(\)"
    ):
        actions = torch.cat([batch.action[batch.valid.squeeze(-1)] for batch in dataset])
    assert actions.unique().tolist() == [1.0] and len(actions) == 6


def test_editing_an_open_recording_raises_and_asks_for_the_path(walk: Path) -> None:
    selection = rollout_data.open(walk).select(["a:1"])
    for call in (drop, keep, undrop, untag):
        with pytest.raises(
            UsageError, match=r"path must be a folder of block files.*Pass the path"
        ):
            call(selection, [0])
    with pytest.raises(UsageError, match="Pass the path"):
        tag(selection, 0, task="push")
    assert len(rollout_data.open(walk)) == 10


def test_a_trajectory_that_grew_after_opening_keeps_its_length(tmp_path: Path) -> None:
    path, rows = tmp_path / "walk", np.arange(24, dtype=np.float32).reshape(12, 1, 2)
    with rollout_data.RolloutWriter(path, 1, durable=False, writer_name="a") as writer:
        for step, row in enumerate(rows):
            if step == 10:
                writer.flush()
                recording = rollout_data.open(path)
                shutil.copytree(path, tmp_path / "before", ignore=shutil.ignore_patterns(".*"))
            writer.add(
                observation=row, action=row, reward=row[:, 0], done=np.array([step in (3, 11)])
            )
    before = rollout_data.open(tmp_path / "before")
    assert [len(episode) for episode in recording] == [len(item) for item in before] == [4, 6]
    assert [len(episode) for episode in rollout_data.open(path)] == [4, 8]
    check_consumers(recording, before, tmp_path)


def test_a_dataset_of_an_open_recording_ignores_changes_and_a_dataset_of_its_path_reads_them(
    walk: Path,
) -> None:
    options = {"device": "cpu", "num_transitions_per_env": 4}
    of_recording, of_path = (
        rollout_data.RolloutDataset(item, 1, **options) for item in (rollout_data.open(walk), walk)
    )
    before = played(of_recording)
    assert played(of_path) == before
    record(walk, [3, 4], writer_name="later")
    drop(walk, "a:1")
    assert played(of_recording) == before
    assert played(of_path) != before


def test_workers_read_the_windows_of_the_snapshot(walk: Path) -> None:
    recording = rollout_data.open(walk)
    record(walk, [3, 4], writer_name="later")
    tag(walk, ["a:0"], task="pull")
    windows = rollout_data.WindowDataset(recording, texts=True)
    expected = [windows[place]["action"] for place in range(len(windows))]
    copied = pickle.loads(pickle.dumps(windows))
    assert len(copied) == len(expected) == sum(len(episode) for episode in recording)
    loader = torch.utils.data.DataLoader(
        windows, batch_size=None, num_workers=1, multiprocessing_context="spawn"
    )
    for actual, wanted in zip(loader, expected, strict=True):
        assert torch.equal(actual["action"], wanted)


def test_two_snapshots_of_one_folder_are_read_side_by_side(walk: Path, tmp_path: Path) -> None:
    earlier = rollout_data.open(walk)
    record(walk, [3, 4], writer_name="later")
    later = rollout_data.open(walk)
    record(walk, [5], writer_name="last")
    num_frames = sum(len(item) for item in earlier) + sum(len(item) for item in later)
    assert len(rollout_data.WindowDataset([earlier, later])) == num_frames
    assert merge([earlier, later], tmp_path / "merged").num_trajectories == 12


def test_readers_of_a_pruned_folder_read_the_remaining_episodes(walk: Path) -> None:
    recording = rollout_data.open(walk)
    episodes = iter(recording)
    dataset = rollout_data.RolloutDataset(walk, 1, device="cpu", num_transitions_per_env=2)
    windows = rollout_data.WindowDataset(walk, on_error="skip")
    batches = iter(dataset)
    first = [next(episodes).id, next(batches).action.shape[0]]
    assert first == ["a:0", 2] and len(windows[0]["action"])
    prune(walk, trajectories=3)
    left = rollout_data.open(walk).ids
    read = []
    for place, name in enumerate(recording.ids):
        try:
            assert len(recording[place].action)
            read.append(name)
        except DataFileError as error:
            assert error.episode == name
    assert read == left and set(recording.ids) - set(read)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frames = sum(int(batch.valid.sum()) for batch in batches)
        num_read = 0
        for place in range(len(windows)):
            try:
                num_read += len(windows[place]["action"])
            except DataFileError:
                continue
    assert frames >= sum(len(episode) for episode in rollout_data.open(walk)) - 2
    assert num_read >= sum(len(episode) for episode in rollout_data.open(walk))


def test_the_doctor_and_the_report_keep_the_snapshot(walk: Path, tmp_path: Path) -> None:
    recording = rollout_data.open(walk)
    drop(walk, "a:1")
    assert doctor(recording).summary["episodes"] == 10
    pytest.importorskip("plotly")
    assert "a:1" in rollout_data.report(recording, tmp_path / "page.html").read_text(
        encoding="utf-8"
    )
