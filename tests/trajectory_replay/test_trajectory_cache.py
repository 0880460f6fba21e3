"""The cache has the newest trajectories, exactly. Its memory follows the number of rows."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_data.trajectories.trajectory_cache import TrajectoryCache
from storage.errors import MissingFieldError, UsageError


def flat(number: int, lengths: dict[str, int]) -> dict[str, Any]:
    """Create a trajectory whose keys have different lengths."""
    made: dict[str, Any] = {"obs": {}}
    for place, (name, length) in enumerate(lengths.items()):
        leaf = torch.arange(length * 2).view(length, 2).float() + 1000 * number + 100_000 * place
        (made["obs"] if name.startswith("o") else made)[name] = leaf
    return {name: leaf for name, leaf in made.items() if name != "obs" or leaf}


def leaves(tree: dict[str, Any]) -> dict[str, torch.Tensor]:
    result = {}
    for name, leaf in tree.items():
        result.update(
            {f"{name}/{item}": x for item, x in leaves(leaf).items()}
            if isinstance(leaf, dict)
            else {name: leaf}
        )
    return result


LENGTHS = st.dictionaries(st.sampled_from(["a", "b", "oa", "ob"]), st.integers(1, 9), min_size=1)


@settings(max_examples=100)
@given(
    max_size=st.integers(0, 4), puts=st.lists(st.tuples(st.integers(0, 8), LENGTHS), max_size=20)
)
def test_the_cache_equals_an_ordered_dict(
    max_size: int, puts: list[tuple[int, dict[str, int]]]
) -> None:
    """Trap R7."""
    cache, model = TrajectoryCache(max_size), OrderedDict()
    for step, (number, lengths) in enumerate(puts):
        given_ = flat(step, lengths)
        cache.put(number, given_)
        model.pop(number, None)
        model[number] = {name: x.clone() for name, x in leaves(given_).items()}
        if max_size and len(model) > max_size:
            model.popitem(last=False)
        assert cache.ids == list(model) and len(cache) == len(model)
        for item in range(9):
            assert (item in cache) == (item in model)
        for item, expected in model.items():
            actual = leaves(cache.get(item))
            assert actual.keys() == expected.keys()
            assert all(torch.equal(actual[name], expected[name]) for name in expected)
    cache.clear()
    assert len(cache) == 0 and cache.nbytes == 0 and not any(number in cache for number in range(9))


def test_get_returns_a_copy() -> None:
    cache, given_ = TrajectoryCache(2), {"x": torch.ones(3, 4)}
    cache.put(0, given_)
    given_["x"].zero_()
    cache.get(0)["x"].zero_()
    assert cache.get(0)["x"].sum() == 12


def test_memory_does_not_grow_when_trajectories_come_and_go() -> None:
    cache = TrajectoryCache(3)
    for number in range(200):
        cache.put(number, {"x": torch.zeros(10 + number % 7, 50)})
    assert cache.nbytes < 8 * 17 * 208


def test_memory_follows_the_rows() -> None:
    """Trap R7: memory is not slots times the longest."""
    cache = TrajectoryCache(4)
    for number, num_steps in enumerate([3, 3, 200, 3, 3, 3, 3, 150, 3, 3, 3, 3]):
        cache.put(number, {"x": torch.zeros(num_steps, 50)})
    assert cache.nbytes < 450 * 200


def test_get_of_an_unknown_id_raises_with_the_id() -> None:
    cache = TrajectoryCache(1)
    cache.put(0, {"x": torch.ones(1)})
    cache.put(1, {"x": torch.ones(1)})
    with pytest.raises(
        MissingFieldError,
        match=r"trajectory_id .* is not in the cache, which has 1 trajectories",
    ):
        cache.get(0)


@pytest.mark.parametrize("max_size", [-1, 1.5, True])
def test_the_size_is_checked(max_size: Any) -> None:
    with pytest.raises(ValueError, match=r"max_size must be .*>= 0"):
        TrajectoryCache(max_size)


@pytest.mark.parametrize("given_", [{}, {"x": torch.tensor(1)}, {"x": torch.zeros(0, 3)}])
def test_a_trajectory_without_rows_raises(given_: dict[str, Any]) -> None:
    cache = TrajectoryCache(1)
    with pytest.raises(UsageError, match=r"^TrajectoryCache.put: "):
        cache.put(0, given_)
    assert len(cache) == 0


def test_threads_put_and_get_at_once() -> None:
    """Trap R8."""
    cache, failures = TrajectoryCache(5), []

    def work(start: int) -> None:
        for number in range(start, 400, 4):
            cache.put(number, {"x": torch.full((1 + number % 6, 3), float(number))})
            for name in cache.ids:
                try:
                    if not (cache.get(name)["x"] == name).all():
                        failures.append(name)
                except MissingFieldError:
                    pass

    threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len(cache) == 5


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (5, "trajectory must be a nested mapping of tensors, got int"),
        ({"a": torch.ones(2), "task": "walk"}, r"'task' of trajectory .*, got str"),
    ],
)
def test_a_value_that_is_not_a_trajectory_raises(what: Any, text: str) -> None:
    cache = TrajectoryCache(2)
    with pytest.raises(UsageError, match=text):
        cache.put(0, what)
    assert 0 not in cache
