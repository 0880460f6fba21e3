"""Lanes: each a stream over its own share of the trajectories, which is the same however many processes play them."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout_data
from rollout_data import RolloutDataset
from storage.errors import UsageError
from tests.files.recorded import frames_of, record
from tests.files.test_one_order import LiveFolder, seen

NUM_ENVS, ENDLESS = 2, {"dataset_loops": 0, "random_shuffle_traj_order": True, "seed": 3}


def opened(data_dir, lane, num_lanes, **options):
    return RolloutDataset(data_dir, NUM_ENVS, device="cpu", lane=(lane, num_lanes), **options)


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=20, max_size=60), num_lanes=st.integers(1, 4))
def test_lanes_are_disjoint_and_complete_and_none_waits_for_another(tmp_path_factory, lengths, num_lanes):
    data_dir = tmp_path_factory.mktemp("data")
    record(data_dir, lengths, num_envs=3)
    numbers = []
    for lane in range(num_lanes):
        try:
            once = list(opened(data_dir, lane, num_lanes, num_transitions_per_env=4))
        except UsageError as error:  # chance gave it too few
            assert f"in lane {lane} of {num_lanes}, got" in str(error)
            return
        frames = [(number, frame) for batch in once for _, _, number, frame in frames_of(batch)]
        numbers += (mine := sorted({number for number, _ in frames}))
        assert sorted(frames) == [(number, frame) for number in mine for frame in range(lengths[number])]
        endless = opened(data_dir, lane, num_lanes, **ENDLESS)
        for _ in range(3 * sum(lengths[number] for number in mine) // NUM_ENVS):
            assert endless.get_batch(1).valid.all()  # it goes on with its next pass at once
    assert sorted(numbers) == list(range(len(lengths)))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("refresh_s", [None, 0.0])
def test_a_lane_goes_on_from_its_state_wherever_it_is_played_and_whatever_comes_or_goes_elsewhere(
    tmp_path, seed, refresh_s
):
    chance, folder, num_lanes = random.Random(seed), LiveFolder(tmp_path), 3
    options = {**ENDLESS, "refresh_s": refresh_s}
    folder.add([chance.randint(1, 9) for _ in range(40)])
    whole = [opened(tmp_path, lane, num_lanes, **options) for lane in range(num_lanes)]
    ranks = [opened(tmp_path, lane, num_lanes, **options) for lane in range(num_lanes)]
    for step in range(30):
        num_steps = chance.randint(1, 5)
        for lane in chance.sample(range(num_lanes), num_lanes):
            assert seen(ranks[lane].get_batch(num_steps)) == seen(whole[lane].get_batch(num_steps))
        states = [json.loads(json.dumps(rank.state_dict())) for rank in ranks]
        assert [state["settings"]["lane"] for state in states] == [[lane, num_lanes] for lane in range(num_lanes)]
        if step % 3 == 0:  # they start anew, in a lane that two ranks play as well
            ranks = [opened(tmp_path, lane, num_lanes, **options) for lane in range(num_lanes)]
            for rank, state in zip(ranks, states, strict=True):
                rank.load_state_dict(state)
            halves = [RolloutDataset(tmp_path, 1, shard=(n, 2), device="cpu", lane=(0, 3), **options) for n in (0, 1)]
            for half in halves:
                half.load_state_dict(states[0])
            both = [env for half in halves for env in seen(half.get_batch(3))]
            ranks[0].load_state_dict(states[0])
            assert both == seen(ranks[0].get_batch(3))
            ranks[0].load_state_dict(states[0])
        if step % 4 == 1:
            folder.add([chance.randint(1, 6)])


def test_workers_of_a_lane_give_its_stream_and_its_state_fits_no_other(tmp_path):
    record(tmp_path, [3, 4, 5, 6, 2, 7, 1] * 4)
    options = {"num_transitions_per_env": 2, "random_shuffle_traj_order": True}
    expected = [seen(batch) for batch in opened(tmp_path, 1, 2, **options)]
    batches = rollout_data.loader(opened(tmp_path, 1, 2, **options), num_workers=2)
    assert [seen(batch) for batch in batches] == expected
    first = opened(tmp_path, 1, 2, **options)
    first.get_batch(2)
    for lane in [{"lane": (0, 2)}, {"lane": (1, 3)}, {}]:
        other = RolloutDataset(tmp_path, NUM_ENVS, device="cpu", random_shuffle_traj_order=True, **lane)
        with pytest.raises(UsageError, match=r"expected lane=.* as in this dataset, got \[1, 2\]"):
            other.load_state_dict(first.state_dict())
    with pytest.raises(UsageError, match=r"expected lane \(k, K\) with 0 <= k < K, got \(2, 2\)"):
        opened(tmp_path, 2, 2)
