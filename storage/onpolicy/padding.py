"""Cut a rollout at its dones into trajectories side by side, padded with zeros, and back.

One rule: trajectories stand env by env, then in time, so that those of a range of envs are a
range of trajectories. `find_segments` does the arithmetic once; gathers move the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..core.fields import signed
from ..core.tree import map_leaves
from ..errors import SchemaError

_Empty = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


@dataclass(frozen=True)
class Segments:
    """Where the trajectories of some envs of a `[T, B]` rollout stand."""

    #: B.
    num_envs: int
    #: `[T, n]` bool, False on padding.
    masks: torch.Tensor
    #: `[n]` int64, row `t * B + b` of each trajectory's first step.
    starts: torch.Tensor
    #: Trajectories before each env, and all of them.
    bounds: list[int]

    @cached_property
    def source(self) -> torch.Tensor:
        """`[T * n]` int64, the row that each padded place shows; any row on padding."""
        offset = torch.arange(len(self.masks), device=self.masks.device).unsqueeze(1)
        return torch.where(self.masks, self.starts + offset * self.num_envs, self.starts).flatten()

    def of_envs(self, start: int, stop: int) -> Segments:
        """Give the trajectories of a range of envs."""
        part = slice(self.bounds[start], self.bounds[stop])
        bounds = [bound - self.bounds[start] for bound in self.bounds[start : stop + 1]]
        return Segments(self.num_envs, self.masks[:, part], self.starts[part], bounds)


def find_segments(dones: torch.Tensor) -> Segments:
    """Find the trajectories of `dones` `[T, B]` or `[T, B, 1]` of any dtype, not 0 on a last step."""
    if dones.dim() == 3 and dones.shape[-1] == 1:
        dones = dones.squeeze(-1)
    if dones.dim() != 2 or not dones.numel():
        expected = "dones of shape [T, B] or [T, B, 1], at least one step of one env"
        raise SchemaError("split trajectories", "", expected, str(list(dones.shape)))
    num_steps, num_envs = dones.shape
    is_first = torch.ones(num_envs, num_steps, dtype=torch.bool, device=dones.device)
    is_first[:, 1:] = (dones[:-1] != 0).T
    first = is_first.flatten().nonzero().squeeze(1)  # b * T + t
    env = torch.div(first, num_steps, rounding_mode="floor")
    lengths = torch.diff(first, append=first.new_tensor([num_envs * num_steps]))
    masks = torch.arange(num_steps, device=dones.device).unsqueeze(1) < lengths
    bounds = [0, *is_first.sum(1).cumsum(0).tolist()]
    return Segments(num_envs, masks, (first - env * num_steps) * num_envs + env, bounds)


def gather_padded(
    x: torch.Tensor, source: torch.Tensor, padding: torch.Tensor, empty: _Empty | None = None
) -> torch.Tensor:
    """Gather rows `source` of `[T, B, *event]`, with zeros at the places `padding`: `[len(source), *event]`.

    Gradients flow through, unless `empty` gives the memory of the result.
    """
    flat = signed(x).reshape(len(x) * x.shape[1], x[:1, :1].numel())
    if empty is None:
        padded = flat.index_select(0, source)
    else:
        padded = empty((len(source), flat.shape[1]), flat.dtype)
        torch.index_select(flat, 0, source, out=padded)
    padded.index_fill_(0, padding, 0)
    return _as(x.dtype, padded).view(len(source), *x.shape[2:])


def split_and_pad_trajectories(x: Any, dones: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Split every env at its dones and lay the trajectories side by side.

    Args:
        x: `[T, B, *event]` of any dtype, or a nested dict of such.
        dones: `[T, B]` or `[T, B, 1]`, not 0 on the last step of a trajectory.

    Returns:
        `[T, n, *event]` with zeros after each trajectory's end, env by env and then in time, and
        `[T, n]` bool that is True where there is data. New tensors.
    """
    segments = find_segments(dones)
    num_steps, padding = len(segments.masks), (~segments.masks).flatten().nonzero().squeeze(1)

    def pad(leaf: torch.Tensor) -> torch.Tensor:
        _check_steps("split trajectories", leaf, num_steps, segments.num_envs)
        return gather_padded(leaf, segments.source, padding).view(*segments.masks.shape, *leaf.shape[2:])

    return map_leaves(pad, x), segments.masks


def unpad_trajectories(padded: Any, masks: torch.Tensor) -> Any:
    """Undo `split_and_pad_trajectories`.

    Args:
        padded: `[T, n, *event]`, or a nested dict of such; what a recurrent network gives back too.
        masks: `[T, n]` bool from the split, or a range of its trajectories that covers whole envs.

    Returns:
        `[T, B, *event]`; gradients flow through.

    Raises:
        SchemaError: The masks are not `[T, n]`, or do not add up to whole envs.
    """
    if not isinstance(masks, torch.Tensor) or masks.dim() != 2:
        got = str(list(masks.shape)) if isinstance(masks, torch.Tensor) else type(masks).__name__
        raise SchemaError("join trajectories", "", "masks of shape [T, n]", got)
    num_steps, num_trajectories = masks.shape
    # The true places trajectory by trajectory, which is env by env and in time.
    places = masks.T.flatten().nonzero().squeeze(1)
    if not len(places) or len(places) % num_steps:
        expected = f"masks with a multiple of {num_steps} True values"
        raise SchemaError("join trajectories", "", expected, str(len(places)))
    trajectory = torch.div(places, num_steps, rounding_mode="floor")
    rows = (places - trajectory * num_steps) * num_trajectories + trajectory
    order = rows.view(-1, num_steps).T.flatten()

    def join(leaf: torch.Tensor) -> torch.Tensor:
        _check_steps("join trajectories", leaf, num_steps, num_trajectories)
        joined = signed(leaf).flatten(0, 1).index_select(0, order)
        return _as(leaf.dtype, joined).view(num_steps, -1, *leaf.shape[2:])

    return map_leaves(join, padded)


def _as(dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == dtype else x.view(dtype)  # no gradient flows through a view as the same dtype either


def _check_steps(action: str, x: torch.Tensor, num_steps: int, num_columns: int) -> None:
    if tuple(x.shape[:2]) != (num_steps, num_columns):
        raise SchemaError(action, "", f"a tensor of shape [{num_steps}, {num_columns}, ...]", str(list(x.shape)))
