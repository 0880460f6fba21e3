"""Converting keeps every value of every episode, resumes after a stop, and reports its changes."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest

import rollout_data
from rollout_data import RolloutDataset, RolloutWriter
from rollout_data.blocks.block_header import read_header
from rollout_data.tools.cli.command_line import main
from storage.errors import RolloutDataWarning, UsageError
from tests.files.recorded import record
from tests.formats.cases import CASES, load, open_case
from tests.formats.lerobot_sets import LeRobotSet
from tests.recordings.sets import write_demos
from tests.recordings.test_recording import recorded

LENGTHS = [3, 1, 4]


def convert(source, target, **options):
    return rollout_data.convert(source, target, progress=False, **options)


def assert_same(
    mine: rollout_data.Episode, theirs: rollout_data.Episode, left_out: Collection[str] = ()
) -> None:
    """Compare an episode with its copy, bit by bit. Fields may be renamed or reordered."""
    about = [
        (episode.length, episode.terminated, episode.truncated, episode.success, episode.task)
        for episode in (mine, theirs)
    ]
    assert about[0] == about[1] and theirs.metadata["id"] == mine.id
    called = {
        name: name if name in theirs else f"recorded_{name}" for name in [*mine.schema, *mine.texts]
    }
    called = {name: other for name, other in called.items() if name not in left_out}
    assert set(called.values()) == {*theirs.schema, *theirs.texts}
    for name, other in called.items():
        values, others = mine.read(name), theirs.read(other)
        assert np.asarray(values).dtype == np.asarray(others).dtype
        np.testing.assert_array_equal(values, others, err_msg=name)
    finals = [episode.final_observation for episode in (mine, theirs)]
    assert type(finals[0]) is type(finals[1])
    if isinstance(finals[0], dict):
        assert finals[0].keys() == finals[1].keys()
    for name in finals[0] or () if isinstance(finals[0], dict) else ():
        np.testing.assert_array_equal(finals[0][name], finals[1][name])
    if isinstance(finals[0], np.ndarray):
        np.testing.assert_array_equal(*finals)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name.removesuffix(".case.json"))
def test_every_case_survives_a_conversion_to_our_own_format(path, tmp_path):
    recording = open_case(load(path))
    done = convert(recording, tmp_path / "own")
    ours = rollout_data.open(tmp_path / "own")
    assert done.num_episodes == len(ours) == len(recording)
    left_out = {
        change.split("'")[1]
        for change in done.changes
        if re.match("field '.*' is left out", change)
    }
    for mine, theirs in zip(recording, ours, strict=True):
        assert_same(mine, theirs, left_out)
        assert (mine.reward is None or "reward" in left_out) == (theirs.reward is None)


def test_block_files_converted_to_block_files_are_equal_in_every_bit(tmp_path):
    ours = recorded(tmp_path / "a")
    convert(ours, tmp_path / "b")
    again = rollout_data.open(tmp_path / "b")
    for mine, theirs in zip(ours, again, strict=True):
        assert_same(mine, theirs)
    for name in ("length", "return", "ends", "success", "task", "time", "env"):
        np.testing.assert_array_equal(ours.table[name], again.table[name])
    item, two = (RolloutDataset(tmp_path / name, 1, device="cpu").get_batch(12) for name in "ab")
    for name in ("observation", "action", "reward", "done", "timeout", "next_observation"):
        np.testing.assert_array_equal(getattr(item, name), getattr(two, name))


def test_unknown_ends_stay_unknown_in_streams_of_the_result(tmp_path):
    source = write_demos(tmp_path / "demos.hdf5", LENGTHS, without_final=[0])
    convert(source, tmp_path / "own")
    batch = RolloutDataset(tmp_path / "own", 1, device="cpu").get_batch(8)
    assert batch.end_unknown.sum() == 3 and not batch.timeout.any()
    assert rollout_data.open(tmp_path / "own").table["ends"].tolist() == ["unknown"] * 3


def test_an_interrupted_conversion_is_resumed(tmp_path):
    source = write_demos(tmp_path / "demos.hdf5", LENGTHS)
    convert(rollout_data.open(source)[:2], tmp_path / "own")
    before = sorted((tmp_path / "own").glob("rollout_*.h5"))
    done = convert(source, tmp_path / "own")
    assert (done.num_episodes, done.num_present) == (3, 2)
    ours = rollout_data.open(tmp_path / "own")
    assert sorted(item.metadata["id"] for item in ours) == ["demo_0", "demo_1", "demo_2"]
    assert convert(source, tmp_path / "own").num_present == 3
    assert set(before) < set((tmp_path / "own").glob("rollout_*.h5"))


def test_an_unreadable_episode_is_left_out_alone(tmp_path):
    source = tmp_path / "chunks"
    shutil.copytree(
        Path(__file__).parents[1] / "data" / "trajectory_folders" / "components", source
    )
    recording = rollout_data.open(source)
    victim = recording[0]
    for chunk in (source / victim.id.rpartition(":")[0]).iterdir():
        chunk.unlink()
    done = convert(recording, tmp_path / "own")
    assert done.num_episodes == 1 and victim.id.split(":")[0] in str(done.problems[-1])
    (kept,) = rollout_data.open(tmp_path / "own")
    assert kept.metadata["id"] == recording[1].id


def test_damaged_rows_are_reported_and_not_copied(tmp_path):
    record(tmp_path / "walk", [3, 4, 5])
    (path,) = (tmp_path / "walk").glob("*.h5")
    raw, header = bytearray(path.read_bytes()), read_header(path)
    raw[
        header.locations["data"]["frames"][0]
        + 4 * header.layouts["data"].columns["frames"].row_bytes
    ] ^= 1
    path.write_bytes(raw)
    done = convert(tmp_path / "walk", tmp_path / "own")
    assert done.num_episodes == 2 and "Frames 1:2 of trajectory 1" in str(done.problems[0])
    assert [episode.length for episode in rollout_data.open(tmp_path / "own")] == [3, 5]


def test_changes_are_in_the_report(tmp_path):
    picture = np.zeros((4, 2, 2, 3), np.uint8)
    more = {
        1: {"obs/low": np.zeros((1, 7)), "next_obs/low": np.zeros((1, 7))},
        2: {"dones": np.ones(4, np.int64)},
    }
    more[2]["obs/cam"] = picture
    with warnings.catch_warnings():
        warnings.simplefilter("error", RolloutDataWarning)
        done = convert(write_demos(tmp_path / "demos.hdf5", LENGTHS, more=more), tmp_path / "own")
    changes = {what: list(ids) for what, ids in done.changes.items()}
    assert done.num_episodes == 2
    assert changes["field 'recorded_dones' is left out: some episodes do not have it"] == ["demo_2"]
    assert changes["field 'observation/cam' is left out: some episodes do not have it"] == [
        "demo_2"
    ]
    (left_out,) = [what for what in changes if what.startswith("the episode is left out")]
    assert changes[left_out] == ["demo_1"] and "float64[7] instead of float64[3]" in left_out


def odd(folder: Path) -> rollout_data.Recording:
    """Record two episodes with values that some formats cannot store, and all kinds of metadata."""
    about = {"robot": "arm", "control_mode": "joint delta", "notes": {"a": [1, 2]}}
    with RolloutWriter(folder, 2, durable=False, metadata=about) as writer:
        for step in range(3):
            notes = {"task": "lift", "seed": 3, "tags": ["a"]} if step == 0 else {"success": True}
            row = np.full((2, 3), step, np.float32)
            observation = {"state": row, "fine": row.astype(np.float64)}
            record = {
                "observation": observation,
                "action": row.astype(np.float16),
                "truncated": [step == 2] * 2,
            }
            more = {
                "reward": row,
                "count": np.full(2, step),
                "words": ["a", "b"],
                "privileged_observation": row,
            }
            writer.add(**record, **more, final_observation=observation, episode=[notes, notes])
    return rollout_data.open(folder)


#: Format -> what is told of `odd`, besides what is kept.
LEFT_OUT = {
    "rollout-data": "",
    "lerobot": "control_mode notes robot .*ended after metadata",
    "robomimic": "notes robot words several .*ended",
    "isaaclab": "tags control_mode notes robot words several .*ended after",
    "minari": "control_mode notes robot made .*besides seed",
    "d4rl": "control_mode notes robot joined metadata",
    "rlinf": "control_mode notes robot called .*metadata of episodes",
    "trajectory-folders": "float64 float16 count texts after",
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_every_omitted_field_is_in_the_report(tmp_path, name):
    recording = odd(tmp_path / "odd")
    options = {"minari": {"missing_reward": 0.0}, "lerobot": {"fps": 10}}.get(name, {})
    done = convert(recording, tmp_path / "x.hdf5", to=name, **options)
    changes = "\n".join(done.changes)
    for word in LEFT_OUT[name].split():
        assert re.search(word, changes), (word, changes)
    assert bool(changes) == bool(LEFT_OUT[name]) and all(
        set(ids) <= set(recording.ids) for ids in done.changes.values()
    )
    metadata = rollout_data.open(tmp_path / "x.hdf5").metadata
    for key, value in (("robot", "arm"), ("control_mode", "joint delta"), ("notes", {"a": [1, 2]})):
        assert metadata.get(key) == value or key in changes


def test_rewards_with_several_terms_need_missing_reward_for_minari(tmp_path):
    with pytest.raises(
        UsageError,
        match=r"does not have one reward per step, which Minari needs\. Pass missing_reward=",
    ):
        convert(odd(tmp_path / "odd"), tmp_path / "x", to="minari")


def test_a_conversion_raises_for_occupied_targets_and_unknown_options(tmp_path):
    recorded(tmp_path / "own")
    source = write_demos(tmp_path / "demos.hdf5", LENGTHS)
    with pytest.raises(UsageError, match="Choose an empty target, or remove the existing files"):
        convert(source, tmp_path / "own")
    with pytest.raises(UsageError, match="is inside the source"):
        convert(tmp_path / "own", tmp_path / "own")
    with pytest.raises(
        UsageError, match=r"to='rolloutdata' is unknown\. Known formats are 'rollout-data'"
    ):
        convert(source, tmp_path / "x", to="rolloutdata")
    with pytest.raises(
        UsageError, match=r"option 'codecs' is unknown.*options 'obs_disassemble_mapping'"
    ):
        convert(source, tmp_path / "x", codecs={})


def test_the_command_line_lists_describes_and_converts_any_format(tmp_path, capsys):
    source = str(write_demos(tmp_path / "demos.hdf5", LENGTHS, without_reward=[1]))
    assert main(["ls", source]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["id", "length", "return", "ends", "success", "task"]
    assert lines[1].split() == ["demo_0", "3", "3.75", "unknown", "-"]
    assert lines[2].split() == ["demo_1", "1", "-", "unknown", "-"]
    assert main(["info", source]) == 0
    output = capsys.readouterr().out
    assert (
        "3 trajectories, 8 frames" in output
        and "format: robomimic" in output
        and "float64[3]" in output
    )
    assert main(["convert", source, str(tmp_path / "own")]) == 0
    assert "3 episodes, 0 of them already converted" in capsys.readouterr().out
    assert main(["ls", "--json", str(tmp_path / "own")]) == 0
    assert '"return": null' in capsys.readouterr().out
    assert main(["convert", source, str(tmp_path / "x"), "--option", "codecs=1"]) == 2
    assert "option 'codecs' is unknown" in capsys.readouterr().err


def test_the_command_line_passes_options_of_the_format_that_is_read(tmp_path, capsys):
    made = LeRobotSet(tmp_path / "set", [2, 3])
    made.entries[0]["dataset_to_index"] += 1
    path = str(made.write())
    assert main(["convert", path, str(tmp_path / "own")]) == 1
    assert 'on_bad_index="rebuild"' in capsys.readouterr().err
    for command in (["ls", path], ["convert", path, str(tmp_path / "own")]):
        main([*command, "--open", "on_bad_index=rebuild"])
    assert "2 episodes, 0 of them already converted" in capsys.readouterr().out
    assert main(["ls", path, "--open", "on_bad_idx=rebuild"]) == 2
