"""Loading of a trajectory file: nested dicts of tensors `[T, B, ...]` and other values.

A file of `torch.save` contains T steps of B environments. Pickles may run code, and are read only
if the caller trusts their author.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from storage.checkpoints.checkpoint_files import load_checkpoint, map_checkpoint
from storage.errors import CorruptFileError, UnsafeFileError

#: Keys of flags that may have an additional row before the first step of each rollout epoch.
END_FLAGS = ("dones", "terminations", "truncations")


def load_trajectory(
    path: Path, *, trusted: bool = False, is_mapped: bool = False
) -> Mapping[Any, Any]:
    """Load a trajectory from a file of `torch.save` or from a pickle.

    Args:
        path: The file. A file of `torch.save` has the suffix "pt"; every other file is a pickle.
        trusted: Whether a pickle may be read.
        is_mapped: Whether the tensors of a `pt` file are mapped. Otherwise they are read, and their
            checksums are checked.

    Raises:
        UnsafeFileError: The file is a pickle and `trusted` is false, or the file has objects that
            are neither tensors nor plain values.
        DataFileError: The file is damaged, or does not contain a dict.
    """
    where = repr(str(path))
    if path.suffix != ".pt":
        trajectory = _load_pickle(path, trusted)
    else:
        load = map_checkpoint if is_mapped else load_checkpoint
        try:
            trajectory = load(path)
        except UnsafeFileError as cause:
            raise UnsafeFileError(
                f"{where} contains objects that are neither tensors nor plain values. No code of "
                "the file was run."
            ) from cause
    if not isinstance(trajectory, Mapping):
        content = type(trajectory).__name__
        raise CorruptFileError(f"{where} contains a {content}, expected a dict.")
    return trajectory


def _load_pickle(path: Path, trusted: bool) -> Any:
    where = repr(str(path))
    if not trusted:
        raise UnsafeFileError(
            f"{where} is a pickle, which can run code. Pass trusted=True if you trust its author."
        )
    try:
        with open(path, "rb") as file:
            return pickle.load(file)  # The user allows this with `trusted`.
    except Exception as cause:  # Code in a pickle may raise any exception.
        raise CorruptFileError(f"{where} is not an intact pickle: {cause}.") from cause


def split_epochs(rows: torch.Tensor, num_steps: int) -> torch.Tensor | None:
    """View the flags of several rollout epochs as `[num_epochs, steps per epoch + 1, ...]`.

    RLinf writes rollout epochs of equal length one after another. Each may have an additional row
    of flags, from before its first step. The number of additional rows is the number of epochs.

    Args:
        rows: Flags of all epochs, `[num_rows, ...]`.
        num_steps: Steps of all epochs.

    Returns:
        A view of `rows`; None if there are no additional rows, or if `num_steps` is not a multiple
        of their number.
    """
    num_epochs = len(rows) - num_steps
    if num_epochs <= 0 or num_steps % num_epochs:
        return None
    return rows.reshape(num_epochs, num_steps // num_epochs + 1, *rows.shape[1:])
