"""Access to the readers of all file formats without import cycles.

The modules of formats import this package. Each function here therefore imports its module when it
is called.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .file_source import FileSource
    from .scanner import Scanner

#: Module with the list of all formats, which is imported at the first call.
_FORMATS = "rollout_data.formats.registry"
#: Modules of trajectory folders, the earlier format of this library: the scanner and file names.
_TRAJECTORY_FOLDERS = "rollout_data.formats.trajectory_folders.trajectory_folder_scanner"
_TRAJECTORY_FILES = "rollout_data.formats.trajectory_folders.trajectory_listing"


def detect(path: Path) -> str | None:
    """Return the name of the first format that matches a file or folder, or None."""
    name: str | None = import_module(_FORMATS).detect(path)
    return name


def holds_files_of_others(folder: Path) -> bool:
    """Return whether a folder has HDF5 files and all of them are recordings of other systems."""
    return bool(import_module(_FORMATS).holds_files_of_others(folder))


def open_foreign(path: Path, format: str | None = None, **options: Any) -> FileSource:
    """Open a file or folder of another system as a source of episodes.

    Raises:
        ForeignFileError: The file has no known format, or matches several formats.
        UsageError: The format has no such option.
    """
    source: FileSource = import_module(_FORMATS).open_foreign(path, format, **options)
    return source


def trajectory_folders() -> type[Scanner]:
    """Return the `Scanner` class for trajectory folders, the earlier format of this library."""
    scanner: type[Scanner] = import_module(_TRAJECTORY_FOLDERS).TrajectoryFolderScanner
    return scanner


def chunk_frames(path: str) -> tuple[int, int] | None:
    """Parse the frame range `(start, stop)` in a file name of a trajectory folder.

    Returns:
        The range; None if the file is no chunk of a trajectory.
    """
    frames: tuple[int, int] | None = import_module(_TRAJECTORY_FILES).chunk_frames(path)
    return frames
