"""`StepPairs`: steps that come with their next observations, in a `DictBuffer` that stores each once.

Trainers of other libraries pass the observation before and after each step. The second is the first
of the following step, so a ring of pairs stores every observation twice.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch

from ..core.fields import unflatten
from ..core.records import flat_name, listed
from ..replay.dict_buffer import DictBuffer

_Columns = dict[str, torch.Tensor]


class StepPairs:
    """Adds steps with their next observations to a `DictBuffer`, without storing these twice.

    The newest step waits for the next call. If its next observation then differs from the
    observation of the new step, and no end flag is set, the environment was reset in between. The
    waiting step then ends its trajectory, and its next observation is stored as the final one.

    Args:
        buffer: Buffer that stores the steps.
        cut_names: Flags that such a reset sets in the step, as far as the step has them. At least
            one is in the `end_key` of the buffer.
    """

    def __init__(self, buffer: DictBuffer, cut_names: tuple[str, ...]) -> None:
        self.buffer = buffer
        self._cut_names = set(cut_names)
        self._end_names = {flat_name(key) for key in listed(buffer.end_key)}
        self._lock = threading.Lock()
        self._waiting: tuple[_Columns, _Columns] | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of the buffer and of the waiting step, in bytes."""
        waiting = 0
        for columns in self._waiting or ():
            waiting += sum(column.untyped_storage().nbytes() for column in columns.values())
        return self.buffer.num_bytes + waiting

    @torch.no_grad()
    def add(self, steps: Mapping[str, torch.Tensor], following: Mapping[str, torch.Tensor]) -> None:
        """Add steps of all environments. Tensors are copied.

        Args:
            steps: Fields `[T, num_envs, *event]` of T steps by flat name.
            following: Observations after these steps, by the names of the observations.
        """
        with self._lock:
            earlier = self._waiting or ({}, {})
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
    """Return the waiting step and later ones in new memory, `[1 + T or T, num_envs, *event]`."""
    return torch.cat([later] if earlier is None else [earlier, later])


def _any_set(flags: list[torch.Tensor]) -> torch.Tensor:
    """Return whether any value of a step is not 0: `[T, num_envs]`, from `[T, num_envs, *event]`."""
    return torch.cat([flag.flatten(2) for flag in flags], 2).any(2)


def _rows_before_last(columns: Mapping[str, torch.Tensor]) -> dict[str, object]:
    return unflatten({name: x[:-1].flatten(0, 1) for name, x in columns.items()})
