"""`SarsaRolloutStorage`: a rollout storage whose mini-batches carry the next observations too.

One rule: an observation is kept once. `next_observations` is the same memory as `observations`,
one step later; only the true final observations of trajectories, which no later step holds, are
kept apart, and put in where a batch is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..core.fields import signed
from ..core.modes import lasting
from ..core.tree import check_same_names, unflatten
from ..errors import MissingFieldError, SchemaError, UsageError
from ..saving.snapshot import State
from .columns import Column, flatten_column
from .mini_batches import GENERATE
from .rollout_storage import RolloutStorage
from .transition import SarsaMiniBatch, Transition

#: Column -> (attribute of T + 1 steps, attribute and transition field one step later, mini-batch field).
_SHIFTED = {
    "observations": ("all_observations", "next_observations", "next_obs"),
    "critic_observations": ("all_critic_observations", "next_critic_observations", "next_critic_obs"),
}
#: Attribute -> its column, and which of the T + 1 steps it shows.
_VIEWS = {name: (column, slice(i, None)) for column, names in _SHIFTED.items() for i, name in enumerate(names[:2])}
_ACTION = "add a transition"
_WHOLE, _FINALS = "whole/", "finals/"


class SarsaRolloutStorage(RolloutStorage):
    """Steps with their successors' observations.

    Args:
        num_envs, num_transitions_per_env, obs_shape, critic_obs_shape, actions_shape, num_rewards,
            device, generator, policy_outputs: As for `RolloutStorage`.
        strict_next: Whether `next_obs` at a done is the true final observation, if one was given;
            False gives the plain shift, which is the first observation after the reset.
        emit_next_valid: Whether mini-batches say in `next_valid` where `next_obs` is of the same
            trajectory; otherwise that field is None.
        validate: Whether each observation is compared with the next one of the step before (slow).

    `Transition.next_observations` (and `next_critic_observations`) are needed with the last step,
    and at dones, where the simulator's next observation is that of the next trajectory already.

    `all_observations` and `next_observations` (and those of the critic) are attributes as the columns are; what is
    written there does not change true final observations, which are kept apart.
    """

    MiniBatch = SarsaMiniBatch

    @lasting
    def __init__(
        self,
        *arguments: Any,
        strict_next: bool = True,
        emit_next_valid: bool = False,
        validate: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.strict_next = strict_next
        self.emit_next_valid = emit_next_valid
        self.validate = validate
        self._whole: dict[str, torch.Tensor] = {}
        for field in self._shifted_fields():
            shape = (self.num_transitions_per_env + 1, self.num_envs, *field.shape)
            self._whole[field.name] = torch.full(shape, field.fill, dtype=field.torch_dtype, device=self.device)
            self._table.substitute(field.name, self._whole[field.name][:-1])
        # Step -> (envs whose trajectory ended there, their true final observations by field).
        self._finals: dict[int, tuple[torch.Tensor, dict[str, torch.Tensor]]] = {}
        self._has_next = [False] * self.num_transitions_per_env

    def __getattr__(self, name: str) -> Any:
        if name in _VIEWS and "_whole" in self.__dict__:
            return self._shifted(*_VIEWS[name])
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _VIEWS and "_whole" in self.__dict__:
            return self._table.write(name, dict(flatten_column(name, self._shifted(*_VIEWS[name]))), value)
        super().__setattr__(name, value)

    @torch.no_grad()
    def add_transitions(self, transition: Transition) -> None:
        """Copy one step, and what follows it if that is given.

        Raises:
            MissingFieldError: Also if the last step comes without its next observations.
            RolloutOverflowError, SchemaError, FieldTypeError: As for `RolloutStorage`.
        """
        with self._lock:
            step = self.step
            later = self._check_next(transition) if step < self.num_transitions_per_env else {}
            super().add_transitions(transition)
            self._finals.pop(step, None)
            self._has_next[step] = bool(later)
            for name, value in later.items():
                self._whole[name][step + 1].copy_(value)
            if later:
                ended = self._signals(step + 1).dones[step].flatten().nonzero().squeeze(-1)
                self._finals[step] = ended, {name: self._whole[name][step + 1, ended] for name in later}

    def _check_next(self, transition: Transition) -> dict[str, torch.Tensor]:
        """Find the next observations in a transition, checked; nothing if there are none and none are needed."""
        given = {column: getattr(transition, names[1], None) for column, names in _SHIFTED.items()}
        needed = [column for column in _SHIFTED if self._table.columns[column].fields]
        absent = [column for column in needed if given[column] is None]
        is_last = self.step == self.num_transitions_per_env - 1
        if absent and (is_last or len(absent) < len(needed)):
            name = _SHIFTED[absent[0]][1]
            reason = "the last step of a rollout needs it" if is_last else "it comes together with the others"
            raise MissingFieldError(_ACTION, f"without {name!r}", "", "", f"Add it: {reason}")
        checked = {} if absent else self._table.check({name: given[name] for name in needed})
        if self.validate and self.step and self._has_next[self.step - 1]:
            self._check_continuity(transition)
        return checked

    def _check_continuity(self, transition: Transition) -> None:
        """Refuse observations that are not the next ones of the step before, where that was not done."""
        goes_on = (self._signals(self.step).dones[self.step - 1] == 0).squeeze(-1)
        names = [name for name in _SHIFTED if self._table.columns[name].fields]
        values = self._table.check({name: getattr(transition, name) for name in names})
        field_dtypes = {field.name: field.torch_dtype for field in self._shifted_fields()}
        for name, value in values.items():
            known = signed(self._whole[name][self.step])
            given = signed(value.to(self.device, field_dtypes[name]))
            # Two NaN are alike: a number is NaN where it is not itself.
            differs = (known != given) & ((known == known) | (given == given))
            differs = differs.unsqueeze(-1).flatten(1).any(1) & goes_on
            if bool(differs.any()):
                env = int(differs.nonzero()[0])
                expected = f"next_{name} of step {self.step - 1}"
                raise SchemaError(_ACTION, f"at step {self.step}, env {env}", expected, f"other {name}")

    def _num_rows_for(self, action: str, allow_partial: bool) -> int:
        rows = super()._num_rows_for(action, allow_partial)
        if action == GENERATE and not self._has_next[rows - 1]:
            expected = f"the next observations of step {rows - 1}, the last one"
            raise UsageError(action, "", expected, "none", "Add them with the last step")
        return rows

    def _batch_columns(self, rows: int) -> list[tuple[str, torch.Tensor, bool]]:
        columns = super()._batch_columns(rows)
        for column, (_, _, batch) in _SHIFTED.items():
            later = flatten_column(batch, self._shifted(column, slice(1, rows + 1)))
            for (name, x), field in zip(later, self._table.columns[column].fields, strict=True):
                columns.append((name, self._with_finals(x, field.name, rows), True))
        if self.emit_next_valid:
            columns.append(("next_valid", self._next_valid(rows), True))
        return columns

    def _to_mini_batch(self, batch: Any, **more: Any) -> Any:
        made = super()._to_mini_batch(batch, **more)
        return made if made.next_critic_obs is not None else made._replace(next_critic_obs=made.next_obs)

    def _arguments(self) -> dict[str, Any]:
        options = {name: getattr(self, name) for name in ("strict_next", "emit_next_valid", "validate")}
        return {**super()._arguments(), **options}

    def _get_state(self) -> State:
        with self._lock:
            state = super()._get_state()
            state.numbers.update(has_next=list(self._has_next), finals=sorted(self._finals))
            state.tensors.update((_WHOLE + name, x) for name, x in self._whole.items())
            for step, (ended, values) in self._finals.items():
                state.tensors[f"{_FINALS}{step}/envs"] = ended
                state.tensors.update((f"{_FINALS}{step}/of/{name}", x) for name, x in values.items())
            for name in self._whole:
                del state.tensors[name]
            return state

    def _set_state(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        with self._lock:
            self._check_kept(numbers["has_next"], numbers["finals"], tensors)
            whole = {name: tensors[_WHOLE + name] for name in self._whole}
            finals = {
                step: (
                    tensors[f"{_FINALS}{step}/envs"],
                    {name: tensors[f"{_FINALS}{step}/of/{name}"] for name in whole},
                )
                for step in numbers["finals"]
            }
            others = {name: x for name, x in tensors.items() if not name.startswith((_WHOLE, _FINALS))}
            super()._set_state(numbers, {**others, **{name: x[:-1] for name, x in whole.items()}})
            self._whole, self._finals = whole, finals
            self._has_next = list(numbers["has_next"])

    def _check_kept(self, has_next: Any, finals: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """Refuse what `_get_state` adds to a state, if it could not have been given by it."""
        num_steps, action = self.num_transitions_per_env, "load a state"
        if not isinstance(has_next, list) or [type(x) for x in has_next] != [bool] * num_steps:
            raise SchemaError(action, "with 'has_next'", f"a list of {num_steps} bools", repr(has_next))
        if not isinstance(finals, list) or not all(type(x) is int and 0 <= x < num_steps for x in finals):
            raise SchemaError(action, "with 'finals'", f"a list of ints from 0 to {num_steps - 1}", repr(finals))
        fields = {field.name: field for field in self._shifted_fields()}
        rows = {f"{_FINALS}{step}/of/{name}": (step, field) for step in finals for name, field in fields.items()}
        known = [_WHOLE + name for name in fields] + [f"{_FINALS}{step}/envs" for step in finals] + list(rows)
        found = {name: None for name in tensors if name.startswith((_WHOLE, _FINALS))}
        check_same_names(dict.fromkeys(known), found, action)
        for step in finals:
            envs = tensors[f"{_FINALS}{step}/envs"]
            is_index = envs.dtype is torch.int64 and envs.dim() == 1
            if not is_index or bool(((envs < 0) | (envs >= self.num_envs)).any()):
                raise SchemaError(action, f"with '{_FINALS}{step}/envs'", f"int64 [n] below {self.num_envs}", str(envs))
        for name, (step, field) in rows.items():
            shape = (len(tensors[f"{_FINALS}{step}/envs"]), *field.shape)
            if tensors[name].shape != shape or tensors[name].dtype != field.torch_dtype:
                got = f"{tensors[name].dtype} {list(tensors[name].shape)}"
                raise SchemaError(action, f"with {name!r}", f"{field.dtype} {list(shape)}", got)

    def _with_finals(self, x: torch.Tensor, name: str, rows: int) -> torch.Tensor:
        """Put the true final observations in; `x` itself if there are none."""
        finals = [(step, *kept) for step, kept in self._finals.items() if step < rows]
        if not finals or not self.strict_next:
            return x
        x = x.clone()
        for step, ended, values in finals:
            signed(x)[step, ended] = signed(values[name])
        return x

    def _next_valid(self, rows: int) -> torch.Tensor:
        valid = self._signals(rows).dones == 0
        if self.strict_next:
            for step, (ended, _) in self._finals.items():
                if step < rows:
                    valid[step, ended] = True
        elif self._has_next[rows - 1]:  # the last step has no later one that could hide its own
            valid[rows - 1] = True
        return valid

    def _shifted(self, column: str, steps: slice) -> Any:
        fields = self._table.columns[column].fields
        if not fields:
            return None
        found = {field.name: self._whole[field.name][steps] for field in fields}
        return found[column] if column in found else unflatten(found)[column]

    def _shifted_fields(self) -> list[Any]:
        columns: list[Column] = [self._table.columns[name] for name in _SHIFTED]
        return [field for column in columns for field in column.fields]
