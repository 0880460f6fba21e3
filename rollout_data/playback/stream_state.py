"""The position of a stream as plain data, from which any number of ranks can resume it.

A state describes the frames that all ranks have delivered. It stays valid when files are added or
deleted: it names trajectories by writer and number, and the last known block of each writer.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from ..blocks.trajectory_index import Int64s, TrajectoryIndex
from .passes import Name, PassOptions, PassScheduler, Section, sections_at
from .step_planner import Bools, Position, StreamState

_VERSION = 4
#: Maximum number of frames of a trajectory. The sum over all envs then fits int64.
_MOST_FRAMES = 1 << 38
_KEYS = {
    "version", "is_started", "settings", "epoch", "pass", "upto", "bounds", "dealt", "writers", "trajectory", "length",
    "frame", "is_first", "is_exhausted",
}  # fmt: skip


def state_at(position: Position, scheduler: PassScheduler) -> dict[str, Any]:
    """Return a position as plain data (numbers, strings, lists, dicts)."""
    options = scheduler.options
    state, pass_order, left = position
    index = pass_order.source.index
    rest, fresh = sections_at(pass_order, state.position)
    live = {
        "turn": pass_order.turn,
        "left": left,
        "upto": rest.upto,
        "fresh": fresh and [fresh.bounds, fresh.last_assigned, fresh.since],
    }
    keys = scheduler.keys_of(index, state.trajectory)
    writers = sorted({writer for writer, _ in keys})
    return {
        "version": _VERSION,
        "is_started": True,
        "settings": {"num_envs": len(keys), **_settings(options)},
        "epoch": scheduler.epoch,
        "pass": pass_order.number,
        "upto": index.writers_upto(),
        "bounds": rest.bounds,
        "dealt": rest.last_assigned,
        "writers": writers,
        "trajectory": [[writers.index(writer), number] for writer, number in keys],
        "length": pass_order.lengths[state.trajectory].tolist(),
        "frame": state.frames(pass_order).tolist(),
        "is_first": state.is_first.tolist(),
        "is_exhausted": state.is_exhausted.tolist(),
        **({} if options.refresh_s is None else {"live": live}),
    }


class Misfit(Exception):
    """A saved state does not fit a dataset.

    The message continues the sentence "the state does not fit <dataset>: ", so "it" is the state.
    """


def check_settings(
    saved: Mapping[str, Any], options: PassOptions, num_envs: int, share: slice
) -> None:
    """Raise `Misfit` if a saved state has other settings than a dataset.

    Args:
        saved: The state.
        options: Options of the dataset.
        num_envs: Number of envs of this rank.
        share: The envs of this rank, as a slice of the envs in the state.
    """
    if saved.get("version") != _VERSION:
        raise Misfit(
            f"it has version {saved.get('version')!r}, expected {_VERSION}. "
            "Call set_epoch to begin an epoch without it."
        )
    if ("live" in saved) != (options.refresh_s is not None):
        recorded = "with refresh_s" if "live" in saved else "without refresh_s"
        raise Misfit(
            f"it was saved {recorded}, and this dataset has refresh_s={options.refresh_s}."
        )
    if saved.keys() - {"live"} != _KEYS:
        raise Misfit(f"it has the keys {sorted(saved)}, expected {sorted(_KEYS)}.")
    if share.stop - share.start != num_envs:
        all_envs = saved["settings"]["num_envs"]
        saved_envs = f"num_envs={all_envs}"
        if share != slice(0, all_envs):
            saved_envs += f" ({share.stop - share.start} for this rank)"
        raise Misfit(f"it has {saved_envs}, and this dataset has num_envs={num_envs}.")
    for name, setting in _settings(options).items():
        if saved["settings"].get(name) != setting:
            raise Misfit(
                f"it has {name}={saved['settings'].get(name)!r}, and this dataset has "
                f"{name}={setting!r}."
            )


def position_in(saved: Mapping[str, Any], scheduler: PassScheduler) -> Position:
    """Convert a saved state to the position of a stream.

    Raises:
        Misfit: A trajectory in the state does not exist, or the state contradicts itself.
    """
    live = saved.get("live", {"turn": saved["pass"], "left": 0, "upto": None, "fresh": None})
    turn = operator.index(live["turn"])
    left = operator.index(live["left"])
    keys = [(saved["writers"][writer], int(number)) for writer, number in saved["trajectory"]]
    snapshot = scheduler.resumed(turn, saved["upto"], _played(saved, keys))
    frame = np.array(saved["frame"], np.int64)
    is_first = np.array(saved["is_first"], bool)
    is_exhausted = np.array(saved["is_exhausted"], bool)
    trajectory = scheduler.numbers_of(snapshot.index, keys)
    shapes = {column.shape for column in (trajectory, frame, is_first, is_exhausted)}
    if shapes != {(saved["settings"]["num_envs"],)}:
        raise Misfit(
            f"its columns have the shapes {sorted(shapes)}, expected "
            f"({saved['settings']['num_envs']},)."
        )
    trajectory = _without_deleted(trajectory, is_exhausted, snapshot.index, keys)
    first, last = map(_name, saved["bounds"])
    rest = Section([first, last], _optional_name(saved["dealt"]), live["upto"])
    fresh = None
    if live["fresh"] is not None:
        bounds, dealt, since = live["fresh"]
        fresh = Section(
            bounds and [_name(bound) for bound in bounds], _optional_name(dealt), since=since
        )
    pass_order = scheduler.rest_of_pass(
        int(saved["pass"]), turn, snapshot, trajectory, (rest, fresh)
    )
    if pass_order.number < 0 or not scheduler.options.has_pass(pass_order.number):
        raise Misfit(
            f"it is in pass {pass_order.number}, which dataset_loops="
            f"{scheduler.options.dataset_loops} does not include."
        )
    frames_left = np.where(is_exhausted, 0, pass_order.lengths[trajectory] - frame)
    if ((frame < 0) | (frames_left < ~is_exhausted)).any():
        raise Misfit(f"its frames {frame.tolist()[:8]} are outside their trajectories.")
    return Position(StreamState(trajectory, frames_left, is_first, is_exhausted), pass_order, left)


def _played(saved: Mapping[str, Any], keys: list[tuple[str, int]]) -> dict[tuple[str, int], int]:
    """Return the lengths of the trajectories that the envs were playing, by writer and number."""
    lengths = map(operator.index, saved["length"])
    is_exhausted = saved["is_exhausted"]
    played = {
        key: length
        for key, length, ended in zip(keys, lengths, is_exhausted, strict=True)
        if not ended
    }
    if not all(0 < length <= _MOST_FRAMES for length in played.values()):
        raise Misfit(
            f"its trajectory lengths must be in 1:{_MOST_FRAMES + 1}, got {saved['length'][:8]}."
        )
    return played


def _name(saved: Any) -> Name:
    end_time_ns, writer, number = saved
    return [operator.index(end_time_ns), str(writer), operator.index(number)]


def _optional_name(saved: Any) -> Name | None:
    return None if saved is None else _name(saved)


def _without_deleted(
    trajectory: Int64s, is_exhausted: Bools, index: TrajectoryIndex, keys: list[tuple[str, int]]
) -> Int64s:
    """Replace deleted trajectories of exhausted envs by another trajectory.

    An exhausted env only repeats a frame with `valid=False`, so any trajectory will do.

    Raises:
        Misfit: The trajectory of an env that still has frames is deleted.
    """
    is_deleted = trajectory < 0
    is_missing = is_deleted & ~is_exhausted
    if is_missing.any() or not len(index):
        writer, number = keys[int(np.argmax(is_missing))]
        raise Misfit(f"trajectory {number} of writer {writer!r} no longer exists.")
    return np.where(is_deleted, len(index) - 1, trajectory)


def _settings(options: PassOptions) -> dict[str, Any]:
    """Return the options that determine the order of frames, except the number of envs."""
    settings = asdict(options)
    settings["starting_frame_range"] = list(settings["starting_frame_range"])
    for name in ("wait_timeout_s", "poll_interval_s", "refresh_s"):
        del settings[name]
    return settings
