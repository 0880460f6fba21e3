"""The records that go into a rollout storage and come out of it.

One rule: nothing is listed here; the fields, their order and what they hold follow from `rollout_columns`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from .columns import batch_type, documentation, rollout_columns, transition_type

#: The columns of any storage: only their names are used here.
_COLUMNS = rollout_columns(1, 1, 1, 1)
_Sources: Any = transition_type(_COLUMNS, object)
_Fields: Any = batch_type(_COLUMNS, tuple)


class Transition(_Sources):  # type: ignore[misc]
    __doc__ = f"""What one step of all envs brings; every value has the envs first, `[B, ...]`.

Attributes:{documentation(_COLUMNS, "source")}
"""

    def clear(self) -> None:
        """Set every field to None."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, None)


class HiddenStates(NamedTuple):
    """Recurrent states of an actor and of a critic; None for one that has none."""

    actor: Any = None
    critic: Any = None


class MiniBatch(_Fields):  # type: ignore[misc]
    __doc__ = f"""Rows for one gradient step, `[M, ...]`, or `[T, n, ...]` in recurrent batches; None where absent.

Attributes:{documentation(_COLUMNS, "batch")}
"""
    __slots__ = ()
