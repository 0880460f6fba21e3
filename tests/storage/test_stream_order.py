"""Reads and writes of a storage from several CUDA streams, on streams that only note which events they wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import storage
from storage import (
    DictBuffer,
    QueueRolloutStorage,
    ReplayBuffer,
    RolloutStorage,
    SarsaRolloutStorage,
)
from storage.core.memory import StreamOrder
from tests.storage.rollouts import make_storage, make_transition


class Stream:
    """A stream with a number of pieces of work, which knows how many of each stream it comes after."""

    def __init__(self, name: str) -> None:
        self.cuda_stream = name
        self.num_done = 0
        self.comes_after: dict[str, int] = {}

    def wait_event(self, event: Event) -> None:
        for name, count in event.comes_after.items():
            self.comes_after[name] = max(count, self.comes_after.get(name, 0))


class Event:
    def record(self, stream: Stream) -> None:
        stream.num_done += 1
        self.comes_after = {**stream.comes_after, stream.cuda_stream: stream.num_done}


class Streams:
    """Two streams; `on` makes calls from one of them."""

    def __init__(self) -> None:
        self.a, self.b = Stream("a"), Stream("b")
        self.current = self.a

    def on(self, stream: Stream, call: Callable[[], Any]) -> Any:
        self.current = stream
        return call()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Let objects on the CPU order streams as those on a GPU do: without one nothing else can show it."""
    found, make = Streams(), StreamOrder.__init__

    def made(order: StreamOrder, device: torch.device) -> None:
        make(order, device)
        order.is_needed = True

    monkeypatch.setattr(StreamOrder, "__init__", made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: found.current)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return found


def rollout(kind: type) -> Any:
    made = make_storage(4, 3, kind)
    for step in range(3):
        made.add_transitions(transition_of(made, step))
    made.compute_returns(torch.zeros(4, 1), 0.9, 0.9)
    return made


def transition_of(made: Any, step: int) -> Any:
    transition = make_transition(step, 4)
    if isinstance(made, SarsaRolloutStorage):
        transition.next_observations = transition.observations
        transition.next_critic_observations = transition.critic_observations
    return transition


def add_steps(made: Any) -> None:
    made.clear()
    made.add_transitions(transition_of(made, 7))


def take_batches(made: Any) -> None:
    list(made.mini_batch_generator(2, 1))


def assign(made: Any) -> None:
    made.returns = torch.zeros_like(made.returns)


def rows(num: int = 6) -> dict[str, torch.Tensor]:
    number = torch.arange(float(num)).unsqueeze(1)
    return {"observation": number, "done": number % 3 == 2}


def ring() -> Any:
    made = DictBuffer(12, end_key="done", generator=0)
    made.extend(rows())
    return made


def windows() -> Any:
    made = storage.PrioritizedWindows(12, 2, generator=0)
    made.extend({name: leaf.unsqueeze(1) for name, leaf in rows().items()})
    return made


def pairs() -> Any:
    made = ReplayBuffer(2, 8, generator=0)
    made.insert(torch.zeros(4, 2), torch.ones(4, 2))
    return made


def managed() -> Any:
    made = storage.AdvancedReplayBuffer(8, generator=0)
    made.extend_tensors({"x": torch.zeros(4, 1)})
    return made


def vectors() -> Any:
    made = storage.ZBuffer(8, 2, generator=0)
    made.add(torch.zeros(4, 2))
    return made


def expert() -> Any:
    return storage.TrajectoryDictBuffer(
        [rows(3) | {"done": torch.arange(3).unsqueeze(1) == 2}] * 2, generator=0
    )


KINDS = (RolloutStorage, QueueRolloutStorage, SarsaRolloutStorage)
#: What is made, what writes to it, what reads from it.
CASES: dict[
    str, tuple[Callable[[], Any], list[Callable[[Any], Any]], list[Callable[[Any], Any]]]
] = {
    kind.__name__: (
        lambda kind=kind: rollout(kind),
        [
            add_steps,
            assign,
            lambda x: x.compute_returns(torch.zeros(4, 1), 0.9, 0.9),
            lambda x: load(x),
        ],
        [
            take_batches,
            lambda x: list(x.mini_batch_generator(2, 1, reshuffle="once")),
            lambda x: list(x.recurrent_mini_batch_generator(2, 1)),
            lambda x: x.get_statistics(),
            lambda x: x.state_dict(),
        ],
    )
    for kind in KINDS
}
CASES |= {
    "DictBuffer": (
        ring,
        [lambda x: x.extend(rows()), lambda x: x.extend(rows(), final={"observation": torch.zeros(6, 1)}),
         lambda x: x.clear(), lambda x: load(x)],
        [lambda x: x.sample(4), lambda x: x.sample_transitions(4), lambda x: x.get_full_buffer(),
         lambda x: x.state_dict()],
    ),
    "PrioritizedWindows": (
        windows,
        [lambda x: x.extend({name: leaf.unsqueeze(1) for name, leaf in rows().items()}),
         lambda x: x.update_priorities(x.sample(2)[2], 0.5), lambda x: x.clear(), lambda x: load(x)],
        [lambda x: x.sample(2), lambda x: x.state_dict()],
    ),
    "ReplayBuffer": (
        pairs,
        [lambda x: x.insert(torch.zeros(2, 2), torch.zeros(2, 2)), lambda x: load(x)],
        [lambda x: x.sample(2), lambda x: x.state_dict()],
    ),
    "AdvancedReplayBuffer": (
        managed,
        [lambda x: x.extend_tensors({"x": torch.zeros(2, 1)}),
         lambda x: x.update_priorities(x.sample_tensors(2)[2], 0.5)],
        [lambda x: x.sample_tensors(2), lambda x: x.sample(2)],
    ),
    "ZBuffer": (vectors, [lambda x: x.add(torch.zeros(2, 2))], [lambda x: x.sample(2), lambda x: x.state_dict()]),
    "TrajectoryDictBuffer": (
        expert,
        [lambda x: x.update_priorities([1.0, 2.0])],
        [lambda x: x.sample(2), lambda x: x.get_full_buffer(), lambda x: x.state_dict()],
    ),
}  # fmt: skip


def load(made: Any) -> None:
    made.load_state_dict(made.state_dict())


@pytest.mark.parametrize(
    ("kind", "write", "read"),
    [
        (kind, write, read)
        for kind, (_, writes, reads) in CASES.items()
        for write in range(len(writes))
        for read in range(len(reads))
    ],
)
def test_writes_wait_for_readers_on_other_streams_and_readers_for_writes(
    streams, kind, write, read
):
    make, writes, reads = CASES[kind]
    made = streams.on(streams.a, make)
    num_written = streams.a.num_done
    streams.on(streams.b, lambda: reads[read](made))
    assert streams.b.comes_after["a"] == num_written, "the reader waits for what was written"
    num_read = streams.b.num_done
    assert num_read, "the reader says that it has read"
    streams.on(streams.a, lambda: writes[write](made))
    assert streams.a.comes_after["b"] == num_read, "the writer waits for the reader"


def test_a_rollout_storage_waits_for_each_batch_of_a_generator(streams):
    made = streams.on(streams.a, lambda: rollout(RolloutStorage))
    batches = made.mini_batch_generator(3, 1)
    for _ in range(3):
        streams.on(streams.b, lambda: next(batches))
        num_read = streams.b.num_done
        streams.on(streams.a, lambda: assign(made))
        assert streams.a.comes_after["b"] == num_read


GENERATORS: dict[str, Callable[[Any], Any]] = {
    "epoch": lambda x: x.mini_batch_generator(2, 2),
    "once": lambda x: x.mini_batch_generator(2, 2, reshuffle="once"),
    "recurrent": lambda x: x.recurrent_mini_batch_generator(2, 2),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_batches_drawn_on_another_stream_wait_for_what_they_share(streams, name):
    made = streams.on(streams.a, lambda: rollout(RolloutStorage))
    num_written = streams.a.num_done
    batches = GENERATORS[name](made)
    streams.on(streams.a, lambda: next(batches))
    streams.on(streams.b, lambda: next(batches))
    assert streams.b.comes_after["a"] > num_written


def test_no_stream_waits_for_itself(streams, monkeypatch):
    made = streams.on(streams.a, lambda: rollout(RolloutStorage))
    monkeypatch.setattr(Stream, "wait_event", lambda stream, event: pytest.fail("a needless wait"))
    streams.on(streams.a, lambda: take_batches(made))
    streams.on(streams.a, lambda: add_steps(made))


def test_reading_an_attribute_waits_for_writes_of_other_streams(streams):
    made = streams.on(streams.a, lambda: rollout(RolloutStorage))
    streams.on(streams.b, lambda: made.returns)
    assert streams.b.comes_after["a"] == streams.a.num_done


def test_readers_wait_for_the_final_observations_of_a_step(streams):
    made = make_storage(4, 3, SarsaRolloutStorage)
    streams.on(streams.a, lambda: made.add_transitions(transition_of(made, 0)))
    streams.on(streams.b, lambda: made.state_dict())
    assert streams.b.comes_after["a"] == streams.a.num_done


def test_growing_waits_for_readers_on_other_streams(streams):
    made = make_storage(4, 3, QueueRolloutStorage, buffer_dilation_ratio=3)
    for step in range(3):
        streams.on(streams.a, lambda step=step: made.add_transitions(transition_of(made, step)))
    made.compute_returns(torch.zeros(4, 1), 0.9, 0.9)
    streams.on(streams.b, lambda: take_batches(made))
    num_read = streams.b.num_done
    streams.on(streams.a, made.clear)
    assert streams.a.comes_after["b"] == num_read
