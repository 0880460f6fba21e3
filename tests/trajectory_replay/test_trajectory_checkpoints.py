"""A checkpoint has every stored trajectory and the state for resuming.

It is replaced as a whole.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_data.blocks.block_header import open_block
from rollout_data.trajectories.trajectory_replay_buffer import TrajectoryReplayBuffer
from storage.errors import (
    BackgroundError,
    CorruptFileError,
    DataFileError,
    RolloutDataWarning,
    UnsafeFileError,
)
from storage.live.monitors import PerformanceMonitor
from tests.trajectory_replay.recorded import drawn, equal, trajectory
from tests.watch import opened

FOREIGN = Path(__file__).parents[1] / "data" / "rlinf" / "ckpt_pt"
FORMATS = ["h5", "pt", "pkl"]


def filled(number: int = 5, **options: Any) -> TrajectoryReplayBuffer:
    buffer = TrajectoryReplayBuffer(**options)
    for item in range(number):
        buffer.add(trajectory(item, 2 + item % 3, 2), weights_version=item)
    return buffer


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("auto_save", [False, True])
@pytest.mark.parametrize("file_format", FORMATS)
def test_a_resumed_buffer_draws_the_same_samples_as_the_original(
    tmp_path: Path, file_format: str, auto_save: bool
) -> None:
    """Traps R4 and R6: the checkpoint is complete before any sample, and the random state
    continues.
    """
    options = {"trajectory_format": file_format, "trusted": True}
    saving = {"auto_save": True, "auto_save_path": tmp_path / "auto"} if auto_save else {}
    with filled(**options, **saving) as buffer:
        buffer.save_checkpoint(tmp_path / "a")
        drawn(buffer, 7)
        buffer.save_checkpoint(tmp_path / "a")
        resumed = TrajectoryReplayBuffer(seed=99, trusted=True)
        resumed.load_checkpoint(tmp_path / "a")
        for _ in range(3):
            assert torch.equal(drawn(buffer, 40), drawn(resumed, 40))
        assert (
            resumed.trajectory_ids == buffer.trajectory_ids
            and resumed.total_samples == buffer.total_samples
        )
        for number in range(5):
            assert equal(resumed.get(number), trajectory(number, 2 + number % 3, 2))
            assert resumed.about(number) == buffer.about(number)
        assert resumed.add(trajectory(9)) == buffer.add(trajectory(9)) == 5
    assert len(names_in(tmp_path / "a")) == 5 + 2


def test_an_index_lists_exactly_the_files(tmp_path: Path) -> None:
    """Trap R3."""
    filled(8, sample_window_size=3).save_checkpoint(tmp_path / "a")
    index = json.loads((tmp_path / "a" / "trajectory_index.json").read_text())
    assert index["trajectory_id_list"] == [5, 6, 7] and list(index["trajectory_index"]) == [
        "5",
        "6",
        "7",
    ]
    assert index["trajectory_index"]["6"]["num_samples"] == 4 and index["trajectory_index"]["6"][
        "shape"
    ] == [2, 2]
    files = [f"trajectory_{item}_w{item}.h5" for item in (5, 6, 7)]
    assert names_in(tmp_path / "a") == ["metadata.json", *files, "trajectory_index.json"]
    summary = json.loads((tmp_path / "a" / "metadata.json").read_text())
    assert summary == {
        "trajectory_format": "h5",
        "size": 3,
        "total_samples": 18 - 4 + 0,
        "trajectory_counter": 8,
        "seed": 1234,
    } | {"total_samples": sum(2 * (2 + item % 3) for item in (5, 6, 7))}
    resumed = TrajectoryReplayBuffer(sample_window_size=100)
    resumed.load_checkpoint(tmp_path / "a")
    assert set((drawn(resumed, 300) // 10_000).tolist()) == {5, 6, 7}


def test_trajectories_in_h5_format_are_block_files(tmp_path: Path) -> None:
    filled(2).save_checkpoint(tmp_path)
    block = open_block(tmp_path / "trajectory_1_w1.h5", verify=True)
    assert block.num_frames == 3 * 2 and "rewards" in block.schema


def test_an_auto_saved_folder_is_a_checkpoint(tmp_path: Path) -> None:
    with filled(auto_save=True, auto_save_path=tmp_path) as buffer:
        buffer.save_checkpoint(tmp_path)
    again = TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path, cache_size=2)
    again.load_checkpoint(tmp_path)
    assert again.add(trajectory(5, 2, 2)) == 5
    assert set((drawn(again, 400) // 10_000).tolist()) == set(range(6))
    again.close()
    third = TrajectoryReplayBuffer()
    third.load_checkpoint(tmp_path)
    assert third.trajectory_ids == list(range(6))


def test_files_of_a_loaded_checkpoint_are_in_the_next_checkpoint(tmp_path: Path) -> None:
    """Trap R4."""
    filled().save_checkpoint(tmp_path / "a")
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "auto") as buffer:
        buffer.load_checkpoint(tmp_path / "a")
        buffer.add(trajectory(7))
        buffer.save_checkpoint(tmp_path / "b")
    shutil.rmtree(tmp_path / "a")
    shutil.rmtree(tmp_path / "auto")
    resumed = TrajectoryReplayBuffer()
    resumed.load_checkpoint(tmp_path / "b")
    assert len(resumed) == 6 and equal(resumed.get(2), trajectory(2, 4, 2))


@pytest.mark.parametrize("name", ["auto", "link", "./auto", "auto/../auto"])
def test_a_resumed_folder_keeps_its_trajectories_under_any_form_of_its_path(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "auto").mkdir()
    (tmp_path / "link").symlink_to("auto")
    monkeypatch.chdir(tmp_path)
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path="auto") as buffer:
        buffer.add(trajectory(0))
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=name) as buffer:
        buffer.load_checkpoint(name)
        buffer.add(trajectory(1))
    again = TrajectoryReplayBuffer()
    again.load_checkpoint(tmp_path / "auto")
    assert again.trajectory_ids == [0, 1]


def test_an_earlier_run_is_not_overwritten(tmp_path: Path) -> None:
    filled(2, auto_save=True, auto_save_path=tmp_path).close()
    buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path)
    with pytest.warns(RolloutDataWarning, match="has 2 trajectories of an earlier run"):
        assert buffer.add(trajectory(9)) == 2
    buffer.close()
    assert {name.split("_")[1] for name in names_in(tmp_path) if name.endswith("h5")} == {
        "0",
        "1",
        "2",
    }


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_ranks_share_a_checkpoint_and_never_an_id(tmp_path: Path, world_size: int) -> None:
    """Trap R13."""
    filled(5).save_checkpoint(tmp_path / "a")
    shares, new_ids, draws = [], [], []
    for rank in range(world_size):
        buffer = TrajectoryReplayBuffer()
        buffer.load_checkpoint(tmp_path / "a", True, rank, world_size)
        shares.append(buffer.trajectory_ids)
        new_ids += [buffer.add(trajectory(9)) for _ in range(4)]
        draws.append(buffer.rng.get_state())
    assert [item for share in shares for item in share] == list(range(5))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert len(set(new_ids)) == 4 * world_size and min(new_ids) == 5
    assert len({tuple(state.tolist()) for state in draws}) == world_size


def test_checkpoints_of_ranks_under_one_path_are_loaded_as_one_checkpoint(tmp_path: Path) -> None:
    """Trap R13."""
    buffers = [
        TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path, rank=rank, world_size=3)
        for rank in range(3)
    ]
    for rank, buffer in enumerate(buffers):
        for number in range(2):
            buffer.add(trajectory(10 * rank + number))
        buffer.close()
    whole = TrajectoryReplayBuffer()
    whole.load_checkpoint(tmp_path)
    assert sorted(whole.trajectory_ids) == list(range(6))
    assert set((drawn(whole, 600) // 10_000).tolist()) == {0, 1, 10, 11, 20, 21}


@pytest.mark.parametrize(
    ("rank", "world_size", "text"),
    [(0, 0, "world_size"), (5, -1, "world_size"), (2, 2, "local_rank"), (-1, 2, "local_rank")],
)
def test_a_bad_rank_is_refused(tmp_path: Path, rank: int, world_size: int, text: str) -> None:
    filled(2).save_checkpoint(tmp_path / "a")
    with pytest.raises(ValueError, match=f"load_checkpoint: {text} must be "):
        TrajectoryReplayBuffer().load_checkpoint(tmp_path / "a", True, rank, world_size)


def test_min_weights_version_loads_only_recent_policies(tmp_path: Path) -> None:
    filled(5).save_checkpoint(tmp_path / "a")
    buffer = TrajectoryReplayBuffer()
    buffer.load_checkpoint(tmp_path / "a", min_weights_version=3)
    assert buffer.trajectory_ids == [3, 4]


def test_an_existing_folder_is_loaded() -> None:
    buffer = TrajectoryReplayBuffer()
    buffer.load_checkpoint(FOREIGN)
    assert buffer.trajectory_ids == [0, 1, 2] and buffer.total_samples == 32
    for number in range(3):
        expected = torch.load(FOREIGN / f"trajectory_{number}_w{number % 2}.pt", weights_only=True)
        assert equal(buffer.get(number), expected)
        assert buffer.about(number)["model_weights_id"] == f"w{number % 2}"
    sample = buffer.sample(100)
    assert (
        sample["curr_obs"]["img"].shape == (100, 2, 2)
        and sample["forward_inputs"]["tok"].dtype == torch.int64
    )
    assert buffer.add(buffer.get(1)) == 3


def test_variants_of_existing_folders_are_loaded(tmp_path: Path) -> None:
    for rank in range(2):
        shutil.copytree(FOREIGN, tmp_path / f"rank_{rank}")
    whole = TrajectoryReplayBuffer()
    whole.load_checkpoint(tmp_path)
    assert whole.trajectory_ids == [0, 1, 2, 3, 4, 5] and whole.total_samples == 64
    folder = tmp_path / "rank_0"
    (folder / "trajectory_index.json").rename(folder / "trajector_index.json")
    (folder / "trajectory_1_w1.pt").rename(folder / "trajectory_1_0c5f_17.pt")
    (folder / "metadata.json").unlink()
    flags = torch.load(folder / "trajectory_0_w0.pt", weights_only=True)
    flags["dones"] = torch.cat([torch.ones(1, 2, 1, dtype=torch.bool), flags["dones"]])
    torch.save(flags, folder / "trajectory_0_w0.pt")
    item = TrajectoryReplayBuffer()
    item.load_checkpoint(folder)
    assert item.total_samples == 32 and torch.equal(item.get(0)["dones"], flags["dones"][1:])
    (folder / "trajectory_2_w0.pt").unlink()
    with pytest.warns(
        RolloutDataWarning, match=r"^1 of 3 trajectories .* have no file and are skipped: 2"
    ):
        item.load_checkpoint(folder)
    assert item.trajectory_ids == [0, 1]


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


def test_pickles_are_read_only_on_request(tmp_path: Path) -> None:
    """Trap R12."""
    filled(2, trajectory_format="pkl", trusted=True).save_checkpoint(tmp_path / "a")
    (tmp_path / "a" / "trajectory_0_w0.pkl").write_bytes(pickle.dumps(Evil()))
    buffer = TrajectoryReplayBuffer()
    with pytest.raises(UnsafeFileError, match="trusted=True"):
        buffer.load_checkpoint(tmp_path / "a")
    filled(2, trajectory_format="pt").save_checkpoint(tmp_path / "b")
    torch.save(
        {"rewards": torch.zeros(2, 2, 1), "x": Evil()}, tmp_path / "b" / "trajectory_0_w0.pt"
    )
    with pytest.raises(UnsafeFileError):
        buffer.load_checkpoint(tmp_path / "b")
    assert not Path("evil").exists()


@pytest.mark.parametrize("file_format", ["h5", "pt"])
def test_damage_is_reported_and_changes_nothing(tmp_path: Path, file_format: str) -> None:
    filled(3, trajectory_format=file_format).save_checkpoint(tmp_path / "a")
    path = tmp_path / "a" / f"trajectory_1_w1.{file_format}"
    content = path.read_bytes()
    buffer = filled(1, seed=5)
    for stop in (0, 10, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:stop])
        with pytest.raises(DataFileError, match=r"trajectory_1_w1"):
            buffer.load_checkpoint(tmp_path / "a")
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(CorruptFileError, match=r"trajectory_1_w1"):
        buffer.load_checkpoint(tmp_path / "a")
    assert buffer.trajectory_ids == [0]
    drawn(buffer, 20)


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.pop("trajectory_id_list"),
        lambda index: index["trajectory_index"].pop("1"),
        lambda index: index["trajectory_index"]["1"].update(shape=[1 << 60, 2]),
        lambda index: index["trajectory_index"]["1"].update(
            shape=[1 << 60, 2], num_samples=1 << 61
        ),
        lambda index: index["trajectory_index"]["1"].update(
            shape=[1, 1 << 60], num_samples=1 << 60
        ),
        lambda index: index["trajectory_index"]["1"].update(num_samples="x"),
        lambda index: index["counters"].update(rng="AAAA"),
        lambda index: index["counters"].update(seed=float("inf")),
        lambda index: index["counters"].update(trajectory_counter=float("inf")),
        lambda index: index["counters"].update(trajectory_counter=10**18),
        lambda index: index["trajectory_id_list"].append("../../x"),
    ],
)
def test_a_hostile_index_raises_one_clear_error(tmp_path: Path, change: Any) -> None:
    filled(3).save_checkpoint(tmp_path / "a")
    path = tmp_path / "a" / "trajectory_index.json"
    index = json.loads(path.read_text())
    del index["crc32"]  # or else it would be found by its checksum
    change(index)
    path.write_text(json.dumps(index))
    with pytest.raises(
        CorruptFileError, match=r"'.*a/traj.*_w1.h5'|^'.*a/trajectory_index.json' is damaged"
    ):
        TrajectoryReplayBuffer().load_checkpoint(tmp_path / "a")


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    for folder in (tmp_path / "nothing", tmp_path):
        with pytest.raises(
            FileNotFoundError,
            match=r"has no saved trajectories: trajectory_index.json is missing",
        ):
            TrajectoryReplayBuffer().load_checkpoint(folder)


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(DataFileError, match=r"thesis\.tex"):
        filled(1).save_checkpoint(tmp_path)
    assert names_in(tmp_path) == ["thesis.tex"]


class SlowDisk(PerformanceMonitor):
    """Every file waits until the gate is open, because a monitor also measures the writing of a
    file.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    @contextmanager
    def timer(self, key: str, device: torch.device | str | None = None) -> Iterator[None]:
        if key == "trajectories/write":
            self.gate.wait(20)
        with super().timer(key, device):
            yield


def test_save_checkpoint_waits_for_pending_saves(tmp_path: Path) -> None:
    """Trap R4. Trajectories that are being saved are read from memory."""
    disk, options = (
        SlowDisk(),
        {"auto_save": True, "auto_save_path": tmp_path / "auto", "enable_cache": False},
    )
    with TrajectoryReplayBuffer(monitor=disk, **options) as buffer:
        for number in range(4):
            buffer.add(trajectory(number))
        assert set((drawn(buffer, 300) // 10_000).tolist()) == {0, 1, 2, 3}
        assert not list((tmp_path / "auto").glob("*.h5"))
        thread = threading.Thread(target=buffer.save_checkpoint, args=(tmp_path / "a",))
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()
        disk.gate.set()
        thread.join(20)
    assert sum(name.endswith(".h5") for name in names_in(tmp_path / "a")) == 4


def test_add_waits_while_the_queue_of_saves_is_full(tmp_path: Path) -> None:
    disk, options = (
        SlowDisk(),
        {"auto_save": True, "auto_save_path": tmp_path, "max_pending_saves": 2},
    )
    with TrajectoryReplayBuffer(monitor=disk, **options) as buffer:
        thread = threading.Thread(
            target=lambda: [buffer.add(trajectory(number)) for number in range(6)]
        )
        thread.start()
        thread.join(0.1)
        assert thread.is_alive() and len(buffer) <= 5
        drawn(buffer, 10)
        disk.gate.set()
        thread.join(20)
        assert len(buffer) == 6


def test_a_failed_save_raises_once_and_is_retried(tmp_path: Path) -> None:
    """Trap R10."""
    buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path, enable_cache=False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
        buffer.add(trajectory(0))
        with pytest.raises(
            BackgroundError, match=r"^a trajectory could not be saved to .*File too large"
        ) as caught:
            buffer.flush()
        assert isinstance(caught.value.__cause__, OSError)
        assert (drawn(buffer, 20) < 10_000).all()
        with pytest.raises(BackgroundError):
            buffer.save_checkpoint(tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    buffer.add(trajectory(1))
    buffer.close()
    resumed = TrajectoryReplayBuffer()
    resumed.load_checkpoint(tmp_path)
    assert resumed.trajectory_ids == [0, 1] and equal(resumed.get(0), trajectory(0))


def test_a_sample_needs_each_file_once(tmp_path: Path) -> None:
    """Trap R9."""
    filled(4, trajectory_format="pt", auto_save=True, auto_save_path=tmp_path, cache_size=1).close()
    with TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path, cache_size=1) as buffer:
        buffer.load_checkpoint(tmp_path)
        drawn(buffer, 100)
        with opened(".pt") as paths:
            drawn(buffer, 500)
        assert len(paths) == len(set(paths)) == 3


def test_samples_are_equal_if_files_cannot_be_mapped_side_by_side(tmp_path: Path) -> None:
    filled(4, auto_save=True, auto_save_path=tmp_path, enable_cache=False).close()
    script = (
        "import sys, h5py, torch\n"
        "sys.platform = sys.argv[1]\n"  # asked when the library is imported
        "from rollout_data import TrajectoryReplayBuffer\n"
        "buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=sys.argv[2], enable_cache=False)\n"
        "buffer.load_checkpoint(sys.argv[2])\n"
        "buffer.rng.manual_seed(0)\n"
        "print(buffer.sample(200)['rewards'].flatten().tolist())\n"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", script, item, tmp_path],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for item in ("linux", "darwin")
    ]
    assert printed[0] == printed[1] and len(printed[0]) > 200


def test_more_files_than_can_be_mapped_are_mapped_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Instead of 20,000
    monkeypatch.setattr("rollout_data.trajectories.row_gatherer.MAX_MAPPED_FILES", 4)
    options = {
        "auto_save": True,
        "auto_save_path": tmp_path,
        "enable_cache": False,
        "sample_window_size": 3,
    }
    with TrajectoryReplayBuffer(**options) as buffer:
        for number in range(12):
            buffer.add(trajectory(number, 2, 2))
            buffer.flush()
            drawn(buffer, 40)
