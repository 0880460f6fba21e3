"""Ctrl-C at any point of a call: nothing that was accepted is lost, and whoever closes does not wait for ever.

An interrupt is raised where Python would raise one, at a return of a Python function, one point after the other.
"""

from __future__ import annotations

import _weakrefset
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from rollout_data import RolloutDataset, RolloutWriter
from storage import AsyncCheckpointSaver, PipelinedDataCollector

#: Files whose functions are interrupted.
FILES = {Path(threading.__file__), Path(_weakrefset.__file__)} | {
    Path(sys.modules[kind.__module__].__file__ or "").parent / f"{name}.py"
    for kind in (RolloutWriter, AsyncCheckpointSaver)
    for name in ("background", "publishing", "writer", "checkpoint", "prefetch")
}
#: But for these: a Ctrl-C that falls into Python's own waiting may raise an error of its own instead.
WAITING = {"wait", "wait_for", "_release_save", "_acquire_restore", "_is_owned"}
WAIT_S = 60
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def is_interrupted(call: Callable[[], Any], point: int) -> bool:
    """Make a call, interrupted at the `point`-th return; tell whether there were so many."""
    num_seen = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal num_seen
        if frame.f_code.co_name in WAITING or Path(frame.f_code.co_filename) not in FILES:
            return None
        frame.f_trace_lines = False
        if event == "return":
            num_seen += 1
            if num_seen == point:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with suppress(KeyboardInterrupt):
            call()
    finally:
        sys.settrace(before)
    return num_seen >= point  # Python itself ignores what is raised where an object is given up


def ends(call: Callable[[], Any]) -> bool:
    """Make a call in a thread of its own; tell whether it comes back."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    return not thread.is_alive()


def add(writer: RolloutWriter, step: int) -> None:
    done = torch.tensor([step % 2 == 1])
    observation = torch.full((1, 20), float(step))
    writer.add(observation=observation, action=torch.zeros(1, 2), reward=torch.zeros(1), done=done)


@pytest.mark.parametrize("max_pending_blocks", [1, 2])
def test_no_step_is_lost_wherever_recording_is_interrupted(tmp_path: Path, max_pending_blocks: int) -> None:
    for point in range(1, 10_000):
        folder = tmp_path / str(point)
        writer = RolloutWriter(folder, 1, durable=False, block_bytes=256, max_pending_blocks=max_pending_blocks)
        for step in range(3):
            add(writer, step)
        was_interrupted = is_interrupted(lambda writer=writer: [add(writer, step) for step in (3, 4)], point)  # type: ignore[misc]
        for step in (5, 6):
            add(writer, step)
        assert ends(writer.close), point
        dataset = RolloutDataset(folder, 1, device="cpu")
        steps = [float(batch.observation[0, 0]) for batch in dataset if bool(batch.valid.all())]
        assert len(steps) == writer.num_frames and set(steps) >= {0.0, 1.0, 2.0, 5.0, 6.0}, point
        if not was_interrupted:
            return


def test_a_writer_whose_closing_is_interrupted_is_closed_by_the_next_call(tmp_path: Path) -> None:
    for point in range(1, 10_000):
        folder = tmp_path / str(point)
        writer = RolloutWriter(folder, 1, durable=False)
        for step in range(5):
            add(writer, step)
        was_interrupted = is_interrupted(writer.close, point)
        assert ends(writer.close), point
        assert RolloutDataset(folder, 1, device="cpu").num_frames == writer.num_frames == 5, point
        if not was_interrupted:
            return


def test_a_saver_writes_and_shuts_down_wherever_saving_is_interrupted(tmp_path: Path) -> None:
    for point in range(1, 10_000):
        saver = AsyncCheckpointSaver(max_queue_size=2)
        path = tmp_path / f"{point}.pt"

        def save(saver: AsyncCheckpointSaver = saver, path: Path = path) -> None:
            saver.save_async({"w": torch.ones(3)}, path)

        was_interrupted = is_interrupted(save, point)
        save()
        assert ends(saver.shutdown) and saver.num_pending == 0 and path.exists(), point
        if not was_interrupted:
            return


def test_a_collector_starts_again_wherever_its_start_is_interrupted() -> None:
    def source() -> Iterator[int]:
        yield from range(5)

    for point in range(1, 10_000):
        collector = PipelinedDataCollector(list(source()))
        was_interrupted = is_interrupted(lambda collector=collector: iter(collector), point)  # type: ignore[misc]
        found: list[int] = []

        def collect(collector: Any = collector, found: list[int] = found) -> None:
            with suppress(RuntimeError):  # one iteration may be going on, which nobody holds
                found.extend(collector)
            if not found:
                collector.close()
                found.extend(collector)

        assert ends(collect) and found == list(range(5)), point
        if not was_interrupted:
            return
