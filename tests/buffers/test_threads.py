"""One writer and several samplers: no sample has a torn row or crosses an end."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from storage import TrajectoryDictBufferMultiDim, ZBuffer

LANES, WIDTH, DURATION_WRITES = 8, 64, 400


def run(
    writer: Callable[[threading.Event], None], sampler: Callable[[], None], num_samplers: int = 3
) -> None:
    """Sample in threads until the writer has finished. Raise the error of any of them."""
    is_over, errors = threading.Event(), []

    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            errors.append(error)
            is_over.set()

    def sample_on() -> None:
        # Locks are not fair: samplers without pauses may block the writer.
        while not is_over.wait(0.0005):
            sampler()

    threads = [threading.Thread(target=guarded, args=(sample_on,)) for _ in range(num_samplers)]
    for thread in threads:
        thread.start()
    guarded(lambda: writer(is_over))
    is_over.set()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


def test_samples_have_no_torn_row() -> None:
    buffer = TrajectoryDictBufferMultiDim(
        capacity=40, n_dim=2, seq_length=4, generator=0, output_key_t=["observation", "c"]
    )
    lanes = torch.arange(LANES)

    def add(step: int, num_rows: int) -> int:
        row = torch.arange(step, step + num_rows)
        code = row.unsqueeze(1) * LANES + lanes
        ends = (row.unsqueeze(1) + lanes) % 7 == 0
        observation = code.unsqueeze(-1).expand(-1, -1, WIDTH).float()
        buffer.extend(
            {"observation": observation, "c": code.unsqueeze(-1), "done": ends.unsqueeze(-1)}
        )
        return step + num_rows

    step = add(0, 20)

    def write(is_over: threading.Event) -> None:
        nonlocal step
        for number in range(DURATION_WRITES):
            if is_over.is_set():
                return
            step = add(step, 1 if number % 3 else 5)

    def sample() -> None:
        batch = buffer.sample(32 * 4)
        code = batch["c"].view(32, 4)
        assert (batch["observation"] == batch["c"]).all(), "a torn row"
        assert (code.diff(dim=1) == LANES).all(), "a window that is not consecutive"
        row, lane = code // LANES, code % LANES
        assert not ((row + lane) % 7 == 0)[:, :].any() or ((row + lane) % 7 != 0)[:, :3].all(), (
            "an end inside"
        )
        assert (batch["next"]["observation"].view(32, 4, -1)[..., 0].long() == code + LANES).all()

    run(write, sample)


def test_threads_may_share_a_latent_buffer() -> None:
    buffer = ZBuffer(16, WIDTH, generator=0)
    buffer.add(torch.zeros(1, WIDTH))

    def write(is_over: threading.Event) -> None:
        for number in range(DURATION_WRITES):
            buffer.add(torch.full((number % 40, WIDTH), float(number)))

    def sample() -> None:
        actual = buffer.sample(32)
        assert (actual == actual[:, :1]).all()

    run(write, sample)
