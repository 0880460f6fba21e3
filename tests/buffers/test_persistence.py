"""Folders of buffers: of earlier systems, of rings that cut trajectories, and with wrong numbers."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from storage import (
    DictBuffer,
    RolloutDataError,
    TrajectoryDictBuffer,
    TrajectoryDictBufferMultiDim,
    ZBuffer,
    load_buffer,
)
from tests.saved import config_of

from .every_store import in_child


def dict_buffer(num_rows: int = 13) -> DictBuffer:
    buffer = DictBuffer(capacity=10, end_key="done", generator=1)
    ends = torch.arange(num_rows).unsqueeze(1) % 4 == 3
    data = {
        "observation": {"a": torch.arange(num_rows * 2.0).view(-1, 2)},
        "reward": torch.ones(num_rows, 1),
        "done": ends,
    }
    buffer.extend(data, final={"observation": {"a": torch.full((num_rows, 2), -1.0)}})
    return buffer


def expert() -> TrajectoryDictBuffer:
    episodes = [
        {"observation": torch.arange(4.0 + i).unsqueeze(1), "motion_id": 7 * i} for i in range(3)
    ]
    buffer = TrajectoryDictBuffer(episodes, "cpu", 2, generator=3, file_names=["a", "b", "c"])
    buffer.update_priorities([1.0, 5.0], [0, 2])
    return buffer


def latent() -> ZBuffer:
    buffer = ZBuffer(5, 3, dtype=torch.float64, generator=4)
    buffer.add(torch.arange(21.0).view(7, 3))
    return buffer


MAKERS = {"DictBuffer": dict_buffer, "expert": expert, "z": latent}


@pytest.mark.parametrize("is_cleared", [False, True])
def test_a_buffer_whose_final_rows_all_died_loads(tmp_path: Path, is_cleared: bool) -> None:
    buffer = DictBuffer(capacity=4, end_key="done")
    data = {"o": torch.arange(4.0).unsqueeze(1), "done": torch.tensor([[0], [1], [0], [0]])}
    buffer.extend(data, final={"o": torch.full((4, 1), 9.0)})
    if is_cleared:
        buffer.clear()
    later = {"o": torch.arange(4.0, 8.0).unsqueeze(1), "done": torch.zeros(4, 1, dtype=torch.int64)}
    buffer.extend(later)
    buffer.save(tmp_path / "b")
    loaded = load_buffer(tmp_path / "b")
    assert torch.equal(loaded.get_full_buffer("time")["o"], later["o"])
    for each in (buffer, loaded):
        each.extend(data, final={"o": torch.full((4, 1), -1.0)})
        drawn = each.sample_transitions(200, next_keys=("o",))
        is_end = drawn["o"] == 1
        assert is_end.any() and (drawn["next"]["o"][is_end] == -1).all()


@pytest.mark.parametrize("num_rows", [3, 6, 11])
@pytest.mark.parametrize("num_envs", [1, 2])
def test_a_loaded_ring_stacks_the_frames_of_a_truncated_trajectory(
    tmp_path: Path, num_envs: int, num_rows: int
) -> None:
    def filled() -> DictBuffer:
        buffer = DictBuffer(capacity=4 * num_envs, num_envs=num_envs, end_key="done", generator=0)
        ends = torch.zeros(num_rows, num_envs, 1)
        ends[1::4, 0] = 1  # one lane is cut at another place than the other
        data = {
            "o": torch.arange(float(num_rows * num_envs)).view(num_rows, num_envs, 1),
            "done": ends,
        }
        buffer.extend({name: leaf.flatten(0, 1) for name, leaf in data.items()})
        return buffer

    def stacks(buffer: DictBuffer) -> set[tuple[float, ...]]:
        drawn = buffer.sample_transitions(300, next_keys=("o",), num_frames=2, at_end="mark")
        return {tuple(frames.flatten().tolist()) for frames in drawn["o"]}

    buffer, restored = filled(), filled()
    buffer.save(tmp_path / "b")
    restored.load_state_dict(buffer.state_dict())
    expected = stacks(buffer)
    loaded = load_buffer(tmp_path / "b")
    loaded.save(tmp_path / "again")
    for other in (loaded, load_buffer(tmp_path / "again"), restored):
        assert stacks(other) == expected
    path = tmp_path / "b" / "config.json"
    config = config_of(path)
    for wrong in (
        None,
        1,
        [-1] * num_envs,
        [num_rows] * num_envs,
        [0] * (num_envs + 1),
        [0.5] * num_envs,
        "0",
    ):
        path.write_text(json.dumps({**config, "oldest_ages": wrong}))
        with pytest.raises(RolloutDataError):
            load_buffer(tmp_path / "b")
    del config["oldest_ages"]  # as in earlier saves
    path.write_text(json.dumps(config))
    assert stacks(load_buffer(tmp_path / "b")) >= expected


@pytest.mark.parametrize("num_rows", [6, 10, 14])
def test_a_folder_of_an_earlier_system_loads(tmp_path: Path, num_rows: int) -> None:
    slots = [
        max(row for row in range(num_rows) if row % 10 == slot) for slot in range(min(num_rows, 10))
    ]
    values = np.array(slots, np.float32)[:, None]
    with h5py.File(tmp_path / "buffer.hdf5", "w") as file:
        file["observation-state"], file["observation-deep-x"] = values, values.repeat(2, 1)
        file["reward"] = values
    config = {
        "capacity": 10,
        "device": "cpu",
        "nested_key_separator": "-",
        "__target__": "some.old.buffers.DictBuffer",
    }
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "_idx": num_rows % 10, "_is_full": num_rows >= 10})
    )
    buffer = load_buffer(tmp_path)
    expected = [float(row) for row in range(num_rows)][-10:]
    assert buffer.get_full_buffer("time")["observation"]["deep"]["x"][:, 1].tolist() == expected
    buffer.extend(
        {
            "observation": {"state": torch.ones(1, 1), "deep": {"x": torch.ones(1, 2)}},
            "reward": torch.ones(1, 1),
        }
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="the position of the next row"):
        assert load_buffer(tmp_path)._idx == min(num_rows, 10) % 10


def test_wrong_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_buffer(tmp_path / "none")
    dict_buffer().save(tmp_path / "b")
    config = config_of(tmp_path / "b" / "config.json")
    for key, value in (("capacity", 4), ("_idx", 77), ("total", 2)):
        (tmp_path / "b" / "config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(ValueError):
            load_buffer(tmp_path / "b")
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    with h5py.File(tmp_path / "b" / "buffer.hdf5", "r+") as file:
        del file["reward"]
        file["reward"] = np.ones((3, 1), np.float32)
    with pytest.raises(ValueError, match="different lengths"):
        load_buffer(tmp_path / "b")
    with h5py.File(tmp_path / "b" / "buffer.hdf5", "r+") as file:
        del file["reward"]
        file["reward"] = h5py.ExternalLink("other.h5", "x")
    with pytest.raises(RolloutDataError, match="not followed"):
        load_buffer(tmp_path / "b")


def save_and_load_with_little_memory(folder: Path) -> None:
    torch.set_num_threads(1)
    small, buffer = DictBuffer(capacity=2), DictBuffer(capacity=500_000)
    for each in (small, buffer):
        each.extend({"x": torch.ones(each.capacity, 64), "y": torch.zeros(each.capacity, 1)})
    small.save(folder / "small")
    load_buffer(folder / "small")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    buffer.save(folder / "b")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10  # KiB
    loaded = load_buffer(folder / "b")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < (50 + 135) << 10
    assert torch.equal(loaded.storage["x"], buffer.storage["x"])


def test_saving_and_loading_need_the_memory_of_a_few_chunks(tmp_path: Path) -> None:
    code = "from tests.buffers.test_persistence import save_and_load_with_little_memory as run\n"
    in_child(code + "run(Path(sys.argv[1]))", tmp_path)


def test_a_buffer_of_many_fields_loads_with_few_files(tmp_path: Path) -> None:
    buffer = DictBuffer(capacity=4)
    buffer.extend({"x": {str(place): torch.full((3, 1), float(place)) for place in range(100)}})
    buffer.save(tmp_path / "b")
    num_open = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 30, hard))
    try:
        loaded = load_buffer(tmp_path / "b")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all((leaf[:3] == float(name)).all() for name, leaf in loaded.storage["x"].items())
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_field_with_too_many_axes_raises_at_once(
    tmp_path: Path,
) -> None:
    buffer = TrajectoryDictBufferMultiDim(capacity=3, n_dim=2, seq_length=1)
    with pytest.raises(RolloutDataError, match="'x' has 31 dimensions, expected at most 30"):
        buffer.extend(
            {
                "x": torch.arange(4.0).view(2, 2, *[1] * 31),
                "done": torch.zeros(2, 2, 1, dtype=torch.bool),
            }
        )
    buffer.extend(
        {
            "x": torch.arange(4.0).view(2, 2, *[1] * 30),
            "done": torch.zeros(2, 2, 1, dtype=torch.bool),
        }
    )
    buffer.save(tmp_path / "b")
    assert torch.equal(load_buffer(tmp_path / "b").storage["x"], buffer.storage["x"])


def test_a_state_of_another_buffer_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity"):
        DictBuffer(capacity=3).load_state_dict(DictBuffer(capacity=4).state_dict())
    state = dict_buffer().state_dict()
    buffer = dict_buffer()
    buffer.clear()
    assert len(buffer) == 0
    buffer.load_state_dict(state)
    assert len(buffer) == 10
    buffer.load_state_dict(DictBuffer(capacity=10, end_key="done").state_dict())
    assert buffer.storage is None


def test_compressed_and_big_endian_columns_of_other_writers_load(tmp_path: Path) -> None:
    # More than one chunk of memory
    values = np.arange(10 << 17).reshape(10, 1 << 17).astype(np.float32) % 1000
    with h5py.File(tmp_path / "buffer.hdf5", "w") as file:
        file["plain"], file["big"] = values, values.astype(">f4")
        file.create_dataset("packed", data=values, compression="gzip", chunks=(3, 1 << 17))
        file["flag"], file["half"] = values > 20, values.astype(np.float16)
        file.create_dataset("unwritten", (10, 2), np.int32)
    config = {"capacity": 12, "_idx": 10, "_is_full": False, "__target__": "old.DictBuffer"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    storage = load_buffer(tmp_path).get_full_buffer()
    for name in ("plain", "big", "packed", "half"):
        assert np.array_equal(storage[name].float().numpy(), values), name
    assert np.array_equal(storage["flag"].numpy(), values > 20) and not storage["unwritten"].any()


@pytest.mark.parametrize("key", ["a\0b", ".", "\udc80"])
def test_a_key_that_a_file_cannot_hold_is_refused_before_anything_is_written(
    tmp_path: Path, key: str
) -> None:
    buffer = DictBuffer(capacity=4)
    buffer.extend({key: torch.ones(2, 3), "y": torch.ones(2, 3)})
    with pytest.raises(ValueError, match=r"would have the name .* in the file"):
        buffer.save(tmp_path / "b")
    assert not list(tmp_path.iterdir())


def test_hdf5_references_are_not_read_as_rows(tmp_path: Path) -> None:
    dict_buffer().save(tmp_path / "b")
    with h5py.File(tmp_path / "b" / "finals.hdf5", "r+") as file:
        name = next(key for key in file if key != "row_key")
        num_rows = len(file[name])
        del file[name]
        file.create_dataset(name, data=["x"] * num_rows, dtype=h5py.string_dtype())
    with pytest.raises(RolloutDataError):
        load_buffer(tmp_path / "b")
