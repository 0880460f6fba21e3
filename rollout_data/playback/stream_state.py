"""Resuming a stream: its position as plain data, and back.

One rule: the state says what was delivered of the stream of all ranks, in words that stay true when files come and
go: trajectories by writer and number, and how far each writer's blocks were known.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from ..blocks.trajectory_index import Int64s, TrajectoryIndex
from .passes import Dealer, Name, PassOptions, Section, sections_at
from .step_planner import Bools, Position, StreamState

#: 3 did not hold the lengths of what is played; it continues while that is there.
_VERSION, _WITHOUT_LENGTHS = 4, 3
#: Of a trajectory, so that those of all envs together are counted in int64.
_MOST_FRAMES = 1 << 38
_KEYS = {
    "version", "is_started", "settings", "epoch", "pass", "upto", "bounds", "dealt", "writers", "trajectory", "length",
    "frame", "is_first", "is_exhausted",
}  # fmt: skip


def state_at(position: Position, options: PassOptions, epoch: int) -> dict[str, Any]:
    """Write a position down as plain data (numbers, strings, lists, dicts)."""
    state, deal, left = position
    index = deal.source.index
    rest, fresh = sections_at(deal, state.position)
    live = {
        "turn": deal.turn,
        "left": left,
        "upto": rest.upto,
        "fresh": fresh and [fresh.bounds, fresh.dealt, fresh.since],
    }
    keys = index.keys(state.trajectory)
    writers = sorted({writer for writer, _ in keys})
    return {
        "version": _VERSION,
        "is_started": True,
        "settings": {"num_envs": len(keys), **_settings(options)},
        "epoch": epoch,
        "pass": deal.number,
        "upto": index.writers_upto(),
        "bounds": rest.bounds,
        "dealt": rest.dealt,
        "writers": writers,
        "trajectory": [[writers.index(writer), number] for writer, number in keys],
        "length": index.lengths[state.trajectory].tolist(),
        "frame": state.frames(deal).tolist(),
        "is_first": state.is_first.tolist(),
        "is_exhausted": state.is_exhausted.tolist(),
        **({} if options.refresh_s is None else {"live": live}),
    }


class Misfit(Exception):
    """What a state should hold, and what it does."""


def check_settings(saved: Mapping[str, Any], options: PassOptions, num_envs: int, share: slice) -> None:
    """Raise `Misfit` unless a state is of these settings, and gives a rank that reads `share` `num_envs` envs."""
    if saved.get("version") not in (_VERSION, _WITHOUT_LENGTHS):
        raise Misfit(f"a state of version {_VERSION}", repr(saved.get("version")))
    if ("live" in saved) != (options.refresh_s is not None):
        got = "a state with refresh_s" if "live" in saved else "one without"
        raise Misfit(f"refresh_s={options.refresh_s} as in this dataset", got)
    if saved.keys() - {"live"} != _KEYS - ({"length"} if saved["version"] == _WITHOUT_LENGTHS else set()):
        raise Misfit("a state as state_dict() gives it", f"the keys {sorted(saved)}")
    if saved["settings"].get("lane") is not None:
        raise Misfit("a state of a whole stream", f"one of lane {saved['settings']['lane']}, from an earlier version")
    if share.stop - share.start != num_envs:
        all_envs = saved["settings"]["num_envs"]
        got = f"{share.stop - share.start} of its {all_envs} for this rank"
        raise Misfit(f"num_envs={num_envs} as in this dataset", got if share != slice(0, all_envs) else str(all_envs))
    for name, mine in _settings(options).items():
        if saved["settings"].get(name) != mine:
            raise Misfit(f"{name}={mine!r} as in this dataset", repr(saved["settings"].get(name)))


def position_in(saved: Mapping[str, Any], dealer: Dealer) -> Position:
    """Find a saved position again.

    Raises:
        Misfit: What it names is not there, or it contradicts itself.
    """
    live = saved.get("live", {"turn": saved["pass"], "left": 0, "upto": None, "fresh": None})
    turn = operator.index(live["turn"])
    left = operator.index(live["left"])
    keys = [(saved["writers"][writer], int(number)) for writer, number in saved["trajectory"]]
    store = dealer.resumed(turn, saved["upto"], _played(saved, keys) if "length" in saved else {})
    frame = np.array(saved["frame"], np.int64)
    is_first, is_exhausted = (np.array(saved[name], bool) for name in ("is_first", "is_exhausted"))
    trajectory = store.index.find(keys)
    shapes = {column.shape for column in (trajectory, frame, is_first, is_exhausted)}
    if shapes != {(saved["settings"]["num_envs"],)}:
        raise Misfit(f"{saved['settings']['num_envs']} numbers of each kind", str(sorted(shapes)))
    trajectory = _without_the_gone(trajectory, is_exhausted, store.index, keys)
    first, last = map(_name, saved["bounds"])
    rest = Section([first, last], _optional_name(saved["dealt"]), live["upto"])
    fresh = None
    if live["fresh"] is not None:
        bounds, dealt, since = live["fresh"]
        fresh = Section(bounds and [_name(bound) for bound in bounds], _optional_name(dealt), since=since)
    deal = dealer.dealt(int(saved["pass"]), turn, store, trajectory, (rest, fresh))
    if deal.number < 0 or not dealer.options.has_pass(deal.number):
        raise Misfit("a pass of this dataset", f"pass {deal.number}")
    frames_left = np.where(is_exhausted, 0, deal.lengths[trajectory] - frame)
    if ((frame < 0) | (frames_left < ~is_exhausted)).any():
        raise Misfit("frames within their trajectories", str(frame.tolist()[:8]))
    return Position(StreamState(trajectory, frames_left, is_first, is_exhausted), deal, left)


def _played(saved: Mapping[str, Any], keys: list[tuple[str, int]]) -> dict[tuple[str, int], int]:
    """Return the lengths of the trajectories that the envs were at."""
    lengths = map(operator.index, saved["length"])
    is_exhausted = saved["is_exhausted"]
    played = {key: length for key, length, ended in zip(keys, lengths, is_exhausted, strict=True) if not ended}
    if not all(0 < length <= _MOST_FRAMES for length in played.values()):
        raise Misfit(f"lengths from 1 to {_MOST_FRAMES}", str(saved["length"][:8]))
    return played


def _name(given: Any) -> Name:
    end_time_ns, writer, number = given
    return [operator.index(end_time_ns), str(writer), operator.index(number)]


def _optional_name(given: Any) -> Name | None:
    return None if given is None else _name(given)


def _without_the_gone(
    trajectory: Int64s, is_exhausted: Bools, index: TrajectoryIndex, keys: list[tuple[str, int]]
) -> Int64s:
    """Let exhausted envs whose last trajectory is gone show the last frame of another one."""
    is_gone = trajectory < 0
    if (is_gone & ~is_exhausted).any() or not len(index):
        writer, number = keys[int(np.argmax(is_gone & ~is_exhausted))]
        raise Misfit(f"trajectory {number} of writer {writer!r}", "it is not there any more")
    return np.where(is_gone, len(index) - 1, trajectory)


def _settings(options: PassOptions) -> dict[str, Any]:
    """What decides the order of frames, besides the number of envs."""
    settings = asdict(options)
    settings["starting_frame_range"] = list(settings["starting_frame_range"])
    for name in ("wait_timeout_s", "poll_interval_s", "refresh_s"):
        del settings[name]
    return settings
