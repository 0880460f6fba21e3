"""Transitions as views of windows: the next observation is the following row, never stored twice.

One rule: nothing crosses the end of a trajectory or the row that is written next. What follows the
last step of a trajectory is its final observation, if the caller gave it; otherwise such rows are
left out or marked, as the caller chooses, and never continued with the next trajectory's first row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from ..core import arguments
from ..core.fields import unflatten
from ..core.records import Key, names_below
from ..errors import FieldTypeError, SchemaError, UsageError, nearest
from .ends import EndKinds
from .windows import Boundaries

_ACTION = "sample transitions"
_GAMMA = 0.99


@dataclass(frozen=True)
class TransitionRequest:
    """What a transition consists of.

    Attributes:
        next_keys: Fields (or mappings of fields) that are given for the time after the last step,
            below `next`.
        num_steps: n of n-step transitions: rewards are summed with discounts up to the end of the
            trajectory, and flags that end trajectories, or name time-outs, are those of the last step
            taken. `discount` `[B, 1]` is the factor of the value of the next observation: 0 where the
            trajectory terminated, `gamma ** k` after k steps where it was cut or goes on. An end flag
            that is neither a termination nor a time-out by its name, such as `done`, is a termination
            unless a time-out of the same step is set. Multiplying by `1 - terminated` changes nothing.
        gamma: Discount per step. None is 0.99, and leaves `discount` out of transitions of one step.
        reward_key: What is summed if `num_steps > 1`.
        num_frames: Frames that the fields of `next_keys` are stacked of, oldest first: `[B, frames,
            *event]`; the first row of a trajectory stands in for those before it.
        at_end: Rows whose next observation is not known, because their trajectory ended and no final
            observation was given: "exclude" never draws them; "mark" does, with their own observation
            in the place of the next, and gives `next_valid`, `[B, 1]` bool.
    """

    next_keys: tuple[Key, ...] = ("observation",)
    num_steps: int = 1
    gamma: float | None = None
    reward_key: Key = "reward"
    num_frames: int = 1
    at_end: str = "exclude"

    def __post_init__(self) -> None:
        keys = (self.next_keys,) if isinstance(self.next_keys, str) else tuple(self.next_keys)
        object.__setattr__(self, "next_keys", keys)
        for name, value in (("num_steps", self.num_steps), ("num_frames", self.num_frames)):
            arguments.whole(_ACTION, name, value, 1)
        arguments.choice(_ACTION, "at_end", self.at_end, ("exclude", "mark"))

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> TransitionRequest:
        """Make a request of the options of `sample_transitions`.

        Raises:
            UsageError: An option is unknown, or has a wrong value.
        """
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                raise UsageError(_ACTION, "", f"options {nearest(name, known)}", repr(name))
        return cls(**options)


class TransitionSampler:
    """Draw and gather transitions of one ring.

    Args:
        boundaries: Where the trajectories of the ring end, and final observations.
        end_names: Fields that end trajectories.
        request: What is asked for.
    """

    def __init__(self, boundaries: Boundaries, end_names: list[str], request: TransitionRequest) -> None:
        self._boundaries, self._ring, self._request = boundaries, boundaries.ring, request
        schema = self._ring.schema
        self._end_kinds = EndKinds.of(schema, end_names)
        self._flag_names = tuple(dict.fromkeys((*end_names, *self._end_kinds.names)))
        names = (name for key in request.next_keys for name in names_below(schema, key, _ACTION, "next_keys"))
        self._next_names = tuple(dict.fromkeys(names))
        added = [f"next/{name}" for name in self._next_names] + ["next"] * bool(self._next_names)
        self._has_discount = request.num_steps > 1 or request.gamma is not None
        added += ["discount"] * self._has_discount + ["next_valid"] * (request.at_end == "mark")
        for name in added:
            if name in schema:
                expected, got = "a name that no transition adds", "that of something that is computed"
                raise SchemaError(_ACTION, f"with the field {name!r}", expected, got, "Add it under another name")
        self._finals_given = boundaries.finals
        gamma = _GAMMA if request.gamma is None else request.gamma
        self._gamma = torch.tensor(gamma, dtype=torch.float32, device=self._ring.device)
        self._zero = torch.zeros_like(self._gamma)
        self._unnamed_ends = self._end_kinds.unnamed(end_names)
        is_short = request.num_steps == request.num_frames == 1 and not self._unnamed_ends
        #: Whether every transition is two rows of one trajectory.
        self._is_plain = is_short and request.at_end == "exclude" and boundaries.finals_of(self._next_names) is None
        if request.num_steps > 1:
            (self._reward_name,) = names_below(schema, request.reward_key, _ACTION, "reward_key")[:1]
            if not schema[self._reward_name].torch_dtype.is_floating_point:
                got = schema[self._reward_name].dtype
                raise FieldTypeError("sum rewards", f"of {self._reward_name!r}", "a floating dtype", got)

    def serves(self, request: TransitionRequest, boundaries: Boundaries) -> bool:
        """Tell whether this was made of the same parts."""
        is_same = request is self._request or request == self._request
        return is_same and boundaries is self._boundaries and boundaries.finals is self._finals_given

    def sample(self, num_draws: int, generator: torch.Generator, contiguous: bool) -> dict[str, Any]:
        """Draw transitions uniformly: a nested dict."""
        names, boundaries = self._ring.names, self._boundaries
        if self._is_plain:
            places = boundaries.draw_places(num_draws, 2, generator)
            if places is None:
                raise _no_transition()
            found = self._ring.rows(places, self._ring.cut_of(names, self._next_names, contiguous))
            if self._has_discount:
                found["discount"] = self._discount(lambda name: _leaf_at(found, name), 1)
            return found
        drawn = boundaries.draw(num_draws, 1, generator, self._is_complete)
        if drawn is None:
            raise _no_transition()
        lane, first = drawn
        num_steps, ended = self._reach(lane, first)
        if self._unnamed_ends:
            self._check_ends_are_named(lane, first, num_steps, ended)
        places = self._ring.place(lane, first)
        if self._request.num_steps == 1:
            found = self._ring.rows(places, self._ring.cut_of(names, self._next_names, contiguous, nested=False))
            following = {name: found.pop(f"next/{name}") for name in self._next_names}
        else:
            found = self._ring.gather(places, contiguous)
            rows = self._ring.gather(self._ring.place(lane, first + num_steps - ended.long()), contiguous)
            following = {name: rows[name] for name in self._next_names}
            self._sum_rewards(found, lane, first, num_steps)
        if self._has_discount:
            found["discount"] = self._discount(found.__getitem__, num_steps)
        follows = boundaries.put_finals(following, lane, first + num_steps - 1, ended)
        if self._request.num_frames > 1:
            self._stack(found, following, lane, first, num_steps)
        found.update((f"next/{name}", x) for name, x in following.items())
        if self._request.at_end == "mark":
            found["next_valid"] = follows.unsqueeze(1)
        return unflatten(found)

    def _is_complete(self, lane: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """Say which first rows make a complete transition."""
        num_frames, (num_steps, ended) = self._request.num_frames, self._reach(lane, first)
        is_marked, last = self._request.at_end == "mark", first + num_steps - 1
        follows = self._boundaries.may_follow(self._next_names, is_marked, lane, last)
        accepted = torch.where(ended, follows, first + num_steps < self._ring.total)
        if num_frames > 1:
            accepted &= first - self._boundaries.age(lane, first).clamp(max=num_frames - 1) >= self._ring.oldest
        return accepted

    def _reach(self, lane: torch.Tensor, first: torch.Tensor) -> tuple[torch.Tensor | int, torch.Tensor]:
        """Say how many steps a transition takes, and whether its trajectory ends with them."""
        if self._request.num_steps == 1:
            return 1, self._boundaries.ended(lane, first)
        ids = first.unsqueeze(1) + torch.arange(1, self._request.num_steps + 1, device=first.device)
        is_start = (self._boundaries.age(lane.unsqueeze(1).expand_as(ids), ids) == 0) & (ids <= self._ring.total)
        ended = is_start.any(1)
        # argmax gives the first of the largest.
        reached = torch.where(ended, is_start.to(torch.uint8).argmax(1) + 1, self._request.num_steps)
        return reached, ended

    def _sum_rewards(
        self, found: dict[str, torch.Tensor], lane: torch.Tensor, first: torch.Tensor, num_steps: torch.Tensor | int
    ) -> None:
        """Replace the first row's reward by the discounted sum, and its end flags by those of the last step."""
        request, name = self._request, self._reward_name
        steps = torch.arange(request.num_steps, device=first.device)
        taken = torch.as_tensor(num_steps, device=first.device)
        is_taken = steps < taken.unsqueeze(1)
        # Steps that are not taken read the first row, which is always there, and weigh nothing.
        ids = torch.where(is_taken, first.unsqueeze(1) + steps, first.unsqueeze(1))
        rewards = self._rows_of(name, lane, ids)
        weights = torch.where(is_taken, self._gamma**steps, 0).to(rewards.dtype)
        found[name] = (rewards * weights.view(*ids.shape, *[1] * (rewards.dim() - 2))).sum(1)
        last = self._ring.place(lane, first + num_steps - 1)
        for flag_name in self._flag_names:
            found[flag_name] = self._ring.column(flag_name).index_select(0, last)

    def _discount(self, rows: Callable[[str], torch.Tensor], num_steps: torch.Tensor | int) -> torch.Tensor:
        """Return the factors of next values after transitions with these end flags: `[n, 1]` float32."""
        discount = self._gamma**num_steps
        return torch.where(self._end_kinds.terminated(rows), self._zero, discount).unsqueeze(1)

    def _check_ends_are_named(
        self, lane: torch.Tensor, first: torch.Tensor, num_steps: torch.Tensor | int, ended: torch.Tensor
    ) -> None:
        """Raise `UsageError` if a flag of ends that `end_key` does not name is set within a trajectory."""
        steps = torch.arange(self._request.num_steps, device=first.device)
        is_within = steps < (num_steps - ended.long()).unsqueeze(1)
        ids = torch.where(is_within, first.unsqueeze(1) + steps, first.unsqueeze(1))
        for name in self._unnamed_ends:
            flags = self._rows_of(name, lane, ids).flatten(2)
            if bool(((flags != 0).any(2) & is_within).any()):
                expected, got = f"an end_key that names {name!r} too", "rows where it is set and no trajectory ends"
                raise UsageError(_ACTION, "", expected, got, "What follows such a row is of another trajectory")

    def _stack(
        self,
        found: dict[str, torch.Tensor],
        following: dict[str, torch.Tensor],
        lane: torch.Tensor,
        first: torch.Tensor,
        num_steps: torch.Tensor | int,
    ) -> None:
        """Stack the frames up to the first row, and those up to what follows the last step."""
        start = (first - self._boundaries.age(lane, first)).unsqueeze(1)
        back = torch.arange(self._request.num_frames - 1, -1, -1, device=first.device)
        for name in self._next_names:
            found[name] = self._rows_of(name, lane, (first.unsqueeze(1) - back).maximum(start))
            before = ((first + num_steps).unsqueeze(1) - back[:-1]).maximum(start)
            following[name] = torch.cat([self._rows_of(name, lane, before), following[name].unsqueeze(1)], 1)

    def _rows_of(self, name: str, lane: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Copy a field of `[n, any]` rows of `[n]` lanes: `[n, any, *event]`."""
        places = self._ring.place(lane.unsqueeze(1).expand_as(ids), ids).flatten()
        rows = self._ring.column(name).index_select(0, places)
        return rows.view(*ids.shape, *rows.shape[1:])


def _leaf_at(tree: Mapping[str, Any], name: str) -> torch.Tensor:
    """Return the leaf of a nested record with this flat name."""
    found: Any = tree
    for key in name.split("/"):
        found = found[key]
    leaf: torch.Tensor = found
    return leaf


def _no_transition() -> UsageError:
    advice = "Add more rows, give final observations to extend(), or ask for at_end='mark'"
    return UsageError(_ACTION, "", "a row whose next observation is known", "none", advice)
