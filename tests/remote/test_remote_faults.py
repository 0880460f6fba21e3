"""Requests that fail, hang or return too few bytes, and files that contradict themselves: one clear
error each.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

pytest.importorskip("fsspec")

from benchmarks.lagging import LaggingFileSystem
from rollout_data import RemoteOptions, RolloutDataset, RolloutWriter, WindowDataset, WindowLoader
from rollout_data.sources.rows.remote_blocks import Stock
from rollout_data.sources.rows.row_source import Rows
from storage.errors import DataFileError, UsageError
from tests.files.recorded import drain, record

from .places import SMALL, check_epoch, coded, far_windows, in_memory, lagging, uneven

QUICK = {"timeout_s": 0.5, "num_retries": 2}
#: Set when a test ends.
is_over = threading.Event()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return uneven(tmp_path_factory.mktemp("remote") / "walk")


@pytest.fixture(autouse=True)
def requests_that_hang_end_with_the_test():
    is_over.clear()
    yield
    is_over.set()


def fail_by(function):
    LaggingFileSystem.fails = staticmethod(function)


class Sometimes:
    """Lets every third request for bytes fail, or hang."""

    def __init__(self, act):
        self.act, self.num, self.lock = act, 0, threading.Lock()

    def __call__(self, path, start, stop):
        with self.lock:
            self.num += 1
            number = self.num
        if number % 3 == 0:
            self.act()


def refuse():
    raise ConnectionError("the line is down")


def hang():
    """Wait longer than the time-out."""
    is_over.wait()


def test_failed_requests_are_retried(folder):
    url = lagging(folder)
    fail_by(Sometimes(refuse))
    check_epoch(WindowDataset(folder, 4), far_windows(url, remote={"num_retries": 20}))


def test_hanging_requests_time_out_and_are_retried(folder):
    far = far_windows(
        lagging(folder), remote={"timeout_s": 0.5, "num_retries": 20, "num_requests": 8}
    )
    fail_by(Sometimes(hang))
    batches = iter(WindowLoader(far, 64))
    for _ in range(3):
        next(batches)
    fail_by(lambda *request: None)


@pytest.mark.each_value
@pytest.mark.parametrize("act", [refuse, hang], ids=["fails", "hangs"])
@pytest.mark.parametrize("read", ["open", "windows", "playback"])
def test_an_unanswered_request_raises_within_the_time_of_all_attempts(folder, read, act):
    url = lagging(folder)
    remote = {**SMALL, **QUICK}
    far = far_windows(url, remote=QUICK)
    before = len(LaggingFileSystem.requests)
    fail_by(lambda path, start, stop: act())
    with pytest.raises(DataFileError, match="3 attempts"):
        if read == "open":
            far_windows(url, remote=QUICK)
        elif read == "windows":
            next(iter(WindowLoader(far, 16)))
        else:
            RolloutDataset(url, 2, device="cpu", remote=RemoteOptions(**remote)).get_batch(3)
    assert not is_over.is_set()  # those that hang were given up
    assert len(LaggingFileSystem.requests) > before
    fail_by(lambda *request: None)
    next(iter(WindowLoader(far, 16)))  # what failed can be asked for again


def test_a_block_that_vanishes_is_named_by_windows_and_played_around(folder, tmp_path):
    for place in ("gone", "left"):
        record(tmp_path / place, [40] * 12, num_envs=2, flush_every=45)
    far = far_windows(lagging(tmp_path / "gone"))
    min((tmp_path / "gone").glob("*.h5")).unlink()
    with pytest.raises(DataFileError, match=r"Trajector.* cannot be read.*lagging://gone/rollout_"):
        for _ in WindowLoader(far, 16):
            pass
    played = RolloutDataset(lagging(tmp_path / "left"), 2, device="cpu")
    played.get_batch(3)
    max((tmp_path / "left").glob("*.h5")).unlink()
    played.source.snapshot()
    with pytest.warns(UserWarning, match=r"Trajector.* cannot be read"):
        while True:
            try:
                played.get_batch(5)
            except StopIteration:
                break
    assert played.num_lost_trajectories > 0


def test_a_block_of_coded_components_that_vanishes_before_its_chunks_are_known_is_played_around(
    tmp_path,
):
    for _ in range(3):
        coded(tmp_path / "images")
    played = RolloutDataset(lagging(tmp_path / "images"), 1, device="cpu")
    played.get_batch(3)
    max((tmp_path / "images").glob("*.h5"), key=lambda path: path.stat().st_mtime_ns).unlink()
    with pytest.warns(UserWarning, match=r"Trajector.* cannot be read"):
        num_valid = 3 + sum(int(batch.valid.sum()) for batch in drain(played, 5))
    assert 0 < num_valid < 3 * 4 * 90 and played.num_lost_trajectories > 0


def test_rows_dropped_by_another_thread_are_requested_again(folder):
    far = far_windows(lagging(folder), remote={"num_requests": 1})
    frames, trajectories = far.frames
    zero = np.zeros(1, np.int64)
    rows = Rows(trajectories[:1], zero, zero + 1, zero)
    runs = frames.locate(rows)
    name, column = next(iter(frames.layouts["data"].columns.items()))
    expected, actual = (torch.zeros(1, column.row_bytes // 4, dtype=torch.int32) for _ in range(2))
    frames.read_rows(rows, 1, {name: expected})
    is_asked, may_answer = threading.Event(), threading.Event()
    fail_by(lambda *request: (is_asked.set(), may_answer.wait(60)))
    stock = Stock(frames, ("data", name), runs)
    reader = threading.Thread(
        target=lambda: actual.fill_(-1) if len(stock.copy(runs, 1, actual).row) else None
    )
    is_asked.wait(60)
    reader.start()
    stock.drop()
    reader.join(60)
    may_answer.set()
    fail_by(lambda *request: None)
    assert bool((actual == -1).all()) or torch.equal(actual, expected)


def test_a_file_that_is_shorter_than_it_was_listed_is_damage(folder, tmp_path):
    record(tmp_path / "short", [400], num_envs=1)
    far = far_windows(lagging(tmp_path / "short"))
    path = next((tmp_path / "short").glob("*.h5"))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 3])
    with pytest.raises(DataFileError, match=r"is truncated: it ends after \d+ of the \d+ bytes"):
        for _ in WindowLoader(far, 16):
            pass


def damaged(data: bytes, kind: str) -> bytes:
    if kind == "cut":
        return data[:-100]
    if kind == "noise":
        return np.random.default_rng(0).bytes(len(data))
    at = data.index(b"rollout-data") if kind == "format" else data.index(b"GCOL") + 24
    return data[:at] + b"\xff" * 8 + data[at + 8 :]


@pytest.mark.parametrize("kind", ["cut", "noise", "format", "heap"])
def test_a_damaged_block_is_refused_as_the_local_one_is(tmp_path, kind):
    folder = uneven(tmp_path / "walk", 20)
    path = max(folder.glob("*.h5"))
    path.write_bytes(damaged(path.read_bytes(), kind))
    with pytest.warns(UserWarning):
        near = WindowDataset(folder, 4)
    with pytest.warns(UserWarning):
        far = far_windows(in_memory(folder, f"damaged-{kind}"))
    assert len(far) == len(near)
    assert {type(problem) for problem in far.problems} == {
        type(problem) for problem in near.problems
    }
    assert any(f"memory://damaged-{kind}/{path.name}" in str(problem) for problem in far.problems)


@pytest.mark.parametrize("num_shown", [0, 1000, 40_000])
def test_a_block_whose_size_is_shown_late_is_a_problem_until_all_of_it_is_there(
    tmp_path, num_shown
):
    folder = uneven(tmp_path / "walk", 20)
    path = max(folder.glob("*.h5"))
    data, url = path.read_bytes(), lagging(folder)
    assert len(data) > num_shown
    path.write_bytes(data[:num_shown])
    far = RolloutDataset(url, 2, 0, device="cpu", refresh_s=0.0)
    with pytest.warns(UserWarning, match=path.name):
        far.get_batch(1)
    path.write_bytes(data)
    far.source.refresh()
    assert len(far.source.snapshot().index) == WindowDataset(folder, 1).num_trajectories


def test_verify_compares_every_checksum(tmp_path):
    folder = uneven(tmp_path / "walk", 20)
    path = max(folder.glob("*.h5"))
    data = bytearray(path.read_bytes())
    data[(32 << 10) + 50] ^= 1  # the first rows lie there
    path.write_bytes(data)
    url = in_memory(folder, "flipped")
    with pytest.warns(UserWarning, match="expected checksum"):
        far = far_windows(url, verify_on_open=True)
    assert len(far) < len(far_windows(url))


@pytest.mark.parametrize("num_envs", [1, 64, 1000, 3000])
def test_two_requests_open_a_block_and_large_tables_take_a_few_more(tmp_path, num_envs):
    with RolloutWriter(tmp_path / "walk", num_envs, durable=False) as writer:
        for step in range(3):
            row = np.ones((num_envs, 30), np.float32)
            writer.add(
                observation=row,
                action=row[:, :2],
                reward=row[:, 0],
                done=np.full(num_envs, step == 2),
            )
    url = lagging(tmp_path / "walk")
    assert len(WindowDataset(url, 2)) == len(WindowDataset(tmp_path / "walk", 2))
    opened = [request for request in LaggingFileSystem.requests if request[0].endswith(".h5")]
    num_blocks = len({path for path, _, _ in opened})
    assert len(opened) <= (2 if num_envs <= 1000 else 6) * num_blocks


def test_an_empty_url_raises_with_the_url():
    with pytest.raises(UsageError, match="'memory://nowhere' does not exist"):
        WindowDataset("memory://nowhere")
