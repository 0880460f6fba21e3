"""Detection of folders that contain several recordings, and the error that lists them."""

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
    """Return the recordings directly in a folder, in natural order.

    If the folder itself is a recording, the result is [].
    """
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


def check_single(path: str | os.PathLike[str]) -> None:
    """Raise `UsageError` if a folder is no recording, but contains recordings."""
    if recordings := recordings_in(path):
        raise several_error(Path(path), recordings)


def several_error(
    path: Path, recordings: list[Path], error_class: type[RolloutDataError] = UsageError
) -> RolloutDataError:
    """Build the error for a call that needs one recording, but got a folder of recordings."""
    names = [repr(recording.name) for recording in recordings[:_NUM_SHOWN]]
    if len(recordings) > _NUM_SHOWN:
        names.append("...")
    count = f"{len(recordings)} recording{'' if len(recordings) == 1 else 's'}"
    return error_class(
        f"{str(path)!r} is a folder with {count} ({', '.join(names)}). Name one of them."
    )
