"""Errors about records use the names and forms that the user passed."""

from __future__ import annotations

import warnings

import pytest
import torch

from rollout_data import RolloutDataset, RolloutWriter
from storage.errors import RolloutDataWarning, SchemaError


def test_keywords_that_are_not_recorded_are_named_in_a_warning(tmp_path):
    value = {
        "observation": torch.zeros(2, 3),
        "action": torch.zeros(2, 1),
        "done": torch.ones(2, dtype=torch.bool),
    }
    derived = {"next_observation": torch.ones(2, 3), "is_first": torch.ones(2)}
    with RolloutWriter(tmp_path, 2) as writer:
        with pytest.warns(RolloutDataWarning) as caught:
            writer.add(**value, **derived, hidden_states=torch.full((2, 4), 7.0))
        assert sorted(str(warning.message).split("'")[1] for warning in caught) == [
            "is_first",
            "next_observation",
        ]
        assert set(writer.schema) == {"observation", "action", "hidden_states"}
        with warnings.catch_warnings():  # a record may have these keys with the value None
            warnings.simplefilter("error")
            writer.add(
                {**value, **derived, "hidden_states": (1, 2)},
                hidden_states=torch.zeros(2, 4),
                is_first=None,
            )
    batch = next(iter(RolloutDataset(tmp_path, 2, device="cpu")))
    assert torch.equal(batch.extras["hidden_states"], torch.full((2, 4), 7.0))


def test_nested_nonfinite_rewards_are_counted(tmp_path):
    record = {"observation": torch.zeros(2, 3), "action": torch.zeros(2, 1)}
    with RolloutWriter(tmp_path, 2) as writer:
        writer.add(
            **record,
            reward={"a": torch.tensor([float("nan"), 1]), "b": torch.tensor([1, float("inf")])},
        )
        writer.add(**record, reward={"a": torch.ones(2), "b": torch.tensor([float("-inf"), 0])})
        assert writer.num_nonfinite_rewards == 3


def test_an_error_of_a_final_value_names_the_field_of_the_caller(tmp_path):
    ended = {
        "observation": torch.zeros(3, 4),
        "action": torch.zeros(3, 1),
        "done": torch.ones(3, dtype=torch.bool),
    }
    with RolloutWriter(tmp_path, 3) as writer:
        with pytest.raises(
            SchemaError,
            match=r"field 'final_observation' has dtype float64, expected float32",
        ):
            writer.add(**ended, final_observation=torch.zeros(3, 4, dtype=torch.float64))
        with pytest.raises(
            SchemaError, match=r"'final_observation' has shape \(5, 4\), expected \(3, 4\)"
        ):
            writer.add(**ended, final_observation=torch.zeros(5, 4))
