"""`SarsaRolloutStorage`: a rollout storage whose mini-batches have the next observations too.

Every observation is stored once: `next_observations` is a view of the memory of `observations`, one
step later. The true final observation of a trajectory is not the observation of a later step. It is
stored separately and written into mini-batches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..core import arguments
from ..core.deferred import HostCopy
from ..core.fields import Field, check_same_names, signed
from ..core.object_summary import described
from ..errors import MissingFieldError, SchemaError, UsageError
from ..saving.saved_store import State, checked_tensor
from .mini_batches import true_places
from .rollout_storage import RolloutStorage
from .transition_columns import (
    Column,
    MiniBatch,
    ShapeLike,
    Transition,
    batch_type,
    replaced,
    rollout_columns,
)

#: Name of the mini-batch field with the next observations, by name of the observation column.
_SHIFTED = {"observations": "next_obs", "critic_observations": "next_critic_obs"}
_FINALS = "finals/"


def _with_next(columns: Sequence[Column]) -> list[Column]:
    """Return columns with next observations.

    Each column of observations becomes three columns. `all_...` stores T + 1 steps. The column
    itself is a view of the first T steps, and `next_...` is a view of the last T steps.
    """
    shifted = []
    for column in columns:
        if column.name in _SHIFTED:
            next_fields, all_fields = (
                tuple(replace(field, name=prefix + field.name) for field in column.fields)
                for prefix in ("next_", "all_")
            )
            name = f"next_{column.name}"
            fallback = column.fallback and _SHIFTED["observations"]
            later = Column(
                name, next_fields, name, _SHIFTED[column.name], fallback, False, is_padded=True
            )
            all_steps = Column(f"all_{column.name}", all_fields)
            taken = frozenset(f"next_{field}" for field in column.taken)
            later = replace(
                later, is_ignorable=True, view_of=all_steps.name, first_row=1, taken=taken
            )
            shifted += [replace(column, view_of=all_steps.name), later, all_steps]
    return replaced(columns, *shifted, Column("next_valid", (), batch="next_valid"))


if TYPE_CHECKING:
    _Fields = MiniBatch
else:  # Type checkers cannot read fields that are computed.
    _Fields = batch_type(_with_next(rollout_columns(1, 1, 1, 1)), MiniBatch)


class SarsaMiniBatch(_Fields):
    """A `MiniBatch` with the observations one step later.

    Attributes:
        next_obs: Observations one step later, as `obs`. At the end of a trajectory, the true final
            observation if the transition had one.
        next_critic_obs: Critic observations one step later; the same object as `next_obs` without
            critic observations.
        next_valid: bool `[M, 1]` or `[T, n_traj, 1]`, False if `next_obs` belongs to the next
            trajectory.
    """

    __slots__ = ()
    next_obs: Any
    next_critic_obs: Any
    next_valid: Any
    __repr__ = described


class Finals:
    """The true final observations of the envs whose trajectories ended at one step.

    On CUDA, the number of ended envs arrives later on the host. Until then the rows of all envs are
    stored.

    Args:
        has_ended: `[B]` bool.
        rows: Next observations of all envs by field, `[B, *event]`; they are copied.
    """

    def __init__(self, has_ended: torch.Tensor, rows: Mapping[str, torch.Tensor]) -> None:
        self._has_ended = has_ended
        if has_ended.is_cuda:
            self._count: HostCopy | None = HostCopy(has_ended.sum())
            self._values = {name: x.clone() for name, x in rows.items()}
        else:
            self._count = None
            self._choose(has_ended.nonzero().squeeze(-1), rows)

    @classmethod
    def of_envs(cls, envs: torch.Tensor, values: dict[str, torch.Tensor]) -> Finals:
        """Return the final observations `[n, *event]` of `[n]` int64 envs."""
        finals = cls.__new__(cls)
        finals._count = None
        finals._envs = envs
        finals._values = values
        return finals

    def drop_others(self) -> None:
        """Release the rows of envs without an end, to save memory.

        Does nothing while the number of ended envs is still being copied to the host.
        """
        if self._count is not None and self._count.has_arrived:
            self._choose(true_places(self._has_ended, int(self._count)), self._values)
            self._count = None

    def listed(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the ended envs and their final observations. May wait for the device."""
        if self._count is not None:
            self._choose(self._has_ended.nonzero().squeeze(-1), self._values)
            self._count = None
        return self._envs, self._values

    def put(self, name: str, target: torch.Tensor) -> None:
        """Overwrite the rows of ended envs in `target`, `[B, *event]`, by final observations."""
        values = signed(self._values[name])
        target = signed(target)
        if self._count is None:
            target[self._envs] = values
        else:
            has_ended = self._has_ended.view(-1, *[1] * (target.dim() - 1))
            target.copy_(torch.where(has_ended, values, target))

    def mark(self, target: torch.Tensor) -> None:
        """Set `target`, bool `[B, 1]`, to True for the ended envs."""
        if self._count is None:
            # Writing a Python value by an index would make the host wait for the device.
            target.index_fill_(0, self._envs, 1)
        else:
            target |= self._has_ended.unsqueeze(1)

    def _choose(self, envs: torch.Tensor, rows: Mapping[str, torch.Tensor]) -> None:
        self._envs = envs
        self._values = {name: x[envs] for name, x in rows.items()}


def _with_finals(name: str, x: torch.Tensor, finals_by_step: Mapping[int, Finals]) -> torch.Tensor:
    """Return `x`, or a copy with final observations if `name` is a field of next observations."""
    batch, slash, path = name.partition("/")
    for column, next_batch in _SHIFTED.items():
        if batch == next_batch:
            x = x.clone()
            for step, finals in finals_by_step.items():
                finals.put(column + slash + path, x[step])
    return x


class SarsaRolloutStorage(RolloutStorage):
    """Rollout storage whose steps have the observations of the following steps.

    Args:
        num_envs, num_transitions_per_env, obs_shape, critic_obs_shape, actions_shape, num_rewards,
            device, generator, policy_outputs: As for `RolloutStorage`.
        strict_next: Whether `next_obs` at a done is the true final observation, if the transition
            has one. Otherwise `next_obs` at a done is the first observation after the reset.
        emit_next_valid: Whether mini-batches have `next_valid`, which is True if `next_obs` belongs
            to the same trajectory. Otherwise `next_valid` is None.
        validate: Whether each observation is compared with the next observation of the previous
            step (slow).

    The last step must have `Transition.next_observations` (and `next_critic_observations`), since
    no step with these observations follows. Other steps may have next observations. They are used
    only for envs that are done: the observation of the following step already belongs to the next
    trajectory.

    On a GPU no call waits for the number of ended trajectories. The next observations of all envs
    of a step are stored until a later step finds that the number has arrived on the host.

    `all_observations`, `next_observations` and the same names for the critic are attributes like
    the columns. Writing to these attributes does not change the true final observations, which are
    stored separately.
    """

    MiniBatch = SarsaMiniBatch
    mini_batch_generator: Callable[..., Iterator[SarsaMiniBatch]]
    recurrent_mini_batch_generator: Callable[..., Iterator[SarsaMiniBatch]]

    def __init__(
        self,
        num_envs: int,
        num_transitions_per_env: int,
        obs_shape: ShapeLike,
        critic_obs_shape: ShapeLike | None,
        actions_shape: ShapeLike,
        num_rewards: int = 1,
        device: torch.device | str = "cpu",
        *,
        strict_next: bool = True,
        emit_next_valid: bool = False,
        validate: bool = False,
        **options: Any,
    ) -> None:
        arguments.options(self, options)
        shapes = obs_shape, critic_obs_shape, actions_shape
        super().__init__(num_envs, num_transitions_per_env, *shapes, num_rewards, device, **options)
        self.strict_next = arguments.flag("strict_next", strict_next)
        self.emit_next_valid = arguments.flag("emit_next_valid", emit_next_valid)
        self.validate = arguments.flag("validate", validate)
        #: Final observations of the trajectories that ended at a step, by index of the step.
        self._finals: dict[int, Finals] = {}
        #: Indices of the steps that were added with next observations.
        self._has_next: set[int] = set()

    def declare_columns(self) -> list[Column]:
        """Return the columns of `RolloutStorage` and the next observations."""
        return _with_next(super().declare_columns())

    @property
    def _all_observations(self) -> dict[str, torch.Tensor]:
        """Tensors of the observations of all T + 1 steps, by name of the observation field."""
        fields = [field for name in _SHIFTED for field in self._table.columns[name].fields]
        return {field.name: self._table.tensors[f"all_{field.name}"] for field in fields}

    @torch.no_grad()
    def add_transitions(self, transition: Transition) -> None:
        """Copy one step, and its next observations if the transition has them.

        Raises:
            MissingFieldError: As for `RolloutStorage`, or the last step has no next observations.
            RolloutOverflowError, SchemaError, FieldTypeError: As for `RolloutStorage`.
        """
        with self._lock:
            step = self.step
            has_next = step < self.num_transitions_per_env and self._check_next(transition)
            super().add_transitions(transition)
            self._finals.pop(step, None)
            self._has_next.discard(step)
            for finals in self._finals.values():
                finals.drop_others()
            if has_next:
                self._has_next.add(step)
                has_ended = self._signals(step + 1).dones[step].flatten() != 0
                self._finals[step] = Finals(
                    has_ended, {name: x[step + 1] for name, x in self._all_observations.items()}
                )
            # The call of the base class recorded its writes before the final observations were
            # copied. Readers on other streams must wait for the copies too.
            self._order.record(is_write=True)

    def _check_next(self, transition: Transition) -> bool:
        """Return whether a transition has its next observations.

        Raises:
            MissingFieldError: Next observations are required, or some of their fields are missing.
        """
        needed = [f"next_{name}" for name in _SHIFTED if self._table.columns[name].fields]
        absent = [name for name in needed if getattr(transition, name, None) is None]
        is_last = self.step == self.num_transitions_per_env - 1
        if absent and (is_last or len(absent) < len(needed)):
            if is_last:
                reason = "The last step of a rollout needs it."
            else:
                reason = f"A step needs all or none of {', '.join(needed)}."
            raise MissingFieldError(f"field {absent[0]!r} is missing. {reason}")
        if self.validate and self.step - 1 in self._has_next:
            self._check_continuity(self._table.read(transition))
        return not absent

    def _check_continuity(self, observations: Mapping[str, torch.Tensor]) -> None:
        """Raise `SchemaError` if observations are not the next observations of the previous step.

        Envs that were done are not compared.
        """
        is_continued = (self._signals(self.step).dones[self.step - 1] == 0).squeeze(-1)
        for name, all_steps in self._all_observations.items():
            expected_rows = signed(all_steps[self.step])
            observed = observations[name].to(all_steps.device, all_steps.dtype)
            rows = signed(observed).view_as(expected_rows)
            # Two NaN count as equal. A number is NaN if it differs from itself.
            differs = (expected_rows != rows) & ((expected_rows == expected_rows) | (rows == rows))
            differs = differs.reshape(self.num_envs, -1).any(1) & is_continued
            if bool(differs.any()):
                column = name.split("/")[0]
                env = int(differs.nonzero()[0])
                raise SchemaError(
                    f"{column} of step {self.step}, env {env}, differ from next_{column} of step "
                    f"{self.step - 1}."
                )

    def _plan_batches(
        self, num_mini_batches: int, num_epochs: int, drop_last: bool, item: str
    ) -> tuple[int, Any]:
        with self._lock:
            rows, bounds = super()._plan_batches(num_mini_batches, num_epochs, drop_last, item)
            if rows - 1 not in self._has_next:
                raise UsageError(
                    f"next observations of step {rows - 1}, the last step, are missing. Add them "
                    "with the last step."
                )
        return rows, bounds

    def _batch_columns(self, rows: int) -> list[tuple[str, torch.Tensor, bool]]:
        """Return the columns of mini-batches, with true final observations as next observations.

        With `emit_next_valid`, the column `next_valid` is included.
        """
        finals_by_step = {}
        if self.strict_next:
            finals_by_step = {step: finals for step, finals in self._finals.items() if step < rows}
        columns = super()._batch_columns(rows)
        if finals_by_step:
            columns = [
                (name, _with_finals(name, x, finals_by_step), is_padded)
                for name, x, is_padded in columns
            ]
        if self.emit_next_valid:
            valid = self._signals(rows).dones == 0
            for step, finals in finals_by_step.items():
                finals.mark(valid[step])
            # The last step keeps the next observations of its transition: no later step follows.
            valid[rows - 1] |= not self.strict_next and rows - 1 in self._has_next
            columns.append(("next_valid", valid, True))
        return columns

    def _arguments(self) -> dict[str, Any]:
        options = {
            name: getattr(self, name) for name in ("strict_next", "emit_next_valid", "validate")
        }
        return {**super()._arguments(), **options}

    def _get_state(self) -> State:
        with self._lock:
            state = super()._get_state()
            has_next = [
                step in self._has_next for step in range(max(self._has_next, default=-1) + 1)
            ]
            state.numbers.update(has_next=has_next, finals=sorted(self._finals))
            for step, finals in self._finals.items():
                ended, values = finals.listed()
                state.tensors[f"{_FINALS}{step}/envs"] = ended
                state.tensors.update(
                    (f"{_FINALS}{step}/of/{name}", x) for name, x in values.items()
                )
            return state

    def _set_state(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        with self._lock:
            of_finals = {name: x for name, x in tensors.items() if name.startswith(_FINALS)}
            # Earlier saves have the prefix "whole/" instead of "all_".
            others = {
                re.sub("^whole/", "all_", name): x
                for name, x in tensors.items()
                if name not in of_finals
            }
            super()._set_state(numbers, others)
            self._check_finals(numbers["has_next"], numbers["finals"], of_finals)
            self._has_next = {step for step, has_next in enumerate(numbers["has_next"]) if has_next}
            self._finals = {}
            for step in numbers["finals"]:
                envs = of_finals[f"{_FINALS}{step}/envs"]
                values = {
                    name: of_finals[f"{_FINALS}{step}/of/{name}"] for name in self._all_observations
                }
                self._finals[step] = Finals.of_envs(envs, values)

    def _check_finals(
        self, has_next: Any, finals: Any, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Raise `SchemaError` if the saved final observations do not fit this storage."""
        num_steps = self.num_transitions_per_env
        are_bools = isinstance(has_next, list) and all(type(x) is bool for x in has_next)
        if not are_bools or len(has_next) > num_steps:
            raise SchemaError(
                f"'has_next' of the state must be a list of at most {num_steps} bools, got "
                f"{has_next!r}."
            )
        are_steps = isinstance(finals, list) and all(
            type(x) is int and 0 <= x < num_steps for x in finals
        )
        if not are_steps:
            raise SchemaError(
                "'finals' of the state must list the steps with final observations, integers in "
                f"0:{num_steps}, got {finals!r}."
            )
        fields = [self._table.schema[name] for name in self._all_observations]
        envs_of_steps: dict[str, torch.Tensor] = {}
        observations: dict[str, tuple[tuple[int, ...], Field]] = {}
        for step in finals:
            name = f"{_FINALS}{step}/envs"
            envs = tensors.get(name, torch.empty(0))
            is_index = envs.dtype is torch.int64 and envs.dim() == 1
            if not is_index or bool(((envs < 0) | (envs >= self.num_envs)).any()):
                raise SchemaError(
                    f"{name!r} of the state must be indices of envs, int64 of shape (n,) in "
                    f"0:{self.num_envs}, got {envs}."
                )
            envs_of_steps[name] = envs
            for field in fields:
                shape = (len(envs), *field.shape)
                observations[f"{_FINALS}{step}/of/{field.name}"] = (shape, field)
        check_same_names({**observations, **envs_of_steps}, tensors)
        for name, (shape, field) in observations.items():
            checked_tensor(tensors, name, field.torch_dtype, shape)
