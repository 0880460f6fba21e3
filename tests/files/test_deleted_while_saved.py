"""A state that plays trajectories which were deleted later: their remaining frames are not valid,
and nothing else changes.
"""

from __future__ import annotations

import json
import random
import warnings

import pytest
import torch

import rollout_data
from rollout_data import RolloutDataset, RolloutDataWarning
from storage.errors import UsageError
from tests.files.recorded import record
from tests.files.test_one_order import LiveFolder, next_of_all, opened, seen

NUM_ENVS, NUM_STEPS = 12, 2
pytestmark = pytest.mark.filterwarnings("ignore::rollout_data.RolloutDataWarning")


def folder_of(tmp_path):
    """Record twelve trajectories that are played at once, and further trajectories."""
    folder = LiveFolder(tmp_path)
    folder.delete(list(folder.blocks))
    folder.add([4, 9, 12, 7, 11, 5, 8, 10, 6, 12, 9, 7] + [3, 5, 4, 6, 5, 3, 4, 5, 6, 4, 3, 5] * 2)
    return folder


def playing(folder, state):
    """Return the numbers of the trajectories that a state plays."""
    writers = {path.name.split("_")[1]: number for number, path in folder.blocks.items()}
    return [writers[state["writers"][writer]] for writer, _ in state["trajectory"]]


def valid_of(batch, gone=()):
    """Return the valid part of a batch if some trajectories cannot be read. Their flags stay."""
    return batch and [
        [frame if frame[2] and frame[0] not in gone else [0, 0, 0, *frame[3:]] for frame in env] for env in batch
    ]  # fmt: skip


def names_of(ranks):
    """Return the names in the problems of all ranks, each once."""
    for rank in ranks:
        assert (
            rank.num_lost_trajectories
            == len(rank.problems)
            == len({str(problem) for problem in rank.problems})
        )
    return {str(problem) for rank in ranks for problem in rank.problems}


@pytest.mark.each_value
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"cache": "ram"}, {"dataset_loops": 3}, {"refresh_s": 0.0}], ids=str
)
def test_the_rest_of_a_deleted_trajectory_is_not_valid_and_other_envs_do_not_change(
    tmp_path, seed, shuffle, options
):
    chance, folder = random.Random(seed), folder_of(tmp_path)
    options = {"random_shuffle_traj_order": shuffle, "starting_frame_range": (0, 2), **options}
    uninterrupted = [opened(folder.data_dir, **options)]
    for _ in range(chance.randint(1, 4)):
        next_of_all(uninterrupted, NUM_STEPS)
    state = json.loads(json.dumps(uninterrupted[0].state_dict()))
    deleted = chance.sample(sorted(set(playing(folder, state))), 3)
    folder.delete(deleted)
    # Its files are still mapped.
    expected = [next_of_all(uninterrupted, NUM_STEPS) for _ in range(8)]
    total = chance.choice([1, 2, 3])
    ranks = [opened(folder.data_dir, (rank, total), **options) for rank in range(total)]
    for rank in ranks:
        rank.load_state_dict(state)
    named = set()
    for number, batch in enumerate(expected):
        if number == 3:  # again from a state, on one rank
            states = [json.loads(json.dumps(rank.state_dict())) for rank in ranks]
            assert all(state == states[0] for state in states)
            named |= names_of(ranks)
            ranks = [opened(folder.data_dir, **options)]
            ranks[0].load_state_dict(states[0])
        assert valid_of(next_of_all(ranks, NUM_STEPS)) == valid_of(batch, deleted)
    assert len(named | names_of(ranks)) == 3


def test_each_deleted_trajectory_is_named_once(tmp_path):
    folder = folder_of(tmp_path)
    first = opened(folder.data_dir)
    first.get_batch(1)
    state = first.state_dict()
    deleted = playing(folder, state)[:2]
    folder.delete(deleted)
    other = opened(folder.data_dir, num_transitions_per_env=NUM_STEPS, dataset_loops=1)
    other.load_state_dict(state)
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always", RolloutDataWarning)
        for num_workers in (0, 2):
            batches = rollout_data.loader(other, num_workers)
            batches.load_state_dict(state)
            rest = list(batches)
            frames = sorted(
                tuple(frame[:2])
                for batch in rest
                for env in seen(batch)
                for frame in env
                if frame[2]
            )
            assert not {number for number, _ in frames} & set(deleted) and len(set(frames)) == len(
                frames
            )
            zeros = [batch.observation[~batch.valid & ~batch.is_last] for batch in rest]
            assert not torch.cat(zeros).any()
            assert other.num_lost_trajectories == 2 and len(other.problems) == 2
            assert all("Trajectory 0 of writer" in str(problem) for problem in other.problems)
    assert len([warning for warning in raised if "was removed" in str(warning.message)]) >= 2


@pytest.mark.parametrize("system", ["without_maps", "cold_files"])
def test_a_deleted_trajectory_has_the_same_effect_without_maps_or_memory(tmp_path, request, system):
    folder = folder_of(tmp_path / "data")
    first = opened(folder.data_dir, dataset_loops=2)
    first.get_batch(1)
    state = first.state_dict()
    deleted = playing(folder, state)[2:4]
    folder.delete(deleted)
    expected = [valid_of(next_of_all([first], 3), deleted) for _ in range(6)]
    request.getfixturevalue(system)
    resumed = opened(folder.data_dir, dataset_loops=2)
    resumed.load_state_dict(state)
    assert [valid_of(next_of_all([resumed], 3)) for _ in range(6)] == expected
    assert len(names_of([resumed])) == 2


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_deleted_trajectory_ends_in_a_later_pass_where_it_would_have_ended(tmp_path, num_workers):
    folder = LiveFolder(tmp_path)
    folder.delete(list(folder.blocks))
    folder.add([40, 3, 4, 5, 6])
    options = {"num_envs": 2, "dataset_loops": 4, "num_transitions_per_env": NUM_STEPS}
    first = opened(tmp_path, **options)
    first.get_batch(NUM_STEPS)
    state = first.state_dict()
    (deleted,) = {number for number in playing(folder, state) if number == NUM_ENVS}
    folder.delete([deleted])
    expected = [valid_of(seen(first.get_batch(NUM_STEPS)), [deleted]) for _ in range(24)]
    other = opened(tmp_path, **options)
    batches = rollout_data.loader(other, num_workers)
    batches.load_state_dict(state)
    assert [valid_of(seen(batch)) for batch, _ in zip(batches, expected, strict=False)] == expected
    assert other.num_lost_trajectories == 1 and other.state_dict()["pass"] == 3


@pytest.mark.parametrize("first", [True, False])
def test_a_trajectory_with_some_deleted_blocks_counts_as_deleted(tmp_path, first):
    record(tmp_path, [9, 9, 3, 3], num_envs=2, flush_every=4)
    uninterrupted = [opened(tmp_path, num_envs=2, dataset_loops=2)]
    next_of_all(uninterrupted, 1)
    state, expected = (
        uninterrupted[0].state_dict(),
        [next_of_all(uninterrupted, 2) for _ in range(6)],
    )
    sorted(tmp_path.glob("*.h5"))[0 if first else 1].unlink()
    resumed = [opened(tmp_path, num_envs=2, dataset_loops=2)]
    resumed[0].load_state_dict(state)
    for batch in expected[:4]:
        assert valid_of(next_of_all(resumed, 2)) == valid_of(batch, {0, 1})
    assert resumed[0].num_lost_trajectories == 2


@pytest.mark.parametrize(
    "length", [[0] * NUM_ENVS, [-1] * NUM_ENVS, [1 << 60] * NUM_ENVS, [9], None, ["9"] * NUM_ENVS]
)
def test_forged_lengths_raise(tmp_path, length):
    record(tmp_path, [5] * NUM_ENVS)
    dataset = opened(tmp_path)
    dataset.get_batch(1)
    with pytest.raises(UsageError, match=r"^RolloutDataset\.load_state_dict: "):
        dataset.load_state_dict({**dataset.state_dict(), "length": length})


def test_a_state_can_be_loaded_twice_and_into_its_own_dataset(tmp_path):
    folder = folder_of(tmp_path)
    dataset = RolloutDataset(tmp_path, NUM_ENVS, device="cpu")
    dataset.get_batch(1)
    state = dataset.state_dict()
    folder.delete(playing(folder, state)[:1])
    other, actual = RolloutDataset(tmp_path, NUM_ENVS, device="cpu"), []
    for item in (other, other, dataset):
        item.load_state_dict(state)
        actual.append(seen(item.get_batch(3)))
    assert actual[0] == actual[1] == actual[2]
    assert [env[0][2] for env in actual[0]] == [0] + [1] * (NUM_ENVS - 1)
