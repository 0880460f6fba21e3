"""The exception tree of the whole project.

One rule: the class builds the text, so that every message has the same five parts:
*cannot <do what> <where>: expected <x>, got <y>. <what to do>.* Callers' mistakes
(`UsageError`) and bad data (`DataFileError`) are different branches under one base. A caller's
mistake ends with the call, *Raised by <class>.<method>.*, unless its text names both anyway.
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any, TypeVar

_Self = TypeVar("_Self", bound="RolloutDataError")
#: Names among which the nearest one is looked for, at most: so many take some tenths of a second.
_MOST_COMPARED = 10_000
#: Packages whose public calls errors name.
_OURS = ("storage", "rollout_data")
#: Packages whose frames lie between a call of the user and ours: decorators, context managers.
_BETWEEN = {"contextlib", "functools", "torch"}


class RolloutDataError(Exception):
    """Base of every error that this project raises on purpose.

    Args:
        action: What could not be done, as in "read frames 40:60 of trajectory 7".
        where: The place: file, trajectory, field; "" if there is none.
        expected: What would have been right.
        got: What was found instead.
        advice: What the user can do about it, a sentence without the full stop.
        message: The whole text instead of its parts; `DataLoader` gives it, to tell what happened in a worker.

    Attributes:
        kind: What is wrong in a word, as in "gap", for those who sort errors; "" if unknown.
        episode: Name of the episode that is concerned, or of its folder; "" if it is none, or several.
    """

    kind = episode = ""
    #: The public call that the user made, as in "DictBuffer.sample"; "" if it is unknown.
    call = ""

    def __init__(
        self, action: str = "", where: str = "", expected: str = "", got: str = "", advice: str = "", message: str = ""
    ) -> None:
        self.action = action
        self.where = where
        self.expected = expected
        self.got = got
        self.advice = advice
        self._message = message
        super().__init__(action, where, expected, got, advice, *([message] if message else []))

    def of(self: _Self, kind: str, episode: str = "") -> _Self:
        """Note the `kind` of a defect and its `episode`, unless they are known; return itself."""
        self.kind = self.kind or kind
        self.episode = self.episode or episode
        return self

    @property
    def message(self) -> str:
        """The whole text. By this name torch knows that it may raise `type(error)(message=text)` again."""
        return str(self)

    def __str__(self) -> str:
        if self._message:
            return self._message
        text = f"cannot {self.action}"
        if self.where:
            text += f" {self.where}"
        found = [f"{word} {part}" for word, part in (("expected", self.expected), ("got", self.got)) if part]
        if found:
            text += ": " + ", ".join(found)
        text += "."
        if self.advice:
            text += f" {self.advice.rstrip('.')}."
        if not all(part in text for part in self.call.split(".")):
            text += f" Raised by {self.call}."
        return text


class UsageError(RolloutDataError, ValueError):
    """The caller asked for something that cannot be."""

    def __init__(
        self, action: str = "", where: str = "", expected: str = "", got: str = "", advice: str = "", message: str = ""
    ) -> None:
        super().__init__(action, where, expected, got, advice, message)
        self.call = _call_of_user()


class SchemaError(UsageError):
    """A record has other fields, shapes or dtypes than were declared."""


class MissingFieldError(SchemaError, KeyError):
    """A record lacks a declared field, or has one that was not declared."""


class MissingFolderError(UsageError, FileNotFoundError):
    """A data folder does not exist."""


class OutOfRangeError(UsageError, IndexError):
    """There is nothing of the number that was asked for."""


class FieldTypeError(SchemaError, TypeError):
    """A value has a dtype that cannot be stored in its field without loss."""


class BufferEmptyError(UsageError):
    """Something was asked of a store that holds no row yet."""


class RolloutOverflowError(RolloutDataError, OverflowError, AssertionError):
    """A transition was added to a storage that is full; nothing was written."""


class ClosedError(UsageError):
    """Something was asked of an object after `close()`."""


class BackgroundError(RolloutDataError, RuntimeError):
    """A background thread failed; the failure itself is the `__cause__`."""


class WriteError(RolloutDataError, OSError):
    """A file or folder could not be written, as on a full disk; what was there before stays.

    Args:
        error_number: The system's number, as in `OSError.errno`.
        filename: The file or folder.
    """

    def __init__(
        self,
        action: str = "",
        where: str = "",
        expected: str = "",
        got: str = "",
        advice: str = "",
        message: str = "",
        error_number: int | None = None,
        filename: str | None = None,
    ) -> None:
        super().__init__(action, where, expected, got, advice, message)
        self.errno = error_number
        self.filename = filename

    def __reduce__(self) -> tuple[Any, ...]:
        parts = self.action, self.where, self.expected, self.got, self.advice, self._message
        return type(self), (*parts, self.errno, self.filename)


class DatasetExhausted(RolloutDataError, StopIteration):
    """Every pass over the trajectories has been delivered."""


class WaitTimeoutError(RolloutDataError, TimeoutError):
    """Something that others had to provide did not come within the time given."""


class DataFileError(RolloutDataError):
    """A file or folder does not hold what it should."""


class UnansweredError(DataFileError):
    """A store refused access or did not answer: its files may be intact, and a later request may be answered."""


class CorruptFileError(DataFileError):
    """A file is truncated, damaged or contradicts itself."""


class UnsafeFileError(DataFileError):
    """A file asks for something that loading data must never do, such as running code."""


class ForeignFileError(DataFileError):
    """A file is of another format, or of a version that this release does not know."""


class RolloutDataWarning(UserWarning):
    """Data was repaired, skipped or lost; the text says which and how much."""


class TargetError(RolloutDataError, OSError):
    """A file or folder cannot be written: read-only, full, not permitted, or in the way of a file."""

    def __init__(
        self, action: str = "", where: str = "", expected: str = "", got: str = "", advice: str = "", message: str = ""
    ) -> None:
        super().__init__(action, where, expected, got, advice, message)
        # `OSError` takes the first arguments for its own attributes.
        self.args = (action, where, expected, got, advice, *([message] if message else []))
        self.errno = self.strerror = self.filename = self.filename2 = None


def _call_of_user() -> str:
    """Return the public call of ours on the stack that is nearest to the user's code; "" if there is none."""
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
    """Return "class.method", "class" or "function" for a frame of the public interface, else ""."""
    if frame.f_globals is globals():
        return ""
    public = getattr(sys.modules[package], "__all__", ())
    code = frame.f_code
    is_nested = code.co_flags & inspect.CO_NESTED
    name = "" if code.co_name.startswith("_") or is_nested else code.co_name
    if code.co_varnames[:1] not in (("self",), ("cls",)):
        return name if name in public else ""
    owner: Any = frame.f_locals.get(code.co_varnames[0])
    # `isinstance` would ask an object that is not complete for its `__class__`.
    kind: type = owner if issubclass(type(owner), type) else type(owner)
    if not any(base.__name__ in public for base in kind.__mro__):
        return ""
    return f"{kind.__name__}.{name}" if name else kind.__name__


def nearest(name: object, options: Iterable[str], most: int | None = None) -> str:
    """List the valid options as text, or `most` of them, the nearest match to `name` first."""
    listed = sorted(map(str, options))
    close = difflib.get_close_matches(str(name), listed[:_MOST_COMPARED], n=1)
    ordered = close + [option for option in listed if option not in close]
    return ", ".join(map(repr, ordered[:most])) if ordered else "nothing"
