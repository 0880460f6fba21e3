"""Snapshots with foreign values, files that are none, and every dtype that a buffer takes."""

from __future__ import annotations

import json
import os
import threading

import pytest
import torch

from storage import (
    AdvancedReplayBuffer,
    EpisodeReplayBuffer,
    NaiveReplayBuffer,
    QueueRolloutStorage,
    ReplayBuffer,
    SchemaError,
    UsageError,
    load_store,
)
from storage.errors import CorruptFileError, DataFileError
from tests.saved import config_of
from tests.storage.rollouts import make_storage, make_transition

NONSENSE = [None, float("nan"), float("inf"), -1, 2**60, 10**400, [], {}, [5], "x", 1.5]


def stores():
    made = [
        make_storage(3, 4, QueueRolloutStorage, buffer_dilation_ratio=1.5),
        ReplayBuffer(3, 4, generator=0),
    ]
    made[0].add_transitions(make_transition(0, 3))
    for cls in (NaiveReplayBuffer, AdvancedReplayBuffer, EpisodeReplayBuffer):
        item = {"x": torch.ones(2), "name": "a"}
        made.append(cls(4, generator=0))
        made[-1].append([item, item] if cls is EpisodeReplayBuffer else item)
    return made


def places_in(content, keys):
    """Name each of `keys`, and what is directly in it: a level, or two."""
    return [
        (key, *below)
        for key in keys
        for below in [(), *([(x,) for x in content[key]] * (key != "columns"))]
    ]


def changed(content, place, value):
    one = content[place[0]]
    return {**content, place[0]: value if len(place) == 1 else {**one, place[1]: value}}


@pytest.mark.parametrize("number", range(5))
def test_values_of_wrong_kinds_in_a_config_are_reported_or_harmless(tmp_path, number):
    store = stores()[number]
    store.save(tmp_path / "kept")
    path = tmp_path / "kept" / "config.json"
    config = config_of(path)
    for place in [("class",), ("device",), *places_in(config, ("arguments", "numbers", "columns"))]:
        for value in NONSENSE:
            path.write_text(json.dumps(changed(config, place, value)))
            try:
                load_store(tmp_path / "kept")
            except DataFileError as error:
                assert str(tmp_path / "kept") in str(error)
            except UsageError as error:
                assert "load_store" in str(error)
            else:
                assert len(place) == 2, (place, value)
    path.write_text("[" * 100_000)
    with pytest.raises(CorruptFileError):
        load_store(tmp_path / "kept")


@pytest.mark.parametrize("number", range(5))
def test_values_of_wrong_kinds_in_a_state_are_reported_or_harmless(number):
    store = stores()[number]
    state = store.state_dict()
    for place in [("class",), *places_in(state, ("arguments", "numbers", "tensors"))]:
        for value in NONSENSE:
            try:
                stores()[number].load_state_dict(changed(state, place, value))
            except UsageError as error:
                assert ".load_state_dict: " in str(error)
            else:
                assert place[0] in ("arguments", "numbers") and len(place) == 2, (place, value)


@pytest.mark.parametrize("name", ["max_priority", "num_draws"])
def test_a_number_that_cannot_be_is_reported(name):
    store = stores()[3]
    state = store.state_dict()
    for value in (float("nan"), float("inf"), -1, 10**400, True, None):
        with pytest.raises(SchemaError, match=f"{name}.* finite .*>= 0"):
            store.load_state_dict({**state, "numbers": {**state["numbers"], name: value}})
    assert store.sample(1) is not None


@pytest.mark.parametrize("name", ["config.json", "columns.hdf5"])
def test_a_pipe_in_the_place_of_a_file_is_reported_at_once(tmp_path, name):
    NaiveReplayBuffer(4).save(tmp_path / "kept")
    path, is_over = tmp_path / "kept" / name, threading.Event()
    path.unlink()
    os.mkfifo(path)

    def answer():  # a reader that opens it nevertheless finds an empty file
        while not is_over.is_set():
            path.open("wb").close()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with pytest.raises(
            CorruptFileError, match=f"{name}' is a folder, a pipe or a device, not a file"
        ):
            load_store(tmp_path / "kept")
    finally:
        is_over.set()
        while thread.is_alive():
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            thread.join(0.01)
            os.close(handle)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("cls", [NaiveReplayBuffer, AdvancedReplayBuffer, EpisodeReplayBuffer])
def test_complex_items_are_kept(tmp_path, cls, dtype):
    items = [{"x": torch.randn(3, dtype=dtype), "y": torch.ones(2)} for _ in range(2)]
    store = cls(4, generator=0)
    store.append(items) if cls is EpisodeReplayBuffer else store.extend(items)
    given = cls(4, generator=1)
    given.load_state_dict(store.state_dict())
    store.save(tmp_path / "kept")
    first, *others = [one.sample(1)[0] for one in (store, given, load_store(tmp_path / "kept"))]
    for other in others:
        x, y = (one[0]["x"] if cls is EpisodeReplayBuffer else one["x"] for one in (first, other))
        assert y.dtype == dtype and torch.equal(x, y)
    path = tmp_path / "kept" / "columns.hdf5"
    path.write_bytes(
        path.read_bytes().replace(items[0]["x"].numpy().tobytes(), bytes(items[0]["x"].nbytes))
    )
    with pytest.raises(CorruptFileError, match="checksum"):
        load_store(tmp_path / "kept")
