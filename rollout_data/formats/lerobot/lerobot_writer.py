"""Writer of LeRobot datasets of versions 3.0 and 2.1.

Each episode is written to a separate data file, also in version 3, so that a killed writer loses at
most one episode. Until `close`, `meta/info.json` has the key `is_unfinished`. An unfinished dataset
can be opened, and has the episodes written so far.
"""

from __future__ import annotations

import json
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

from ...sources.episode_info import ABSENT
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
    FeatureColumn,
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
from .lerobot_subtasks import (
    NUMBER,
    SUBTASKS,
    TABLE_NAME,
    TEXT,
    numbers_of,
    stated_subtasks,
    subtask_table,
    with_pairs,
)

#: Number of episodes in a folder.
_CHUNKS_SIZE = 1000
#: Bytes of a field read at a time.
_PART_BYTES = 1 << 20
#: Bytes of a video field read at a time. Decoding of each part starts at a key frame.
_VIDEO_PART_BYTES = 1 << 25
#: Approximate bytes of a row group.
_GROUP_BYTES = 1 << 24
#: Number of index rows written at a time. A row with statistics may have 100 kB.
_ENTRIES_AT_ONCE = 100
#: Maximum bytes of cached episode summaries, as JSON text. In memory, they need about twice as
#: much.
_MAX_SUMMARY_BYTES = 1 << 24
#: Number of files flushed to the disk at the same time.
_NUM_SYNC_THREADS = 16
#: Name of the folder for incomplete files.
_UNFINISHED_FILES = ".unfinished"
#: Metadata key in a data file for the summary of its episode: id, task and statistics as JSON.
_SUMMARY_KEY = "rollout_data.episode"
_MAX_LIST_DIMENSIONS = 5
_ANNOTATION = "annotation.human.task_description"
_DONE = "next.done"
_FLAG = np.dtype(bool)
#: Names of an episode's metadata that the dataset stores, or that determine the frame rate.
_STORED_METADATA = ("task", "success", "tasks", ABSENT, *RATE_KEYS)
_SPEECH = {"role": "string", "content": "string", "style": "string"}
_ATTACHMENTS = {"camera": "string", "tool_calls": {"list": "string"}}
#: Descriptions of the Arrow types of LeRobot's language fields. The types in the metadata of the
#: recording take precedence.
_LANGUAGE = {
    "language_persistent": {
        "list": {"struct": {**_SPEECH, "timestamp": "float", **_ATTACHMENTS}},
    },
    "language_events": {"list": {"struct": {**_SPEECH, **_ATTACHMENTS}}},
}


class LerobotWriter(ForeignWriter):
    """Writer of a LeRobot dataset. Episodes are numbered in the order of writing.

    A field that some episodes lack is filled with False or NaN, or left out.

    Options:
        version: "v3.0" or "v2.1".
        fps: Frames per second. Required if the recording does not state its rate.
        video: "h264" or "av1" for pictures as video, with loss; "" for PNG. None copies the video
            of LeRobot sets and writes other pictures as PNG.
        groot: Also write `meta/modality.json` and a column of tasks for GR00T. Version 2.1 only.
            All cameras are video, by default "h264".
    """

    format = "lerobot"
    HOLDS = frozenset((
        ARROW_TYPES, "chunks_size", "codebase_version", "data_files_size_in_mb", "data_path",
        "features", "fps", "frame_rate_hz", "lossy", "robot_type", "splits", SUBTASKS, "tasks",
        "total_chunks", "total_episodes", "total_frames", "total_tasks", "total_videos", "units",
        "video_files_size_in_mb", "video_path",
    ))  # fmt: skip
    OPTIONS: ClassVar[Mapping[str, Any]] = {
        "version": "v3.0",
        "fps": None,
        "video": None,
        "groot": False,
    }

    MADE: ClassVar[tuple[str, ...]] = ("data", "meta", "videos", _UNFINISHED_FILES)
    BEGUN = (LEROBOT_INFO,)
    LAST = LEROBOT_INFO

    @classmethod
    def is_finished(cls, path: Path) -> bool:
        file = path / LEROBOT_INFO
        try:
            return file.exists() and not read_object(file).get(UNFINISHED)
        except DataFileError as error:
            raise changed_file(path, file, error.message.rstrip(".")) from error

    @classmethod
    def effective(
        cls,
        options: Mapping[str, Any],
        path: Path,
        episodes: Sequence[EpisodeToWrite],
        metadata: Mapping[str, Any],
    ) -> dict[str, Any]:
        fps, _ = frame_rate(episodes, metadata, _checked_fps(options["fps"]))
        fields = {name: field for episode in episodes for name, field in episode.schema.items()}
        codings: dict[str, Any] = {}
        for field in fields.values():
            if is_picture_field(field):
                videos = [_video_of(episode, field.name) for episode in episodes]
                codec, copied = _chosen_video(videos, fps, options["video"], options["groot"])
                codings[field.name] = [codec, copied is not None]
        return {**options, "fps": fps, "video": codings}

    def begin(self) -> set[str]:
        # A recording builds its episodes at each iteration, and this class iterates about ten
        # times.
        self.episodes = list(self.episodes)
        self._read_options()
        units = self.metadata.get("units") or {}
        derived_flags = [name for name in (SUCCESS, _DONE) if self._is_derived(name)]
        ignored = (*SCALARS, *derived_flags)
        self._shared = shared_fields(self.episodes, units, ignored=ignored)
        self._columns = self._chosen_columns(units)
        self._has_subtask_texts = self._is_numbered_by_subtasks()
        self._subtasks = self._chosen_subtasks()
        self._texts, self._languages = self._chosen_texts()
        self._check_names()
        self._flags = self._chosen_flags()
        self._has_absent = any(self._absent(episode) for episode in self.episodes)
        self._tasks = list(dict.fromkeys(episode.task for episode in self.episodes))
        self._num_episodes = 0
        self._num_frames = 0
        #: Number of episodes written by an earlier conversion. Their numeric values are not in
        #: `_statistics`.
        self._num_resumed = 0
        #: Cached summaries (id, task, statistics) of the first episodes, by episode number.
        self._summaries: dict[int, dict[str, Any]] = {}
        self._num_summary_bytes = 0
        self._statistics = self._new_statistics()

        info = self._info()
        if (self.path / LEROBOT_INFO).exists():
            features = read_object(self.path / LEROBOT_INFO).get("features")
            if features == json.loads(json.dumps(info["features"])):
                self._note_tables()
                return self._resume()
            # New episodes of the source changed the shared fields, so all episodes are written
            # again.
            self.begin_again()
        self._write_tables()
        self._write_json(LEROBOT_INFO, {**info, UNFINISHED: True})
        self._note_tables()
        return set()

    def _read_options(self) -> None:
        """Check the options and the frame rate."""
        options = self.options
        versions = ("v3.0", "v2.1")
        self._version = arguments.choice("version", options["version"], versions)
        self._codec: str | None = options["video"]
        if self._codec is not None:
            self._codec = arguments.choice("video", self._codec, ("", *ENCODERS))
        self._is_for_groot = arguments.flag("groot", options["groot"])
        if self._is_for_groot and self._version != "v2.1":
            raise UsageError(
                f"groot=True needs version='v2.1', which GR00T reads, got {self._version!r}."
            )

        fps = _checked_fps(options["fps"])
        self._fps, rounded = frame_rate(self.episodes, self.metadata, fps)
        if rounded:
            for episode in self.episodes:
                for change, ids in rounded.items():
                    self.changed(change, episode, episode.id in ids)
        if self._fps * 2 * TOLERANCE_S >= 1:
            most_hz = 0.5 / TOLERANCE_S
            raise UsageError(
                f"the frame rate is {self._fps:g} Hz, but must be below {most_hz:g} Hz, because "
                f"lerobot finds frames within {TOLERANCE_S} s."
            )

    def _resume(self) -> set[str]:
        """Count the episodes of an earlier conversion and return their ids."""
        ids = set()
        while (self.path / self._file(self._num_episodes)).exists():
            try:
                summary = self._summary_of(self._num_episodes)
            except CorruptFileError:  # Damaged by a power failure.
                break
            if summary["id"] not in self.conversion.rows:
                break
            self._count(summary)
            ids.add(summary["id"])
        self._num_resumed = self._num_episodes
        return ids

    def _summary_of(self, number: int) -> dict[str, Any]:
        """Return the summary (id, task, statistics) of an episode from the cache or its file."""
        if number in self._summaries:
            return self._summaries[number]
        pyarrow, parquet = arrow()
        path = self.path / self._file(number)
        damage = (pyarrow.ArrowException, OSError, LookupError)
        with damage_named(repr(str(path)), *damage):
            text = parquet.read_metadata(path).metadata[_SUMMARY_KEY.encode()]
            summary: dict[str, Any] = json.loads(text)
        return summary

    def _count(self, summary: Mapping[str, Any]) -> None:
        """Add the summary of a written episode to the counters."""
        self._num_episodes += 1
        self._num_frames += summary["length"]
        self._statistics.add_levels(summary["levels"], summary["length"])

    def _is_derived(self, name: str) -> bool:
        """Return whether a flag is written although some episodes do not have it as a field.

        The flag of these episodes is derived from their end or success. A field of this name must
        be a single bool wherever it exists; other fields are not replaced by a flag.
        """
        fields = [episode.schema[name] for episode in self.episodes if name in episode.schema]
        are_flags = all(field.dtype == "bool" and field.num_elements == 1 for field in fields)
        return are_flags and len(fields) < len(self.episodes)

    def _chosen_columns(self, units: Mapping[str, str]) -> list[FeatureColumn]:
        """Return the columns of the fields that all episodes share."""
        columns = []
        for field in self._shared.schema.values():
            if field.num_elements and len(field.shape) <= _MAX_LIST_DIMENSIONS:
                columns.append(self._column(field, units))
        if not any(column.name.startswith("action") for column in columns):
            raise UsageError(
                "LeRobot needs actions of one shape and dtype in all episodes. Select episodes "
                "with the same actions."
            )
        return columns

    def _column(self, field: Field, units: Mapping[str, str]) -> FeatureColumn:
        """Return the column of a field. LeRobot video is copied if it has the requested codec."""
        is_v3 = self._version == "v3.0"
        if not is_picture_field(field):
            return column_of(field, units, "", is_v3)
        videos = [_video_of(episode, field.name) for episode in self.episodes]
        codec, copied_description = _chosen_video(
            videos,
            self._fps,
            self._codec,
            self._is_for_groot,
        )
        if self._is_for_groot and not codec:
            raise UsageError(
                f"groot=True needs camera {field.name!r} as video, got video={codec!r}. Pass "
                f"video=... with one of {', '.join(ENCODERS)}."
            )
        return column_of(field, units, codec, is_v3, copied_description)

    def _chosen_texts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return two dicts that map plain text fields and language fields to Arrow types."""
        stated = {**_LANGUAGE, **(self.metadata.get(ARROW_TYPES) or {})}
        texts: dict[str, Any] = {}
        languages: dict[str, Any] = {}
        for name in sorted(self._shared.texts):
            if name == TEXT and self._has_subtask_texts:
                continue
            # For GR00T, a column of task numbers replaces this text field.
            is_annotation = name == _ANNOTATION and self._is_for_groot
            description = stated.get(name, None if is_annotation else "string")
            if description is None:
                continue
            if description in TEXT_TYPES:
                texts[name] = arrow_type(description)
            else:
                languages[name] = arrow_type(description)
        return texts, languages

    def _is_numbered_by_subtasks(self) -> bool:
        """Return whether every episode has both numbers and texts of subtasks."""
        for column in self._columns:
            field = column.field
            is_integer = field.num_elements == 1 and field.dtype.startswith("int")
            if field.name == NUMBER and is_integer:
                return TEXT in self._shared.texts
        return False

    def _chosen_subtasks(self) -> dict[int, str]:
        """Map numbers to the texts of all subtasks.

        Subtasks in the metadata of the recording come first. Texts that only episodes have are
        added.
        """
        table = stated_subtasks(self.metadata)
        if not self._has_subtask_texts:
            return table
        for episode in self.episodes:
            with suppress(DataFileError):  # Writing the episode raises this error later.
                numbers = np.asarray(episode.read(NUMBER)).reshape(-1).tolist()
                table = with_pairs(table, zip(numbers, episode.read(TEXT), strict=True))
        return table

    def _chosen_flags(self) -> list[str]:
        """Return the names of last-row flags (success and end) known for at least one episode."""
        names = {column.name for column in self._columns}
        flags = []
        for name in (SUCCESS, _DONE):
            is_known = any(self._flag(episode, name) is not None for episode in self.episodes)
            if name not in names and is_known:
                flags.append(name)
        return flags

    def _flag(self, episode: EpisodeToWrite, name: str) -> bool | None:
        """Return the value of a flag in the last row of an episode; None if it is unknown.

        If the episode has the flag as a field, the result is True, which only states that the flag
        is known. The recorded field is written instead of the result.
        """
        if name in episode.schema:
            return True
        if name == SUCCESS:
            return episode.success
        ends = (episode.terminated, episode.truncated)
        if any(ends):
            return True
        is_known = None not in ends or episode.metadata.get("ends") == "open"
        return False if is_known else None

    def _absent(self, episode: EpisodeToWrite) -> list[str]:
        """Return the features that are filled with False or NaN, because the episode lacks them."""
        noted: Any = episode.metadata.get(ABSENT)
        earlier = noted if isinstance(noted, list) else []
        flags = []
        for name in self._flags:
            if self._flag(episode, name) is None or name in earlier:
                flags.append(name)

        features = {column.field.name: column.name for column in self._columns}
        sources = dict.fromkeys(features.values())
        read_names = {name: field_name(feature, sources) for name, feature in features.items()}
        not_written = self._shared.schema.keys() - read_names.keys()
        absent = self._shared.absent(episode, lambda name: read_names.get(name, name))
        return [*(name for name in absent if name not in not_written), *flags]

    def _text_features(self) -> dict[str, str]:
        """Map text fields to the names of their features."""
        return {name: _feature_name(name) for name in (*self._texts, *self._languages)}

    def _check_names(self) -> None:
        """Raise `UsageError` if two fields have the same feature."""
        features = [(column.field.name, column.name) for column in self._columns]
        features += self._text_features().items()
        owners: dict[str, str] = {}
        for field, feature in features:
            if feature in owners or feature in SCALARS:
                other = owners.get(feature, feature)
                raise UsageError(
                    f"fields {other!r} and {field!r} would both become feature {feature!r} of "
                    "LeRobot. Rename one of the fields."
                )
            owners[feature] = field

    def _file(self, number: int, camera: str = "") -> str:
        """Return the name of the data file of an episode, or of its video file for a camera."""
        chunk, file = divmod(number, _CHUNKS_SIZE)
        values: dict[str, int | str] = {
            "chunk_index": chunk,
            "file_index": file,
            "video_key": camera,
            "episode_chunk": chunk,
            "episode_index": number,
        }
        data_path, video_path = TEMPLATES[self._version]
        return file_name(video_path if camera else data_path, values, self.path)

    def _features(self) -> dict[str, Any]:
        """Map features to their descriptions for `meta/info.json`."""
        features = {column.name: column.description(self._fps) for column in self._columns}
        stated: Any = self.metadata.get("features") or {}
        for name, description in features.items():
            source = stated.get(name)
            is_same = isinstance(source, Mapping) and source.get("shape") == description["shape"]
            if is_same and description["names"] is None:
                description["names"] = source.get("names")

        dtypes = {_feature_name(name): "string" for name in self._texts}
        dtypes |= {_feature_name(name): "language" for name in self._languages}
        dtypes |= {name: dtype.name for name, dtype in self._scalar_dtypes().items()}
        for name, dtype_name in dtypes.items():
            features[name] = {"dtype": dtype_name, "shape": [1], "names": None}
        return features

    def _scalar_dtypes(self) -> dict[str, np.dtype[Any]]:
        """Map the names of the scalar features that this class adds to their dtypes."""
        dtypes: dict[str, np.dtype[Any]] = dict.fromkeys(self._flags, _FLAG)
        if self._is_for_groot:
            dtypes[_ANNOTATION] = np.dtype(np.int64)
        return dtypes | {name: np.dtype(dtype) for name, dtype in SCALARS.items()}

    def _scalar_columns(self) -> dict[str, FeatureColumn]:
        columns = {}
        for name, dtype in self._scalar_dtypes().items():
            columns[name] = FeatureColumn(Field(name, (), dtype.name), name, "number")
        return columns

    def _video_columns(self) -> list[FeatureColumn]:
        return [column for column in self._columns if column.kind == "video"]

    def _info(self) -> dict[str, Any]:
        """Return the description of the dataset, the content of `meta/info.json`."""
        num_cameras = len(self._video_columns())
        num_episodes = self._num_episodes
        data_path, video_path = TEMPLATES[self._version]
        if self._version == "v2.1":
            num_chunks = -(-num_episodes // _CHUNKS_SIZE)
            sizes = {"total_videos": num_cameras * num_episodes, "total_chunks": num_chunks}
        else:
            sizes = {"data_files_size_in_mb": 100, "video_files_size_in_mb": 200}
        is_integer_rate = self._fps == int(self._fps)
        return {
            "codebase_version": self._version,
            "robot_type": self.metadata.get("robot_type"),
            "total_episodes": num_episodes,
            "total_frames": self._num_frames,
            "total_tasks": len(self._tasks),
            "chunks_size": _CHUNKS_SIZE,
            **sizes,
            "fps": int(self._fps) if is_integer_rate else self._fps,
            "splits": {"train": f"0:{num_episodes}"},
            "data_path": data_path,
            "video_path": video_path if num_cameras else None,
            "features": self._features(),
        }

    def add(self, episode: EpisodeToWrite) -> None:
        # The data file is renamed after the videos, so a complete episode has all files.
        with ExitStack() as replacements:
            name = self._file(self._num_episodes)
            files = {name: replacements.enter_context(self._replaced(name))}
            summary = self._write(episode, files, replacements)
            self.note(episode, files)
        self._count(summary)
        self.written.add(episode.id)
        self._report(episode, summary["absent"])

    def _write(
        self,
        episode: EpisodeToWrite,
        files: dict[str, Path],
        replacements: ExitStack,
    ) -> dict[str, Any]:
        """Write the files of an episode and return its summary.

        Args:
            episode: The episode.
            files: Output: maps final file names to temporary paths. Contains the data file at
                first; videos are added.
            replacements: Stack that renames the files when it is closed. Videos are added.
        """
        (data_file,) = files.values()
        self._summaries.pop(self._num_episodes, None)  # A failed attempt may have cached one.
        start = self._num_frames if self._version == "v3.0" else 0
        statistics = self._statistics.of_rows(start, episode.length)
        for column in self._video_columns():
            name = self._file(self._num_episodes, column.name)
            files[name] = replacements.enter_context(self._replaced(name))
            self._write_video(episode, column, files[name], statistics)

        tables = self._tables(episode, statistics)
        first = next(tables)
        schema = first.schema.with_metadata(self._file_metadata(first.column_names))
        texts = [_feature_name(name) for name in self._texts]
        _, parquet = arrow()
        with parquet.ParquetWriter(data_file, schema, use_dictionary=texts) as file:
            for table in chain([first], tables):
                file.write_table(table)
            summary = self._new_summary(episode, statistics)
            text = json.dumps(summary)
            file.add_key_value_metadata({_SUMMARY_KEY: text})
        if self._num_summary_bytes + len(text) <= _MAX_SUMMARY_BYTES:
            self._num_summary_bytes += len(text)
            self._summaries[self._num_episodes] = summary
        return summary

    def _file_metadata(self, columns: Sequence[str]) -> dict[str, str]:
        """Return the metadata of a data file with the columns `columns`."""
        if self._version == "v3.0":
            return {}
        features = self._features()
        described = {name: features[name] for name in columns}
        languages = {_feature_name(name): kind for name, kind in self._languages.items()}
        return {"huggingface": hub_features(described, languages)}

    def _new_summary(self, episode: EpisodeToWrite, statistics: Statistics) -> dict[str, Any]:
        # Readers of version 2 expect three channels even for grey pictures.
        num_channels = None if self._version == "v3.0" else 3
        return {
            "id": episode.id,
            "start": self._num_frames,
            "length": episode.length,
            "task": episode.task,
            "absent": self._absent(episode),
            "levels": statistics.levels(),
            "stats": _as_lists(statistics.result(num_channels)),
        }

    def _write_video(
        self,
        episode: EpisodeToWrite,
        column: FeatureColumn,
        path: Path,
        statistics: Statistics,
    ) -> None:
        """Copy or encode the video of an episode, and add its pictures to the statistics."""
        name = column.field.name
        source = None
        if column.copied_description is not None:
            source = _video_of(episode, name)
        if source is not None:
            for statement in source.false_statements():
                self.changed(f"the description of {name!r} has {statement}", episode)
            if self._copy_video(source, episode, column, path, statistics):
                return
            check_encodable(column.field)

        codec = column.codec if column.codec in (*ENCODERS, *OTHER_ENCODERS) else "h264"
        parts = self._parts(episode, column, range(episode.length), statistics)
        write_video(path, parts, self._fps, codec)
        if source is not None:
            why = "its packets in a video file that several episodes share cannot stand alone"
            if source.codec not in (column.codec, ""):
                why = f"its video is {source.codec}, unlike that of the first episode"
            self.changed(f"{name!r} is encoded again as {codec}, with loss: {why}", episode)

    def _copy_video(
        self,
        source: VideoRange,
        episode: EpisodeToWrite,
        column: FeatureColumn,
        path: Path,
        statistics: Statistics,
    ) -> bool:
        """Copy the video of an episode, and add its pictures to the statistics.

        Returns:
            Whether the copy has exactly the frames of the episode.
        """
        if source.codec not in (column.codec, ""):
            return False
        copied = ""
        with suppress(CorruptFileError):  # Reading the rows raises this error later.
            copied = copy_video(source, path)
        if not copied:
            return False
        start = 0
        for part in self._parts(episode, column, range(episode.length), statistics):
            times_s = (start + np.arange(len(part))) / self._fps
            if copied == "packets" and not _has_frames(path, times_s, part):
                statistics.reset(column.name)
                return False
            start += len(part)
        name = column.field.name
        change = f"packets of {name!r} are copied from a video file that several episodes share"
        self.changed(change, episode, copied == "packets")
        return True

    def _new_statistics(self) -> SetStatistics:
        """Return empty statistics of all features except texts."""
        lengths = [episode.length for episode in self.episodes]
        num_frames = sum(lengths) if self._version == "v3.0" else max(lengths)
        columns = [*self._columns, *self._scalar_columns().values()]
        return SetStatistics(columns, num_frames, self.path / _UNFINISHED_FILES)

    def _parts(
        self,
        episode: EpisodeToWrite,
        column: FeatureColumn,
        rows: range,
        statistics: Statistics,
    ) -> Iterator[Array]:
        """Yield rows of a field, a few megabytes at a time, and add them to the statistics."""
        name = column.field.name
        is_video = column.kind == "video" or _video_of(episode, name) is not None
        part_bytes = _VIDEO_PART_BYTES if is_video else _PART_BYTES
        step = max(1, part_bytes // max(1, column.field.row_bytes))
        for start in rows[::step]:
            stop = min(start + step, rows.stop)
            values = self._shared.read(episode, name, start, stop)
            if name == NUMBER and self._has_subtask_texts:
                numbers = numbers_of(self._subtasks, episode.read(TEXT, start, stop), values)
                is_changed = (numbers != values).any()
                self.changed(f"{NUMBER!r} is recomputed", episode, is_changed)
                values = numbers
            statistics.add(column.name, values)
            yield values

    def _tables(self, episode: EpisodeToWrite, statistics: Statistics) -> Iterator[Any]:
        """Yield the rows of an episode without videos, as one table per row group."""
        pyarrow, _ = arrow()
        scalars = self._scalars(episode)
        for name, values in scalars.items():
            statistics.add(name, values)
        in_rows = [column for column in self._columns if column.kind != "video"]
        step = max(1, _GROUP_BYTES // sum(column.field.row_bytes for column in in_rows))
        for start in range(0, episode.length, step):
            stop = min(start + step, episode.length)
            columns = {}
            for column in in_rows:
                parts = self._parts(episode, column, range(start, stop), statistics)
                columns[column.name] = arrow_column(column, parts, start)
            for name, text_type in self._texts.items():
                texts = episode.read(name, start, stop)
                columns[_feature_name(name)] = pyarrow.array(texts, text_type)
            for name, language_type in self._languages.items():
                texts = episode.read(name, start, stop)
                where = f"of {name!r} in episode {episode.id!r}"
                columns[_feature_name(name)] = column_of_texts(texts, language_type, where)
            for name, values in scalars.items():
                columns[name] = values[start:stop]
            yield pyarrow.table(columns)

    def _scalars(self, episode: EpisodeToWrite) -> dict[str, Array]:
        """Return the columns that this class adds: flags, task, and row and episode numbers."""
        length = episode.length
        frames = np.arange(length)
        scalars: dict[str, Array] = {}
        for name in self._flags:
            if name in episode.schema:
                scalars[name] = np.asarray(episode.read(name)).reshape(length)
            else:
                is_last = frames == length - 1
                scalars[name] = is_last & bool(self._flag(episode, name))
        tasks = np.full(length, self._tasks.index(episode.task))
        if self._is_for_groot:
            scalars[_ANNOTATION] = tasks
        numbers = {
            "timestamp": frames / self._fps,
            "frame_index": frames,
            "episode_index": np.full(length, self._num_episodes),
            "index": self._num_frames + frames,
            "task_index": tasks,
        }
        for name, dtype in SCALARS.items():
            scalars[name] = self._as_recorded(episode, name, numbers[name].astype(dtype))
        return scalars

    def _as_recorded(self, episode: EpisodeToWrite, name: str, values: Array) -> Array:
        """Return the recorded values of a column if they agree with the computed `values`.

        If recorded values differ, `values` are returned, and the change is reported.
        """
        if name == TASK or name not in episode.schema:
            return values
        recorded = np.asarray(episode.read(name))
        if recorded.shape == values.shape:
            difference = np.abs(recorded.astype(np.float64) - values)
            if not (difference > TOLERANCE_S).any():
                return recorded.astype(values.dtype)
        self.changed(f"{name!r} is recomputed", episode)
        return values

    @contextmanager
    def _replaced(self, name: str) -> Iterator[Path]:
        """Yield a temporary path for a file, and rename the file at the end of the block.

        The file is not flushed, because `close` flushes all files at once. All temporary files are
        in the same folder, because creating and removing a folder for each of 1,000 files takes
        longer than writing the files.
        """
        new = self.path / _UNFINISHED_FILES / name.replace("/", ".")
        path = self.path / name
        new.parent.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path, temporary=new, durable=False):
            yield new

    def _report(self, episode: EpisodeToWrite, absent: Sequence[str]) -> None:
        """Report the changes of an episode.

        Args:
            episode: The episode.
            absent: Features that are filled with False or NaN.
        """
        for change in self._shared.changes(episode):
            self.changed(change, episode)
        self._report_names(episode)
        earlier: Any = episode.metadata.get(ABSENT) or ()
        for name in absent:
            is_new = name in self._flags and name not in earlier
            self.changed(f"{name!r} is False in episodes without this information", episode, is_new)
        self._report_fields(episode)
        self._report_pictures(episode)
        self._report_metadata(episode)

    def _report_fields(self, episode: EpisodeToWrite) -> None:
        """Report omitted fields, and fields that are renamed for readers of the format."""
        fields = episode.schema.values()
        deep = [field.name for field in fields if len(field.shape) > _MAX_LIST_DIMENSIONS]
        empty = [field.name for field in fields if not field.num_elements]
        lost_texts = set(self._shared.texts) - {*self._texts, *self._languages, _ANNOTATION}
        if self._has_subtask_texts:
            lost_texts -= {TEXT}
        numbers = [column for column in self._columns if column.kind == "number"]
        renamed = []
        for column in numbers:
            if "image" in column.field.name and "image" not in column.name:
                renamed.append(column.field.name)
        for change, names in (
            ("fields of more than five dimensions are left out", deep),
            ("fields without a number are left out", empty),
            ("texts whose Arrow type JSON cannot hold are left out", sorted(lost_texts)),
            ("depth is written as numbers, without 'image' in its name", renamed),
        ):
            self.changed(f"{change} ({', '.join(names)})", episode, names)

    def _report_pictures(self, episode: EpisodeToWrite) -> None:
        """Report changes of the coding of pictures and depth."""
        videos = self._video_columns()
        is_encoded = any(column.copied_description is None for column in videos)
        features: Any = self.metadata.get("features") or {}
        lossy = set(self.metadata.get("lossy") or ())
        was_depth_video = False
        was_lossy = False
        for column in self._columns:
            source = features.get(column.name) or {}
            if not column.is_picture and source.get("dtype") == "video":
                was_depth_video = True
            if column.kind != "video" and column.field.name in lossy:
                was_lossy = True
        change = "pictures are stored as video, with loss"
        self.changed(change, episode, is_encoded)
        change = "video of depth is written as TIFF pictures or numbers"
        self.changed(change, episode, was_depth_video)
        change = "the note that pictures were stored with loss is left out"
        self.changed(change, episode, was_lossy)

    def _report_metadata(self, episode: EpisodeToWrite) -> None:
        """Report metadata of an episode that the dataset does not store."""
        has_end = (episode.terminated, episode.truncated) != (None, None)
        has_several_tasks = len(episode.metadata.get("tasks", ())) > 1
        has_bfloat16 = any(column.field.dtype == "bfloat16" for column in self._columns)
        other = episode.metadata.keys() - set(_STORED_METADATA)
        lost_subtasks = SUBTASKS in self.metadata and not self._subtasks
        for change, is_made in (
            ("how an episode ended is left out, but for 'next.done'", has_end),
            ("the observation after the last step is left out", episode.final),
            ("only the first task of an episode is written", has_several_tasks),
            ("bfloat16 is written as float32", has_bfloat16),
            ("metadata of episodes are left out, but for task and success", other),
            ("texts of subtasks in the metadata are left out", lost_subtasks),
        ):
            self.changed(change, episode, is_made)

    def _report_names(self, episode: EpisodeToWrite) -> None:
        """Report fields that readers return with a different name or shape."""
        texts = self._text_features()
        columns = [column.name for column in self._columns]
        features = dict.fromkeys((*columns, *texts.values()))
        for name, feature in texts.items():
            read_name = field_name(feature, features)
            is_renamed = name in episode.texts and name != read_name
            self.changed(f"field {name!r} is called {read_name!r}", episode, is_renamed)
        for column in self._columns:
            name = column.field.name
            read_name = field_name(column.name, features)
            is_renamed = name in episode.schema and name != read_name
            self.changed(f"field {name!r} is called {read_name!r}", episode, is_renamed)
            if column.kind == "number" and column.field.shape in ((), (1,)):
                is_vector = read_name.partition("/")[0] in ("observation", "action")
                self.reshaped(name, (1,) if is_vector else (), episode)

    def close(self) -> None:
        self.note_open()
        self._write_tables()
        shutil.rmtree(self.path / _UNFINISHED_FILES, ignore_errors=True)
        # Several threads flush the files, because a single thread waits for each of 4,000 files.
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
        """Append the checksums of the files in `meta` to the conversion record.

        Args:
            info: Temporary path of the new `meta/info.json`; None if it has its final name.
        """
        files = {}
        for path in sorted((self.path / "meta").rglob("*")):
            name = path.relative_to(self.path)
            is_temporary = name.parent.name.startswith(".")
            if path.is_file() and not is_temporary:
                files[name.as_posix()] = path
        files[LEROBOT_INFO] = self.path / LEROBOT_INFO if info is None else info
        self.note_files(files)

    def _write_tables(self) -> None:
        """Write the files that all episodes share, except the description of the dataset."""
        if self._subtasks:
            types: Any = (self.metadata.get(ARROW_TYPES) or {}).get(TABLE_NAME)
            self._write_texts(TABLE_NAME, subtask_table(self._subtasks, types))
        if self._version == "v3.0":
            self._write_tables_3()
        else:
            self._write_tables_2()

    def _write_tables_2(self) -> None:
        tasks = enumerate(self._tasks)
        self._write_lines("tasks", ({TASK: number, "task": task} for number, task in tasks))
        numbers = range(self._num_episodes)
        self._write_lines("episodes", map(self._entry_2, numbers))
        self._write_lines("episodes_stats", map(self._statistics_entry, numbers))
        if self._is_for_groot:
            self._write_json("meta/modality.json", self._modality())

    def _write_tables_3(self) -> None:
        pyarrow, parquet = arrow()
        numbers = np.arange(len(self._tasks))
        texts = pyarrow.array(self._tasks, "string")
        self._write_texts("meta/tasks.parquet", pyarrow.table({TASK: numbers, "task": texts}))
        if not self._num_episodes:
            return
        if self.is_complete:
            self._write_json("meta/stats.json", self._total_statistics())
        entries = map(self._entry_3, range(self._num_episodes))
        index = "meta/episodes/chunk-000/file-000.parquet"
        with self._replaced(index) as new, ExitStack() as opened:
            file = None
            while rows := list(islice(entries, _ENTRIES_AT_ONCE)):
                table = pyarrow.Table.from_pylist(rows, None if file is None else file.schema)
                if ABSENT in table.column_names:
                    # If the lists of the first episodes are all empty, the inferred type is null.
                    names = table[ABSENT].cast(pyarrow.list_(pyarrow.string()))
                    table = table.set_column(table.column_names.index(ABSENT), ABSENT, names)
                if file is None:
                    file = opened.enter_context(parquet.ParquetWriter(new, table.schema))
                file.write_table(table)

    def _write_texts(self, name: str, table: Any) -> None:
        """Write the table of tasks or subtasks: numbers and texts."""
        _, parquet = arrow()
        text = next(column for column in table.column_names if not column.endswith("_index"))
        # lerobot reads the texts from the pandas index. It reads wrong tasks from a plain column.
        pandas = {
            "index_columns": [text],
            "columns": [
                {
                    "name": text,
                    "field_name": text,
                    "pandas_type": "unicode",
                    "numpy_type": "object",
                    "metadata": None,
                },
            ],
            "column_indexes": [],
        }
        table = table.replace_schema_metadata({b"pandas": json.dumps(pandas)})
        with self._replaced(name) as new:
            parquet.write_table(table, new)

    def _total_statistics(self) -> dict[str, dict[str, Any]]:
        """Return the statistics of all frames.

        The numeric values of episodes from an earlier conversion are read from their data files.
        """
        columns = {column.name: column for column in self._columns if not column.is_picture}
        columns |= self._scalar_columns()
        widths: dict[str, int | None] = {}
        for name, column in columns.items():
            widths[name] = prod(column.field.shape) if column.kind == "number" else None
        resumed = self._statistics.of_rows(0, self._num_frames)
        for number in range(self._num_resumed):
            file = ParquetFile(self.path / self._file(number))
            for batch in file.batches(widths, 0, file.num_rows):
                for name, column in columns.items():
                    where = f"{name!r} of {str(file.path)!r}"
                    resumed.add(name, read_column(column, batch[name], where))
        self._num_resumed = 0
        return _as_lists(self._statistics.total(self._num_frames).result())

    def _entry_2(self, number: int) -> dict[str, Any]:
        """Return the entry of an episode in the index of version 2."""
        summary = self._summary_of(number)
        entry = _entry(number, summary)
        if summary["absent"]:
            entry[ABSENT] = summary["absent"]
        return entry

    def _statistics_entry(self, number: int) -> dict[str, Any]:
        return {"episode_index": number, "stats": self._summary_of(number)["stats"]}

    def _entry_3(self, number: int) -> dict[str, Any]:
        """Return the entry of an episode in the index of version 3.

        The entry contains the statistics of the episode. If only some episodes of a dataset are
        loaded, lerobot merges their statistics.
        """
        summary = self._summary_of(number)
        entry = _entry(number, summary)
        if self._has_absent:
            entry[ABSENT] = summary["absent"]
        entry["dataset_from_index"] = summary["start"]
        entry["dataset_to_index"] = summary["start"] + summary["length"]

        chunk, file = divmod(number, _CHUNKS_SIZE)
        place = {"chunk_index": chunk, "file_index": file}
        times = {"from_timestamp": 0.0, "to_timestamp": summary["length"] / self._fps}
        groups: dict[str, Mapping[str, Any]] = {
            "data": place,
            "meta/episodes": {"chunk_index": 0, "file_index": 0},
        }
        for column in self._video_columns():
            groups[f"videos/{column.name}"] = {**place, **times}
        for feature, statistics in summary["stats"].items():
            groups[f"stats/{feature}"] = statistics
        for group, values in groups.items():
            for name, value in values.items():
                entry[f"{group}/{name}"] = value
        return entry

    def _modality(self) -> dict[str, Any]:
        """Return the content of `meta/modality.json`: vectors, cameras and the task for GR00T."""
        states: dict[str, Any] = {}
        actions: dict[str, Any] = {}
        cameras: dict[str, Any] = {}
        for column in self._columns:
            head, _, rest = column.name.partition(".")
            if column.kind == "video":
                name = column.name.removeprefix("observation.images.").replace(".", "_")
                if name in cameras:
                    other = cameras[name]["original_key"]
                    raise UsageError(
                        f"cameras {other!r} and {column.name!r} would both be called {name!r} for "
                        "GR00T. Rename one of the cameras."
                    )
                cameras[name] = {"original_key": column.name}
            elif len(column.field.shape) == 1 and head in ("observation", "action"):
                vectors = actions if head == "action" else states
                end = column.field.shape[0]
                vectors[rest or head] = {"start": 0, "end": end, "original_key": column.name}
        tasks: dict[str, Any] = {_ANNOTATION.partition(".")[2]: {}}
        return {"state": states, "action": actions, "video": cameras, "annotation": tasks}

    def _write_lines(self, name: str, entries: Iterable[dict[str, Any]]) -> None:
        with self._replaced(f"meta/{name}.jsonl") as new, open(new, "w", encoding="utf-8") as file:
            for entry in entries:
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        path = self.path / name
        is_info = name == LEROBOT_INFO
        with replace_file(path) if is_info else self._replaced(name) as new:
            new.write_text(_json_of(content), encoding="utf-8")


def _checked_fps(fps: Any) -> float | None:
    """Return the option `fps`; raise `UsageError` if the value is not a valid rate."""
    if fps is None:
        return None
    return arguments.real("fps", fps, "> 0", lambda fps: 0 < fps < float("inf"))


def _video_of(episode: EpisodeToWrite, name: str) -> VideoRange | None:
    """Return the video of a field; None if the field is missing or not stored as video."""
    return episode.video(name) if name in episode.schema else None


def _chosen_video(
    videos: Sequence[VideoRange | None],
    fps: float,
    codec: str | None,
    groot: bool,
) -> tuple[str, Mapping[str, Any] | None]:
    """Choose whether pictures are written as PNG, encoded as video, or copied from existing video.

    Args:
        videos: The video of the field in each episode.
        fps: Frames per second of the target.
        codec: The option `video`.
        groot: The option `groot`.

    Returns:
        The codec, "" for PNG, and a description if the videos are copied.
    """
    first = videos[0]
    have_rate = all(video is not None and video.rate_hz == fps for video in videos)
    if first is not None and have_rate and codec in (None, first.codec):
        return first.codec or "h264", first.true_about
    if codec is not None:
        return codec, None
    is_video = groot or first is not None
    return "h264" if is_video else "", None


def _json_of(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=4, ensure_ascii=False)


def _as_lists(statistics: Mapping[str, Mapping[str, Array]]) -> dict[str, dict[str, Any]]:
    lists = {}
    for feature, arrays in statistics.items():
        lists[feature] = {name: values.tolist() for name, values in arrays.items()}
    return lists


def _entry(number: int, summary: Mapping[str, Any]) -> dict[str, Any]:
    return {"episode_index": number, "tasks": [summary["task"]], "length": summary["length"]}


def _has_frames(path: Path, times_s: Array, frames: Array) -> bool:
    """Return whether a video contains exactly the expected frames at the expected times."""
    try:
        return np.array_equal(read_frames(path, times_s, frames.shape[1:]), frames)
    except CorruptFileError:
        return False


def _feature_name(name: str) -> str:
    return name.replace("/", ".")
