"""Names with "/", as returned by `rollout_data.open`, are recorded as nested fields."""

from __future__ import annotations

import numpy as np
import pytest

import rollout_data
from rollout_data import RolloutWriter
from storage.errors import SchemaError

ROW = np.arange(2, dtype=np.float32)[None]


def test_fields_returned_by_open_are_written_under_the_same_names(tmp_path):
    nested = {"state": ROW, "images": {"front": ROW + 10, "wrist": ROW + 20}}
    with RolloutWriter(tmp_path / "a", 1, durable=False) as writer:
        for frame in range(3):
            end = {"final_observation": nested} if frame == 2 else {}
            action = {"arm": {"left": ROW, "right": ROW + 1}}
            writer.add(
                observation=nested,
                action=action,
                states={"robot": ROW + 5},
                terminated=[frame == 2],
                **end,
            )
    (mine,) = rollout_data.open(tmp_path / "a")
    with RolloutWriter(tmp_path / "b", 1, durable=False) as writer:
        for frame in range(mine.length):
            end = {
                "final_observation": {
                    name: row[None] for name, row in mine.final_observation.items()
                }
            }
            others = {
                name: mine[name][frame][None] for name in mine.schema if name.startswith("states/")
            }
            writer.add(
                observation={name: rows[frame][None] for name, rows in mine.observation.items()},
                action={name: rows[frame][None] for name, rows in mine.action.items()},
                terminated=[frame == mine.length - 1],
                **others,
                **(end if frame == mine.length - 1 else {}),
            )
    (theirs,) = rollout_data.open(tmp_path / "b")
    assert theirs.schema == mine.schema and {*theirs.final} == {*mine.final}
    for name in mine.schema:
        assert np.array_equal(mine[name], theirs[name])
    for name, row in mine.final_observation.items():
        assert np.array_equal(row, theirs.final_observation[name])


@pytest.mark.parametrize(
    "given",
    [
        {"observation": {"images/front": ROW, "images": {"front": ROW}}},
        {"observation": {"images": {"front": ROW}, "images/front": ROW}},
        {"observation": ROW, "states/arm": ROW, "states": {"arm": ROW}},
        {"observation": ROW, "states": {"arm": ROW}, "states/arm": ROW},
    ],
)
def test_a_field_under_its_flat_and_its_nested_name_raises(tmp_path, given):
    writer = RolloutWriter(tmp_path / "a", 1, durable=False)
    with writer, pytest.raises(SchemaError, match=r"field '.*' has two values"):
        writer.add(action=ROW, **given)


@pytest.mark.parametrize("name", ["a//b", "/a", "a/", "/", ""])
def test_a_field_name_with_an_empty_part_raises(tmp_path, name):
    writer = RolloutWriter(tmp_path / "a", 1, durable=False)
    with writer, pytest.raises(SchemaError, match="non-empty str"):
        writer.add(observation={name: ROW}, action=ROW)
