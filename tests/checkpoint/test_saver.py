"""Checkpoints have the state at the call, are complete and in order, and no failure is lost."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from storage.checkpoints.checkpoint_files import load_checkpoint
from storage.checkpoints.checkpoint_saver import (
    AsyncCheckpointSaver,
    CheckpointError,
    QueueFullError,
)
from storage.errors import BackgroundError, ClosedError, UsageError, WaitTimeoutError
from storage.live.monitors import PerformanceMonitor
from tests.watch import await_wait_in

ROOT = Path(__file__).parents[2]


class Gate:
    """Blocks the pickling of the checkpoints that contain it, and counts them."""

    def __init__(self) -> None:
        self.open, self.entered = threading.Event(), threading.Semaphore(0)
        self.fails = False

    def __deepcopy__(self, _: Any) -> Gate:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        self.entered.release()
        assert self.open.wait(20)
        if self.fails:
            raise KeyError("mine")
        return OrderedDict, ()

    def state_of(self, value: int) -> dict[str, Any]:
        return {**state_of(value), "gate": self}


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open.set()


def state_of(value: int, size: int = 1000) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((size,), float(value)), "b": [torch.full((3,), value)]},
        "step": value,
    }


def value_of(state: dict[str, Any]) -> int:
    values = {state["step"], *state["model"]["w"].tolist(), *state["model"]["b"][0].tolist()}
    assert len(values) == 1, "torn"
    return state["step"]


@pytest.mark.parametrize("compress", [False, True])
def test_changes_during_a_save_are_not_in_the_checkpoint(
    tmp_path: Path, gate: Gate, compress: bool
) -> None:
    """Trap N1."""
    with AsyncCheckpointSaver() as saver:
        state = gate.state_of(1)
        future = saver.save_async(state, tmp_path / "a.pt", compress=compress, weights_only=False)
        state["model"]["w"].fill_(2)
        state["model"]["b"][0].fill_(2)
        state["model"]["b"].append("late")
        state["step"] = 2
        assert not future.done()
        gate.open.set()
        assert future.result(20) == tmp_path / ("a.pt.lz4" if compress else "a.pt")
        actual = load_checkpoint(tmp_path / "a.pt")
    assert value_of(actual) == 1 and len(actual["model"]["b"]) == 1


def test_no_checkpoint_is_torn_while_training_continues(tmp_path: Path) -> None:
    weights = {f"layer {i}": {"w": torch.zeros(20_000)} for i in range(5)}
    with AsyncCheckpointSaver(max_queue_size=2) as saver:
        futures = []
        for step in range(1, 40):
            for layer in weights.values():
                layer["w"].add_(1)
            futures.append(
                saver.save_async(
                    weights, tmp_path / f"{step}.pt", compress=step % 2 == 0, meta={"step": step}
                )
            )
        for step, future in enumerate(futures, 1):
            actual = load_checkpoint(future.result(20))
            assert all((layer["w"] == step).all() for layer in actual.values())


def test_checkpoints_of_one_path_are_written_in_order(tmp_path: Path, gate: Gate) -> None:
    with AsyncCheckpointSaver(max_queue_size=10) as saver:
        for value in range(8):
            saver.save_async(
                gate.state_of(value), tmp_path / "a.pt", compress=value % 3 == 0, weights_only=False
            )
        gate.open.set()
        saver.wait()
        assert value_of(load_checkpoint(tmp_path / "a.pt")) == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "a.pt.lz4"]


def test_shutdown_writes_everything_accepted_and_is_idempotent(tmp_path: Path, gate: Gate) -> None:
    """Trap N2."""
    saver = AsyncCheckpointSaver(max_queue_size=3)
    futures = [
        saver.save_async(gate.state_of(value), tmp_path / f"{value}.pt", weights_only=False)
        for value in range(4)
    ]
    saver.shutdown(wait=False)
    assert saver.num_pending == 4 and not any(future.done() for future in futures)
    with pytest.raises(ClosedError):
        saver.save_async(gate.state_of(9), tmp_path / "9.pt", weights_only=False)
    gate.open.set()
    saver.shutdown()
    saver.shutdown()
    assert [value_of(load_checkpoint(future.result(0))) for future in futures] == [0, 1, 2, 3]
    assert saver.num_pending == 0


@pytest.mark.parametrize("compress", [False, True])
def test_a_program_that_ends_without_shutdown_writes_its_checkpoints(
    tmp_path: Path, compress: bool
) -> None:
    """Traps N2 and N3: no daemon thread ends in the middle of a file."""
    script = (
        "import torch\nfrom storage.checkpoints.checkpoint_saver import AsyncCheckpointSaver\n"
        "saver = AsyncCheckpointSaver(max_queue_size=5)\n"
        "for i in range(5):\n"
        "    state = {'w': torch.full((3_000_000,), float(i))}\n"
        f"    saver.save_async(state, {str(tmp_path)!r} + f'/{{i}}.pt', {compress})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0 and done.stderr == ""
    for i in range(5):
        assert (load_checkpoint(tmp_path / f"{i}.pt")["w"] == i).all()


def test_a_failure_is_in_its_future_and_raised_once_by_the_next_call(
    tmp_path: Path, gate: Gate
) -> None:
    """Trap N3."""
    (tmp_path / "folder.pt").mkdir()
    saver = AsyncCheckpointSaver()
    saver.save_async(gate.state_of(0), tmp_path / "good.pt", weights_only=False)
    bad = saver.save_async(state_of(1), tmp_path / "folder.pt", weights_only=False)
    good = saver.save_async(gate.state_of(2), tmp_path / "good.pt", weights_only=False)
    gate.open.set()
    text = r"^Checkpoint '.*folder.pt' was not saved: '.*folder.pt' is a folder, not a file"
    assert isinstance(bad.exception(20), CheckpointError)
    assert value_of(load_checkpoint(good.result(20))) == 2
    with pytest.raises(CheckpointError, match=text) as caught:
        saver.wait()
    assert caught.value is bad.exception() and isinstance(caught.value, (OSError, BackgroundError))
    saver.wait()
    saver.save_async(gate.state_of(3), tmp_path / "good.pt", weights_only=False).result(20)
    saver.save_async({"unpicklable": lambda: 0}, tmp_path / "bad.pt", weights_only=False).exception(
        20
    )
    with pytest.raises(CheckpointError, match=r"bad\.pt"):
        saver.save_async(gate.state_of(4), tmp_path / "good.pt", weights_only=False)
    assert value_of(load_checkpoint(tmp_path / "good.pt")) == 3
    saver.save_async({"unpicklable": lambda: 0}, tmp_path / "bad.pt", weights_only=False).exception(
        20
    )
    with pytest.raises(CheckpointError):
        saver.shutdown()
    saver.shutdown()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.pt", "good.pt"]


@pytest.mark.parametrize("compress", [False, True])
def test_a_full_disk_is_one_clear_error_and_keeps_the_old_checkpoint(
    tmp_path: Path, compress: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = AsyncCheckpointSaver()
    path = saver.save_async(state_of(1), tmp_path / "a.pt", compress=compress).result(20)
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = __import__("signal").signal(
        __import__("signal").SIGXFSZ, __import__("signal").SIG_IGN
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        big = {"w": torch.randn(10_000_000)}
        failure = saver.save_async(big, tmp_path / "a.pt", compress=compress).exception(30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        __import__("signal").signal(__import__("signal").SIGXFSZ, handler)
    assert isinstance(failure, CheckpointError) and "File too large" in str(failure)
    assert failure.errno == errno.EFBIG
    with pytest.raises(CheckpointError) as raised:
        saver.shutdown()
    assert raised.value.errno == errno.EFBIG
    assert value_of(load_checkpoint(tmp_path / "a.pt")) == 1
    assert [path.name for path in tmp_path.iterdir()] == [path.name]


def test_on_full_raise_raises_if_the_queue_is_full(tmp_path: Path, gate: Gate) -> None:
    with AsyncCheckpointSaver(max_queue_size=2, on_full="raise") as saver:
        for value in range(3):
            saver.save_async(gate.state_of(value), tmp_path / f"{value}.pt", weights_only=False)
        with pytest.raises(
            QueueFullError,
            match=r"3.pt' is not saved: 2 checkpoints are already waiting in the queue",
        ):
            saver.save_async(gate.state_of(3), tmp_path / "3.pt", weights_only=False)
        gate.open.set()
        saver.wait()
        assert len(list(tmp_path.iterdir())) == 3


def test_on_full_drop_oldest_drops_the_oldest_pending_save(tmp_path: Path, gate: Gate) -> None:
    with AsyncCheckpointSaver(max_queue_size=2, on_full="drop_oldest") as saver:
        futures = [saver.save_async(gate.state_of(0), tmp_path / "0.pt", weights_only=False)]
        assert gate.entered.acquire(timeout=20)
        futures += [
            saver.save_async(gate.state_of(value), tmp_path / f"{value}.pt", weights_only=False)
            for value in range(1, 6)
        ]
        assert saver.num_dropped == 3
        gate.open.set()
        saver.wait(20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.pt", "4.pt", "5.pt"]
    for future in futures[1:4]:
        with pytest.raises(CancelledError):
            future.result(0)


def test_on_full_block_waits_for_a_free_place(tmp_path: Path, gate: Gate) -> None:
    with AsyncCheckpointSaver(max_queue_size=1, on_full="block") as saver:
        saver.save_async(gate.state_of(0), tmp_path / "0.pt", weights_only=False)
        assert gate.entered.acquire(timeout=20)
        saver.save_async(gate.state_of(1), tmp_path / "1.pt", weights_only=False)
        thread = threading.Thread(
            target=saver.save_async, args=(gate.state_of(2), tmp_path / "2.pt")
        )
        thread.start()
        thread.join(0.05)
        assert thread.is_alive() and saver.num_pending == 2
        gate.open.set()
        thread.join(20)
        saver.wait(20)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_blocked_save_raises_a_failure_of_the_worker(tmp_path: Path, gate: Gate) -> None:
    """Trap N3: a call does not hang if the worker has failed and the queue is full."""
    gate.fails = True
    with AsyncCheckpointSaver(max_queue_size=1) as saver:
        saver.save_async(gate.state_of(0), tmp_path / "0.pt", weights_only=False)
        saver.save_async(state_of(1), tmp_path / "1.pt", weights_only=False)
        caught: list[BaseException] = []

        def save() -> None:
            try:
                saver.save_async(state_of(2), tmp_path / "2.pt", weights_only=False)
            except CheckpointError as error:
                caught.append(error)

        thread = threading.Thread(target=save)
        thread.start()
        gate.open.set()
        thread.join(20)
        assert not thread.is_alive() and len(caught) == 1
        saver.wait(20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.pt"]


def test_wait_raises_after_its_timeout_only(tmp_path: Path, gate: Gate) -> None:
    with AsyncCheckpointSaver() as saver:
        saver.wait(timeout=0)
        future = saver.save_async(gate.state_of(1), tmp_path / "a.pt", weights_only=False)
        with pytest.raises(
            WaitTimeoutError,
            match=r"^The jobs of checkpoints did not finish within 0.01 s. Pending jobs: 1",
        ):
            saver.wait(timeout=0.01)
        gate.open.set()
        saver.wait(timeout=20)
        assert future.done()


def test_wait_returns_although_another_thread_continues_to_save(tmp_path: Path) -> None:
    first, second = Gate(), Gate()
    with AsyncCheckpointSaver(max_queue_size=9) as saver:
        saver.save_async({"gate": first}, tmp_path / "0.pt", weights_only=False)
        waiting = threading.Thread(target=saver.wait)
        waiting.start()
        await_wait_in(waiting, "drain")
        later = saver.save_async({"gate": second}, tmp_path / "1.pt", weights_only=False)
        assert waiting.is_alive()
        first.open.set()
        waiting.join(20)
        has_returned = not waiting.is_alive() and not later.done() and saver.num_pending == 1
        second.open.set()
    assert has_returned and later.done()


def test_a_failed_call_occupies_no_place_in_the_queue(tmp_path: Path) -> None:
    with AsyncCheckpointSaver(max_queue_size=1, on_full="raise") as saver:
        for _ in range(5):
            with pytest.raises(TypeError):
                saver.save_async({"lock": threading.Lock()}, tmp_path / "a.pt", weights_only=False)
            with pytest.raises(UsageError, match="level"):
                saver.save_async({}, tmp_path / "a.pt", compress=True, level=17)
            with pytest.raises(UsageError, match=r"meta of .* cannot be written as JSON: "):
                saver.save_async({}, tmp_path / "a.pt", meta={"x": object()})
        assert saver.num_pending == 0
        saver.save_async({}, tmp_path / "a.pt").result(20)


class Copied:
    """An object that counts its existing copies."""

    copies: ClassVar[weakref.WeakSet[Copied]] = weakref.WeakSet()

    def __deepcopy__(self, _: Any) -> Copied:
        made = Copied()
        self.copies.add(made)
        return made


def test_copies_are_freed_also_after_failures_and_drops(tmp_path: Path, gate: Gate) -> None:
    (tmp_path / "folder").mkdir()
    with AsyncCheckpointSaver() as saver:
        for path in ("a.pt", "folder", "b.pt", "folder", "c.pt"):
            future = saver.save_async({"x": Copied()}, tmp_path / path, weights_only=False)
            with suppress(CheckpointError):
                saver.wait()
            assert future.done() and not Copied.copies, path
    with AsyncCheckpointSaver(max_queue_size=1, on_full="drop_oldest") as saver:
        saver.save_async({"gate": gate}, tmp_path / "a.pt", weights_only=False)
        assert gate.entered.acquire(timeout=20)
        for _ in range(5):
            saver.save_async({"x": Copied()}, tmp_path / "b.pt", weights_only=False)
        assert len(Copied.copies) == 1 and saver.num_dropped == 4
        gate.open.set()


def test_a_monitor_records_the_times_of_saves(tmp_path: Path) -> None:
    monitor = PerformanceMonitor()
    with AsyncCheckpointSaver(monitor=monitor) as saver:
        saver.save_async(state_of(1), tmp_path / "a.pt")
    assert {key: row["count"] for key, row in monitor.summary().items()} == {
        "checkpoint/copy": 1,
        "checkpoint/write": 1,
    }


@pytest.mark.parametrize(
    "arguments", [{"max_queue_size": 0}, {"max_queue_size": True}, {"on_full": "drop"}]
)
def test_arguments_are_checked(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"^AsyncCheckpointSaver: .* must be "):
        AsyncCheckpointSaver(**arguments)


def test_an_error_inside_the_block_is_not_hidden_by_a_failed_save(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(KeyError, match="mine"), AsyncCheckpointSaver() as saver:
        saver.save_async({}, tmp_path / "folder")
        raise KeyError("mine")


def test_no_thread_is_started_before_the_first_save() -> None:
    before = set(threading.enumerate())
    saver = AsyncCheckpointSaver()
    assert set(threading.enumerate()) <= before
    saver.shutdown()


def test_a_relative_path_does_not_follow_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with AsyncCheckpointSaver() as saver:
        future = saver.save_async({"x": torch.ones(1000, 1000)}, "a.pt", compress=True)
        monkeypatch.chdir(tmp_path / "other")
        assert future.result() == tmp_path / "a.pt.lz4"
    assert load_checkpoint(tmp_path / "a.pt")["x"].sum() == 1e6 and not list(
        (tmp_path / "other").iterdir()
    )
