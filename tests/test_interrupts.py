"""Ctrl-C at any point of a call: nothing that was accepted is lost, and whoever closes does not wait for ever.

An interrupt is raised where Python would raise one, one such point after the other: as a Python function is entered,
behind a call of a C function, and as a Python function returns (where Python 3.10 looks too).
"""

from __future__ import annotations

import _weakrefset
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

import rollout_data.writing.publish
import rollout_data.writing.writer
import storage.checkpoints.saver
from rollout_data import RolloutDataset, RolloutWriter
from storage import AsyncCheckpointSaver, PipelinedDataCollector
from storage.core.threads import BackgroundWorker
from storage.errors import BackgroundError, ClosedError, RolloutDataWarning, UsageError
from storage.live.rates import RateLimiter

ROOT = Path(__file__).parents[1]
#: Files whose functions are interrupted.
PYTHON = frozenset({threading.__file__, _weakrefset.__file__})
STORAGE = frozenset(
    str(ROOT / "storage" / f"{name}.py") for name in ("core/threads", "checkpoints/saver", "live/prefetch")
)
WRITER = frozenset(
    str(ROOT / "rollout_data/writing" / f"{name}.py") for name in ("writer", "publish", "journal", "staging", "tally")
)
FILES = PYTHON | STORAGE | WRITER
#: But for these: a Ctrl-C that falls into Python's own waiting may raise an error of its own instead.
WAITING = {"wait", "wait_for", "_release_save", "_acquire_restore", "_is_owned"}
WAIT_S = 60
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def interrupt(call: Callable[[], Any], point: int, files: frozenset[str] = FILES) -> list[Any]:
    """Make a call, interrupted at its `point`-th point, of which 0 is none; give the place in the code of each."""
    places: list[Any] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event in ("call", "c_return", "return") and code.co_filename in files and code.co_name not in WAITING:
            places.append((code, frame.f_lineno, event))
            if len(places) == point:
                sys.setprofile(None)
                raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        with suppress(KeyboardInterrupt):  # Python itself ignores what is raised where an object is given up
            call()
    finally:
        sys.setprofile(before)
    return places


def interrupt_everywhere(trial: Callable[[int], list[Any]]) -> None:
    """Make a trial at point 0, and at those points where it then came to a place in the code for the first time."""
    first = {place: point for point, place in reversed(list(enumerate(trial(0), 1)))}
    assert first
    for point in sorted(first.values()):
        trial(point)


def check_ends(point: int, *calls: Callable[[], Any]) -> None:
    """Make calls in a thread of their own; they must come back, and without an error."""
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
    assert not thread.is_alive(), f"interrupted at point {point} it waits for ever"
    assert failures == [], f"interrupted at point {point}"


def add(writer: RolloutWriter, *steps: int, num_together: int = 1) -> None:
    """Add steps, of which each second one ends a trajectory, and each fourth one as a failure."""
    for start in range(0, len(steps), num_together):
        some = torch.tensor(steps[start : start + num_together])[:, None]
        ends = {"done": some % 2 == 1, "timeout": some % 4 == 1}
        observation = some[..., None].float().expand(-1, -1, 20)
        values = {"observation": observation, "action": observation, "final_observation": observation + 0.5}
        success = {"success": ends["timeout"]} if writer.success_only else {}
        writer.add_rollout(values, reward=some.float(), **ends, **success)


def steps_in(folder: Path) -> list[int]:
    batches: Iterable[Any] = RolloutDataset(folder, 1, device="cpu")
    return [int(batch.observation[0, 0]) for batch in batches if bool(batch.valid.all())]


KINDS: list[tuple[int, dict[str, Any]]] = [
    (1, {"block_bytes": 256, "max_pending_blocks": 1}),
    (2, {"block_bytes": 256, "max_pending_blocks": 2}),
    (2, {"block_bytes": 2048, "success_only": True}),
]


@pytest.mark.parametrize(("num_together", "kind"), KINDS)
def test_no_step_is_lost_wherever_recording_is_interrupted(
    tmp_path: Path, num_together: int, kind: dict[str, Any]
) -> None:
    def trial(point: int) -> list[Any]:
        folder = tmp_path / str(point)
        writer = RolloutWriter(folder, 1, durable=False, **kind)
        add(writer, 0, 1, 2)
        places = interrupt(lambda: [add(writer, 3, 4, num_together=num_together), writer.num_frames], point)
        check_ends(point, lambda: add(writer, 5, 6), writer.close)
        found = steps_in(folder)
        assert len(found) == len(set(found)) == writer.num_frames, point
        assert set(found) >= ({0, 1} if writer.success_only else {0, 1, 2, 5, 6}), point
        assert point or len(found) == (4 if writer.success_only else 7)
        return places

    interrupt_everywhere(trial)


def test_a_block_of_many_steps_is_published_once_wherever_flushing_is_interrupted(tmp_path: Path) -> None:
    def trial(point: int) -> list[Any]:
        folder = tmp_path / str(point)
        writer = RolloutWriter(folder, 1, durable=False)
        add(writer, 0, 1, 2)
        places = interrupt(writer.flush, point)
        check_ends(point, lambda: add(writer, 3, 4), writer.flush)
        assert steps_in(folder) == list(range(5)), point
        check_ends(point, lambda: add(writer, 5, 6), writer.close)
        assert steps_in(folder) == list(range(7)) and writer.num_frames == 7, point
        return places

    interrupt_everywhere(trial)


def test_the_counts_are_those_of_what_is_published_wherever_discarding_is_interrupted(tmp_path: Path) -> None:
    def trial(point: int) -> list[Any]:
        folder = tmp_path / str(point)
        writer = RolloutWriter(folder, 1, durable=False)
        add(writer, 0, 1, 2)
        places = interrupt(lambda: writer.discard([0]), point)
        check_ends(point, lambda: add(writer, 4, 5), writer.close)
        found = steps_in(folder)
        assert len(found) == writer.num_frames and set(found) - {2} == {0, 1, 4, 5}, point
        assert writer.num_trajectories == 2 and (point or 2 not in found), point
        return places

    interrupt_everywhere(trial)


def test_a_writer_whose_closing_is_interrupted_is_closed_by_the_next_call(tmp_path: Path) -> None:
    def trial(point: int) -> list[Any]:
        folder = tmp_path / str(point)
        writer = RolloutWriter(folder, 1, durable=False)
        add(writer, *range(5))
        places = interrupt(writer.close, point)
        check_ends(point, writer.close)
        assert steps_in(folder) == list(range(5)) and writer.num_frames == 5, point
        return places

    interrupt_everywhere(trial)


def test_a_block_that_failed_is_told_of_wherever_flushing_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no room")

    def trial(point: int) -> list[Any]:
        writer = RolloutWriter(tmp_path / str(point), 1, durable=False)
        add(writer, 0)

        def flush() -> None:
            with suppress(BackgroundError):
                writer.flush()

        places = interrupt(flush, point)
        with pytest.raises(BackgroundError, match="no room"):
            writer.close()
        return places

    monkeypatch.setattr(rollout_data.writing.publish, "write_block", fail)
    interrupt_everywhere(trial)


@pytest.mark.filterwarnings("ignore:writer 'mine' ended without")  # of a file that was made, and not yet locked
def test_a_name_is_free_again_wherever_making_a_writer_is_interrupted(tmp_path: Path) -> None:
    num_left = 0

    def trial(point: int) -> list[Any]:
        nonlocal num_left
        folder = tmp_path / str(point)
        made: list[RolloutWriter] = []
        places = interrupt(
            lambda: made.append(RolloutWriter(folder, 1, writer_name="mine", durable=False)), point, FILES - PYTHON
        )
        left = rollout_data.writing.writer._open_writers - set(made)
        num_left += len(left)  # it was made, but nobody got it: closed as the interpreter exits
        check_ends(point, *(writer.close for writer in [*made, *left]))
        assert "writer 'mine'" not in [thread.name for thread in threading.enumerate()], point
        check_ends(point, lambda: RolloutWriter(folder, 1, writer_name="mine").close())
        return places

    interrupt_everywhere(trial)
    assert num_left == 1, "only as `__init__` itself returns"


@pytest.mark.parametrize("error", [MemoryError("no memory"), RuntimeError("something else")])
def test_a_writer_that_cannot_be_closed_in_order_is_closed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    writer = RolloutWriter(tmp_path, 1, writer_name="mine")
    other = RolloutWriter(tmp_path, 1)
    add(writer, 0, 1, 2)
    writer.flush()

    def fail(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(rollout_data.writing.writer, "Staging", fail)
        with pytest.raises(type(error), match=str(error)):
            writer.close()
        assert "writer 'mine'" not in [thread.name for thread in threading.enumerate()]
        patched.setattr(writer, "close", fail)
        patched.setattr(rollout_data.writing.writer, "list", lambda _: [writer, other], raising=False)
        with pytest.warns(RolloutDataWarning, match=str(error)):
            rollout_data.writing.writer._close_open_writers()
    with pytest.raises(ClosedError):
        add(other, 0)
    RolloutWriter(tmp_path, 1, writer_name="mine").close()
    assert steps_in(tmp_path) == [0, 1, 2] and writer.num_frames == 3


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_nonfinite_rewards_are_refused_under_names_too(tmp_path: Path, bad: float) -> None:
    with RolloutWriter(tmp_path, 1, nonfinite_rewards="refuse") as writer:
        rewards = {"walk": torch.zeros(1), "energy": torch.zeros(1)}
        for value in (0.0, bad, 1.0, bad):  # the first record declares the fields, the others go the short way
            rewards["energy"] = torch.full((1,), value)
            if value == bad or value != value:
                with pytest.raises(UsageError, match="'reward/energy': expected finite values, got 1 NaN or infinite"):
                    writer.add(observation=torch.zeros(1, 2), action=torch.zeros(1, 2), reward=rewards)
            else:
                writer.add(observation=torch.zeros(1, 2), action=torch.zeros(1, 2), reward=rewards)
        assert writer.num_frames == 2 and writer.num_nonfinite_rewards == 0


@pytest.mark.parametrize("on_full", ["block", "drop_oldest"])
def test_a_saver_writes_and_shuts_down_wherever_saving_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_full: str
) -> None:
    write = storage.checkpoints.saver.write_checkpoint

    def trial(point: int) -> list[Any]:
        gate, begun = threading.Event(), threading.Event()

        def write_later(*given: Any) -> None:
            begun.set()
            assert gate.wait(WAIT_S)
            write(*given)

        monkeypatch.setattr(storage.checkpoints.saver, "write_checkpoint", write_later)
        saver = AsyncCheckpointSaver(max_queue_size=1, on_full=on_full)
        paths = [tmp_path / f"{point}_{number}.pt" for number in range(4)]

        def save(number: int) -> Any:
            return saver.save_async({"w": torch.ones(3)}, paths[number])

        futures = []
        if on_full == "drop_oldest":  # the first is being written, and the second has to make room
            futures = [save(0)]
            assert begun.wait(WAIT_S)
            futures.append(save(1))
        places = interrupt(lambda: save(2), point)
        gate.set()
        check_ends(point, saver.wait, lambda: save(3), saver.shutdown)
        assert saver.num_pending == 0 and paths[3].exists() and all(future.done() for future in futures), point
        num_lost = len(futures) + 2 - saver.num_dropped - sum(path.exists() for path in paths)
        assert num_lost == 0 or (point and num_lost == 1 and not paths[2].exists()), point
        return places

    interrupt_everywhere(trial)


def test_a_collector_starts_again_wherever_its_start_is_interrupted() -> None:
    def trial(point: int) -> list[Any]:
        collector, found = PipelinedDataCollector(list(range(5))), []
        places = interrupt(lambda: iter(collector), point)

        def collect() -> None:
            with suppress(RuntimeError):  # one iteration may be going on, which nobody holds
                found.extend(collector)
            if not found:
                collector.close()
                found.extend(collector)

        check_ends(point, collect)
        assert found == list(range(5)), point
        return places

    interrupt_everywhere(trial)


def test_an_iteration_goes_on_wherever_taking_an_item_is_interrupted() -> None:
    def trial(point: int) -> list[Any]:
        items, found = iter(PipelinedDataCollector(list(range(5)), prefetch_count=1)), []
        places = interrupt(lambda: found.append(next(items)), point)
        check_ends(point, lambda: found.extend(items))
        assert found == list(range(5)) or (point and found == list(range(1, 5))), point  # one on its way may be lost
        return places

    interrupt_everywhere(trial)


def test_a_worker_runs_its_jobs_wherever_queueing_one_is_interrupted() -> None:
    def trial(point: int) -> list[Any]:
        worker, found = BackgroundWorker("test", max_pending=9), []
        worker.submit(lambda: found.append(0))
        worker.drain()  # it sleeps
        places = interrupt(lambda: worker.submit(lambda: found.append(1)), point)
        check_ends(point, lambda: worker.wait_for_room(0), worker.drain)
        assert worker.num_pending == 0 and (found == [0, 1] or (point and found == [0])), point
        check_ends(point, lambda: worker.submit(lambda: found.append(2)), worker.close)
        assert found in ([0, 2], [0, 1, 2]), point
        return places

    interrupt_everywhere(trial)


@pytest.mark.parametrize("kind", ["worker", "collector"])
def test_what_an_interrupted_close_waited_for_the_next_one_waits_for(kind: str) -> None:
    """`Thread.join`, once interrupted, takes the thread for one that has ended (CPython issue 90882)."""
    gate, begun = threading.Event(), threading.Event()

    def slow() -> Iterator[int]:
        begun.set()
        assert gate.wait(WAIT_S)
        yield 1

    closed: BackgroundWorker | PipelinedDataCollector[int]
    if kind == "worker":
        closed = BackgroundWorker("test")
        closed.submit(lambda: list(slow()))
    else:
        closed = PipelinedDataCollector(slow())
        items = iter(closed)
    assert begun.wait(WAIT_S)
    interrupter = threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT))
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


def test_a_limiter_counts_nothing_that_an_interrupt_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    limiter = RateLimiter(1.0, 50.0)
    limiter.insert(3)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(limiter._changed, "notify_all", interrupt)
        for call in (lambda: limiter.insert(4), lambda: limiter.sample(2), limiter.reset):
            with pytest.raises(KeyboardInterrupt):
                call()
    assert limiter.state_dict() == {"num_inserted": 3, "num_sampled": 0}
