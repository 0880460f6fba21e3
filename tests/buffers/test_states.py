"""States that do not fit change nothing, and folders with nonsense in them are reported as damaged."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import threading
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


def change_rows(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict], None]:
    def changed(tensors: dict) -> None:
        name = next(name for name in tensors if name.startswith("buffer/"))
        tensors[name] = change(tensors[name])

    return changed


WRONG: dict[str, Callable[[dict], Any]] = {
    "rows missing": change_rows(lambda rows: rows[:-1]),
    "rows too many": change_rows(lambda rows: torch.cat([rows] * 9)),
    "generator": lambda tensors: tensors.update(rng=torch.zeros(3, dtype=torch.uint8)),
    "no generator": lambda tensors: tensors.pop("rng"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", MAKERS)
def test_a_state_that_does_not_fit_changes_nothing(name: str, wrong: str) -> None:
    buffer = MAKERS[name]()
    state = copy.deepcopy(MAKERS[name]().state_dict())
    WRONG[wrong](state["tensors"])
    before = buffer.state_dict()
    with pytest.raises(SchemaError):
        buffer.load_state_dict(state)
    assert equal(before, buffer.state_dict())
    buffer.load_state_dict(before)
    assert equal(before, buffer.state_dict())


@pytest.mark.each_value
@pytest.mark.parametrize(
    "value", [None, "nonsense", -1, [], {"a": 1}, float("inf"), float("nan"), 1 << 44, 1 << 60]
)
@pytest.mark.parametrize("name", MAKERS)
def test_every_config_entry_of_a_wrong_kind_is_reported_or_means_something(
    tmp_path: Path, name: str, value: object
) -> None:
    MAKERS[name]().save(tmp_path / "b")
    path = tmp_path / "b" / "config.json"
    config = config_of(path)
    for key in config:
        path.write_text(json.dumps({**config, key: value}))
        with contextlib.suppress(RolloutDataError):
            load_buffer(tmp_path / "b").sample(2)  # what loads also works, or says what it misses


@pytest.mark.parametrize("priorities", [[], [1.0], [0.5, 0.5, -1.0], [0.5, 0.5, float("nan")], -1])
def test_saved_priorities_are_checked(tmp_path: Path, priorities: object) -> None:
    MAKERS["expert"]().save(tmp_path / "b")
    path = tmp_path / "b" / "config.json"
    path.write_text(json.dumps({**config_of(path), "priorities": priorities}))
    with pytest.raises(RolloutDataError):
        load_buffer(tmp_path / "b")


def test_a_state_on_its_way_through_torch_save_stays_itself(tmp_path: Path) -> None:
    for name, make in MAKERS.items():
        buffer = make()
        torch.save(buffer.state_dict(), tmp_path / "state.pt")
        other = make()
        other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert equal(buffer.state_dict(), other.state_dict()), name


def test_a_small_file_that_declares_much_is_refused_and_one_that_packs_well_loads(
    tmp_path: Path,
) -> None:
    MAKERS["z"]().save(tmp_path / "z")
    path = tmp_path / "z" / "buffer.hdf5"
    with h5py.File(path, "r+") as file:
        del file["z"]
        file.create_dataset("z", (5, 1 << 22), np.float64, chunks=(1, 1024), compression="gzip")
    with pytest.raises(RolloutDataError, match="holds its data"):
        load_buffer(tmp_path / "z")
    config = config_of(tmp_path / "z" / "config.json")
    (tmp_path / "z" / "config.json").write_text(json.dumps({**config, "dim": 1 << 18}))
    with h5py.File(path, "w") as file:  # a thousandth of its size
        file.create_dataset(
            "z", data=np.zeros((5, 1 << 18)), chunks=(1, 1 << 18), compression="gzip"
        )
        assert path.stat().st_size < (5 << 21) // 500
    assert not load_buffer(tmp_path / "z").sample(3).any()


@pytest.mark.parametrize("name", ["config.json", "buffer.hdf5", "finals.hdf5"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    MAKERS["DictBuffer"]().save(tmp_path / "b")
    path = tmp_path / "b" / name
    path.unlink()
    os.mkfifo(path)
    errors: list[RolloutDataError] = []

    def load() -> None:
        try:
            load_buffer(tmp_path / "b")
        except RolloutDataError as error:
            errors.append(error)

    loading = threading.Thread(target=load, daemon=True)
    loading.start()
    loading.join(60)
    has_waited = loading.is_alive()
    if has_waited:  # let it go
        os.close(os.open(path, os.O_RDWR))
    assert not has_waited and f"{name}' is a folder, a pipe or a device" in str(errors[0])


@pytest.mark.parametrize("share", [0, -1, 1.5, float("nan"), float("inf")])
def test_a_share_of_accepted_draws_that_cannot_be_is_refused(tmp_path: Path, share: float) -> None:
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


def test_a_config_that_is_nested_too_deep_is_reported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(RolloutDataError, match="expected JSON"):
        load_buffer(tmp_path)


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
def test_final_rows_that_are_not_of_these_rows_are_refused(tmp_path: Path, wrong: str) -> None:
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
def test_a_file_of_another_save_is_refused_and_files_of_unknown_ones_load(
    tmp_path: Path, name: str
) -> None:
    mine, other = of_one_value(1.0, [0, 1, 0, 0]), of_one_value(2.0, [0, 1, 0, 0])
    mine.save(tmp_path / "b")
    other.save(tmp_path / "other")
    (tmp_path / "other" / name).replace(tmp_path / "b" / name)
    with pytest.raises(RolloutDataError, match="belongs to another save: expected id"):
        load_buffer(tmp_path / "b")
    with h5py.File(tmp_path / "b" / name, "r+") as file:
        del file.attrs["save_id"]  # as earlier saves are
    assert len(load_buffer(tmp_path / "b")) == 4
    (tmp_path / "b" / "finals.hdf5").unlink()
    with pytest.raises(RolloutDataError, match="finals"):
        load_buffer(tmp_path / "b")


def test_a_buffer_that_was_cleared_is_loaded_empty_and_goes_on(tmp_path: Path) -> None:
    buffer = DictBuffer(capacity=5, end_key="done", generator=0)
    rows = {"x": torch.arange(7.0).view(-1, 1), "done": torch.zeros(7, 1, dtype=torch.bool)}
    buffer.extend(rows)
    buffer.clear()
    buffer.save(tmp_path / "cleared")
    of_state = DictBuffer(capacity=5, end_key="done", generator=1)
    of_state.load_state_dict(buffer.state_dict())
    for loaded in (of_state, DictBuffer.load(tmp_path / "cleared")):
        assert loaded.empty()
        loaded.extend(rows)
        buffer.clear()
        buffer.extend(rows)
        assert torch.equal(loaded.get_full_buffer()["x"], buffer.get_full_buffer()["x"])


def motions(number: int) -> TrajectoryDictBuffer:
    """Make episodes whose every value, id and priority says which save they are of."""
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


def number_of(loaded: Any) -> set[float]:
    """Collect the numbers of the saves that a loaded buffer is of."""
    if isinstance(loaded, TrajectoryDictBuffer):
        rows = loaded.get_full_buffer()["observation"].flatten().tolist()
        return {
            *rows,
            *map(float, loaded.motion_ids),
            round(float(loaded.priorities[2] / loaded.priorities[0]) - 1, 3),
        }
    if isinstance(loaded, ZBuffer):
        return {*loaded.sample(50).flatten().tolist(), float(loaded.capacity - 10)}
    batch = loaded.sample_transitions(50)
    rows = [
        *batch["observation"].flatten().tolist(),
        *batch["next"]["observation"].flatten().tolist(),
    ]
    return {*rows, float(loaded.capacity - 10)}


@pytest.mark.parametrize("make", [motions, vectors, finals])
def test_what_is_loaded_while_another_saves_is_of_one_save(
    tmp_path: Path, make: Callable[[int], Any]
) -> None:
    folder, stop = tmp_path / "saved", threading.Event()
    savers = [make(number) for number in (1, 2)]
    savers[0].save(folder)

    def save_in_turn() -> None:
        while not stop.is_set():
            for saver in savers:
                saver.save(folder)

    thread = threading.Thread(target=save_in_turn)
    thread.start()
    try:
        seen = [number_of(load_buffer(folder)) for _ in range(40)]
    finally:
        stop.set()
        thread.join()
    assert all(len(numbers) == 1 for numbers in seen)


@pytest.mark.parametrize("make", [motions, vectors, finals])
def test_files_of_two_saves_are_refused(tmp_path: Path, make: Callable[[int], Any]) -> None:
    for number in (1, 2):
        make(1).save(tmp_path / str(number))
    config = (tmp_path / "2" / "config.json").read_bytes()
    (tmp_path / "1" / "config.json").write_bytes(config)
    with pytest.raises(CorruptFileError, match="belongs to another save: expected id"):
        load_buffer(tmp_path / "1")
