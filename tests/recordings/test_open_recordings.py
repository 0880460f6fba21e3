"""An open recording is a snapshot: edits, other writers and `prune` change nothing of it, but for what is gone."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path

import numpy as np
import pytest

import rollout_data
from rollout_data import convert, doctor, drop, keep, merge, prune, repair, split, tag, undrop, untag
from storage.errors import DataFileError, RolloutDataError
from tests.editing.folders import content, folder_of
from tests.files.recorded import record


@pytest.fixture
def walk(tmp_path: Path) -> Path:
    """Ten trajectories of one writer in several blocks, one of them tagged."""
    path = folder_of(tmp_path / "walk", writers=("a",), num_envs=1)
    tag(path, ["a:0"], task="push", reviewer="ada")
    return path


def seen(recording: rollout_data.Recording) -> list[tuple[str, str, dict, list]]:
    listed = [(one.id, one.task, dict(one.metadata), np.asarray(one.observation).tolist()) for one in recording]
    assert recording.table["task"].tolist() == [task for _, task, _, _ in listed]
    return listed


@pytest.mark.parametrize("is_read_first", [False, True])
def test_edits_and_writers_change_an_open_recording_only_when_it_is_refreshed(walk: Path, is_read_first: bool) -> None:
    before, recording, chosen = seen(rollout_data.open(walk)), rollout_data.open(walk), rollout_data.open(walk)
    chosen = chosen.select(["a:0", "a:1", "a:3"])
    if is_read_first:
        seen(recording)
    tag(walk, ["a:0", "a:2"], task="pull")
    drop(walk, "a:1")
    keep(walk, ["a:0", "a:2", "a:3"])
    record(walk, [3, 4], writer_name="later")
    assert seen(recording) == before and recording[0].metadata["reviewer"] == "ada"
    assert [one[0] for one in seen(chosen)] == ["a:0", "a:1", "a:3"]
    assert recording.refresh() is recording and recording.ids == ["a:0", "a:2", "a:3", "later:0", "later:1"]
    assert [one.task for one in recording][:3] == ["pull", "pull", ""]
    assert chosen.refresh().ids == ["a:0", "a:3"], "a selection takes no others, and keeps those still there"
    undrop(walk), untag(walk)
    assert [one.task for one in recording][:2] == ["pull", "pull"]
    assert len(recording.refresh()) == 12 and {one.task for one in recording} == {""}


def test_a_removed_episode_is_named_and_the_rest_is_read_and_converted(walk: Path, tmp_path: Path) -> None:
    whole, recording = content(walk), rollout_data.open(walk)
    prune(walk, trajectories=4)
    left = rollout_data.open(walk).ids
    gone = [name for name in recording.ids if name not in left]
    assert gone and left and set(recording.removed()) == set(gone)
    for place, name in enumerate(recording.ids):
        if name in left:
            assert recording[place].observation.tolist() == whole[name][0]["observation"]
            continue
        with pytest.raises(DataFileError, match=rf"cannot read the episode '{name}' of .*removed, as by prune"):
            _ = recording[place]
    done = convert(recording, tmp_path / "own", progress=False)
    assert [problem.episode for problem in done.problems] == gone and done.num_episodes == len(left)
    assert sorted(one.metadata["id"] for one in rollout_data.open(tmp_path / "own")) == sorted(left)
    assert recording.refresh().ids == left and recording.removed() == {}


def test_an_episode_that_was_opened_before_it_was_removed_raises_when_it_is_read(walk: Path) -> None:
    episode = rollout_data.open(walk)[0]
    prune(walk, trajectories=1)
    for read in (lambda: episode.observation, lambda: episode.final_observation, lambda: episode.read("action", 0, 1)):
        with pytest.raises(DataFileError, match=f"cannot read the episode {episode.id!r}"):
            read()


def test_prune_and_tag_beside_readers_raise_errors_of_ours_only(tmp_path: Path) -> None:
    path, unexpected, stop = tmp_path / "walk", list[BaseException](), threading.Event()
    record(path, [4] * 10, writer_name="w0", num_envs=1)

    def read() -> None:
        while not stop.is_set():
            try:
                recording = rollout_data.open(path)
                assert len(recording.table) == len(recording)
                for place in range(len(recording)):
                    _ = recording[place].observation
                list(rollout_data.RolloutDataset(path, 1, device="cpu", num_transitions_per_env=4, texts=True))
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
@pytest.mark.parametrize("how", ["drop", "prune"])
def test_what_reads_the_files_anew_refuses_a_recording_that_lost_an_episode(
    walk: Path, tmp_path: Path, how: str, is_selection: bool
) -> None:
    recording = rollout_data.open(walk)
    if is_selection:
        recording = recording.select(recording.ids[:4])
    if how == "drop":
        drop(walk, "a:1")
    else:
        prune(walk, trajectories=8)
    lost = "a:1" if how == "drop" else "a:0"
    calls = {
        "merge": lambda: merge([recording], tmp_path / "merged"),
        "split": lambda: split(recording, {"a": 0.5, "b": 0.5}, tmp_path / "parts"),
        "repair": lambda: repair(recording, tmp_path / "repaired"),
        "play": lambda: rollout_data.RolloutDataset(recording, 1, device="cpu", num_transitions_per_env=4),
        "windows": lambda: rollout_data.WindowDataset(recording, length=2),
        "statistics": lambda: recording.statistics(),
    }
    for name, call in calls.items():
        with pytest.raises(DataFileError, match=f"'{lost}'") as caught:
            call()
        assert "refresh()" in str(caught.value), name
    assert not (tmp_path / "merged").exists() and not (tmp_path / "parts").exists()
    left = len(recording.refresh())
    assert merge([recording], tmp_path / "merged").num_trajectories == left


def test_the_doctor_and_the_report_keep_the_snapshot(walk: Path, tmp_path: Path) -> None:
    recording = rollout_data.open(walk)
    drop(walk, "a:1")
    assert doctor(recording).summary["episodes"] == 10
    pytest.importorskip("plotly")
    assert "a:1" in rollout_data.report(recording, tmp_path / "page.html").read_text(encoding="utf-8")
