"""`StepPairs`: adds steps with next observations to a buffer that stores each observation once.

Trainers of other libraries pass the observations before and after each step. The observation after
a step is also the observation before the following step. A buffer that stores both with each step
would store each observation twice.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch

from ..core.fields import unflatten
from ..core.memory import StreamOrder
from ..core.records import flat_name, listed
from ..replay.dict_buffer import DictBuffer

_Columns = dict[str, torch.Tensor]


class StepPairs:
    """Writer of steps with next observations to a `DictBuffer` that stores each observation once.

    If the next observation of a step differs from the observation of the following step, the
    environment was reset in between. If the earlier step has no end flag, such a reset cuts the
    trajectory: the flags `cut_names` of the earlier step are set, and its next observation is
    stored as the final observation. To compare two steps, `add` keeps the newest step until the
    next call.

    Args:
        buffer: Buffer that stores the steps.
        cut_names: Names of the flags to set where a reset cuts a trajectory. Names that are not
            fields of the steps are ignored. At least one name is in the `end_key` of the buffer.
    """

    def __init__(self, buffer: DictBuffer, cut_names: tuple[str, ...]) -> None:
        self.buffer = buffer
        self._cut_names = set(cut_names)
        self._end_names = {flat_name(key) for key in listed(buffer.end_key)}
        self._lock = threading.Lock()
        #: Synchronization of the CUDA streams that read and write `_waiting`.
        self._order = StreamOrder(buffer.device)
        #: Fields and next observations of the newest step; None before the first call of `add`.
        self._waiting: tuple[_Columns, _Columns] | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of the buffer and of the newest step, which is not in the buffer yet, in bytes."""
        waiting = 0
        for columns in self._waiting or ():
            waiting += sum(column.untyped_storage().nbytes() for column in columns.values())
        return self.buffer.num_bytes + waiting

    @torch.no_grad()
    def add(self, steps: Mapping[str, torch.Tensor], following: Mapping[str, torch.Tensor]) -> None:
        """Add steps of all environments. Tensors are copied.

        Args:
            steps: Fields `[T, num_envs, *event]` of T steps by flat name.
            following: Observations `[T, num_envs, *event]` after these steps, by flat name.
        """
        with self._lock, self._order.writes:
            num_steps = len(next(iter(following.values())))
            if num_steps == 0:
                return
            observed = {name: steps[name] for name in following}
            last = (_part(steps, slice(-1, None)), _part(following, slice(-1, None)))
            waiting = self._waiting
            if waiting is None or _layouts(last) != _layouts(waiting):
                # Writing no rows checks all fields before anything changes.
                none = slice(0, 0)
                self._write(_part(steps, none), _part(following, none), _part(observed, none))
            if waiting is not None:
                for columns in waiting:
                    self._order.keep(columns.values())
                self._write(*waiting, _part(observed, slice(1)))
                self._waiting = None
            if num_steps > 1:
                before_last = slice(-1)
                self._write(
                    _part(steps, before_last),
                    _part(following, before_last),
                    _part(observed, slice(1, None)),
                )
            if waiting is not None and _layouts(last) == _layouts(waiting):
                for columns, memory in zip(last, waiting, strict=True):
                    torch._foreach_copy_([memory[name] for name in columns], list(columns.values()))
                self._waiting = waiting
            else:
                self._waiting = (_copied(last[0]), _copied(last[1]))

    def _write(self, steps: _Columns, following: _Columns, later: _Columns) -> None:
        """Write steps to the buffer, and mark the steps after which a reset cuts a trajectory.

        Args:
            steps: Fields `[T, num_envs, *event]`.
            following: Observations `[T, num_envs, *event]` after these steps.
            later: Observations `[T, num_envs, *event]` before the following step of each step.
        """
        differences = [following[name] != later[name] for name in following]
        flags = [steps[name] for name in self._end_names & steps.keys()]
        is_cut = _any_set(differences) & _any_set(flags).logical_not()
        rows = dict(steps)
        for name in self._cut_names & steps.keys():
            rows[name] = steps[name] | is_cut.view_as(steps[name])
        self.buffer.extend(_rows(rows), final=_rows(following))

    def clear(self) -> None:
        """Remove all steps."""
        with self._lock:
            self._waiting = None
            self.buffer.clear()


def _part(columns: Mapping[str, torch.Tensor], steps: slice) -> _Columns:
    return {name: x[steps] for name, x in columns.items()}


def _copied(columns: _Columns) -> _Columns:
    return {name: column.clone() for name, column in columns.items()}


def _layouts(pair: tuple[_Columns, _Columns]) -> list[dict[str, tuple[Any, ...]]]:
    """Return dtype, device and shape of each tensor."""
    return [{name: (x.dtype, x.device, x.shape) for name, x in columns.items()} for columns in pair]


def _any_set(flags: list[torch.Tensor]) -> torch.Tensor:
    """Return which steps have a value other than 0 in any of `flags`: `[T, num_envs]` bool."""
    return torch.cat([flag.flatten(2) for flag in flags], 2).any(2)


def _rows(columns: _Columns) -> dict[str, object]:
    """Join the axes of time and environment of each field, and nest the fields by name."""
    return unflatten({name: x.flatten(0, 1) for name, x in columns.items()})
