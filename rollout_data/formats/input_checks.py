"""Checks before a file is read: path, size and state of the file, and optional packages.

A file name in a data file must not lead out of the opened folder.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from storage.core.durable_files import MAX_JSON_BYTES, open_regular, read_text
from storage.errors import (
    CorruptFileError,
    DataFileError,
    RolloutDataError,
    UnsafeFileError,
    UsageError,
)

from ..sources.recordings.natural_order import natural

#: Errors that pyarrow raises for damaged files, in addition to `pyarrow.ArrowException`.
ARROW_DAMAGE = (OSError, ValueError, LookupError, TypeError, NotImplementedError)
_REOPEN_ADVICE = "Call refresh() of the recording, or open it again."


def optional(module: str, package: str, extra: str, purpose: str) -> Any:
    """Import the module of an optional package.

    Args:
        module: Module to import.
        package: Name of the package, for the error.
        extra: Extra of this library that installs the package.
        purpose: Kind of data that needs the package, such as "video".

    Raises:
        UsageError: The package is not installed. The error names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as cause:
        raise UsageError(
            f"the package {package} is needed for {purpose} but cannot be imported: {cause}. "
            f"Install it with: pip install 'rollout-data[{extra}]'."
        ) from cause


def file_inside(root: Path, name: str) -> Path:
    """Return the path of the regular file `name` below `root`. Links are resolved.

    In the Hugging Face cache, a folder `snapshots/<revision>` may also link into the folder `blobs`
    next to `snapshots`.

    Raises:
        UnsafeFileError: The file is outside of `root`.
        CorruptFileError: The file does not exist, or is not a regular file.
    """
    path = type(root)(os.path.abspath(root / name))
    real_root = os.path.realpath(root)
    places = [real_root]
    parent = os.path.dirname(real_root)
    if os.path.basename(parent) == "snapshots":
        places.append(os.path.join(os.path.dirname(parent), "blobs"))
    if "\0" in name or not any(_is_below(os.path.realpath(path), place) for place in places):
        raise UnsafeFileError(
            f"{str(root)!r} refers to the file {name!r}, which is outside of the folder. Files "
            "outside are not read."
        )
    if not path.exists():
        raise CorruptFileError(f"{str(path)!r} is missing.")
    if not path.is_file():
        raise CorruptFileError(f"{str(path)!r} is not a regular file.")
    return path


class KnownFiles:
    """States of files at their first use, for the detection of later changes.

    Readers check a file before each read. An object that is unpickled on another machine starts
    without states, because inodes and times differ between machines.

    Args:
        states: Maps paths of files that were already used to (inode, size in bytes, modification
            time in ns).
    """

    def __init__(self, states: Mapping[Path, tuple[int, int, int]] | None = None) -> None:
        self._states = {os.fspath(path): state for path, state in (states or {}).items()}

    def __getstate__(self) -> dict[str, Any]:
        return {"states": self._states, "machine": os.uname().nodename}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self._states = dict(state["states"]) if state["machine"] == os.uname().nodename else {}

    def check(self, path: Path, state: os.stat_result | None = None) -> None:
        """Compare the state of a file with its first state, or record the first state.

        A missing file without a recorded state is ignored, because opening it raises an error.

        Args:
            path: Path of the file.
            state: State of the open file; None reads the state from the path.

        Raises:
            CorruptFileError: The file was removed, replaced or changed.
        """
        name = os.fspath(path)
        try:
            status = os.stat(name) if state is None else state
        except (FileNotFoundError, NotADirectoryError):
            if name not in self._states:
                return
            raise CorruptFileError(
                f"{str(path)!r} has been removed since it was opened. {_REOPEN_ADVICE}"
            ) from None
        now = (status.st_ino, status.st_size, status.st_mtime_ns)
        if self._states.setdefault(name, now) != now:
            raise CorruptFileError(
                f"{str(path)!r} has changed since it was opened. {_REOPEN_ADVICE}"
            )

    @contextmanager
    def open(self, path: Path) -> Iterator[BinaryIO]:
        """Open a file for reading.

        Raises:
            CorruptFileError: The file was removed, replaced or changed since its first use.
        """
        self.check(path)  # Opening a removed file would raise `FileNotFoundError` instead.
        with open(open_regular(path), "rb") as file:
            # The file may have been replaced since the first check.
            self.check(path, os.fstat(file.fileno()))
            yield file

    def map(self, path: Path) -> memoryview:
        """Memory-map a file read-only after checking that it has not changed."""
        with self.open(path) as file:
            size = file.seek(0, 2)
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b"")


def _is_below(real_path: str, real_root: str) -> bool:
    return real_path.startswith(real_root.rstrip(os.sep) + os.sep)


def listed(folder: Path, endings: tuple[str, ...] = ("",)) -> list[Path]:
    """Return the visible entries of a folder, sorted by the numbers in their names."""
    names = [entry.name for entry in folder.iterdir() if not entry.name.startswith(".")]
    matching = [name for name in names if name.endswith(endings)]
    return [folder / name for name in sorted(matching, key=natural)]


def parse_json(text: str, path: Path) -> Any:
    """Parse JSON. `Infinity` and `NaN` are accepted as numbers.

    Raises:
        CorruptFileError: The text is not valid JSON. The error names `path`.
    """
    try:
        return json.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as cause:
        message = f"{str(path)!r} is not valid JSON: {str(cause)[:200]}."
        raise CorruptFileError(message, kind="metadata") from cause


def read_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a file with a JSON object.

    Raises:
        CorruptFileError: The file is larger than `max_bytes`, or is not a JSON object.
    """
    content = parse_json(read_text(path, max_bytes=max_bytes), path)
    if not isinstance(content, dict):
        message = f"{str(path)!r} contains a {type(content).__name__}, expected a JSON object."
        raise CorruptFileError(message, kind="metadata")
    return content


def parse_attribute(text: Any, name: str) -> dict[str, Any]:
    """Parse an attribute that contains a JSON object.

    Any other value is returned as `{name: value}`, and None as {}.
    """
    with suppress(CorruptFileError):
        content = parse_json(text, Path(name)) if isinstance(text, str) else None
        if isinstance(content, dict):
            return content
    return {} if text is None else {name: text}


def first_bytes(path: Path, num_bytes: int) -> bytes:
    """Read the first bytes of a file; return b"" if the file is unreadable."""
    try:
        with open(open_regular(path), "rb") as file:
            return file.read(num_bytes)
    except (OSError, DataFileError):
        return b""


@contextmanager
def of_kind(kind: str) -> Iterator[None]:
    """Set `kind`, the kind of defect, of each `DataFileError` raised in the block.

    Also usable as a decorator.
    """
    try:
        yield
    except DataFileError as problem:
        problem.of(kind)
        raise


@contextmanager
def damage_named(subject: str, *kinds: type[Exception]) -> Iterator[None]:
    """Convert the exceptions that a library raises for damaged files into `CorruptFileError`.

    Args:
        subject: Subject of the error message, such as the name of the file in quotes.
        kinds: Exception types of the library.

    Raises:
        DataFileError: The block raised `MemoryError`.
    """
    try:
        yield
    except kinds as cause:
        if isinstance(cause, RolloutDataError):
            raise
        reason = str(cause) if type(cause) is ValueError else f"{type(cause).__name__}: {cause}"
        reason = reason.split("\n")[0][:200].rstrip(".")
        raise CorruptFileError(f"{subject} is damaged: {reason}.") from cause
    except MemoryError as cause:
        raise DataFileError(f"{subject} does not fit into memory.") from cause
