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
    "RolloutDataset.set_epoch: epoch; got -1": lambda f: stream(f).set_epoch(-1),
    "RolloutDataset.get_batch: num_transitions_per_env; got 0": lambda f: stream(f).get_batch(0),
    "RolloutDataset.get_buffer: num_transitions_per_env; got 0": lambda f: stream(f).get_buffer(0),
    "RolloutDataset: seed; got 'a'": lambda f: RolloutDataset(f, 1, seed="a"),
    "RolloutDataset: num_envs; got 0": lambda f: RolloutDataset(f, 0),
    "RolloutDataset: data_dir; got 3": lambda f: RolloutDataset(3, 1),
    "RolloutDataset: data_dir": lambda f: RolloutDataset([], 1),
    "WindowDataset: length; got 0": lambda f: WindowDataset(f, 0).frames,
    "WindowDataset: data_dir; got 3": lambda f: WindowDataset(3),
    "WindowLoader: batch_size; got 0": lambda f: WindowLoader(windows(f), 0),
    "WindowLoader: num_ahead; got 0": lambda f: WindowLoader(windows(f), 2, num_ahead=0),
    "WindowLoader: device": lambda f: WindowLoader(windows(f), 2, device="quantum"),
    "WindowLoader.set_epoch: epoch; got -1": lambda f: WindowLoader(windows(f), 2).set_epoch(-1),
    "WindowMixture.sampler: num_samples; got -1": lambda f: WindowMixture([windows(f)]).sampler(-1),
    "RolloutLoader: num_workers; got -1": lambda f: rollout_data.loader(stream(f), -1),
    "WindowLoader: shard": lambda f: WindowLoader(windows(f), 2, shard=(3, 2)),
    "WindowLoader: even": lambda f: WindowLoader(windows(f), 2, even="odd"),
    "RolloutDataset: shard": lambda f: RolloutDataset(f, 1, shard=(3, 2)),
    "WindowMixture: datasets": lambda f: WindowMixture(3),
    "WindowMixture.sampler: shard": lambda f: WindowMixture([windows(f)]).sampler(1, shard=(3, 2)),
    "WindowLoader.load_state_dict: state": lambda f: WindowLoader(windows(f), 2).load_state_dict(3),
    "RolloutDataset.reset: env_ids; got [9]": lambda f: stream(f).reset([9]),
    "RolloutWriter: data_dir; got 3": lambda f: RolloutWriter(3, 1),
    "RolloutWriter.discard: env_ids": lambda f: RolloutWriter(f / "new", 1).discard([7]),
    "convert: target; got 3": lambda f: rollout_data.convert(f, 3),
    "convert: to": lambda f: rollout_data.convert(f, f / "new", "d4r"),
    "Recording.split: parts": lambda f: rollout_data.open(f).split(3),
    "Recording.split: seed": lambda f: rollout_data.open(f).split({"a": 1}, "x"),
    "Recording.filter: keeps": lambda f: rollout_data.open(f).filter(3),
    "Recording.info: place; got 99": lambda f: rollout_data.open(f).info(99),
    "TrajectoryCache: max_size; got -1": lambda f: TrajectoryCache(-1),
    "TrajectoryReplayBuffer.sample: num_chunks": lambda f: TrajectoryReplayBuffer().sample(0),
    "TrajectoryReplayBuffer.get: trajectory_id": lambda f: TrajectoryReplayBuffer().get(7),
    "TrajectoryReplayBuffer.add_trajectories: trajectories": lambda f: (
        TrajectoryReplayBuffer().add_trajectories(3)
    ),
    "TrajectoryReplayBuffer.load_checkpoint: local_rank; got 5": lambda f: (
        TrajectoryReplayBuffer().load_checkpoint(f, local_rank=5)
    ),
    "open: path; got 3": lambda f: rollout_data.open(3),
    "open: remote": lambda f: rollout_data.open(f, remote=3),
    "RolloutWriter.add: transition": lambda f: RolloutWriter(f / "new", 1).add(3),
    "RolloutWriter.add: 'done'; (2,)": lambda f: RolloutWriter(f / "new", 2).add(
        observation=np.zeros((2, 1)), action=np.zeros((2, 1)), done=[0, 0, 0]
    ),
    "RolloutWriter.add: 'reward'; bool": lambda f: RolloutWriter(f / "new", 1).add(
        observation=[[1.0]], action=[[1.0]], reward=np.array([1j])
    ),
    "RolloutWriter.add_rollout: 'done'; (1, 2)": lambda f: RolloutWriter(f / "new", 2).add_rollout(
        observation=np.zeros((1, 2, 1)), action=np.zeros((1, 2, 1)), done=[0]
    ),
    "RolloutWriter.add_rollout: include": lambda f: RolloutWriter(f / "new", 1).add_rollout(
        include=3
    ),
    "RolloutWriter: durable; got 'no'": lambda f: RolloutWriter(f, 1, durable="no"),
    "RolloutWriter: frames": lambda f: RolloutWriter(f / "new", 1, retention={"frames": 0}),
    "RemoteOptions: num_chunks; got 0": lambda f: RemoteOptions(num_chunks=0),
    "RemoteOptions: storage_options": lambda f: RemoteOptions(storage_options=3),
    "prune: trajectories; got 0": lambda f: rollout_data.prune(f, trajectories=0),
    "prune: data_dir; got 3": lambda f: rollout_data.prune(3, frames=1),
    "RolloutDataset.refresh_handlers: env_ids": lambda f: stream(f).refresh_handlers([7]),
    "RolloutDataset.reference_num_frames: env_ids": lambda f: stream(f).reference_num_frames([7]),
    "RolloutDataset.read_frames_at: env_ids": lambda f: stream(f).read_frames_at([7], [0]),
    "RolloutDataset.read_frames_at: position": lambda f: stream(f).read_frames_at([0], [99]),
    "RolloutDataset.get_batch_by_time: time_s": lambda f: stream(f).get_batch_by_time("x"),
    "RolloutDataset.fill_transition: buffer": lambda f: stream(f).fill_transition(3),
    "RolloutDataset.fill_rollout: num_transitions_per_env": lambda f: stream(f).fill_rollout(3, 0),
    "RolloutDataset.prefetch: num_batches": lambda f: stream(f).prefetch(0),
    "RolloutDataset.statistics: quantiles": lambda f: stream(f).statistics(3),
    "RolloutDataset.load_state_dict: state": lambda f: stream(f).load_state_dict(3),
    "RolloutDataset: remote": lambda f: RolloutDataset(f, 1, remote=3),
    "WindowDataset: delta": lambda f: WindowDataset(f, delta=3),
    "WindowDataset: fields": lambda f: WindowDataset(f, fields=["nope"]),
    "WindowDataset: padding": lambda f: WindowDataset(f, padding="x"),
    "WindowDataset: split": lambda f: WindowDataset(f, split="x"),
    "WindowDataset: contiguous": lambda f: WindowDataset(f, contiguous="yes"),
    "WindowDataset.batch: windows; got 99": lambda f: windows(f).batch([99]),
    "WindowDataset.locate: windows": lambda f: windows(f).locate("x"),
    "WindowDataset: 99": lambda f: windows(f)[99],
    "WindowLoader: shuffle": lambda f: WindowLoader(windows(f), 2, shuffle="yes"),
    "WindowLoader: ": lambda f: WindowLoader(windows(f), 2)[0],
    "RolloutLoader: dataset": lambda f: rollout_data.loader(windows(f)),
    "Normalizer: statistics": lambda f: Normalizer(3),
    "Normalizer: modes": lambda f: Normalizer(stream(f).statistics(progress=False), "x"),
    "Normalizer.unnormalize: name": lambda f: Normalizer(
        stream(f).statistics(progress=False)
    ).unnormalize(torch.zeros(1), "nope"),
    "Recording.column: name": lambda f: rollout_data.open(f).column("end"),
    "Recording.read_many: places": lambda f: rollout_data.open(f).read_many([9], [], [], []),
    "Episode.read": lambda f: rollout_data.open(f)[0].read("observation", "x"),
    "Episode.video": lambda f: rollout_data.open(f)[0].video("nope"),
    "convert: source": lambda f: rollout_data.convert(3, f / "new"),
    "convert: progress": lambda f: rollout_data.convert(f, f / "new", progress="x"),
    "merge: sources": lambda f: rollout_data.merge(3, f / "new"),
    "merge: out": lambda f: rollout_data.merge(f, 3),
    "split: path": lambda f: rollout_data.split(3, None, f / "new"),
    "split: parts": lambda f: rollout_data.split(f, 3, f / "new"),
    "doctor: only": lambda f: rollout_data.doctor(f, only=3),
    "doctor: settings": lambda f: rollout_data.doctor(f, settings=3),
    "doctor: sample": lambda f: rollout_data.doctor(f, sample=0),
    "doctor: path": lambda f: rollout_data.doctor(3),
    "repair: path": lambda f: rollout_data.repair(3, f / "new"),
    "repair: only": lambda f: rollout_data.repair(f, f / "new", only=["x"]),
    "drop: ids": lambda f: rollout_data.drop(f, "x"),
    "drop: dry_run": lambda f: rollout_data.drop(f, [0], dry_run="no"),
    "keep: ids": lambda f: rollout_data.keep(f, [99]),
    "tag: ids": lambda f: rollout_data.tag(f, 1.5, task="x"),
    "undrop: path": lambda f: rollout_data.undrop(3),
    "edits_of: path": lambda f: rollout_data.edits_of(3),
    "push: url": lambda f: rollout_data.push(f, 3),
    "push: remote": lambda f: rollout_data.push(f, "memory://x", remote=3),
    "report: compare": lambda f: rollout_data.report(f, f.with_suffix(".html"), 3),
    "load_expert_trajectories: motions": lambda f: rollout_data.load_expert_trajectories(
        3, f, 1, "cpu"
    ),
    "load_expert_trajectories_from_motion_lib: obs_dict_mapper": lambda f: (
        rollout_data.load_expert_trajectories_from_motion_lib([], obs_dict_mapper=3)
    ),
    "record_demonstrations: env": lambda f: rollout_data.record_demonstrations(
        3, len, f, min_timesteps=1
    ),
    "TrajectoryReplayBuffer.about: trajectory_id": lambda f: TrajectoryReplayBuffer().about("x"),
    "TrajectoryReplayBuffer.add: trajectory": lambda f: TrajectoryReplayBuffer().add(3),
    "TrajectoryReplayBuffer: load_path": lambda f: TrajectoryReplayBuffer(load_path=3),
    "TrajectoryReplayBuffer: trusted": lambda f: TrajectoryReplayBuffer(trusted="x"),
}


@pytest.mark.parametrize("text", CALLS)
def test_an_error_names_the_class_the_call_and_the_argument(tmp_path, text):
    record(tmp_path, [4, 4])
    with pytest.raises(UsageError) as caught:
        CALLS[text](tmp_path)
    call, _, about = text.partition(": ")
    words = [*call.split("."), *filter(None, about.split("; "))]
    assert all(word in str(caught.value) for word in words)


def test_an_error_names_the_subclass_of_the_template():
    class Clock(RolloutFileBase):
        reset_all = refresh_handlers = get_buffer = fill_transition = None

    with pytest.raises(UsageError, match=r"^Clock: num_envs must be in "):
        Clock("nowhere", 0)
    with pytest.raises(
        UsageError, match=r"^Clock\.get_batch: num_transitions_per_env must be >= 1, got 0"
    ):
        Clock("nowhere", 1).get_batch(0)


def test_calls_that_need_trajectories_start_an_unread_dataset(tmp_path):
    record(tmp_path, [4, 6])
    assert stream(tmp_path).reference_num_frames([0]).tolist() == [4]
    first = stream(tmp_path).get_batch()
    assert torch.equal(stream(tmp_path).read_frames_at([0], [0.0]).observation, first.observation)
    dataset = stream(tmp_path)
    dataset.refresh_handlers([0])
    assert dataset.reference_num_frames([0]).tolist() == [6]
