"""Reads and writes of a storage from several CUDA streams.

The test streams record the events that they wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import isabstract
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import storage
from rollout_data.sources.live_source import LiveSource
from rollout_data.sources.rows.cached_rows import CachedRows
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
)
from storage.adapters.rsl_rl import RslRlStorage
from storage.adapters.step_pairs import StepPairs
from storage.core.memory import StreamOrder
from storage.saving.saved_store import STORES
from tests.files.recorded import record
from tests.storage.rollouts import make_storage, make_transition, replace_tensordict

#: Call of an object.
Call = Callable[[Any], Any]


class Stream:
    """A stream that counts its work, and knows how much work of each other stream is before it."""

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
    """Two streams. `on` makes calls on one of them."""

    def __init__(self) -> None:
        self.a, self.b = Stream("a"), Stream("b")
        self.current = self.a

    def on(self, stream: Stream, call: Callable[[], Any]) -> Any:
        self.current = stream
        return call()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Let objects on the CPU order streams as on a GPU, because a machine without a GPU has no
    other way to show it.
    """
    actual, make = Streams(), StreamOrder.__init__

    def made(order: StreamOrder, device: torch.device) -> None:
        make(order, torch.device("cuda"))

    monkeypatch.setattr(StreamOrder, "__init__", made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: actual.current)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    replace_tensordict(monkeypatch)
    return actual


def transition_of(made: Any, step: int) -> Any:
    transition = make_transition(step, 4)
    if isinstance(made, SarsaRolloutStorage):
        transition.next_observations = transition.observations
        transition.next_critic_observations = transition.critic_observations
    if isinstance(made, ActionLabelRollout):
        transition.action_labels = transition.actions
    if isinstance(made, RslRlStorage):
        transition.observations = {"policy": transition.observations}
        transition.critic_observations = transition.action_mean = transition.action_sigma = None
    if isinstance(made, RslRlStorage) and made.training_type == "distillation":
        transition.values = transition.actions_log_prob = None
        transition.privileged_actions = transition.actions
    return transition


def rollout(kind: type) -> Any:
    made = make_storage(4, 3, kind)
    for step in range(3):
        made.add_transitions(transition_of(made, step))
    made.compute_returns(torch.zeros(4, 1), 0.9, 0.9)
    return made


def rollout_of_rsl_rl(training_type: str = "rl") -> Any:
    observations = {"policy": torch.zeros(4, 3)}
    made = RslRlStorage(training_type, 4, 3, observations, (2,), generator=0)
    for step in range(3):
        made.add_transition(transition_of(made, step))
    return made


def returns_of_rsl_rl() -> Any:
    made = rollout_of_rsl_rl()
    made.compute_returns(torch.zeros(4, 1), 0.9, 0.9)
    return made


def add_steps(made: Any) -> None:
    made.clear()
    made.add_transitions(transition_of(made, 7))


def take_batches(made: Any) -> None:
    list(made.mini_batch_generator(2, 1))


def assign(made: Any) -> None:
    made.returns = torch.zeros_like(made.returns)


def load(made: Any) -> None:
    made.load_state_dict(made.state_dict())


def save(made: Any) -> None:
    with TemporaryDirectory() as folder:
        made.save(folder + "/saved")


def clear_and(add: Call) -> Call:
    """Return a call that clears the object and adds rows: `clear` alone may write nothing."""

    def call(made: Any) -> None:
        made.clear()
        add(made)

    return call


def rows(num: int = 6) -> dict[str, torch.Tensor]:
    number = torch.arange(float(num)).unsqueeze(1)
    return {"observation": number, "done": number % 3 == 2}


def lanes(num: int = 6) -> dict[str, torch.Tensor]:
    return {name: leaf.unsqueeze(1) for name, leaf in rows(num).items()}


def filled(make: Callable[[], Any], add: Call) -> Callable[[], Any]:
    def made() -> Any:
        empty = make()
        add(empty)
        return empty

    return made


def episodes() -> list[list[dict[str, torch.Tensor]]]:
    return [[{"x": torch.zeros(1)}] * 3] * 2


def expert() -> Any:
    return TrajectoryDictBuffer(
        [rows(3) | {"done": torch.arange(3).unsqueeze(1) == 2}] * 2, generator=0
    )


class Case(NamedTuple):
    """Calls of a class.

    Attributes:
        make: Creates an object with rows.
        writes: Calls that write.
        reads: Calls that read.
    """

    make: Callable[[], Any]
    writes: list[Call]
    reads: list[Call]


def case(make: Callable[[], Any], add: Call, writes: list[Call], reads: list[Call]) -> Case:
    """Return the case of a class that adds rows with `add` to an empty object of `make`."""
    all_writes = [add, clear_and(add), load, *writes]
    return Case(filled(make, add), all_writes, [*reads, lambda x: x.state_dict(), save])


def case_of_rollouts(make: Callable[[], Any], *reads: Call) -> Case:
    return Case(
        make,
        [add_steps, assign, load, lambda x: x.compute_returns(torch.zeros(4, 1), 0.9, 0.9)],
        [
            take_batches,
            lambda x: list(x.mini_batch_generator(2, 1, reshuffle="once")),
            lambda x: list(x.recurrent_mini_batch_generator(2, 1)),
            lambda x: x.get_statistics(),
            lambda x: x.state_dict(),
            save,
            *reads,
        ],
    )


def extend(made: Any) -> None:
    made.extend(rows())


def extend_lanes(made: Any) -> None:
    made.extend(lanes())


def extend_tensors(made: Any) -> None:
    made.extend_tensors({"x": torch.zeros(4, 1)})


def manager() -> Any:
    made = BufferManager({"buffer_name": ["a"], "a": {"replay_buffer_size": 8}}, generator=0)
    made._order.is_needed = False  # On a GPU as well: only its buffers have rows.
    return made


def managers_buffer(made: BufferManager) -> AdvancedReplayBuffer:
    return made["a"]


#: Cases by the name of the class.
CASES: dict[str, Case] = {
    kind.__name__: case_of_rollouts(partial(rollout, kind))
    for kind in (RolloutStorage, QueueRolloutStorage, SarsaRolloutStorage, ActionLabelRollout)
}
CASES |= {
    "RslRlStorage": case_of_rollouts(returns_of_rsl_rl),
    "DictBuffer": case(
        lambda: DictBuffer(12, end_key="done", generator=0),
        extend,
        [lambda x: x.extend(rows(), final={"observation": torch.zeros(6, 1)}), DictBuffer.clear],
        [lambda x: x.sample(4), lambda x: x.sample_transitions(4), lambda x: x.get_full_buffer()],
    ),
    "TrajectoryDictBufferMultiDim": case(
        lambda: TrajectoryDictBufferMultiDim(12, n_dim=2, seq_length=2, generator=0),
        extend_lanes,
        [TrajectoryDictBufferMultiDim.clear],
        [lambda x: x.sample(4), lambda x: x.sample_transitions(4), lambda x: x.get_full_buffer()],
    ),
    "ReplayBuffer": Case(
        filled(lambda: ReplayBuffer(2, 8, generator=0),
               lambda x: x.insert(torch.zeros(4, 2), torch.ones(4, 2))),
        [lambda x: x.insert(torch.zeros(2, 2), torch.zeros(2, 2)), load],
        [lambda x: x.sample(2), lambda x: list(x.feed_forward_generator(2, 2)),
         lambda x: x.state_dict(), save],
    ),
    "ZBuffer": case(
        lambda: ZBuffer(8, 2, generator=0), lambda x: x.add(torch.zeros(2, 2)),
        [ZBuffer.clear], [lambda x: x.sample(2)],
    ),
    "TrajectoryDictBuffer": Case(
        expert,
        [lambda x: x.update_priorities([1.0, 2.0]), load],
        [lambda x: x.sample(2), lambda x: x.get_full_buffer(), lambda x: x.state_dict(),
         save],
    ),
    "PrioritizedWindows": case(
        lambda: PrioritizedWindows(12, 2, generator=0),
        extend_lanes,
        [lambda x: x.update_priorities(x.sample(2)[2], 0.5), PrioritizedWindows.clear],
        [lambda x: x.sample(2)],
    ),
    "AdvancedReplayBuffer": case(
        lambda: AdvancedReplayBuffer(8, generator=0),
        extend_tensors,
        [lambda x: x.update_priorities(x.sample_tensors(2)[2], 0.5), AdvancedReplayBuffer.clear,
         lambda x: x.push([{"x": torch.zeros(1)}])],
        [lambda x: x.sample_tensors(2), lambda x: x.sample(2)],
    ),
    "NaiveReplayBuffer": case(
        lambda: NaiveReplayBuffer(8, generator=0), lambda x: x.push([{"x": torch.zeros(1)}] * 3),
        [], [lambda x: x.sample(2)],
    ),
    "EpisodeReplayBuffer": case(
        lambda: EpisodeReplayBuffer(8, generator=0), lambda x: x.push(episodes()),
        [lambda x: x.push([[{"x": torch.zeros(1)}] * 300])],  # The memory grows.
        [lambda x: x.sample(2), lambda x: x.sample_windows(2, 2)],
    ),
    "BufferManager": case(
        manager,
        lambda x: x.push([{"x": torch.zeros(1)}] * 3),
        [lambda x: x.update_priorities({"a": managers_buffer(x).sample_tensors(2)[2]}, {"a": 0.5}),
         BufferManager.clear],
        [lambda x: x.sample_tensors(2), lambda x: x.sample(2)],
    ),
}  # fmt: skip


def test_every_public_storage_has_a_case():
    public = {name for name in storage.__all__ if name in STORES} | {"RslRlStorage"}
    assert public == set(CASES)
    of_package = {name for name, kind in STORES.items() if kind.__module__.startswith("storage.")}
    has_no_case = of_package - set(CASES)
    assert all(isabstract(STORES[name]) or name == "RowBuffer" for name in has_no_case)


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
    num_written = streams.a.num_done
    streams.on(streams.b, made.state_dict)
    assert streams.b.comes_after["a"] == num_written, "readers wait for each write"


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


#: Objects without rows, each with its first write.
NEW_OBJECTS: dict[str, tuple[Callable[[], Any], Call]] = {
    "RolloutStorage": (
        lambda: make_storage(4, 3),
        lambda x: x.add_transitions(transition_of(x, 0)),
    ),
    "DictBuffer": (lambda: DictBuffer(12, end_key="done", generator=0), extend),
    "ReplayBuffer": (
        lambda: ReplayBuffer(2, 8, generator=0),
        lambda x: x.insert(torch.zeros(4, 2), torch.ones(4, 2)),
    ),
    "ZBuffer": (lambda: ZBuffer(8, 2, generator=0), lambda x: x.add(torch.zeros(2, 2))),
    "AdvancedReplayBuffer": (lambda: AdvancedReplayBuffer(8, generator=0), extend_tensors),
    "PrioritizedWindows": (lambda: PrioritizedWindows(12, 2, generator=0), extend_lanes),
}


@pytest.mark.parametrize("kind", NEW_OBJECTS)
def test_the_first_write_waits_for_the_constructor_on_another_stream(streams, kind):
    make, write = NEW_OBJECTS[kind]
    made = streams.on(streams.a, make)
    assert streams.a.num_done == 0
    streams.on(streams.b, lambda: write(made))
    assert streams.b.comes_after["a"] == streams.a.num_done > 0
    num_written = streams.b.num_done
    streams.on(streams.a, lambda: write(made))
    assert streams.a.comes_after["b"] == num_written


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("RolloutStorage", "returns"),
        ("RolloutStorage", "saved_hidden_states"),
        ("DictBuffer", "storage"),
        ("TrajectoryDictBuffer", "storage"),
        ("ReplayBuffer", "states"),
        ("ReplayBuffer", "next_states"),
    ],
)
def test_reading_an_attribute_waits_for_writes_of_other_streams(streams, kind, name):
    made = streams.on(streams.a, CASES[kind].make)
    streams.on(streams.b, lambda: getattr(made, name))
    assert streams.b.comes_after["a"] == streams.a.num_done


def test_steps_of_a_distillation_wait_for_writes_and_later_writes_for_them(streams):
    made = streams.on(streams.a, lambda: rollout_of_rsl_rl("distillation"))
    num_written = streams.a.num_done
    streams.on(streams.b, lambda: list(made.generator()))
    assert streams.b.comes_after["a"] == num_written
    num_read = streams.b.num_done
    streams.on(streams.a, lambda: add_steps(made))
    assert streams.a.comes_after["b"] == num_read


def test_the_waiting_step_of_pairs_is_read_after_it_was_written(streams):
    pairs = StepPairs(DictBuffer(12, end_key="done", generator=0), ("done",))
    step = {name: leaf.view(6, 1, 1) for name, leaf in rows().items()}
    following = {"observation": step["observation"]}
    for stream, other in ((streams.a, streams.b), (streams.b, streams.a)) * 2:
        num_done = other.num_done
        streams.on(stream, lambda: pairs.add(step, following))
        assert stream.comes_after.get(other.cuda_stream, 0) == num_done


def test_rows_in_a_cache_are_read_after_they_were_copied(streams, tmp_path):
    record(tmp_path, [5, 3], with_final=True)
    source = LiveSource(tmp_path)
    source.refresh()
    snapshot = source.snapshot()
    cached = streams.on(streams.a, lambda: CachedRows(snapshot, np.arange(2), torch.device("cpu")))
    num_copied = streams.a.num_done
    assert num_copied
    number = np.array([0])
    frames, finals = (next(iter(snapshot.layouts[table].columns)) for table in ("data", "final"))
    for read in (
        lambda: cached.column_rows(frames, number, number, number + 1),
        lambda: cached.final_rows(finals, number),
    ):
        streams.b.comes_after.clear()
        streams.on(streams.b, read)
        assert streams.b.comes_after["a"] == num_copied


def test_memory_that_is_replaced_is_kept_until_its_last_use(streams, monkeypatch):
    kept: list[int] = []
    monkeypatch.setattr(
        StreamOrder, "keep", lambda _, tensors: kept.extend(x.data_ptr() for x in tensors)
    )
    made = CASES["EpisodeReplayBuffer"].make()
    assert not kept
    CASES["EpisodeReplayBuffer"].writes[-1](made)
    assert len(kept) == 1  # The only column of the smaller memory.


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
