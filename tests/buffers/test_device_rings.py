"""Rings on a device draw by the same laws as on the CPU.

The host waits only where the guide states it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from storage import DictBuffer, TrajectoryDictBufferMultiDim, UsageError
from storage.ring import window_bounds
from tests.pretend_cuda import PretendCuda

from .streams import Naive, chi_square, chi_square_bound, drawn_windows, rows

pytestmark = pytest.mark.gpu

GAMMA = 0.5


class Steps:
    """Steps of lanes in lock-step. Each value encodes its origin: lane * 1000 + row."""

    def __init__(self, num_lanes: int) -> None:
        self.num_lanes = num_lanes
        self.ends: list[list[bool]] = []
        self.is_final_given: list[bool] = []

    def add_to(self, buffer: DictBuffer, ends: torch.Tensor, has_final: bool) -> None:
        """Add `[n, lanes]` rows."""
        first = len(self.ends)
        number = torch.arange(self.num_lanes) * 1000 + torch.arange(
            first, first + len(ends)
        ).unsqueeze(1)
        number = number.float().view(-1, 1).cuda()
        terminated = ends.view(-1, 1).cuda()
        record = {"observation": number, "reward": number, "terminated": terminated}
        buffer.extend(record, final={"observation": number + 0.25} if has_final else None)
        self.ends += ends.tolist()
        self.is_final_given += [has_final] * len(ends)

    def transition(self, lane: int, first: int, num_steps: int) -> tuple[int, bool, bool]:
        """Return the last row of a transition, whether its trajectory ends there, and whether the
        next observation is known.
        """
        for row in range(first, min(first + num_steps, len(self.ends))):
            if self.ends[row][lane]:
                return row, True, self.is_final_given[row]
        return first + num_steps - 1, False, first + num_steps < len(self.ends)

    def valid(self, capacity: int, num_steps: int, is_marked: bool) -> set[tuple[int, int]]:
        """Return (lane, first row) of every transition that may be drawn."""
        actual = set()
        for lane in range(self.num_lanes):
            for first in range(max(0, len(self.ends) - capacity), len(self.ends)):
                _, is_end, is_known = self.transition(lane, first, num_steps)
                if is_known or (is_end and is_marked):
                    actual.add((lane, first))
        return actual

    def check(self, batch: dict[str, Any], num_steps: int, is_marked: bool) -> Counter:
        """Check every value of a batch. Return how often each (lane, first row) was drawn."""
        counts: Counter = Counter()
        leaves = [
            batch["observation"],
            batch["reward"],
            batch["next"]["observation"],
            batch["discount"],
        ]
        flags = [
            batch["terminated"],
            batch["next_valid"] if is_marked else torch.ones_like(batch["terminated"]),
        ]
        for values in zip(*(leaf.cpu().flatten().tolist() for leaf in leaves + flags), strict=True):
            observation, reward, following, discount, terminated, is_valid = values
            lane, first = divmod(int(observation), 1000)
            last, is_end, is_known = self.transition(lane, first, num_steps)
            assert reward == pytest.approx(
                sum(GAMMA**k * (observation + k) for k in range(last - first + 1))
            )
            number = lane * 1000 + last
            after = number + 0.25 if is_known else number
            assert following == (after if is_end else number + 1)
            assert bool(terminated) == is_end
            assert bool(is_valid) == is_known
            assert discount == (0 if is_end else GAMMA**num_steps)
            counts[lane, first] += 1
        return counts


def filled(
    capacity: int, num_lanes: int, finals: str, end_share: float = 0.2
) -> tuple[DictBuffer, Steps]:
    """Fill a ring, with final observations "never", "always", or in every second write."""
    generator = torch.Generator().manual_seed(0)
    buffer = DictBuffer(
        capacity * num_lanes, "cuda", num_envs=num_lanes, end_key="terminated", generator=0
    )
    steps = Steps(num_lanes)
    for write, size in enumerate((3, 1, 1, capacity + 2, 5, 1, 1, 4, 1)):
        ends = torch.rand(size, num_lanes, generator=generator) < end_share
        steps.add_to(buffer, ends, finals == "always" or (finals == "sometimes" and write % 2 == 0))
    return buffer, steps


@pytest.mark.each_value
@pytest.mark.parametrize("at_end", ["exclude", "mark"])
@pytest.mark.parametrize("finals", ["never", "sometimes", "always"])
@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.usefixtures("any_device")
def test_transitions_follow_their_law_on_a_device(num_steps: int, finals: str, at_end: str) -> None:
    buffer, steps = filled(17, 3, finals)
    is_marked = at_end == "mark"
    counts: Counter = Counter()
    for size in (10, 2000, 2000, 2000):
        batch = buffer.sample_transitions(size, num_steps=num_steps, gamma=GAMMA, at_end=at_end)
        counts += steps.check(batch, num_steps, is_marked)
    valid = steps.valid(17, num_steps, is_marked)
    assert set(counts) == valid
    assert chi_square(counts, dict.fromkeys(valid, 1 / len(valid))) < chi_square_bound(len(valid))


@pytest.mark.usefixtures("any_device")
def test_frames_of_transitions_stay_in_their_trajectory_on_a_device() -> None:
    buffer, steps = filled(17, 3, "always")
    for _ in range(3):
        batch = buffer.sample_transitions(500, num_steps=2, num_frames=3)
        frames = batch["observation"].cpu().squeeze(2)
        following = batch["next"]["observation"].cpu().squeeze(2)
        for own, later in zip(frames.tolist(), following.tolist(), strict=True):
            lane, first = divmod(int(own[-1]), 1000)
            last, is_end, _ = steps.transition(lane, first, 2)
            start = max([0, *(row + 1 for row in range(first) if steps.ends[row][lane])])
            expected = [lane * 1000 + max(start, first - back) for back in (2, 1, 0)]
            assert own == expected
            stop = last + 1
            expected = [lane * 1000 + max(start, stop - back) for back in (2, 1)]
            assert later == [*expected, lane * 1000 + (last + 0.25 if is_end else stop)]


@pytest.mark.each_value
@pytest.mark.parametrize("at_end", ["exclude", "mark"])
@pytest.mark.parametrize("has_finals", [False, True])
@pytest.mark.parametrize("start_mode", ["uniform", "trajectory"])
@pytest.mark.usefixtures("any_device")
def test_windows_end_where_their_trajectory_does_on_a_device(
    start_mode: str, has_finals: bool, at_end: str
) -> None:
    """Windows and next observations equal those of a ring on the CPU."""
    batches = []
    for device in ("cpu", "cuda"):
        buffer = TrajectoryDictBufferMultiDim(
            14,
            device,
            n_dim=2,
            end_key="done",
            start_mode=start_mode,
            at_end=at_end,
            generator=0,
            seq_length=3,
        )
        generator = torch.Generator().manual_seed(1)
        total = 0
        for size in (3, 1, 1, 20, 5, 1):
            record = rows(total, torch.rand(size, 3, generator=generator) < 0.25)
            final = {"observation": record["observation"] + 0.25} if has_finals else None
            buffer.extend(record, final=final)
            total += size
        actual = set()
        for _ in range(4):
            batch = buffer.sample(3 * 1500)
            parts = [batch["observation"], batch["next"]["observation"]]
            if at_end == "mark":
                parts.append(batch["next_valid"])
            windows = torch.cat([part.cpu().float().flatten(1) for part in parts], 1).reshape(
                1500, -1
            )
            actual |= set(map(tuple, windows.tolist()))
        batches.append(actual)
    assert batches[0] == batches[1]


@pytest.mark.usefixtures("any_device")
def test_windows_by_trajectory_follow_their_law_on_a_device_with_more_trajectories_than_places() -> (
    None
):
    buffer = TrajectoryDictBufferMultiDim(
        100,
        n_dim=2,
        device="cuda",
        output_device="cpu",
        end_key="done",
        start_mode="trajectory",
        generator=0,
    )
    naive = Naive(100, 3)
    generator = torch.Generator().manual_seed(0)
    for size in (1, 2, 1) * 40:
        ends = torch.rand(size, 3, generator=generator) < 0.5
        buffer.extend(rows(naive.total, ends))
        naive.add(ends)
    law = naive.law_by_trajectory(3)
    counts = drawn_windows(buffer, 100, 2)
    # Many more than the draws that measured the share of valid candidates.
    counts += drawn_windows(buffer, 20_000, 2)
    assert set(counts) <= set(law)
    assert chi_square(counts, law) < chi_square_bound(len(law))


def test_a_draw_that_finds_too_few_valid_rows_repeats_valid_ones_and_is_counted() -> None:
    buffer = DictBuffer(600, "cuda", end_key="done", generator=0)
    record = {
        "observation": torch.zeros(600, 1).cuda(),
        "done": torch.zeros(600, 1, dtype=torch.bool).cuda(),
    }
    buffer.extend(record)
    for _ in range(3):
        buffer.sample_transitions(64)
        torch.cuda.synchronize()
    number = torch.arange(600.0).view(-1, 1)
    buffer.extend({"observation": number.cuda(), "done": (number % 10 != 3).cuda()})
    batch = buffer.sample_transitions(64)
    assert (batch["observation"].cpu() % 10 == 3).all()
    torch.cuda.synchronize()
    buffer.sample_transitions(64)
    assert buffer.num_short_draws == 1


def test_a_draw_without_any_valid_row_raises_at_a_later_call() -> None:
    buffer = DictBuffer(600, "cuda", end_key="done", generator=0)
    buffer.extend({"x": torch.zeros(600, 1).cuda(), "done": torch.zeros(600, 1).cuda()})
    for _ in range(3):
        buffer.sample_transitions(64, next_keys="x")
        torch.cuda.synchronize()
    buffer.extend({"x": torch.zeros(600, 1).cuda(), "done": torch.ones(600, 1).cuda()})
    buffer.sample_transitions(64, next_keys="x")
    torch.cuda.synchronize()
    with pytest.raises(UsageError, match="Discard its batch"):
        buffer.sample_transitions(64, next_keys="x")
    with pytest.raises(UsageError, match="no row has a known next observation"):
        buffer.sample_transitions(64, next_keys="x")


def without_valid_rows() -> DictBuffer:
    """Return a ring without a valid row whose draws do not wait yet."""
    buffer = DictBuffer(600, "cuda", end_key="done", generator=0)
    rows = {"x": torch.zeros(600, 1).cuda(), "done": torch.zeros(600, 1).cuda()}
    buffer.extend(rows)
    for _ in range(3):
        for num_steps in (1, 2):
            buffer.sample_transitions(64, next_keys="x", num_steps=num_steps, reward_key="x")
    torch.cuda.synchronize()
    buffer.extend({**rows, "done": torch.ones(600, 1).cuda()})
    return buffer


def numbers_of_errors(call: Callable[[int], Any], text: str, num_calls: int) -> tuple[int, int]:
    """Return how many of some calls return, and how many raise an error with a text."""
    num_returned = 0
    num_raised = 0
    for number in range(num_calls):
        try:
            call(number)
            num_returned += 1
        except UsageError as error:
            num_raised += text in str(error)
    return num_returned, num_raised


@pytest.mark.parametrize("num_kinds", [1, 2])
@pytest.mark.usefixtures("any_device")
def test_each_draw_without_any_valid_row_raises_once(
    num_kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = without_valid_rows()
    # results of old kinds are forgotten with each new kind
    monkeypatch.setattr(window_bounds, "_MAX_KINDS", num_kinds)

    def draw(number: int) -> None:
        num_steps = 1 + number % 2
        buffer.sample_transitions(64, next_keys="x", num_steps=num_steps, reward_key="x")

    num_wrong, num_raised = numbers_of_errors(draw, "Discard its batch", 40)
    assert num_raised == num_wrong > 0
    assert buffer.num_short_draws == num_wrong


@pytest.mark.parametrize("call", ["clear", "load_state_dict", "save", "raise_deferred"])
@pytest.mark.usefixtures("any_device")
def test_no_call_forgets_the_errors_of_draws(call: str, tmp_path: Any) -> None:
    buffer = without_valid_rows()
    buffer.sample_transitions(64, next_keys="x")
    if call in ("clear", "load_state_dict"):
        getattr(buffer, call)(*[buffer.state_dict()] * (call == "load_state_dict"))
        buffer.extend({"x": torch.ones(9, 1).cuda(), "done": torch.zeros(9, 1).cuda()})
        _, num_raised = numbers_of_errors(
            lambda _: buffer.sample_transitions(4, next_keys="x"), "Discard its batch", 40
        )
        assert num_raised == 1
        return
    calls = {
        "save": lambda: buffer.save(tmp_path / "buffer"),
        "raise_deferred": lambda: buffer.raise_deferred(wait=True),
    }
    text = r"Discard its batch .*" + r"The save is complete\." * (call == "save")
    with pytest.raises(UsageError, match=text):
        calls[call]()
    calls[call]()
    if call == "save":
        assert len(DictBuffer.load(tmp_path / "buffer")) == 600


@pytest.mark.parametrize("is_read", [True, False])
def test_too_many_final_observations_are_dropped_and_never_wrong(
    is_read: bool, cuda_device: PretendCuda | None
) -> None:
    """If the host reads their number in time, all are kept.

    Otherwise the oldest final observations are dropped.
    """
    if not is_read:
        if cuda_device is None:
            pytest.skip("a real device lets the host read in time")
        cuda_device.lateness = 1 << 40
    buffer = DictBuffer(900, "cuda", end_key="terminated", generator=0)
    steps = Steps(1)
    for size in (1, 20) * 30:
        steps.add_to(buffer, torch.rand(size, 1) < 0.8, has_final=True)
    counts: Counter = Counter()
    batch = buffer.sample_transitions(5000, gamma=GAMMA)
    counts += steps.check(batch, 1, False)
    valid = steps.valid(900, 1, False)
    num_lost = buffer.num_lost_finals
    assert set(counts) <= valid
    assert (num_lost == 0) == is_read
    assert len(valid) - num_lost - 5 <= len(counts) <= len(valid) - num_lost


def test_an_end_that_end_key_does_not_name_raises_at_a_later_call() -> None:
    buffer = DictBuffer(100, "cuda", end_key="terminated", generator=0)
    row = {name: torch.zeros(100, 1).cuda() for name in ("observation", "terminated", "truncated")}
    row["truncated"][50] = 1
    buffer.extend(row)
    with pytest.raises(UsageError, match=r"'truncated' is set on rows .* Add it to end_key"):
        for _ in range(20):
            buffer.sample_transitions(64)
            torch.cuda.synchronize()


@pytest.mark.usefixtures("any_device")
def test_each_draw_with_an_end_that_end_key_does_not_name_raises_once() -> None:
    buffer = DictBuffer(100, "cuda", end_key="terminated", generator=0)
    row = {name: torch.zeros(100, 1).cuda() for name in ("observation", "terminated", "reward")}
    buffer.extend({**row, "truncated": torch.ones(100, 1).cuda()})
    options: list[dict[str, int]] = [{}, {"num_steps": 3}, {"num_frames": 2}]
    num_wrong, num_raised = numbers_of_errors(
        lambda number: buffer.sample_transitions(64, **options[number % 3]), "'truncated'", 60
    )
    while num_raised < num_wrong:
        with pytest.raises(UsageError, match="'truncated'"):
            buffer.raise_deferred(wait=True)
        num_raised += 1
    buffer.raise_deferred(wait=True)
    assert num_wrong > 20


@pytest.mark.parametrize("has_finals", [False, True])
@pytest.mark.usefixtures("any_device")
def test_rings_with_final_observations_save_and_load_on_a_device(
    tmp_path: Any, has_finals: bool
) -> None:
    buffer, steps = filled(17, 3, "always" if has_finals else "never")
    buffer.save(tmp_path / "ring")
    loaded = DictBuffer.load(tmp_path / "ring")
    valid = steps.valid(17, 3, False)
    counts: Counter = Counter()
    for _ in range(3):
        counts += steps.check(loaded.sample_transitions(3000, num_steps=3, gamma=GAMMA), 3, False)
    assert set(counts) == valid


def test_streams_wait_for_rows_and_final_observations_of_other_streams() -> None:
    # The pretended device executes at once, so only a GPU can show a missing order by its values.
    # tests/storage/test_stream_order.py shows that the streams wait.
    buffer = DictBuffer(64, "cuda", end_key="done", generator=0)
    side = torch.cuda.Stream()
    done = (torch.arange(64) % 4 == 3).view(64, 1).cuda()

    def record(number: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((64, 512), float(number)).cuda(), "done": done}

    buffer.extend(record(0), final={"x": torch.zeros(64, 512).cuda()})
    buffer.sample_transitions(64, next_keys="x")
    for number in range(1, 20):
        torch.cuda.current_stream().synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000)
            buffer.extend(record(number), final={"x": torch.full((64, 512), float(number)).cuda()})
        batch = buffer.sample_transitions(64, next_keys="x")
        assert bool((batch["x"] == number).all())
        assert bool((batch["next"]["x"] == number).all())


def test_a_write_waits_for_a_draw_on_another_stream() -> None:
    # The pretended device executes at once, so only a GPU can show a missing order by its values.
    # tests/storage/test_stream_order.py shows that the streams wait.
    buffer = DictBuffer(64, "cuda", end_key="done", generator=0)
    side = torch.cuda.Stream()
    done = torch.zeros(64, 1).cuda()
    records = [
        {"x": torch.full((64, 512), float(number)).cuda(), "done": done} for number in range(20)
    ]
    buffer.extend(records[0])
    buffer.sample_transitions(64, next_keys="x")
    torch.cuda.synchronize()
    for number in range(1, 20):
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000)
            batch = buffer.sample_transitions(64, next_keys="x")
        buffer.extend(records[number])
        torch.cuda.synchronize()
        assert bool((batch["x"] == number - 1).all())
        assert bool((batch["next"]["x"] == number - 1).all())
