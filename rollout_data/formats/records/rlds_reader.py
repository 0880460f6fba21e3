"""RLDS datasets of TensorFlow Datasets: two JSON files and TFRecord shards. A record is an episode.

`features.json` declares the fields of a step. `dataset_info.json` declares the number of episodes
in each shard. A shard with a different number of episodes is an error. With
`on_bad_index="rebuild"` all episodes in the shard are read.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from storage.core import arguments
from storage.core.fields import Field, Schema
from storage.errors import (
    CorruptFileError,
    DataFileError,
    ForeignFileError,
    RolloutDataError,
)

from ...sources.episode_info import NO_FIELDS, EpisodeInfo
from ...sources.file_source import FileSource
from ..encoded_images import decode_picture, picture_format
from ..format_detection import RLDS_FEATURES, RLDS_INFO, rlds_folders
from ..input_checks import KnownFiles, file_inside, read_object
from .rlds_features import MAX_STEPS, RldsLeaf, declared_leaves, text
from .tfrecord import (
    BYTES,
    INTEGERS,
    Array,
    FeatureValues,
    check_record,
    count,
    features,
    items,
    numbers,
)
from .tfrecord import records as read_records

_STEPS = "steps/"
_METADATA = "episode_metadata/"
_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
_TASKS = ("language_instruction", "natural_language_instruction")
#: Flags that only mark the first and the last step of an episode, and do not become fields.
_BOUNDS = ("is_first", "is_last")
_MAX_METADATA_BYTES = 1 << 16
_MAX_JSON_BYTES = 1 << 24
_MAX_SHARDS = 1 << 16
_MAX_EPISODES = 1 << 18
_CHOICES = {"last_step": ("keep", "final"), "on_bad_index": ("refuse", "rebuild")}
_Stored = Mapping[str, FeatureValues]


class _Record(NamedTuple):
    """A record of a shard, which contains an episode.

    Attributes:
        path: File of the shard.
        data: Bytes of the file.
        number: Number of the record in the file.
        start, stop: Offsets of the content of the record in the file.
    """

    path: Path
    data: memoryview
    number: int
    start: int
    stop: int


class RldsReader(FileSource):
    """Reader of a version folder, or of a folder with one version folder.

    Options:
        last_step: Meaning of the last stored step: a step ("keep"), or only the final observation
            ("final"). The files do not state the meaning.
        on_bad_index: "refuse" raises an error if the number of episodes in a shard differs from
            `dataset_info.json`; "rebuild" reads the episodes in the shard.
    """

    format = "rlds"
    OPTIONS: ClassVar[Mapping[str, Any]] = {"last_step": "keep", "on_bad_index": "refuse"}

    def scan(self) -> Sequence[EpisodeInfo]:
        for name, choices in _CHOICES.items():
            arguments.choice(name, self.options[name], choices)
        folders = rlds_folders(self.path)
        if len(folders) != 1:
            names = ", ".join(folder.name for folder in folders) or "no versions"
            raise ForeignFileError(
                f"{str(self.path)!r} contains {names}, expected one version. Open the folder of a "
                "version."
            )
        self._known = KnownFiles()
        self._folder = folders[0]
        self._checked = set[int]()
        self._numbers = Counter[str]()
        info = read_object(self._file(RLDS_INFO), _MAX_JSON_BYTES)
        tree = read_object(self._file(RLDS_FEATURES), _MAX_JSON_BYTES)
        try:
            self._leaves = dict(declared_leaves(tree))
            shards = list(self._shards(info))
        except (LookupError, TypeError, ValueError, AttributeError) as cause:
            reason = f"{type(cause).__name__}: {cause}"[:200]
            raise CorruptFileError(
                f"{str(self._folder)!r} has invalid splits or features: {reason}."
            ) from cause
        self.metadata = {}
        for name in ("name", "version", "description"):
            if name in info:
                self.metadata[name] = info[name]
        self._choose_leaves()
        episodes: list[EpisodeInfo] = []
        for split, path, length in shards:
            self._scan_shard(split, path, length, episodes)
        if len(episodes) > 1 and all(info.terminated for info in episodes):
            self.advise(
                f"All episodes of {str(self._folder)!r} are terminated. The recorder may set "
                "is_terminal on every last step, whether or not the task ended."
            )
        return episodes

    def _file(self, name: str) -> Path:
        return file_inside(self.path, str(self._folder.relative_to(self.path) / name))

    def _shards(self, info: dict[str, Any]) -> Iterator[tuple[str, str, int]]:
        """Yield (split, file name, number of episodes) of each shard."""
        file_format = info.get("fileFormat") or "tfrecord"
        if file_format != "tfrecord":
            raise ForeignFileError(
                f"{str(self._folder)!r} has files of the format {file_format!r}. Only TFRecord "
                "files are read."
            )
        for split in info["splits"]:
            lengths = [int(length) for length in split.get("shardLengths", ())]
            if len(lengths) > _MAX_SHARDS:
                raise ValueError(
                    f"a split has {len(lengths)} shards, expected at most {_MAX_SHARDS}"
                )
            for shard, length in enumerate(lengths):
                number = f"{shard:05d}"
                total = f"{len(lengths):05d}"
                values = {
                    "DATASET": info["name"],
                    "SPLIT": split["name"],
                    "FILEFORMAT": file_format,
                    "SHARD_INDEX": number,
                    "NUM_SHARDS": total,
                    "SHARD_X_OF_Y": f"{number}-of-{total}",
                }
                name = split.get("filepathTemplate") or _TEMPLATE
                for key, value in values.items():
                    name = name.replace(f"{{{key}}}", value)
                yield split["name"], name, length

    def _choose_leaves(self) -> None:
        """Choose the readable features of steps.

        Unreadable features and reduced dtypes are reported.
        """
        self._steps: dict[str, RldsLeaf] = {}
        for key, leaf in self._leaves.items():
            where = f"{key!r} of {str(self._folder)!r}"
            name = key.removeprefix(_STEPS)
            if not key.startswith(_STEPS):
                continue
            is_ragged = -1 in leaf.shape and leaf.kind != "picture"
            if is_ragged:
                self.problem(
                    f"{where} has a different number of values in each step. The feature is left "
                    "out."
                )
                continue
            if leaf.kind == "text" and leaf.shape:
                self.problem(
                    f"{where} has texts of shape {list(leaf.shape)} in each step, expected one "
                    "text. The feature is left out."
                )
                continue
            self._steps[name] = leaf
            if leaf.dtype != leaf.declared:
                self.advise(
                    f"{where} is declared as {leaf.declared}, but stored and read as {leaf.dtype}."
                )
        reduced = [name for name, leaf in self._steps.items() if leaf.dtype != leaf.declared]
        self.metadata["lossy"] = reduced

    def _scan_shard(self, split: str, name: str, length: int, episodes: list[EpisodeInfo]) -> None:
        """Append the episodes of a shard to `episodes`, and report damaged episodes.

        Raises:
            DataFileError: The shard is damaged or does not have `length` episodes, and
                `on_bad_index` is "refuse".
        """
        names = list(self.splits.get(split, ()))
        num_records = 0
        try:
            path = self._file(name)
            data = self._known.map(path)
            for start, stop in read_records(data, path):
                record = _Record(path, data, num_records, start, stop)
                num_records += 1
                if len(episodes) + len(self.problems) > _MAX_EPISODES:
                    raise CorruptFileError(
                        f"{str(path)!r} exceeds the limit of {_MAX_EPISODES} episodes."
                    )
                info = self._read_record(record, split)
                if info is not None:
                    names.append(info.name)
                    episodes.append(info)
            if num_records != length:
                raise CorruptFileError(
                    f"{str(path)!r} has {num_records} episodes, expected {length}."
                )
        except DataFileError as error:
            if num_records == 0 and length == 0:
                return  # An empty shard may have no file.
            if self.options["on_bad_index"] == "refuse":
                error.message += " Pass on_bad_index='rebuild' to read the intact episodes."
                raise
            self.problems.append(error)
        self.splits[split] = names

    def _read_record(self, record: _Record, split: str) -> EpisodeInfo | None:
        """Return the description of the episode in a record; report an unreadable record."""
        name = f"{split}_{self._numbers[split]}"
        self._numbers[split] += 1
        try:
            info = self._episode(record.data, record.start, record.stop, name)
        except (ValueError, LookupError, DataFileError) as error:
            self._report_damage(record, name, error)
            return None
        source = (record.path, record.start, record.stop)
        return replace(info, source=source, metadata={**info.metadata, "split": split})

    def _report_damage(self, record: _Record, episode: str, error: Exception) -> None:
        """Report an unreadable record: a wrong checksum, or steps that contradict the features."""
        try:
            check_record(record.data, record.start, record.stop, record.path)
        except CorruptFileError as damage:
            self.problems.append(damage.of("checksum", episode))
            return
        reason = str(error)[:200].rstrip(".")
        where = f"Record {record.number} of {str(record.path)!r}"
        message = f"{where} contradicts the declared features: {reason}. The episode is left out."
        self.problem(message, kind="unreadable", episode=episode)

    def _episode(self, data: memoryview, start: int, stop: int, name: str) -> EpisodeInfo:
        """Return the description of the episode in a record.

        Raises:
            ValueError, LookupError, DataFileError: The steps contradict the declared features.
        """
        stored = features(data, start, stop)
        length = self._num_steps(data, stored)
        metadata = self._metadata(data, stored)
        fields = []
        texts = []
        for key, leaf in self._steps.items():
            feature = stored.get(_STEPS + key)
            if feature is None:
                continue
            self._check_steps(data, key, feature, length)
            if leaf.kind == "text":
                texts.append(key)
                distinct = set(map(bytes, items(data, feature, length)))
                if len(distinct) == 1:
                    metadata[key.rpartition("/")[2]] = text(distinct.pop())
            elif leaf.kind == "picture" and feature.stop - feature.start == 2 * length:
                self.problem(
                    f"{key!r} of episode {name!r} has only empty pictures. The field is left out."
                )
            elif key not in _BOUNDS:
                is_picture = leaf.kind == "picture"
                shape = self._picture_shape(data, feature, key) if is_picture else leaf.shape
                fields.append(Field(key, shape, leaf.dtype))

        final: Schema = NO_FIELDS
        if self.options["last_step"] == "final":
            final = Schema(field for field in fields if field.name.split("/")[0] == "observation")
            length = length - 1
        if not 0 < length <= MAX_STEPS:
            raise ValueError(f"the episode has {length} steps, expected 1 to {MAX_STEPS}")

        is_terminal = _last_flag(data, stored, "is_terminal")
        is_known = is_terminal or _last_flag(data, stored, "is_last")
        success = metadata.get("success")
        tasks = [metadata[key] for key in _TASKS if isinstance(metadata.get(key), str)]
        return EpisodeInfo(
            name,
            length,
            Schema(fields),
            tuple(texts),
            final,
            terminated=is_terminal if is_known else None,
            truncated=not is_terminal if is_known else None,
            success=success if isinstance(success, bool) else None,
            task=tasks[0] if tasks else "",
            metadata=metadata,
        )

    def _check_steps(self, data: memoryview, key: str, feature: FeatureValues, length: int) -> None:
        """Raise `ValueError` if a feature has an undeclared kind or does not have `length` steps.

        The steps of pictures and tensors are not counted here; reading the steps checks them.
        """
        leaf = self._steps[key]
        is_right = feature.kind == leaf.values
        if is_right and leaf.kind in ("numbers", "text"):
            is_right = leaf.num_steps(data, feature) == length
        if not is_right:
            form = f"{leaf.dtype}{list(leaf.shape)}"
            raise ValueError(f"{key!r} does not have {length} steps of {form}")

    def _num_steps(self, data: memoryview, stored: _Stored) -> int:
        """Return the number of steps, counted in the feature that can be counted fastest."""
        keys = [key for key in self._steps if _STEPS + key in stored]
        if not keys:
            raise ValueError("the record contains none of the declared features of steps")

        def cost(key: str) -> tuple[bool, bool, int]:
            leaf = self._steps[key]
            return leaf.values != INTEGERS, leaf.values == BYTES, prod(leaf.shape)

        key = min(keys, key=cost)
        return self._steps[key].num_steps(data, stored[_STEPS + key])

    def _picture_shape(self, data: memoryview, feature: FeatureValues, key: str) -> tuple[int, ...]:
        """Return the shape of the pictures of a feature; mark a JPEG feature as lossy."""
        first = items(data, feature, MAX_STEPS)[0]
        leaf = self._steps[key]
        if picture_format(first) == "JPEG" and key not in self.metadata["lossy"]:
            self.metadata["lossy"].append(key)
        return leaf.shape if -1 not in leaf.shape else decode_picture(first, repr(key)).shape

    def _metadata(self, data: memoryview, stored: _Stored) -> dict[str, Any]:
        """Read the metadata of an episode: small numbers and texts outside of the steps."""
        metadata: dict[str, Any] = {}
        for key, leaf in self._leaves.items():
            feature = stored.get(key)
            if key.startswith(_STEPS) or feature is None or feature.kind != leaf.values:
                continue
            if feature.stop - feature.start > _MAX_METADATA_BYTES:
                continue
            if leaf.kind == "text":
                values = list(map(text, items(data, feature, MAX_STEPS)))
            elif leaf.kind == "numbers":
                values = _plain(data, feature, leaf.dtype)
            else:
                continue
            is_single = not leaf.shape and len(values) == 1
            metadata[key.removeprefix(_METADATA)] = values[0] if is_single else values
        return metadata

    def rows_read_together(self, number: int, name: str) -> int | None:
        leaf = self._steps.get(name)
        return 1 if leaf is not None and leaf.kind == "picture" else None

    def read(self, number: int, name: str, start: int, stop: int) -> Any:
        info = self.episodes[number]
        path, first, last = info.source
        where = f"{name!r} of episode {info.name!r} of {str(path)!r}"
        data = self._known.map(path)
        if number not in self._checked:
            check_record(data, first, last, path)
            self._checked.add(number)
        shape = () if name in info.texts else info.schema[name].shape
        try:
            feature = features(data, first, last)[_STEPS + name]
            return self._steps[name].decode(data, feature, range(start, stop), shape, where)
        except (ValueError, LookupError, MemoryError, zlib.error) as cause:
            if isinstance(cause, RolloutDataError):
                raise
            reason = str(cause)[:200].rstrip(".")
            raise CorruptFileError(
                f"{where} contradicts the declared features: {reason}."
            ) from cause

    def read_final(self, number: int, name: str) -> Array:
        length = self.episodes[number].length
        value: Array = self.read(number, name, length, length + 1)[0]
        return value


def _last_flag(data: memoryview, stored: _Stored, name: str) -> bool:
    """Return a flag of the last step; False if the record has no flag of this name."""
    feature = stored.get(_STEPS + name)
    if feature is None or feature.kind != INTEGERS:
        return False
    return bool(_plain(data, feature, "bool")[-1])


def _plain(data: memoryview, feature: FeatureValues, dtype: str) -> list[Any]:
    """Convert all numbers of a feature to a list of Python values."""
    values: list[Any] = numbers(data, feature, 0, count(data, feature)).astype(dtype).tolist()
    return values
