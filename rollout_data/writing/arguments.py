"""The arguments of a writer, checked before anything is touched."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch

from storage.core.durable import as_path
from storage.errors import SchemaError, UsageError

from .record import REWARD, Rollout, as_tensor, num_nonfinite

#: Ids of envs are stored as int32.
MAX_NUM_ENVS = 1 << 24


def check_arguments(
    data_dir: Any, num_envs: Any, counts: Mapping[str, Any], block_age_s: Any, name: Any, nonfinite: Any, metadata: Any
) -> None:
    """Raise `UsageError` for the first argument of `RolloutWriter` that is not what it must be.

    Args:
        counts: Further arguments that are whole numbers >= 1, by name.
    """
    if "\0" in str(as_path(data_dir, "record into")):
        _refuse("data_dir", "a path without NUL characters", data_dir)
    _check_whole("num_envs", num_envs, MAX_NUM_ENVS)
    for what, value in counts.items():
        _check_whole(what, value)
    if isinstance(block_age_s, bool) or not isinstance(block_age_s, Real) or not float(block_age_s) >= 0:
        _refuse("block_age_s", "seconds >= 0", block_age_s)
    if not isinstance(name, str) or not re.fullmatch("[A-Za-z0-9-]{1,100}", name):
        _refuse("writer_name", "1 to 100 letters, digits and '-'", name)
    if nonfinite not in ("accept", "refuse"):
        _refuse("nonfinite_rewards", "'accept' or 'refuse'", nonfinite)
    if metadata is not None and not isinstance(metadata, Mapping):
        _refuse("metadata", "a mapping", metadata)
    try:
        json.dumps(dict(metadata or {}), default=str)
    except (TypeError, ValueError, RecursionError) as cause:
        _refuse("metadata", f"what JSON can hold ({cause})", metadata)


def checked_env_ids(env_ids: Sequence[int] | np.ndarray | torch.Tensor, num_envs: int) -> np.ndarray:
    """Give ids of envs as int64, each once and in order; raise `UsageError` if they are none."""
    given = np.asarray(env_ids.cpu() if isinstance(env_ids, torch.Tensor) else env_ids)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        kind = f"{given.dtype} of shape {given.shape}"
        raise UsageError("discard the trajectories of envs", "", "a list of ids", kind, "A mask has nonzero()")
    found = np.unique(given.astype(np.int64))
    if len(found) and not (found[0] >= 0 and found[-1] < num_envs):
        raise UsageError("discard the trajectories of envs", "", f"ids in 0:{num_envs}", str(found.tolist()))
    return found


def check_rewards(rollout: Rollout) -> None:
    """Raise `UsageError` if a reward is NaN or infinite, in whatever field there is of them."""
    for name, values in rollout.fields.items():
        if name.split("/")[0] == REWARD and (count := num_nonfinite(values, rollout.present)):
            got = f"{count} NaN or infinite ones"
            raise UsageError("add a record", f"with the field {name!r}", "finite values", got)


def kept_flags(success: Any, rollout: Rollout) -> np.ndarray | None:
    """Give `success` of a record as `[T, N]` bool; None where it is not given and nothing ends."""
    if success is None and not (rollout.terminated | rollout.truncated).any():
        return None
    flags = np.zeros(0) if success is None else as_tensor("success", success).ne(0).cpu().numpy()
    if flags.size != rollout.present.size:
        expected = f"success of shape {rollout.present.shape[1:]} for a step, true where a trajectory is kept"
        raise SchemaError("add a record", "with success_only", expected, f"shape {flags.shape}" * (flags.size > 0))
    return flags.reshape(rollout.present.shape)


def _check_whole(what: str, value: Any, most: int | None = None) -> None:
    try:
        is_whole = not isinstance(value, bool | str) and math.isfinite(value) and int(value) == value
    except (TypeError, ValueError, OverflowError):
        is_whole = False
    if not is_whole or value < 1 or (most is not None and value > most):
        _refuse(what, "an integer >= 1" if most is None else f"an integer from 1 to {most}", value)


def _refuse(what: str, expected: str, value: Any) -> None:
    raise UsageError("make a RolloutWriter", f"with {what}", expected, repr(value), f"Choose another {what}")
