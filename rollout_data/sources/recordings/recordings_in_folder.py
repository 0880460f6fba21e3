"""Folders that contain several recordings, and the error that lists the recordings."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from storage.core.arguments import is_url
from storage.errors import RolloutDataError, UsageError

from ...blocks.block_folder import block_entries
from ..format_registry import detect, trajectory_folders
from .natural_order import natural

_NUM_SHOWN = 5


def recordings_in(path: str | os.PathLike[str]) -> list[Path]:
    """Return the recordings directly in a folder, in natural order; [] if it is a recording."""
    folder = Path(path)
    if is_url(path) or not folder.is_dir() or _is_recording(folder):
        return []
    entries = sorted(folder.iterdir(), key=lambda entry: natural(entry.name))
    return [entry for entry in entries if not entry.name.startswith(".") and _is_recording(entry)]


def _is_recording(path: Path) -> bool:
    with suppress(OSError, RolloutDataError):
        if path.is_file():
            return detect(path) is not None
        is_written_here = any(entry.name.startswith("rollout_") for entry in block_entries(path))
        return path.is_dir() and (
            is_written_here or detect(path) is not None or trajectory_folders().is_there(path)
        )
    return False


def check_single(action: str, path: str | os.PathLike[str]) -> None:
    """Raise the error of `several_error` if a folder contains several recordings."""
    if inside := recordings_in(path):
        raise several_error(action, Path(path), inside)


def several_error(
    action: str, path: Path, inside: list[Path], error_class: type[RolloutDataError] = UsageError
) -> RolloutDataError:
    """Build the error for a folder of recordings, for calls that need one recording."""
    names = ", ".join(repr(one.name) for one in inside[:_NUM_SHOWN]) + (
        ", ..." if len(inside) > _NUM_SHOWN else ""
    )
    count = f"{len(inside)} recording{'' if len(inside) == 1 else 's'}"
    return error_class(
        f"cannot {action}: {str(path)!r} is a folder of {count} ({names}). Name one of them."
    )
