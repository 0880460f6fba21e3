"""The exception classes of both packages.

Invalid calls (`UsageError`) and bad data (`DataFileError`) are separate subclasses of
`RolloutDataError`. A message is one or two sentences: the problem, then the next step. A
`UsageError` puts the call of the user in front: *DictBuffer.sample: the buffer is empty.*
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any, TypeVar

__all__ = [
    "BackgroundError",
    "BufferEmptyError",
    "ClosedError",
    "CorruptFileError",
    "DataFileError",
    "DatasetExhausted",
    "FieldTypeError",
    "ForeignFileError",
    "MissingFieldError",
    "MissingFolderError",
    "OutOfRangeError",
    "RolloutDataError",
    "RolloutDataWarning",
    "RolloutOverflowError",
    "SchemaError",
    "TargetError",
    "UnansweredError",
    "UnsafeFileError",
    "UsageError",
    "WaitTimeoutError",
    "WriteError",
]

_Self = TypeVar("_Self", bound="RolloutDataError")
#: Maximum number of names that `nearest` compares. Comparing so many takes tenths of a second.
_MOST_COMPARED = 10_000
#: Packages of this project, whose public calls appear in the messages of errors.
_OURS = ("storage", "rollout_data")
#: Packages whose stack frames may be between frames of this project, such as decorators of torch.
_BETWEEN = {"contextlib", "functools", "torch"}


class RolloutDataError(Exception):
    """Base class of all errors of this project.

    Args:
        message: The problem, and the next step for the user: one or two sentences.
        kind: Kind of the defect, such as "gap", for programs that handle the error; "" if unknown.
        episode: Name of the affected episode, or of its folder; "" for no episode or several.
    """

    #: Public call of the user, as in "DictBuffer.sample"; "" if unknown.
    call = ""

    def __init__(self, message: str = "", *, kind: str = "", episode: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind
        self.episode = episode

    def of(self: _Self, kind: str, episode: str = "") -> _Self:
        """Add the kind of the defect and the episode, unless already known; return this error."""
        self.kind = self.kind or kind
        self.episode = self.episode or episode
        return self

    def __str__(self) -> str:
        if not self.call or self.message.startswith(self.call) or f"{self.call}: " in self.message:
            return self.message
        return f"{self.call}: {self.message}"


class UsageError(RolloutDataError, ValueError):
    """An argument or a call is invalid."""

    def __init__(self, message: str = "", *, kind: str = "", episode: str = "") -> None:
        super().__init__(message, kind=kind, episode=episode)
        self.call = _call_of_user()


class SchemaError(UsageError):
    """The fields, shapes or dtypes of a record differ from the schema."""


class MissingFieldError(SchemaError, KeyError):
    """A field of the schema is missing in a record, or a field is not in the schema."""


class MissingFolderError(UsageError, FileNotFoundError):
    """A data folder does not exist."""


class OutOfRangeError(UsageError, IndexError):
    """An index is out of range."""


class FieldTypeError(SchemaError, TypeError):
    """A value has a dtype that cannot be stored in its field without loss."""


class BufferEmptyError(UsageError):
    """A buffer or storage without rows was sampled or read."""


class RolloutOverflowError(RolloutDataError, OverflowError, AssertionError):
    """A transition was added to a full storage; nothing was written."""


class ClosedError(UsageError):
    """A method was called after `close()`."""


class BackgroundError(RolloutDataError, RuntimeError):
    """A background thread failed; `__cause__` is the original error."""


class WriteError(RolloutDataError, OSError):
    """A file or folder could not be written, as on a full disk. The previous content is unchanged.

    Args:
        message: The problem, and the next step for the user: one or two sentences.
        error_number: Error number of the system, as in `OSError.errno`.
        filename: Path of the file or folder.
    """

    def __init__(
        self, message: str = "", error_number: int | None = None, filename: str | None = None
    ) -> None:
        super().__init__(message)
        self.errno = error_number
        self.filename = filename

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.errno, self.filename)


class DatasetExhausted(RolloutDataError, StopIteration):
    """All passes over the trajectories are finished."""


class WaitTimeoutError(RolloutDataError, TimeoutError):
    """A wait for another thread or process took longer than its timeout."""


class DataFileError(RolloutDataError):
    """The content of a file or folder is invalid."""


class UnansweredError(DataFileError):
    """A remote store refused access or did not answer; its files may be intact."""


class CorruptFileError(DataFileError):
    """A file is truncated, damaged or inconsistent."""


class UnsafeFileError(DataFileError):
    """A file is not loaded, because loading it could run its code or read other files."""


class ForeignFileError(DataFileError):
    """A file has another format, or a version that this release cannot read."""


class RolloutDataWarning(UserWarning):
    """Data were repaired, skipped or lost; the message names the data and the amount."""


class TargetError(RolloutDataError, OSError):
    """The target of a conversion, or of another command, cannot be written.

    For example, the target is read-only, its disk is full, or another file has its name.
    """


def _call_of_user() -> str:
    """Return the public call of this project that the user made, such as "DictBuffer.sample".

    The stack is searched outward, up to the first frame that is not of this project. "" means that
    no call on the stack is public.
    """
    call = ""
    frame = inspect.currentframe()
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package in _OURS:
            call = _public_name(frame, package) or call
        elif package not in _BETWEEN:
            break
        frame = frame.f_back
    return call


def _public_name(frame: FrameType, package: str) -> str:
    """Return the public name of the call in a stack frame; "" if the call is not public.

    The name is "function" or "Class.method", and "Class" for private and special methods.
    """
    if frame.f_globals is globals():
        return ""
    # `rollout_data.open` is public but not in `__all__`.
    public = {"open", *getattr(sys.modules[package], "__all__", ())}
    code = frame.f_code
    is_nested = code.co_flags & inspect.CO_NESTED
    name = "" if code.co_name.startswith("_") or is_nested else code.co_name
    if code.co_varnames[:1] not in (("self",), ("cls",)):
        return name if name in public else ""
    owner: Any = frame.f_locals.get(code.co_varnames[0])
    # Use no `isinstance`: it reads `__class__`, which may fail while an object is constructed.
    owner_type: type = owner if issubclass(type(owner), type) else type(owner)
    if not any(base.__name__ in public for base in owner_type.__mro__):
        return ""
    return f"{owner_type.__name__}.{name}" if name else owner_type.__name__


def nearest(name: object, options: Iterable[str], most: int | None = None) -> str:
    """Return valid options as text, the nearest match to `name` first; at most `most` options."""
    listed = sorted(map(str, options))
    close = difflib.get_close_matches(str(name), listed[:_MOST_COMPARED], n=1)
    ordered = close + [option for option in listed if option not in close]
    return ", ".join(map(repr, ordered[:most])) if ordered else "nothing"
