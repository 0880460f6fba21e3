"""`RslRlStorage`: replacement for the rollout storage of rsl-rl-lib 5.

This module only converts names and types. Observations are `TensorDict`s, mini-batches are objects,
and an action distribution may have any number of parameters. The package of rsl_rl is not imported.
`tensordict` is imported when a storage is created.

    from storage.adapters.rsl_rl import RslRlStorage
    algorithm = PPO(actor, critic, RslRlStorage("rl", num_envs, num_steps, obs, (num_actions,)))
    runner.alg.storage = RslRlStorage.like(runner.alg.storage)  # replaces the runner's storage
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from ..core import arguments
from ..core.fields import DTYPES, Field, dtype_name, unflatten
from ..core.memory import sent
from ..errors import UsageError
from ..onpolicy.rollout_storage import RolloutStorage
from ..onpolicy.transition_columns import Column, Transition, declare_fields, input_column
from ..saving.saved_store import State

_BOTH = {"observations", "actions", "rewards", "dones", "saved_hidden_states"}
#: Names of the columns that each training type uses, without the columns that only rsl_rl has.
_COLUMNS = {
    "rl": _BOTH | {"values", "actions_log_prob", "returns", "advantages"},
    "distillation": _BOTH,
}
_PARAMETERS = "distribution_params"


@dataclass
class Batch:
    """Mini-batch for an algorithm of rsl_rl. Fields that the training does not use are None."""

    observations: Any = None
    actions: torch.Tensor | None = None
    values: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    old_actions_log_prob: torch.Tensor | None = None
    old_distribution_params: tuple[torch.Tensor, ...] | None = None
    hidden_states: tuple[Any, Any] = (None, None)
    masks: torch.Tensor | None = None
    privileged_actions: torch.Tensor | None = None
    dones: torch.Tensor | None = None


@dataclass
class RslRlTransition(Transition):
    """Values of one step of all envs, with the additional fields of rsl_rl."""

    hidden_states: Any = (None, None)
    distribution_params: tuple[torch.Tensor, ...] | None = None
    privileged_actions: torch.Tensor | None = None


class RslRlStorage(RolloutStorage):
    """A rollout storage for the algorithms of rsl_rl.

    Args:
        training_type: "rl" or "distillation".
        num_envs: Number of environments, B.
        num_transitions_per_env: Number of steps, T.
        obs: `TensorDict` or nested dict of `[B, ...]`, an example of the observations.
        actions_shape: Shape of one action.
        device: Device of all data.
        compat: Whether mini-batches are drawn as in rsl_rl. All epochs of an update then use the
            same permutation. Rows or envs that remain after the division into equal mini-batches
            are left out. Otherwise each epoch has a new permutation, and no env is left out.
        generator: Random generator, or a seed; see `RolloutStorage`. For the same permutations and
            losses as rsl_rl with the same seed, pass the generator that rsl_rl uses:
            `torch.default_generator`, on a GPU `torch.cuda.default_generators[index]`.
    """

    Transition: type[Any] = RslRlTransition
    Batch: type[Any] = Batch

    def __init__(
        self,
        training_type: str,
        num_envs: int,
        num_transitions_per_env: int,
        obs: Any,
        actions_shape: tuple[int, ...] | list[int],
        device: torch.device | str = "cpu",
        *,
        compat: bool = True,
        generator: torch.Generator | int | None = None,
    ) -> None:
        self.training_type = arguments.choice("training_type", training_type, _COLUMNS)
        self.compat = arguments.flag("compat", compat)
        self._parameters: tuple[Field, ...] = ()
        shape = _shapes(obs)
        super().__init__(
            num_envs,
            num_transitions_per_env,
            shape,
            None,
            actions_shape,
            1,
            device,
            generator=generator,
        )

    @classmethod
    def like(cls, storage: Any, **options: Any) -> Any:
        """Create an empty storage with the sizes, observations and device of a storage of rsl_rl.

        Assign the result to `runner.alg.storage` before `runner.learn`.

        Args:
            storage: Storage of rsl_rl, such as `runner.alg.storage`.
            options: `compat` and `generator`.
        """
        return cls(
            storage.training_type,
            storage.num_envs,
            storage.num_transitions_per_env,
            storage.observations[0],
            storage.actions_shape,
            storage.device,
            **options,
        )

    def declare_columns(self) -> list[Column]:
        """Return the columns that the training type uses.

        The first transition determines number and shapes of the distribution parameters. Until
        then, the column of the parameters has no fields.
        """
        columns = [
            column
            for column in super().declare_columns()
            if column.name in _COLUMNS[self.training_type]
        ]
        if self.training_type == "distillation":
            return [
                *columns,
                input_column("privileged_actions", self.actions_shape, "privileged_actions"),
            ]
        return [*columns, Column(_PARAMETERS, self._parameters, _PARAMETERS, f"old_{_PARAMETERS}")]

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if name == "observations":
            return _tensordict(value, [self.num_transitions_per_env, self.num_envs])
        return tuple(value.values()) if name == _PARAMETERS and value is not None else value

    def add_transition(self, transition: Any) -> None:
        """Copy one step from a transition of rsl_rl or of this library.

        Raises:
            RolloutOverflowError: The storage is full.
            SchemaError: A field is missing, or has another shape or dtype.
        """
        with self._lock:
            values = {name: value for name, value in vars(transition).items() if value is not None}
            values["observations"] = _plain(values.get("observations"))
            parameters = values.pop(_PARAMETERS, None)
            if parameters and self.training_type == "rl":
                if not self._parameters:
                    shapes = {
                        str(i): (tuple(x.shape[1:]), dtype_name(x.dtype))
                        for i, x in enumerate(parameters)
                    }
                    self._declare_parameters(declare_fields(_PARAMETERS, shapes))
                values[_PARAMETERS] = {str(i): x for i, x in enumerate(parameters)}
            values.setdefault("hidden_states", None)
            self.add_transitions(SimpleNamespace(**values))  # type: ignore[arg-type]

    def generator(self) -> Iterator[Any]:
        """Yield one batch per step in the order of time, for distillation.

        Raises:
            UsageError: The training type is not "distillation", or the rollout is not full. The
                call of `generator` raises this error, before the first batch is requested.
        """
        if self.training_type != "distillation":
            raise UsageError(f"training_type is {self.training_type!r}, expected 'distillation'.")
        return self._steps(self._num_rows_for(False))

    def _steps(self, num_steps: int) -> Iterator[Any]:
        names = ("observations", "privileged_actions", "dones")
        for step in range(num_steps):
            with self._lock:
                batch = self.Batch(**{name: getattr(self, name)[step].clone() for name in names})
                self._order.record(is_write=False)
            yield batch

    def mini_batch_generator(
        self, num_mini_batches: int, num_epochs: int = 8, **options: Any
    ) -> Iterator[Any]:
        """Yield shuffled mini-batches of rows.

        `options` are passed to `RolloutStorage.mini_batch_generator`. They are ignored if `compat`
        is True.
        """
        options_of_call = {"reshuffle": "once"} if self.compat else options
        return super().mini_batch_generator(num_mini_batches, num_epochs, **options_of_call)

    def _plan_batches(
        self, num_mini_batches: int, num_epochs: int, drop_last: bool, item: str
    ) -> tuple[int, Any]:
        if self.training_type != "rl":
            raise UsageError(f"training_type is {self.training_type!r}, expected 'rl'.")
        return super()._plan_batches(num_mini_batches, num_epochs, drop_last or self.compat, item)

    def _permutation(self, num_rows: int, num_used: int) -> torch.Tensor:
        if self.compat:
            # Call torch exactly as rsl_rl does, to draw equal permutations.
            # The result depends on the dtype and the number of rows.
            return sent(
                torch.randperm(num_used, generator=self.rng, device=self.rng.device), self.device
            )
        return super()._permutation(num_rows, num_used)

    def _arguments(self) -> dict[str, Any]:
        arguments = super()._arguments()
        sizes = {
            name: arguments[name]
            for name in ("num_envs", "num_transitions_per_env", "obs_shape", "actions_shape")
        }
        return {"training_type": self.training_type, "compat": self.compat, **sizes}

    @classmethod
    def _from_arguments(cls, arguments: Mapping[str, Any], device: torch.device) -> Any:
        options = dict(arguments)
        observations = {
            path: torch.empty((0, *shape), dtype=DTYPES[dtype][0])
            for path, shape, dtype in options.pop("obs_shape")
        }
        ((_, actions_shape, _),) = options.pop("actions_shape")
        return cls(
            **options,
            obs=unflatten(observations),
            actions_shape=tuple(actions_shape),
            device=device,
            generator=0,
        )

    def _get_state(self) -> State:
        state = super()._get_state()
        state.numbers[_PARAMETERS] = [field.to_json() for field in self._parameters]
        return state

    def _set_state(self, numbers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        with self._lock:
            if numbers[_PARAMETERS]:
                self._declare_parameters(
                    tuple(Field.from_json(item) for item in numbers[_PARAMETERS])
                )
            super()._set_state(numbers, tensors)

    def _to_mini_batch(self, batch: Mapping[str, Any], **more: Any) -> Any:
        fields = unflatten(batch)
        masks = more.get("masks")
        size = [len(fields["actions"])] if masks is None else list(masks.shape)
        observations = fields.pop("obs")
        parameters = fields.pop(f"old_{_PARAMETERS}", {})
        return self.Batch(
            **fields,
            observations=_tensordict(observations, size),
            old_distribution_params=tuple(parameters.values()),
            hidden_states=more.get("hidden_states") or (None, None),
            masks=masks,
        )

    def _declare_parameters(self, fields: tuple[Field, ...]) -> None:
        """Set shapes and dtypes of the distribution parameters, and reallocate all columns."""
        self._parameters = fields
        self._make_table(self.num_transitions_per_env)


def _plain(observations: Any) -> Any:
    """Convert a `TensorDict` to a nested dict of the same tensors. Other values are unchanged."""
    return observations.to_dict() if hasattr(observations, "to_dict") else observations


def _shapes(observations: Any) -> dict[str, Any]:
    return {
        key: _shapes(x) if isinstance(x, Mapping) else (tuple(x.shape[1:]), dtype_name(x.dtype))
        for key, x in _plain(observations).items()
    }


def _tensordict(tree: Mapping[str, Any], size: list[int]) -> Any:
    from tensordict import TensorDict

    return TensorDict(dict(tree), batch_size=size)
