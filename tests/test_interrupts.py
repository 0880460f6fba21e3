"""Ctrl-C: published files are complete, `close()` may be called again and publishes every finished step, nothing hangs.

Each call is interrupted when it enters one of our functions, one function after another.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from rollout_data import RolloutDataset, RolloutWriter
from storage import AsyncCheckpointSaver, PipelinedDataCollector, load_checkpoint
from storage.core.threads import Worker
from tests.watch import await_wait_in

ROOT = Path(__file__).parents[1]
FOLDERS = tuple(str(ROOT / name) + os.sep for name in ("storage", "rollout_data"))
WAIT_S = 60
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("ctrl_c"),
]


def interrupt(call: Callable[[], Any], point: int) -> list[Any]:
    """Make a call and interrupt it when it enters its `point`-th function; 0 interrupts nothing.
    Return all functions that it enters.
    """
    entered: list[Any] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(FOLDERS):
            entered.append(frame.f_code)
            if len(entered) == point:
                sys.setprofile(None)
                raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        with suppress(KeyboardInterrupt):
            call()
    finally:
        sys.setprofile(before)
    return entered


def interrupt_everywhere(trial: Callable[[int], list[Any]]) -> None:
    """Run a trial without an interrupt, and then at each point where it entered a function for the
    first time.
    """
    first = {code: point for point, code in reversed(list(enumerate(trial(0), 1)))}
    assert first
    for point in sorted(first.values()):
        trial(point)


def check_ends(point: int, *calls: Callable[[], Any]) -> None:
    """Make calls in another thread. They must return without an error."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            for call in calls:
                call()
        except BaseException as failure:  # noqa: BLE001 - looked at below
            failures.append(failure)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive(), f"interrupted at point {point} it hangs"
    assert failures == [], f"interrupted at point {point}"


def add(writer: RolloutWriter, *steps: int) -> None:
    """Add steps. Every second step ends a trajectory."""
    for step in steps:
        observation = torch.full((1, 20), float(step))
        writer.add(observation=observation, action=observation, done=[step % 2 == 1])


def steps_in(folder: Path) -> list[int]:
    batches: Iterable[Any] = RolloutDataset(folder, 1, device="cpu")
    return [int(batch.observation[0, 0]) for batch in batches if bool(batch.valid.all())]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("add", {"block_bytes": 256, "max_pending_blocks": 1}),
        ("add", {"block_bytes": 1024}),
        ("flush", {"block_bytes": 256, "max_pending_blocks": 1}),
        ("close", {"block_bytes": 1024}),
    ],
)
def test_close_publishes_every_finished_step_after_an_interrupt_at_any_line(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    def trial(point: int) -> list[Any]:
        folder, finished = tmp_path / str(point), [0, 1, 2, 3, 4]
        writer = RolloutWriter(folder, 1, durable=False, **options)
        add(writer, *finished)

        def add_two() -> None:
            for step in (5, 6):
                add(writer, step)
                finished.append(step)

        calls = {"add": add_two, "flush": writer.flush, "close": writer.close}
        entered = interrupt(calls[name], point)
        check_ends(point, writer.close, writer.close)
        actual = steps_in(folder)
        assert len(actual) == len(set(actual)) and set(actual) >= set(finished), point
        assert not list(folder.glob("*.tmp*")), point
        return entered

    interrupt_everywhere(trial)


@pytest.mark.parametrize("on_full", ["block", "drop_oldest"])
def test_a_saver_writes_whole_files_and_shuts_down_after_an_interrupt_at_any_line(
    tmp_path: Path, on_full: str
) -> None:
    def trial(point: int) -> list[Any]:
        saver = AsyncCheckpointSaver(max_queue_size=1, on_full=on_full)
        paths = [tmp_path / f"{point}_{number}.pt" for number in range(3)]
        futures = [saver.save_async({"w": torch.zeros(3)}, paths[0])]
        entered = interrupt(lambda: saver.save_async({"w": torch.ones(3)}, paths[1]), point)
        futures.append(saver.save_async({"w": torch.full((3,), 2.0)}, paths[2]))
        check_ends(point, saver.wait, saver.shutdown, saver.shutdown)
        assert all(future.done() for future in futures) and paths[2].exists(), point
        for number, path in enumerate(paths):
            assert not path.exists() or load_checkpoint(path)["w"].tolist() == [number] * 3, point
        return entered

    interrupt_everywhere(trial)


def test_a_collector_can_be_closed_and_restarted_after_an_interrupt_at_any_line() -> None:
    def trial(point: int) -> list[Any]:
        collector = PipelinedDataCollector(list(range(5)), prefetch_count=1)

        def take_two() -> None:
            items = iter(collector)
            next(items)
            next(items)

        entered = interrupt(take_two, point)
        result: list[int] = []
        check_ends(point, collector.close, collector.close, lambda: result.extend(collector))
        assert result == list(range(5)), point
        return entered

    interrupt_everywhere(trial)


@pytest.mark.parametrize("kind", ["worker", "collector"])
def test_the_call_after_an_interrupted_close_waits_for_the_same_jobs(kind: str) -> None:
    """After an interrupt, `Thread.join` treats the thread as ended (CPython issue 90882)."""
    gate, begun = threading.Event(), threading.Event()

    def slow() -> Iterator[int]:
        begun.set()
        assert gate.wait(WAIT_S)
        yield 1

    closed: Worker | PipelinedDataCollector[int]
    if kind == "worker":
        closed = Worker("test")
        closed.submit(lambda: list(slow()))
    else:
        closed = PipelinedDataCollector(slow())
        items = iter(closed)
    assert begun.wait(WAIT_S)
    closing = threading.current_thread()

    def press_ctrl_c() -> None:
        await_wait_in(closing, "close")
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=press_ctrl_c)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        closed.close()
    interrupter.join()
    again = threading.Thread(target=closed.close, daemon=True)
    again.start()
    again.join(0.05)
    has_waited = again.is_alive()
    gate.set()
    again.join(WAIT_S)
    assert has_waited and not again.is_alive()
    if kind == "collector":
        assert list(items) == []
