"""What readers ask before they touch a file: does it lie within, is it small enough, is the package there.

One rule: a name that a file gives leads to no other place than the folder that was opened.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from storage.core.durable_files import MAX_JSON_BYTES, open_regular, read_text
from storage.errors import CorruptFileError, DataFileError, RolloutDataError, UnsafeFileError, UsageError

from ..sources.natural_order import natural


def optional(module: str, package: str, extra: str, what: str) -> Any:
    """Import the module of a package that reads `what`, for example "video".

    Raises:
        UsageError: The package is not installed; names the extra that brings it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as cause:
        advice = f"Install it with: pip install 'rollout-data[{extra}]'"
        raise UsageError(f"read {what}", "", f"the package {package}", str(cause), advice) from cause


def file_inside(root: Path, name: str) -> Path:
    """Return the path of a regular file `name` below `root`, links followed.

    A folder of the Hugging Face cache, `snapshots/<revision>`, may link to `blobs` beside `snapshots`.

    Raises:
        UnsafeFileError: It lies elsewhere.
        CorruptFileError: It is not there, or no regular file.
    """
    path = type(root)(os.path.abspath(root / name))
    real_root = os.path.realpath(root)
    places = [real_root]
    if os.path.basename(os.path.dirname(real_root)) == "snapshots":
        places.append(os.path.join(os.path.dirname(os.path.dirname(real_root)), "blobs"))
    if "\0" in name or not any(_is_below(os.path.realpath(path), place) for place in places):
        raise UnsafeFileError("open", repr(name), f"a file below {str(root)!r}", "a path that leads out of it")
    if not path.is_file():
        got = "something else" if path.exists() else "nothing of that name"
        raise CorruptFileError("open", repr(str(path)), "a file", got)
    return path


class KnownFiles:
    """The states of files when each was first seen; a file that has changed since is refused.

    Every reader checks a file before each read. A pickled copy that arrives at another machine notes the states there:
    copies of files have other inodes and times.

    Args:
        states: Path -> inode, size in bytes, and time of the last change in ns, where they are known.
    """

    def __init__(self, states: Mapping[Path, tuple[int, int, int]] | None = None) -> None:
        self._states = {os.fspath(path): state for path, state in (states or {}).items()}

    def __getstate__(self) -> dict[str, Any]:
        return {"states": self._states, "machine": os.uname().nodename}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self._states = dict(state["states"]) if state["machine"] == os.uname().nodename else {}

    def check(self, path: Path, state: os.stat_result | None = None) -> None:
        """Compare a file, or the `state` of an open one, with the first time, or note it.

        A file that was never there is not noted: opening it raises.

        Raises:
            CorruptFileError: It was removed, or is another one.
        """
        name = os.fspath(path)
        try:
            about = os.stat(name) if state is None else state
        except (FileNotFoundError, NotADirectoryError):
            if name not in self._states:
                return
            raise _changed(path, "none any more") from None
        now = about.st_ino, about.st_size, about.st_mtime_ns
        if self._states.setdefault(name, now) != now:
            raise _changed(path, "another")

    @contextmanager
    def open(self, path: Path) -> Iterator[BinaryIO]:
        """Open a file for reading.

        Raises:
            CorruptFileError: It was removed, or is another one.
        """
        self.check(path)
        with open(open_regular(path), "rb") as file:
            self.check(path, os.fstat(file.fileno()))
            yield file


def _changed(path: Path, got: str) -> CorruptFileError:
    advice = "Call refresh() of the recording, or open it again"
    return CorruptFileError("read", repr(str(path)), "the file as it was when it was opened", got, advice)


def _is_below(real_path: str, real_root: str) -> bool:
    return real_path.startswith(real_root.rstrip(os.sep) + os.sep)


def listed(folder: Path, endings: tuple[str, ...] = ("",)) -> list[Path]:
    """List what lies in a folder by the numbers in its names, hidden ones left out; nothing is opened."""
    names = (one.name for one in folder.iterdir() if one.name.endswith(endings) and not one.name.startswith("."))
    return [folder / name for name in sorted(names, key=natural)]


def parse_json(text: str, path: Path) -> Any:
    """Parse JSON; infinities and NaN, as Python writes them, are numbers."""
    try:
        return json.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as cause:
        raise CorruptFileError("read", repr(str(path)), "JSON", str(cause)[:200]).of("metadata") from cause


def read_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object of another system: in its order, with all its keys.

    Raises:
        CorruptFileError: It is too large, or no JSON object.
    """
    found = parse_json(read_text(path, max_bytes=max_bytes), path)
    if not isinstance(found, dict):
        raise CorruptFileError("read", repr(str(path)), "a JSON object", type(found).__name__).of("metadata")
    return found


def parse_attribute(text: Any, name: str) -> dict[str, Any]:
    """Parse an attribute that holds a JSON object. Anything else is returned under its name."""
    with suppress(CorruptFileError):
        content = parse_json(text, Path(name)) if isinstance(text, str) else None
        if isinstance(content, dict):
            return content
    return {} if text is None else {name: text}


def first_bytes(path: Path, num_bytes: int) -> bytes:
    """Read the beginning of a file; b"" if it cannot be read."""
    try:
        with open(open_regular(path), "rb") as file:
            return file.read(num_bytes)
    except (OSError, DataFileError):
        return b""


@contextmanager
def of_kind(kind: str) -> Iterator[None]:
    """Note the kind of defects that are found within; also a decorator."""
    try:
        yield
    except DataFileError as problem:
        problem.of(kind)
        raise


@contextmanager
def damage_named(action: str, where: str, expected: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn what a library raises because of a damaged file into one error."""
    try:
        yield
    except kinds as cause:
        if isinstance(cause, RolloutDataError):
            raise
        got = f"{type(cause).__name__}: {cause}".split("\n")[0][:200]
        raise CorruptFileError(action, where, expected, got) from cause
    except MemoryError as cause:
        raise DataFileError(action, where, expected, "more than the memory holds") from cause
