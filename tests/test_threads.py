"""`Worker` runs jobs in order and reports their errors. `each` is a loop with several threads."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from storage.core.threads import Worker, each
from storage.errors import ClosedError, WaitTimeoutError
from tests.watch import await_wait_in

ROOT = Path(__file__).parents[1]


def fail(text: str) -> None:
    raise KeyError(text)


def test_jobs_run_in_order_in_one_other_thread() -> None:
    worker, actual, threads = Worker("test"), [], set()
    for number in range(100):
        worker.submit(actual.append, number)
        worker.submit(lambda: threads.add(threading.current_thread()))
    worker.drain()
    assert (
        actual == list(range(100))
        and len(threads) == 1
        and threading.current_thread() not in threads
    )
    assert worker.submit(lambda: 5).result(20) == 5
    worker.close()
    worker.close()
    with pytest.raises(ClosedError):
        worker.submit(actual.append, 1)


def test_submit_waits_while_the_queue_is_full() -> None:
    worker, gate = Worker("test", max_pending=2), threading.Event()
    for _ in range(3):
        worker.submit(gate.wait, 20)
    more = threading.Thread(target=worker.submit, args=(gate.wait,))
    more.start()
    more.join(0.05)
    assert more.is_alive() and worker.num_pending == 3
    with pytest.raises(
        WaitTimeoutError,
        match=r"^The jobs of test did not finish within 0.01 s. Pending jobs: 3",
    ):
        worker.drain(0.01)
    gate.set()
    more.join(20)
    worker.wait_for_room(0)
    assert worker.num_pending == 0
    worker.close()


def test_the_first_failure_is_raised_once_and_later_jobs_run() -> None:
    worker, actual = Worker("test", 9), []
    for calls in (worker.drain, lambda: worker.submit(print), worker.check, worker.close):
        gate = threading.Event()
        worker.submit(gate.wait, 20)
        futures = [
            worker.submit(fail, "first"),
            worker.submit(fail, "second"),
            worker.submit(actual.append, 1),
        ]
        gate.set()
        assert futures[2].result(20) is None and [
            str(future.exception(20)) for future in futures[:2]
        ] == [
            "'first'",
            "'second'",
        ]
        with pytest.raises(KeyError, match="first"):
            calls()
        worker.check()
    assert actual == [1] * 4
    worker.close()


def test_drain_returns_although_jobs_are_added_and_pending_jobs_can_be_cancelled() -> None:
    worker, gates, started = (
        Worker("test", 9),
        [threading.Event() for _ in range(2)],
        threading.Event(),
    )
    worker.submit(lambda: started.set() or gates[0].wait(60))
    assert started.wait(20)
    draining = threading.Thread(target=worker.drain)
    draining.start()
    await_wait_in(draining, "drain")
    worker.submit(gates[1].wait, 60)
    cancelled = worker.submit(fail, "never")
    assert draining.is_alive() and cancelled.cancel()
    gates[0].set()
    draining.join(20)
    assert not draining.is_alive() and worker.num_pending == 1
    gates[1].set()
    worker.close()
    assert worker.num_pending == 0


def test_jobs_run_before_the_interpreter_exits_and_in_the_caller_while_it_does() -> None:
    script = (
        "import atexit, threading, time\n"
        "from storage.core.threads import Worker, each\n"
        "worker, found = Worker('test', 9), []\n"
        "def finish():\n"
        "    assert found == [1, 2, 3], found\n"
        "    where = threading.current_thread\n"
        "    threads = {worker.submit(where).result(), *each(lambda _: where(), 'ab', 2)}\n"
        "    worker.close()\n"
        "    print(threads == {threading.main_thread()})\n"
        "atexit.register(finish)\n"
        "for number in (1, 2, 3):\n"
        "    worker.submit(lambda number=number: [time.sleep(0.02), found.append(number)])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=150
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


@pytest.mark.parametrize("num_threads", [1, 2, 9])
def test_each_returns_results_in_order_and_raises_the_first_failure(num_threads: int) -> None:
    assert each(lambda x: x * x, range(20), num_threads) == [x * x for x in range(20)]
    assert each(fail, [], num_threads) == []
    done = []

    def work(number: int) -> None:
        if number in (3, 7):
            raise KeyError(number)
        if number > 7:
            # Or other threads may do all the rest before the first failure is seen
            time.sleep(0.01)
        done.append(number)

    with pytest.raises(KeyError, match="3"):
        each(work, range(1000), num_threads)
    assert len(done) < 999 and set(done) >= {0, 1, 2}


def test_each_works_in_several_threads_at_once() -> None:
    barrier = threading.Barrier(3)
    assert sorted(each(lambda _: barrier.wait(20), range(3), 3)) == [0, 1, 2]
