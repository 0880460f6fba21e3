"""Items arrive in order and ahead of time.

Each side notices the end and the errors of the other side.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.core.fields import flatten
from storage.errors import UsageError
from storage.live.prefetch import PipelinedDataCollector, to_device

Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Step:
    value: torch.Tensor
    name: str


class Source:
    """Counts the items taken from it. It can be iterated repeatedly."""

    def __init__(self, num_items: int = 1_000_000, fails_at: int | None = None) -> None:
        self.num_items, self.fails_at = num_items, fails_at
        self.num_made = 0
        self.made = threading.Condition()

    def __iter__(self) -> Iterator[int]:
        for item in range(self.num_items):
            if item == self.fails_at:
                raise KeyError("broken")
            with self.made:
                self.num_made += 1
                self.made.notify_all()
            yield item

    def wait_for(self, num_made: int) -> None:
        with self.made:
            assert self.made.wait_for(lambda: self.num_made >= num_made, 60)


#: Threads of producers that other tests of this process have left.
_before: set[threading.Thread] = set()


def producers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("prefetch")}


def num_producers() -> int:
    """Count the threads of producers that the current test has started."""
    return len(producers() - _before)


def wait_for_producers_to_end() -> None:
    """Wait for threads that were stopped without waiting, because their iteration was dropped."""
    for thread in producers() - _before:
        thread.join(60)
    assert num_producers() == 0


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    gc.collect()  # iterations of other tests that nothing holds any more
    _before.clear()
    _before.update(producers())
    yield
    gc.collect()
    wait_for_producers_to_end()


@pytest.mark.parametrize("num_got", [0, 1, 3])
def test_a_source_that_references_its_iterator_leaves_no_thread(num_got: int) -> None:
    source: Any = Source(3)
    source.items = iter(PipelinedDataCollector(source))
    assert [next(source.items) for _ in range(num_got)] == list(range(num_got))
    made = weakref.ref(source)
    del source
    for _ in range(6000):
        gc.collect()  # an item that is being made belongs to the thread
        if made() is None:
            break
        time.sleep(0.01)
    assert made() is None
    wait_for_producers_to_end()


@settings(max_examples=30)
@given(num_items=st.integers(0, 20), prefetch_count=st.integers(1, 5))
def test_all_items_are_yielded_once_in_order(num_items: int, prefetch_count: int) -> None:
    """Trap N6: the end is reported."""
    collector = PipelinedDataCollector(
        Source(num_items), "cpu", prefetch_count, transform=lambda item: item * 2
    )
    for _ in range(2):
        items = iter(collector)
        assert list(items) == [2 * item for item in range(num_items)]
        with pytest.raises(StopIteration):
            next(items)


@settings(max_examples=20)
@given(fails_at=st.integers(0, 6), prefetch_count=st.integers(1, 4))
def test_a_failure_is_raised_at_its_position(fails_at: int, prefetch_count: int) -> None:
    """Trap N6: a failure is not reported as the end."""
    collector = PipelinedDataCollector(Source(10, fails_at), prefetch_count=prefetch_count)
    result = []
    with pytest.raises(KeyError, match="broken"):
        for item in collector:
            result.append(item)
    assert result == list(range(fails_at))


def test_stop_iteration_in_a_transform_does_not_end_the_iteration() -> None:
    def stop(item: int) -> int:
        raise StopIteration

    with pytest.raises(RuntimeError, match="The source of prefetching raised StopIteration"):
        list(PipelinedDataCollector(Source(3), transform=stop))


def leave_loop(collector: PipelinedDataCollector[int]) -> None:
    for _ in collector:
        break


def drop_iterator(collector: PipelinedDataCollector[int]) -> None:
    items = iter(collector)
    next(items)


def drop_unused_iterator(collector: PipelinedDataCollector[int]) -> None:
    iter(collector)


def close_collector(collector: PipelinedDataCollector[int]) -> None:
    items = iter(collector)
    next(items)
    collector.close()
    collector.close()
    assert list(items) == []


def raise_in_loop(collector: PipelinedDataCollector[int]) -> None:
    with pytest.raises(ValueError, match="mine"):
        for _ in collector:
            raise ValueError("mine")


@pytest.mark.parametrize(
    "leave", [leave_loop, drop_iterator, drop_unused_iterator, close_collector, raise_in_loop]
)
def test_a_consumer_that_stops_early_ends_a_blocked_producer(leave: Callable[[Any], None]) -> None:
    """Trap N6."""
    source = Source()
    collector = PipelinedDataCollector(source, prefetch_count=2)
    for _ in range(3):
        leave(collector)
        gc.collect()
        wait_for_producers_to_end()
        assert source.num_made <= 3 * 4
    assert next(iter(collector)) == 0


def test_dropping_the_collector_stops_the_producer() -> None:
    source = Source()
    collector = PipelinedDataCollector(source, prefetch_count=2)
    items = iter(collector)
    source.wait_for(3)
    del collector, items
    gc.collect()
    wait_for_producers_to_end()


def test_the_garbage_collector_does_not_wait_for_the_thread() -> None:
    """It may run within a call with a lock that the thread needs, such as the start of another
    thread.
    """
    gate = threading.Event()
    is_at_gate = threading.Event()
    has_passed_gate: list[bool] = []

    def items_behind_gate() -> Iterator[int]:
        yield 0
        is_at_gate.set()
        has_passed_gate.append(gate.wait(60))
        yield 1

    cycle: list[Any] = []
    cycle.append(cycle)
    cycle.append(iter(PipelinedDataCollector(items_behind_gate())))
    assert next(cycle[1]) == 0
    assert is_at_gate.wait(60)
    del cycle
    gc.collect()
    gate.set()
    wait_for_producers_to_end()
    assert has_passed_gate == [True]


def test_a_second_concurrent_iteration_raises() -> None:
    """Trap N6."""
    collector = PipelinedDataCollector(Source())
    items = iter(collector)
    assert next(items) == 0
    with pytest.raises(RuntimeError, match="Another iteration over this collector is open"):
        iter(collector)
    assert next(items) == 1
    items.close()
    assert next(iter(collector)) == 0


def test_items_are_prefetched_and_their_lag_is_reported() -> None:
    """Trap N8."""
    source, version = Source(), [0]
    collector = PipelinedDataCollector(source, prefetch_count=3, stamp=lambda: version[0])
    assert collector.max_lag == 4
    items = iter(collector)
    source.wait_for(4)  # three wait and one is in the producer's hand
    version[0] = 7
    stamps = []
    for _ in range(6):
        next(items)
        stamps.append(collector.last_stamp)
        assert 0 <= collector.last_lag <= collector.max_lag
    assert stamps[:4] == [0, 0, 0, 0] and stamps[5] == 7
    source.wait_for(6 + 4)
    next(items)
    assert collector.last_lag >= 3


def test_tensors_at_any_depth_are_moved() -> None:
    item = {
        "a": torch.ones(2),
        "b": [torch.ones(1), ("x", Pair(torch.zeros(1), 3))],
        "c": Step(torch.ones(1), "y"),
    }
    moved = to_device(item, torch.device("meta"))
    assert (
        moved["a"].device.type
        == moved["b"][0].device.type
        == moved["b"][1][1].first.device.type
        == "meta"
    )
    assert moved["c"].value.device.type == "meta" and moved["c"].name == "y"
    assert moved["b"][1][0] == "x" and moved["b"][1][1].second == 3
    assert item["a"].device.type == "cpu"


class Sized(Mapping):
    """A record with a batch size and a `to` method, like a `TensorDict`."""

    def __init__(self, values: dict[str, torch.Tensor], batch_size: list[int]) -> None:
        self.values_by_name, self.batch_size, self.calls = values, batch_size, []

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.values_by_name[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_name)

    def __len__(self) -> int:
        return len(self.values_by_name)

    def to(self, device: torch.device, non_blocking: bool) -> Sized:
        moved = Sized({key: value.to(device) for key, value in self.items()}, self.batch_size)
        moved.calls = [non_blocking]
        return moved


@pytest.mark.gpu
def test_items_that_come_from_a_device_to_the_host_are_complete(any_device: None) -> None:
    item = torch.arange(5.0, device="cuda")
    assert torch.equal(to_device({"a": item}, torch.device("cpu"))["a"], torch.arange(5.0))


class Named(OrderedDict):
    """A dict class whose constructor accepts no dict."""

    def __init__(self, name: str, values: Any) -> None:
        super().__init__(values)
        self.name = name


class Prefixed(dict):
    """A dict class that adds a prefix to its keys."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__({f"x_{key}": value for key, value in values.items()})


def test_the_to_method_of_a_mapping_is_used() -> None:
    for item in PipelinedDataCollector([Sized({"a": torch.ones(3)}, [3])] * 2, "meta"):
        assert type(item) is Sized and item.batch_size == [3] and item.calls == [True]
        assert item["a"].device.type == "meta"
    nested = to_device({"a": (Sized({"b": torch.ones(3)}, [3]),)}, torch.device("meta"))
    assert nested["a"][0]["b"].device.type == "meta" and nested["a"][0].calls == [True]


@pytest.mark.parametrize(
    ("item", "kind"),
    [
        (OrderedDict(b=torch.ones(1), a=torch.ones(2)), OrderedDict),
        (defaultdict(list, b=torch.ones(1), a={"c": torch.ones(2)}), defaultdict),
        (UserDict(b=torch.ones(1)), UserDict),
        (MappingProxyType({"b": torch.ones(1)}), MappingProxyType),
        (Named("n", {"b": torch.ones(1)}), dict),
        (Prefixed({"b": torch.ones(1)}), dict),
        ({"b": torch.ones(1)}, dict),
    ],
)
def test_mappings_keep_their_type_if_it_accepts_a_dict(item: Any, kind: type) -> None:
    before = dict(item)
    moved = to_device(item, torch.device("meta"))
    assert type(moved) is kind and list(moved) == list(item)
    assert all(leaf.device.type == "meta" for leaf in flatten(dict(moved)).values())
    assert (
        all(leaf.device.type == "cpu" for leaf in flatten(dict(item)).values())
        and dict(item).keys() == before.keys()
    )
    if kind is defaultdict:
        assert moved["new"] == [] and "new" not in item


@pytest.mark.parametrize("prefetch_count", [0, -1, True, 1.5])
def test_prefetch_count_is_checked(prefetch_count: Any) -> None:
    with pytest.raises(UsageError, match=r"prefetch_count must be .*>= 1"):
        PipelinedDataCollector([], prefetch_count=prefetch_count)


@pytest.mark.gpu
def test_batches_are_on_the_gpu_and_complete_when_the_consumer_reads_them() -> None:
    """Trap N7."""
    source = (torch.full((1 << 20,), float(value)) for value in range(30))
    for value, item in enumerate(PipelinedDataCollector(source, "cuda")):
        assert item.device.type == "cuda" and bool((item == value).all())
        del item
