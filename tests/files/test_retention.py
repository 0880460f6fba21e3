"""Old data are deleted by the writer, the function and the command.

Their disk space is freed while readers run.
"""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from rollout_data import RolloutDataset, RolloutWriter, TrajectoryReplayBuffer, WindowDataset, prune
from rollout_data.tools.cli.command_line import main
from storage.errors import RolloutDataWarning, UsageError

LENGTH = 10
pytestmark = pytest.mark.filterwarnings("ignore::storage.errors.RolloutDataWarning")


def record(writer: RolloutWriter, num_trajectories: int, start: int = 0) -> None:
    """Record trajectories of 10 frames, one after another in each of 2 envs. Values are the
    step.
    """
    for step in range(start, start + num_trajectories // 2 * LENGTH):
        obs = np.full((2, 64), step, np.float32)
        writer.add(observation=obs, action=obs[:, :1], done=np.full(2, step % LENGTH == LENGTH - 1))


def written(folder: Path, num_trajectories: int, **options) -> Path:
    options = {"durable": False, "block_bytes": 20_000, **options}
    with RolloutWriter(folder, 2, **options) as writer:
        record(writer, num_trajectories)
    return folder


@pytest.fixture
def no_garbage_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("rollout_*.h5"))


def still_mapped(folder: Path) -> int:
    """Return the bytes of deleted files of a folder that this process still maps."""
    if not (maps := Path("/proc/self/maps")).exists():
        pytest.skip("this system does not list what is mapped")
    lines = maps.read_text().splitlines()
    spans = [
        line.split()[0].split("-")
        for line in lines
        if str(folder) in line and line.endswith("(deleted)")
    ]
    return sum(int(stop, 16) - int(start, 16) for start, stop in spans)


def steps_of(folder: Path) -> list[int]:
    windows = WindowDataset(folder, 1, stride=1)
    return sorted(
        int(windows[number]["observation"].flatten()[0]) for number in range(len(windows))
    )


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("limits", "least", "most"),
    [
        ({"trajectories": 40}, 400, 480),
        ({"frames": 400}, 400, 480),
        ({"bytes": 600_000}, 60, 480),
        ({"frames": 400, "trajectories": 10}, 100, 180),
        ({"frames": 1}, 10, 90),
    ],
)
@pytest.mark.parametrize("way", ["function", "writer", "command"])
def test_prune_keeps_the_newest_trajectories_and_trajectories_in_their_blocks(
    tmp_path, capsys, way, limits, least, most
):
    written(tmp_path, 200, retention=limits if way == "writer" else None)
    if way == "function":
        before = set(tmp_path.glob("rollout_*.h5"))
        would_go = prune(tmp_path, dry_run=True, **limits)
        assert set(tmp_path.glob("rollout_*.h5")) == before
        assert (
            set(prune(tmp_path, **limits))
            == set(would_go)
            == before - set(tmp_path.glob("rollout_*.h5"))
        )
        assert prune(tmp_path, **limits) == []
    elif way == "command":
        arguments = [word for name, limit in limits.items() for word in (f"--{name}", str(limit))]
        num_before = len(list(tmp_path.glob("rollout_*.h5")))
        assert main(["prune", str(tmp_path), "--dry-run", *arguments]) == 0
        assert "would be deleted" in capsys.readouterr().out and num_before == len(
            list(tmp_path.glob("rollout_*.h5"))
        )
        assert main(["prune", str(tmp_path), *arguments]) == 0
        assert "blocks were deleted" in capsys.readouterr().out
    steps = steps_of(tmp_path)
    assert least <= len(steps) <= most
    assert "bytes" not in limits or 500_000 < num_bytes(tmp_path) < 760_000
    assert steps == sorted(2 * list(range(1000 - len(steps) // 2, 1000))), "the newest, whole"


@pytest.mark.parametrize(
    "wrong", [{}, {"frames": 0}, {"frames": 1.5}, {"frames": True}, {"trajectories": -1}]
)
def test_wrong_limits_raise(tmp_path, wrong):
    written(tmp_path / "data", 2)
    with pytest.raises(
        UsageError,
        match=r"^prune: (no limit was passed|(trajectories|frames) must be .*>= 1)",
    ):
        prune(tmp_path / "data", **wrong)
    with pytest.raises(
        UsageError,
        match=r"^RolloutWriter: retention must be a mapping with at least one of trajectories",
    ):
        RolloutWriter(tmp_path / "new", 1, retention={"fames": 1} | wrong)
    assert not (tmp_path / "new").exists()


def test_a_trajectory_in_progress_is_kept_whole(tmp_path):
    with RolloutWriter(tmp_path, 2, durable=False, block_bytes=20_000, writer_name="slow") as slow:
        for step in range(80):
            slow.add(
                observation=np.full((2, 64), step, np.float32), action=np.zeros((2, 1), np.float32)
            )
        slow.flush()
        written(tmp_path, 100)
        prune(tmp_path, trajectories=4)
        slow.add(
            observation=np.zeros((2, 64), np.float32),
            action=np.zeros((2, 1), np.float32),
            done=[True, True],
        )
    lengths = [len(item["observation"]) for item in map(RolloutDatasetOf(tmp_path), range(2))]
    assert lengths == [81, 81]


class RolloutDatasetOf:
    """The whole trajectories of a folder, newest first."""

    def __init__(self, folder: Path) -> None:
        self.dataset = RolloutDataset(folder, 2, keep_latest_n_trajs=2, device="cpu")
        self.batch = self.dataset.get_batch(100)

    def __call__(self, env: int) -> dict[str, torch.Tensor]:
        return {"observation": self.batch.observation[self.batch.valid[:, env], env]}


@pytest.mark.parametrize("codec", ["raw", "lz4"])
def test_retention_bounds_the_disk_space_beside_a_reader(tmp_path, codec):
    parts = (
        {"obs_segments": {"x": (64,)}, "obs_disassemble_mapping": {"x": codec}}
        if codec != "raw"
        else {}
    )
    options = {"durable": False, "block_bytes": 20_000, "retention": {"bytes": 150_000}, **parts}
    with RolloutWriter(tmp_path, 2, **options) as writer:
        record(writer, 100)
        writer.flush()
        dataset = RolloutDataset(tmp_path, 4, dataset_loops=0, device="cpu", chunk_cache_bytes=0)
        most = most_held = 0
        for part in range(1, 20):
            batch = dataset.get_batch(8)
            assert torch.equal(batch.observation[..., 0], batch.action[..., 0]), (
                "never zeros for what is gone"
            )
            record(writer, 20, start=500 * part)
            writer.flush()
            most, most_held = max(most, num_bytes(tmp_path)), max(most_held, still_mapped(tmp_path))
        wait_until(lambda: dataset.get_batch(8) is not None and still_mapped(tmp_path) < 100_000)
    assert most < 300_000 and most_held < 2_000_000
    assert dataset.source.num_vanished_blocks > 5


def wait_until(holds) -> None:
    stop_s = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < stop_s
        time.sleep(0.05)


@pytest.mark.parametrize("codec", ["raw", "lz4"])
def test_a_long_pass_unmaps_deleted_files_that_are_not_being_played(tmp_path, codec):
    parts = (
        {"obs_segments": {"x": (64,)}, "obs_disassemble_mapping": {"x": codec}}
        if codec != "raw"
        else {}
    )
    written(tmp_path, 400, **parts)
    dataset = RolloutDataset(tmp_path, 4, device="cpu", chunk_cache_bytes=0)
    first = dataset.get_batch(3).observation[:, :, 0]
    deleted = prune(tmp_path, frames=2000)
    assert still_mapped(tmp_path) > 100_000
    seen = []
    with pytest.warns(RolloutDataWarning, match="was removed"):
        wait_until(lambda: (seen.append(dataset.get_batch(1)), still_mapped(tmp_path) < 60_000)[1])
        for batch in iter(lambda: next_or_none(dataset), None):
            seen.append(batch)
    rows = torch.cat([batch.observation[batch.valid] for batch in seen])
    assert torch.equal(rows[:, 0], torch.cat([batch.action[batch.valid] for batch in seen])[:, 0])
    assert set(rows[:, 0].tolist()) >= set(range(1000, 2000)), "what is there is played to its end"
    assert first.tolist() == [[step, step, step + 10, step + 10] for step in range(3)]
    assert dataset.source.num_vanished_blocks == len(deleted)
    texts = [str(problem) for problem in dataset.problems]
    assert len(texts) == len(set(texts)) and any(str(deleted[-1]) in text for text in texts)


@pytest.mark.parametrize("codec", ["raw", "lz4"])
def test_windows_of_deleted_files_are_readable_while_their_dataset_exists(
    tmp_path, codec, no_garbage_collection
):
    parts = (
        {"obs_segments": {"x": (64,)}, "obs_disassemble_mapping": {"x": codec}}
        if codec != "raw"
        else {}
    )
    written(tmp_path, 400, **parts)
    windows, idle = WindowDataset(tmp_path, LENGTH), RolloutDataset(tmp_path, 4, device="cpu")
    idle.get_batch(1)
    before = windows.__getitems__(range(len(windows)))["action"]
    prune(tmp_path, frames=2000)
    assert torch.equal(windows.__getitems__(range(len(windows)))["action"], before)
    assert still_mapped(tmp_path) > 100_000
    del windows, idle  # no reference cycle keeps them alive
    assert still_mapped(tmp_path) == 0


def next_or_none(dataset):
    try:
        return dataset.get_batch(1)
    except StopIteration:
        return None


def test_trajectories_beyond_max_trajectories_are_deleted_from_disk(tmp_path):
    options = {
        "auto_save": True,
        "auto_save_path": tmp_path,
        "enable_cache": False,
        "max_trajectories": 10,
    }
    with TrajectoryReplayBuffer(sample_window_size=0, **options) as buffer:
        for number in range(100):
            buffer.add(
                {
                    "actions": torch.full((50, 4, 20), float(number)),
                    "rewards": torch.full((50, 4), float(number)),
                }
            )
            if number % 5 == 4:
                buffer.flush()
                sample = buffer.sample(64)
                assert torch.equal(sample["actions"][:, 0], sample["rewards"].flatten())
                assert int(sample["rewards"].min()) > number - 10
        buffer.flush()
        assert still_mapped(tmp_path) < 300_000


def test_the_list_of_problems_is_bounded(tmp_path):
    written(tmp_path, 2)
    dataset = RolloutDataset(tmp_path, 2, dataset_loops=0, device="cpu")
    dataset.get_batch(LENGTH)
    for number in range(1200):
        (tmp_path / f"rollout_x_{number:06d}.h5").write_bytes(b"no block")
    dataset.get_batch(2 * LENGTH)
    assert len(dataset.problems) == 1000 and dataset.source.num_problems == 1200
    assert "rollout_x_001199.h5" in str(dataset.problems[-1])


def test_a_dataset_read_by_a_thread_is_collected_and_its_files_unmapped(tmp_path):
    def read():
        dataset = RolloutDataset(written(tmp_path, 20), 2, device="cpu")
        assert len(list(dataset.prefetch(2))) > 0
        return weakref.ref(dataset)

    dataset = read()
    stop_s = time.monotonic() + 60
    # The thread may still finish its last read.
    while dataset() is not None and time.monotonic() < stop_s:
        time.sleep(0.01)
        gc.collect()
    assert dataset() is None
