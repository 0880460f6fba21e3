"""Reader of LeRobot datasets of versions 3.0, 2.1 and 2.0.

A row contains an observation and the action that follows it. The files state neither how an episode
ended nor the observation after the last step, so both are unknown. `next.done` is an ordinary
field, because it only marks the last row.

Datasets for GR00T, a robot model of NVIDIA, also have the file `meta/modality.json`. It contains
names for parts of the vectors of state and action ("components" here), cameras and annotations.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from storage.core import arguments
from storage.core.fields import Schema
from storage.errors import CorruptFileError, DataFileError

from ...sources.episode_info import ABSENT, EpisodeInfo
from ...sources.file_source import FileSource
from ...sources.video_range import VideoRange
from ..encoded_images import decode_picture
from ..input_checks import KnownFiles, damage_named, file_inside, read_object
from ..parquet import arrow, as_rows, first_row, shared_texts
from ..video_frames import read_frames, summarize_video
from .lerobot_index import SUCCESS, EpisodeEntry, Index, Run
from .lerobot_info import (
    INDEX_COLUMNS,
    MAX_OBJECT_BYTES,
    UNFINISHED,
    Feature,
    Info,
    column_feature,
    field_name,
    picture_feature,
    read_info,
    video_feature,
)
from .lerobot_language import ARROW_TYPES, TEXT_TYPES, describe, has_unknown
from .lerobot_subtasks import NUMBER, SUBTASKS, TABLE_NAME, TEXT, read_subtasks

MODALITY_NAME = "meta/modality.json"
#: Maps groups of `meta/modality.json` to the feature that contains their parts, unless a part names
#: another feature. "" means that the group has no such feature.
_MODALITY_GROUPS = {"state": "observation.state", "action": "action", "video": "", "annotation": ""}
_FRAME = "frame_index"
#: Kinds of features that become text fields.
_TEXT_KINDS = ("text", "language", "annotation")


@dataclass(frozen=True)
class EpisodeFiles:
    """Location of an episode in the files of a dataset.

    Attributes:
        runs: Rows of the episode.
        videos: Maps camera names to (video file, start time of the episode in the file in seconds).
    """

    runs: tuple[Run, ...]
    videos: Mapping[str, tuple[str, float]]


class LerobotReader(FileSource):
    """Reader of a LeRobot dataset.

    Options:
        on_bad_index: "refuse" raises an error if the index contradicts the data; "rebuild" rebuilds
            the index from the data.
        components: Also return the named parts of state and action in a GR00T dataset as fields,
            such as "observation/state.arm" and "action.arm". The metadata `components` lists the
            parts in any case.
    """

    format = "lerobot"
    OPTIONS: ClassVar = {"on_bad_index": "refuse", "components": False}

    def scan(self) -> Sequence[EpisodeInfo]:
        has_components: Any = self.options["components"]
        arguments.flag("components", has_components)
        info = read_info(self.path)
        self._rebuilds = self.options["on_bad_index"] == "rebuild"
        if info.content.get(UNFINISHED) is True:
            self._rebuilds = True
            self.problem(
                f"{str(self.path)!r} is incomplete: its writer was interrupted. The complete "
                "episodes are read. Convert again to write the remaining episodes."
            )
        index = Index(info, self._rebuilds)
        self.problems += index.problems
        self._files = index.files
        self._tasks = index.tasks
        self._fps = info.fps
        self._known_videos = KnownFiles()
        #: Maps names of video files to their codec and pixel format.
        self._video_details: dict[str, dict[str, str]] = {}

        features = self._describe(info, index)
        subtask_types = self._read_subtasks(features)
        components: dict[str, dict[str, Feature]] = {}
        if (self.path / MODALITY_NAME).exists():
            components = self._read_components(features)
        if has_components:
            for parts in components.values():
                features += [part for part in parts.values() if part.part]
        self._features = {feature.name: feature for feature in features}
        self._fields = self._fields_without(())

        arrow_types = {**self._arrow_types(index), **subtask_types}
        self.metadata = self._metadata(info, arrow_types, components)
        self.splits = _splits(info, list(index.runs))
        missing = self._missing_videos(info, index)
        return [self._episode(index, number, missing.get(number, ())) for number in index.runs]

    def _metadata(
        self,
        info: Info,
        arrow_types: Mapping[str, Any],
        components: Mapping[str, Mapping[str, Feature]],
    ) -> dict[str, Any]:
        features = self._features.values()
        metadata: dict[str, Any] = {
            **info.content,
            "tasks": [self._tasks[number] for number in sorted(self._tasks)],
            "lossy": sorted(feature.name for feature in features if feature.is_lossy),
            "units": {feature.name: feature.unit for feature in features if feature.unit},
        }
        if arrow_types:
            metadata[ARROW_TYPES] = arrow_types
        if self._subtasks:
            metadata[SUBTASKS] = {str(number): text for number, text in self._subtasks.items()}
        if components:
            places: dict[str, dict[str, Any]] = {}
            for group, parts in components.items():
                places[group] = {name: _place(name, part) for name, part in parts.items()}
            metadata["components"] = places
        return metadata

    def _describe(self, info: Info, index: Index) -> list[Feature]:
        """Describe all columns and cameras as features. Shapes and dtypes are read from a row."""
        first = next((runs[0] for runs in index.runs.values()), None)
        columns: dict[str, Any] = {}
        row: dict[str, Any] = {}
        if first is not None:
            file = self._files[first.file]
            columns = file.types
            row = next(file.batches(dict.fromkeys(columns), first.row, first.row + 1, 1))

        features: dict[str, Feature] = {}
        names = {**info.features, **columns}
        for source in names:
            if source in INDEX_COLUMNS:
                continue
            description = info.features.get(source, {})
            name = field_name(source, names)
            is_video = description.get("dtype") == "video"
            feature: Feature | None = None
            if is_video:
                feature = video_feature(source, name, description)
            elif source in row and _has_picture(row[source]):
                feature = self._describe_pictures(source, name, description, first)
            elif source in row:
                feature = column_feature(source, name, row[source], description)

            if feature is None or not all(name.split("/")) or feature.name in features:
                problem = "contains neither numbers, texts, pictures nor video"
                if feature is not None:
                    problem = f"would become a duplicate field {feature.name!r}"
                kind = "" if source in row or is_video else "description"
                self._report_left_out(source, problem, kind)
                continue
            features[feature.name] = self._with_unit(feature)
            self._compare(feature, description)
        return list(features.values())

    def _describe_pictures(
        self,
        source: str,
        name: str,
        description: Mapping[str, Any],
        run: Run | None,
    ) -> Feature | None:
        """Return the feature of a picture column; None if no picture of the run is intact."""
        assert run is not None, "a column has rows"
        file = self._files[run.file]
        for row in range(run.row, run.row + run.length):
            values = next(file.batches({source: None}, row, row + 1, 1))[source]
            with suppress(CorruptFileError):
                data = _picture_bytes(values[0].as_py()) or b""
                pixels = decode_picture(data, f"{source!r} of {str(self.path)!r}")
                return picture_feature(source, name, description, pixels, data)
        return None

    def _read_subtasks(self, features: list[Feature]) -> dict[str, Any]:
        """Read the texts of subtasks, and add a text field with them to `features`.

        Returns:
            A dict that maps the name of the table to the description of its Arrow types; {} if
            there is no readable table.
        """
        self._subtasks: dict[int, str] = {}
        if not (self.path / TABLE_NAME).exists():
            return {}
        try:
            self._subtasks, description = read_subtasks(self.path)
        except CorruptFileError as problem:
            self.problems.append(problem.of("metadata"))
            return {}
        columns = [feature for feature in features if feature.source == NUMBER]
        numbers = [column for column in columns if column.kind == "number" and not column.shape]
        has_texts = any(feature.name == TEXT for feature in features)
        if numbers and not has_texts:
            features.append(replace(numbers[0], name=TEXT, kind="annotation"))
        return {TABLE_NAME: description}

    def _arrow_types(self, index: Index) -> dict[str, Any]:
        """Describe the Arrow types of language columns, and of text columns with unusual types.

        A column whose values are all missing may have the type null. The first file with a complete
        type therefore determines the type.

        Returns:
            A dict that maps field names to described Arrow types; None if JSON cannot represent the
            values.
        """
        files = dict.fromkeys(run.file for runs in index.runs.values() for run in runs)
        types_of_files = [self._files[file].declared_types for file in files]
        arrow_types: dict[str, Any] = {}
        for feature in self._features.values():
            source = feature.source
            if feature.kind not in ("language", "text"):
                continue
            types = (describe(types[source]) for types in types_of_files if source in types)
            arrow_type = _first_known(types)
            is_usual = arrow_type != "large_string" and not source.startswith("language_")
            is_unusual_text = arrow_type in TEXT_TYPES and not is_usual
            if feature.kind == "language" or is_unusual_text:
                arrow_types[feature.name] = arrow_type
        return arrow_types

    def _compare(self, feature: Feature, description: Mapping[str, Any]) -> None:
        """Report a feature whose description contradicts the shape or dtype of the data."""
        if feature.kind != "number":
            return
        where = f"{feature.source!r} of {str(self.path)!r}"
        shape: Any = description.get("shape")
        is_shape = isinstance(shape, list) and all(map(arguments.is_whole, shape))
        if is_shape and np.prod(shape) != np.prod(feature.shape):
            self.problem(
                f"{where} is described with shape {shape}, but its rows have shape "
                f"{list(feature.shape)}. The rows are read as stored.",
                kind="description",
            )
        dtype = description.get("dtype")
        is_number = str(dtype).startswith(("float", "int", "uint", "bool"))
        if is_number and dtype != feature.dtype:
            self.problem(
                f"{where} is described as {dtype}, but its rows are {feature.dtype}. The rows are "
                "read as stored.",
                kind="description",
            )

    def _report_left_out(self, name: str, problem: str, kind: str = "") -> None:
        message = f"{name!r} of {str(self.path)!r} {problem}. The feature is left out."
        self.problem(message, kind=kind)

    def _with_unit(self, feature: Feature) -> Feature:
        """Set the unit of a depth feature. If no unit is described, the dtype determines it."""
        is_depth_image = feature.kind == "image" and len(feature.shape) == 2
        is_depth = feature.depth is not None or is_depth_image
        if not is_depth or feature.unit:
            return feature
        unit = "mm" if feature.dtype == "uint16" else "m"
        self.advise(
            f"{feature.source!r} of {str(self.path)!r} has no depth_unit. The depth is read as "
            f"{unit!r} because of its dtype {feature.dtype}."
        )
        return replace(feature, unit=unit)

    def _read_components(self, features: list[Feature]) -> dict[str, dict[str, Feature]]:
        """Read the named parts of state, action and cameras from `meta/modality.json`.

        Annotation columns contain numbers of texts. Their features get the kind "annotation", so
        that the texts are read instead of the numbers.

        Returns:
            A dict that maps each group ("state", "action", "video") to a dict. The inner dict maps
            names of parts to features.
        """
        content = read_object(file_inside(self.path, MODALITY_NAME), MAX_OBJECT_BYTES)
        places = {feature.source: place for place, feature in enumerate(features)}
        components: dict[str, dict[str, Feature]] = {}
        for group, usual_source in _MODALITY_GROUPS.items():
            parts = content.get(group)
            if not isinstance(parts, dict):
                continue
            for name, part in parts.items():
                description = part if isinstance(part, dict) else {}
                source = description.get("original_key") or usual_source or f"{group}.{name}"
                place = places.get(str(source))
                feature = None if place is None else features[place]
                component = _component(group, name, description, feature)
                if component is not None:
                    components.setdefault(group, {})[name] = component
                elif place is not None and group == "annotation" and _is_integer(features[place]):
                    features[place] = replace(features[place], kind="annotation")
                else:
                    subject = f"{group}.{name} of {MODALITY_NAME}"
                    problem = f"is no part of {str(source)!r}: {repr(description)[:80]}"
                    self._report_left_out(subject, problem)
        return components

    def _missing_videos(self, info: Info, index: Index) -> dict[int, list[str]]:
        """Check the videos of all episodes; map episode numbers to cameras without usable video.

        Cameras without a readable video are left out. With `on_bad_index="rebuild"`, cameras whose
        video is too short are left out too.

        Raises:
            CorruptFileError: The index lists no video for a camera, or a video is too short, and
                `on_bad_index` is "refuse".
        """
        missing: dict[int, list[str]] = {}
        end_of = lru_cache(maxsize=None)(self._end_of)
        for episode, camera in product(index.runs, info.cameras):
            try:
                is_readable = self._check_video(index, episode, camera, end_of)
            except DataFileError as problem:
                if not self._rebuilds:
                    raise
                self.problems.append(problem.of("undecodable", str(episode)))
                is_readable = False
            if not is_readable:
                missing.setdefault(episode, []).append(camera)
        return missing

    def _check_video(
        self,
        index: Index,
        episode: int,
        camera: str,
        end_of: Callable[[str], float],
    ) -> bool:
        """Return whether the video of an episode is readable; report an unreadable video.

        Raises:
            DataFileError: The index lists no video for the camera, or the video is too short.
        """
        num_frames = sum(run.length for run in index.runs[episode])
        entry = index.entries.get(episode)
        if entry is None or camera not in entry.videos:
            raise index.episode_error(episode, f"has no video of {camera!r} in the index")
        file, start_s = entry.videos[camera]
        try:
            end_s = end_of(file)
        except (CorruptFileError, OSError) as damage:
            reason = str(damage).rstrip(".")
            message = f"{reason}. Camera {camera!r} of episode {episode} is left out."
            problem = self.problem(message, kind="undecodable", episode=str(episode))
            problem.__cause__ = damage
            return False
        # The tolerance is half a frame, because times in the index are rounded.
        if end_s < start_s + (num_frames - 0.5) / self._fps:
            video = f"starts at {start_s:.3f} s and ends at {end_s:.3f} s"
            contradiction = f"has {num_frames} frames, but its video of {camera!r} {video}"
            raise index.episode_error(episode, contradiction)
        return True

    def _end_of(self, file: str) -> float:
        """Return the end time of a video in seconds; infinity if PyAV is not installed."""
        path = self._video_file(file)
        if not path.stat().st_size:
            raise CorruptFileError(f"{str(path)!r} is empty, expected a video.")
        if not find_spec("av"):
            return float("inf")
        end_s, self._video_details[file] = summarize_video(path)
        return end_s

    def _video_file(self, file: str) -> Path:
        """Return the path of a video file after checking that the file has not changed."""
        self._known_videos.check(self.path / file)
        return file_inside(self.path, file)

    def _episode(self, index: Index, number: int, missing: Sequence[str]) -> EpisodeInfo:
        """Return the description of an episode.

        Args:
            index: Index of the dataset.
            number: Number of the episode.
            missing: Names of the cameras without a video of the episode.
        """
        runs = index.runs[number]
        entry = index.entries.get(number, EpisodeEntry((), 0, 0, "", {}))
        task = self._task_of(number, runs, entry)
        metadata: dict[str, Any] = {}
        if len(entry.tasks) > 1:
            metadata["tasks"] = list(entry.tasks)
        for name, value in entry.other.items():
            if name != ABSENT or value:
                metadata[name] = value
        success = None
        if SUCCESS not in (entry.other.get(ABSENT) or ()):
            flags = [run.success for run in runs if run.success is not None]
            success = any(flags) if flags else None
        schema, texts = self._fields_without(missing) if missing else self._fields
        return EpisodeInfo(
            name=str(number),
            length=sum(run.length for run in runs),
            schema=schema,
            texts=texts,
            success=success,
            task=task,
            metadata=metadata,
            source=EpisodeFiles(runs, entry.videos),
        )

    def _task_of(self, number: int, runs: Sequence[Run], entry: EpisodeEntry) -> str:
        """Return the task in the rows of an episode, or else the first task of its entry."""
        usual = entry.tasks[0] if entry.tasks else ""
        task = self._tasks.get(runs[0].task, usual)
        if entry.tasks and task not in entry.tasks:
            self.problem(
                f"Episode {number} of {str(self.path)!r} has the task {repr(task)[:200]} in its rows "
                f"and {str(entry.tasks)[:200]} in the index. The task of the rows is used."
            )
        return task

    def _fields_without(self, cameras: Collection[str]) -> tuple[Schema, tuple[str, ...]]:
        """Return the numeric fields and the names of the text fields of an episode.

        Fields of `cameras` are left out, because their videos are missing.
        """
        fields = []
        texts = []
        for feature in self._features.values():
            if feature.source in cameras:
                continue
            if feature.kind in _TEXT_KINDS:
                texts.append(feature.name)
            else:
                fields.append(feature.field)
        return Schema(fields), tuple(texts)

    def file_of(self, number: int, name: str, step: int) -> Path:
        source: EpisodeFiles = self.episodes[number].source
        feature = self._features[name]
        if feature.kind == "video":
            return self.path / source.videos[feature.source][0]
        stop = 0
        for run in source.runs:
            stop += run.length
            if step < stop:
                return self.path / run.file
        return self.path

    def rows_read_together(self, number: int, name: str) -> int | None:
        return 1 if self._features[name].kind == "image" else None

    def read(self, number: int, name: str, start: int, stop: int) -> Any:
        return self.read_fields(number, [name], start, stop)[name]

    def read_fields(
        self,
        number: int,
        names: Sequence[str],
        start: int,
        stop: int,
    ) -> dict[str, Any]:
        info = self.episodes[number]
        source: EpisodeFiles = info.source
        features = [self._features[name] for name in names]
        in_columns = [feature for feature in features if feature.kind != "video"]
        fields = {feature.name: self._output(feature, source, start, stop) for feature in features}
        texts: dict[str, str] = {}
        frame = start
        for batch in self._batches(source.runs, in_columns, start, stop):
            frames = batch[_FRAME]
            self._check_frames(frames, frame, info.name)
            first = frame - start
            last = first + len(frames)
            for feature in in_columns:
                where = f"{feature.source!r}, frames from {frame} of episode {info.name!r}"
                where += f" of {str(self.path)!r}"
                values = self._values(feature, batch[feature.source], where, texts)
                # Slice assignment extends a list of texts, and fills the rows of an array.
                fields[feature.name][first:last] = values
            frame += len(frames)
        return fields

    def _output(self, feature: Feature, source: EpisodeFiles, start: int, stop: int) -> Any:
        """Read the frames of a video, or create the output for a feature that is read from columns.

        The output is an uninitialized array for numbers and pictures, and an empty list for texts.
        """
        if feature.kind in _TEXT_KINDS:
            return []
        if feature.kind != "video" or start >= stop:
            field = feature.field
            return np.empty((stop - start, *field.shape), field.numpy_dtype)
        file, start_s = source.videos[feature.source]
        times_s = start_s + np.arange(start, stop) / self._fps
        return read_frames(self._video_file(file), times_s, feature.shape, feature.depth)

    def video(self, number: int, name: str) -> VideoRange | None:
        feature = self._features.get(name)
        if feature is None or feature.kind != "video" or feature.depth is not None:
            return None
        info = self.episodes[number]
        file, start_s = info.source.videos[feature.source]
        description = self.metadata["features"][feature.source]
        details = self._video_details.get(file, {})
        path = self._video_file(file)
        return VideoRange(path, start_s, info.length, self._fps, description, details)

    def _check_frames(self, array: Any, first: int, episode: str) -> None:
        """Raise `CorruptFileError` if the frame numbers of rows do not count up from `first`."""
        frames = as_rows([array], (), repr(_FRAME))
        if (frames != np.arange(first, first + len(frames))).any():
            raise CorruptFileError(
                f"Episode {episode} of {str(self.path)!r} has changed since it was opened: its rows "
                f"do not start at frame {first}. Open the recording again."
            )

    def _batches(
        self,
        runs: Sequence[Run],
        features: list[Feature],
        start: int,
        stop: int,
    ) -> Iterator[dict[str, Any]]:
        """Yield batches of rows, with the columns of some features and the frame numbers."""
        if not features:
            return
        widths: dict[str, int | None] = {}
        for feature in features:
            is_number = feature.kind == "number"
            widths[feature.source] = int(np.prod(feature.shape)) if is_number else None
        widths[_FRAME] = 1
        has_pictures = any(feature.kind == "image" for feature in features)
        first = 0
        for run in runs:
            low = run.row + max(start - first, 0)
            high = run.row + min(stop - first, run.length)
            if low < high and has_pictures:
                yield from self._files.kept_batches(run.file, widths, low, high)
            elif low < high:
                yield from self._files[run.file].batches(widths, low, high)
            first += run.length

    def _values(self, feature: Feature, array: Any, where: str, texts: dict[str, str]) -> Any:
        """Convert an Arrow array to the values of a field.

        Args:
            feature: Feature of the field.
            array: Rows of the column.
            where: Location of the rows, for errors.
            texts: Maps each text to the object to return for equal texts. New texts are added.
        """
        if feature.kind == "text":
            return shared_texts(array, texts)
        if feature.kind == "language":
            return _json_texts(array, where, texts)
        if feature.kind == "image":
            return _decoded(feature, array, where)
        rows = as_rows([array], feature.shape, where)
        if rows.dtype != feature.dtype:
            raise CorruptFileError(f"{where} has dtype {rows.dtype}, expected {feature.dtype}.")
        if feature.kind == "annotation":
            text_of = self._subtasks if feature.source == NUMBER else self._tasks
            return [text_of.get(number, "") for number in rows.tolist()]
        return rows if feature.part is None else rows[:, slice(*feature.part)]


def _first_known(types: Iterator[Any]) -> Any:
    """Choose the type of a column from its types in several files.

    A type contains "null" if all values in a file are missing. The first type without "null" is
    chosen, or else the first type.
    """
    first = next(types)
    if not has_unknown(first):
        return first
    return next((arrow_type for arrow_type in types if not has_unknown(arrow_type)), first)


def _is_integer(feature: Feature) -> bool:
    return feature.dtype == "int64" and not feature.shape


def _component(
    group: str,
    name: str,
    description: Mapping[str, Any],
    feature: Feature | None,
) -> Feature | None:
    """Build the feature of a named part in `meta/modality.json`; None if the part is invalid.

    Args:
        group: "state", "action", "video" or "annotation".
        name: Name of the part.
        description: Description of the part in the file.
        feature: Feature whose vector contains the part; None if there is no such feature.
    """
    if feature is None:
        return None
    if group == "video" and feature.kind in ("image", "video"):
        return feature
    start = description.get("start", -1)
    end = description.get("end", -1)
    is_vector = len(feature.shape) == 1
    are_integers = arguments.is_whole(start) and arguments.is_whole(end)
    if is_vector and are_integers and 0 <= start < end <= feature.shape[0]:
        return replace(feature, name=f"{feature.name}.{name}", part=(start, end))
    return None


def _json_texts(array: Any, where: str, texts: dict[str, str]) -> list[str]:
    """Return the values of an Arrow array as JSON texts; equal texts are the same object."""
    with damage_named(where, ValueError):
        rows = [json.dumps(row.as_py(), ensure_ascii=False, default=str) for row in array]
    return [texts.setdefault(text, text) for text in rows]


def _decoded(feature: Feature, array: Any, where: str) -> np.ndarray[Any, Any]:
    """Decode the pictures in an Arrow array: `[n, *shape]`."""
    pictures = []
    for row in array.to_pylist():
        data = _picture_bytes(row) or b""
        pictures.append(decode_picture(data, where, feature.shape))
    if any(picture.dtype != feature.dtype for picture in pictures):
        raise CorruptFileError(f"{where} has pictures of several dtypes, expected {feature.dtype}.")
    return np.stack(pictures)


def _has_picture(row: Any) -> bool:
    """Return whether an Arrow array of one row contains an encoded picture.

    The row is the bytes of the picture, or a struct with the bytes and the path.
    """
    pyarrow, _ = arrow()
    if pyarrow.types.is_struct(row.type) and row.type.get_field_index("bytes") >= 0:
        row = row.field("bytes")
    sizes, leaf = first_row(row)
    return not sizes and leaf.startswith("binary") and bool(row[0].is_valid)


def _picture_bytes(value: Any) -> bytes | None:
    """Return the bytes of a picture in a value or struct; None if the value is not a picture."""
    data = value.get("bytes") if isinstance(value, dict) else value
    return data if isinstance(data, bytes) else None


def _place(name: str, part: Feature) -> dict[str, Any]:
    """Describe the position of a named part: name of the field, and [start, stop] in its vectors.

    The key "columns" is None for a part that is the whole field.
    """
    if part.part is None:
        return {"field": part.name, "columns": None}
    return {"field": part.name.removesuffix(f".{name}"), "columns": list(part.part)}


def _splits(info: Info, episodes: Sequence[int]) -> dict[str, Sequence[str]]:
    """Map split names to episode names, from the ranges "start:stop" in `meta/info.json`."""
    ranges = info.content.get("splits")
    splits: dict[str, Sequence[str]] = {}
    if not isinstance(ranges, dict):
        return splits
    for name, text in ranges.items():
        start, _, stop = str(text).partition(":")
        is_range = start.isdecimal() and stop.isdecimal() and len(start + stop) < 30
        if is_range:
            chosen = range(int(start), int(stop))
            splits[name] = [str(episode) for episode in episodes if episode in chosen]
    return splits
