"""Files of other systems stream as our own: each frame once, for any number of envs and workers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import rollout_data
from rollout_data import RolloutDataset, WindowDataset, WindowMixture
from storage.core.fields import flatten
from storage.errors import RolloutDataWarning, UsageError
from tests.formats.cases import CASES, expected_arrays, load, open_case
from tests.recordings.sets import action, reward, state, write_demos
from tests.recordings.test_recording import recorded

LENGTHS = [3, 1, 4, 2, 6]
EXACT = [path for path in CASES if "mcap" not in path.name]


def demos(tmp_path: Path, **options: Any) -> Path:
    return write_demos(tmp_path / "demos.hdf5", LENGTHS, **options)


def stream(data: Any, num_envs: int = 1, **options: Any) -> RolloutDataset:
    arguments = {
        "device": "cpu",
        "mark_first_frame": False,
        "flatten_observations": False,
        **options,
    }
    return RolloutDataset(data, num_envs, **arguments)


def delivered(dataset: RolloutDataset, num_steps: int = 3) -> list[list[tuple[int, int]]]:
    """Return the (episode, frame) of each trajectory that a stream delivers, after a check of all
    its fields.
    """
    played: list[list[tuple[int, int]]] = []
    running: dict[int, list[tuple[int, int]]] = {}
    for batch in iter(lambda: next_batch(dataset, num_steps), None):
        for step in range(num_steps):
            for env in range(dataset.num_envs):
                if batch.valid[step, env]:
                    episode, frame = divmod(int(batch.observation["low"][step, env, 0]) // 10, 100)
                    np.testing.assert_array_equal(
                        batch.action[step, env], action(episode, frame + 1)[frame]
                    )
                    np.testing.assert_array_equal(
                        batch.reward[step, env], reward(episode, frame + 1)[frame]
                    )
                    running.setdefault(env, []).append((episode, frame))
                    if batch.done[step, env]:
                        after = batch.next_observation["low"][step, env]
                        np.testing.assert_array_equal(after, state(episode, frame + 2)[-1])
                        played.append(running.pop(env))
    assert not running
    return played


def next_batch(dataset: RolloutDataset, num_steps: int) -> Any:
    try:
        return dataset.get_batch(num_steps)
    except StopIteration:
        return None


def whole(numbers: Any) -> list[list[tuple[int, int]]]:
    return [[(number, frame) for frame in range(LENGTHS[number])] for number in numbers]


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("shuffles", [False, True])
def test_every_frame_is_delivered_once_and_in_order(tmp_path, num_envs, shuffles):
    actual = delivered(stream(demos(tmp_path), num_envs, random_shuffle_traj_order=shuffles))
    assert sorted(actual) == whole(range(len(LENGTHS)))
    assert shuffles or num_envs > 1 or actual == whole(range(len(LENGTHS)))


def test_workers_deliver_the_same_batches_as_one_process(tmp_path):
    recording = rollout_data.open(demos(tmp_path))[1:]
    item = [batch.action for batch in stream(recording, 2, num_transitions_per_env=2)]
    many = [
        batch.action
        for batch in rollout_data.loader(stream(recording, 2, num_transitions_per_env=2), 2)
    ]
    assert len(item) == len(many) and all(
        torch.equal(a, b) for a, b in zip(item, many, strict=True)
    )


def test_a_spawned_worker_ends_without_an_error(tmp_path, capfd):
    windows = WindowDataset(demos(tmp_path))
    options = {"num_workers": 1, "multiprocessing_context": "spawn", "collate_fn": windows.collate}
    assert len(list(DataLoader(windows, 4, **options))) == 4
    assert "fault" not in capfd.readouterr().err


def test_a_stream_resumes_in_mid_episode(tmp_path):
    path = demos(tmp_path)
    straight, first, second = (stream(path, 2, random_shuffle_traj_order=True) for _ in range(3))
    for _ in range(2):
        straight.get_batch(2), first.get_batch(2)
    second.load_state_dict(first.state_dict())
    assert torch.equal(straight.get_batch(3).action, second.get_batch(3).action)


@pytest.mark.parametrize("path", EXACT, ids=lambda path: path.name.removesuffix(".case.json"))
def test_a_stream_of_each_case_equals_its_expected_arrays(path):
    case = load(path)
    expected, recording = expected_arrays(case), open_case(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RolloutDataWarning)
        batch = stream(recording).get_batch(sum(about["T"] for about in case["episodes"]))
    assert bool(batch.valid.all()) and bool(batch.timeout.any()) == any(
        about["end"] == "truncated" for about in case["episodes"]
    )
    first, tolerances = 0, {name.removeprefix("observation.") for name in case["tol"]}
    observation = batch.observation if isinstance(batch.observation, Mapping) else None
    for about, arrays in zip(case["episodes"], expected, strict=True):
        rows = slice(first, first := first + about["T"])
        assert batch.done[rows, 0].tolist() == [False] * (about["T"] - 1) + [True]
        got = {f"observation/{name}": value for name, value in flatten(observation or {}).items()}
        names = [name for name in arrays if name.partition("/")[0] == "observation"]
        names = [name for name in names if name.partition("/")[2] not in tolerances]
        for name in names:
            values = got[name] if observation is not None else batch.observation
            np.testing.assert_array_equal(values[rows, 0].numpy(), arrays[name], err_msg=name)
        if "action" in arrays:
            np.testing.assert_array_equal(batch.action[rows, 0].numpy(), arrays["action"])
        if "reward" in arrays:
            np.testing.assert_array_equal(batch.reward[rows, 0].numpy(), arrays["reward"])


# Parts of recordings, and several


def test_a_selection_is_respected_for_every_kind_of_data(tmp_path):
    chosen = rollout_data.open(demos(tmp_path)).select(["demo_3", "demo_0"])
    assert delivered(stream(chosen)) == whole([0, 3])
    own = recorded(tmp_path / "own")
    part = own.filter(ends="truncated")
    batch = stream(part, flatten_observations=True).get_batch(4)
    np.testing.assert_array_equal(batch.observation[:, 0], own[1].observation)
    assert WindowDataset(part).num_frames == 4
    chunks = rollout_data.open(
        Path(__file__).parents[1] / "data" / "trajectory_folders" / "components"
    )[:1]
    np.testing.assert_array_equal(WindowDataset(chunks)[0]["action"], chunks[0].action[:1])


def test_windows_equal_the_rows_of_their_episodes(tmp_path):
    path = demos(tmp_path)
    windows = WindowDataset(
        path, 2, delta={"observation": [-1, 0], "action": range(2)}, padding="repeat"
    )
    assert len(windows) == sum(LENGTHS)
    actual = windows.read(
        np.arange(len(windows)), lambda shape, dtype: torch.empty(shape, dtype=dtype)
    )
    anchors = [(number, length, t) for number, length in enumerate(LENGTHS) for t in range(length)]
    actions = [action(number, length)[[t, min(t + 1, length - 1)]] for number, length, t in anchors]
    np.testing.assert_array_equal(actual["action"], actions)


def test_lists_and_mixtures_accept_paths_and_recordings(tmp_path):
    item = write_demos(tmp_path / "one.hdf5", [2, 3])
    two = rollout_data.open(write_demos(tmp_path / "two.hdf5", {2: 4, 4: 6}))
    batch = stream([item, two[1:]]).get_batch(11)
    np.testing.assert_array_equal(
        batch.action[:, 0, 0], [*action(0, 2)[:, 0], *action(1, 3)[:, 0], *action(4, 6)[:, 0]]
    )
    mixture = WindowMixture([item, two[1:], WindowDataset(two[:1], 2)], [1, 2, 1], length=2)
    assert [len(member) for member in mixture.datasets] == [3, 5, 3] and len(mixture) == 11
    np.testing.assert_array_equal(mixture[3]["action"], action(4, 2))
    assert len(WindowMixture(two)) == 10 and len(WindowMixture(str(item), length=2)) == 3
    with pytest.raises(
        UsageError, match="the options length are not used, since all datasets are open"
    ):
        WindowMixture(mixture.datasets, length=2)
    recorded(tmp_path / "own")
    with pytest.raises(UsageError, match="the folders have different formats"):
        stream([item, tmp_path / "own"]).get_batch()


# Episodes that differ


def test_a_missing_optional_field_is_nan_and_reported_once(tmp_path):
    dataset = stream(demos(tmp_path, without_reward=[1, 3]))
    with pytest.warns(RolloutDataWarning, match="read as NaN") as caught:
        rewards = dataset.get_batch(sum(LENGTHS)).reward[:, 0].numpy()
    parts = [
        np.full(n, np.nan) if number in (1, 3) else reward(number, n)
        for number, n in enumerate(LENGTHS)
    ]
    np.testing.assert_array_equal(rewards, np.concatenate(parts))
    (problem,) = dataset.problems
    assert (
        len(caught) == 1
        and str(problem).startswith("Episodes 'demo_1', 'demo_3' of ")
        and ": no 'reward'. The missing values read as NaN." in str(problem)
    )


def test_integers_missing_in_some_episodes_become_floats_and_pictures_are_required(tmp_path):
    count, picture = np.arange(4, dtype=np.int16), np.zeros((4, 2, 2, 3), np.uint8)
    path = demos(tmp_path, more={2: {"count": count, "obs/cam": picture}})
    with pytest.warns(RolloutDataWarning):
        batch = stream(path).get_batch(8)
    assert batch.extras["count"].dtype == torch.float32
    np.testing.assert_array_equal(batch.extras["count"][:, 0], [np.nan] * 4 + [0, 1, 2, 3])
    assert set(batch.observation) == {"low"}


def test_an_episode_that_contradicts_most_episodes_is_left_out_and_named(tmp_path):
    path = demos(
        tmp_path, more={3: {"obs/low": np.zeros((2, 5)), "next_obs/low": np.zeros((2, 5))}}
    )
    dataset = stream(path)
    with pytest.warns(RolloutDataWarning, match="Episode 'demo_3' of .*Left out of the stream"):
        assert delivered(dataset) == whole([0, 1, 2, 4])
    assert rollout_data.open(path)[3].observation["low"].shape == (2, 5)


def test_an_unknown_end_sets_done_and_end_unknown_but_not_timeout(tmp_path):
    batch = stream(demos(tmp_path)).get_batch(4)
    assert batch.done[:, 0].tolist() == [False, False, True, True]
    assert not batch.timeout.any()
    assert batch.end_unknown[:, 0].tolist() == [False, False, True, True]
    own = stream(recorded(tmp_path / "own")).get_batch(12)
    assert own.end_unknown is None and own.timeout.sum() == 3
    info = stream(demos(tmp_path)).get_transition_batch()[-1]
    assert not info["time_outs"].any() and not info["end_unknown"].any()
    assert info["transition"].end_unknown is info["end_unknown"]
