"""Four threads on one manager: two push, two sample and update.

Everything is counted, and every row is checked.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch

from storage import BufferManager

NAMES = ["agent_1", "demo"]
SIZE, WIDTH, BATCH = 2000, 64, 32


def make() -> BufferManager:
    """Create a manager of two prioritized buffers with every limit."""
    options = {
        "replay_buffer_size": SIZE,
        "max_use": 20,
        "max_staleness": 400,
        "min_sample_ratio": 0.1,
    }
    cfg = {name: {**options, "generator": place} for place, name in enumerate(NAMES)}
    return BufferManager(
        {"buffer_name": NAMES, "sample_ratio": {"agent_1": 0.75, "demo": 0.25}, **cfg}, generator=0
    )


def row(number: int) -> dict[str, Any]:
    """Create an item whose leaves are functions of its number, with a checksum of the largest
    leaf.
    """
    values = (torch.arange(WIDTH) * 31 + number) % 65521
    return {
        "x": {"values": values.float()},
        "number": torch.tensor(number),
        "checksum": torch.tensor(zlib.crc32(values.float().numpy().tobytes())),
        "note": [number],
        "collect_iter": number // 100,
    }


def check_row(values: torch.Tensor, number: int, checksum: int) -> None:
    assert zlib.crc32(values.contiguous().numpy().tobytes()) == checksum, "a torn row"
    assert int(values[0]) == number % 65521, "leaves of different rows"


class Stress:
    """Run the four threads for a time, and count."""

    def __init__(self, manager: BufferManager) -> None:
        self.manager = manager
        self.num_pushed = dict.fromkeys(NAMES, 0)
        self.num_sampled = 0
        self.num_updated = self.num_given = 0
        self.iteration = 0
        self.lock = threading.Lock()
        self.errors: list[BaseException] = []
        self.is_over = threading.Event()

    def run(self, duration_s: float) -> None:
        """Run the threads. Raise the error of any thread."""
        jobs = [
            lambda: self.push("agent_1"),
            lambda: self.push("demo"),
            self.sample_items,
            self.sample_tensors,
        ]
        threads = [threading.Thread(target=self.repeat, args=(job,)) for job in jobs]
        for thread in threads:
            thread.start()
        self.is_over.wait(duration_s)
        self.is_over.set()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def repeat(self, job: Callable[[], None]) -> None:
        try:
            while not self.is_over.is_set():
                job()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            self.errors.append(error)
            self.is_over.set()

    def push(self, name: str) -> None:
        first = self.num_pushed[name]
        items = [row(first + number) for number in range(1 + first % 7)]
        self.manager.push_data(items, name)
        self.num_pushed[name] += len(items)
        if name == "agent_1":
            self.iteration = first // 100
        time.sleep(0)

    def sample_items(self) -> None:
        actual = self.manager.sample(BATCH, self.iteration)
        if actual is None:
            return
        assert len(actual) == BATCH
        for item in actual:
            number = int(item["number"])
            check_row(item["x"]["values"], number, int(item["checksum"]))
            assert item["note"] == [number] and item["replay_unique_id"].endswith(f"_{number}")
            assert 0 < item["IS"] <= 1 and item["use"] >= 1
        names = [item["replay_unique_id"] for item in actual]
        applied = self.manager.update(
            {"replay_unique_id": names, "priority": [len(x) % 5 + 0.5 for x in names]}
        )
        self.count(BATCH, applied, BATCH)

    def sample_tensors(self) -> None:
        actual = self.manager.sample_tensors({"agent_1": BATCH, "demo": BATCH // 2}, self.iteration)
        if actual is None:
            return
        for batch, weights, ids in actual.values():
            assert ((weights > 0) & (weights <= 1)).all()
            numbers = batch["number"]
            assert torch.equal(numbers, ids) and batch["note"] == [
                [number] for number in numbers.tolist()
            ]
            for values, number, checksum in zip(
                batch["x"]["values"], numbers.tolist(), batch["checksum"].tolist(), strict=True
            ):
                check_row(values, number, checksum)
        ids = {name: part[2] for name, part in actual.items()}
        applied = self.manager.update_priorities(
            ids, {name: its % 3 + 0.1 for name, its in ids.items()}
        )
        self.count(BATCH * 3 // 2, applied, BATCH * 3 // 2)

    def count(self, num_sampled: int, num_updated: int, num_given: int) -> None:
        with self.lock:
            self.num_sampled += num_sampled
            self.num_updated += num_updated
            self.num_given += num_given

    def check_counters(self) -> None:
        """Check that the counters of the buffers equal the calls of the threads."""
        for name in NAMES:
            buffer = self.manager[name]
            assert buffer.push_count == self.num_pushed[name]
            assert buffer.check_valid() == (True, "")
            assert buffer.count() <= SIZE
        dead = sum(self.manager[name].num_dead_updates for name in NAMES)
        assert dead == self.num_given - self.num_updated
        assert self.num_sampled > 0
