"""Priorities on a device: the laws of draws, and errors that a later call raises."""

from __future__ import annotations

import gc
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
import torch

from storage import (
    AdvancedReplayBuffer,
    BufferEmptyError,
    BufferManager,
    PrioritizedWindows,
    SumTree,
    TrajectoryDictBuffer,
    UsageError,
)
from storage.errors import RolloutDataWarning
from tests.pretend_cuda import PretendCuda, PretendTensor

pytestmark = pytest.mark.gpu


def filled(size: int, num_rows: int, alpha: float = 1.0) -> AdvancedReplayBuffer:
    buffer = AdvancedReplayBuffer(
        size, device="cuda", generator=0, alpha=alpha, eps=0.0, anneal_step=0, min_sample_ratio=0
    )
    buffer.extend_tensors({"x": torch.arange(float(num_rows), device="cuda").unsqueeze(1)})
    return buffer


@pytest.mark.parametrize("alpha", [0.6, 1.0])
@pytest.mark.usefixtures("any_device")
def test_rows_are_drawn_in_proportion_to_their_weights_on_a_device(alpha: float) -> None:
    buffer = filled(300, 300, alpha)
    priorities = torch.rand(300, generator=torch.Generator().manual_seed(0)) ** 4
    priorities[::7] = 0
    buffer.update_priorities(torch.arange(300).cuda(), priorities.cuda())
    weights = priorities.double() ** alpha
    expected = 3000 * weights / weights.sum()
    counts: Counter = Counter()
    for _ in range(5):
        batch, importance, ids = buffer.sample_tensors(3000)
        assert torch.equal(batch["x"].squeeze(1).long(), ids)
        actual = torch.bincount(ids.cpu(), minlength=300)
        # One draw in each of 3000 intervals of equal mass
        assert ((actual - expected).abs() < 2.001).all()
        assert not actual[::7].any()
        least = weights[weights > 0].min()
        torch.testing.assert_close(
            importance.cpu().double(), (least / weights[ids.cpu()]) ** 0.4, rtol=1e-5, atol=0
        )
        counts.update(ids.tolist())
    assert set(counts) <= set(range(300)) - set(range(0, 300, 7))


@pytest.mark.each_value
@pytest.mark.parametrize("num", [1, 500])
def test_a_tree_draws_no_place_without_weight_on_a_device(num: int) -> None:
    tree = SumTree(3000, "cuda")
    weights = (
        torch.rand(3000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) ** 20
    )
    weights[torch.arange(3000) % 5 > 0] = 0
    tree.write(torch.arange(3000).cuda(), weights.cuda())
    generator = torch.Generator("cuda").manual_seed(0)
    for _ in range(30):
        drawn = tree.draw(num, generator)
        assert drawn is not None
        counts = torch.bincount(drawn.cpu(), minlength=3000)
        assert (weights[drawn.cpu()] > 0).all()
        assert ((counts - num * weights / weights.sum()).abs() < 2.001).all()


@pytest.mark.usefixtures("any_device")
def test_invalid_priorities_are_left_out_and_a_later_call_raises() -> None:
    buffer = filled(8, 8)
    ids = torch.arange(8).cuda()
    buffer.update_priorities(ids, torch.full((8,), 2.0).cuda())
    wrong = torch.tensor([1.0, torch.nan, -1.0, torch.inf, 0.0, 1e308, 5.0, 1.0]).double()
    assert int(buffer.update_priorities(ids, wrong.cuda())) == 4
    assert buffer._ring.priorities.tolist() == [1.0, 2.0, 2.0, 2.0, 0.0, 2.0, 5.0, 1.0]
    assert buffer.max_priority == 5.0
    assert buffer.check_valid() == (True, "")
    with pytest.raises(UsageError, match="passed 4 invalid priorities, which were ignored"):
        for _ in range(50):
            buffer.sample_tensors(8)
            torch.cuda.synchronize()
    buffer.sample_tensors(8)
    buffer.extend_tensors({"x": torch.zeros(2, 1).cuda()}, torch.tensor([torch.nan, 3.0]).cuda())
    assert buffer._ring.priorities.tolist()[:2] == [5.0, 3.0]
    with pytest.raises(UsageError, match="passed 1 invalid"):
        for _ in range(50):
            buffer.sample_tensors(8)
            torch.cuda.synchronize()


def test_invalid_priorities_on_the_host_raise_at_once() -> None:
    buffer = filled(8, 8)
    with pytest.raises(UsageError, match="finite and >= 0"):
        buffer.update_priorities(torch.arange(8).cuda(), [0.5] * 7 + [-1.0])
    with pytest.raises(UsageError, match="finite and >= 0"):
        buffer.extend_tensors({"x": torch.zeros(1, 1)}, torch.tensor([torch.nan]))
    assert len(buffer) == 8


def test_invalid_priorities_of_experts_on_the_host_raise_at_once() -> None:
    expert = TrajectoryDictBuffer([{"observation": torch.zeros(9, 2)}] * 3, "cuda", 3, generator=0)
    with pytest.raises(UsageError, match="finite and >= 0, got nan"):
        expert.update_priorities([torch.nan, 1.0], torch.tensor([0, 1]).cuda())
    expert.raise_deferred(wait=True)


@pytest.mark.usefixtures("any_device")
def test_a_manager_raises_an_earlier_error_before_it_changes_any_buffer() -> None:
    cfg = {
        "buffer_name": ["a", "b"],
        "a": {"replay_buffer_size": 40},
        "b": {"replay_buffer_size": 40},
        "sample_ratio": {"a": 0.5, "b": 0.5},
    }
    manager = BufferManager(cfg, device="cuda", generator=0)
    for name in "ab":
        manager[name].extend_tensors({"x": torch.ones(30, 3).cuda()})
    samples = manager.sample_tensors(20)
    ids = {name: sample[2] for name, sample in samples.items()}
    sevens = {name: torch.full((len(rows),), 7.0).cuda() for name, rows in ids.items()}
    for call in (
        partial(manager.update_priorities, ids, sevens),
        partial(manager.sample_tensors, 20),
    ):
        before = manager["a"].state_dict()
        manager["b"].update_priorities(ids["b"], -sevens["b"])
        torch.cuda.synchronize()
        with pytest.raises(UsageError, match="invalid priorities"):
            call()
        after = manager["a"].state_dict()
        assert after["numbers"]["num_draws"] == before["numbers"]["num_draws"]
        torch.testing.assert_close(after["tensors"], before["tensors"], rtol=0, atol=0)
    assert int(manager.update_priorities(ids, sevens)) == 20


@pytest.mark.usefixtures("any_device")
def test_adding_rows_with_priorities_reads_the_checks_of_earlier_calls() -> None:
    buffer = filled(8, 8)
    rows = {"x": torch.zeros(2, 1).cuda()}
    for _ in range(20):
        buffer.extend_tensors(rows, torch.ones(2).cuda())
        torch.cuda.synchronize()
    assert buffer._ring.order.deferred.num_pending <= 1
    buffer.extend_tensors(rows, torch.full((2,), torch.nan).cuda())
    torch.cuda.synchronize()
    num_added = buffer.push_count
    with pytest.raises(UsageError, match="passed 2 invalid"):
        buffer.extend_tensors(rows, torch.ones(2).cuda())
    assert buffer.push_count == num_added


@pytest.mark.usefixtures("any_device")
def test_updates_of_overwritten_or_repeated_rows_on_a_device_are_counted() -> None:
    buffer = filled(8, 12)
    ids = torch.tensor([3, 4, 4, 11, 12, -1, 5]).cuda()
    num_applied = buffer.update_priorities(ids, torch.arange(1.0, 8.0).cuda())
    assert num_applied.shape == () and int(num_applied) == 4
    assert buffer.num_dead_updates == 3
    expected = {4: 3.0, 11: 4.0, 5: 7.0}
    actual = buffer._ring.priorities.tolist()
    assert [actual[number % 8] for number in range(4, 12)] == [
        expected.get(number, 1.0) for number in range(4, 12)
    ]
    assert buffer.check_valid() == (True, "")


def test_a_draw_without_any_weight_raises_at_a_later_call() -> None:
    buffer = filled(8, 8)
    buffer.sample_tensors(4)
    buffer.update_priorities(torch.arange(8).cuda(), torch.zeros(8).cuda())
    with pytest.raises(UsageError, match="Discard its batch"):
        for _ in range(40):
            buffer.sample_tensors(4)
            torch.cuda.synchronize()
    with pytest.raises(BufferEmptyError):
        buffer.sample_tensors(4)


def numbers_in_errors(calls: Iterable[Callable[[], object]], pattern: str) -> tuple[int, int]:
    """Make calls. Return how many returned, and the sum of the numbers in errors with a pattern.

    "an earlier call" counts as 1.
    """
    num_returned = 0
    total = 0
    for call in calls:
        try:
            call()
            num_returned += 1
        except UsageError as error:
            actual = re.search(pattern, str(error))
            total += int(actual[1].replace("an", "1")) if actual else 0
        except BufferEmptyError:
            pass
    return num_returned, total


#: Beginning of the error of draws without a weight.
NO_WEIGHT = r"(an|\d+) earlier calls? found no row with a weight"
#: Beginning of the error of invalid priorities.
INVALID = r"passed (\d+) invalid priorities"


@pytest.mark.parametrize("has_updates", [False, True])
@pytest.mark.usefixtures("any_device")
def test_each_draw_without_any_weight_is_counted_in_an_error(has_updates: bool) -> None:
    buffer = filled(8, 8)
    ids = torch.arange(8).cuda()
    for _ in range(3):
        buffer.sample_tensors(4)
    zeros = torch.zeros(8).cuda()
    buffer.update_priorities(ids, zeros)
    num_wrong = 0

    def draw() -> None:
        nonlocal num_wrong
        buffer.sample_tensors(4)
        num_wrong += 1

    draws = [draw] * 60
    if has_updates:
        draws = [draw, lambda: buffer.update_priorities(ids, zeros)] * 30
    _, num_counted = numbers_in_errors(draws, NO_WEIGHT)
    reads = [lambda: buffer.raise_deferred(wait=True)] * 20
    num_counted += numbers_in_errors(reads, NO_WEIGHT)[1]
    assert num_counted == num_wrong > 0
    buffer.raise_deferred(wait=True)


@pytest.mark.usefixtures("any_device")
def test_each_invalid_priority_is_counted_in_an_error() -> None:
    """This includes priorities of removed rows and of new rows."""
    buffer = filled(8, 12)
    wrong = torch.tensor([1.0, torch.nan, -1.0]).cuda()
    ids = torch.tensor([2, 3, 9]).cuda()  # 2 and 3 are removed
    row = {"x": torch.zeros(1, 1).cuda()}
    invalid = torch.tensor([torch.inf]).cuda()
    num_passed = 0

    def update() -> None:
        nonlocal num_passed
        buffer.update_priorities(ids, wrong)
        num_passed += 2

    def extend() -> None:
        nonlocal num_passed
        buffer.extend_tensors(row, invalid)
        num_passed += 1

    calls = [update, extend, lambda: buffer.sample_tensors(4), update] * 10
    _, num_counted = numbers_in_errors(calls, INVALID)
    num_counted += numbers_in_errors([lambda: buffer.raise_deferred(wait=True)] * 40, INVALID)[1]
    assert num_counted == num_passed > 20
    buffer.update_priorities(ids, [1.0, 2.0, 3.0])
    buffer.raise_deferred(wait=True)


@pytest.mark.parametrize("call", ["clear", "load_state_dict", "save"])
@pytest.mark.parametrize("kind", ["rows", "windows"])
@pytest.mark.usefixtures("any_device")
def test_no_call_forgets_the_errors_of_draws_and_priorities(
    kind: str, call: str, tmp_path: Path
) -> None:
    if kind == "rows":
        buffer = filled(8, 8)
        steps = {"x": torch.zeros(8, 1).cuda()}
        sample = partial(buffer.sample_tensors, 4)
        extend = partial(buffer.extend_tensors, steps)
    else:
        buffer = PrioritizedWindows(8, 1, device="cuda", generator=0, eps=0.0)
        steps = {"x": torch.zeros(8, 1, 1).cuda(), "done": torch.zeros(8, 1, 1).cuda()}
        sample = partial(buffer.sample, 4)
        extend = partial(buffer.extend, steps)
        extend()
    ids = sample()[-1]
    buffer.update_priorities(torch.arange(8).cuda(), torch.zeros(8).cuda())
    sample()
    buffer.update_priorities(ids, torch.full((4,), torch.nan).cuda())
    if call == "save":
        calls = [partial(buffer.save, tmp_path / "buffer")] * 3
    else:
        getattr(buffer, call)(*[buffer.state_dict()] * (call == "load_state_dict"))
        calls = [extend, sample] * 40
    texts = []
    for action in calls:
        try:
            action()
        except UsageError as error:
            texts.append(str(error))
    for expected in ("passed 4 invalid", "Discard its batch"):
        assert sum(text.count(expected) for text in texts) == 1
    assert all(("The save is complete." in text) == (call == "save") for text in texts)


@pytest.mark.usefixtures("any_device")
def test_each_invalid_update_of_experts_raises_once() -> None:
    episodes = [{"observation": torch.zeros(9, 2)} for _ in range(3)]
    expert = TrajectoryDictBuffer(episodes, "cuda", 3, generator=0)
    wrong = torch.tensor([1.0, torch.nan, -1.0]).cuda()
    num_passed = 0

    def update() -> None:
        nonlocal num_passed
        expert.update_priorities(wrong)
        num_passed += 2

    _, num_counted = numbers_in_errors([update] * 10, INVALID)
    expert.load_state_dict(expert.state_dict())
    num_counted += numbers_in_errors([lambda: expert.sample(3)] * 40, INVALID)[1]
    assert num_counted == num_passed > 0


@pytest.mark.usefixtures("any_device")
def test_windows_by_priority_equal_those_of_the_cpu() -> None:
    result = []
    for device in ("cpu", "cuda"):
        windows = PrioritizedWindows(17, 4, stride=2, device=device, generator=0, alpha=1.0)
        generator = torch.Generator().manual_seed(0)
        total = 0
        for size in (1, 3, 1, 20, 2, 1, 1, 5):
            number = (
                torch.arange(total, total + size).view(-1, 1) + 1000 * torch.arange(3)
            ).float()
            ends = torch.rand(size, 3, generator=generator) < 0.1
            windows.extend({"x": number.unsqueeze(2), "done": ends.unsqueeze(2)})
            total += size
        batch, _, ids = windows.sample(500)
        firsts = batch["x"].cpu()[:, :, 0]
        assert (firsts.diff(dim=1) == 1).all()
        assert windows.check_valid() == (True, "")
        windows.update_priorities(ids, torch.where(ids % 2 == 0, 0.0, 3.0))
        again = windows.sample(500)[2].cpu()
        assert (again % 2 == 1).double().mean() > 0.99
        result.append((len(windows), set(firsts[:, 0].tolist()), windows.max_priority))
    assert result[0] == result[1]


@pytest.mark.usefixtures("any_device")
def test_experts_are_drawn_by_their_priorities_on_a_device() -> None:
    lengths = (9, 5, 3, 20)
    episodes = [
        {"observation": torch.full((length, 1), float(number))}
        for number, length in enumerate(lengths)
    ]
    expert = TrajectoryDictBuffer(episodes, "cuda", 3, generator=0)
    expert.update_priorities(torch.tensor([1.0, 2.0, 5.0, 3.0]).cuda())
    for _ in range(3):
        drawn = expert.sample(3 * 6000)["observation"].cpu()[::3, 0].long()
        shares = torch.bincount(drawn, minlength=4) / 6000
        torch.testing.assert_close(shares, torch.tensor([1, 2, 0, 3]) / 6, rtol=0, atol=0.04)
    expert.update_priorities(
        torch.tensor([4.0, torch.nan, 4.0, 8.0]).cuda(), torch.tensor([0, 1, 0, 9]).cuda()
    )
    with pytest.raises(UsageError, match="passed 2 invalid priorities or idxs, which were ignored"):
        for _ in range(100):
            expert.sample(3)
            torch.cuda.synchronize()
    torch.testing.assert_close(
        expert.priorities.cpu(), torch.tensor([4, 2 / 11, 5 / 11, 3 / 11]) / (4 + 10 / 11)
    )


def allocated_bytes() -> int:
    """Return the bytes of all tensors on the device."""
    gc.collect()
    if torch.cuda.is_available() and PretendCuda._active is None:
        return torch.cuda.memory_allocated()
    storages = [x.values.untyped_storage() for x in gc.get_objects() if type(x) is PretendTensor]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("max_use", [None, 3])
def test_a_buffer_without_limits_allocates_no_columns_for_them(max_use: int | None) -> None:
    num_rows = 100_000
    before = allocated_bytes()
    buffer = AdvancedReplayBuffer(num_rows, device="cuda", generator=0, max_use=max_use)
    rows = {"x": torch.zeros(num_rows, 1, device="cuda")}
    buffer.extend_tensors(rows)
    del rows
    for _ in range(3):
        ids = buffer.sample_tensors(10_000)[2]
        buffer.update_priorities(ids, torch.rand(len(ids), device="cuda"))
    del ids
    num_bytes = (allocated_bytes() - before) / num_rows
    # A row of 4 bytes; priority, weight and sum of weights of 8 bytes each; a flag
    assert 29 <= num_bytes - (8 if max_use else 0) < 31


def test_experts_without_any_priority_are_equally_likely_on_a_device_with_a_later_warning() -> None:
    episodes = [{"observation": torch.full((9, 1), float(number))} for number in range(2)]
    expert = TrajectoryDictBuffer(episodes, "cuda", 3, generator=0)
    expert.update_priorities(torch.zeros(2).cuda())
    drawn = expert.sample(3 * 2000)["observation"].cpu()[::3, 0]
    assert 0.4 < float(drawn.mean()) < 0.6
    with pytest.warns(RolloutDataWarning, match="all are equally likely"):
        expert.sample(3)
    expert.update_priorities(torch.zeros(2).cuda())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in (1, 2, 3):
            expert.sample(length, length)
        expert.raise_deferred(wait=True)
    expected = {f"at least {length + 1} frames" for length in (1, 2, 3)}
    assert {
        text for text in expected for warning in caught if text in str(warning.message)
    } == expected


@pytest.mark.usefixtures("any_device")
def test_priorities_on_a_device_are_saved_and_loaded(tmp_path) -> None:
    buffer = filled(8, 12)
    buffer.update_priorities(torch.arange(4, 12).cuda(), torch.arange(8.0).cuda())
    buffer.save(tmp_path / "buffer")
    loaded = AdvancedReplayBuffer.load(tmp_path / "buffer")
    assert loaded.max_priority == 7.0
    assert loaded._ring.priorities.tolist() == buffer._ring.priorities.tolist()
    assert torch.equal(loaded.sample_tensors(50)[2], buffer.sample_tensors(50)[2])
    windows = PrioritizedWindows(17, 4, device="cuda", generator=0)
    for step in range(30):
        windows.extend(
            {"x": torch.full((1, 2, 1), float(step)), "done": torch.full((1, 2, 1), step % 9 == 8)}
        )
    windows.save(tmp_path / "windows")
    again = PrioritizedWindows.load(tmp_path / "windows")
    assert len(again) == len(windows)
    assert torch.equal(again.sample(50)[2], windows.sample(50)[2])
