"""States of item buffers are copies and are checked. Objects of items are saved as JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from storage import (
    AdvancedReplayBuffer,
    DataFileError,
    EpisodeReplayBuffer,
    FieldTypeError,
    NaiveReplayBuffer,
    SchemaError,
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
        entry = item(number, collect_iter=number, data_id=f"file {number}")
        buffer.append(
            [entry, item(number + 1, collect_iter=1, data_id="x")]
            if isinstance(buffer, EpisodeReplayBuffer)
            else entry
        )


def play(buffer: Any, num_samples: int) -> list[Any]:
    """Sample and learn. Return all drawn items as plain Python values."""
    seen = []
    for iteration in range(num_samples):
        actual = buffer.sample(5, 40 + iteration)
        if actual is None:
            seen.append(None)
            continue
        if isinstance(buffer, AdvancedReplayBuffer):
            names = [x["replay_unique_id"] for x in actual]
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
                    for x in actual
                ]
            )
        elif isinstance(buffer, EpisodeReplayBuffer):
            seen.append([x[0]["replay_unique_id"] for x in actual])
        else:
            seen.append([x["replay_unique_id"] for x in actual])
    return seen


def test_d12_a_state_dict_is_a_complete_copy() -> None:
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
    """An object that JSON cannot represent."""


def test_json_values_are_saved_and_other_objects_raise_with_their_name(tmp_path: Path) -> None:
    buffer = NaiveReplayBuffer(4, name="kept", generator=0)
    values: dict[str, Any] = {
        "none": None,
        "numbers": [1, 2.5, math.inf, True],
        "nested": {"tuple": (1, ("a",)), "__is__": "mine"},
        "text": "ä\u2028",
    }
    buffer.append({"x": torch.zeros(1), "deep": values})
    buffer.save(tmp_path / "buffer")
    (actual,) = NaiveReplayBuffer.load(tmp_path / "buffer").sample(1)
    assert {name: actual["deep"][name] for name in values} == values
    assert type(actual["deep"]["nested"]["tuple"]) is tuple
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
