"""Saved numbers, final rows and files of buffers that do not belong together raise an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from storage import DictBuffer, SchemaError, TrajectoryDictBuffer, ZBuffer, load_buffer
from storage.errors import CorruptFileError, RolloutDataError
from tests.saved import config_of

from .test_persistence import MAKERS


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return one == other


@pytest.mark.parametrize("priorities", [[], [1.0], [0.5, 0.5, -1.0], [0.5, 0.5, float("nan")], -1])
def test_saved_priorities_are_checked(tmp_path: Path, priorities: object) -> None:
    MAKERS["expert"]().save(tmp_path / "b")
    path = tmp_path / "b" / "config.json"
    path.write_text(json.dumps({**config_of(path), "priorities": priorities}))
    with pytest.raises(RolloutDataError):
        load_buffer(tmp_path / "b")


def test_a_small_file_that_declares_much_is_refused_and_one_that_packs_well_loads(
    tmp_path: Path,
) -> None:
    MAKERS["z"]().save(tmp_path / "z")
    path = tmp_path / "z" / "buffer.hdf5"
    with h5py.File(path, "r+") as file:
        del file["z"]
        file.create_dataset("z", (5, 1 << 22), np.float64, chunks=(1, 1024), compression="gzip")
    with pytest.raises(RolloutDataError, match="more than a file of"):
        load_buffer(tmp_path / "z")
    config = config_of(tmp_path / "z" / "config.json")
    (tmp_path / "z" / "config.json").write_text(json.dumps({**config, "dim": 1 << 18}))
    with h5py.File(path, "w") as file:  # a thousandth of its size
        file.create_dataset(
            "z", data=np.zeros((5, 1 << 18)), chunks=(1, 1 << 18), compression="gzip"
        )
        assert path.stat().st_size < (5 << 21) // 500
    assert not load_buffer(tmp_path / "z").sample(3).any()


@pytest.mark.parametrize("share", [0, -1, 1.5, float("nan"), float("inf")])
def test_an_invalid_acceptance_rate_of_a_state_raises(tmp_path: Path, share: float) -> None:
    buffer = MAKERS["DictBuffer"]()
    with pytest.raises(
        SchemaError, match="accepted_share of the state must be above 0 and at most 1"
    ):
        state = buffer.state_dict()
        buffer.load_state_dict({**state, "numbers": {**state["numbers"], "accepted_share": share}})
    buffer.save(tmp_path / "b")
    path = tmp_path / "b" / "config.json"
    config = config_of(path)
    path.write_text(json.dumps({**config, "accepted_share": share}))
    with pytest.raises(
        SchemaError, match="accepted_share of the state must be above 0 and at most 1"
    ):
        load_buffer(tmp_path / "b")
    path.write_text(json.dumps({**config, "accepted_share": 5e-324}))
    assert (
        len(
            load_buffer(tmp_path / "b").sample_transitions(64, next_keys=("observation",))["reward"]
        )
        == 64
    )


WRONG_FINALS: dict[
    str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
] = {
    "negative": lambda keys, rows: (keys - 100, rows),
    "not yet written": lambda keys, rows: (keys + 100, rows),
    "of rows that did not end": lambda keys, rows: (keys + 1, rows),
    "floats": lambda keys, rows: (keys.float(), rows),
    "descending": lambda keys, rows: (keys.flip(0), rows),
    "twice": lambda keys, rows: (keys[:1].repeat(len(keys)), rows),
    "one row for all": lambda keys, rows: (keys, rows[:1]),
    "one column for all": lambda keys, rows: (keys, rows[:, :1]),
    "another dtype": lambda keys, rows: (keys, rows.double()),
}


@pytest.mark.parametrize("wrong", WRONG_FINALS)
def test_final_rows_of_other_rows_raise(tmp_path: Path, wrong: str) -> None:
    buffer = MAKERS["DictBuffer"]()
    state = buffer.state_dict()
    keys, rows = (
        state["tensors"]["finals/row_key"].squeeze(1),
        state["tensors"]["finals/observation/a"],
    )
    assert len(keys) > 1
    keys, rows = WRONG_FINALS[wrong](keys, rows)
    with pytest.raises(SchemaError):
        finals = {"finals/row_key": keys.unsqueeze(1), "finals/observation/a": rows}
        buffer.load_state_dict({**state, "tensors": {**state["tensors"], **finals}})
    assert equal(buffer.state_dict(), state)
    buffer.save(tmp_path / "b")
    with h5py.File(tmp_path / "b" / "finals.hdf5", "r+") as file:
        for name, leaf in (("row_key", keys.unsqueeze(1)), ("observation-a", rows)):
            del file[name]
            file[name] = leaf.numpy()
    with pytest.raises(RolloutDataError):
        load_buffer(tmp_path / "b")


def of_one_value(value: float, ends: list[int]) -> DictBuffer:
    buffer = DictBuffer(capacity=4, end_key="done")
    rows = {"o": torch.full((len(ends), 1), value), "done": torch.tensor(ends).unsqueeze(1)}
    buffer.extend(rows, final={"o": rows["o"] + 100})
    return buffer


@pytest.mark.parametrize("name", ["buffer.hdf5", "finals.hdf5"])
def test_a_file_of_another_save_raises_and_files_without_a_save_id_load(
    tmp_path: Path, name: str
) -> None:
    mine, other = of_one_value(1.0, [0, 1, 0, 0]), of_one_value(2.0, [0, 1, 0, 0])
    mine.save(tmp_path / "b")
    other.save(tmp_path / "other")
    (tmp_path / "other" / name).replace(tmp_path / "b" / name)
    with pytest.raises(RolloutDataError, match="belongs to another save: expected id"):
        load_buffer(tmp_path / "b")
    with h5py.File(tmp_path / "b" / name, "r+") as file:
        del file.attrs["save_id"]  # as in earlier saves
    assert len(load_buffer(tmp_path / "b")) == 4
    (tmp_path / "b" / "finals.hdf5").unlink()
    with pytest.raises(RolloutDataError, match="finals"):
        load_buffer(tmp_path / "b")


def motions(number: int) -> TrajectoryDictBuffer:
    """Create episodes whose values, ids and priorities encode their save."""
    episodes = [
        {"observation": torch.full((4, 3), float(number)), "motion_id": torch.full((4, 1), number)}
    ] * 3
    made = TrajectoryDictBuffer(episodes, generator=0)
    made.update_priorities([1.0, 1.0, 1.0 + number])
    return made


def vectors(number: int) -> ZBuffer:
    made = ZBuffer(10 + number, 3, generator=0)
    made.add(torch.full((10 + number, 3), float(number)))
    return made


def finals(number: int) -> DictBuffer:
    made = DictBuffer(capacity=10 + number, end_key="done", generator=0)
    rows = {
        "observation": torch.full((4, 3), float(number)),
        "done": torch.ones(4, 1, dtype=torch.bool),
    }
    made.extend(rows, final={"observation": rows["observation"]})
    return made


@pytest.mark.parametrize("make", [motions, vectors, finals])
def test_files_of_two_saves_raise(tmp_path: Path, make: Callable[[int], Any]) -> None:
    for number in (1, 2):
        make(1).save(tmp_path / str(number))
    config = (tmp_path / "2" / "config.json").read_bytes()
    (tmp_path / "1" / "config.json").write_bytes(config)
    with pytest.raises(CorruptFileError, match="belongs to another save: expected id"):
        load_buffer(tmp_path / "1")
