"""The record of a conversion, which `convert` stores in its target to resume and check it.

A record consists of JSON lines. The first line describes the source and the options. Each written
episode has a line with checksums of its rows and of its own files. Files that contain data of
several episodes, such as tables and block files, are described by further lines. The record of a
folder is a file, to which lines are appended; the record of an HDF5 file is a dataset in it.
`formats/conversion_resume.py` compares a record with a source. `ForeignWriter.check_files` compares
a record with a target.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from storage.core.durable_files import crc32
from storage.core.fields import Schema
from storage.errors import DataFileError, RolloutDataError, UnansweredError

from .json_values import plain
from .target_files import FileSum, file_sum, sums_as_json, sums_from_json

#: Name of the record's file in a folder, and name of its dataset in an HDF5 file.
NOTE_NAME, NOTE_DATASET = "rollout_conversion.jsonl", "rollout_conversion"
_KEY = "rollout_conversion"
#: Maximum bytes of a metadata value as JSON. The record contains only the checksum of a longer one.
_MAX_VALUE_BYTES = 200
#: Maximum characters of a task. The record contains only the checksum of a longer task.
_MAX_TASK = 1 << 16
#: Bytes per read of rows that are not converted and only need a checksum.
_PART_BYTES = 8 << 20
#: Maximum nesting depth of JSON values in a record. Each value is at most 200 bytes long, so a
#: record with deeper values is damaged.
_MAX_DEPTH = 128
#: Text instead of the checksum of a field that could not be read and is not in the target.
UNREAD = "--------"
#: Suffix of a field name in the record. It marks the checksum of the field's final value, after the
#: last step.
AFTER_LAST = " after the last step"


class UnreadableEpisode(DataFileError):
    """An episode of the source of a conversion cannot be read.

    Attributes:
        problem: The error that the source raised.
    """

    def __init__(self, problem: DataFileError) -> None:
        super().__init__(problem.message, kind=problem.kind, episode=problem.episode)
        self.problem = problem


class SummedEpisode:
    """Episode of a source that computes a checksum of each field while a conversion reads it.

    It has all attributes of the wrapped episode. Errors of the source become `UnreadableEpisode`.
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
        """Read steps of a field like `Episode.read`, and add the rows to its checksum."""
        rows = self._of_source(lambda: self._episode.read(name, start, stop))
        summed = self._stops.get(name, 0)
        end = self._episode.length if stop is None else stop
        if start <= summed < end:
            self._sums[name] = _checksum(rows[summed - start :], self._sums.get(name, 0))
            self._stops[name] = end
        return rows

    def sums(self) -> dict[str, str]:
        """Return the checksum of each field as 8 hexadecimal digits. Rows not yet read are read."""
        episode = self._episode
        sums = {name: self._sum_of(name) for name in (*episode.schema, *episode.texts)}
        if episode.final:
            final = self._of_source(lambda: episode.final_observation)
            parts = final if isinstance(final, dict) else {"": final}
            for name in episode.final:
                values = parts.get(name.partition("/")[2])
                checksum = (
                    UNREAD if values is None else f"{_checksum(np.asarray(values)[None]):08x}"
                )
                sums[name + AFTER_LAST] = checksum
        return sums

    def check_readable(self) -> None:
        """Read all remaining rows to check that the entire episode can be read.

        Raises:
            UnreadableEpisode: A field cannot be read.
        """
        for name in (*self._episode.schema, *self._episode.texts):
            self._sum_of(name, must_be_read=True)
        if self._episode.final:
            self._of_source(lambda: self._episode.final_observation)

    def _sum_of(self, name: str, must_be_read: bool = False) -> str:
        """Return the checksum of all rows of a field. Rows that were not yet read are read.

        If the field cannot be read, and the writer has read none of its rows, it is not in the
        target. The result is then `UNREAD`.

        Raises:
            UnreadableEpisode: The field cannot be read, and the writer read some of its rows or
                `must_be_read` is True.
        """
        length = self._episode.length
        start = self._stops.get(name, 0)
        is_read_by_writer = start > 0
        schema = self._episode.schema
        row_bytes = schema[name].row_bytes if name in schema else 1 << 10
        step = max(1, _PART_BYTES // max(1, row_bytes))
        try:
            for first in range(start, length, step):
                self.read(name, first, min(first + step, length))
        except UnreadableEpisode:
            if is_read_by_writer or must_be_read:
                raise
            return UNREAD
        return f"{self._sums.get(name, 0):08x}"

    def _of_source(self, read: Any) -> Any:
        """Call a function that reads the episode; convert its errors to `UnreadableEpisode`."""
        try:
            return read()
        except (UnreadableEpisode, UnansweredError):
            raise
        except DataFileError as problem:
            raise UnreadableEpisode(problem.of("", self._episode.id)) from problem
        except OSError as cause:
            if isinstance(cause, RolloutDataError):
                raise
            unread = DataFileError(
                f"Episode {self._episode.id!r} cannot be read: {type(cause).__name__}: {cause}."
            )
            raise UnreadableEpisode(unread) from cause


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
    """The parsed record of a conversion.

    Attributes:
        format, version: Format of the target, and version of its writer.
        options: Options of the conversion, defaults included.
        metadata: Metadata of the recording.
        episodes: Descriptions of the episodes of the source, in order; see `described`.
        source: Digest of path, size and modification time of every file of the source; "" if
            unknown.
        left_out: Ids of the episodes that could not be read.
        rows: For each written episode id, maps fields to checksums.
        files: For each episode id, maps files of the target to size and checksum. An episode is
            complete if its first file exists: this file gets its final name after all others.
        stored: For each episode id, maps datasets of an HDF5 target to checksums of their rows.
        files_of_all: Maps files of the target that no single episode owns to size and checksum; {}
            while they are written.
        unplaced: Id of the episode that was written last, if its files may still have temporary
            names; otherwise "".
        published: Ids of the episodes in the blocks of a block folder, including episodes that
            were dropped or pruned later.
        finish: Values that the format writer stored when the target was complete; None if it never
            was.
        has_damaged_lines: Whether lines could not be parsed, for example the last line of a killed
            conversion.
    """

    format: str
    version: int
    options: Mapping[str, Any]
    metadata: Mapping[str, Any]
    episodes: Sequence[Mapping[str, Any]]
    source: str = ""
    left_out: set[str] = field(default_factory=set)
    rows: dict[str, dict[str, str]] = field(default_factory=dict)
    files: dict[str, dict[str, FileSum]] = field(default_factory=dict, compare=False)
    stored: dict[str, dict[str, str]] = field(default_factory=dict, compare=False)
    files_of_all: dict[str, FileSum] = field(default_factory=dict, compare=False)
    unplaced: str = field(default="", compare=False)
    published: set[str] = field(default_factory=set, compare=False)
    finish: Mapping[str, Any] | None = field(default=None, compare=False)
    has_damaged_lines: bool = field(default=False, compare=False)

    def resume(self, earlier: ConversionNote) -> None:
        """Copy the written episodes from the record of an interrupted conversion.

        `files_of_all` is copied only if episodes were published, which means that these files are
        blocks, which never change. Other formats write these files again.
        """
        self.rows = earlier.rows
        self.files = earlier.files
        self.stored = earlier.stored
        self.published = earlier.published
        self.unplaced = earlier.unplaced
        self.files_of_all = earlier.files_of_all if earlier.published else {}

    def is_whole(self) -> bool:
        """Return whether the record describes a complete target and has no damaged lines."""
        is_ended = self.finish is not None or bool(self.files_of_all)
        is_of_all = {*self.rows} | self.left_out == {episode["id"] for episode in self.episodes}
        return is_ended and is_of_all and not self.has_damaged_lines

    def written_ids(self) -> list[str]:
        """Return the ids of all episodes except those in `left_out`, in order."""
        return [episode["id"] for episode in self.episodes if episode["id"] not in self.left_out]

    def forget(self) -> None:
        """Remove all written episodes and files from the record."""
        self.rows.clear()
        self.files.clear()
        self.stored.clear()
        self.published.clear()
        self.files_of_all.clear()

    def first_line(self) -> str:
        """Build the first line of the record: source, options and descriptions of all episodes."""
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
        """Build the text of the record: all its lines."""
        lines = [self.first_line(), *map(self.line_of, self.rows)]
        if self.rows and not self.unplaced:
            lines.append(placed_line())
        if self.files_of_all or self.published:
            lines.append(files_line(self.files_of_all, self.published))
        return "".join(lines)

    def line_of(self, episode: str) -> str:
        """Build the line of the record about the written episode with this id."""
        return line_of(
            episode, self.rows[episode], self.files.get(episode, {}), self.stored.get(episode, {})
        )

    def blank_lines(self, stored: Mapping[str, Iterable[str]]) -> dict[str, str]:
        """Build placeholders for the lines of all episodes, with which a target reserves space.

        An HDF5 target stores the record in a dataset of fixed size. A placeholder is as long as the
        later line of the episode. It contains dashes instead of checksums. The result maps episode
        ids to placeholders.

        Args:
            stored: Maps episode ids to names of datasets in the target.
        """
        lines = {}
        for episode in self.episodes:
            if episode["id"] not in self.left_out:
                fields = episode["fields"]
                names = [
                    *fields["numbers"],
                    *fields["texts"],
                    *(name + AFTER_LAST for name in fields["final"]),
                ]
                sums = dict.fromkeys(names, UNREAD)
                lines[episode["id"]] = line_of(
                    episode["id"], sums, {}, dict.fromkeys(stored[episode["id"]], UNREAD)
                )
        return lines

    @classmethod
    def parse(cls, text: str) -> ConversionNote | None:
        """Parse the text of a record. Damaged lines, except the first, are skipped.

        Returns:
            The record; None if the text is no record or its first line is damaged.
        """
        first, *lines = text.split("\n")
        about = _object(first)
        if about is None or about.get(_KEY) != 1:
            return None
        try:
            fields = about["fields"]
            episodes = [
                {**episode, "fields": fields[episode["fields"]]} for episode in about["episodes"]
            ]
            note = cls(
                format=about["format"],
                version=about["version"],
                options=about["options"],
                metadata=about["metadata"],
                episodes=episodes,
                source=about["source"],
                left_out=set(about["left_out"]),
            )
        except (LookupError, TypeError):
            return None
        if not note._has_valid_types():
            return None
        ids = {episode["id"] for episode in note.episodes}
        for line in lines:
            if line.strip() and not note._read_line(_object(line) or {}, ids):
                note.has_damaged_lines = True
        return note

    def _read_line(self, line: Mapping[str, Any], ids: Collection[str]) -> bool:
        """Add the content of a line to this record; return whether the line is valid.

        Args:
            line: The parsed line; {} if it is no JSON object.
            ids: Ids of the episodes of the source.
        """
        files = line.get("files")
        sums = sums_from_json({} if files is None else files)
        if sums is None:
            return False
        if line.get("placed") is True:
            self.unplaced = ""
            return True
        if "episode" in line or "left_out" in line:
            return self._read_episode_line(line, ids, sums)
        return self._read_files_line(line, ids, sums)

    def _read_files_line(
        self, line: Mapping[str, Any], ids: Collection[str], sums: dict[str, FileSum]
    ) -> bool:
        """Add to this record the content of a line about files that several episodes share.

        Args:
            line: The parsed line.
            ids: Ids of the episodes of the source.
            sums: Sizes and checksums of the files in the line.

        Returns:
            Whether the line is valid.
        """
        if line.get("open") is True:
            self.files_of_all.clear()
        published: Any = [] if line.get("published") is None else line["published"]
        removed: Any = [] if line.get("removed") is None else line["removed"]
        if not _are_texts(published) or not _are_texts(removed) or not {*published} <= {*ids}:
            return False
        for name in removed:
            self.files_of_all.pop(name, None)
        self.files_of_all |= sums
        self.published.update(published)
        if "finish" in line:
            self.finish = line["finish"] if isinstance(line["finish"], dict) else {}
        return bool(line)

    def _read_episode_line(
        self, line: Mapping[str, Any], ids: Collection[str], sums: dict[str, FileSum]
    ) -> bool:
        """Add to this record the content of a line about a written episode.

        Args:
            line: The parsed line.
            ids: Ids of the episodes of the source.
            sums: Sizes and checksums of the episode's files.

        Returns:
            Whether the line is valid.
        """
        name = line.get("episode", line.get("left_out"))
        if not isinstance(name, str) or name not in ids:
            return False
        if "left_out" in line:
            self.left_out.add(name)
            return True
        rows: Any = line.get("rows")
        stored: Any = line.get("stored", {})
        if not _are_sums(rows) or not _are_sums(stored):
            return False
        self.rows.pop(name, None)  # Move an episode that was written again to the end.
        self.rows[name] = rows
        self.unplaced = name
        self.files[name] = sums
        self.stored[name] = stored
        return True

    def _has_valid_types(self) -> bool:
        """Return whether all parsed values have the expected types, as in an undamaged record."""
        if not isinstance(self.options, dict) or not isinstance(self.metadata, dict):
            return False
        if not isinstance(self.source, str) or not all(
            isinstance(name, str) for name in self.left_out
        ):
            return False
        if not _is_shallow(self.options) or not _is_shallow(self.metadata):
            return False
        return all(_is_description(episode) and _is_shallow(episode) for episode in self.episodes)


def line_of(
    episode: str, sums: Mapping[str, str], files: Mapping[str, FileSum], stored: Mapping[str, str]
) -> str:
    """Build the line of a record about a written episode.

    Args:
        episode: Id of the episode.
        sums: Maps fields to checksums.
        files: Maps files of the episode to sizes and checksums.
        stored: Maps datasets of the target to checksums.
    """
    about: dict[str, Any] = {"episode": episode, "rows": sums}
    if files:
        about["files"] = sums_as_json(files)
    if stored:
        about["stored"] = stored
    return json.dumps(about) + "\n"


def files_line(
    files: Mapping[str, FileSum],
    published: Iterable[str] = (),
    removed: Iterable[str] = (),
    finish: Mapping[str, Any] | None = None,
) -> str:
    """Build a line of a record about files that several episodes share.

    Args:
        files: Maps new files to sizes and checksums.
        published: Ids of the episodes in these files.
        removed: Names of files that were removed on purpose.
        finish: Values of the format writer about the complete target; None if the target is not
            complete.
    """
    about: dict[str, Any] = {"files": sums_as_json(files)}
    for name, names in (("published", published), ("removed", removed)):
        sorted_names = sorted(names)
        if sorted_names:
            about[name] = sorted_names
    if finish is not None:
        about["finish"] = finish
    return json.dumps(about) + "\n"


def placed_line() -> str:
    """Build the line of a record which states that all files of episodes have their final names."""
    return json.dumps({"placed": True}) + "\n"


def open_line() -> str:
    """Build the line of a record which states that shared files of episodes are being rewritten."""
    return json.dumps({"open": True}) + "\n"


def note_replaced(folder: Path, removed: Iterable[Path], added: Iterable[Path] = ()) -> None:
    """Record that files of a conversion's target folder are replaced or removed on purpose.

    Without this line, the next conversion would report that the target was changed. Call this
    before removing the files. Does nothing if the folder is no target of a conversion.

    Args:
        folder: The block folder.
        removed: Files that will be removed or replaced.
        added: New blocks with episodes of the removed blocks.
    """
    place = folder / NOTE_NAME
    if place.is_file():
        sums = {path.name: file_sum(path) for path in added}
        append_line(
            place, files_line(sums, removed=[path.name for path in removed]), is_durable=True
        )


def append_line(place: Path, line: str, is_durable: bool = False) -> None:
    """Append a line to the file of a record; with `is_durable`, flush it to the disk."""
    descriptor = os.open(place, os.O_WRONLY | os.O_APPEND)
    data = line.encode()
    try:
        while data:
            data = data[os.write(descriptor, data) :]
        if is_durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def left_out_line(episode: str) -> str:
    """Build the line of a record about an episode that could not be read and was left out."""
    return json.dumps({"left_out": episode}) + "\n"


def _object(line: str) -> dict[str, Any] | None:
    """Parse a line as a JSON object; None if it is no valid object."""
    try:
        value = json.loads(line, object_pairs_hook=_unique_names, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _is_shallow(value: Any, depth: int = _MAX_DEPTH) -> bool:
    """Return whether lists and objects in a JSON value are nested in less than `depth` levels.

    Deeper values would exceed Python's recursion limit.
    """
    parts: Iterable[Any] = ()
    if isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, list):
        parts = value
    return depth > 0 and all(_is_shallow(part, depth - 1) for part in parts)


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dict from the pairs of a JSON object; raise `ValueError` if a name is repeated."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("duplicate name")
    return values


def _reject_constant(constant: str) -> None:
    raise ValueError(constant)  # A record contains NaN and infinities only as texts.


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _are_sums(values: Any) -> bool:
    return isinstance(values, dict) and all(isinstance(value, str) for value in values.values())


def _is_description(episode: Mapping[str, Any]) -> bool:
    """Return whether the parsed description of an episode has all keys and valid types."""
    fields = episode["fields"]
    if not isinstance(fields, dict) or not isinstance(episode.get("id"), str):
        return False
    if not _are_sums(fields.get("numbers")) or not isinstance(episode.get("metadata"), dict):
        return False
    if not _are_texts(fields.get("texts")) or not _are_texts(fields.get("final")):
        return False
    if type(episode.get("length")) is not int or episode["length"] < 1:
        return False
    return all(name in episode for name in ("terminated", "truncated", "success", "task"))


def described(episode: Any) -> dict[str, Any]:
    """Build the description of an episode for the record, without reading rows."""
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
        "task": episode.task if len(episode.task) <= _MAX_TASK else _shortened(episode.task),
        "metadata": shortened(episode.metadata),
    }


@lru_cache(maxsize=64)
def _forms(schema: Schema) -> Mapping[str, str]:
    """Describe the fields of a schema: map each to its dtype and shape, such as "float32[3]"."""
    return {name: f"{declared.dtype}{list(declared.shape)}" for name, declared in schema.items()}


def shortened(metadata: Mapping[str, Any], without: Collection[str] = ()) -> dict[str, Any]:
    """Convert metadata to JSON values. Long values become texts with their checksum.

    Args:
        metadata: The metadata.
        without: Names that are left out.
    """
    return {
        str(name): _shortened(plain(value))
        for name, value in metadata.items()
        if name not in without
    }


def _shortened(value: Any) -> Any:
    if not isinstance(value, (dict, list)):
        text = json.dumps(value)
        return value if len(text) <= _MAX_VALUE_BYTES else f"crc32 {crc32(text.encode()):08x}"
    num_bytes = 0
    checksum = 0
    # The JSON text is encoded in parts, since a value may repeat one text so often that its JSON
    # does not fit into memory.
    for part in json.JSONEncoder().iterencode(value):
        num_bytes += len(part)
        checksum = crc32(part.encode(), checksum)
    return value if num_bytes <= _MAX_VALUE_BYTES else f"crc32 {checksum:08x}"
