"""A recording lists, selects, filters and splits the episodes of a file, whatever its format."""

from __future__ import annotations

import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rollout_data
from rollout_data import RolloutWriter
from storage.errors import DataFileError, ForeignFileError, UsageError
from tests.recordings.sets import action, reward, state, write_demos

LENGTHS = {0: 3, 2: 1, 10: 4, 11: 2, 30: 6}
CHUNKS = Path(__file__).parents[1] / "data" / "trajectory_folders" / "components"


@pytest.fixture
def demos(tmp_path: Path) -> rollout_data.Recording:
    return rollout_data.open(
        write_demos(tmp_path / "demos.hdf5", LENGTHS, without_reward=[2], without_final=[0])
    )


def recorded(folder: Path) -> rollout_data.Recording:
    """Record four trajectories of two envs: one terminated, one truncated, and two cut off."""
    with RolloutWriter(folder, 2, durable=False, writer_name="w") as writer:
        for step in range(6):
            values = np.full((2, 2), 10.0 * step) + np.arange(2)
            notes = [{"task": "stack", "success": True, "seed": 7} if step == 2 else None, None]
            writer.add(
                observation=values,
                action=values.astype(np.float32),
                reward=[1.0, 2.0],
                terminated=[step == 2, False],
                truncated=[False, step == 3],
                final_observation=-values,
                episode=notes,
                words=["a", "b"],
            )
    return rollout_data.open(folder)


def test_episodes_are_in_numeric_order_and_have_every_field(demos):
    assert [episode.id for episode in demos] == [f"demo_{number}" for number in LENGTHS]
    for episode, (number, length) in zip(demos, LENGTHS.items(), strict=True):
        np.testing.assert_array_equal(episode.observation["low"], state(number, length))
        np.testing.assert_array_equal(episode.action, action(number, length))
        np.testing.assert_array_equal(episode["action"][1:], episode.read("action", 1))
        assert (episode.terminated, episode.truncated) == (None, None)
    assert (
        demos[1].reward is None and "reward" not in demos[1] and demos[0].final_observation is None
    )
    np.testing.assert_array_equal(demos[-1].reward, reward(30, 6))
    np.testing.assert_array_equal(demos[-1].final_observation["low"], state(30, 7)[-1])
    assert demos.format == "robomimic" and demos.metadata["env_args"]["env_name"] == "Lift"
    assert demos.schema["observation/low"].dtype == "float64"


def test_a_recording_is_indexed_and_sliced_like_a_list(demos):
    ids = [episode.id for episode in demos]
    assert len(demos) == 5 and demos[-2].id == ids[-2] and len(demos[0]) == 3
    for part in (slice(1, 3), slice(None, None, 2), slice(-2, None), slice(4, 1, -1), slice(9, 9)):
        assert demos[part].ids == ids[part]
    with pytest.raises(IndexError, match="index must be an integer in -5:5 or a slice, got 5"):
        demos[5]
    with pytest.raises(UsageError, match=r"got 'demo_2'\. Use select\(\) for names"):
        demos["demo_2"]


def test_the_table_has_a_row_for_each_episode(demos):
    assert demos.table["id"].tolist() == demos.ids
    assert demos.table["length"].tolist() == list(LENGTHS.values())
    sums = [reward(number, length).sum() for number, length in LENGTHS.items()]
    sums[1] = np.nan
    np.testing.assert_array_equal(demos.table["return"], sums)
    assert set(demos.table["ends"]) == {"unknown"} and np.isnat(demos.table["time"]).all()
    assert set(demos.table["success"]) == {-1} and set(demos.table["env"]) == {-1}


def test_filters_equal_a_naive_model(demos):
    long = [f"demo_{number}" for number, length in LENGTHS.items() if length > 2]
    assert demos.filter(length=lambda length: length > 2).ids == long
    assert demos.filter(lambda episode: episode.length > 2).ids == long
    assert demos.filter(lambda episode: episode.reward is not None, length=[1, 2, 3]).ids == [
        "demo_0",
        "demo_11",
    ]
    assert demos.filter(id="demo_2").filter(length=1).ids == ["demo_2"]
    assert len(demos.filter(success=True)) == 0
    with pytest.raises(UsageError, match=r"unknown column 'lenght', expected one of 'length', "):
        demos.filter(lenght=3)


def test_returns_are_a_column_to_filter_by(demos):
    assert demos.filter(**{"return": lambda value: value > 1000}).ids == [
        "demo_10",
        "demo_11",
        "demo_30",
    ]
    assert demos.filter(length=4, task="", ends="unknown").ids == ["demo_10"]


def num_calls(call: Callable[[], object]) -> int:
    """Return the number of Python and C functions that a call enters."""
    events: list[str] = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        call()
    finally:
        sys.setprofile(before)
    return sum(event in ("call", "c_call") for event in events)


def test_the_number_of_calls_for_table_and_filter_does_not_grow_with_the_episodes(tmp_path):
    counts = []
    for num_episodes in (100, 100, 1000):  # The first pass imports modules and fills caches.
        ends = np.ones((1, num_episodes), bool)
        folder = tmp_path / f"{len(counts)}"
        with RolloutWriter(folder, num_episodes, durable=False) as writer:
            writer.add_rollout(
                observation=ends[..., None],
                action=ends[..., None],
                reward=ends * 0.5,
                terminated=ends,
            )
        recording = rollout_data.open(folder)
        columns = {"ends": "terminated", "length": [1, 2]}
        filtering = num_calls(lambda: recording.filter(**columns))  # noqa: B023
        tabulating = num_calls(lambda: recording.table)  # noqa: B023
        by_return = num_calls(lambda: recording.filter(**{"return": 0.5}))  # noqa: B023
        assert len(recording.filter(**columns, **{"return": 0.5})) == num_episodes
        counts.append((filtering, tabulating, by_return))
    assert counts[1] == counts[2]


def test_a_recording_may_be_at_a_url(tmp_path):
    local = recorded(tmp_path)
    pytest.importorskip("fsspec")
    rollout_data.push(tmp_path, f"memory://{tmp_path.name}/own")
    remote = rollout_data.open(f"memory://{tmp_path.name}/own")
    np.testing.assert_array_equal(remote.table, local.table)
    for mine, theirs in zip(local, remote, strict=True):
        np.testing.assert_array_equal(mine.observation, theirs.observation)
        assert mine.metadata == theirs.metadata and mine["words"] == theirs["words"]


def test_selected_episodes_are_in_the_order_of_the_file(demos):
    assert demos.select(["demo_11", "demo_0"]).ids == ["demo_0", "demo_11"]
    assert demos.select("demo_10").ids == ["demo_10"]
    with pytest.raises(
        UsageError, match=r"no episode 'demo_1' among its 5 episodes, such as 'demo_11', "
    ):
        demos.select(["demo_1"])
    with pytest.raises(UsageError, match="demo_0"):
        demos[1:].select(["demo_0"])


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 2**32),
    shares=st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any),
)
def test_splits_are_disjoint_complete_and_repeatable(demos, seed, shares):
    parts = {str(place): share / sum(shares) for place, share in enumerate(shares)}
    split = demos.split(parts, seed)
    assert sorted(name for part in split.values() for name in part.ids) == sorted(demos.ids)
    assert {name: part.ids for name, part in demos.split(parts, seed).items()} == {
        n: p.ids for n, p in split.items()
    }
    for name, part in split.items():
        assert abs(len(part) - parts[name] * len(demos)) < 1


def test_shares_of_a_split_may_be_numpy_numbers(demos):
    expected = {name: part.ids for name, part in demos.split({"a": 0.5, "b": 0.5}).items()}
    for kind in (np.float32, np.float64, np.float16):
        split = demos.split({"a": kind(0.5), "b": kind(0.5)})
        assert {name: part.ids for name, part in split.items()} == expected
    with pytest.raises(UsageError, match="shares >= 0 that add up to 1"):
        demos.split({"a": True, "b": False})


def test_split_without_shares_returns_the_parts_stored_in_the_file(tmp_path):
    path = write_demos(tmp_path / "a.hdf5", LENGTHS, masks={"train": [0, 30, 10], "valid": [2]})
    recording = rollout_data.open(path)
    assert {name: part.ids for name, part in recording.split().items()} == {
        "train": ["demo_0", "demo_10", "demo_30"],
        "valid": ["demo_2"],
    }
    assert recording[:2].split()["train"].ids == ["demo_0"]
    with pytest.raises(UsageError, match="parts must have shares >= 0 that add up to 1"):
        recording.split({"train": 0.5})
    with pytest.raises(UsageError, match=r"b\.hdf5' defines no parts"):
        rollout_data.open(write_demos(tmp_path / "b.hdf5", [2])).split()


def test_a_pickled_recording_is_equal_in_another_process(demos):
    part = pickle.loads(pickle.dumps(demos[1:3]))
    assert part.ids == demos[1:3].ids
    np.testing.assert_array_equal(part[1].action, demos[2].action)


def test_statistics_are_kept_in_the_users_cache_folder_only(demos, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = sorted(tmp_path.iterdir())
    actual = demos.select(["demo_0", "demo_10"]).statistics(progress=False)
    values = np.concatenate([state(0, 3), state(10, 4)])
    np.testing.assert_allclose(actual["observation/low"].mean, values.mean(0))
    assert actual["action"].num_frames == 7
    assert sorted(path for path in tmp_path.iterdir() if path.name != "cache") == before
    assert list((tmp_path / "cache").rglob("*.npz"))


def test_episodes_of_block_files_have_notes_texts_and_ends(tmp_path):
    recording = recorded(tmp_path)
    assert recording.format == "rollout-data" and recording.ids == ["w:0", "w:1", "w:2", "w:3"]
    ends = [(episode.terminated, episode.truncated) for episode in recording]
    assert ends == [(True, False), (False, True), (None, None), (None, None)]
    assert recording.table["ends"].tolist() == ["terminated", "truncated", "open", "open"]
    first = recording[0]
    assert (first.task, first.success, first.metadata["seed"]) == ("stack", True, 7)
    assert recording.filter(success=True).ids == ["w:0"] and recording.filter(task="stack").ids == [
        "w:0"
    ]
    assert list(recording[1]["words"]) == ["b"] * 4
    np.testing.assert_array_equal(first.observation[:, 0], [0, 10, 20])
    np.testing.assert_array_equal(first.final_observation, [-20, -21])
    assert recording[2].final_observation is None


def test_schemas_of_episodes_with_absent_fields_are_listed_once(tmp_path):
    """A conversion notes flags of the end and parts of a joined observation as absent: they are no fields here."""
    absent = [["next.done"], ["count"], [], ["observation/left", "count"], ["observation/left"]]
    with RolloutWriter(tmp_path, 1, durable=False) as writer:
        for names in absent:
            noted = {"absent_fields": names}
            writer.add(observation=[[1.0]], action=[[0.0]], count=[3], done=[True], episode=noted)
    recording = rollout_data.open(tmp_path)
    which, schemas = recording.schemas()
    assert [list(schema) for schema in schemas] == [
        ["observation", "action", "count"],
        ["observation", "action"],
    ]
    assert which.tolist() == [0, 1, 0, 1, 0]
    assert [schemas[place] for place in which] == [episode.schema for episode in recording]


def test_episode_names_do_not_change_when_more_episodes_are_recorded(tmp_path):
    before = recorded(tmp_path)[1:3]
    with RolloutWriter(tmp_path, 2, durable=False, writer_name="a") as writer:
        row = np.zeros((2, 2))
        writer.add(
            observation=row,
            action=row.astype(np.float32),
            reward=[0.0, 0.0],
            done=[True, True],
            words=["c", "c"],
        )
    after = rollout_data.open(tmp_path)
    assert len(after) == 6
    np.testing.assert_array_equal(after.select(before.ids)[0].action, before[0].action)


def test_trajectory_folders_have_episodes(tmp_path):
    folder = Path(shutil.copytree(CHUNKS, tmp_path / "chunks"))
    recording = rollout_data.open(folder)
    assert recording.format == "trajectory-folders" and sorted(recording.ids) == [
        "trajectory_0:0",
        "trajectory_1:0",
    ]
    episode = recording.select(["trajectory_0:0"])[0]
    assert episode.truncated is True and episode.observation["depth"].shape == (5, 2, 3)


def test_a_path_that_cannot_be_opened_raises_a_clear_error(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.hdf5").write_text("hello")
    for name in ("empty", "text.hdf5"):
        with pytest.raises(ForeignFileError, match=r"no known format\. Pass format=.*robomimic"):
            rollout_data.open(tmp_path / name)
    with pytest.raises((UsageError, DataFileError), match="does not exist"):
        rollout_data.open(tmp_path / "missing")
    with pytest.raises(UsageError, match=r"format .*'robomimic'"):
        rollout_data.open(tmp_path / "text.hdf5", format="robomimicc")
    path = write_demos(tmp_path / "a.hdf5", [1])
    with pytest.raises(UsageError, match="'shiftobs'"):
        rollout_data.open(path, shiftobs=True)
    recorded(tmp_path / "own")
    with pytest.raises(UsageError, match=r"rollout-data has no option 'shift_obs'"):
        rollout_data.open(tmp_path / "own", shift_obs=True)


def test_an_unknown_field_raises_with_the_names_of_the_fields(demos):
    with pytest.raises(
        UsageError, match=r"has no field 'observation/lo', expected one of 'observation/low', "
    ):
        demos[0].read("observation/lo")
    with pytest.raises(UsageError, match="0 <= start <= stop <= 3"):
        demos[0].read("action", 2, 4)
    with pytest.raises(UsageError, match="'reward'"):
        demos[1]["reward"]
    with pytest.raises(KeyError, match="unknown field 'lwo', expected one of 'low'"):
        demos[0].observation["lwo"]
    assert "demo_0" in repr(demos) and "3 steps" in repr(demos[0])


def test_a_column_and_a_video_of_unknown_names_raise(demos):
    with pytest.raises(
        UsageError, match=r"Recording\.column: name must be one of .*'length'.* got 'size'"
    ):
        demos.column("size")
    with pytest.raises(
        UsageError, match=r"Episode\.video: .* has no field 'camera', expected one of "
    ):
        demos[0].video("camera")
