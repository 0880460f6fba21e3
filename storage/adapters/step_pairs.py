"""`StepPairs`: adds steps with next observations to a buffer that stores each observation once.

Trainers of other libraries pass the observations before and after each step. The observation after
a step is also the observation before the following step. A ring of such pairs would store each
observation twice.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch

from ..core.fields import unflatten
from ..core.memory import StreamOrder
from ..core.records import flat_name, listed
from ..replay.dict_buffer import DictBuffer

_Columns = dict[str, torch.Tensor]


class StepPairs:
    """Writer of steps with next observations to a `DictBuffer` that stores each observation once.

    `add` keeps the newest step until the next call, because it must compare two steps. If the next
    observation of a step differs from the observation of the following step, the environment was
    reset in between. If the earlier step has no end flag, such a reset cuts the trajectory: the
    flags `cut_names` of the earlier step are set, and its next observation is stored as the final
    observation.

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
        #: Order of the reads and writes of `_waiting` by different CUDA streams.
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
            earlier = self._waiting or ({}, {})
            for columns in earlier:
                self._order.keep(columns.values())
            steps = {name: _joined(earlier[0].get(name), x) for name, x in steps.items()}
            following = {name: _joined(earlier[1].get(name), x) for name, x in following.items()}
            differences = [following[name][:-1] != steps[name][1:] for name in following]
            flags = [steps[name][:-1] for name in self._end_names & steps.keys()]
            is_cut = _any_set(differences) & _any_set(flags).logical_not()
            for name in self._cut_names & steps.keys():
                flag = steps[name][:-1]
                flag |= is_cut.view_as(flag)
            self.buffer.extend(_rows_before_last(steps), final=_rows_before_last(following))
            self._waiting = (
                {name: x[-1:] for name, x in steps.items()},
                {name: x[-1:] for name, x in following.items()},
            )

    def clear(self) -> None:
        """Remove all steps."""
        with self._lock:
            self._waiting = None
            self.buffer.clear()


def _joined(earlier: torch.Tensor | None, later: torch.Tensor) -> torch.Tensor:
    """Return T later steps, with the earlier step in front if there is one: new memory."""
    return torch.cat([later] if earlier is None else [earlier, later])


def _any_set(flags: list[torch.Tensor]) -> torch.Tensor:
    """Return which steps have a value other than 0 in any of `flags`: `[T, num_envs]` bool."""
    return torch.cat([flag.flatten(2) for flag in flags], 2).any(2)


def _rows_before_last(columns: Mapping[str, torch.Tensor]) -> dict[str, object]:
    return unflatten({name: x[:-1].flatten(0, 1) for name, x in columns.items()})
