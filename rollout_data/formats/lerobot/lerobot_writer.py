"""Writing LeRobot datasets of versions 3.0 and 2.1: a data file for each episode, which carries its description.

One rule: until `close` the description of the set says `is_unfinished`, and the data files are the truth: a set whose
writer was killed opens with the episodes that were written. Version 3 may hold several episodes in a file; one each
survives a kill, and is read by lerobot alike.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, islice
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from storage.core import arguments
from storage.core.durable_files import replace_file, sync_path
from storage.core.fields import Field
from storage.core.threads import each
from storage.errors import CorruptFileError, DataFileError, UsageError

from ...sources.episode_reader import ABSENT
from ...sources.video_range import VideoRange
from ...writing.target_files import changed_file
from ..episode_writer import EpisodeToWrite, ForeignWriter, shared_fields
from ..format_detection import LEROBOT_INFO
from ..frame_rate import RATE_KEYS, frame_rate
from ..input_checks import damage_named, read_object
from ..parquet import ParquetFile, arrow
from ..video_frames import TOLERANCE_S, copy_video, read_frames
from .lerobot_features import (
    ENCODERS,
    OTHER_ENCODERS,
    SCALARS,
    Array,
    Column,
    arrow_column,
    check_encodable,
    column_of,
    hub_features,
    is_picture_field,
    read_column,
    write_video,
)
from .lerobot_index import SUCCESS, TASK
from .lerobot_info import TEMPLATES, UNFINISHED, field_name, file_name
from .lerobot_language import ARROW_TYPES, TEXT_TYPES, arrow_type, column_of_texts
from .lerobot_statistics import SetStatistics, Statistics
from .lerobot_subtasks import NUMBER, SUBTASKS, TABLE_NAME, TEXT, numbers_of, stated_subtasks, subtask_table, with_pairs

_CHUNKS_SIZE = 1000
#: Read at a time of a field, and in a row group of the file of an episode.
_PART_BYTES, _GROUP_BYTES = 1 << 20, 1 << 24
#: The same of video, where each part is decoded from a key frame on.
_VIDEO_PART_BYTES = 1 << 25
#: Rows of the index; with statistics each may take a hundred kilobytes.
_ENTRIES_AT_ONCE = 100
#: Length of the notes of episodes that are kept, as text; in memory they take about twice as much.
_KEPT_NOTES_BYTES = 1 << 24
#: Files that are flushed to the disk at the same time.
_NUM_SYNC_THREADS = 16
#: Folder of files that are not in their places yet.
_UNFINISHED_FILES = ".unfinished"
#: Key of a data file's own metadata: id, task and statistics of its episode.
_NOTE = "rollout_data.episode"
_MAX_LIST_DIMENSIONS = 5
_ANNOTATION = "annotation.human.task_description"
_DONE = "next.done"
_FLAG = np.dtype(bool)
_ACTION = "write a LeRobot dataset"
#: Types of LeRobot's columns of language, for texts of these names that no LeRobot set told the type of.
_SPOKEN = {"role": "string", "content": "string", "style": "string"}
_SHOWN = {"camera": "string", "tool_calls": {"list": "string"}}
_LANGUAGE = {
    "language_persistent": {"list": {"struct": {**_SPOKEN, "timestamp": "float", **_SHOWN}}},
    "language_events": {"list": {"struct": {**_SPOKEN, **_SHOWN}}},
}


class Writer(ForeignWriter):
    """A LeRobot dataset. Episodes are numbered in the order of writing; see `shared_fields` for their fields.

    Options:
        version: "v3.0" or "v2.1".
        fps: Frames per second of a recording that does not state its rate; see `frame_rate`.
        video: "h264" or "av1" for pictures as video, with loss; "" for PNG. None copies the video of LeRobot sets and
            writes PNG of other pictures.
        groot: Also write what GR00T asks for: `meta/modality.json` and a column of tasks. Version 2.1 only. All
            cameras are video, by default "h264".
    """

    format = "lerobot"
    HOLDS = frozenset((
        ARROW_TYPES, "chunks_size", "codebase_version", "data_files_size_in_mb", "data_path", "features",
        "fps", "frame_rate_hz", "lossy", "robot_type", "splits", SUBTASKS, "tasks", "total_chunks",
        "total_episodes", "total_frames", "total_tasks", "total_videos", "units", "video_files_size_in_mb",
        "video_path",
    ))  # fmt: skip
    OPTIONS: ClassVar[Mapping[str, Any]] = {"version": "v3.0", "fps": None, "video": None, "groot": False}

    MADE: ClassVar[tuple[str, ...]] = ("data", "meta", "videos", _UNFINISHED_FILES)
    BEGUN = (LEROBOT_INFO,)
    LAST = LEROBOT_INFO

    @classmethod
    def is_finished(cls, path: Path) -> bool:
        try:
            return (path / LEROBOT_INFO).exists() and not read_object(path / LEROBOT_INFO).get(UNFINISHED)
        except DataFileError as error:
            raise changed_file(path, path / LEROBOT_INFO, error.got) from error

    @classmethod
    def effective(
        cls,
        options: Mapping[str, Any],
        path: Path,
        episodes: Sequence[EpisodeToWrite],
        metadata: Mapping[str, Any],
    ) -> dict[str, Any]:
        fps, _ = frame_rate(episodes, metadata, _checked_fps(options["fps"]))
        forms: dict[str, Any] = {}
        for field in {name: one for episode in episodes for name, one in episode.schema.items()}.values():
            if is_picture_field(field):
                videos = [_video_of(episode, field.name) for episode in episodes]
                codec, about = _chosen_video(videos, fps, options["video"], options["groot"])
                forms[field.name] = [codec, about is not None]
        return {**options, "fps": fps, "video": forms}

    def begin(self) -> set[str]:
        action = _ACTION
        options = self.options
        self.episodes = list(self.episodes)  # a recording makes them again each time, and here are ten loops
        self._version = arguments.choice(action, "version", options["version"], ("v3.0", "v2.1"))
        self._codec: str | None = options["video"]
        if self._codec is not None:
            self._codec = arguments.choice(action, "video", self._codec, ("", *ENCODERS))
        if arguments.flag(action, "groot", options["groot"]) and self._version != "v2.1":
            raise UsageError(action, "", "version 'v2.1', which GR00T reads", repr(self._version))
        self._fps, rounded = frame_rate(self.episodes, self.metadata, _checked_fps(options["fps"]))
        for episode in self.episodes if rounded else ():
            for what, ids in rounded.items():
                self.changed(what, episode, episode.id in ids)
        if self._fps * 2 * TOLERANCE_S >= 1:
            expected = f"a rate below {0.5 / TOLERANCE_S:g} Hz, as lerobot finds frames within {TOLERANCE_S} s"
            raise UsageError(action, repr(str(self.path)), expected, f"{self._fps:g} Hz")
        units = self.metadata.get("units") or {}
        flags = [name for name in (SUCCESS, _DONE) if self._is_made(name)]
        self._shared = shared_fields(self.episodes, units, ignored=(*SCALARS, *flags))
        self._columns = self._choose(units)
        self._has_subtask_texts = self._is_numbered_by_subtasks()
        self._subtasks = self._chosen_subtasks()
        self._texts, self._languages = self._chosen_texts()
        self._check_names()
        self._flags = self._chosen_flags()
        self._has_absent = any(self._absent(episode) for episode in self.episodes)
        self._tasks = list(dict.fromkeys(episode.task for episode in self.episodes))
        self._num_episodes = self._num_frames = self._num_taken_up = 0
        #: Notes of the first episodes that were written, which need not be read again.
        self._notes: dict[int, dict[str, Any]] = {}
        self._num_kept_bytes = 0
        self._statistics = self._new_statistics()
        info = self._info()
        if (self.path / LEROBOT_INFO).exists():
            features = read_object(self.path / LEROBOT_INFO).get("features")
            if features == json.loads(json.dumps(info["features"])):
                self._note_tables()
                return self._take_up()
            self.begin_again()  # the source has gained episodes, and not all have the same fields
        self._write_tables()
        self._write_json(LEROBOT_INFO, {**info, UNFINISHED: True})
        self._note_tables()
        return set()

    def _take_up(self) -> set[str]:
        found = set()
        while (self.path / self._file(self._num_episodes)).exists():
            try:
                note = self._note(self._num_episodes)
            except CorruptFileError:  # a power failure: the file is written again
                break
            if note["id"] not in self.conversion.rows:
                break
            self._take(note)
            found.add(note["id"])
        self._num_taken_up = self._num_episodes
        return found

    def _note(self, number: int) -> dict[str, Any]:
        """Return the note in the data file of an episode."""
        if number in self._notes:
            return self._notes[number]
        pyarrow, parquet = arrow()
        path = self.path / self._file(number)
        with damage_named("read", repr(str(path)), "an intact file", pyarrow.ArrowException, OSError, LookupError):
            found: dict[str, Any] = json.loads(parquet.read_metadata(path).metadata[_NOTE.encode()])
        return found

    def _take(self, note: Mapping[str, Any]) -> None:
        """Count an episode that is there; its note stays in its file, as its statistics may be large."""
        self._num_episodes += 1
        self._num_frames += note["length"]
        self._statistics.add_levels(note["levels"], note["length"])

    def _is_made(self, name: str) -> bool:
        """Return whether a flag is derived from the episodes, because some lack the field."""
        fields = [episode.schema[name] for episode in self.episodes if name in episode.schema]
        are_flags = all(field.dtype == "bool" and field.num_elements == 1 for field in fields)
        return are_flags and len(fields) < len(self.episodes)

    def _choose(self, units: Mapping[str, str]) -> list[Column]:
        """Return the columns of the fields that all episodes share."""
        columns = []
        for field in self._shared.schema.values():
            if field.num_elements and len(field.shape) <= _MAX_LIST_DIMENSIONS:
                columns.append(self._column(field, units))
        if not any(column.name.startswith("action") for column in columns):
            expected = "actions of one shape and dtype in all episodes"
            raise UsageError("write a LeRobot dataset", repr(str(self.path)), expected, "none, or several")
        return columns

    def _column(self, field: Field, units: Mapping[str, str]) -> Column:
        """Return the column of a field; video of LeRobot sets stays as it is, unless another codec is asked for."""
        is_v3 = self._version == "v3.0"
        if not is_picture_field(field):
            return column_of(field, units, "", is_v3)
        videos = [_video_of(episode, field.name) for episode in self.episodes]
        codec, about = _chosen_video(videos, self._fps, self._codec, self.options["groot"])
        if self.options["groot"] and not codec:
            where = f"the camera {field.name!r} for GR00T"
            expected = f"video= one of {', '.join(ENCODERS)}"
            raise UsageError("write", where, expected, repr(codec))
        return column_of(field, units, codec, is_v3, about)

    def _chosen_texts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the fields of plain texts and those of language, with the Arrow types of their columns."""
        described = {**_LANGUAGE, **(self.metadata.get(ARROW_TYPES) or {})}
        texts = dict[str, Any]()
        languages = dict[str, Any]()
        for name in sorted(self._shared.texts):
            is_annotation = name == _ANNOTATION and self.options["groot"]
            if name == TEXT and self._has_subtask_texts:
                continue
            kind = described.get(name, None if is_annotation else "string")
            if kind is not None:
                chosen = texts if kind in TEXT_TYPES else languages
                chosen[name] = arrow_type(kind)
        return texts, languages

    def _is_numbered_by_subtasks(self) -> bool:
        """Return whether every episode has the texts of its subtasks beside their numbers."""
        fields = [column.field for column in self._columns if column.field.name == NUMBER]
        are_numbers = any(field.num_elements == 1 and field.dtype.startswith("int") for field in fields)
        return are_numbers and TEXT in self._shared.texts

    def _chosen_subtasks(self) -> dict[int, str]:
        """Return the table of subtasks: that of the recording, with texts that only its episodes have."""
        table = stated_subtasks(self.metadata)
        for episode in self.episodes if self._has_subtask_texts else ():
            with suppress(DataFileError):  # `add` raises it again
                numbers = np.asarray(episode.read(NUMBER)).reshape(-1).tolist()
                table = with_pairs(table, zip(numbers, episode.read(TEXT), strict=True))
        return table

    def _chosen_flags(self) -> list[str]:
        """Return the flags of the last row that some episode tells: success, and whether it ended."""
        taken = {column.name for column in self._columns}
        return [
            name
            for name in (SUCCESS, _DONE)
            if name not in taken and any(self._flag(episode, name) is not None for episode in self.episodes)
        ]

    def _flag(self, episode: EpisodeToWrite, name: str) -> bool | None:
        """Return a flag of the last row; True also if a field tells it. None if the episode does not tell it."""
        if name in episode.schema:
            return True
        if name == SUCCESS:
            return episode.success
        ends = (episode.terminated, episode.truncated)
        is_known = None not in ends or episode.metadata.get("ends") == "open"
        return any(ends) if is_known or any(ends) else None

    def _absent(self, episode: EpisodeToWrite) -> list[str]:
        """Return the features that are False or NaN because the episode lacks them."""
        noted: Any = episode.metadata.get(ABSENT)
        earlier = noted if isinstance(noted, list) else []
        flags = [name for name in self._flags if self._flag(episode, name) is None or name in earlier]
        features = {column.field.name: column.name for column in self._columns}
        sources = dict.fromkeys(features.values())
        names = {own: field_name(feature, sources) for own, feature in features.items()}
        lost = self._shared.schema.keys() - names.keys()
        absent = self._shared.absent(episode, lambda name: names.get(name, name))
        return [*(name for name in absent if name not in lost), *flags]

    def _check_names(self) -> None:
        """Raise if two fields would become one feature."""
        names = {name: _feature_name(name) for name in (*self._texts, *self._languages)}
        owners: dict[str, str] = {}
        for field, feature in [*((one.field.name, one.name) for one in self._columns), *names.items()]:
            if feature in owners or feature in SCALARS:
                other = owners.get(feature, feature)
                where = f"the fields {other!r} and {field!r} as LeRobot"
                expected = "a feature for each"
                raise UsageError("write", where, expected, f"two called {feature!r}", "Rename one of them")
            owners[feature] = field

    def _file(self, number: int, camera: str = "") -> str:
        chunk, file = divmod(number, _CHUNKS_SIZE)
        values: dict[str, int | str] = {"chunk_index": chunk, "file_index": file, "video_key": camera}
        values |= {"episode_chunk": chunk, "episode_index": number}
        return file_name(TEMPLATES[self._version][bool(camera)], values, self.path)

    def _features(self) -> dict[str, Any]:
        known: Any = self.metadata.get("features") or {}
        found = {column.name: column.feature(self._fps) for column in self._columns}
        for name, about in found.items():  # such as the names of joints
            told = known.get(name)
            is_same = isinstance(told, Mapping) and told.get("shape") == about["shape"]
            if is_same and about["names"] is None:
                about["names"] = told.get("names")
        found |= {_feature_name(name): {"dtype": "string", "shape": [1], "names": None} for name in self._texts}
        found |= {_feature_name(name): {"dtype": "language", "shape": [1], "names": None} for name in self._languages}
        return found | {
            name: {"dtype": dtype.name, "shape": [1], "names": None} for name, dtype in self._scalar_dtypes().items()
        }

    def _scalar_dtypes(self) -> dict[str, np.dtype[Any]]:
        """Return the features that are one number in each row and made here, with their dtypes."""
        flags = dict.fromkeys(self._flags, _FLAG)
        annotation = {_ANNOTATION: np.dtype(np.int64)} if self.options["groot"] else {}
        return {**flags, **annotation, **{name: np.dtype(dtype) for name, dtype in SCALARS.items()}}

    def _scalar_columns(self) -> dict[str, Column]:
        return {
            name: Column(Field(name, (), dtype.name), name, "number") for name, dtype in self._scalar_dtypes().items()
        }

    def _info(self) -> dict[str, Any]:
        names = [column.name for column in self._columns if column.kind == "video"]
        num_episodes = self._num_episodes
        sizes: dict[str, Any] = {"data_files_size_in_mb": 100, "video_files_size_in_mb": 200}
        if self._version == "v2.1":
            sizes = {"total_videos": len(names) * num_episodes, "total_chunks": -(-num_episodes // _CHUNKS_SIZE)}
        return {
            "codebase_version": self._version,
            "robot_type": self.metadata.get("robot_type"),
            "total_episodes": num_episodes,
            "total_frames": self._num_frames,
            "total_tasks": len(self._tasks),
            "chunks_size": _CHUNKS_SIZE,
            **sizes,
            "fps": int(self._fps) if self._fps == int(self._fps) else self._fps,
            "splits": {"train": f"0:{num_episodes}"},
            "data_path": TEMPLATES[self._version][0],
            "video_path": TEMPLATES[self._version][1] if names else None,
            "features": self._features(),
        }

    def add(self, episode: EpisodeToWrite) -> None:
        with ExitStack() as made:  # the data file comes to its place after the videos, or none of them does
            name = self._file(self._num_episodes)
            files = {name: made.enter_context(self._replaced(name))}
            note = self._write(episode, files, made)
            self.note(episode, files)
        self._take(note)
        self.written.add(episode.id)
        self._report(episode, note["absent"])

    def _write(self, episode: EpisodeToWrite, files: dict[str, Path], made: ExitStack) -> dict[str, Any]:
        """Write the files of an episode and return its note; `files` has the data file, and takes the videos."""
        (data_file,) = files.values()
        self._notes.pop(self._num_episodes, None)  # of an episode that could not be written
        is_v3 = self._version == "v3.0"
        statistics = self._statistics.of_rows(self._num_frames if is_v3 else 0, episode.length)
        for column in (column for column in self._columns if column.kind == "video"):
            name = self._file(self._num_episodes, column.name)
            files[name] = made.enter_context(self._replaced(name))
            self._write_video(episode, column, files[name], statistics)
        tables = self._tables(episode, statistics)
        first = next(tables)
        about = dict[str, str]()
        if not is_v3:
            features = self._features()
            about["huggingface"] = hub_features(
                {name: features[name] for name in first.column_names},
                {_feature_name(name): kind for name, kind in self._languages.items()},
            )
        texts = [_feature_name(name) for name in self._texts]
        with arrow()[1].ParquetWriter(data_file, first.schema.with_metadata(about), use_dictionary=texts) as file:
            for table in chain([first], tables):
                file.write_table(table)
            note: dict[str, Any] = {"id": episode.id, "start": self._num_frames, "length": episode.length}
            note |= {"task": episode.task, "absent": self._absent(episode)}
            # Readers of version 2 expect three channels of pictures.
            note |= {"levels": statistics.levels(), "stats": _as_lists(statistics.result(None if is_v3 else 3))}
            text = json.dumps(note)
            file.add_key_value_metadata({_NOTE: text})
        if self._num_kept_bytes + len(text) <= _KEPT_NOTES_BYTES:
            self._num_kept_bytes += len(text)
            self._notes[self._num_episodes] = note
        return note

    def _write_video(self, episode: EpisodeToWrite, column: Column, path: Path, statistics: Statistics) -> None:
        """Copy or encode the video of an episode, and add its pictures to the statistics."""
        name = column.field.name
        rows = (0, episode.length)
        source = _video_of(episode, name) if column.about is not None else None
        how = ""
        if source is not None:
            for statement in source.false_statements():
                self.changed(f"the description of {name!r} has {statement}", episode)
        if source is not None and source.codec in (column.codec, ""):
            with suppress(CorruptFileError):  # reading the rows raises the error of the source
                how = copy_video(source, path)
        if how:
            start = 0
            for part in self._parts(episode, column, rows, statistics):
                times_s = (start + np.arange(len(part))) / self._fps
                if how == "packets" and not _has_frames(path, times_s, part):
                    break
                start += len(part)
            if start == episode.length:
                shared = f"packets of {name!r} are copied from a video file that several episodes share"
                self.changed(shared, episode, how == "packets")
                return
            statistics.reset(column.name)
        codec = column.codec if column.codec in (*ENCODERS, *OTHER_ENCODERS) else "h264"
        if source is not None:
            check_encodable(column.field)
        write_video(path, self._parts(episode, column, rows, statistics), self._fps, codec)
        if source is not None:
            why = "its packets in a video file that several episodes share cannot stand alone"
            if source.codec not in (column.codec, ""):
                why = f"its video is {source.codec}, unlike that of the first episode"
            self.changed(f"{name!r} is encoded again as {codec}, with loss: {why}", episode)

    def _new_statistics(self) -> SetStatistics:
        """Return empty statistics of all features but texts."""
        lengths = [episode.length for episode in self.episodes]
        num_frames = sum(lengths) if self._version == "v3.0" else max(lengths)
        columns = [*self._columns, *self._scalar_columns().values()]
        return SetStatistics(columns, num_frames, self.path / _UNFINISHED_FILES)

    def _parts(
        self, episode: EpisodeToWrite, column: Column, rows: tuple[int, int], statistics: Statistics
    ) -> Iterator[Array]:
        """Read rows of a field a few megabytes at a time, and count them in its statistics."""
        is_video = column.kind == "video" or _video_of(episode, column.field.name) is not None
        part_bytes = _VIDEO_PART_BYTES if is_video else _PART_BYTES
        step = max(1, part_bytes // max(1, column.field.row_bytes))
        for start in range(*rows, step):
            stop = min(start + step, rows[1])
            values = self._shared.read(episode, column.field.name, start, stop)
            if column.field.name == NUMBER and self._has_subtask_texts:
                numbers = numbers_of(self._subtasks, episode.read(TEXT, start, stop), values)
                self.changed(f"{NUMBER!r} is counted anew", episode, (numbers != values).any())
                values = numbers
            statistics.add(column.name, values)
            yield values

    def _tables(self, episode: EpisodeToWrite, statistics: Statistics) -> Iterator[Any]:
        """Yield the rows of an episode, but for videos: a row group at a time, most often of all of them."""
        pyarrow, _ = arrow()
        scalars = self._scalars(episode)
        for name, values in scalars.items():
            statistics.add(name, values)
        in_rows = [column for column in self._columns if column.kind != "video"]
        step = max(1, _GROUP_BYTES // sum(column.field.row_bytes for column in in_rows))
        for start in range(0, episode.length, step):
            rows = start, min(start + step, episode.length)
            columns = {}
            for column in in_rows:
                parts = self._parts(episode, column, rows, statistics)
                columns[column.name] = arrow_column(column, parts, start)
            for name, kind in self._texts.items():
                columns[_feature_name(name)] = pyarrow.array(episode.read(name, *rows), kind)
            for name, kind in self._languages.items():
                where = f"of {name!r} in episode {episode.id!r}"
                columns[_feature_name(name)] = column_of_texts(episode.read(name, *rows), kind, where)
            yield pyarrow.table(columns | {name: values[slice(*rows)] for name, values in scalars.items()})

    def _scalars(self, episode: EpisodeToWrite) -> dict[str, Array]:
        """Return the columns that number the rows, and those of task and success."""
        length = episode.length
        task = self._tasks.index(episode.task)
        frames = np.arange(length)
        found = dict[str, Array]()
        for name in self._flags:
            if name in episode.schema:
                found[name] = np.asarray(episode.read(name)).reshape(length)
            else:
                found[name] = (frames == length - 1) & bool(self._flag(episode, name))
        if self.options["groot"]:
            found[_ANNOTATION] = np.full(length, task)
        numbers = np.full(length, self._num_episodes)
        rows = (frames / self._fps, frames, numbers, self._num_frames + frames, np.full(length, task))
        for (name, dtype), values in zip(SCALARS.items(), rows, strict=True):
            found[name] = self._as_recorded(episode, name, values.astype(dtype))
        return found

    def _as_recorded(self, episode: EpisodeToWrite, name: str, values: Array) -> Array:
        """Return the recorded times where LeRobot accepts them as those of the frames; report other values."""
        if name == TASK or name not in episode.schema:
            return values
        recorded = np.asarray(episode.read(name))
        if recorded.shape != values.shape or (np.abs(recorded.astype(np.float64) - values) > TOLERANCE_S).any():
            self.changed(f"{name!r} is counted anew", episode)
            return values
        return recorded.astype(values.dtype)

    @contextmanager
    def _replaced(self, name: str) -> Iterator[Path]:
        """Return a path to write a file to, which then takes its place; `close` flushes all of them at once.

        All are written in one folder: of 1,000 files, a folder each, made and removed, takes more than what is in it.
        """
        new = self.path / _UNFINISHED_FILES / name.replace("/", ".")
        path = self.path / name
        for folder in (new.parent, path.parent):
            folder.mkdir(parents=True, exist_ok=True)
        yield new
        os.replace(new, path)

    def _report(self, episode: EpisodeToWrite, absent: Sequence[str]) -> None:
        for what in self._shared.changes(episode):
            self.changed(what, episode)
        self._report_names(episode)
        earlier: Any = episode.metadata.get(ABSENT) or ()
        for name in (name for name in absent if name in self._flags and name not in earlier):
            self.changed(f"{name!r} is False in episodes that do not tell it", episode)
        deep = [name for name, field in episode.schema.items() if len(field.shape) > _MAX_LIST_DIMENSIONS]
        empty = [name for name, field in episode.schema.items() if not field.num_elements]
        numbered = {TEXT} if self._has_subtask_texts else set()
        lost_texts = set(self._shared.texts) - {*self._texts, *self._languages, _ANNOTATION} - numbered
        numbers = [column for column in self._columns if column.kind == "number" and "image" in column.field.name]
        renamed = [column.field.name for column in numbers if "image" not in column.name]
        for what, names in (
            ("fields of more than five dimensions are left out", deep),
            ("fields without a number are left out", empty),
            ("texts whose Arrow type JSON cannot hold are left out", sorted(lost_texts)),
            ("depth is written as numbers, without 'image' in its name", renamed),
        ):
            if names:
                self.changed(f"{what} ({', '.join(names)})", episode)
        other = set(episode.metadata) - {"task", "success", "tasks", ABSENT, *RATE_KEYS}
        is_encoded = any(column.kind == "video" and column.about is None for column in self._columns)
        known: Any = self.metadata.get("features") or {}
        others = [column for column in self._columns if not column.is_picture]
        was_depth_video = any((known.get(column.name) or {}).get("dtype") == "video" for column in others)
        lossy = set(self.metadata.get("lossy") or ())
        was_lossy = any(column.field.name in lossy for column in self._columns if column.kind != "video")
        has_end = (episode.terminated, episode.truncated) != (None, None)
        for what, is_so in (
            ("pictures are stored as video, with loss", is_encoded),
            ("video of depth is written as TIFF pictures or numbers", was_depth_video),
            ("the note that pictures were stored with loss is left out", was_lossy),
            ("how an episode ended is left out, but for 'next.done'", has_end),
            ("the observation after the last step is left out", episode.final),
            ("only the first task of an episode is written", len(episode.metadata.get("tasks", ())) > 1),
            ("bfloat16 is written as float32", any(column.field.dtype == "bfloat16" for column in self._columns)),
            ("metadata of episodes are left out, but for task and success", other),
            ("texts of subtasks in the metadata are left out", SUBTASKS in self.metadata and not self._subtasks),
        ):
            if is_so:
                self.changed(what, episode)

    def _report_names(self, episode: EpisodeToWrite) -> None:
        """Report the fields that are read by another name, or as a number instead of a vector of one or vice versa."""
        texts = {name: _feature_name(name) for name in (*self._texts, *self._languages)}
        features = dict.fromkeys((*(column.name for column in self._columns), *texts.values()))
        for own, feature in texts.items():
            name = field_name(feature, features)
            self.changed(f"field {own!r} is called {name!r}", episode, own in episode.texts and own != name)
        for column in self._columns:
            own = column.field.name
            name = field_name(column.name, features)
            is_vector = name.partition("/")[0] in ("observation", "action")
            self.changed(f"field {own!r} is called {name!r}", episode, own in episode.schema and own != name)
            if column.kind == "number" and column.field.shape in ((), (1,)):
                self.reshaped(own, (1,) if is_vector else (), episode)

    def close(self) -> None:
        self.note_open()
        self._write_tables()
        shutil.rmtree(self.path / _UNFINISHED_FILES, ignore_errors=True)
        # Several at once: one after the other, each of 4,000 files waits for the disk.
        each(sync_path, [*self.path.rglob("*"), self.path], _NUM_SYNC_THREADS)
        if not self.is_complete:
            self._write_json(LEROBOT_INFO, {**self._info(), UNFINISHED: True})
            self._note_tables()
            return
        with replace_file(self.path / LEROBOT_INFO) as new:
            new.write_text(_json_of(self._info()), encoding="utf-8")
            self._note_tables(new)
        self.note_finish()

    def _note_tables(self, info: Path | None = None) -> None:
        """Note the files that concern all episodes; `info` is the description of the complete set."""
        found = {path.relative_to(self.path): path for path in (self.path / "meta").rglob("*") if path.is_file()}
        files = {name.as_posix(): found[name] for name in sorted(found) if not name.parent.name.startswith(".")}
        self.note_files({**files, LEROBOT_INFO: self.path / LEROBOT_INFO if info is None else info})

    def _write_tables(self) -> None:
        """Write what concerns all episodes, but for the description of the set."""
        if self._subtasks:
            described: Any = (self.metadata.get(ARROW_TYPES) or {}).get(TABLE_NAME)
            self._write_texts(TABLE_NAME, subtask_table(self._subtasks, described))
        if self._version == "v3.0":
            self._write_tables_3()
            return
        self._write_lines("tasks", ({"task_index": number, "task": task} for number, task in enumerate(self._tasks)))
        numbers = range(self._num_episodes)
        self._write_lines("episodes", (_entry_2(number, self._note(number)) for number in numbers))
        stats = ({"episode_index": number, "stats": self._note(number)["stats"]} for number in numbers)
        self._write_lines("episodes_stats", stats)
        if self.options["groot"]:
            self._write_json("meta/modality.json", self._modality())

    def _write_tables_3(self) -> None:
        pyarrow, parquet = arrow()
        tasks = pyarrow.table({"task_index": np.arange(len(self._tasks)), "task": pyarrow.array(self._tasks, "string")})
        self._write_texts("meta/tasks.parquet", tasks)
        if not self._num_episodes:
            return
        if self.is_complete:
            self._write_json("meta/stats.json", self._total_statistics())
        rows = map(self._entry_3, range(self._num_episodes))
        with self._replaced("meta/episodes/chunk-000/file-000.parquet") as new, ExitStack() as opened:
            file = None
            while some := list(islice(rows, _ENTRIES_AT_ONCE)):
                table = pyarrow.Table.from_pylist(some, file and file.schema)
                if ABSENT in table.column_names:  # the lists of the first episodes may all be empty
                    names = table[ABSENT].cast(pyarrow.list_(pyarrow.string()))
                    table = table.set_column(table.column_names.index(ABSENT), ABSENT, names)
                file = file or opened.enter_context(parquet.ParquetWriter(new, table.schema))
                file.write_table(table)

    def _write_texts(self, name: str, table: Any) -> None:
        """Write a table of numbers and texts."""
        _, parquet = arrow()
        text = next(column for column in table.column_names if not column.endswith("_index"))
        # lerobot takes the text from the index of pandas; as a plain column it gives wrong tasks.
        index = dict.fromkeys(("name", "field_name"), text) | {"pandas_type": "unicode", "numpy_type": "object"}
        pandas = {"index_columns": [text], "columns": [{**index, "metadata": None}], "column_indexes": []}
        with self._replaced(name) as new:
            parquet.write_table(table.replace_schema_metadata({b"pandas": json.dumps(pandas)}), new)

    def _total_statistics(self) -> dict[str, dict[str, Any]]:
        """Compute the statistics of all frames; numbers of episodes that were there are read for it."""
        columns = {column.name: column for column in self._columns if not column.is_picture}
        columns |= self._scalar_columns()
        widths = {name: prod(one.field.shape) if one.kind == "number" else None for name, one in columns.items()}
        earlier = self._statistics.of_rows(0, self._num_frames)
        for number in range(self._num_taken_up):
            file = ParquetFile(self.path / self._file(number))
            for batch in file.batches(widths, 0, file.num_rows):
                for name, column in columns.items():
                    earlier.add(name, read_column(column, batch[name], f"{name!r} of {str(file.path)!r}"))
        self._num_taken_up = 0
        return _as_lists(self._statistics.total(self._num_frames).result())

    def _entry_3(self, number: int) -> dict[str, Any]:
        """Describe an episode for the index of version 3: its places, and its statistics.

        lerobot makes the statistics of a part of the set of these.
        """
        note = self._note(number)
        place = {"chunk_index": number // _CHUNKS_SIZE, "file_index": number % _CHUNKS_SIZE}
        found = {"data": place, "meta/episodes": {"chunk_index": 0, "file_index": 0}}
        times = {"from_timestamp": 0.0, "to_timestamp": note["length"] / self._fps}
        found |= {f"videos/{column.name}": {**place, **times} for column in self._columns if column.kind == "video"}
        found |= {f"stats/{feature}": stats for feature, stats in note["stats"].items()}
        rows = {"dataset_from_index": note["start"], "dataset_to_index": note["start"] + note["length"]}
        places = {f"{group}/{name}": value for group, told in found.items() for name, value in told.items()}
        absent = {ABSENT: note["absent"]} if self._has_absent else {}
        return {**_entry(number, note), **absent, **rows, **places}

    def _modality(self) -> dict[str, Any]:
        """Return which columns GR00T reads: whole vectors, each camera, and the task."""
        groups: dict[str, dict[str, Any]] = {"state": {}, "action": {}, "video": {}}
        for column in self._columns:
            head, _, rest = column.name.partition(".")
            if column.kind == "video":
                name = column.name.removeprefix("observation.images.").replace(".", "_")
                if name in groups["video"]:
                    other = groups["video"][name]["original_key"]
                    where = f"the cameras {other!r} and {column.name!r} for GR00T"
                    raise UsageError("write", where, "a name for each", f"{name!r} for both", "Rename one")
                groups["video"][name] = {"original_key": column.name}
            elif len(column.field.shape) == 1 and head in ("observation", "action"):
                about = {"start": 0, "end": column.field.shape[0], "original_key": column.name}
                groups["action" if head == "action" else "state"][rest or head] = about
        return {**groups, "annotation": {_ANNOTATION.partition(".")[2]: {}}}

    def _write_lines(self, name: str, lines: Iterable[dict[str, Any]]) -> None:
        with self._replaced(f"meta/{name}.jsonl") as new, open(new, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        with replace_file(self.path / name) if name == LEROBOT_INFO else self._replaced(name) as new:
            new.write_text(_json_of(content), encoding="utf-8")


def _checked_fps(fps: Any) -> float | None:
    """Return the option `fps`; raise UsageError if it is no rate."""
    if fps is None:
        return None
    return arguments.real(_ACTION, "fps", fps, "> 0", lambda fps: 0 < fps < float("inf"))


def _video_of(episode: EpisodeToWrite, name: str) -> VideoRange | None:
    """Return the video of a field; None if the episode lacks the field or does not store it as video."""
    return episode.video(name) if name in episode.schema else None


def _chosen_video(
    videos: Sequence[VideoRange | None], fps: float, codec: str | None, groot: bool
) -> tuple[str, Mapping[str, Any] | None]:
    """Return the codec of a field of pictures, "" for PNG, and the description of video that is copied.

    Args:
        videos: The video of the field in each episode.
        fps: Frames per second of the target.
        codec: The option `video`.
        groot: The option `groot`.
    """
    first = videos[0]
    is_video = first is not None and all(one is not None and one.rate_hz == fps for one in videos)
    if first is not None and is_video and codec in (None, first.codec):
        return first.codec or "h264", first.true_about
    if codec is not None:
        return codec, None
    return "h264" if groot or first is not None else "", None


def _json_of(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=4, ensure_ascii=False)


def _as_lists(statistics: Mapping[str, Mapping[str, Array]]) -> dict[str, dict[str, Any]]:
    return {feature: {name: values.tolist() for name, values in found.items()} for feature, found in statistics.items()}


def _entry(number: int, note: Mapping[str, Any]) -> dict[str, Any]:
    return {"episode_index": number, "tasks": [note["task"]], "length": note["length"]}


def _entry_2(number: int, note: Mapping[str, Any]) -> dict[str, Any]:
    absent = {ABSENT: note["absent"]} if note["absent"] else {}
    return {**_entry(number, note), **absent}


def _has_frames(path: Path, times_s: Array, frames: Array) -> bool:
    """Return whether a video has just these frames at these times."""
    try:
        return np.array_equal(read_frames(path, times_s, frames.shape[1:]), frames)
    except CorruptFileError:
        return False


def _feature_name(name: str) -> str:
    return name.replace("/", ".")
