"""A wrong argument is named with the class and the call that the user wrote."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import rollout_data
from rollout_data import (
    Normalizer,
    RemoteOptions,
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
    "call RolloutDataset.get_batch: expected num_transitions_per_env >= 1, got 0": lambda f: stream(
        f
    ).get_batch(0),
    "call RolloutDataset.get_buffer: expected num_transitions_per_env >= 1, got 0": lambda f: (
        stream(f).get_buffer(0)
    ),
    "create a RolloutDataset: expected seed >= 0 and a whole number, got 'a'": lambda f: (
        RolloutDataset(f, 1, seed="a")
    ),
    "create a RolloutDataset: expected num_envs in 1:16777217, got 0": lambda f: RolloutDataset(
        f, 0
    ),
    "create a RolloutDataset: expected data_dir as a path or a list of paths, got 3": lambda f: (
        RolloutDataset(3, 1)
    ),
    "create a RolloutDataset: expected data_dir with at least one data folder": lambda f: (
        RolloutDataset([], 1)
    ),
    "create a WindowDataset: expected length in 1:2147483648, got 0": lambda f: (
        WindowDataset(f, 0).frames
    ),
    "create a WindowDataset: expected data_dir as a path or a list of paths, got 3": lambda f: (
        WindowDataset(3)
    ),
    "create a WindowLoader: expected batch_size >= 1, got 0": lambda f: WindowLoader(windows(f), 0),
    "create a WindowLoader: expected num_ahead >= 1, got 0": lambda f: WindowLoader(
        windows(f), 2, num_ahead=0
    ),
    "create a WindowLoader: expected device a torch device": lambda f: WindowLoader(
        windows(f), 2, device="quantum"
    ),
    "call WindowLoader.set_epoch: expected epoch >= 0, got -1": lambda f: WindowLoader(
        windows(f), 2
    ).set_epoch(-1),
    "call WindowMixture.sampler: expected num_samples >= 0, got -1": lambda f: WindowMixture(
        [windows(f)]
    ).sampler(-1),
    "call rollout_data.loader: expected num_workers >= 0, got -1": lambda f: rollout_data.loader(
        stream(f), -1
    ),
    "create a WindowLoader: expected shard 'auto', 'none'": lambda f: WindowLoader(
        windows(f), 2, shard=(3, 2)
    ),
    "create a WindowLoader: expected even one of": lambda f: WindowLoader(
        windows(f), 2, even="odd"
    ),
    "create a RolloutDataset: expected shard 'auto', 'none'": lambda f: RolloutDataset(
        f, 1, shard=(3, 2)
    ),
    "create a WindowMixture: expected datasets as a dataset, a path": lambda f: WindowMixture(3),
    "call WindowMixture.sampler: expected shard": lambda f: WindowMixture([windows(f)]).sampler(
        1, shard=(3, 2)
    ),
    "call WindowLoader.load_state_dict: expected a state": lambda f: WindowLoader(
        windows(f), 2
    ).load_state_dict(3),
    "call RolloutDataset.reset: expected env_ids in 0:1, got [9]": lambda f: stream(f).reset([9]),
    "create a RolloutWriter: expected data_dir a path, got 3": lambda f: RolloutWriter(3, 1),
    "call RolloutWriter.discard: expected env_ids in 0:1": lambda f: RolloutWriter(
        f / "new", 1
    ).discard([7]),
    "call rollout_data.convert: expected target a path, got 3": lambda f: rollout_data.convert(
        f, 3
    ),
    "call rollout_data.convert: expected to as one of 'd4rl'": lambda f: rollout_data.convert(
        f, f / "new", "d4r"
    ),
    "call Recording.split: expected parts as a mapping": lambda f: rollout_data.open(f).split(3),
    "call Recording.split: expected seed as a whole number": lambda f: rollout_data.open(f).split(
        {"a": 1}, "x"
    ),
    "call Recording.filter: expected keeps as a function": lambda f: rollout_data.open(f).filter(3),
    "call Recording.info: expected place in -2:2, got 99": lambda f: rollout_data.open(f).info(99),
    "create a TrajectoryCache: expected max_size >= 0, got -1": lambda f: TrajectoryCache(-1),
    "call TrajectoryReplayBuffer.sample: expected num_chunks": lambda f: (
        TrajectoryReplayBuffer().sample(0)
    ),
    "call TrajectoryReplayBuffer.get: expected trajectory_id": lambda f: (
        TrajectoryReplayBuffer().get(7)
    ),
    "call TrajectoryReplayBuffer.add_trajectories: expected trajectories": lambda f: (
        TrajectoryReplayBuffer().add_trajectories(3)
    ),
    "call TrajectoryReplayBuffer.load_checkpoint: expected local_rank in 0:1, got 5": lambda f: (
        TrajectoryReplayBuffer().load_checkpoint(f, local_rank=5)
    ),
    "call rollout_data.open: expected path as a path or a list of paths, got 3": lambda f: (
        rollout_data.open(3)
    ),
    "call rollout_data.open: expected remote as RemoteOptions or None": lambda f: rollout_data.open(
        f, remote=3
    ),
    "call RolloutWriter.add: expected transition as a mapping": lambda f: RolloutWriter(
        f / "new", 1
    ).add(3),
    "call RolloutWriter.add with the flag 'done': expected shape (2,)": lambda f: RolloutWriter(
        f / "new", 2
    ).add(observation=np.zeros((2, 1)), action=np.zeros((2, 1)), done=[0, 0, 0]),
    "call RolloutWriter.add with the field 'reward': expected one of bool": lambda f: RolloutWriter(
        f / "new", 1
    ).add(observation=[[1.0]], action=[[1.0]], reward=np.array([1j])),
    "call RolloutWriter.add_rollout with the flag 'done': expected shape (1, 2)": lambda f: (
        RolloutWriter(f / "new", 2).add_rollout(
            observation=np.zeros((1, 2, 1)), action=np.zeros((1, 2, 1)), done=[0]
        )
    ),
    "call RolloutWriter.add_rollout: expected include as names": lambda f: RolloutWriter(
        f / "new", 1
    ).add_rollout(include=3),
    "create a RolloutWriter: expected durable True or False, got 'no'": lambda f: RolloutWriter(
        f, 1, durable="no"
    ),
    "create a RolloutWriter with retention: expected frames >= 1": lambda f: RolloutWriter(
        f / "new", 1, retention={"frames": 0}
    ),
    "create RemoteOptions: expected num_chunks >= 1, got 0": lambda f: RemoteOptions(num_chunks=0),
    "create RemoteOptions: expected storage_options as a mapping": lambda f: RemoteOptions(
        storage_options=3
    ),
    "call rollout_data.prune: expected trajectories >= 1, got 0": lambda f: rollout_data.prune(
        f, trajectories=0
    ),
    "call rollout_data.prune: expected data_dir a path, got 3": lambda f: rollout_data.prune(
        3, frames=1
    ),
    "call RolloutDataset.refresh_handlers: expected env_ids in 0:1": lambda f: stream(
        f
    ).refresh_handlers([7]),
    "call RolloutDataset.reference_num_frames: expected env_ids": lambda f: stream(
        f
    ).reference_num_frames([7]),
    "call RolloutDataset.read_frames_at: expected env_ids in 0:1": lambda f: stream(
        f
    ).read_frames_at([7], [0]),
    "call RolloutDataset.read_frames_at: expected position": lambda f: stream(f).read_frames_at(
        [0], [99]
    ),
    "call RolloutDataset.get_batch_by_time: expected time_s": lambda f: stream(f).get_batch_by_time(
        "x"
    ),
    "call RolloutDataset.fill_transition: expected buffer": lambda f: stream(f).fill_transition(3),
    "call RolloutDataset.fill_rollout: expected num_transitions_per_env >= 1": lambda f: stream(
        f
    ).fill_rollout(3, 0),
    "call RolloutDataset.prefetch: expected num_batches >= 1": lambda f: stream(f).prefetch(0),
    "call RolloutDataset.statistics: expected quantiles": lambda f: stream(f).statistics(3),
    "call RolloutDataset.load_state_dict: expected state": lambda f: stream(f).load_state_dict(3),
    "create a RolloutDataset: expected remote as RemoteOptions or None": lambda f: RolloutDataset(
        f, 1, remote=3
    ),
    "create a WindowDataset: expected delta as a dict": lambda f: WindowDataset(f, delta=3),
    "create a WindowDataset: expected fields among": lambda f: WindowDataset(f, fields=["nope"]),
    "create a WindowDataset: expected padding one of": lambda f: WindowDataset(f, padding="x"),
    "create a WindowDataset: expected split one of": lambda f: WindowDataset(f, split="x"),
    "create a WindowDataset: expected contiguous True or False": lambda f: WindowDataset(
        f, contiguous="yes"
    ),
    "call WindowDataset.batch: expected windows in -6:6, got 99": lambda f: windows(f).batch([99]),
    "call WindowDataset.locate: expected windows as a list": lambda f: windows(f).locate("x"),
    "read a window of a WindowDataset: expected a whole number in": lambda f: windows(f)[99],
    "create a WindowLoader: expected shuffle True or False": lambda f: WindowLoader(
        windows(f), 2, shuffle="yes"
    ),
    "take an item of a WindowLoader: expected a loop over it": lambda f: WindowLoader(
        windows(f), 2
    )[0],
    "call rollout_data.loader: expected dataset as a RolloutDataset": lambda f: rollout_data.loader(
        windows(f)
    ),
    "create a Normalizer: expected statistics": lambda f: Normalizer(3),
    "create a Normalizer: expected modes one of": lambda f: Normalizer(
        stream(f).statistics(progress=False), "x"
    ),
    "call Normalizer.unnormalize: expected name as one of": lambda f: Normalizer(
        stream(f).statistics(progress=False)
    ).unnormalize(torch.zeros(1), "nope"),
    "call Recording.column: expected name one of 'ends'": lambda f: rollout_data.open(f).column(
        "end"
    ),
    "call Recording.read_many: expected places in 0:2": lambda f: rollout_data.open(f).read_many(
        [9], [], [], []
    ),
    "call Episode.read of episode": lambda f: rollout_data.open(f)[0].read("observation", "x"),
    "call Episode.video of episode": lambda f: rollout_data.open(f)[0].video("nope"),
    "call rollout_data.convert: expected source as": lambda f: rollout_data.convert(3, f / "new"),
    "call rollout_data.convert: expected progress True": lambda f: rollout_data.convert(
        f, f / "new", progress="x"
    ),
    "call rollout_data.merge: expected sources as": lambda f: rollout_data.merge(3, f / "new"),
    "call rollout_data.merge: expected out a path": lambda f: rollout_data.merge(f, 3),
    "call rollout_data.split: expected path as": lambda f: rollout_data.split(3, None, f / "new"),
    "call rollout_data.split: expected parts as": lambda f: rollout_data.split(f, 3, f / "new"),
    "call rollout_data.doctor: expected only as names": lambda f: rollout_data.doctor(f, only=3),
    "call rollout_data.doctor: expected settings as a mapping": lambda f: rollout_data.doctor(
        f, settings=3
    ),
    "call rollout_data.doctor: expected sample >= 1": lambda f: rollout_data.doctor(f, sample=0),
    "call rollout_data.doctor: expected path as": lambda f: rollout_data.doctor(3),
    "call rollout_data.repair: expected path as": lambda f: rollout_data.repair(3, f / "new"),
    "call rollout_data.repair: expected only with codes": lambda f: rollout_data.repair(
        f, f / "new", only=["x"]
    ),
    "call rollout_data.drop: expected ids with names": lambda f: rollout_data.drop(f, "x"),
    "call rollout_data.drop: expected dry_run True or False": lambda f: rollout_data.drop(
        f, [0], dry_run="no"
    ),
    "call rollout_data.keep: expected ids with places in -2:2": lambda f: rollout_data.keep(
        f, [99]
    ),
    "call rollout_data.tag: expected ids as names or places": lambda f: rollout_data.tag(
        f, 1.5, task="x"
    ),
    "call rollout_data.undrop: expected path as": lambda f: rollout_data.undrop(3),
    "call rollout_data.edits_of: expected path as": lambda f: rollout_data.edits_of(3),
    "call rollout_data.push: expected url as a URL": lambda f: rollout_data.push(f, 3),
    "call rollout_data.push: expected remote as": lambda f: rollout_data.push(
        f, "memory://x", remote=3
    ),
    "call rollout_data.report: expected compare as": lambda f: rollout_data.report(
        f, f.with_suffix(".html"), 3
    ),
    "call rollout_data.load_expert_trajectories: expected motions a path": lambda f: (
        rollout_data.load_expert_trajectories(3, f, 1, "cpu")
    ),
    "call rollout_data.load_expert_trajectories_from_motion_lib: expected obs_dict_mapper": lambda f: (
        rollout_data.load_expert_trajectories_from_motion_lib([], obs_dict_mapper=3)
    ),
    "call rollout_data.record_demonstrations: expected env as": lambda f: (
        rollout_data.record_demonstrations(3, len, f, min_timesteps=1)
    ),
    "call TrajectoryReplayBuffer.about: expected trajectory_id": lambda f: (
        TrajectoryReplayBuffer().about("x")
    ),
    "call TrajectoryReplayBuffer.add: expected trajectory as": lambda f: (
        TrajectoryReplayBuffer().add(3)
    ),
    "create a TrajectoryReplayBuffer: expected load_path a path": lambda f: TrajectoryReplayBuffer(
        load_path=3
    ),
    "create a TrajectoryReplayBuffer: expected trusted True": lambda f: TrajectoryReplayBuffer(
        trusted="x"
    ),
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
        UsageError,
        match=r"^cannot call Clock\.get_batch: expected num_transitions_per_env >= 1, got 0",
    ):
        Clock("nowhere", 1).get_batch(0)


def test_calls_that_look_up_trajectories_start_an_unread_dataset(tmp_path):
    record(tmp_path, [4, 6])
    assert stream(tmp_path).reference_num_frames([0]).tolist() == [4]
    first = stream(tmp_path).get_batch()
    assert torch.equal(stream(tmp_path).read_frames_at([0], [0.0]).observation, first.observation)
    dataset = stream(tmp_path)
    dataset.refresh_handlers([0])
    assert dataset.reference_num_frames([0]).tolist() == [6]
