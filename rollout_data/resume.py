"""Resuming a stream: its position as plain data, and back.

One rule: the state says what was delivered, in words that stay true when files come and go:
trajectories by writer and number, and how far each writer's blocks were known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from storage.errors import UsageError

from .cursor import Deal, StreamState
from .sharding import current_shard
from .sources import writers_upto

if TYPE_CHECKING:
    from .rollout_dataset import RolloutDataset

_VERSION = 1


class Position(NamedTuple):
    """Where a stream stands: immutable, so that keeping one costs nothing."""

    state: StreamState
    deal: Deal


def position_of(dataset: RolloutDataset) -> Position:
    """The position of a dataset that was started."""
    assert dataset._deal is not None
    return Position(dataset._state, dataset._deal)


def state_at(dataset: RolloutDataset, position: Position) -> dict[str, Any]:
    """Write a position down as plain data (numbers, strings, lists, dicts)."""
    state, deal = position
    keys = deal.source.index.keys(state.trajectory)
    writers = sorted({writer for writer, _ in keys})
    return {
        "version": _VERSION,
        "is_started": True,
        "settings": _settings(dataset),
        "shard": list(dataset._shard),
        "epoch": dataset._epoch,
        "pass": deal.number,
        "position": state.position,
        "num_in_pass": len(deal.order),
        "upto": writers_upto(deal.source.index),
        "writers": writers,
        "trajectory": [[writers.index(writer), number] for writer, number in keys],
        "frame": state.frame.tolist(),
        "is_first": state.is_first.tolist(),
        "is_exhausted": state.is_exhausted.tolist(),
    }


def restore(dataset: RolloutDataset, saved: Mapping[str, Any]) -> None:
    """Put a dataset at a saved position.

    Raises:
        UsageError: The state is of another version, dataset, setting or shard.
    """
    try:
        _check(dataset, saved)
        position = _position(dataset, saved)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as cause:
        if isinstance(cause, UsageError):
            raise
        raise _misfit(dataset, "a state as state_dict() gives it", f"{type(cause).__name__}: {cause}") from cause
    dataset._go_to(position)


def _position(dataset: RolloutDataset, saved: Mapping[str, Any]) -> Position:
    source = dataset.source
    source.refresh()
    store = source.snapshot(upto=saved["upto"])
    keys = [(saved["writers"][writer], int(number)) for writer, number in saved["trajectory"]]
    numbers = store.index.find(keys)
    if (numbers < 0).any():
        writer, number = keys[int(np.argmin(numbers))]
        raise _misfit(dataset, f"trajectory {number} of writer {writer!r}", "it is not there any more")
    dataset._epoch = int(saved["epoch"])
    deal = dataset._new_dealer().dealt(int(saved["pass"]), store, numbers)
    if len(deal.order) != saved["num_in_pass"]:
        raise _misfit(dataset, f"{saved['num_in_pass']} trajectories in the pass", str(len(deal.order)))
    state = StreamState(
        numbers,
        np.array(saved["frame"], np.int64),
        np.array(saved["is_first"], bool),
        np.array(saved["is_exhausted"], bool),
        int(saved["position"]),
    )
    _check_state(dataset, state, deal)
    return Position(state, deal)


def _check_state(dataset: RolloutDataset, state: StreamState, deal: Deal) -> None:
    """Raise unless a state could have been written by `state_at`."""
    shapes = {column.shape for column in (state.trajectory, state.frame, state.is_first, state.is_exhausted)}
    if shapes != {(dataset.num_envs,)}:
        raise _misfit(dataset, f"{dataset.num_envs} numbers of each kind", str(sorted(shapes)))
    last = deal.lengths[state.trajectory] - (~state.is_exhausted).astype(np.int64)
    if ((state.frame < 0) | (state.frame > last)).any():
        raise _misfit(dataset, "frames within their trajectories", str(state.frame.tolist()[:8]))
    if not 0 <= state.position <= len(deal.order) or deal.number < 0 or not dataset._passes.has_pass(deal.number):
        raise _misfit(dataset, "a position within a pass", f"position {state.position} of pass {deal.number}")


def _settings(dataset: RolloutDataset) -> dict[str, Any]:
    """What decides the order of frames."""
    settings = asdict(dataset._passes)
    settings["starting_frame_range"] = list(settings["starting_frame_range"])
    for name in ("wait_timeout_s", "poll_interval_s"):
        del settings[name]
    return {"num_envs": dataset.num_envs, **settings}


def _check(dataset: RolloutDataset, saved: Mapping[str, Any]) -> None:
    if saved.get("version") != _VERSION:
        raise _misfit(dataset, f"a state of version {_VERSION}", repr(saved.get("version")))
    for name, mine in _settings(dataset).items():
        if saved["settings"].get(name) != mine:
            raise _misfit(dataset, f"{name}={mine!r} as in this dataset", repr(saved["settings"].get(name)))
    shard = current_shard()
    if list(saved["shard"]) != list(shard):
        raise _misfit(
            dataset, f"the state of shard {shard.number} of {shard.total}", "shard {} of {}".format(*saved["shard"])
        )


def _misfit(dataset: RolloutDataset, expected: str, got: str) -> UsageError:
    return UsageError(
        "continue the stream", f"of {dataset.data_dir!r}", expected, got, "Load the state into the dataset that gave it"
    )
