"""Saving and loading: the next hundred samples are the same, objects are JSON, damage and misfits are told."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from storage import (
    AdvancedReplayBuffer,
    DataFileError,
    EpisodeReplayBuffer,
    FieldTypeError,
    NaiveReplayBuffer,
    SchemaError,
    load_store,
)
from tests.managed.naive_model import item

OPTIONS: dict[str, Any] = {
    "max_use": 40,
    "max_staleness": 100,
    "anneal_step": 50,
    "enable_track_used_data": True,
}


def make(kind: Any, seed: int) -> Any:
    options = OPTIONS if kind is AdvancedReplayBuffer else {}
    return kind(16, name="one_of_us", generator=seed, **options)


def fill(buffer: Any, num_items: int = 40) -> None:
    for number in range(num_items):
        one = item(number, collect_iter=number, data_id=f"file {number}")
        buffer.append(
            [one, item(number + 1, collect_iter=1, data_id="x")]
            if isinstance(buffer, EpisodeReplayBuffer)
            else one
        )


def play(buffer: Any, num_samples: int) -> list[Any]:
    """Sample and learn; everything that was drawn, in plain Python."""
    seen = []
    for iteration in range(num_samples):
        found = buffer.sample(5, 40 + iteration)
        if found is None:
            seen.append(None)
            continue
        if isinstance(buffer, AdvancedReplayBuffer):
            names = [x["replay_unique_id"] for x in found]
            buffer.update(
                {
                    "replay_unique_id": names,
                    "priority": [0.1 * (iteration % 7)] * 5,
                    "used_id": ["file 39"],
                }
            )
            seen.append(
                [
                    (x["replay_unique_id"], x["IS"], x["use"], x["priority"], x["staleness"])
                    for x in found
                ]
            )
        elif isinstance(buffer, EpisodeReplayBuffer):
            seen.append([x[0]["replay_unique_id"] for x in found])
        else:
            seen.append([x["replay_unique_id"] for x in found])
    return seen


@pytest.mark.each_value
@pytest.mark.parametrize("kind", [NaiveReplayBuffer, AdvancedReplayBuffer, EpisodeReplayBuffer])
@pytest.mark.parametrize("way", ["state", "folder", "registry"])
def test_what_is_loaded_gives_the_same_next_hundred_samples(
    kind: Any, way: str, tmp_path: Path
) -> None:
    buffer = make(kind, 0)
    fill(buffer)
    play(buffer, 7)
    if way == "state":
        loaded = make(kind, 1)
        loaded.load_state_dict(buffer.state_dict())
    else:
        buffer.save(tmp_path / "buffer")
        loaded = (
            kind.load(tmp_path / "buffer") if way == "folder" else load_store(tmp_path / "buffer")
        )
    if kind is AdvancedReplayBuffer:
        assert loaded.check_valid() == (True, "") and loaded.beta == buffer.beta > 0.4
        assert list(loaded.used_data().queue) == list(buffer.used_data().queue)
    expected = play(buffer, 100)
    assert play(loaded, 100) == expected
    fill(buffer, 3)
    fill(loaded, 3)
    assert play(loaded, 5) == play(buffer, 5)
    assert sum(x is not None for x in expected) >= 15


def test_a_tensor_learner_resumes_too(tmp_path: Path) -> None:
    buffer = AdvancedReplayBuffer(5000, generator=0)
    buffer.extend_tensors(
        {"x": torch.arange(7000.0)}, torch.rand(7000, generator=torch.Generator().manual_seed(0))
    )

    def learn(one: AdvancedReplayBuffer, num_steps: int) -> list[torch.Tensor]:
        found = []
        for step in range(num_steps):
            batch, weights, ids = one.sample_tensors(64)
            one.update_priorities(ids, (batch["x"] * (step + 1)) % 13)
            found += [batch["x"], weights, ids]
        return found

    learn(buffer, 20)
    buffer.save(tmp_path / "buffer")
    loaded = AdvancedReplayBuffer.load(tmp_path / "buffer", device="cpu")
    assert all(
        torch.equal(mine, its)
        for mine, its in zip(learn(buffer, 100), learn(loaded, 100), strict=True)
    )


@pytest.mark.parametrize("kind", [NaiveReplayBuffer, AdvancedReplayBuffer, EpisodeReplayBuffer])
def test_empty_buffers_round_trip(kind: Any, tmp_path: Path) -> None:
    buffer = make(kind, 0)
    buffer.save(tmp_path / "buffer")
    loaded = load_store(tmp_path / "buffer")
    assert type(loaded) is kind and loaded.count() == 0 and loaded.name == "one_of_us"
    fill(loaded)
    loaded.clear()
    buffer.load_state_dict(loaded.state_dict())
    assert buffer.count() == 0 and buffer.sample(1) is None


def test_d12_a_state_is_a_copy_and_holds_everything() -> None:
    buffer = make(AdvancedReplayBuffer, 0)
    fill(buffer)
    state = buffer.state_dict()
    before = {name: tensor.clone() for name, tensor in state["tensors"].items()}
    play(buffer, 10)
    fill(buffer)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state["tensors"].items())
    assert state["arguments"]["alpha"] == 0.6 and state["arguments"]["max_use"] == 40
    assert json.loads(json.dumps(state["arguments"])) == state["arguments"]
    unlimited = AdvancedReplayBuffer(3, max_use=math.inf).state_dict()["arguments"]
    assert unlimited["max_use"] is None and unlimited["max_staleness"] is None


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    buffer = make(AdvancedReplayBuffer, 0)
    fill(buffer)
    good = buffer.state_dict()
    wrong = [
        {},
        {**good, "class": "NaiveReplayBuffer"},
        {**good, "arguments": {**good["arguments"], "alpha": 0.7}},
        {**good, "numbers": {**good["numbers"], "total": -1}},
        {**good, "numbers": {k: v for k, v in good["numbers"].items() if k != "num_draws"}},
        {**good, "tensors": {k: v for k, v in good["tensors"].items() if k != "weights"}},
        {**good, "tensors": {**good["tensors"], "weights": good["tensors"]["weights"][:3]}},
        {**good, "tensors": {**good["tensors"], "weights": -good["tensors"]["weights"]}},
        {**good, "tensors": {**good["tensors"], "column/0": torch.zeros(16, 9)}},
        {**good, "tensors": {**good["tensors"], "objects": torch.zeros(4, dtype=torch.uint8)}},
    ]
    before = buffer.state_dict()
    for state in wrong:
        with pytest.raises((SchemaError, DataFileError)):
            buffer.load_state_dict(state)
    after = buffer.state_dict()
    assert before["numbers"] == after["numbers"]
    assert all(torch.equal(x, after["tensors"][name]) for name, x in before["tensors"].items())


class Thing:
    """Something that JSON cannot hold."""


def test_objects_are_saved_as_json_and_others_refused_by_name(tmp_path: Path) -> None:
    buffer = NaiveReplayBuffer(4, name="kept", generator=0)
    values: dict[str, Any] = {
        "none": None,
        "numbers": [1, 2.5, math.inf, True],
        "nested": {"tuple": (1, ("a",)), "__is__": "mine"},
        "text": "ä\u2028",
    }
    buffer.append({"x": torch.zeros(1), "deep": values})
    buffer.save(tmp_path / "buffer")
    (found,) = NaiveReplayBuffer.load(tmp_path / "buffer").sample(1)
    assert {name: found["deep"][name] for name in values} == values
    assert type(found["deep"]["nested"]["tuple"]) is tuple
    for wrong in (Thing(), {1, 2}, b"bytes", [torch.zeros(1)], [{3: "x"}]):
        buffer.append({"x": torch.zeros(1), "thing": wrong})
        with pytest.raises(
            FieldTypeError,
            match=r"the objects of buffer 'kept' contain a \w+, which cannot be saved",
        ):
            buffer.save(tmp_path / "buffer")
        assert NaiveReplayBuffer.load(tmp_path / "buffer").count() == 1, (
            "the earlier save is untouched"
        )


def test_damage_is_reported(tmp_path: Path) -> None:
    buffer = make(AdvancedReplayBuffer, 0)
    fill(buffer)
    folder = tmp_path / "buffer"
    buffer.save(folder)
    columns = folder / "columns.hdf5"
    whole = columns.read_bytes()
    generator = np.random.default_rng(0)
    num_reported = 0
    for place in generator.integers(2048, len(whole), 40):
        damaged = bytearray(whole)
        damaged[place] ^= 0x40
        columns.write_bytes(damaged)
        try:
            loaded = AdvancedReplayBuffer.load(folder)
        except DataFileError:
            num_reported += 1
            continue
        same, expected = loaded.state_dict()["tensors"], buffer.state_dict()["tensors"]
        assert all(torch.equal(x, same[name]) for name, x in expected.items()), (
            "damaged data was given as good"
        )
    assert num_reported > 5
    columns.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataFileError):
        AdvancedReplayBuffer.load(folder)
