"""A conversion resumes only with its own source and options, one at a time, and never mixes
sources.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest

import rollout_data
from rollout_data import Episode
from rollout_data.formats.block_episode_writer import OwnWriter
from rollout_data.formats.registry import writer_class
from rollout_data.tools.edit.pack_folder import pack_dataset
from storage.core.locks import only_writer_of
from storage.errors import UsageError
from tests.formats.lerobot_sets import LeRobotSet, feature
from tests.recordings.conversions import (
    DATASET,
    IN_HDF5,
    LENGTHS,
    NOTE,
    TARGETS,
    Stop,
    content,
    convert,
    demos,
    every_target,
    in_child,
    place,
    remove_note,
    stop_after_three,
    stopped_at,
    values,
)
from tests.recordings.sets import state


def other_rows(path: Path, episode: int = 1, num_episodes: int = 6) -> Path:
    """Write a source with the same names and lengths. One value of one episode differs."""
    rows = state(episode, LENGTHS[episode])
    rows[-1, 2] += 1
    return demos(path, num_episodes, more={episode: {"obs/low": rows}})


@pytest.mark.parametrize("name", TARGETS)
def test_a_resumed_conversion_equals_an_uninterrupted_conversion(tmp_path, name):
    source = demos(tmp_path / "source.hdf5")
    convert(source, tmp_path / "whole", name)
    stop_after_three(source, tmp_path / "stopped", name)
    done = convert(source, tmp_path / "stopped", name)
    assert (done.num_episodes, done.num_present, done.problems) == (6, 3, [])
    assert values(place(tmp_path / "stopped", name)) == values(place(tmp_path / "whole", name))


@every_target
def test_changed_rows_raise_with_the_first_episode_and_field(tmp_path, name):
    source, other = demos(tmp_path / "source.hdf5"), other_rows(tmp_path / "other.hdf5")
    stop_after_three(source, tmp_path / "stopped", name)
    convert(source, tmp_path / "whole", name)
    for target in (tmp_path / "stopped", tmp_path / "whole"):
        before = content(place(target, name))
        with pytest.raises(
            UsageError, match=r"different values of 'observation/low' in episode 'demo_1'"
        ) as error:
            convert(other, target, name)
        assert repr(str(place(target, name))) in str(error.value)
        assert content(place(target, name)) == before
    assert convert(source, tmp_path / "stopped", name).num_episodes == 6


@every_target
def test_resuming_from_a_source_rewritten_in_place_raises(tmp_path, name):
    source = demos(tmp_path / "source.hdf5")
    convert(source, tmp_path, name)
    other_rows(source)
    with pytest.raises(
        UsageError, match=r"different values of 'observation/low' in episode 'demo_1'"
    ):
        convert(source, tmp_path, name)


@every_target
def test_repeating_a_complete_conversion_reads_and_writes_no_data(tmp_path, name):
    source = demos(tmp_path / "source" / "demos.hdf5")
    convert(source, tmp_path / "made", name)
    before = content(place(tmp_path / "made", name))
    with mock.patch.object(Episode, "read", side_effect=AssertionError("a row was read")):
        done = convert(source, tmp_path / "made", name)
    assert (done.num_episodes, done.num_present, done.problems) == (6, 6, [])
    assert content(place(tmp_path / "made", name)) == before


@every_target
def test_rows_are_compared_again_after_the_source_was_touched_or_moved(tmp_path, name):
    source = demos(tmp_path / "source.hdf5")
    convert(source, tmp_path / "made", name)
    os.utime(source, ns=(0, os.stat(source).st_mtime_ns + 1))
    with mock.patch.object(Episode, "read", side_effect=Stop), pytest.raises(Stop):
        convert(source, tmp_path / "made", name)
    moved = source.rename(tmp_path / "moved.hdf5")
    with mock.patch.object(Episode, "read", side_effect=Stop), pytest.raises(Stop):
        convert(moved, tmp_path / "made", name)
    assert convert(moved, tmp_path / "made", name).num_present == 6


@every_target
def test_a_moved_target_keeps_its_conversion_note(tmp_path, name):
    source = demos(tmp_path / "source.hdf5")
    convert(source, tmp_path / "made", name)
    place(tmp_path / "moved", name).parent.mkdir(parents=True)
    place(tmp_path / "made", name).rename(place(tmp_path / "moved", name))
    assert convert(source, tmp_path / "moved", name).num_present == 6


@every_target
def test_resuming_into_a_target_without_a_note_raises(tmp_path, name):
    source = demos(tmp_path / "source.hdf5")
    convert(source, tmp_path, name)
    remove_note(place(tmp_path, name), name)
    with pytest.raises(UsageError, match="Choose an empty target") as error:
        convert(source, tmp_path, name)
    assert str(place(tmp_path, name)) in str(error.value) and "rollout_conversion" in str(
        error.value
    )
    assert len(rollout_data.open(place(tmp_path, name))) == 6


@every_target
def test_resuming_with_another_selection_raises(tmp_path, name):
    source = demos(tmp_path / "source.hdf5")
    stop_after_three(source, tmp_path / "stopped", name)
    convert(source, tmp_path / "whole", name)
    recording = rollout_data.open(source)
    for target in (tmp_path / "stopped", tmp_path / "whole"):
        with pytest.raises(UsageError, match="5 episodes instead of 6"):
            convert(recording[:5], target, name)
    convert(recording[:5], tmp_path / "five", name)
    others = recording.select([f"demo_{number}" for number in (0, 2, 3, 4, 5)])
    with pytest.raises(UsageError, match=r"episode 'demo_2' instead of 'demo_1' at position 1"):
        convert(others, tmp_path / "five", name)


#: Target -> another option than the usual ones.
OTHER_OPTIONS = {
    "robomimic": {"obs_key": "other"},
    "isaaclab": {"env_name": "other"},
    "minari": {"missing_reward": 1.0},
    "d4rl": {"missing_reward": 1.0},
    "lerobot 3.0": {"fps": 50},
    "lerobot 2.1": {"fps": 50},
    "trajectory folders": {"env": "other"},
    "rollout-data": {"obs_disassemble_mapping": {"low": "zlib"}},
}


@pytest.mark.parametrize("name", OTHER_OPTIONS)
def test_resuming_with_other_options_raises_with_their_names(tmp_path, name):
    source = demos(tmp_path / "source.hdf5")
    stop_after_three(source, tmp_path / "stopped", name)
    convert(source, tmp_path / "whole", name)
    (option,) = OTHER_OPTIONS[name]
    for target in (tmp_path / "stopped", tmp_path / "whole"):
        with pytest.raises(UsageError, match=f"with other options: option {option}="):
            convert(source, target, name, **OTHER_OPTIONS[name])


def test_resuming_with_another_lerobot_version_raises(tmp_path):
    source = demos(tmp_path / "source.hdf5")
    convert(source, tmp_path, "lerobot 3.0")
    with pytest.raises(
        UsageError, match=r'with other options: option version="v2\.1" instead of "v3\.0"'
    ):
        convert(source, tmp_path, "lerobot 2.1")


#: Target -> options, each of the effect of the first ones.
SAME_OPTIONS = {
    "robomimic": [
        {},
        {"next_obs": 1, "env_name": None, "env_kwargs": {}},
        {"env_name": "", "next_obs": np.bool_(True), "obs_key": "state"},
    ],
    "isaaclab": [{}, {"env_name": None}, {"env_name": ""}],
    "minari": [
        {"missing_reward": 1},
        {"missing_reward": 1.0, "dataset_id": "lab/set-v0"},
        {"missing_reward": np.float32(1), "dataset_id": Path("lab/set-v0")},
        {"missing_reward": np.int64(1), "dataset_id": ""},
    ],
    "d4rl": [{"missing_reward": 0}, {"missing_reward": 0.0}, {"missing_reward": np.float64(0)}],
    "lerobot 3.0": [
        {"fps": 20},
        {"fps": 20.0},
        {"fps": np.float32(20), "video": ""},
        {"groot": np.bool_(False)},
    ],
    "lerobot 2.1": [{"fps": 20}, {"fps": np.int64(20)}],
    "trajectory folders": [
        {"missing_reward": 0},
        {"missing_reward": 0.0, "env": None, "policy": None},
    ],
    "rollout-data": [
        {},
        {"obs_disassemble_mapping": None},
        {"obs_disassemble_mapping": {"low": "raw"}},
    ],
}


@pytest.mark.parametrize("name", SAME_OPTIONS)
def test_resuming_accepts_options_with_the_same_effect(tmp_path, name):
    source = demos(tmp_path / "source.hdf5")
    first, *others = SAME_OPTIONS[name]
    convert(source, tmp_path / "whole", name, **first)
    for number, options in enumerate(others):
        assert convert(source, tmp_path / "whole", name, **options).num_present == 6
        stop_after_three(source, tmp_path / str(number), name, **options)
        assert convert(source, tmp_path / str(number), name, **first).num_present == 3
        assert values(place(tmp_path / str(number), name)) == values(
            place(tmp_path / "whole", name)
        )


def test_resuming_treats_tuples_and_lists_of_options_alike(tmp_path):
    source = demos(tmp_path / "source.hdf5")
    convert(source, tmp_path, "robomimic", env_kwargs={"size": (1, 2)})
    assert convert(source, tmp_path, "robomimic", env_kwargs={"size": [1, 2]}).num_present == 6


@pytest.mark.parametrize("stated", [{"frame_rate_hz": 20}, {"fps": 20.0}])
def test_resuming_treats_a_stored_frame_rate_and_an_equal_argument_alike(tmp_path, stated):
    with rollout_data.RolloutWriter(
        tmp_path / "source", 1, metadata={**stated, "env": "lab"}
    ) as writer:
        for number in range(3):
            rows = np.full((1, 2), number, np.float32)
            writer.add(observation=rows, action=rows, reward=[1.0], terminated=[True])
    for first, second in (
        ({}, {"fps": 20}),
        ({"fps": 20}, {}),
        ({"fps": 20.0}, {"fps": 20, "video": ""}),
    ):
        target = tmp_path / str((first, second))
        rollout_data.convert(tmp_path / "source", target, "lerobot", progress=False, **first)
        done = rollout_data.convert(
            tmp_path / "source", target, "lerobot", progress=False, **second
        )
        assert done.num_present == 3
        with pytest.raises(UsageError, match=r"with other options: option fps=50\.0 instead of"):
            rollout_data.convert(tmp_path / "source", target, "lerobot", progress=False, fps=50)
    for to, options in (("trajectory-folders", {"env": "lab"}), ("robomimic", {"env_name": "lab"})):
        rollout_data.convert(tmp_path / "source", tmp_path / to, to, progress=False)
        done = rollout_data.convert(
            tmp_path / "source", tmp_path / to, to, progress=False, **options
        )
        assert done.num_present == 3
        with pytest.raises(UsageError, match=r'with other options: option env.*="other"'):
            other = dict.fromkeys(options, "other")
            rollout_data.convert(tmp_path / "source", tmp_path / to, to, progress=False, **other)


@every_target
def test_resuming_with_another_source_format_raises(tmp_path, name):
    source = demos(tmp_path / "source.hdf5")
    convert(source, tmp_path, name)
    other = "rlinf" if name != "rlinf" else "trajectory folders"
    to = TARGETS[other][0]
    with pytest.raises(UsageError, match=r"instead of|Choose an empty target"):
        rollout_data.convert(source, place(tmp_path, name), to, progress=False)


@every_target
def test_new_episodes_of_the_source_are_added_to_an_unfinished_target(tmp_path, name):
    source = demos(tmp_path / "source.hdf5", 5)
    stop_after_three(source, tmp_path / "stopped", name)
    demos(source, 6)
    done = convert(source, tmp_path / "stopped", name)
    assert (done.num_episodes, done.num_present) == (6, 3)
    convert(source, tmp_path / "whole", name)
    assert values(place(tmp_path / "stopped", name)) == values(place(tmp_path / "whole", name))


@every_target
def test_a_new_episode_with_another_field_adds_the_field_to_every_episode(tmp_path, name):
    if name == "rollout-data":
        pytest.skip("a folder of block files has the fields of its first block")
    source = demos(tmp_path / "source.hdf5", 5)
    stop_after_three(source, tmp_path / "stopped", name)
    more = {
        5: {
            "obs/extra": np.ones((LENGTHS[5], 1), np.float32),
            "next_obs/extra": np.ones((LENGTHS[5], 1), "f4"),
        }
    }
    demos(source, 6, more=more)
    convert(source, tmp_path / "stopped", name)
    convert(source, tmp_path / "whole", name)
    assert values(place(tmp_path / "stopped", name)) == values(place(tmp_path / "whole", name))


@every_target
def test_new_episodes_are_added_to_a_complete_target_of_block_files_only(tmp_path, name):
    source = demos(tmp_path / "source.hdf5", 4)
    convert(source, tmp_path, name)
    demos(source, 6)
    if name == "rollout-data":
        done = convert(source, tmp_path, name)
        assert (done.num_episodes, done.num_present) == (6, 4)
        assert [episode.metadata["id"] for episode in rollout_data.open(place(tmp_path, name))] == [
            f"demo_{number}" for number in range(6)
        ]
        return
    before = content(place(tmp_path, name))
    with pytest.raises(
        UsageError, match=r"has 4 episodes, but the source has 2 more, such as 'demo_4'"
    ):
        convert(source, tmp_path, name)
    assert content(place(tmp_path, name)) == before


@every_target
def test_changed_final_rows_rewards_and_lengths_raise(tmp_path, name):
    source = demos(tmp_path / "source.hdf5")
    convert(source, tmp_path / "made", name)
    following = state(2, LENGTHS[2] + 1)[1:]
    following[-1, 0] = 7
    other = demos(tmp_path / "other.hdf5", more={2: {"next_obs/low": following}})
    with pytest.raises(
        UsageError,
        match=r"different values of 'observation/low' after the last step in episode 'demo_2'",
    ):
        convert(other, tmp_path / "made", name)
    other = demos(tmp_path / "other.hdf5", more={4: {"rewards": np.array([0.0, 0.5])}})
    with pytest.raises(UsageError, match=r"different values of 'reward' in episode 'demo_4'"):
        convert(other, tmp_path / "made", name)
    with h5py.File(source, "r+") as file:
        file["data/demo_3"].attrs["ep_meta"] = '{"lang": "lift"}'
    with pytest.raises(UsageError, match=r"of episode 'demo_3'"):
        convert(source, tmp_path / "made", name)


@pytest.mark.parametrize("name", ["lerobot 3.0", "rlinf", "rollout-data"])
def test_changed_texts_of_steps_raise(tmp_path, name):
    import pyarrow

    def source(path: Path, word: str) -> Path:
        note = feature("string", [1]), lambda episode, length: pyarrow.array([word] * length)
        return LeRobotSet(path, LENGTHS, columns={"note": note}).write()

    options = {"fps": None} if name == "lerobot 3.0" else {}
    convert(source(tmp_path / "one", "left"), tmp_path / "made", name, **options)
    with pytest.raises(UsageError, match=r"different values of 'note' in episode '0'"):
        convert(source(tmp_path / "two", "rite"), tmp_path / "made", name, **options)
    assert convert(tmp_path / "one", tmp_path / "made", name, **options).num_present == 6


@every_target
def test_a_concurrent_conversion_into_the_same_target_raises_at_once(tmp_path, name):
    source = demos(tmp_path / "source.hdf5")
    read, refused = Episode.read, []

    def second(self, *arguments, **options):
        if self.id == "demo_3" and not refused:
            for act in (lambda: convert(source, tmp_path, name), in_thread, in_other_process):
                refused.append(message_of(act))
        return read(self, *arguments, **options)

    def in_thread():
        result = []
        thread = threading.Thread(
            target=lambda: result.append(message_of(lambda: convert(source, tmp_path, name)))
        )
        thread.start()
        thread.join()
        raise UsageError(message=result[0])

    def in_other_process():
        status = in_child(lambda: convert(source, tmp_path, name))
        raise UsageError(
            message="another process or thread" if status == 1 else f"it ended with {status}"
        )

    with mock.patch.object(Episode, "read", second):
        done = convert(source, tmp_path, name)
    assert len(refused) == 3 and all("another process or thread" in item for item in refused)
    assert (done.num_episodes, done.num_present) == (6, 0)
    assert len(rollout_data.open(place(tmp_path, name))) == 6
    assert [path.name for path in place(tmp_path, name).parent.glob(".*")] == []


def message_of(act) -> str:
    try:
        act()
    except UsageError as error:
        return str(error)
    return "nothing"


@every_target
def test_a_killed_conversion_leaves_no_lock_on_its_target(tmp_path, name):
    source = demos(tmp_path / "source.hdf5")

    def killed():
        with (
            stopped_at(0),
            mock.patch.object(
                Episode, "read", lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
            ),
        ):
            convert(source, tmp_path, name)

    assert in_child(killed) == -signal.SIGKILL
    assert list(place(tmp_path, name).parent.glob(".rollout_*.lock"))
    done = convert(source, tmp_path, name)
    assert (done.num_episodes, done.num_present) == (6, 0)
    assert not list(place(tmp_path, name).parent.glob(".rollout_*.lock"))


def test_two_targets_in_one_folder_do_not_wait_for_each_other(tmp_path):
    source = demos(tmp_path / "source.hdf5")
    read, done = Episode.read, []

    def second(self, *arguments, **options):
        if not done:
            done.append(None)
            rollout_data.convert(source, tmp_path / "other.hdf5", "d4rl", progress=False)
        return read(self, *arguments, **options)

    with mock.patch.object(Episode, "read", second):
        convert(source, tmp_path, "robomimic")
    assert len(rollout_data.open(tmp_path / "other.hdf5")) == 6


@pytest.mark.parametrize("name", [name for name in TARGETS if name not in IN_HDF5])
def test_a_conversion_with_invalid_arguments_creates_no_file(tmp_path, name):
    source = demos(tmp_path / "source.hdf5", without_reward=range(6))
    if name in ("trajectory folders",):
        with pytest.raises(UsageError, match="missing_reward"):
            convert(source, tmp_path / "made", name)
        assert not place(tmp_path / "made", name).exists()
        convert(source, tmp_path / "made", name, missing_reward=0.0)
    else:
        convert(source, tmp_path / "made", name)
    assert len(rollout_data.open(place(tmp_path / "made", name))) == 6


@every_target
def test_the_doctor_and_open_ignore_the_conversion_note(tmp_path, name):
    convert(demos(tmp_path / "source.hdf5"), tmp_path / "made", name)
    report = rollout_data.doctor(place(tmp_path / "made", name))
    assert not [
        finding for finding in report.findings if finding.code in ("FIL02", "FIL03", "FIL05")
    ]
    recording = rollout_data.open(place(tmp_path / "made", name))
    assert recording.problems == [] and not [
        key for key in recording.metadata if "rollout_conversion" in str(key)
    ]


def test_a_conversion_that_wrote_no_episode_leaves_no_note(tmp_path):
    source, other = demos(tmp_path / "source.hdf5"), other_rows(tmp_path / "other.hdf5")
    for name in TARGETS:
        with stopped_at(0), pytest.raises(Stop):
            convert(source, tmp_path / name, name)
        assert convert(other, tmp_path / name, name).num_present == 0
        convert(other, tmp_path / name / "whole", name)
        assert values(place(tmp_path / name, name)) == values(
            place(tmp_path / name / "whole", name)
        )
        shutil.rmtree(tmp_path / name)


@every_target
def test_a_damaged_note_of_a_complete_target_raises(tmp_path, name):
    if name == "rollout-data":
        pytest.skip("an episode without its line is written again, or refused")
    source = demos(tmp_path / "source.hdf5")
    convert(source, tmp_path / "made", name)
    (file,) = [
        path for path in (tmp_path / "made").rglob("*") if b'{"episode": "demo_2"' in bytes_of(path)
    ]
    whole = file.read_bytes()
    for old, new in (
        (b'{"episode": "demo_2"', b'{"epjsode": "demo_2"'),
        (b'{"episode": "demo_2"', b'x"episode": "demo_2"'),
    ):
        file.write_bytes(whole.replace(old, new))
        with pytest.raises(UsageError, match="a complete target with a damaged 'rollout_conv"):
            convert(source, tmp_path / "made", name)
    for old, new in (
        (b'"metadata": {}}', b'"metedata": {}}'),
        (b'"id": "demo_3"', b'"ie": "demo_3"'),
        (b'"texts"', b'"tests"'),
    ):
        file.write_bytes(whole.replace(old, new, 1))
        with pytest.raises(UsageError, match=r"has a damaged|has no dataset"):
            convert(source, tmp_path / "made", name)


@every_target
def test_a_dangling_link_as_target_raises_and_creates_no_file(tmp_path, name):
    source = demos(tmp_path / "source.hdf5")
    target = place(tmp_path / "made", name)
    target.parent.mkdir(parents=True)
    for where in (tmp_path / "nothing" / "here", target):  # the second one is a link to itself
        target.symlink_to(where)
        with pytest.raises(UsageError, match="is a link to a missing file") as error:
            convert(source, tmp_path / "made", name)
        assert repr(str(target)) in str(error.value)
        assert [*target.parent.iterdir()] == [target] and not (tmp_path / "nothing").exists()
        target.unlink()


@every_target
def test_a_link_to_a_target_is_followed(tmp_path, name):
    source = demos(tmp_path / "source.hdf5")
    convert(source, tmp_path / "made", name)
    link = place(tmp_path / "link", name)
    link.parent.mkdir(parents=True)
    link.symlink_to(place(tmp_path / "made", name))
    assert convert(source, tmp_path / "link", name).num_present == 6


@every_target
def test_a_conversion_resumes_after_its_source_was_moved(tmp_path, name):
    source = demos(tmp_path / "source.hdf5")
    convert(source, tmp_path / "whole", name)
    stop_after_three(source, tmp_path / "stopped", name)
    moved = tmp_path / "elsewhere" / "other name.hdf5"
    moved.parent.mkdir()
    source.rename(moved)
    done = convert(moved, tmp_path / "stopped", name)
    assert (done.num_episodes, done.num_present) == (6, 3)
    assert values(place(tmp_path / "stopped", name)) == values(place(tmp_path / "whole", name))


@every_target
def test_a_note_of_another_writer_version_raises(tmp_path, name):
    source = demos(tmp_path / "source.hdf5")
    kind = OwnWriter if name == "rollout-data" else writer_class(TARGETS[name][0])
    for number, make in enumerate((convert, stop_after_three)):
        with mock.patch.object(kind, "VERSION", kind.VERSION - 1):
            make(source, tmp_path / str(number), name)
        before = content(place(tmp_path / str(number), name))
        with pytest.raises(
            UsageError, match=f"version {kind.VERSION} of the writer instead of {kind.VERSION - 1}"
        ):
            convert(source, tmp_path / str(number), name)
        assert content(place(tmp_path / str(number), name)) == before


def hostile_notes(text: str) -> dict[str, str]:
    """Return damaged notes, and notes that were made to do harm."""
    first, *lines = text.splitlines()
    about = json.loads(first)
    deep = "[" * 100_000 + "]" * 100_000
    changed: dict[str, Any] = {
        "episodes are texts": {"episodes": ["a", "b"]},
        "episodes are an object": {"episodes": {"a": 1}},
        "episodes are a number": {"episodes": 5},
        "no fields": {"fields": []},
        "fields are numbers": {"fields": [1] * len(about["fields"])},
        "forms are lists": {"fields": [{"numbers": {"action": [1]}, "texts": [], "final": []}]},
        "options are a list": {"options": [1]},
        "options of other types": {
            "options": {**{key: [None] for key in about["options"]}, "more": 1}
        },
        "metadata are a text": {"metadata": "x"},
        "the version is a list": {"version": [[]]},
        "the format is long": {"format": "x" * 1_000_000},
        "left out are lists": {"left_out": [[1]]},
        "left out is a number": {"left_out": 7},
        "the source is a number": {"source": 3},
        "lengths are huge": {
            "episodes": [{**item, "length": 10**30} for item in about["episodes"]]
        },
        "lengths are negative": {
            "episodes": [{**item, "length": -1} for item in about["episodes"]]
        },
        "lengths are NaN": {
            "episodes": [{**item, "length": float("nan")} for item in about["episodes"]]
        },
        "ids are equal": {"episodes": [{**item, "id": "demo_0"} for item in about["episodes"]]},
        "options are nested": {
            "options": {**about["options"], "x": json.loads("[" * 400 + "]" * 400)}
        },
    }
    actual = {
        name: "\n".join([json.dumps({**about, **part}), *lines]) + "\n"
        for name, part in changed.items()
    }
    actual["a repeated name"] = "\n".join([f'{{"format": "other", {first[1:]}', *lines]) + "\n"
    actual["deep"] = f'{{"rollout_conversion": 1, "options": {deep}}}\n'
    actual["a long number"] = '{"rollout_conversion": ' + "1" * 10_000 + "}\n"
    actual["no text"] = "\0" * 100
    sums = json.dumps(
        {"episode": "demo_0", "rows": {"action": "0"}, "files": {"../../etc/passwd": [1, "0", 1]}}
    )
    actual["a file outside"] = "\n".join([first, *lines, sums]) + "\n"
    actual["a size that is a text"] = (
        "\n".join([first, *lines, '{"files": {"a": ["1", "0", 1]}}']) + "\n"
    )
    actual["a huge size"] = (
        "\n".join([first, *lines, f'{{"files": {{"a": [{10**40}, "0", {10**40}]}}}}']) + "\n"
    )
    actual["deep lines"] = "\n".join([first, *lines, f'{{"files": {deep}}}']) + "\n"
    return actual


@pytest.mark.parametrize("name", [name for name in TARGETS if name not in IN_HDF5])
def test_a_hostile_note_raises_a_short_error_and_writes_no_file(tmp_path, name):
    source = demos(tmp_path / "source.hdf5")
    convert(source, tmp_path / "made", name)
    note = place(tmp_path / "made", name) / NOTE
    for damage, text in hostile_notes(note.read_text()).items():
        note.write_text(text)
        if name == "rollout-data" and damage in (
            "a file outside",
            "a size that is a text",
            "deep lines",
        ):
            # The line counts as none
            assert convert(source, tmp_path / "made", name).num_present == 6, damage
            continue
        before = content(place(tmp_path / "made", name))
        with pytest.raises(UsageError) as error:
            convert(source, tmp_path / "made", name)
        assert len(str(error.value)) < 2_000, damage
        assert content(place(tmp_path / "made", name)) == before, damage


@pytest.mark.parametrize("name", IN_HDF5)
def test_a_hostile_note_in_an_hdf5_file_raises_a_short_error(tmp_path, name):
    source = demos(tmp_path / "source.hdf5")
    convert(source, tmp_path / "made", name)
    file = place(tmp_path / "made", name)
    file = file / "data" / "main_data.hdf5" if name == "minari" else file
    dataset = f"metadata/{DATASET}" if name == "d4rl" else DATASET
    with h5py.File(file) as opened:
        whole = opened[dataset][()].tobytes().decode()
    for damage, text in hostile_notes(whole).items():
        with h5py.File(file, "r+") as opened:
            del opened[dataset]
            opened[dataset] = np.frombuffer(text.encode(), np.uint8)
        with pytest.raises(UsageError) as error:
            convert(source, tmp_path / "made", name)
        assert len(str(error.value)) < 2_000, damage


def bytes_of(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def test_metadata_that_differ_in_type_or_sign_count_as_changed(tmp_path):
    def source(path: Path, value: object) -> Path:
        with rollout_data.RolloutWriter(
            path, 1, writer_name="arm", metadata={"gain": value}
        ) as writer:
            writer.add(
                observation=np.ones((1, 2), np.float32),
                action=np.ones((1, 1), np.float32),
                terminated=[True],
            )
        return path

    with mock.patch("time.time_ns", lambda: 10**18):
        sources = [
            source(tmp_path / str(number), value)
            for number, value in enumerate((0.0, -0.0, False, 0))
        ]
    rollout_data.convert(sources[0], tmp_path / "made", progress=False)
    for other in sources[1:]:
        with pytest.raises(UsageError, match="metadata 'gain'"):
            rollout_data.convert(other, tmp_path / "made", progress=False)


@pytest.mark.parametrize("name", IN_HDF5)
def test_a_source_restored_between_two_conversions_is_compared_again(tmp_path, name):
    source = demos(tmp_path / "source.hdf5")
    first, state_of_first = source.read_bytes(), source.stat()
    stop_after_three(source, tmp_path / "made", name)
    other_rows(source, episode=5)
    convert(source, tmp_path / "made", name)  # the first three are equal
    source.write_bytes(first)
    os.utime(source, ns=(0, state_of_first.st_mtime_ns))
    with pytest.raises(
        UsageError, match="different values of 'observation/low' in episode 'demo_5'"
    ):
        convert(source, tmp_path / "made", name)


@every_target
def test_a_complete_conversion_is_repeated_in_a_read_only_folder(tmp_path, name):
    source = demos(tmp_path / "source.hdf5")
    convert(source, tmp_path, name)
    make = os.open

    def refusing(path, flags, *arguments, **options):
        if str(path).endswith(".lock"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return make(path, flags, *arguments, **options)

    with mock.patch.object(os, "open", refusing):
        assert convert(source, tmp_path, name).num_present == 6
        descriptor = os.open(place(tmp_path, name), os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another process or thread"):
            convert(source, tmp_path, name)
        os.close(descriptor)


@pytest.mark.parametrize("action", ["merge", "split", "repair"])
def test_merge_split_and_repair_lock_their_target_folder(tmp_path, action):
    source = demos(tmp_path / "source.hdf5")
    act = {
        "merge": lambda: rollout_data.merge([source], tmp_path / "made"),
        "split": lambda: rollout_data.split(source, {"a": 0.5, "b": 0.5}, tmp_path / "made"),
        "repair": lambda: rollout_data.repair(source, tmp_path / "made"),
    }[action]
    with (
        only_writer_of(tmp_path / "made"),
        pytest.raises(UsageError, match="another process or thread"),
    ):
        act()
    act()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    with pytest.raises(UsageError, match="a new or empty folder"):
        act()


def test_pack_locks_its_target_folder(tmp_path):
    rollout_data.convert(demos(tmp_path / "source.hdf5"), tmp_path / "own", progress=False)
    with (
        only_writer_of(tmp_path / "made"),
        pytest.raises(UsageError, match="another process or thread"),
    ):
        pack_dataset(tmp_path / "own", tmp_path / "made")
    pack_dataset(tmp_path / "own", tmp_path / "made")
    assert len(rollout_data.open(tmp_path / "made")) == len(rollout_data.open(tmp_path / "own"))
