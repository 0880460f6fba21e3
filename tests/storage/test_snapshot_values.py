"""Saved item buffers: impossible numbers, and complex items."""

from __future__ import annotations

import pytest
import torch

from storage import (
    AdvancedReplayBuffer,
    EpisodeReplayBuffer,
    NaiveReplayBuffer,
    SchemaError,
    load_store,
)
from storage.errors import CorruptFileError


@pytest.mark.parametrize("name", ["max_priority", "num_draws"])
def test_an_invalid_number_of_a_state_raises(name):
    store = AdvancedReplayBuffer(4, generator=0)
    store.append({"x": torch.ones(2), "name": "a"})
    state = store.state_dict()
    for value in (float("nan"), float("inf"), -1, 10**400, True, None):
        with pytest.raises(SchemaError, match=f"{name}.* finite .*>= 0"):
            store.load_state_dict({**state, "numbers": {**state["numbers"], name: value}})
    assert store.sample(1) is not None


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("cls", [NaiveReplayBuffer, AdvancedReplayBuffer, EpisodeReplayBuffer])
def test_complex_items_are_kept(tmp_path, cls, dtype):
    items = [{"x": torch.randn(3, dtype=dtype), "y": torch.ones(2)} for _ in range(2)]
    store = cls(4, generator=0)
    store.append(items) if cls is EpisodeReplayBuffer else store.extend(items)
    buffer = cls(4, generator=1)
    buffer.load_state_dict(store.state_dict())
    store.save(tmp_path / "kept")
    first, *others = [item.sample(1)[0] for item in (store, buffer, load_store(tmp_path / "kept"))]
    for other in others:
        x, y = (
            item[0]["x"] if cls is EpisodeReplayBuffer else item["x"] for item in (first, other)
        )
        assert y.dtype == dtype and torch.equal(x, y)
    path = tmp_path / "kept" / "columns.hdf5"
    path.write_bytes(
        path.read_bytes().replace(items[0]["x"].numpy().tobytes(), bytes(items[0]["x"].nbytes))
    )
    with pytest.raises(CorruptFileError, match="checksum"):
        load_store(tmp_path / "kept")
