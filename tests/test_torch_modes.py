"""Every class returns the same results in inference mode and with another default device.

Objects that are created, written or drawn from in inference mode, as policies run, are used outside
of it later. Results on the CPU stay there if another device is the default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from rollout_data.trajectories.trajectory_replay_buffer import TrajectoryReplayBuffer
from storage import (
    ActionLabelRollout,
    AdvancedReplayBuffer,
    BufferManager,
    DictBuffer,
    EpisodeReplayBuffer,
    NaiveReplayBuffer,
    PrioritizedWindows,
    QueueRolloutStorage,
    ReplayBuffer,
    RolloutStorage,
    SarsaRolloutStorage,
    TrajectoryDictBuffer,
    TrajectoryDictBufferMultiDim,
    ZBuffer,
    motion_priorities,
)
from storage.core.fields import flatten
from tests.storage.rollouts import make_storage, make_transition, value_of
from tests.trajectory_replay.recorded import trajectory

#: A call on what was made; what it gives is compared.
Call = Callable[[Any], Any]


def steps(
    num_rows: int, *lanes: int, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    count = torch.arange(num_rows).view(-1, *[1] * (len(lanes) + 1)).expand(num_rows, *lanes, 1)
    return {
        "observation": count.to(dtype).expand(*count.shape[:-1], 3).contiguous(),
        "done": count % 5 == 4,
    }


def in_turn(make: Callable[[], Any], write: Call, *reads: Call) -> list[Call]:
    """Write, read, write, read, save, clear, load, and repeat."""

    def save_and_load(buffer: Any) -> None:
        state = buffer.state_dict()
        buffer.clear()
        buffer.load_state_dict(state)

    return [lambda _: make(), write, *reads, write, *reads, save_and_load, *reads, write, *reads]


def rings() -> dict[str, list[Call]]:
    calls: dict[str, list[Call]] = {}
    for dtype in (torch.float32, torch.bfloat16):

        def extend(buffer: Any, dtype: torch.dtype = dtype) -> None:
            for size in (7, 1, 4):
                buffer.extend(steps(size, dtype=dtype))

        def with_finals(buffer: Any, dtype: torch.dtype = dtype) -> None:
            rows = steps(70, dtype=dtype)
            rows["done"] |= True
            buffer.extend(rows, final={"observation": rows["observation"]})
            buffer.extend(steps(7, dtype=dtype))

        reads: list[Call] = [
            lambda buffer: buffer.sample(5),
            lambda buffer: buffer.sample_transitions(5),
            lambda buffer: buffer.sample_transitions(5, num_frames=2, at_end="mark"),
            lambda buffer: buffer.sample_transitions(9000),
        ]
        calls[f"DictBuffer {dtype}"] = in_turn(
            lambda: DictBuffer(capacity=20, end_key="done", generator=0), extend, *reads
        )
        calls[f"DictBuffer with finals {dtype}"] = in_turn(
            lambda: DictBuffer(capacity=200, end_key="done", generator=0), with_finals, *reads
        )
    for mode in ("uniform", "trajectory"):
        calls[f"MultiDim {mode}"] = in_turn(
            lambda mode=mode: TrajectoryDictBufferMultiDim(  # type: ignore[misc]
                capacity=300, n_dim=2, seq_length=2, start_mode=mode, generator=0
            ),
            lambda buffer: [buffer.extend(steps(size, 4)) for size in (6, 1, 1)],
            lambda buffer: buffer.sample(8),
            lambda buffer: buffer.sample(12, seq_length=3),
        )
    episodes = [steps(4), steps(5)]
    calls["expert"] = [
        lambda _: TrajectoryDictBuffer(episodes, seq_length=2, end_key="end", generator=0),
        lambda buffer: buffer.sample(8),
        lambda buffer: buffer.update_priorities([0.1, 0.9], [0, 1]),
        lambda buffer: buffer.sample(8),
    ]
    calls["ZBuffer"] = in_turn(
        lambda: ZBuffer(10, 3, generator=0),
        lambda buffer: buffer.add(torch.arange(21.0).view(7, 3)),
        lambda buffer: buffer.sample(4),
    )
    return calls


def rollouts() -> dict[str, list[Call]]:
    def add(storage: Any) -> None:
        storage.clear()
        for step in range(4):
            more: dict[str, Any] = {}
            if isinstance(storage, ActionLabelRollout):
                more["action_labels"] = value_of(8, step, 4, 2)
            if isinstance(storage, SarsaRolloutStorage):
                more |= {"next_observations": value_of(0, step + 1, 4, 3)}
                more |= {"next_critic_observations": value_of(1, step + 1, 4, 5)}
            done = torch.tensor([[step % 2 == 1]] * 4)
            if step == 2:
                more |= {"time_outs": done, "bootstrap_values": torch.ones(4)}
            storage.add_transitions(make_transition(step, 4, done=done, **more))
        storage.compute_returns(torch.zeros(4), 0.9, 0.9)

    def save_and_load(storage: Any) -> None:
        storage.load_state_dict(storage.state_dict())

    reads: list[Call] = [
        lambda storage: [batch._asdict() for batch in storage.mini_batch_generator(2, 2)],
        lambda storage: [batch._asdict() for batch in storage.recurrent_mini_batch_generator(2, 1)],
    ]
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (RolloutStorage, {}),
        (QueueRolloutStorage, {"buffer_dilation_ratio": 2.5}),
        (ActionLabelRollout, {"buffer_dilation_ratio": 1.5}),
        (SarsaRolloutStorage, {}),
    ]
    return {
        kind.__name__: [
            lambda _, kind=kind, options=options: make_storage(4, 4, kind, **options),  # type: ignore[misc]
            *[add, *reads] * 2,
            save_and_load,
            *[add, *reads] * 2,
        ]
        for kind, options in kinds
    }


def managed() -> dict[str, list[Call]]:
    def items(first: int) -> list[dict[str, Any]]:
        return [{"x": torch.full((2,), float(first + k)), "reward": float(k)} for k in range(6)]

    def push(buffer: Any) -> None:
        buffer.push(items(buffer.push_count))

    def save_and_load(buffer: Any) -> None:
        buffer.load_state_dict(buffer.state_dict())

    calls: dict[str, list[Call]] = {}
    for kind in (NaiveReplayBuffer, AdvancedReplayBuffer):
        sample: Call = lambda buffer: [item["x"] for item in buffer.sample(4)]  # noqa: E731
        calls[kind.__name__] = [
            lambda _, kind=kind: kind(10, generator=0),  # type: ignore[misc]
            *[push, sample] * 2,
            save_and_load,
            *[push, sample] * 2,
        ]

    def reprioritize(buffer: Any) -> Any:
        batch, weights, ids = buffer.sample(4)
        buffer.update_priorities(ids, torch.arange(1.0, 5))
        return {"batch": batch, "weights": weights}

    calls["PrioritizedWindows"] = [
        lambda _: PrioritizedWindows(20, 3, generator=0),
        *[lambda buffer: buffer.extend(steps(7, 2)), reprioritize] * 2,
        save_and_load,
        *[lambda buffer: buffer.extend(steps(7, 2)), reprioritize] * 2,
    ]
    calls["EpisodeReplayBuffer"] = [
        lambda _: EpisodeReplayBuffer(40, generator=0),
        *[
            lambda buffer: buffer.push({"x": torch.arange(15.0).view(5, 3)}),
            lambda b: b.sample_windows(3, 2),
        ]
        * 3,
    ]
    calls["BufferManager"] = [
        lambda _: BufferManager(
            {"buffer_name": ["a"], "a": {"replay_buffer_size": 10, "generator": 1}}, generator=0
        ),
        *[
            lambda manager: manager.push(items(0), "a"),
            lambda manager: [x["x"] for x in manager.sample(3)],
        ]
        * 3,
    ]
    calls["ReplayBuffer"] = [
        lambda _: ReplayBuffer(3, 10, generator=0),
        *[
            lambda buffer: buffer.insert(torch.ones(7, 3), torch.zeros(7, 3)),
            lambda buffer: [list(pair) for pair in buffer.feed_forward_generator(2, 4)],
            save_and_load,
        ]
        * 3,
    ]
    calls["TrajectoryReplayBuffer"] = [
        lambda _: TrajectoryReplayBuffer(seed=0),
        *[lambda buffer: buffer.add(trajectory(0)), *[lambda buffer: buffer.sample(3)] * 3] * 2,
    ]
    return calls


CALLS = rings() | rollouts() | managed()


@pytest.mark.each_value
@pytest.mark.parametrize("turn", ["first calls", "last calls", "every other call", "all calls"])
@pytest.mark.parametrize("name", CALLS)
def test_calls_in_inference_mode_equal_calls_outside(name: str, turn: str) -> None:
    calls = CALLS[name]
    expected = [_frozen(result) for result in _made(calls, set())]
    num = len(calls)
    chosen: list[set[int]] = {
        "first calls": [set(range(k)) for k in range(1, num)],
        "last calls": [set(range(k, num)) for k in range(1, num)],
        "every other call": [set(range(0, num, 2)), set(range(1, num, 2))],
        "all calls": [set(range(num))],
    }[turn]
    for inside in chosen:
        assert [_frozen(result) for result in _made(calls, inside)] == expected, sorted(inside)


class Elsewhere:
    """An object whose methods run with another default device."""

    def __init__(self, made: Any) -> None:
        self.made = made

    @property
    def __class__(self) -> Any:
        return type(self.made)

    def __getattr__(self, name: str) -> Any:
        actual = getattr(self.made, name)
        if not callable(actual):
            return actual

        def called(*arguments: Any, **options: Any) -> Any:
            with torch.device("meta"):
                result = actual(*arguments, **options)
                return list(result) if isinstance(result, Iterator) else result

        return called


@pytest.mark.parametrize("name", CALLS)
def test_the_default_device_changes_no_result(name: str) -> None:
    first, *others = CALLS[name]
    expected = [_frozen(result) for result in _made(CALLS[name], set())]
    with torch.device("meta"):
        made = first(None)
    assert [_frozen(call(Elsewhere(made))) for call in others] == expected


def under(dtype: torch.dtype, call: Callable[[], Any]) -> Any:
    """Call a function with another default dtype."""
    torch.set_default_dtype(dtype)
    try:
        return call()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_discount_does_not_depend_on_the_default_dtype(dtype: torch.dtype) -> None:
    def returns() -> Any:
        storage = make_storage(4, 4)
        for step in range(4):
            storage.add_transitions(transitions[step])
        storage.compute_returns(last_values, 0.99, 0.95, truncation="value")
        return storage.returns, storage.advantages

    time_outs = torch.tensor([True, False, True, False])
    transitions = [
        make_transition(step, 4, done=time_outs, time_outs=time_outs) for step in range(4)
    ]
    last_values = torch.ones(4)
    assert _frozen(under(dtype, returns)) == _frozen(returns())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_numbers_in_lists_do_not_depend_on_the_default_dtype(
    dtype: torch.dtype,
) -> None:
    def priorities() -> Any:
        buffer = TrajectoryDictBuffer([steps(4), steps(5), steps(6)], end_key="end", generator=0)
        buffer.update_priorities([0.1, 0.9, 0.7])
        return buffer.priorities, motion_priorities([0.1, 0.9, 0.7])

    assert _frozen(under(dtype, priorities)) == _frozen(priorities())


def _made(calls: list[Call], inside: set[int]) -> list[Any]:
    """Return the result of each call. Calls in `inside` run in inference mode."""
    made, results = None, []
    for place, call in enumerate(calls):
        with torch.inference_mode() if place in inside else nullcontext():
            actual = call(made)
        if place == 0:
            made = actual
        else:
            results.append(actual)
    return results


def _frozen(result: Any) -> Any:
    """Convert results to values that can be compared bit by bit."""
    if isinstance(result, torch.Tensor):
        values = result.float() if result.dtype is torch.bfloat16 else result
        return str(result.dtype), tuple(result.shape), values.contiguous().numpy().tobytes()
    if isinstance(result, dict):
        return {key: _frozen(value) for key, value in flatten(result).items()}
    if isinstance(result, (list, tuple)):
        return [_frozen(value) for value in result]
    return result
