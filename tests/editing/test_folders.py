"""Merging and splitting: disjoint and complete parts, hard links, unchanged sources."""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest

import rollout_data
from rollout_data import convert, drop, edits_of, merge, split, tag
from rollout_data.tools.cli.command_line import main
from rollout_data.tools.edit.pack_folder import check_folder
from storage.errors import DataFileError, RolloutDataWarning, SchemaError, TargetError, UsageError
from tests.editing.folders import content, files, folder_of, ids
from tests.files.recorded import record
from tests.recordings.sets import state, write_demos


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    walk = folder_of(tmp_path_factory.mktemp("sound") / "walk", flush_every=15)
    drop(walk, ["a:1", "b:7"])
    tag(walk, ["a:0", "b:2"], task="push")
    return walk


@pytest.fixture
def walk(sound: Path, tmp_path: Path) -> Path:
    """A copy of trajectories of two writers. Two are dropped and two are tagged."""
    shutil.copytree(sound, tmp_path / "walk")
    return tmp_path / "walk"


def test_parts_are_disjoint_and_complete_and_their_merge_is_the_whole(
    walk: Path, tmp_path: Path
) -> None:
    before, source = files(walk), content(walk)
    parts = split(walk, {"train": 0.6, "val": 0.3, "test": 0.1}, tmp_path / "parts", seed=5)
    actual = [ids(tmp_path / "parts" / name) for name in parts]
    assert (
        [len(item) for item in actual]
        == [item.num_trajectories for item in parts.values()]
        == [11, 5, 2]
    )
    assert set.union(*actual) == set(source) and sum(map(len, actual)) == len(source)
    expected = rollout_data.open(walk).split({"train": 0.6, "val": 0.3, "test": 0.1}, seed=5)
    assert [set(part.ids) for part in expected.values()] == actual, "as Recording.split chooses"
    for name in parts:
        part = content(tmp_path / "parts" / name)
        assert part == {item: source[item] for item in part}
        assert not check_folder(tmp_path / "parts" / name).num_broken
    whole = merge([item.path for item in parts.values()], tmp_path / "whole")
    assert content(tmp_path / "whole") == source and whole.num_copied == 0 and not whole.renamed
    assert files(walk) == before, "no source is touched"


def test_blocks_are_hard_links_or_copies_if_links_are_impossible(
    walk: Path, tmp_path: Path, monkeypatch
) -> None:
    done = merge(walk, tmp_path / "linked")
    assert (
        done.num_linked == len(list((tmp_path / "linked").glob("rollout_?_0*.h5")))
        and not done.num_copied
    )
    for path in (tmp_path / "linked").glob("rollout_?_0*.h5"):
        assert path.samefile(walk / path.name)

    def no_link(*arguments: object, **options: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", no_link)  # all folders are on one file system
    done = merge([walk], tmp_path / "copied")
    assert done.num_copied and not done.num_linked and content(tmp_path / "copied") == content(walk)
    assert not any(
        path.samefile(walk / path.name) for path in (tmp_path / "copied").glob("rollout_?_0*.h5")
    )


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["merge", "split", "repair"])
@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOSPC])
def test_an_error_of_a_link_is_one_of_the_source_or_of_the_target(
    walk: Path, tmp_path: Path, monkeypatch, name: str, number: int
) -> None:
    def failing(source: Path, target: Path) -> None:
        if number == errno.ENOENT:
            source.unlink()
        raise OSError(number, os.strerror(number), str(source), None, str(target))

    monkeypatch.setattr(os, "link", failing)
    calls = {
        "merge": lambda out: merge(walk, out),
        "split": lambda out: split(walk, {"a": 1.0}, out),
        "repair": lambda out: rollout_data.repair(walk, out),
    }
    with pytest.raises(DataFileError if number == errno.ENOENT else TargetError) as caught:
        calls[name](tmp_path / "out")
    if number == errno.ENOENT:
        assert str(walk / "rollout_a_000000.h5") in str(caught.value) and "call again" in str(
            caught.value
        )
    assert not (tmp_path / "out").exists()


def test_names_that_two_recordings_share_do_not_collide(walk: Path, tmp_path: Path) -> None:
    record(tmp_path / "other", [4, 4], writer_name="a", first_number=700)
    tag(tmp_path / "other", 0, task="pull")
    done = merge([walk, tmp_path / "other"], tmp_path / "both")
    assert done.renamed == {(1, "a"): "a-2"} and done.num_trajectories == 20
    actual = content(tmp_path / "both")
    assert {
        item: episode for item, episode in actual.items() if not item.startswith("a-2")
    } == content(walk)
    assert actual["a-2:0"][2]["task"] == "pull" and actual["a-2:1"][0]["observation"][0][0] == 701
    assert (
        edits_of(tmp_path / "both")["dropped"] == ["a:1", "b:7"]
        and not check_folder(tmp_path / "both").problems
    )
    again = merge([tmp_path / "both", walk], tmp_path / "again")
    assert content(tmp_path / "again") == actual and again.num_copied == 0, (
        "what both have is there once"
    )


def test_other_formats_become_folders_of_blocks(walk: Path, tmp_path: Path) -> None:
    demos = write_demos(
        tmp_path / "demos.hdf5", [3, 4, 5, 6], masks={"train": [0, 2], "valid": [1]}
    )
    more = write_demos(tmp_path / "more.hdf5", [7, 8])
    parts = split(demos, None, tmp_path / "parts")
    assert [item.num_trajectories for item in parts.values()] == [2, 1] and set(parts) == {
        "train",
        "valid",
    }
    assert merge([demos, more], tmp_path / "both").num_trajectories == 6
    lengths = sorted(len(episode) for episode in rollout_data.open(tmp_path / "both"))
    assert lengths == [3, 4, 5, 6, 7, 8]
    first = rollout_data.open(tmp_path / "parts" / "valid")[0]
    assert np.array_equal(first["observation/low"], state(1, 4)) and first.terminated is None
    assert {episode.terminated for episode in rollout_data.open(tmp_path / "both")} == {None}, (
        "unknown ends stay unknown"
    )
    chosen = rollout_data.open(walk).filter(task="push")
    assert merge([chosen], tmp_path / "chosen").num_trajectories == 2
    with pytest.raises(SchemaError, match="Merge recordings with equal fields"):
        merge([walk, demos], tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_the_parts_of_a_split_hide_unfinished_and_dropped_trajectories(tmp_path: Path) -> None:
    record(
        tmp_path / "walk",
        [9, 5, 3],
        ends=["open", "terminated", "terminated"],
        num_envs=3,
        flush_every=2,
    )
    convert(tmp_path / "walk", tmp_path / "copy", progress=False)
    for name in ("walk", "copy"):
        parts = split(tmp_path / name, {"x": 0.34, "y": 0.66}, tmp_path / f"{name}_parts")
        merge([item.path for item in parts.values()], tmp_path / f"{name}_whole")
        assert content(tmp_path / f"{name}_whole") == content(tmp_path / name)


def test_an_invalid_argument_is_one_clear_error(walk: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"shares >= 0 that add up to 1"):
        split(walk, {"a": 0.9}, tmp_path / "x")
    with pytest.raises(UsageError, match=r"the part '\.\./y' is not a valid name of a folder"):
        split(walk, {"../y": 1.0}, tmp_path / "x")
    with pytest.raises(UsageError, match="sources is an empty list"):
        merge([], tmp_path / "x")
    with pytest.raises(UsageError, match="shares >= 0 that add up to 1, got"):
        split(walk, {"a": "b"}, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def cut(walk: Path) -> Path:
    """Truncate the first block of writer a."""
    path = min(walk.glob("rollout_a_0*.h5"))
    path.write_bytes(path.read_bytes()[:500])
    return path


def test_trajectories_of_a_damaged_block_are_left_out_and_named(
    walk: Path, tmp_path: Path, capsys
) -> None:
    path, before = cut(walk), content(walk)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RolloutDataWarning)
        intact = sorted(rollout_data.open(walk).ids)
        converted = convert(walk, tmp_path / "own", progress=False)
        merged = merge([walk], tmp_path / "merged")
        parts = split(walk, {"x": 0.5, "y": 0.5}, tmp_path / "parts")
        whole = [merged.path, *(part.path for part in parts.values())]
        assert content(walk) == before and 0 < len(intact) < 18
        assert main(["merge", str(walk), "--to", str(tmp_path / "by_command")]) == 1
    for done in (converted, merged, *parts.values()):
        assert path.name in str(done.problems[0]) and all(
            "left out" in str(problem) for problem in done.problems[1:]
        )
    assert path.name in capsys.readouterr().out
    actual = {
        folder.name: [episode.metadata["id"] for episode in rollout_data.open(folder)]
        for folder in whole
    }
    assert sorted(actual["merged"]) == sorted(actual["x"] + actual["y"]) == intact == sorted(before)


def test_advice_is_in_the_result_and_raises_nothing(tmp_path: Path, capsys) -> None:
    path = write_demos(tmp_path / "hand.hdf5", [10, 11, 12])
    with h5py.File(path, "r+") as file:
        for demo in file["data"].values():
            del demo["actions"]
            demo["actions"] = demo["obs/low"][:]
    recording = rollout_data.open(path)
    assert ["of the same step" in str(remark) for remark in recording.advice] == [True]
    parts = split(recording, {"x": 0.5, "y": 0.5}, tmp_path / "parts")
    made = [
        merge([path], tmp_path / "merged"),
        *parts.values(),
        convert(path, tmp_path / "own", progress=False),
    ]
    for done in made:
        assert done.problems == [] and [str(remark) for remark in done.advice] == [
            str(remark) for remark in recording.advice
        ]
    assert sum(part.num_trajectories for part in parts.values()) == made[0].num_trajectories == 3
    for command in (["merge"], ["convert"]):
        to = (
            [str(tmp_path / command[0])]
            if command == ["convert"]
            else ["--to", str(tmp_path / command[0])]
        )
        assert main([*command, str(path), *to]) == 0
        assert "The actions may be copied observations" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["walk", "walk/new", "walk/../walk/deep/new"])
def test_a_target_within_its_source_is_refused(
    walk: Path, tmp_path: Path, capsys, place: str
) -> None:
    before, to = files(walk), str(tmp_path / place)
    calls = [[name, str(walk), "--to", to] for name in ("merge", "split", "repair")]
    calls[1].append("a=1")
    for call in [*calls, ["pack", str(walk), to], ["convert", str(walk), to]]:
        assert main(call) == 2
        out, error = capsys.readouterr()
        assert not out and error.count("\n") == 1 and " outside of " in error
    assert files(walk) == before


def test_the_commands_merge_and_split(walk: Path, tmp_path: Path, capsys) -> None:
    assert main(["split", str(walk), "train=0.9", "val=0.1", "--to", str(tmp_path / "parts")]) == 0
    assert "val: 2 trajectories" in capsys.readouterr().out
    parts = [str(tmp_path / "parts" / name) for name in ("train", "val")]
    assert main(["merge", *parts, "--to", str(tmp_path / "whole"), "--json"]) == 0
    assert main(["split", str(walk), "a=1", "a=0", "--to", str(tmp_path / "twice")]) == 2
    out, error = capsys.readouterr()
    assert (
        "'a' is set twice, the second time by 'a=0'" in error
        and '"num_trajectories": 18' in out
        and content(tmp_path / "whole") == content(walk)
    )
