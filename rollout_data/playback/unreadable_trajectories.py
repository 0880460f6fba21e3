"""Unreadable trajectories of a plan are skipped, or an error is raised if none is readable."""

from __future__ import annotations

from typing import Any

import numpy as np

from storage.errors import DataFileError, UnansweredError

from ..sources.live_source import LiveSource
from .passes import PassScheduler
from .step_planner import Plan, Position
from .transition import Transition


def report_missing(scheduler: PassScheduler, plan: Plan) -> list[Any]:
    """Report the missing trajectories of a plan that were not reported before.

    Returns:
        The names of the trajectories and their errors, for `LiveSource.note_loss`.
    """
    losses = []
    for part in plan.parts if scheduler.missing else ():
        index = part.pass_order.source.index
        numbers = np.unique(part.pieces.trajectory)
        for key in scheduler.keys_of(index, numbers[numbers >= len(index)]):
            losses += [([key], error) for error in scheduler.source.note_missing([key])]
    return losses


def leave_out(source: LiveSource, plan: Plan, problem: DataFileError, skips: bool) -> list[Any]:
    """Mark the trajectories of a plan that cannot be read, after the error `problem`.

    Returns:
        The names of the trajectories and their errors, for `LiveSource.note_loss`.

    Raises:
        DataFileError: No trajectory was marked. The error is `problem`.
    """
    for part in plan.parts:
        played = np.union1d(part.pieces.trajectory, part.ends.trajectory)
        snapshot = part.pass_order.source
        played = played[played < len(snapshot.index)]
        try:
            lost = source.leave_out(snapshot, played, problem, skips)
        except UnansweredError:
            raise
        except DataFileError:
            continue
        return [(snapshot.index.keys(left), why) for left, why in lost]
    raise problem


class ReadableCheck:
    """Raises an error if a batch has no valid frame and no trajectory of the pass is readable."""

    def __init__(self) -> None:
        #: Number of lost trajectories, and number of the pass, at the last successful check. The
        #: check is repeated only when one of them changes.
        self._checked = 0, 0

    def check(self, source: LiveSource, position: Position, batch: Transition, skips: bool) -> None:
        num_lost = source.num_lost_trajectories
        state, pass_order, _ = position
        if (
            not num_lost
            or self._checked == (num_lost, pass_order.number)
            or bool(batch.valid.any())
        ):
            return
        playing = state.trajectory[state.trajectory >= 0]
        source.check_readable(
            pass_order.source, np.union1d(playing, pass_order.trajectories), skips
        )
        self._checked = source.num_lost_trajectories, pass_order.number
