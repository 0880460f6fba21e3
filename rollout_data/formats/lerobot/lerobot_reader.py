"""LeRobot datasets of versions 3.0, 2.1 and 2.0 as episodes, and what GR00T adds to them.

One rule: a row belongs to the step that its action starts. The files tell no kind of end and no observation after the
last step, so both are unknown: `next.done` marks the last row only, and is a field like others.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from itertools import chain, product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from storage.core import arguments
from storage.core.fields import Schema
from storage.errors import CorruptFileError, DataFileError

from ...sources.episode_reader import ABSENT, EpisodeInfo, ForeignReader
from ...sources.video_range import VideoRange
from ..encoded_images import decode_picture
from ..input_checks import KnownFiles, damage_named, file_inside, read_object
from ..parquet import arrow, as_rows, first_row, shared_texts
from ..video_frames import read_frames, summarize_video
from .lerobot_index import SUCCESS, Entry, Index, Run
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
_FRAME = "frame_index"
_CHOICES = ("refuse", "rebuild")
#: Kinds of features that are delivered as texts.
_TEXTS = ("text", "language", "annotation")


@dataclass(frozen=True)
class Source:
    """Where an episode is: its rows, and camera -> video file and time of its first frame in seconds."""

    runs: tuple[Run, ...]
    videos: Mapping[str, tuple[str, float]]


class Reader(ForeignReader):
    """LeRobot datasets.

    Options:
        on_bad_index: "refuse" a dataset whose index disagrees with its data, or "rebuild" the index from the data.
        components: Also give the parts of state and action that a GR00T dataset names, as fields such as
            "observation/state.arm" and "action.arm"; the metadata `components` lists them either way.
    """

    format = "lerobot"
    OPTIONS: ClassVar = {"on_bad_index": "refuse", "components": False}

    def scan(self) -> Sequence[EpisodeInfo]:
        choice = arguments.choice("open the dataset", "on_bad_index", self.options["on_bad_index"], _CHOICES)
        has_components = arguments.flag("open the dataset", "components", self.options["components"])
        info = read_info(self.path)
        self._rebuilds = choice == "rebuild"
        if info.content.get(UNFINISHED) is True:
            self._rebuilds = True
            advice = "Its episodes are read as they are; write the rest"
            self.problem("open", repr(str(self.path)), "a complete set", "one whose writer has stopped", advice)
        index = Index(info, self._rebuilds)
        self._known_videos = KnownFiles()
        self._held: dict[str, dict[str, str]] = {}
        self.problems += index.problems
        self._files = index.files
        self._tasks = index.tasks
        self._fps = info.fps
        features = self._describe(info, index)
        subtask_types = self._read_subtasks(info, features)
        components = self._components(features) if (self.path / MODALITY_NAME).exists() else {}
        if has_components:
            features += [part for listed in components.values() for part in listed.values() if part.part]
        self._features = {feature.name: feature for feature in features}
        self.metadata = {
            **info.content,
            "tasks": [text for _, text in sorted(index.tasks.items())],
            "lossy": sorted(feature.name for feature in features if feature.is_lossy),
            "units": {feature.name: feature.unit for feature in features if feature.unit},
        }
        if described := {**self._arrow_types(index), **subtask_types}:
            self.metadata[ARROW_TYPES] = described
        if self._subtasks:
            self.metadata[SUBTASKS] = {str(number): text for number, text in self._subtasks.items()}
        if components:
            self.metadata["components"] = {
                group: {name: _place(name, feature) for name, feature in listed.items()}
                for group, listed in components.items()
            }
        self.splits = _splits(info, list(index.runs))
        self._fields = self._fields_without(())
        missing = self._missing_videos(info, index)
        return [self._episode(index, episode, missing.get(episode, ())) for episode in index.runs]

    def _describe(self, info: Info, index: Index) -> list[Feature]:
        """Describe the fields by the first row of the data, and the cameras by what is said of them."""
        found: dict[str, Feature] = {}
        first = next((runs[0] for runs in index.runs.values()), None)
        names = {**info.features, **(self._files[first.file].types if first else {})}
        row = {}
        if first:
            columns = dict.fromkeys(self._files[first.file].types)
            row = next(self._files[first.file].batches(columns, first.row, first.row + 1, 1))
        for source in (name for name in names if name not in INDEX_COLUMNS):
            about = info.features.get(source, {})
            name = field_name(source, names)
            feature: Feature | None = None
            if about.get("dtype") == "video":
                feature = video_feature(source, name, about)
            elif source in row and has_picture(row[source]):
                feature = self._describe_pictures(source, name, about, first)
            elif source in row:
                feature = column_feature(source, name, row[source], about)
            if feature is None or not all(name.split("/")) or feature.name in found:
                got = "nothing that can be read" if feature is None else f"a second {feature.name!r}"
                kind = "" if source in row or about.get("dtype") == "video" else "description"
                self._leave_out(source, "numbers, texts, pictures or video", got, kind)
                continue
            found[feature.name] = self._with_unit(feature, about)
            self._compare(feature, about)
        return list(found.values())

    def _read_subtasks(self, info: Info, features: list[Feature]) -> dict[str, Any]:
        """Read the texts of subtasks and append their field; return the description of their table by its name."""
        self._subtasks: dict[int, str] = {}
        if not (self.path / TABLE_NAME).exists():
            return {}
        try:
            self._subtasks, described = read_subtasks(info)
        except CorruptFileError as problem:
            self.problems.append(problem.of("metadata"))
            return {}
        numbers = [one for one in features if one.source == NUMBER and one.kind == "number" and not one.shape]
        if numbers and all(one.name != TEXT for one in features):
            features.append(replace(numbers[0], name=TEXT, kind="annotation"))
        return {TABLE_NAME: described}

    def _arrow_types(self, index: Index) -> dict[str, Any]:
        """Describe the columns of language, and those of plain texts that would get another type otherwise.

        Returns:
            Field -> Arrow type, None if JSON cannot hold all of it. A file in which all values are missing may have
            no type for them: the first file without such a part decides.
        """
        found: dict[str, Any] = {}
        files = dict.fromkeys(run.file for runs in index.runs.values() for run in runs)
        types_of_files = [self._files[file].declared_types for file in files]
        for one in self._features.values():
            if one.kind not in ("language", "text"):
                continue
            kinds = (describe(types[one.source]) for types in types_of_files if one.source in types)
            first = next(kinds)
            kind = next((kind for kind in chain([first], kinds) if not has_unknown(kind)), first)
            is_default = kind != "large_string" and not one.source.startswith("language_")
            if one.kind == "language" or (kind in TEXT_TYPES and not is_default):
                found[one.name] = kind
        return found

    def _describe_pictures(self, source: str, name: str, about: Mapping[str, Any], run: Run | None) -> Feature | None:
        """Describe a column of pictures by the first intact one of an episode; None if there is none."""
        assert run is not None, "a column has rows"
        for row in range(run.row, run.row + run.length):
            values = next(self._files[run.file].batches({source: None}, row, row + 1, 1))[source]
            with suppress(CorruptFileError):
                data = encoded(values[0].as_py()) or b""
                pixels = decode_picture(data, f"{source!r} of {str(self.path)!r}")
                return picture_feature(source, name, about, pixels, data)
        return None

    def _compare(self, feature: Feature, about: Mapping[str, Any]) -> None:
        """Note where the data have rows of another size, or numbers of another type, than is said."""
        dtype = about.get("dtype")
        shape: Any = about.get("shape")
        is_told = isinstance(shape, list) and all(map(arguments.is_whole, shape))
        where = f"{feature.source!r} of {str(self.path)!r}"
        is_number = feature.kind == "number"
        told = [(f"rows of {shape}", f"{list(feature.shape)} in the data")]
        told = told if is_number and is_told and np.prod(shape) != np.prod(feature.shape) else []
        if is_number and str(dtype).startswith(("float", "int", "uint", "bool")) and dtype != feature.dtype:
            told.append((f"{dtype} numbers", f"{feature.dtype} in the data"))
        for expected, got in told:
            self.problem("describe", where, expected, got, "The data are believed").of("description")

    def _leave_out(self, what: str, expected: str, got: str, kind: str = "") -> None:
        self.problem("read", f"{what!r} of {str(self.path)!r}", expected, got, "It is left out").of(kind)

    def _with_unit(self, feature: Feature, about: Mapping[str, Any]) -> Feature:
        is_depth = feature.depth is not None or (feature.kind == "image" and len(feature.shape) == 2)
        if not is_depth or feature.unit:
            return feature
        unit = "mm" if feature.dtype == "uint16" else "m"
        where = f"{feature.source!r} of {str(self.path)!r}"
        advice = f"Read as {unit!r}, by its dtype"
        self.advise("tell the unit of depth", where, "a depth_unit of 'm' or 'mm'", "none", advice)
        return replace(feature, unit=unit)

    def _components(self, features: list[Feature]) -> dict[str, dict[str, Feature]]:
        """Return the named parts of state, action and cameras; columns of annotations become texts in `features`."""
        content = read_object(file_inside(self.path, MODALITY_NAME), MAX_OBJECT_BYTES)
        sources = {feature.source: number for number, feature in enumerate(features)}
        found: dict[str, dict[str, Feature]] = {}
        for group, default in (("state", "observation.state"), ("action", "action"), ("video", ""), ("annotation", "")):
            listed = content.get(group)
            for name, about in listed.items() if isinstance(listed, dict) else ():
                about = about if isinstance(about, dict) else {}
                key = str(about.get("original_key") or default or f"{group}.{name}")
                feature = features[sources[key]] if key in sources else None
                low, high = ends = about.get("start", -1), about.get("end", -1)
                is_range = all(map(arguments.is_whole, ends)) and 0 <= low < high
                if group == "annotation" and feature is not None and feature.dtype == "int64" and not feature.shape:
                    features[sources[key]] = replace(feature, kind="annotation")
                elif group == "video" and feature is not None and feature.kind in ("image", "video"):
                    found.setdefault(group, {})[name] = feature
                elif feature is not None and len(feature.shape) == 1 and is_range and high <= feature.shape[0]:
                    part = replace(feature, name=f"{feature.name}.{name}", part=ends)
                    found.setdefault(group, {})[name] = part
                else:
                    self._leave_out(f"{group}.{name} of {MODALITY_NAME}", f"a part of {key!r}", repr(about)[:80])
        return found

    def _missing_videos(self, info: Info, index: Index) -> dict[int, list[str]]:
        """Return episode -> cameras to leave out: without a readable video, and with too short ones if rebuilding.

        Raises:
            CorruptFileError: The index names no video, or one that is too short, and is not rebuilt.
        """
        missing: dict[int, list[str]] = {}
        ends = lru_cache(maxsize=None)(self._end_of)
        for episode, camera in product(index.runs, info.cameras):
            length = sum(run.length for run in index.runs[episode])
            expected = f"a video of {camera!r} with its {length} frames"
            try:
                entry = index.entries.get(episode)
                if entry is None or camera not in entry.videos:
                    raise index.bad(f"episode {episode}", expected, "none in the index")
                file, start_s = entry.videos[camera]
                try:
                    end_s = ends(file)
                except (CorruptFileError, OSError) as damage:  # of one file: the others and the rows are read
                    got = f"{damage.got} of {damage.where}" if isinstance(damage, CorruptFileError) else str(damage)
                    where = f"{camera!r} of episode {episode}"
                    advice = "The camera is left out of this episode"
                    wrong = self.problem("read", where, expected, got, advice)
                    wrong.of("undecodable", str(episode)).__cause__ = damage
                    missing.setdefault(episode, []).append(camera)
                    continue
                if end_s < start_s + (length - 0.5) / info.fps:
                    got = f"one that ends at {end_s:.3f} s, and begins at {start_s:.3f} s"
                    raise index.bad(f"episode {episode}", expected, got)
            except DataFileError as problem:
                if not self._rebuilds:
                    raise
                self.problems.append(problem.of("undecodable", str(episode)))
                missing.setdefault(episode, []).append(camera)
        return missing

    def _end_of(self, file: str) -> float:
        """Return when a video ends in seconds; without PyAV only an empty file is known to end."""
        path = self._video_file(file)
        if not path.stat().st_size:
            raise CorruptFileError("read", repr(str(path)), "a video", "an empty file")
        if not find_spec("av"):
            return float("inf")
        end_s, self._held[file] = summarize_video(path)
        return end_s

    def _video_file(self, file: str) -> Path:
        """Return the path of a video that has not changed since it was first read."""
        self._known_videos.check(self.path / file)
        return file_inside(self.path, file)

    def _episode(self, index: Index, episode: int, missing: Sequence[str]) -> EpisodeInfo:
        runs = index.runs[episode]
        entry = index.entries.get(episode, Entry((), 0, 0, "", {}))
        task = index.tasks.get(runs[0].task, entry.tasks[0] if entry.tasks else "")
        if entry.tasks and task not in entry.tasks:
            where = f"episode {episode} of {str(self.path)!r}"
            advice = "The rows are believed"
            self.problem("tell the task", where, f"one of {entry.tasks}"[:200], repr(task)[:200], advice)
        other = {name: value for name, value in entry.other.items() if name != ABSENT or value}
        is_told = SUCCESS not in (other.get(ABSENT) or ())
        wins = [run.success for run in runs if is_told and run.success is not None]
        schema, texts = self._fields if not missing else self._fields_without(missing)
        return EpisodeInfo(
            name=str(episode),
            length=sum(run.length for run in runs),
            schema=schema,
            texts=texts,
            success=any(wins) if wins else None,
            task=task,
            metadata={**({"tasks": list(entry.tasks)} if len(entry.tasks) > 1 else {}), **other},
            source=Source(runs, entry.videos),
        )

    def _fields_without(self, cameras: Collection[str]) -> tuple[Schema, tuple[str, ...]]:
        features = [one for one in self._features.values() if one.source not in cameras]
        texts = [one.name for one in features if one.kind in _TEXTS]
        return Schema(one.field for one in features if one.name not in texts), tuple(texts)

    def file_of(self, number: int, name: str, step: int) -> Path:
        source: Source = self.episodes[number].source
        feature = self._features[name]
        if feature.kind == "video":
            return self.path / source.videos[feature.source][0]
        before = 0
        for run in source.runs:
            if step < before + run.length:
                return self.path / run.file
            before += run.length
        return self.path

    def rows_read_together(self, number: int, name: str) -> int | None:
        return 1 if self._features[name].kind == "image" else None

    def read(self, number: int, name: str, start: int, stop: int) -> Any:
        return self.read_fields(number, [name], start, stop)[name]

    def read_fields(self, number: int, names: Sequence[str], start: int, stop: int) -> dict[str, Any]:
        source: Source = self.episodes[number].source
        features = [self._features[name] for name in names]
        found: dict[str, Any] = {}
        for one in features:
            found[one.name] = (
                [] if one.kind in _TEXTS else np.empty((stop - start, *one.field.shape), one.field.numpy_dtype)
            )
            if one.kind == "video" and start < stop:
                file, start_s = source.videos[one.source]
                times_s = start_s + np.arange(start, stop) / self._fps
                found[one.name] = read_frames(self._video_file(file), times_s, one.shape, one.depth)
        in_columns = [one for one in features if one.kind != "video"]
        at = 0
        texts = dict[str, str]()
        for batch in self._batches(source.runs, in_columns, start, stop):
            self._check_frames(batch[_FRAME], start + at, self.episodes[number].name)
            for one in in_columns:
                where = f"{one.source!r}, frames from {start + at} of episode {self.episodes[number].name!r}"
                values = self._values(one, batch[one.source], f"{where} of {str(self.path)!r}", texts)
                if isinstance(values, list):
                    found[one.name] += values
                else:
                    found[one.name][at : at + len(values)] = values
            at += len(batch[_FRAME])
        return found

    def video(self, number: int, name: str) -> VideoRange | None:
        feature = self._features.get(name)
        if feature is None or feature.kind != "video" or feature.depth is not None:
            return None
        info = self.episodes[number]
        file, start_s = info.source.videos[feature.source]
        about = self.metadata["features"][feature.source]
        held = self._held.get(file, {})
        return VideoRange(self._video_file(file), start_s, info.length, self._fps, about, held)

    def _check_frames(self, array: Any, first: int, episode: str) -> None:
        frames = as_rows([array], (), repr(_FRAME))
        if (frames != np.arange(first, first + len(frames))).any():
            where = f"episode {episode} of {str(self.path)!r}"
            raise CorruptFileError("read", where, f"rows of the frames from {first} on", "others", "Open it again")

    def _batches(self, runs: Sequence[Run], features: list[Feature], start: int, stop: int) -> Iterator[dict[str, Any]]:
        widths = {one.source: int(np.prod(one.shape)) if one.kind == "number" else None for one in features}
        widths[_FRAME] = 1
        before = 0
        for run in runs if features else ():
            low = max(start - before, 0)
            high = min(stop - before, run.length)
            if low < high and any(one.kind == "image" for one in features):
                yield from self._files.kept_batches(run.file, widths, run.row + low, run.row + high)
            elif low < high:
                yield from self._files[run.file].batches(widths, run.row + low, run.row + high)
            before += run.length

    def _values(self, feature: Feature, array: Any, where: str, texts: dict[str, str]) -> Any:
        """Convert an Arrow array to the values of a field; equal texts become one object of `texts`, which grows."""
        if feature.kind == "text":
            return shared_texts(array, texts)
        if feature.kind == "language":
            with damage_named("read", where, "values that JSON can hold", ValueError):
                written = [json.dumps(row.as_py(), ensure_ascii=False, default=str) for row in array]
            return [texts.setdefault(text, text) for text in written]
        if feature.kind == "image":
            decoded = [decode_picture(encoded(one) or b"", where, feature.shape) for one in array.to_pylist()]
            if any(one.dtype != feature.dtype for one in decoded):
                raise CorruptFileError("read", where, f"pictures of {feature.dtype}", "others")
            return np.stack(decoded)
        rows = as_rows([array], feature.shape, where)
        if rows.dtype != feature.dtype:
            raise CorruptFileError("read", where, f"numbers of {feature.dtype}", str(rows.dtype))
        if feature.kind == "annotation":
            numbered = self._subtasks if feature.source == NUMBER else self._tasks
            return [numbered.get(number, "") for number in rows.tolist()]
        return rows if feature.part is None else rows[:, slice(*feature.part)]


def has_picture(row: Any) -> bool:
    """Return whether an Arrow array of one row has the bytes of a picture, alone or in a structure with its path."""
    pyarrow, _ = arrow()
    if pyarrow.types.is_struct(row.type) and row.type.get_field_index("bytes") >= 0:
        row = row.field("bytes")
    sizes, leaf = first_row(row)
    return not sizes and leaf.startswith("binary") and bool(row[0].is_valid)


def encoded(value: Any) -> bytes | None:
    """Return the bytes of a picture, alone or in a structure with its path; None if it is none."""
    found = value.get("bytes") if isinstance(value, dict) else value
    return found if isinstance(found, bytes) else None


def _place(name: str, feature: Feature) -> dict[str, Any]:
    """Return the field of a named part, and its columns; None for all columns."""
    if feature.part is None:
        return {"field": feature.name, "columns": None}
    return {"field": feature.name.removesuffix(f".{name}"), "columns": list(feature.part)}


def _splits(info: Info, episodes: Sequence[int]) -> dict[str, Sequence[str]]:
    """Return the parts that the description names as "start:stop" of episodes."""
    splits = info.content.get("splits")
    found: dict[str, Sequence[str]] = {}
    for name, text in splits.items() if isinstance(splits, dict) else ():
        low, _, high = str(text).partition(":")
        if low.isdecimal() and high.isdecimal() and len(low + high) < 30:
            found[name] = [str(episode) for episode in episodes if int(low) <= episode < int(high)]
    return found
