"""Damaged windows: by default an error names the file, the episode and the frame.

"skip" makes batches shorter.
"""

from __future__ import annotations

import sys
import types
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import rollout_data
from rollout_data import RolloutWriter, WindowDataset, WindowLoader, WindowMixture
from rollout_data.ray import read_rollouts
from storage.errors import CorruptFileError, DataFileError, RolloutDataWarning, UsageError

pq = pytest.importorskip("pyarrow.parquet")
import pyarrow as pa  # noqa: E402

DAMAGED = [(1, 4)]


def recorded(folder):
    """Record 4 episodes of 10 frames; the state is (episode, frame)."""
    generator = np.random.default_rng(0)
    with RolloutWriter(folder, 1, writer_name="arm", durable=False) as writer:
        for episode in range(4):
            for frame in range(10):
                state = np.array([[episode, frame]], np.float32)
                rgb = generator.integers(0, 255, (1, 8, 8, 3)).astype(np.uint8)
                writer.add(
                    observation={"state": state, "rgb": rgb}, action=state, terminated=[frame == 9]
                )
    return folder


def damaged_set(folder, damaged=DAMAGED):
    """Write a LeRobot set in which some pictures, (episode, frame), are truncated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rollout_data.convert(
            recorded(folder / "own"), folder / "set", "lerobot", fps=20, progress=False
        )
    for episode, frame in damaged:
        path = sorted((folder / "set").glob("data/**/*.parquet"))[episode]
        table = pq.read_table(path)
        column = next(name for name in table.column_names if "rgb" in name)
        values = table[column].to_pylist()
        values[frame]["bytes"] = values[frame]["bytes"][:20]
        array = pa.array(values, table[column].type)
        number = table.schema.get_field_index(column)
        pq.write_table(table.set_column(number, table.schema.field(column), array), path)
    return folder / "set"


def seen(batches) -> list[tuple[int, int]]:
    """List (episode, first frame) of all windows in their order."""
    states = [batch["observation"]["state"][:, 0] for batch in batches]
    return [(int(episode), int(frame)) for batch in states for episode, frame in batch]


def quiet(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RolloutDataWarning)
        return make()


@pytest.mark.parametrize("length", [1, 3])
def test_a_damaged_picture_raises_with_file_episode_and_frame_by_default(tmp_path, length):
    windows = WindowDataset(damaged_set(tmp_path), length)
    file = sorted((tmp_path / "set").glob("data/**/*.parquet"))[1]
    with pytest.raises(CorruptFileError) as actual:
        list(WindowLoader(windows, 4, shuffle=False))
    text = str(actual.value)
    assert f"frame 4 of episode '1' in '{file}' cannot be read: " in text
    assert "a truncated PNG" in text and "open the dataset again" not in text
    number = next(
        n for n in range(len(windows)) if windows.locate([n])[1][0] == 4 and n >= len(windows) // 4
    )
    with pytest.raises(CorruptFileError, match="frame 4 of episode '1'"):
        windows[number]


@pytest.mark.each_value
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("by", ["dataset", "loader"])
def test_on_error_skip_shortens_the_batch_and_moves_no_other_window(tmp_path, length, shuffle, by):
    data = damaged_set(tmp_path)
    sound = WindowLoader(WindowDataset(tmp_path / "own", length), 4, shuffle=shuffle, seed=1)
    windows = WindowDataset(data, length, **({"on_error": "skip"} if by == "dataset" else {}))
    other = {"on_error": "skip"} if by == "loader" else {}
    loader = WindowLoader(windows, 4, shuffle=shuffle, seed=1, **other)
    with pytest.warns(RolloutDataWarning, match="frame 4 of episode '1'"):
        batches = list(loader)
    order, lost = loader.order(0).tolist(), set(range(*_touching(length)))
    expected = [[n for n in order[k : k + 4] if n not in lost] for k in range(0, len(order), 4)]
    assert [len(batch["action"]) for batch in batches] == [len(numbers) for numbers in expected]
    wanted = [windows.locate([n])[1][0] for numbers in expected for n in numbers]
    assert [frame for _, frame in seen(batches)] == wanted
    assert windows.num_lost_windows == loader.num_lost_windows == len(lost)
    assert any("frame 4 of episode '1'" in str(problem) for problem in windows.problems)
    quiet(lambda: list(loader))
    assert windows.num_lost_windows == len(lost)  # each counts once, in any number of epochs
    assert len(list(sound)) == len(batches)


def _touching(length: int) -> tuple[int, int]:
    """Return the numbers of the windows with frame 4 of episode 1: first, and stop."""
    per_episode = 10 - length + 1
    return per_episode + 4 - length + 1, per_episode + 5


def test_every_damaged_picture_loses_its_own_windows_only(tmp_path):
    damaged = [(0, 0), (1, 0), (1, 5), (1, 9), (3, 3)]
    windows = WindowDataset(damaged_set(tmp_path, damaged), 1, on_error="skip")
    actual = quiet(lambda: seen(WindowLoader(windows, 4, shuffle=False)))
    assert actual == [(e, t) for e in range(4) for t in range(10) if (e, t) not in damaged]
    assert windows.num_lost_windows == len(damaged)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_windows_skipped_by_workers_are_counted_in_the_main_process(tmp_path, context):
    windows = WindowDataset(damaged_set(tmp_path), 1, on_error="skip")
    options = {
        "num_workers": 2 if context == "fork" else 1,
        "collate_fn": windows.collate,
        "multiprocessing_context": context,
    }
    actual = seen(DataLoader(windows, 4, **options))
    assert actual == [(e, t) for e in range(4) for t in range(10) if (e, t) != (1, 4)]
    assert windows.num_lost_windows == 1
    with pytest.warns(RolloutDataWarning):
        assert any("frame 4 of episode '1'" in str(problem) for problem in windows.problems)
    raising, options["multiprocessing_context"] = WindowDataset(windows.data_dir, 1), "fork"
    with pytest.raises(DataFileError, match="frame 4 of episode '1'"):
        list(DataLoader(raising, 4, **options))


@pytest.mark.parametrize("num_before", [3, 4])
def test_a_skipped_picture_does_not_change_ranks_or_resuming(tmp_path, num_before):
    data = damaged_set(tmp_path)
    windows = WindowDataset(data, 1, on_error="skip")
    whole = quiet(lambda: seen(WindowLoader(windows, 4, seed=2)))
    parts = [
        quiet(lambda rank=rank: list(WindowLoader(windows, 2, seed=2, shard=(rank, 2))))
        for rank in (0, 1)
    ]
    assert len(parts[0]) == len(parts[1]) == 10
    assert seen(batch for pair in zip(*parts, strict=True) for batch in pair) == whole
    loader = WindowLoader(windows, 4, seed=2)
    batches = iter(loader)
    before = quiet(lambda: seen(next(batches) for _ in range(num_before)))
    other = WindowLoader(WindowDataset(data, 1, on_error="skip"), 4, seed=2)
    other.load_state_dict(loader.state_dict())
    assert before + quiet(lambda: seen(other)) == whole


def test_a_batch_of_which_every_window_is_damaged_is_empty(tmp_path):
    windows = WindowDataset(damaged_set(tmp_path), 1, on_error="skip", next_observations=True)
    batches = quiet(lambda: list(WindowLoader(windows, 1, shuffle=False)))
    assert [len(batch["action"]) for batch in batches] == [
        int(n not in (13, 14)) for n in range(40)
    ]
    assert batches[14]["observation"]["images.rgb"].shape == (0, 1, 8, 8, 3)


def test_a_dataset_without_a_readable_window_raises(tmp_path):
    damaged = [(e, t) for e in range(4) for t in range(10) if (e, t) != (0, 7)]
    windows = WindowDataset(damaged_set(tmp_path, damaged), 1, on_error="skip")
    assert quiet(lambda: seen(WindowLoader(windows, 4, on_error="skip"))) == [(0, 7)]
    only_damaged = rollout_data.open(tmp_path / "set").select(["1", "2", "3"])
    with pytest.raises(DataFileError, match="has 30 windows, and none is readable"):
        quiet(lambda: list(WindowLoader(WindowDataset(only_damaged, 1, on_error="skip"), 4)))


def test_a_mixture_skips_windows_like_its_members(tmp_path):
    data, sound = damaged_set(tmp_path / "bad"), damaged_set(tmp_path / "good", [])
    mixture = WindowMixture([data, sound], length=1, on_error="skip")
    loader = WindowLoader(mixture, 8, seed=3)
    order = loader.order(0)
    actual = quiet(lambda: seen(loader))
    assert len(actual) == len(order) - int((order == 14).sum())
    assert mixture.num_lost_windows == int((order == 14).any())
    strict = WindowMixture([WindowDataset(data, 1), WindowDataset(sound, 1)])
    if (order == 14).any():
        with pytest.raises(CorruptFileError, match="frame 4 of episode '1'"):
            list(WindowLoader(strict, 8, seed=3))
        assert len(quiet(lambda: seen(WindowLoader(strict, 8, seed=3, on_error="skip")))) == len(
            actual
        )


def test_a_damaged_chunk_of_block_files_is_skipped_too(tmp_path):
    generator = np.random.default_rng(0)
    with RolloutWriter(
        tmp_path / "own",
        1,
        writer_name="arm",
        durable=False,
        obs_disassemble_mapping={"rgb": "lz4"},
    ) as w:
        for step in range(120):
            rgb = generator.integers(0, 255, (1, 16, 16, 3)).astype(np.uint8)
            state = np.full((1, 2), step, np.float32)
            w.add(observation={"rgb": rgb, "state": state}, action=state, done=[step % 40 == 39])
    path = next((tmp_path / "own").glob("*.h5"))
    data = bytearray(path.read_bytes())
    at = len(data) // 2
    data[at : at + 4] = bytes(255 - item for item in data[at : at + 4])
    path.write_bytes(data)
    windows = WindowDataset(tmp_path / "own", 1, on_error="skip")
    batches = quiet(lambda: list(WindowLoader(windows, 8, shuffle=False)))
    left = torch.cat([batch["action"][:, 0, 0] for batch in batches])
    assert 0 < windows.num_lost_windows < 120 and len(left) == 120 - windows.num_lost_windows
    with pytest.raises(DataFileError, match=rf"frame \d+ of episode 'arm:\d' in '{path}'"):
        list(WindowLoader(WindowDataset(tmp_path / "own", 1), 8))


def test_an_unknown_value_of_on_error_raises(tmp_path):
    with pytest.raises(UsageError, match="on_error"):
        WindowDataset(recorded(tmp_path / "own"), 1, on_error="ignore")
    with pytest.raises(UsageError, match="on_error"):
        WindowLoader(WindowDataset(tmp_path / "own", 1), 4, on_error="ignore")


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_fields_without_the_damaged_picture_lose_nothing(tmp_path, on_error):
    data = damaged_set(tmp_path, [(0, 0), (1, 4), (3, 9)])
    windows = WindowDataset(data, 1, fields=["action"], on_error=on_error)
    sound = WindowDataset(tmp_path / "own", 1, fields=["action"])
    everything = range(len(sound))
    assert torch.equal(
        windows.__getitems__(everything)["action"], sound.__getitems__(everything)["action"]
    )
    assert windows.num_lost_windows == 0 and windows.problems == []


class Rows:
    """A substitute for `ray.data` with the parts that `read_rollouts` needs.

    It runs each task at once.
    """

    def __init__(self, tasks):
        self.tasks = tasks

    def map_batches(self, function, batch_size):
        assert batch_size == 1
        asked = [
            {name: np.array([value], object) for name, value in task.items()} for task in self.tasks
        ]
        return [function(item) for item in asked]


@pytest.mark.each_value
@pytest.mark.parametrize(
    "damaged", [[], [(1, 4)], [(0, 0), (0, 9), (3, 3)], [(e, 0) for e in range(3)]]
)
@pytest.mark.parametrize("rows_per_task", [10, 20, 1000])
def test_read_rollouts_leaves_out_damaged_trajectories_in_every_column(
    tmp_path, monkeypatch, damaged, rows_per_task
):
    data = types.ModuleType("ray.data")
    data.from_items = lambda tasks, override_num_blocks: Rows(tasks)
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.data", data)
    sys.modules["ray"].data = data
    options = {"rows_per_task": rows_per_task, "next_observations": False, "on_error": "skip"}
    tasks = quiet(lambda: read_rollouts(damaged_set(tmp_path, damaged), **options))
    for columns in tasks:
        assert len({len(values) for values in columns.values()}) == 1
    joined = {name: np.concatenate([columns[name] for columns in tasks]) for name in tasks[0]}
    kept = [episode for episode in range(4) if episode not in {lost for lost, _ in damaged}]
    assert joined["trajectory"].tolist() == [episode for episode in kept for _ in range(10)]
    assert joined["frame"].tolist() == list(range(10)) * len(kept)
    expected = [[episode, frame] for episode in kept for frame in range(10)]
    assert joined["action"].tolist() == joined["observation/state"].tolist() == expected
    assert (joined["length"] == 10).all()
