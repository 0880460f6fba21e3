"""Reading of a trajectory file: nested dicts of tensors `[T, B, ...]` and other values.

A file of `torch.save` contains T steps of B environments. Its tensors are read or memory-mapped.
Pickles may run code, and are read only if the caller trusts their author.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from storage.checkpoints.checkpoint_files import load_checkpoint
from storage.core.durable_files import open_regular
from storage.errors import CorruptFileError, UnsafeFileError

#: Keys of flags that may have an additional row before the first step of each rollout epoch.
END_FLAGS = ("dones", "terminations", "truncations")
_MAX_PICKLE_BYTES = 1 << 24


def read_trajectory(path: Path, trusted: bool) -> Mapping[Any, Any]:
    """Read a `pt` or `pkl` file into memory. Checksums of a `pt` file are checked.

    Raises:
        UnsafeFileError: The file is a pickle and `trusted` is false, or the file has objects that
            are neither tensors nor plain containers.
        CorruptFileError: The file is damaged, or does not contain a dict.
    """
    where = repr(str(path))
    if path.suffix == ".pt":
        trajectory = load_checkpoint(path)
    elif not trusted:
        raise UnsafeFileError(
            f"{where} is a pickle, which can run code. Pass trusted=True if you trust its author."
        )
    else:
        try:
            with open(path, "rb") as file:
                trajectory = pickle.load(file)  # The user allows this with `trusted`.
        except Exception as cause:  # Code in a pickle may raise any exception.
            raise CorruptFileError(f"{where} is not an intact pickle: {cause}.") from cause
    if not isinstance(trajectory, Mapping):
        got = type(trajectory).__name__
        raise CorruptFileError(f"{where} contains a {got}, expected a dict.")
    return trajectory


def map_trajectory(path: Path) -> dict[Any, Any]:
    """Memory-map the tensors of a `pt` file. No code is run, and no checksums are checked.

    Damaged content raises errors of torch, or `ValueError`.

    Raises:
        UnsafeFileError: The file has objects that are neither tensors nor plain containers.
    """
    _check_members(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as cause:
        reason = str(cause).split("\n")[0][:200].rstrip(".")
        raise UnsafeFileError(
            f"{str(path)!r} contains more than tensors and plain containers: {reason}. No code of "
            "the file was run."
        ) from cause
    if not isinstance(content, dict):
        raise ValueError(f"it contains a {type(content).__name__}, expected a dict")
    return content


def _check_members(path: Path) -> None:
    """Raise `ValueError` if a member of a `pt` archive is compressed, or its size is invalid."""
    with open(open_regular(path), "rb") as file, zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            is_pickle = member.filename.endswith(".pkl")
            most_bytes = _MAX_PICKLE_BYTES if is_pickle else member.compress_size
            if member.compress_type != zipfile.ZIP_STORED or member.file_size > most_bytes:
                raise ValueError(f"{member.filename[:80]!r} is compressed or too large")


def split_epochs(rows: torch.Tensor, num_steps: int) -> torch.Tensor | None:
    """View rows as `[epochs, rows per epoch, ...]` if each epoch has one row more than steps.

    The number of additional rows is the number of epochs. The result is None if it is 0 or does not
    divide `num_steps`.
    """
    num_epochs = len(rows) - num_steps
    if num_epochs <= 0 or num_steps % num_epochs:
        return None
    return rows.reshape(num_epochs, num_steps // num_epochs + 1, *rows.shape[1:])
