"""Writing episodes as another system's files: what each writer does, whatever the format.

One rule: an episode is written whole or not at all, also when the process is killed; what a format cannot hold is in
the report, once for each kind of it. A format is one file here and one line in `formats.py`.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Protocol

import numpy as np

from storage.core.fields import Field, Schema
from storage.errors import UsageError

from .pictures import axes_of

Array = np.ndarray[Any, Any]


class EpisodeToWrite(Protocol):
    """What a writer is given: an `Episode` of any recording."""

    id: str
    length: int
    schema: Schema
    texts: Collection[str]
    terminated: bool | None
    truncated: bool | None
    final: Collection[str]
    success: bool | None
    task: str
    metadata: Mapping[str, Any]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Any:
        """Read steps of one field: `[stop - start, *shape]`, or a list of texts."""

    @property
    def final_observation(self) -> Any:
        """The observation after the last step: an array, a dict of arrays by flat names, or None."""


#: What metadata of a recording say of its files, which follows from the episodes.
DERIVED = frozenset((
    "format", "version", "fields", "obs_segments", "obs_disassemble_mapping", "success_traj_only", "frame_rate_hz",
    "total_timesteps", "total_trajectories",
))  # fmt: skip
#: Metadata of an episode in a target: names of its fields that were False or NaN because the source lacks them.
ABSENT = "absent_fields"
_FLOATS = ("float16", "bfloat16", "float32", "float64")
#: Metadata that tell nothing.
_NOTHING: tuple[Any, ...] = ("unknown", "", None, [], {})


class ForeignWriter(ABC):
    """Write episodes one after the other; made by `formats.writer_class(name)(path, episodes, metadata, options)`.

    All are known from the beginning, without a row of theirs, and are given to `add` in their order. A path that this
    class has begun with the same episodes is taken up: `written` tells which are there already.

    Attributes:
        format: Key of `formats.WRITERS`.
        path: The file or folder.
        episodes: All that are to be written.
        metadata: Of the recording that is written.
        options: Arguments of `convert` for this format.
        written: Ids of the episodes that are there.
        left_out: Ids of those whose `add` failed, as they cannot be read; `convert` fills it.
    """

    format: ClassVar[str]
    #: Names of the arguments that `convert(..., **options)` takes for this format, with their defaults.
    OPTIONS: ClassVar[Mapping[str, Any]] = {}
    #: Names in the metadata of a recording that the format holds; None is all.
    HOLDS: ClassVar[frozenset[str] | None] = frozenset()
    #: All places are chosen before a row is written: leaving out an episode means to begin again without it.
    is_laid_out_first: ClassVar[bool] = False

    def __init__(
        self, path: Path, episodes: Sequence[EpisodeToWrite], metadata: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        self.path, self.episodes, self.metadata = path, episodes, metadata
        self.options = {**self.OPTIONS, **options}
        self._noted: dict[str, list[str]] = {}
        self._casts: dict[tuple[str, str, str], _Cast] = {}
        self.left_out: set[str] = set()
        self.written: set[str] = self.begin()
        if self.HOLDS is not None and (lost := sorted(_told(metadata) - self.HOLDS)):
            self._noted[f"metadata of the recording are left out: {', '.join(lost)}"] = [one.id for one in episodes]

    @abstractmethod
    def begin(self) -> set[str]:
        """Make the file or folder, or take it up; give the ids of the episodes that are in it."""

    @abstractmethod
    def add(self, episode: EpisodeToWrite) -> None:
        """Write an episode; afterwards it is there, whatever happens.

        Raises:
            DataFileError: It cannot be read; nothing of it is there.
            UsageError: The format cannot hold such an episode at all.
        """

    @abstractmethod
    def close(self) -> None:
        """Write what concerns all episodes. Idempotent."""

    @property
    def report(self) -> dict[str, list[str]]:
        """What was changed or left out -> the ids of the episodes, in the order in which it was met."""
        casts = {cast.text(*key): cast.episodes for key, cast in self._casts.items()}
        return {**self._noted, **casts}

    @property
    def is_complete(self) -> bool:
        """True if all episodes are there that can be read."""
        done = self.written if self.is_laid_out_first else self.written | self.left_out
        return len(done) == len(self.episodes)

    def changed(self, what: str, episode: EpisodeToWrite, holds: Any = True) -> None:
        """Note in the report, once, that something of an episode was changed or left out, if that holds."""
        if holds and episode.id not in (noted := self._noted.setdefault(what, []))[-1:]:
            noted.append(episode.id)

    def cast(self, rows: Any, dtype: Any, name: str, episode: EpisodeToWrite) -> Array:
        """Convert rows of a field to a dtype; the report counts the values that change."""
        values = np.asarray(rows)
        if values.dtype == dtype:
            return values
        with np.errstate(over="ignore", invalid="ignore"):
            converted = values.astype(dtype)
        num_changed, difference = _change(values, converted)
        if num_changed:
            key = name, str(values.dtype), str(converted.dtype)
            self._casts.setdefault(key, _Cast()).add(num_changed, difference, episode.id)
        return converted

    def join(self, columns: Mapping[str, Any], dtype: Any, episode: EpisodeToWrite) -> Array:
        """Join fields side by side: name -> `[T, *shape]` to `[T, sum of elements]` of one dtype."""
        parts = [self.cast(rows, dtype, name, episode) for name, rows in columns.items()]
        return np.concatenate([part.reshape(len(part), math.prod(part.shape[1:])) for part in parts], axis=1)


@dataclass
class _Cast:
    """Values of a field that a conversion to another dtype changed.

    Attributes:
        num_values: Changed values.
        difference: Largest difference between an old and a new value.
        episodes: Ids of their episodes.
    """

    num_values: int = 0
    difference: float = 0
    episodes: list[str] = dataclasses.field(default_factory=list)

    def add(self, num_values: int, difference: float, episode: str) -> None:
        """Count changed values of an episode."""
        self.num_values += num_values
        self.difference = max(self.difference, difference)
        if episode not in self.episodes[-1:]:
            self.episodes.append(episode)

    def text(self, name: str, before: str, after: str) -> str:
        """Describe the change for the report."""
        change = "1 value changes" if self.num_values == 1 else f"{self.num_values} values change"
        most = str(self.difference) if isinstance(self.difference, int) else f"{self.difference:.6g}"
        return f"field {name!r} ({before}) is written as {after}: {change}, by at most {most}"


#: Integers up to 2 to this power are exact in a float of so many bytes.
_EXACT_BITS = {2: 11, 4: 24, 8: 53}


def _change(before: Array, after: Array) -> tuple[int, float]:
    """Count the values that differ after a conversion to another dtype; return the largest difference as well."""
    old, new = before.reshape(-1), after.reshape(-1)
    if old.dtype.kind == "b":
        return 0, 0
    if old.dtype.kind == "f":
        with np.errstate(over="ignore", invalid="ignore"):
            is_changed = (old != new) & ~(np.isnan(old) & np.isnan(new))
            differences = np.abs(old[is_changed].astype(np.float64) - new[is_changed].astype(np.float64))
        return len(differences), float(differences.max(initial=0))
    if new.dtype.kind == "f":
        limit = 2 ** _EXACT_BITS[new.dtype.itemsize]
        is_inexact = (old > limit) | (old < -limit) if old.dtype.kind == "i" else old > limit
        old, new = old[is_inexact], new[is_inexact]
    # Python's integers: a difference of two numbers of 64 bits is exact in no dtype of numpy.
    pairs = zip(old.tolist(), new.tolist(), strict=True)
    differing = [abs(int(two) - one) if np.isfinite(two) else math.inf for one, two in pairs if one != two]
    return len(differing), max(differing, default=0)


@dataclass(frozen=True)
class SharedFields:
    """Fields of a target in which every episode has the same fields; made by `shared_fields`.

    Attributes:
        schema: Numeric fields of the target.
        texts: Text fields of the target.
        left_out: Field of some episode that the target does not have -> the reason.
    """

    schema: Schema
    texts: tuple[str, ...]
    left_out: Mapping[str, str]

    def filled(self, episode: EpisodeToWrite) -> list[str]:
        """Return the fields that an episode lacks; `read` returns False or NaN for them."""
        return [name for name in self.schema if name not in episode.schema]

    def absent(self, episode: EpisodeToWrite) -> list[str]:
        """Return the fields to note under `ABSENT`: filled ones, and those that an earlier conversion filled."""
        noted = episode.metadata.get(ABSENT)
        earlier = {name for name in noted if name in self.schema} if isinstance(noted, list) else set()
        return [name for name in self.schema if name not in episode.schema or name in earlier]

    def read(self, episode: EpisodeToWrite, name: str, start: int = 0, stop: int | None = None) -> Array:
        """Read steps of a numeric field: `[stop - start, *shape]`; False or NaN if the episode lacks the field."""
        end = episode.length if stop is None else stop
        if name in episode.schema:
            return np.asarray(episode.read(name, start, end))
        field = self.schema[name]
        shape = (end - start, *field.shape)
        if field.dtype == "bool":
            return np.zeros(shape, bool)
        return np.full(shape, np.nan, "<f4" if field.dtype == "bfloat16" else field.numpy_dtype)

    def changes(self, episode: EpisodeToWrite) -> Iterator[str]:
        """Yield a line of the report for each field of an episode that is filled or left out."""
        for name in self.filled(episode):
            value = "False" if self.schema[name].dtype == "bool" else "NaN"
            yield f"field {name!r} is {value} in episodes that lack it"
        for name, reason in self.left_out.items():
            if name in episode.schema or name in episode.texts:
                yield f"field {name!r} is left out: {reason}"


def shared_fields(
    episodes: Sequence[EpisodeToWrite],
    depth: Collection[str] = (),
    has_one_form: bool = True,
    ignored: Collection[str] = (),
) -> SharedFields:
    """Choose the fields of a target in which every episode has the same fields.

    Flags and floats that some episodes lack are filled with False and NaN. Rewards, actions, integers, texts and
    pictures that some lack are left out, as are fields that differ in shape or dtype.

    Args:
        episodes: Episodes of the target.
        depth: Fields of depth pictures.
        has_one_form: Whether a field has one dtype and shape in the target. False keeps fields that differ.
        ignored: Fields that the target makes itself; they are in no part of the result.

    Raises:
        UsageError: A field has the name of a group of fields.
    """
    owners: dict[str, dict[tuple[str, tuple[int, ...]], str]] = defaultdict(dict)
    fields: dict[str, Field] = {}
    counts: dict[str, int] = defaultdict(int)
    texts: dict[str, int] = defaultdict(int)
    for episode in episodes:
        for name, field in episode.schema.items():
            if name in ignored:
                continue
            fields.setdefault(name, field)
            owners[name].setdefault((field.dtype, field.shape), episode.id)
            counts[name] += 1
        for name in episode.texts:
            texts[name] += 1
    left_out: dict[str, str] = {}
    for name in (*fields, *texts):
        for group in map(str, PurePosixPath(name).parents):
            if group in fields or group in texts:
                where, expected = f"the field {name!r}", f"no field {group!r} in any episode"
                raise UsageError("write", where, expected, "both", "Rename one of them")
    for name, field in fields.items():
        if name in texts:
            left_out[name] = "it is a text in some episodes and a number in others"
        elif has_one_form and len(owners[name]) > 1:
            forms = [f"{dtype}{list(shape)} in episode {one!r}" for (dtype, shape), one in owners[name].items()]
            left_out[name] = f"it is {' and '.join(forms[:2])}"
        elif counts[name] < len(episodes) and not _can_be_filled(field, depth):
            left_out[name] = "not all episodes have it"
    for name, count in texts.items():
        if name not in fields and count < len(episodes):
            left_out[name] = "not all episodes have it"
    kept = Schema(field for name, field in fields.items() if name not in left_out)
    return SharedFields(kept, tuple(name for name in texts if name not in left_out), left_out)


def _can_be_filled(field: Field, depth: Collection[str]) -> bool:
    """Return whether False or NaN may stand for a missing field."""
    if field.name.partition("/")[0] in ("action", "reward"):
        return False
    if field.dtype == "bool":
        return len(field.shape) <= 1
    is_picture = field.name in depth or (len(field.shape) == 3 and axes_of(field.shape))
    return field.dtype in _FLOATS and not is_picture


def has_open_end(episode: EpisodeToWrite) -> bool:
    """Return whether the recording stopped before the episode ended, as far as the source tells."""
    ends = episode.terminated, episode.truncated
    return ends == (False, False) or (ends == (None, None) and episode.metadata.get("ends") == "open")


def finals_of(episode: EpisodeToWrite) -> dict[str, Array]:
    """Give the observation after the last step by our names: `[*shape]` each; {} if there is none."""
    final = episode.final_observation
    named = final if isinstance(final, dict) else {} if final is None else {"": final}
    found = {f"observation/{name}".rstrip("/"): np.asarray(value) for name, value in named.items()}
    return {name: value for name, value in found.items() if name in episode.schema}


def _told(metadata: Mapping[str, Any]) -> set[str]:
    """Name what tells something; arrays, which do not compare as one, always do."""
    plain = {name: value for name, value in metadata.items() if isinstance(value, (str, list, dict, type(None)))}
    return metadata.keys() - DERIVED - {name for name, value in plain.items() if value in _NOTHING}


def plain(value: Any) -> Any:
    """Give a value as JSON has it: arrays as lists, bytes as text, what is not finite as text."""
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(part) for part in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
