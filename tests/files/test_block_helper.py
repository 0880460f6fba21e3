"""A block that a second thread helps to write: whatever becomes of that thread, no file is written amiss."""

from __future__ import annotations

import _thread
import errno
import threading

import numpy as np
import pytest

from rollout_data.format import block_file
from rollout_data.format.block_file import BlockContent, open_block, write_block
from rollout_data.format.header import FRAGMENT_DTYPE, layouts_of
from rollout_data.format.row_source import ArrayRows
from storage.core.fields import Field, Schema

SCHEMA = Schema([Field("observation", (500,), "float32"), Field("action", (2,), "float32")])
NUM_FRAGMENTS, LENGTH = 30, 50


class ReadBesides(ArrayRows):
    """Rows that call `then` when another thread than the main one reads them, or keep the main one until it did."""

    def __init__(self, rows, then=lambda: None):
        super().__init__(rows)
        self._then, self._has_helped = then, threading.Event()

    def read(self, start, stop, out):
        if threading.current_thread() is threading.main_thread():
            self._has_helped.wait()
        else:
            self._has_helped.set()
            self._then()
        return super().read(start, stop, out)


def content(rows=ArrayRows):
    fragments = np.zeros(NUM_FRAGMENTS, FRAGMENT_DTYPE)
    numbers = np.arange(NUM_FRAGMENTS)
    fragments["trajectory"], fragments["length"], fragments["row"] = numbers, LENGTH, numbers * LENGTH
    fragments["flags"], fragments["final_row"], fragments["policy_version"] = 1 | 2, -1, -1
    generator, num_rows = np.random.default_rng(0), {"data": NUM_FRAGMENTS * LENGTH, "final": 0}
    tables = {}
    for table, layout in layouts_of(SCHEMA).items():
        arrays = {
            name: generator.integers(0, 256, (num_rows[table], column.row_bytes), np.uint8)
            for name, column in layout.columns.items()
        }
        tables[table] = {name: rows(array) for name, array in arrays.items()}
    return BlockContent(SCHEMA, "w", 0, fragments, np.zeros((NUM_FRAGMENTS, 0)), tables)


@pytest.fixture(autouse=True)
def two_processors(monkeypatch):
    monkeypatch.setattr(block_file, "num_processors", lambda: 2)


def rows_of(path):
    """Give the rows of a block, checked; in the rest of the file HDF5 keeps times."""
    header = open_block(path, verify=True)
    return [header.read_rows("data", name, 0, rows).tobytes() for name, (_, rows) in header.locations["data"].items()]


def test_a_block_that_two_threads_wrote_is_that_of_one(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    alone = write_block(tmp_path / "one", content(), durable=False, in_haste=False)
    together = write_block(tmp_path / "two", content(ReadBesides), durable=False)
    assert rows_of(together) == rows_of(alone)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), MemoryError("rows")])
def test_what_stops_the_helper_stops_the_block(tmp_path, error):
    def fail():
        raise error

    with pytest.raises(type(error)) as caught:
        write_block(tmp_path, content(lambda rows: ReadBesides(rows, fail)), durable=False)
    assert caught.value is error and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), MemoryError("a thread"), RuntimeError("can't start new thread")]
)
def test_a_helper_that_cannot_be_started_is_not_waited_for(tmp_path, monkeypatch, error):
    """Ctrl-C may come just before the thread starts; where the system gives none, the block is written all the same."""

    def start(function, arguments):
        raise error

    monkeypatch.setattr(_thread, "start_new_thread", start)
    if isinstance(error, RuntimeError):
        open_block(write_block(tmp_path, content(), durable=False), verify=True)
        return
    with pytest.raises(type(error)):
        write_block(tmp_path, content(), durable=False)
    assert not list(tmp_path.iterdir())


def test_a_helper_that_begins_after_the_end_does_nothing(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(_thread, "start_new_thread", lambda function, arguments: started.append((function, arguments)))
    path = write_block(tmp_path, content(), durable=False)
    before = path.read_bytes()
    ((function, arguments),) = started
    function(*arguments)
    open_block(path, verify=True)
    assert path.read_bytes() == before


class InterruptedLock:
    """A lock whose first taking by the main thread ends in Ctrl-C; `is_taken_again` is set at its second."""

    def __init__(self):
        self._lock, self._num_taken = threading.Lock(), 0
        self.is_taken_again = threading.Event()

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            self._num_taken += 1
            if self._num_taken == 1:
                raise KeyboardInterrupt
            self.is_taken_again.set()
        self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()


def test_ctrl_c_while_the_helper_is_at_work_waits_for_it():
    """Otherwise it would write to a descriptor that may be another file's by then."""
    has_begun, has_ended, lock = threading.Event(), threading.Event(), InterruptedLock()

    def work():
        has_begun.set()
        lock.is_taken_again.wait()
        has_ended.set()

    try:
        with pytest.raises(KeyboardInterrupt), block_file._Helper(work, lambda: True) as helper:
            helper._at_work = lock
            helper.ask()
            has_begun.wait()
        assert has_ended.is_set()
    finally:
        lock.is_taken_again.set()
