"""Pushing, sampling and updating in threads: no exception, no torn item, exact counts.

The soak test takes longer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from storage import AdvancedReplayBuffer, BufferMonitor
from tests.managed.stress import Stress, make


def test_four_threads_on_one_manager_tear_nothing_and_count_exactly() -> None:
    stress = Stress(make())
    stress.run(2.5)
    stress.check_counters()


def test_d4_d8_a_check_and_its_draw_are_one_step_and_counts_lose_nothing() -> None:
    monitor = BufferMonitor()
    buffer = AdvancedReplayBuffer(64, max_use=1, generator=0, monitor=monitor)
    used: list[str] = []
    errors: list[BaseException] = []
    start, is_over = threading.Barrier(3), threading.Event()

    def push() -> None:
        start.wait()
        for number in range(300):
            buffer.append({"x": torch.tensor(float(number))})

    def sample() -> None:
        start.wait()
        num_rounds, is_last = 0, False
        while not is_last or num_rounds < 300:
            # Locks are not fair: samplers that never rest may keep `push` out
            is_last = is_over.wait(0.0005)
            # The check alone may be out of date; sampling decides by itself.
            buffer.sample_check(4)
            actual = buffer.sample(4)
            used.extend(x["replay_unique_id"] for x in actual or ())
            num_rounds += 1

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            errors.append(error)
        finally:
            if job is push:
                is_over.set()

    threads = [threading.Thread(target=guarded, args=[job]) for job in (push, sample, sample)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    assert buffer.push_count == monitor.snapshot()["pushed/total"] == 300
    assert len(used) == monitor.snapshot()["sampled/total"]
    assert buffer.check_valid() == (True, "")
    assert used
