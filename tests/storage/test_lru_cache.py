"""Tests of `LruCache`."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from operator import attrgetter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.core.lru_cache import LruCache

CALLS = st.lists(st.tuples(st.sampled_from(["get", "put", "pop"]), st.integers(0, 5)))


@given(CALLS, st.integers(1, 4))
def test_the_least_recently_used_items_are_evicted(calls, max_items):
    cache = LruCache(max_items)
    model = OrderedDict()
    for number, (call, key) in enumerate(calls):
        if call == "put":
            evicted = [model.pop(key)] if key in model else []
            model[key] = number
            if len(model) > max_items:
                evicted.append(model.popitem(last=False)[1])
            assert cache.put(key, number) == evicted
        elif call == "get":
            assert cache.get(key) == model.get(key)
            if key in model:
                model.move_to_end(key)
        else:
            assert cache.pop(key) == model.pop(key, None)


@pytest.mark.parametrize("keeps_last", [False, True])
def test_an_item_above_the_limit_is_cached_only_as_the_last_one(keeps_last):
    cache = LruCache(100, attrgetter("nbytes"), keeps_last)
    small = np.zeros(60, np.uint8)
    large = np.zeros(200, np.uint8)
    assert cache.put("small", small) == []
    evicted = cache.put("large", large)
    assert [id(item) for item in evicted] == [id(small if keeps_last else large)]
    assert (cache.get("large") is large) is keeps_last
    assert (cache.get("small") is small) is not keeps_last


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copied_cache_is_empty(copied):
    cache = LruCache(100, attrgetter("nbytes"))
    cache.put("rows", np.zeros(60, np.uint8))
    other = copied(cache)
    assert other.get("rows") is None
    assert other.max_size == 100
    other.put("rows", np.zeros(60, np.uint8))
    other.put("more", np.zeros(60, np.uint8))
    assert other.get("rows") is None
    cache.clear()
    assert cache.get("rows") is None
