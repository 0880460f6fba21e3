"""A wrong argument is named with the class and the call that the user wrote."""

from __future__ import annotations

import pytest

import rollout_data
from rollout_data import (
    RolloutDataset,
    RolloutFileBase,
    RolloutWriter,
    TrajectoryCache,
    TrajectoryReplayBuffer,
    WindowDataset,
    WindowLoader,
    WindowMixture,
)
from storage.errors import UsageError
from tests.files.recorded import record


def stream(folder):
    return RolloutDataset(folder, 1, device="cpu")


def windows(folder):
    return WindowDataset(folder, 2)


CALLS = {
    "call RolloutDataset.set_epoch: expected epoch >= 0, got -1": lambda f: stream(f).set_epoch(-1),
    "call RolloutDataset.get_batch: expected num_transitions_per_env >= 1, got 0": lambda f: stream(f).get_batch(0),
    "call RolloutDataset.get_buffer: expected num_transitions_per_env >= 1, got 0": lambda f: stream(f).get_buffer(0),
    "create a RolloutDataset: expected seed >= 0 and a whole number, got 'a'": lambda f: RolloutDataset(f, 1, seed="a"),
    "create a RolloutDataset: expected num_envs in 1:16777217, got 0": lambda f: RolloutDataset(f, 0),
    "create a RolloutDataset: expected data_dir as a path or a list of paths, got 3": lambda f: RolloutDataset(3, 1),
    "create a RolloutDataset: expected data_dir with at least one data folder": lambda f: RolloutDataset([], 1),
    "create a WindowDataset: expected length in 1:2147483648, got 0": lambda f: WindowDataset(f, 0).frames,
    "create a WindowDataset: expected data_dir as a path or a list of paths, got 3": lambda f: WindowDataset(3),
    "create a WindowLoader: expected batch_size >= 1, got 0": lambda f: WindowLoader(windows(f), 0),
    "create a WindowLoader: expected num_ahead >= 1, got 0": lambda f: WindowLoader(windows(f), 2, num_ahead=0),
    "create a WindowLoader: expected device a torch device": lambda f: WindowLoader(windows(f), 2, device="quantum"),
    "call WindowLoader.set_epoch: expected epoch >= 0, got -1": lambda f: WindowLoader(windows(f), 2).set_epoch(-1),
    "call WindowMixture.sampler: expected num_samples >= 0, got -1": lambda f: WindowMixture([windows(f)]).sampler(-1),
    "call rollout_data.loader: expected num_workers >= 0, got -1": lambda f: rollout_data.loader(stream(f), -1),
    "create a WindowLoader: expected shard 'auto', 'none'": lambda f: WindowLoader(windows(f), 2, shard=(3, 2)),
    "create a WindowLoader: expected even one of": lambda f: WindowLoader(windows(f), 2, even="odd"),
    "create a RolloutDataset: expected shard 'auto', 'none'": lambda f: RolloutDataset(f, 1, shard=(3, 2)),
    "create a WindowMixture: expected datasets as a dataset, a path": lambda f: WindowMixture(3),
    "call WindowMixture.sampler: expected shard": lambda f: WindowMixture([windows(f)]).sampler(1, shard=(3, 2)),
    "call WindowLoader.load_state_dict: expected a state": lambda f: WindowLoader(windows(f), 2).load_state_dict(3),
    "call RolloutDataset.reset: expected env_ids in 0:1, got [9]": lambda f: stream(f).reset([9]),
    "create a RolloutWriter: expected data_dir a path, got 3": lambda f: RolloutWriter(3, 1),
    "call RolloutWriter.discard: expected env_ids in 0:1": lambda f: RolloutWriter(f / "new", 1).discard([7]),
    "call rollout_data.convert: expected target a path, got 3": lambda f: rollout_data.convert(f, 3),
    "call rollout_data.convert: expected to as one of 'd4rl'": lambda f: rollout_data.convert(f, f / "new", "d4r"),
    "call Recording.split: expected parts as a mapping": lambda f: rollout_data.open(f).split(3),
    "call Recording.split: expected seed as a whole number": lambda f: rollout_data.open(f).split({"a": 1}, "x"),
    "call Recording.filter: expected keeps as a function": lambda f: rollout_data.open(f).filter(3),
    "call Recording.info: expected place in -2:2, got 99": lambda f: rollout_data.open(f).info(99),
    "create a TrajectoryCache: expected max_size >= 0, got -1": lambda f: TrajectoryCache(-1),
    "call TrajectoryReplayBuffer.sample: expected num_chunks": lambda f: TrajectoryReplayBuffer().sample(0),
    "call TrajectoryReplayBuffer.get: expected trajectory_id": lambda f: TrajectoryReplayBuffer().get(7),
    "call TrajectoryReplayBuffer.add_trajectories: expected trajectories": lambda f: (
        TrajectoryReplayBuffer().add_trajectories(3)
    ),
    "call TrajectoryReplayBuffer.load_checkpoint: expected local_rank in 0:1, got 5": lambda f: (
        TrajectoryReplayBuffer().load_checkpoint(f, local_rank=5)
    ),
    "call rollout_data.open: expected path as a path or a list of paths, got 3": lambda f: rollout_data.open(3),
}


@pytest.mark.parametrize("text", CALLS)
def test_an_error_names_the_class_the_call_and_the_argument(tmp_path, text):
    record(tmp_path, [4, 4])
    with pytest.raises(UsageError) as caught:
        CALLS[text](tmp_path)
    assert str(caught.value).startswith(f"cannot {text}")


def test_a_subclass_of_the_template_is_named_by_its_own_name():
    class Clock(RolloutFileBase):
        reset_all = refresh_handlers = get_buffer = fill_transition = None

    with pytest.raises(UsageError, match=r"^cannot create a Clock: expected num_envs in "):
        Clock("nowhere", 0)
    with pytest.raises(
        UsageError, match=r"^cannot call Clock\.get_batch: expected num_transitions_per_env >= 1, got 0"
    ):
        Clock("nowhere", 1).get_batch(0)
