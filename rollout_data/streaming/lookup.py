"""Batches outside the stream: empty ones, writing into one, and frames by their position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from storage.errors import SchemaError

from ..format.header import DATA
from ..frames.store import FrameStore
from ..transition import Transition
from .batches import BatchOptions, BatchReader, map_batch, view_rows
from .cursor import Deal, Ends, Int64s, Part, Pieces, Plan


def empty_batch(store: FrameStore, options: BatchOptions, num_steps: int | None, num_envs: int) -> Transition:
    """A batch of zeros, `[T, num_envs, ...]`, or `[num_envs, ...]` for None; every field has memory of its own."""
    leading = (num_envs,) if num_steps is None else (num_steps, num_envs)
    layout = store.layouts[DATA]
    rows = {
        name: torch.zeros((*leading, column.row_bytes), dtype=torch.uint8, device=options.device)
        for name, column in layout.columns.items()
    }
    batch = view_rows(layout, rows, rows, options.flatten_observations)
    flags: dict[str, Any] = {
        name: torch.zeros(leading, dtype=torch.bool, device=options.device)
        for name in ("done", "timeout", "is_first", "valid", "is_last")
    }
    return map_batch(lambda tensor: tensor.clone(memory_format=torch.contiguous_format), batch._replace(**flags))


def write_into(buffer: Transition, batch: Transition, rows: torch.Tensor | None) -> None:
    """Copy every tensor of `batch` into `buffer`: into its first-axis `rows`, or all of it for None."""
    for name, target, source in zip(Transition._fields, buffer, batch, strict=True):
        if isinstance(source, (torch.Tensor, Mapping)):
            _write(name, target, source, rows)


def _write(name: str, target: Any, source: Any, rows: torch.Tensor | None) -> None:
    if isinstance(source, Mapping):
        for key, value in source.items():
            _write(f"{name}/{key}", target[key], value, rows)
        return
    if target is None:
        return
    shape = target.shape if rows is None else (len(rows), *target.shape[1:])
    if tuple(shape) != tuple(source.shape):
        raise SchemaError("fill the buffer", f"field {name!r}", str(tuple(source.shape)), str(tuple(shape)))
    if rows is None:
        target.copy_(source)
    else:
        target[rows.to(target.device)] = source.to(target.device, target.dtype)


def frames_at(reader: BatchReader, deal: Deal, trajectory: Int64s, position: np.ndarray, linear: bool) -> Transition:
    """Read single frames of trajectories.

    Args:
        reader: How the batch looks.
        deal: What the trajectory numbers refer to.
        trajectory: int64 `[K]`.
        position: float64 `[K]`, in frames, within the trajectory.
        linear: Interpolate floating-point fields between the two frames around the position, instead
            of taking the nearer one.
    """
    reader = BatchReader(replace(reader.options, mark_first_frame=False), reader.pool)
    envs = np.arange(len(trajectory))
    last = deal.lengths[trajectory] - 1
    nearest = reader.read(_plan(deal, trajectory, np.minimum(np.floor(position + 0.5).astype(np.int64), last)), envs)
    nearest = map_batch(lambda tensor: tensor[0], nearest)
    if not linear:
        return nearest
    lower = np.floor(position).astype(np.int64)
    below, above = (
        map_batch(lambda tensor: tensor[0], reader.read(_plan(deal, trajectory, np.minimum(frame, last)), envs))
        for frame in (lower, lower + 1)
    )
    weight = torch.from_numpy(position - lower).to(reader.options.device)
    mixed = [_mix(*values, weight) for values in zip(below, above, nearest, strict=True)]
    return Transition(*mixed)


def _plan(deal: Deal, trajectory: Int64s, frame: Int64s) -> Plan:
    """One step that reads a frame of each trajectory and the one after it (the last one again at the end)."""
    count = len(trajectory)
    env, one = np.arange(count), np.ones(count, np.int64)
    is_last = frame == deal.lengths[trajectory] - 1
    both = Pieces(env, 0 * one, trajectory, frame, np.where(is_last, 1, 2))
    again = Pieces(env[is_last], one[is_last], trajectory[is_last], frame[is_last], one[is_last])
    pieces = Pieces(*(np.concatenate(pair) for pair in zip(both, again, strict=True)))
    ends = Ends(env[is_last], 0 * one[is_last], trajectory[is_last])
    first = np.flatnonzero(frame == 0)
    return Plan(1, (Part(deal, pieces, ends),), np.zeros(len(first), np.int64), first, one)


def _mix(below: Any, above: Any, nearest: Any, weight: torch.Tensor) -> Any:
    if isinstance(below, Mapping):
        return {key: _mix(value, above[key], nearest[key], weight) for key, value in below.items()}
    if not isinstance(below, torch.Tensor) or not below.dtype.is_floating_point:
        return nearest
    share = weight.to(below.dtype).view(-1, *[1] * (below.dim() - 1))
    return torch.lerp(below, above, share.expand_as(below))
