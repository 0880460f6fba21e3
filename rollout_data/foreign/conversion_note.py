"""The note of a conversion, kept inside its target: of what source, with which options, and checksums of all rows.

A note is text: a first line about the whole, and a line for each episode that was written. Nothing is compared here;
`recordings/same_source.py` compares a note with a source.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from storage.core.durable import crc32
from storage.core.fields import Schema
from storage.errors import DataFileError, RolloutDataError, UnansweredError

from .plain import plain

#: Name of the note in a folder, and of the dataset in an HDF5 file.
NOTE_NAME, NOTE_DATASET = "rollout_conversion.jsonl", "rollout_conversion"
_KEY = "rollout_conversion"
#: Values of metadata that are longer as JSON are noted as their checksum.
_MAX_VALUE_BYTES = 200
#: Bytes read at a time of a field that the writer of the target did not read itself.
_PART_BYTES = 8 << 20
#: In place of the checksum of a field that cannot be read, and that the target does not have.
UNREAD = "--------"
AFTER_LAST = " after the last step"


class UnreadableEpisode(DataFileError):
    """Reading an episode of the source failed.

    Attributes:
        problem: The error of the source.
    """

    def __init__(self, problem: DataFileError) -> None:
        super().__init__(problem.action, problem.where, problem.expected, problem.got, problem.advice)
        self.problem = problem


class SummedEpisode:
    """An episode whose rows are added to checksums as a writer reads them.

    Errors of the source become `UnreadableEpisode`. Everything else is as of the episode.
    """

    def __init__(self, episode: Any) -> None:
        self._episode = episode
        self._sums: dict[str, int] = {}
        self._stops: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._of_source(lambda: getattr(self._episode, name))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Any:
        """Read steps of a field, as `Episode.read`."""
        rows = self._of_source(lambda: self._episode.read(name, start, stop))
        known = self._stops.get(name, 0)
        end = self._episode.length if stop is None else stop
        if start <= known < end:
            self._sums[name] = _checksum(rows[known - start :], self._sums.get(name, 0))
            self._stops[name] = end
        return rows

    def sums(self) -> dict[str, str]:
        """Return the checksum of each field as 8 hexadecimal digits; fields that nobody has read yet are read now."""
        episode = self._episode
        found = {name: self._sum_of(name) for name in (*episode.schema, *episode.texts)}
        if episode.final:
            final = self._of_source(lambda: episode.final_observation)
            parts = final if isinstance(final, dict) else {"": final}
            for name in episode.final:
                values = parts.get(name.partition("/")[2])
                found[name + AFTER_LAST] = UNREAD if values is None else f"{_checksum(np.asarray(values)[None]):08x}"
        return found

    def check_readable(self) -> None:
        """Read all that has not been read yet.

        Raises:
            UnreadableEpisode: A field cannot be read.
        """
        for name in (*self._episode.schema, *self._episode.texts):
            self._sum_of(name, must_be_read=True)
        if self._episode.final:
            self._of_source(lambda: self._episode.final_observation)

    def _sum_of(self, name: str, must_be_read: bool = False) -> str:
        length = self._episode.length
        start = self._stops.get(name, 0)
        is_read_by_writer = start > 0
        known = self._episode.schema
        step = max(1, _PART_BYTES // max(1, known[name].row_bytes if name in known else 1 << 10))
        try:
            for first in range(start, length, step):
                self.read(name, first, min(first + step, length))
        except UnreadableEpisode:
            if is_read_by_writer or must_be_read:
                raise
            return UNREAD
        return f"{self._sums.get(name, 0):08x}"

    def _of_source(self, read: Any) -> Any:
        try:
            return read()
        except (UnreadableEpisode, UnansweredError):
            raise
        except DataFileError as problem:
            raise UnreadableEpisode(problem) from problem
        except OSError as cause:
            if isinstance(cause, RolloutDataError):
                raise
            got = f"{type(cause).__name__}: {cause}"
            raise UnreadableEpisode(DataFileError("read", f"episode {self._episode.id!r}", "", got)) from cause


def _checksum(rows: Any, start: int = 0) -> int:
    if isinstance(rows, list):
        for text in rows:
            data = str(text).encode("utf-8", "surrogatepass")
            start = crc32(data, crc32(len(data).to_bytes(8, "little"), start))
        return start
    values = np.asarray(rows)
    values = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    return crc32(values.reshape(-1).view(np.uint8).data, start) if values.size else start


@dataclass
class ConversionNote:
    """What a target knows of its conversion.

    Attributes:
        format, version: Of the writer.
        options: Of the conversion, with defaults.
        metadata: Of the recording.
        episodes: A description of each episode of the source, in its order.
        source: Digest of the path, size and time of change of every file of the source; "" if they are not known.
        left_out: Ids of the episodes that could not be read.
        rows: Id of each episode that was written -> field -> checksum.
        has_damaged_lines: Whether lines could not be read, as that of an episode at which a conversion was killed.
    """

    format: str
    version: int
    options: Mapping[str, Any]
    metadata: Mapping[str, Any]
    episodes: Sequence[Mapping[str, Any]]
    source: str = ""
    left_out: set[str] = field(default_factory=set)
    rows: dict[str, dict[str, str]] = field(default_factory=dict)
    has_damaged_lines: bool = field(default=False, compare=False)

    def first_line(self) -> str:
        """Return the line about the whole, with its line feed."""
        fields: dict[str, int] = {}
        listed = []
        for episode in self.episodes:
            place = fields.setdefault(json.dumps(episode["fields"]), len(fields))
            listed.append({**episode, "fields": place})
        about = {
            _KEY: 1,
            "format": self.format,
            "version": self.version,
            "options": self.options,
            "source": self.source,
            "metadata": self.metadata,
            "fields": [json.loads(text) for text in fields],
            "episodes": listed,
            "left_out": sorted(self.left_out),
        }
        return json.dumps(about) + "\n"

    def text(self) -> str:
        """Return all lines."""
        return self.first_line() + "".join(line_of(name, sums) for name, sums in self.rows.items())

    def blank_lines(self) -> dict[str, str]:
        """Return a line for each episode to come, of the length that `line_of` returns for it."""
        lines = {}
        for episode in self.episodes:
            if episode["id"] not in self.left_out:
                fields = episode["fields"]
                names = [*fields["numbers"], *fields["texts"], *(name + AFTER_LAST for name in fields["final"])]
                lines[episode["id"]] = line_of(episode["id"], dict.fromkeys(names, UNREAD))
        return lines

    @classmethod
    def parse(cls, text: str) -> ConversionNote | None:
        """Read a note; None if it is none, or its first line is damaged. Damaged lines of episodes are left out."""
        first, *lines = text.split("\n")
        about = _object(first)
        if about is None or about.get(_KEY) != 1:
            return None
        try:
            episodes = [{**one, "fields": about["fields"][one["fields"]]} for one in about["episodes"]]
            note = cls(
                about["format"], about["version"], about["options"], about["metadata"], episodes, about["source"],
                set(about["left_out"]),
            )  # fmt: skip
        except (LookupError, TypeError):
            return None
        if not note._is_sound():
            return None
        known = {episode["id"] for episode in note.episodes}
        for line in lines:
            told = _object(line) or {}
            name = told.get("episode", told.get("left_out"))
            if not isinstance(name, str) or name not in known:
                note.has_damaged_lines |= bool(line.strip())
            elif isinstance(told.get("rows"), dict):
                note.rows[name] = told["rows"]
            elif "left_out" in told:
                note.left_out.add(name)
            else:
                note.has_damaged_lines = True
        return note

    def _is_sound(self) -> bool:
        """Return whether all parts are of their types: a note may be damaged or made by others."""
        if not isinstance(self.options, dict) or not isinstance(self.metadata, dict):
            return False
        if not isinstance(self.source, str) or not all(isinstance(name, str) for name in self.left_out):
            return False
        return all(_is_description(episode) for episode in self.episodes)


def line_of(episode: str, sums: Mapping[str, str]) -> str:
    """Return the line of an episode that was written."""
    return json.dumps({"episode": episode, "rows": sums}) + "\n"


def left_out_line(episode: str) -> str:
    """Return the line of an episode that could not be read."""
    return json.dumps({"left_out": episode}) + "\n"


def _object(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _is_description(episode: Mapping[str, Any]) -> bool:
    """Return whether a description has the parts of `described`."""
    fields = episode["fields"]
    if not isinstance(fields, dict) or not isinstance(episode.get("id"), str):
        return False
    if not isinstance(fields.get("numbers"), dict) or not isinstance(episode.get("metadata"), dict):
        return False
    lists = fields.get("texts"), fields.get("final")
    if not all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in lists):
        return False
    return all(name in episode for name in ("length", "terminated", "truncated", "success", "task"))


def described(episode: Any) -> dict[str, Any]:
    """Describe an episode as a note has it, without reading a row."""
    return {
        "id": episode.id,
        "length": episode.length,
        "fields": {
            "numbers": _forms(episode.schema),
            "texts": list(episode.texts),
            "final": list(episode.final),
        },
        "terminated": episode.terminated,
        "truncated": episode.truncated,
        "success": episode.success,
        "task": episode.task,
        "metadata": shortened(episode.metadata),
    }


@lru_cache(maxsize=64)
def _forms(schema: Schema) -> Mapping[str, str]:
    return {name: f"{one.dtype}{list(one.shape)}" for name, one in schema.items()}


def shortened(metadata: Mapping[str, Any], without: Collection[str] = ()) -> dict[str, Any]:
    """Return metadata as JSON has them; long values as their checksum."""
    found = {}
    for name, value in metadata.items():
        told = plain(value)
        text = json.dumps(told)
        if name not in without:
            found[str(name)] = told if len(text) <= _MAX_VALUE_BYTES else f"crc32 {crc32(text.encode()):08x}"
    return found
