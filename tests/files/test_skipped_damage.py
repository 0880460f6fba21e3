"""`on_error="skip"`: a damaged chunk loses only its trajectory, which is counted and reported."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import rollout_data
from rollout_data import RolloutDataset, RolloutWriter
from storage.errors import CorruptFileError, RolloutDataWarning

LENGTH, NUM_TRAJECTORIES, DAMAGED = 12, 6, 2


@pytest.fixture
def damaged(tmp_path):
    """Trajectories of noise, one in each block; a late chunk of one of them has a flipped byte."""
    rng = np.random.default_rng(0)
    with RolloutWriter(
        tmp_path,
        1,
        obs_disassemble_mapping={"depth": "lz4"},
        frames_per_chunk=2,
        durable=False,
        writer_name="w",
    ) as writer:
        for number in range(NUM_TRAJECTORIES):
            for frame in range(LENGTH):
                depth = rng.random((1, 16, 16), np.float32)
                depth[0, 0, :3] = number, frame, 777
                writer.add(
                    observation={"depth": depth},
                    action=np.array([[number, frame]], np.float32),
                    reward=np.zeros(1, np.float32),
                    done=np.array([frame == LENGTH - 1]),
                )
            writer.flush()
    flip(tmp_path)
    return tmp_path


def flip(data_dir, number=DAMAGED):
    """Flip a bit of the chunk with frame 8 of a trajectory. A second call restores it."""
    path = sorted(data_dir.glob("*.h5"))[number]
    data = bytearray(path.read_bytes())
    data[data.index(np.array([8, 777], np.float32).tobytes()) + 100] ^= 1  # noise is stored raw
    path.write_bytes(bytes(data))


def opened(data_dir, **options):
    return RolloutDataset(
        data_dir, 2, device="cpu", num_transitions_per_env=4, flatten_observations=False, **options
    )


def played(batch):
    action = batch.action[batch.valid].long()
    assert torch.equal(batch.observation["depth"][batch.valid][:, 0, :2].long(), action)
    return [tuple(pair) for pair in action.tolist()]


def read_by(dataset, reading):
    if reading == "workers":
        return rollout_data.loader(dataset, num_workers=2, collate_fn=lambda batch: batch)
    return {
        "direct": dataset,
        "prefetch": dataset.prefetch(5),
        "loader": rollout_data.loader(dataset),
    }[reading]


@pytest.mark.parametrize(
    ("cache", "reading"), [("none", "direct"), ("none", "prefetch"), ("ram", "direct")]
)
def test_a_damaged_chunk_raises_with_its_name_by_default(damaged, cache, reading):
    frames = []
    with pytest.raises(CorruptFileError, match=r"w_000002\.h5.*chunk \d+ of"):
        for batch in read_by(opened(damaged, cache=cache), reading):
            frames += played(batch)
    # Frames before the damage are delivered, with and without reading ahead.
    before = [(number, frame) for number in (0, 1) for frame in range(LENGTH)]
    assert set(frames) >= set(before) if cache == "none" else not frames


@pytest.mark.each_value
@pytest.mark.parametrize("cache", ["none", "ram"])
@pytest.mark.parametrize("reading", ["direct", "prefetch", "loader", "workers"])
def test_on_error_skip_loses_only_the_damaged_trajectory(damaged, cache, reading):
    dataset = opened(damaged, cache=cache, on_error="skip", dataset_loops=2)
    batches = read_by(dataset, reading)
    with pytest.warns(RolloutDataWarning, match=r"w_000002\.h5.*chunk \d+ of"):
        frames = [frame for batch in batches for frame in played(batch)]
    whole = [
        (number, frame)
        for number in range(NUM_TRAJECTORIES)
        if number != DAMAGED
        for frame in range(LENGTH)
    ]
    assert sorted(frame for frame in frames if frame[0] != DAMAGED) == sorted(2 * whole)
    assert all(frame < 8 for number, frame in frames if number == DAMAGED)
    for _ in range(2):
        assert dataset.num_lost_trajectories == 1 and len(dataset.problems) == 1
        list(batches)  # the next epoch: known losses are not counted again


@pytest.mark.filterwarnings("ignore::storage.errors.RolloutDataWarning")
@pytest.mark.parametrize("reading", ["direct", "workers"])
def test_each_damaged_trajectory_of_a_batch_is_named(damaged, reading):
    flip(damaged, DAMAGED + 1)  # the other env plays it at the same time
    dataset = opened(damaged, on_error="skip")
    list(read_by(dataset, reading))
    assert dataset.num_lost_trajectories == 2
    assert sorted(str(problem).split(".h5")[0][-8:] for problem in dataset.problems) == [
        "w_000002",
        "w_000003",
    ]


@pytest.mark.filterwarnings("ignore::storage.errors.RolloutDataWarning")
def test_on_error_skip_moves_no_other_trajectory(damaged):
    def starts(dataset):
        return [batch.is_first.nonzero().tolist() for batch in dataset]

    options = {"random_shuffle_traj_order": True, "on_error": "skip"}
    actual = starts(opened(damaged, **options))
    flip(damaged)
    assert starts(opened(damaged, **options)) == actual
