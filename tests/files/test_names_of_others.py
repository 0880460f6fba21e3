"""Records with the names of other libraries, and misspelt names."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from rollout_data import RolloutDataset, RolloutWriter
from storage.errors import RolloutDataWarning, UsageError

N = 3
ENDS = np.array([True, False, False])
TIMEOUTS = np.array([False, True, False])
DONES = ENDS | TIMEOUTS
FINAL = np.full((N, 2), 9, np.float32)

#: Library -> one step with its names: env 0 terminated, env 1 timed out, reward 5.
STEPS = {
    "gymnasium": {
        "obs": 0,
        "action": 1,
        "reward": 5,
        "terminated": ENDS,
        "truncated": TIMEOUTS,
        "final_obs": FINAL,
    },
    "minari": {
        "observations": 0,
        "actions": 1,
        "rewards": 5,
        "terminations": ENDS,
        "truncations": TIMEOUTS,
    },
    "minari step": {
        "observation": 0,
        "action": 1,
        "reward": 5,
        "termination": ENDS,
        "truncation": TIMEOUTS,
    },
    "sb3": {
        "obs": 0,
        "actions": 1,
        "rewards": 5,
        "dones": DONES,
        "time_outs": TIMEOUTS,
        "terminal_observation": FINAL,
    },
    "d4rl": {
        "observations": 0,
        "actions": 1,
        "rewards": 5,
        "terminals": ENDS,
        "timeouts": TIMEOUTS,
    },
    "rllib": {"obs": 0, "actions": 1, "rewards": 5, "terminateds": ENDS, "truncateds": TIMEOUTS},
    "rsl_rl": {
        "observations": 0,
        "actions": 1,
        "rewards": 5,
        "dones": DONES,
        "time_outs": TIMEOUTS,
    },
    "torchrl": {
        "observation": 0,
        "action": 1,
        "done": ENDS & False,
        "terminated": ENDS & False,
        "truncated": ENDS & False,
        "next": {
            "observation": FINAL,
            "reward": np.full((N, 1), 5, np.float32),
            "done": DONES[:, None],
            "terminated": ENDS[:, None],
            "truncated": TIMEOUTS[:, None],
            "step_count": np.ones((N, 1)),
        },
    },
}


def step_of(library: str) -> dict:
    sizes = {0: (N, 2), 1: (N, 1), 5: (N,)}
    numbers = STEPS[library].items()
    return {k: np.full(sizes[v], v, np.float32) if isinstance(v, int) else v for k, v in numbers}


@pytest.mark.parametrize("as_record", [True, False])
@pytest.mark.parametrize("library", STEPS)
def test_a_step_with_the_field_names_of_another_library_is_recorded(tmp_path, library, as_record):
    step = step_of(library)
    with warnings.catch_warnings(), RolloutWriter(tmp_path, N, durable=False) as writer:
        warnings.simplefilter("error")
        writer.add(step) if as_record else writer.add(**step)
        assert (
            sorted(writer.schema) == ["action", "observation", "reward"]
            and writer.num_trajectories == 2
        )
    batch = RolloutDataset(tmp_path, N, device="cpu").get_batch()
    assert batch.reward.flatten().tolist() == [5, 5, 5]
    assert sorted(batch.timeout.tolist()) == [False, True, True], "the third was cut by close()"
    finals = 2 if library in ("gymnasium", "sb3", "torchrl") else 0
    assert int((batch.next_observation == 9).all(-1).sum()) == finals


@pytest.mark.parametrize(
    "names", [("done", "dones"), ("obs", "observations"), ("terminals", "terminations")]
)
def test_two_names_of_the_same_field_raise(tmp_path, names):
    record = {"observation": np.zeros((2, 1)), "action": np.zeros((2, 1))} | {
        name: np.zeros(2) for name in names
    }
    if "obs" in names:
        del record["observation"]
    with (
        RolloutWriter(tmp_path, 2) as writer,
        pytest.raises(UsageError, match=f"'{names[0]}' and '{names[1]}' both set"),
    ):
        writer.add(record)


def test_next_observations_are_left_out_with_a_warning(tmp_path):
    record = {"observation": np.zeros((2, 1)), "action": np.zeros((2, 1))}
    with RolloutWriter(tmp_path, 2) as writer:
        for name in ("next_obs", "new_obs"):
            with pytest.warns(RolloutDataWarning, match=f"'{name}' is not recorded"):
                writer.add(**record, **{name: {"x": np.zeros(2)}})
        assert sorted(writer.schema) == ["action", "observation"]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("doen", "done"),
        ("Done", "done"),
        ("rewrad", "reward"),
        ("trucated", "truncated"),
        ("timeot", "timeout"),
        ("finale_obs", "final_obs"),
    ],
)
def test_a_misspelt_name_is_warned_of_once(tmp_path, given, meant):
    with RolloutWriter(tmp_path, 2) as writer, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            writer.add(
                observation=np.zeros((2, 1)), action=np.zeros((2, 1)), **{given: np.zeros(2)}
            )
        meant = meant.replace("final_obs", "final_observation")
        assert [
            f"{given!r} is recorded as an extra field. Rename it if it is {meant!r}."
            in str(warning.message)
            for warning in caught
        ] == [True]
        assert caught[0].filename == __file__ and given in writer.schema


def test_names_of_extra_fields_are_not_reported_as_misspelt(tmp_path):
    own = [
        "values",
        "action_mean",
        "next_action",
        "actions2",
        "observation_mask",
        "reward_scale",
        "zone",
        "time_step",
    ]
    with warnings.catch_warnings(), RolloutWriter(tmp_path, 2) as writer:
        warnings.simplefilter("error")
        writer.add(
            observation=np.zeros((2, 1)),
            action=np.zeros((2, 1)),
            **{name: np.zeros(2) for name in own},
        )


@pytest.mark.parametrize("at_once", [True, False])
def test_a_recording_without_ends_is_warned_of_once(tmp_path, at_once):
    with (
        RolloutWriter(tmp_path, 2, durable=False) as writer,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for _ in range(1 if at_once else 4500):
            shape = (4500, 2, 1) if at_once else (2, 1)
            (writer.add_rollout if at_once else writer.add)(
                observation=np.zeros(shape), action=np.zeros(shape)
            )
    assert len(caught) == 1 and "More than 2000 steps were recorded in" in str(caught[0].message)
    assert "done=" in str(caught[0].message) and caught[0].filename == __file__


def test_a_recording_with_an_end_raises_no_warning(tmp_path):
    with warnings.catch_warnings(), RolloutWriter(tmp_path, 2, durable=False) as writer:
        warnings.simplefilter("error")
        done = np.zeros((5000, 2), bool)
        done[1999, 0] = True
        writer.add_rollout(
            observation=np.zeros((5000, 2, 1)), action=np.zeros((5000, 2, 1)), done=done
        )
