"""Streams with `refresh_s`: trajectories that are published during a pass come next, and none comes
twice in a pass.

With `refresh_s=0` a stream scans before every batch, so a model needs no clock.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout_data
from rollout_data import RolloutDataset
from storage.errors import UsageError, WaitTimeoutError
from tests.faults import instead_of
from tests.files.recorded import frames_of, record
from tests.files.test_retention import num_bytes, still_mapped
from tests.watch import watching


def opened(data_dir, num_envs, refresh_s=0.0, **options):
    return RolloutDataset(data_dir, num_envs, device="cpu", refresh_s=refresh_s, **options)


class Model:
    """One pass over a growing list, env by env and frame by frame."""

    def __init__(self, num_envs, lengths):
        self.lengths, self.envs = [], [None] * num_envs
        self.rest, self.fresh = [], []
        self.add(lengths)
        self.rest, self.fresh = self.fresh, []
        self.new = []
        self._deal()

    def add(self, lengths):
        self.fresh += range(len(self.lengths), len(self.lengths) + len(lengths))
        self.lengths += lengths

    def _deal(self):
        for env, playing in enumerate(self.envs):
            if playing is None and (self.fresh or self.rest):
                self.envs[env] = [(self.fresh or self.rest).pop(0), 0]

    def batch(self, num_steps):
        """Return the frames of each step as (step, env, trajectory, frame)."""
        if not self.fresh and self.new:
            self.add(self.new)
            self.new = []
        result = []
        for step in range(num_steps):
            self._deal()
            for env, playing in enumerate(self.envs):
                if playing is not None:
                    result.append((step, env, *playing))
                    playing[1] += 1
                    if playing[1] == self.lengths[playing[0]]:
                        self.envs[env] = None
            self._deal()
        return result


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=3, max_size=9),
    added=st.lists(st.lists(st.integers(1, 6), max_size=3), max_size=8),
    num_steps=st.integers(1, 4),
    is_resumed=st.booleans(),
)
def test_new_trajectories_are_played_before_the_rest_of_the_pass(
    tmp_path_factory, lengths, added, num_steps, is_resumed
):
    data_dir = tmp_path_factory.mktemp("data")
    record(data_dir, lengths)
    dataset, model, count = opened(data_dir, 3), Model(3, lengths), len(lengths)
    for new in [[], *added, *[[]] * 99]:
        if new:
            record(data_dir, new, first_number=count)
            model.new, count = model.new + new, count + len(new)
        expected = model.batch(num_steps)
        if not expected:
            break
        assert sorted(frames_of(dataset.get_batch(num_steps))) == sorted(expected)
        if is_resumed:
            state = json.loads(json.dumps(dataset.state_dict()))
            dataset = opened(data_dir, 3)
            dataset.load_state_dict(state)
            assert dataset.state_dict() == state
    with pytest.raises(StopIteration):
        dataset.get_batch(num_steps)


@pytest.mark.each_value
@pytest.mark.parametrize("reading", ["direct", "prefetch", "loader", "ram"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_frame_is_played_once_in_a_pass_beside_writers(tmp_path, reading, shuffle):
    record(tmp_path, [3, 4, 5, 2] * 4)
    options = {"random_shuffle_traj_order": shuffle, "num_transitions_per_env": 2}
    dataset = opened(tmp_path, 4, cache="ram" if reading == "ram" else "none", **options)
    batches = {
        "prefetch": lambda: dataset.prefetch(3),
        "loader": lambda: rollout_data.loader(dataset, num_workers=2),
    }
    actual, first_seen, count = [], {}, 16
    for number, batch in enumerate(batches.get(reading, lambda: dataset)()):
        actual += [(trajectory, frame) for _, _, trajectory, frame in frames_of(batch)]
        for trajectory, _ in actual:
            first_seen.setdefault(trajectory, number)
        if number < 6:
            record(tmp_path, [1 + number % 3, 3], first_number=count)
            count += 2
    lengths = [3, 4, 5, 2] * 4 + [length for number in range(6) for length in (1 + number % 3, 3)]
    assert sorted(actual) == [
        (item, frame) for item, length in enumerate(lengths) for frame in range(length)
    ]
    before_the_rest = sum(
        first_seen[new] < max(first_seen[old] for old in range(16)) for new in range(16, count)
    )
    assert before_the_rest >= 4


def test_folders_are_scanned_within_a_pass_after_refresh_s(tmp_path):
    record(tmp_path, [4] * 4000, num_envs=100)
    dataset = opened(tmp_path, 4, refresh_s=200.0, num_transitions_per_env=4)
    start_s = time.monotonic()
    with clock_at(start_s):
        batches = iter(dataset)
        next(batches)
        record(tmp_path, [4], first_number=9000)
        assert not any((next(batches).observation[..., 0] == 9000).any() for _ in range(20))
    # half of the time, because scans of other ranks may come that late
    with clock_at(start_s + 100):
        assert any((next(batches).observation[..., 0] == 9000).any() for _ in range(2))
    assert dataset.state_dict()["pass"] == 0


def test_keep_latest_applies_to_new_trajectories_within_the_pass(tmp_path):
    record(tmp_path, [2] * 6)
    dataset = opened(tmp_path, 1, keep_latest_n_trajs=4)
    actual = [int(dataset.get_batch(2).observation[0, 0, 0])]
    record(tmp_path, [2, 2, 2], first_number=6)
    actual += [int(batch.observation[0, 0, 0]) for batch in iter_rest(dataset, 2)]
    # 3 was assigned already; 4 is not among the newest four any more
    assert actual == [2, 3, 6, 7, 8, 5]


def iter_rest(dataset, num_steps):
    while True:
        try:
            yield dataset.get_batch(num_steps)
        except StopIteration:
            return


def test_waiting_for_the_first_trajectory_has_a_time_limit(tmp_path):
    with pytest.raises(
        WaitTimeoutError, match=r"0 complete trajectories, expected 1\. The wait ended after 0.1 s"
    ):
        opened(tmp_path, 1, wait_timeout_s=0.1).get_batch(1)


def test_trajectories_in_progress_are_waited_for(tmp_path):
    with rollout_data.RolloutWriter(tmp_path, 1, durable=False) as writer:
        for step in range(9):
            writer.add(observation=[[float(step)]], action=[[0.0]], reward=[0.0], done=[step == 1])
            if step == 5:
                writer.flush()
                dataset = opened(tmp_path, 1)
                actual = dataset.get_batch(2).observation.flatten().tolist()
    actual += [
        frame for batch in iter_rest(dataset, 1) for frame in batch.observation.flatten().tolist()
    ]
    assert actual == [float(step) for step in range(9)]


def test_a_state_requires_the_same_use_of_refresh_s(tmp_path):
    record(tmp_path, [3] * 4)
    dataset, other = opened(tmp_path, 2), opened(tmp_path, 2, refresh_s=None)
    dataset.get_batch(1), other.get_batch(1)
    with pytest.raises(
        UsageError, match=r"saved with refresh_s, and this dataset has refresh_s=None"
    ):
        opened(tmp_path, 2, refresh_s=None).load_state_dict(dataset.state_dict())
    with pytest.raises(
        UsageError, match=r"saved without refresh_s, and this dataset has refresh_s=1.0"
    ):
        opened(tmp_path, 2, refresh_s=1.0).load_state_dict(other.state_dict())
    opened(tmp_path, 2, refresh_s=5.0).load_state_dict(dataset.state_dict())


@pytest.mark.parametrize("wrong", [-1, "x", float("nan"), True])
def test_an_invalid_refresh_s_raises(tmp_path, wrong):
    with pytest.raises(UsageError, match="refresh_s must be"):
        opened(tmp_path, 1, refresh_s=wrong)


def test_workers_of_a_plain_loader_raise_with_refresh_s(tmp_path):
    record(tmp_path, [3, 3])
    batches = torch.utils.data.DataLoader(opened(tmp_path, 2), batch_size=None, num_workers=1)
    with pytest.raises(
        UsageError, match=r"workers of a plain DataLoader\. Read .* with rollout_data\.loader\("
    ):
        next(iter(batches))


# Costs of scans, and file systems with late or wrong answers


@contextmanager
def clock_at(seconds):
    """Stop the monotonic clock at a time."""
    with mock.patch.object(time, "monotonic", lambda: seconds):
        yield


@contextmanager
def clock_ahead(seconds):
    """Set the monotonic clock `seconds` ahead."""
    real = time.monotonic
    with mock.patch.object(time, "monotonic", lambda: real() + seconds):
        yield


@contextmanager
def counted(*names):
    """Count calls of `os`."""
    counts = dict.fromkeys(names, 0)

    def count(name, call, *arguments, **options):
        counts[name] += 1
        return call(*arguments, **options)

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(instead_of(name, partial(count, name)))
        yield counts


class Listing:
    """Result of `os.scandir`: a listing of a folder, perhaps of an earlier time."""

    def __init__(self, entries):
        self.entries = entries

    def __enter__(self):
        return iter(self.entries)

    def __exit__(self, *exception):
        return None


@contextmanager
def shown_late(folder):
    """Return the present listing of a folder for all later scans, as a network file system may do
    for a while.
    """
    with os.scandir(folder) as entries:
        old = list(entries)
    with instead_of(
        "scandir", lambda call, path=".": Listing(old) if Path(path) == folder else call(path)
    ):
        yield


def test_a_scan_of_an_unchanged_folder_is_one_system_call(tmp_path):
    for number in range(30):
        record(tmp_path, [4], first_number=number)
    dataset = opened(tmp_path, 2)
    dataset.get_batch(1)
    start_s = time.monotonic()
    with clock_at(start_s):
        dataset.get_batch(1)
    with clock_at(start_s + 5), counted("stat", "scandir", "listdir") as counts:
        dataset.get_batch(1)  # the last full scan
        assert counts["scandir"] and counts["stat"] >= 30
        counts.update(stat=0, scandir=0)
        for _ in range(10):
            dataset.get_batch(1)
    assert counts["scandir"] == counts["listdir"] == 0
    assert counts["stat"] <= 11  # one for a scan, and one in which deleted files are dropped
    record(tmp_path, [4], first_number=30)
    with clock_at(start_s + 5), counted("stat", "scandir") as counts:
        while not (dataset.get_batch(1).observation[..., 0] == 30).any():
            pass
    assert counts["stat"] < 30  # known files are not requested


def test_a_block_that_does_not_change_the_folder_time_is_found_by_the_next_full_scan(tmp_path):
    for number in range(3):
        record(tmp_path, [9] * 4, first_number=4 * number)
    os.utime(tmp_path, ns=(10**18, 10**18))
    dataset = opened(tmp_path, 2)
    dataset.get_batch(1)
    start_s = time.monotonic()
    with clock_at(start_s + 5):
        dataset.get_batch(1)
        record(tmp_path, [9], first_number=50)
        # As with coarse times, or after the clock was set back.
        os.utime(tmp_path, ns=(10**18, 10**18))
    with clock_at(start_s + 5.5):
        assert not (dataset.get_batch(9).observation[..., 0] == 50).any()
    with clock_at(start_s + 7):
        assert (dataset.get_batch(18).observation[..., 0] == 50).any()


def test_a_late_listing_delays_new_blocks_and_keeps_known_blocks(tmp_path):
    record(tmp_path, [3] * 6)
    with shown_late(tmp_path):
        record(tmp_path, [3, 3], first_number=6)
        dataset = opened(tmp_path, 2, num_transitions_per_env=3)
        actual = frames_of(dataset.get_batch(3))
    with clock_ahead(5):
        actual += frames_of(dataset.get_batch(3))
    old = set(tmp_path.glob("*.h5"))
    with shown_late(tmp_path), clock_ahead(10):
        record(tmp_path, [3, 3], first_number=8)
        actual += frames_of(dataset.get_batch(3))
    assert len(set(tmp_path.glob("*.h5")) - old) == 1
    with clock_ahead(15):
        for batch in iter_rest(dataset, 3):
            actual += frames_of(batch)
    assert sorted(item[2:] for item in actual) == [
        (number, frame) for number in range(10) for frame in range(3)
    ]
    assert (
        not dataset.problems
        and dataset.num_lost_trajectories == dataset.source.num_vanished_blocks == 0
    )


def test_blocks_missing_from_a_late_listing_do_not_change(tmp_path):
    record(tmp_path, [3] * 4)
    with os.scandir(tmp_path) as entries:
        early = list(entries)
    record(tmp_path, [3] * 4, first_number=4)
    dataset = opened(tmp_path, 2, num_transitions_per_env=3)
    actual = frames_of(dataset.get_batch(3))
    # From before the second block.
    with (
        instead_of("scandir", lambda call, path: Listing(early)),
        clock_ahead(5),
    ):
        for batch in iter_rest(dataset, 3):
            actual += frames_of(batch)
    assert sorted(item[2:] for item in actual) == [
        (number, frame) for number in range(8) for frame in range(3)
    ]
    assert not dataset.problems and dataset.source.num_vanished_blocks == 0


@pytest.mark.parametrize("num_shown", [0, 1000, 20_000])
def test_a_block_that_is_listed_before_its_bytes_is_read_later(tmp_path, num_shown):
    record(tmp_path, [3] * 4)
    dataset = opened(tmp_path, 2, dataset_loops=2, num_transitions_per_env=3)
    actual = frames_of(dataset.get_batch(3))
    before = set(tmp_path.glob("*.h5"))
    record(tmp_path, [3] * 2, first_number=4)
    (path,) = set(tmp_path.glob("*.h5")) - before
    data = path.read_bytes()
    assert len(data) > num_shown
    os.truncate(path, num_shown)  # as shown by a file system that knows the name before the size
    with clock_ahead(5), pytest.warns(UserWarning, match=path.name):
        actual += frames_of(dataset.get_batch(3))
    path.write_bytes(data)
    with clock_ahead(10):
        for batch in iter_rest(dataset, 3):
            actual += frames_of(batch)
    frames = [item[2:] for item in actual]
    assert {frame for frame in frames if frames.count(frame) == 2} >= {
        (number, 2) for number in range(4)
    }
    assert {(number, frame) for number in (4, 5) for frame in range(3)} <= set(frames)
    assert dataset.num_lost_trajectories == 0


def test_blocks_of_a_collector_whose_clock_jumps_back_are_read(tmp_path):
    record(tmp_path, [3] * 6, writer_name="a")
    dataset = opened(tmp_path, 2, num_transitions_per_env=3)
    actual = [frames_of(dataset.get_batch(3))]
    an_hour_ago = time.time_ns() - 3600 * 10**9
    with mock.patch.object(time, "time_ns", lambda: an_hour_ago):
        record(tmp_path, [3, 3], first_number=6, writer_name="b")
        # The times of one writer never decrease.
        record(tmp_path, [3, 3], first_number=8, writer_name="a")
    actual += [frames_of(batch) for batch in iter_rest(dataset, 3)]
    assert {number for *_, number, _ in actual[2]} == {6, 7} and {
        number for *_, number, _ in actual[3]
    } == {8, 9}
    frames = sorted((number, frame) for batch in actual for *_, number, frame in batch)
    assert frames == [(number, frame) for number in range(10) for frame in range(3)]


def test_a_block_that_vanishes_after_the_scan_loses_only_its_trajectories(
    tmp_path,
):
    for number in range(4):
        record(tmp_path, [3], first_number=number)
    dataset = opened(tmp_path, 2, num_transitions_per_env=3)
    actual = frames_of(dataset.get_batch(3))
    before = set(tmp_path.glob("*.h5"))
    record(tmp_path, [3], first_number=4)
    (new,) = set(tmp_path.glob("*.h5")) - before
    record(tmp_path, [3], first_number=5)

    def vanish(event, arguments):
        if event == "open" and str(arguments[0]) == str(new):
            new.unlink(missing_ok=True)

    with watching(vanish):
        for batch in iter_rest(dataset, 3):
            actual += frames_of(batch)
    assert not new.exists()
    assert sorted({number for *_, number, _ in actual}) == [0, 1, 2, 3, 5]


def test_a_paused_learner_keeps_only_the_files_of_its_last_scan(tmp_path):
    with rollout_data.RolloutWriter(
        tmp_path, 2, durable=False, block_bytes=20_000, retention={"bytes": 100_000}
    ) as writer:
        dataset = opened(tmp_path, 2, dataset_loops=0)
        for part in range(60):
            for step in range(20):
                row = torch.full((2, 64), float(part))
                writer.add(observation=row, action=row, reward=row[:, 0], done=[step == 19] * 2)
            writer.flush()
            if part == 15:
                dataset.get_batch(1)
        assert still_mapped(tmp_path) <= 300_000  # 60 parts take 2.7 MB
        assert num_bytes(tmp_path) <= 300_000
        with clock_ahead(5):
            assert (dataset.get_batch(20).observation == 15).any()
            assert any((dataset.get_batch(20).observation == 59).any() for _ in range(10))
        with clock_ahead(10):
            dataset.get_batch(20)
        assert still_mapped(tmp_path) == 0


def test_thousands_of_short_passes_are_played_in_one_call_each(tmp_path):
    record(tmp_path, [1], writer_name="a")
    dataset = opened(tmp_path, 1, refresh_s=5.0, dataset_loops=0)
    assert sum(int(dataset.get_batch(1).valid.sum()) for _ in range(1500)) == 1500
