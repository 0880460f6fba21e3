"""Buffers in actors: samples are those of the buffer. No answered call is lost or doubled."""

from __future__ import annotations

import copy
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ray", reason="ray is not installed: pip install 'rollout-data[ray]'")

from storage import AdvancedReplayBuffer, PrioritizedWindows, TrajectoryDictBufferMultiDim
from storage.errors import (
    BackgroundError,
    BufferEmptyError,
    ClosedError,
    DataFileError,
    MissingFieldError,
    UsageError,
    WaitTimeoutError,
)
from storage.live.rate_limiter import RateLimitedError
from storage.remote import RemoteBuffer
from tests.ray_actors.actors import MAKE, NO_CPUS, check_rows, collect, held, kill, process_of, rows


def test_samples_have_whole_rows_of_any_buffer_in_any_number_of_replies(cluster: Any) -> None:
    with RemoteBuffer(MAKE, batches_per_reply=3, prefetch=1, copy=True, **NO_CPUS) as buffer:
        with pytest.raises(BufferEmptyError):
            buffer.sample(4)
        buffer.extend(rows(0, 30))
        buffer.extend(rows(30, 30))
        drawn = [check_rows(buffer.sample(16 if draw % 2 else 64)) for draw in range(12)]
        assert len({tuple(item) for item in drawn}) == 12 and [len(item) for item in drawn] == 6 * [
            64,
            16,
        ]
        assert {number for item in drawn for number in item} == set(range(60)) and len(buffer) == 60
        sample = buffer.sample(batch_size=5)
        sample["number"] += 1  # a copy
        with pytest.raises(AttributeError, match=r"call\('clear', \.\.\.\)"):
            buffer.clear()
        with pytest.raises(UsageError, match="the number of rows must be >= 1"):
            buffer.sample(0)
        buffer.extend({"number": torch.zeros(2, 1)})
        with pytest.raises(MissingFieldError, match="'flag'"):
            buffer.flush()
        buffer.extend(rows(60, 10))
        assert held(buffer) == list(range(70))
    buffer.close()
    for call in (lambda: buffer.sample(1), lambda: buffer.extend(rows(0, 1))):
        with pytest.raises(ClosedError, match="needs an open buffer"):
            call()


def test_rows_are_drawn_from_shards_in_proportion_to_their_size(
    cluster: Any, tmp_path: Path
) -> None:
    with RemoteBuffer(MAKE, 2, prefetch=0, **NO_CPUS) as buffer:
        buffer.pin(0)
        buffer.extend(rows(0, 100))
        buffer.pin(1)
        buffer.extend(rows(100, 300))
        assert len(buffer) == 400
        counts = torch.zeros(400)
        for _ in range(10):
            counts += torch.bincount(torch.tensor(check_rows(buffer.sample(4000))), minlength=400)
        assert abs(float(counts[:100].sum()) - 10_000) < 5 * (40_000 * 0.25 * 0.75) ** 0.5
        # Chi squared: all rows are equally likely
        assert float(((counts - 100) ** 2 / 100).sum()) < 399 + 5 * 798**0.5
        buffer.save(str(tmp_path / "saved"))
        with pytest.raises(DataFileError):
            buffer.load(str(tmp_path / "other"))
        buffer.call("clear")
        with pytest.raises(BufferEmptyError):
            buffer.sample(1)
        buffer.load(str(tmp_path / "saved"))
        assert held(buffer) == list(range(400))


def test_priorities_are_sent_to_the_shard_of_their_ids(cluster: Any) -> None:
    with RemoteBuffer(
        partial(AdvancedReplayBuffer, 1000, min_sample_ratio=0, eps=0), 2, prefetch=0, **NO_CPUS
    ) as buffer:
        for first in range(0, 100, 50):
            buffer.extend_tensors(rows(first, 50), priorities=1.0)
        buffer.flush()
        batch, weights, ids = buffer.sample_tensors(2000)
        numbers = torch.tensor(check_rows(batch))
        assert (
            weights.shape == ids.shape == (2000,)
            and len(set(ids.tolist())) == len(set(numbers.tolist())) == 100
        )
        buffer.update_priorities(ids, (numbers % 10 == 3).float())
        buffer.flush()
        assert {number % 10 for number in check_rows(buffer.sample_tensors(500)[0])} == {3}


def test_windows_keep_their_order_and_two_collectors_may_not_mix_steps(cluster: Any) -> None:
    def steps(first: int) -> dict[str, Any]:
        number = torch.arange(first, first + 20).view(-1, 1)
        return {"observation": number, "done": number % 10 == 9}

    make = partial(TrajectoryDictBufferMultiDim, capacity=1000, seq_length=5, output_key_tp1=())
    with RemoteBuffer(make, 2, **NO_CPUS) as buffer:
        with pytest.raises(UsageError, match=r"Call pin\(shard\) first"):
            buffer.extend(steps(0))
        for shard in (0, 1):
            buffer.pin(shard)
            buffer.extend(steps(40 * shard))
            buffer.extend(steps(40 * shard + 20))
        windows = buffer.sample(500)["observation"].view(100, 5)
        assert bool((windows.diff(dim=1) == 1).all()) and bool(
            (windows[:, 0] // 10 == windows[:, 4] // 10).all()
        )
        assert int(windows.min()) < 40 <= int(windows.max())

    with RemoteBuffer(partial(PrioritizedWindows, 1000, 5), **NO_CPUS) as buffer:
        leaves = {name: leaf.unsqueeze(1) for name, leaf in steps(0).items()}
        buffer.extend(leaves)
        assert buffer.sample(8)[0]["observation"].shape == (8, 5, 1)
        buffer.flush()
        other = copy.copy(buffer)
        other.extend(leaves)
        other.flush()
        buffer.extend(leaves)
        with pytest.raises(UsageError, match="two collectors push steps to one shard"):
            buffer.flush()


def test_a_restarted_actor_neither_loses_nor_repeats_acknowledged_items(
    cluster: Any, tmp_path: Path
) -> None:
    buffer = RemoteBuffer(MAKE, checkpoint_dir=str(tmp_path), prefetch=1, **NO_CPUS)
    for push in range(20):
        buffer.extend(rows(50 * push, 50))
        if push in (3, 9):
            buffer.checkpoint()
    buffer.extend({"number": torch.zeros(2, 1)})
    with pytest.raises(MissingFieldError):
        buffer.flush()
    buffer.sample(8)
    kill(buffer)
    assert len(check_rows(buffer.sample(64))) == 64
    assert held(buffer) == list(range(1000))
    buffer.checkpoint()
    other = copy.copy(buffer)
    other.extend(rows(1100, 50))
    other.flush()
    buffer.checkpoint()  # holds what others pushed, too
    del other
    kill(buffer)
    assert held(buffer)[1000:] == list(range(1100, 1150))
    buffer.extend(rows(1000, 50))
    kill(buffer)  # with a push on its way
    buffer.extend(rows(1050, 50))
    assert held(buffer) == list(range(1150))
    buffer.close()

    with RemoteBuffer(MAKE, checkpoint_dir=str(tmp_path), **NO_CPUS) as again:  # another run
        assert held(again) == list(range(1150))


def test_collectors_in_other_processes_push_while_actors_are_killed_and_one_of_them_dies(
    cluster: Any, tmp_path: Path
) -> None:
    options = {
        "checkpoint_dir": str(tmp_path),
        "max_unsaved_bytes": 2 << 20,
        "max_pending": 3,
        **NO_CPUS,
    }
    with RemoteBuffer(MAKE, 2, **options) as buffer:
        dying = collect.options(max_retries=0).remote(buffer, 0, 5, ends=False)
        collectors = [collect.remote(buffer, 10_000 * item, 40) for item in (1, 2)]
        with pytest.raises(cluster.exceptions.WorkerCrashedError):
            cluster.get(dying)
        buffer.checkpoint()
        for shard in (0, 1):
            kill(buffer, shard)
            time.sleep(0.2)
        assert cluster.get(collectors) == [40, 40]
        expected = [range(250), range(10_000, 12_000), range(20_000, 22_000)]
        assert held(buffer) == [number for item in expected for number in item]


def test_without_checkpoints_a_killed_actor_raises_and_a_stopped_actor_times_out(
    cluster: Any,
) -> None:
    buffer = RemoteBuffer(MAKE, timeout_s=10.0, **NO_CPUS)
    buffer.extend(rows(0, 10))
    buffer.flush()
    process = process_of(buffer)
    os.kill(process, signal.SIGSTOP)
    try:
        with pytest.raises(
            WaitTimeoutError, match=r"^The actor of shard 0 of 1 did not answer within 10\.0 s"
        ):
            buffer.sample(4)
    finally:
        os.kill(process, signal.SIGCONT)
    assert len(check_rows(buffer.sample(4))) == 4
    os.kill(process, signal.SIGKILL)
    with pytest.raises(BackgroundError, match="Pass checkpoint_dir"):
        for _ in range(600):
            buffer.sample(4)
            time.sleep(0.1)


def test_rates_and_staleness_are_bounded(cluster: Any) -> None:
    def of_version(version: int) -> dict[str, Any]:
        return {"policy_version": torch.full((100, 1), version), "x": torch.randn(100, 3)}

    limiter = {"samples_per_insert": 2.0, "tolerance": 200.0, "min_inserts": 100, "blocking": False}
    with (
        pytest.raises(RateLimitedError),
        RemoteBuffer(MAKE, prefetch=0, max_staleness=1, rate_limiter=limiter, **NO_CPUS) as buffer,
    ):
        for version in range(3):
            buffer.extend(of_version(version))
            buffer.flush()
            buffer.set_version(version)
            actual = buffer.sample(100)["policy_version"]
            assert actual.shape == (100, 1) and {max(0, version - 1), version} == set(
                actual.flatten().tolist()
            )
        buffer.set_version(9)
        with pytest.raises(BufferEmptyError, match="policy version 8 or later"):
            buffer.sample(10)
        buffer.set_version(2)
        with pytest.raises(RateLimitedError, match="a draw of 100 rows"):
            for _ in range(10):
                buffer.sample(100)
        for _ in range(10):
            buffer.extend(of_version(3))
        with pytest.raises(RateLimitedError, match="an insertion of 100 rows"):
            buffer.flush()  # as does leaving the block: what was not let pass is not forgotten


def test_invalid_options_raise_before_an_actor_is_created(cluster: Any) -> None:
    for options in (
        {"prefetch": -1},
        {"timeout_s": 0},
        {"max_pending": 0},
        {"max_staleness": -1},
        {"seed": "x"},
    ):
        with pytest.raises(UsageError, match=next(iter(options))):
            RemoteBuffer(MAKE, **options)
    with pytest.raises(UsageError, match="num_shards"):
        RemoteBuffer(MAKE, 0)
