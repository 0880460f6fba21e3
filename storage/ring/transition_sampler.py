"""Draw transitions of one or several steps. Next observations are read from the following rows.

A transition never crosses the end of a trajectory. The next observation of a trajectory's last step
is its final observation, if one was stored. Otherwise the last step is excluded or marked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ..core import arguments
from ..core.fields import signed, unflatten
from ..core.memory import lasting, library, own, sent, tensor_of
from ..core.records import Key, names_below
from ..errors import FieldTypeError, SchemaError, UsageError, nearest
from .trajectory_ends import EndKinds
from .window_bounds import Boundaries, Drawn, Extent

_GAMMA = 0.99


@dataclass(frozen=True)
class TransitionRequest:
    """Contents of a transition: fields, number of steps, and treatment of trajectory ends.

    Attributes:
        next_keys: Fields, or mappings of fields, to return below `next` for the time after the last
            step.
        num_steps: Number of steps n of an n-step transition. Rewards are summed with discounts up
            to the end of the trajectory. End flags and time-out flags are copied from the last
            step taken. `discount` `[B, 1]` is the factor of the value of the next observation: 0 if
            the trajectory terminated, `gamma ** k` after k steps if it was truncated or continues.
            An end flag with another name, such as `done`, means a termination unless a time-out of
            the same step is set. If the schema has a termination flag, `done` is ignored.
            `discount` already contains the factor `1 - terminated`.
        gamma: Discount per step. None means 0.99, and omits `discount` from transitions of one
            step.
        reward_key: Field of the rewards to sum if `num_steps > 1`.
        num_frames: Number of frames in a stack of the fields of `next_keys`, oldest first:
            `[B, frames, *event]`. Frames before the start of the trajectory repeat its first row.
        at_end: Treatment of last rows without a known next observation, because no final
            observation was passed to `extend`. "exclude" never draws them. "mark" draws them,
            repeats their own observation as the next observation, and adds `next_valid`, `[B, 1]`
            bool.
    """

    next_keys: tuple[Key, ...] = ("observation",)
    num_steps: int = 1
    gamma: float | None = None
    reward_key: Key = "reward"
    num_frames: int = 1
    at_end: str = "exclude"

    def __post_init__(self) -> None:
        keys = (self.next_keys,) if isinstance(self.next_keys, str) else self.next_keys
        arguments.instance("next_keys", keys, "a list of names", Iterable)
        object.__setattr__(self, "next_keys", tuple(keys))
        if self.gamma is not None:
            gamma: Any = self.gamma
            if isinstance(gamma, torch.Tensor) and gamma.numel() == 1:
                gamma = gamma.item()
            gamma = arguments.real("gamma", gamma, "in [0, 1]", lambda x: 0 <= x <= 1)
            object.__setattr__(self, "gamma", gamma)
        for name, value in (("num_steps", self.num_steps), ("num_frames", self.num_frames)):
            object.__setattr__(self, name, arguments.whole(name, value, 1))
        arguments.choice("at_end", self.at_end, ("exclude", "mark"))

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> TransitionRequest:
        """Build a request from the keyword options of `sample_transitions`.

        Raises:
            UsageError: An option is unknown or has a wrong value.
        """
        for name in options:
            if name not in cls.__dataclass_fields__:
                raise UsageError(
                    f"the option {name!r} is unknown. The options are "
                    f"{nearest(name, cls.__dataclass_fields__)}."
                )
        # Requests with a tensor are not cached, since the tensor may change in place.
        if isinstance(options.get("gamma"), torch.Tensor):
            return cls(**options)
        try:
            return _remembered(**options)
        except TypeError:  # Options such as lists are not hashable.
            return cls(**options)


#: Cached constructor of requests: the checks take 10 us, a third of a draw of 32 transitions.
_remembered = lru_cache(maxsize=16, typed=True)(TransitionRequest)


class TransitionSampler:
    """Sampler of the transitions of one ring.

    Args:
        boundaries: Ends of the ring's trajectories, with their final observations.
        end_names: Names of the end flags in `end_key`.
        request: Contents of a transition.
    """

    def __init__(
        self, boundaries: Boundaries, end_names: list[str], request: TransitionRequest
    ) -> None:
        self._boundaries = boundaries
        self._ring = boundaries.ring
        self._request = request
        schema = self._ring.schema
        self._end_kinds = EndKinds.of(schema, end_names)
        self._flag_names = tuple(dict.fromkeys((*end_names, *self._end_kinds.names)))
        names = (
            name for key in request.next_keys for name in names_below(schema, key, "next_keys")
        )
        self._next_names = tuple(dict.fromkeys(names))
        added = [f"next/{name}" for name in self._next_names] + ["next"] * bool(self._next_names)
        self._has_discount = request.num_steps > 1 or request.gamma is not None
        added += ["discount"] * self._has_discount + ["next_valid"] * (request.at_end == "mark")
        for name in added:
            if name in schema:
                raise SchemaError(
                    f"the field name {name!r} is reserved for a computed value of transitions. "
                    "Rename the field."
                )
        self._finals_given = boundaries.finals
        self._extent = Extent(
            num_frames=request.num_frames,
            num_after=request.num_steps,
            ends=boundaries.ends_for(self._next_names, request.at_end == "mark"),
        )
        self._flags_not_in_end_key = self._end_kinds.missing_from(end_names)
        self._library: Any = library(self._ring.device)
        is_short = request.num_steps == request.num_frames == 1 and not self._flags_not_in_end_key
        #: Whether every transition consists of two consecutive rows of one trajectory.
        self._is_plain = is_short and self._extent.ends == "never"
        self._set_factors(_GAMMA if request.gamma is None else request.gamma)
        if request.num_steps > 1:
            (self._reward_name,) = names_below(schema, request.reward_key, "reward_key")[:1]
            if not schema[self._reward_name].torch_dtype.is_floating_point:
                raise FieldTypeError(
                    f"reward field {self._reward_name!r} must have a floating dtype, got "
                    f"{schema[self._reward_name].dtype}."
                )

    def serves(self, request: TransitionRequest, boundaries: Boundaries | None) -> bool:
        """Return whether this sampler can be reused for a request and the current trajectories.

        `boundaries` is replaced when a state is loaded; then a new sampler is needed.
        """
        is_same = request is self._request or request == self._request
        return (
            is_same and boundaries is self._boundaries and boundaries.finals is self._finals_given
        )

    def sample(
        self, num_draws: int, generator: torch.Generator, contiguous: bool
    ) -> dict[str, Any]:
        """Draw transitions uniformly with replacement and return them as a nested dict."""
        names = self._ring.names
        boundaries = self._boundaries
        ring = self._ring
        request = self._request
        if self._is_plain:
            places = boundaries.draw_places(num_draws, 2, generator)
            if places is None:
                raise _no_transition()
            transitions = ring.rows(places, ring.cut_of(names, self._next_names, contiguous))
            if self._has_discount:
                transitions["discount"] = self._discount(
                    lambda name: _leaf_at(transitions, name), self._factors[-1:]
                )
            return transitions
        drawn = boundaries.draw(num_draws, self._extent, generator)
        if drawn is None:
            raise _no_transition()
        if self._flags_not_in_end_key:
            self._check_end_key(drawn)
        factors = (
            self._factors[-1:]
            if drawn.ended is None
            else self._factors.index_select(0, drawn.num_ahead)
        )
        if request.num_steps == 1:
            places = ring.place(drawn.lane, drawn.row)
            transitions = ring.rows(
                places, ring.cut_of(names, self._next_names, contiguous, nested=False)
            )
            following = {name: transitions.pop(f"next/{name}") for name in self._next_names}
        else:
            # Steps beyond the end of a trajectory repeat its last row; their weight is 0.
            steps = self._own_steps
            if drawn.ended is not None:
                steps = self._library.minimum(steps, own(drawn.num_ahead))
            places = ring.place(own(drawn.lane), own(drawn.row) + steps)
            transitions = ring.gather(places[0], contiguous)
            cut = ring.cut_of(self._next_names, (), contiguous, nested=False)
            following = ring.rows(places[-1], cut)
            self._sum_rewards(transitions, places[:-1], factors)
        if self._has_discount:
            transitions["discount"] = self._discount(transitions.__getitem__, factors)
        own_rows = _rows_of(transitions) if request.num_steps == 1 else None
        follows = boundaries.put_finals(following, own_rows, drawn, request.at_end == "mark")
        if request.num_frames > 1:
            self._stack(transitions, following, drawn)
        transitions.update((f"next/{name}", x) for name, x in following.items())
        if follows is not None:
            transitions["next_valid"] = follows.unsqueeze(1)
        return unflatten(transitions)

    @lasting
    def _set_factors(self, gamma: float) -> None:
        """Precompute the reward weights, discounts and row offsets that all draws use."""
        num_steps = self._request.num_steps
        factor = torch.tensor(gamma, dtype=torch.float32, device="cpu")
        steps = torch.arange(num_steps, device="cpu")
        num_taken = torch.cat([steps + 1, steps[-1:] + 1])
        weights = torch.where(steps < num_taken.unsqueeze(1), factor**steps, 0)
        discounts = (factor**num_taken).unsqueeze(1)
        #: Reward weights and discounts, `[num_steps + 1, num_steps + 1]` float32. Row k is for
        #: transitions whose first row has k following rows in its trajectory. Its first
        #: `num_steps` values are the weights of the rewards, and its last value is the discount.
        self._factors = sent(torch.cat([weights, discounts], 1), self._ring.device)
        #: Offsets from the first row, `[num_steps + 1, 1]`: 0, 1, ..., num_steps.
        self._steps = torch.arange(num_steps + 1, device=self._ring.device).unsqueeze(1)
        # The offsets as an array on the CPU, because numpy has less overhead per call.
        self._own_steps = own(self._steps)
        #: Distance from each frame of a stack to its newest frame: `num_frames - 1`, ..., 1, 0.
        self._frames_back = own(
            torch.arange(self._request.num_frames - 1, -1, -1, device=self._ring.device)
        )

    def _sum_rewards(
        self, transitions: dict[str, torch.Tensor], places: Any, factors: torch.Tensor
    ) -> None:
        """Replace rewards by their discounted sums, and end flags by the flags of the last step.

        Args:
            transitions: Fields of the first rows, changed in place.
            places: Positions in memory of the rows of each step, `[num_steps, n]`: array or tensor.
            factors: Reward weights and, in the last column, discounts: `[n or 1, num_steps + 1]`.
        """
        name = self._reward_name
        rewards = self._ring.column(name).index_select(0, tensor_of(places.T.reshape(-1)))
        rewards = rewards.view(-1, self._request.num_steps, *rewards.shape[1:])
        weights = factors[:, :-1].to(rewards.dtype)
        transitions[name] = (
            rewards * weights.view(*weights.shape, *[1] * (rewards.dim() - 2))
        ).sum(1)
        for flag_name in self._flag_names:
            transitions[flag_name] = self._ring.column(flag_name).index_select(
                0, tensor_of(places[-1])
            )

    def _discount(self, rows: Callable[[str], torch.Tensor], factors: torch.Tensor) -> torch.Tensor:
        """Return the discounts `[n, 1]` float32: 0 for transitions that terminated.

        Args:
            rows: Function that maps the name of an end flag to its values, `[n, *event]`.
            factors: Reward weights and, in the last column, discounts: `[n or 1, num_steps + 1]`.
        """
        return torch.where(self._end_kinds.terminated(rows), 0.0, factors[:, -1]).unsqueeze(1)

    def _check_end_key(self, drawn: Drawn) -> None:
        """Raise `UsageError` if an end flag missing from `end_key` is set within a trajectory.

        On a device a later draw raises the error.
        """
        steps = self._steps[:-1]
        # A flag is an error only on a row that is followed by a row of the same trajectory.
        is_within = steps < drawn.num_ahead
        steps = steps if drawn.ended is None else steps.minimum(drawn.num_ahead)
        places = self._ring.place(drawn.lane, drawn.row + steps).flatten()
        is_wrong = torch.zeros_like(places, dtype=torch.bool)
        for name in self._flags_not_in_end_key:
            flags = self._ring.column(name).index_select(0, places).flatten(1)
            is_wrong |= (flags != 0).any(1)
        num_wrong = (is_wrong.view(is_within.shape[0], -1) & is_within).sum()
        deferred = self._boundaries.deferred
        deferred.note(num_wrong, self._missing_flag_error)
        if drawn.row.is_cpu:
            deferred.raise_arrived()

    def _missing_flag_error(self, num_wrong: int) -> UsageError | None:
        """Return the error for rows at which a flag missing from `end_key` is set, else None.

        `num_wrong` is the number of such rows within the drawn transitions.
        """
        if not num_wrong:
            return None
        named = " or ".join(map(repr, self._flags_not_in_end_key))
        return UsageError(
            f"{named} is set on rows that do not end a trajectory, so the next row may belong "
            "to another trajectory. Add it to end_key."
        )

    def _stack(
        self, transitions: dict[str, torch.Tensor], following: dict[str, torch.Tensor], drawn: Drawn
    ) -> None:
        """Replace observations and next observations by stacks of `num_frames` frames."""
        first = own(drawn.row)[:, None]
        num_taken: Any = self._request.num_steps
        if drawn.ended is not None:
            num_taken = own(drawn.num_ahead + drawn.ended)[:, None]
        start = first - own(self._boundaries.age(drawn.lane, drawn.row))[:, None]
        lane = own(drawn.lane)[:, None]
        frames = first - self._frames_back
        places = self._ring.place(lane, self._library.maximum(frames, start))
        next_places = self._ring.place(lane, self._library.maximum(frames + num_taken, start))
        for name in self._next_names:
            transitions[name] = self._frames(name, places)
            stack = self._frames(name, next_places)
            # Take the newest frame from `following`: at ends it is the final observation, which the
            # ring does not contain.
            stack[:, -1] = following[name]
            following[name] = stack

    def _frames(self, name: str, places: Any) -> torch.Tensor:
        """Copy a field of the rows at memory positions `places`, `[n, frames]`.

        The result is `[n, frames, *event]`.
        """
        rows = self._ring.column(name).index_select(0, tensor_of(places.reshape(-1)))
        return rows.view(*places.shape, *rows.shape[1:])


def _rows_of(
    fields: Mapping[str, torch.Tensor],
) -> Callable[[str, torch.Tensor | None], torch.Tensor]:
    def rows_of(name: str, rows: torch.Tensor | None) -> torch.Tensor:
        return fields[name] if rows is None else signed(fields[name])[rows]

    return rows_of


def _leaf_at(tree: Mapping[str, Any], name: str) -> torch.Tensor:
    """Return the leaf with a flat name from a nested record."""
    node: Any = tree
    for key in name.split("/"):
        node = node[key]
    leaf: torch.Tensor = node
    return leaf


def _no_transition() -> UsageError:
    return UsageError(
        "no row has a known next observation. Add more rows, pass final observations to "
        "extend(), or pass at_end='mark'."
    )
