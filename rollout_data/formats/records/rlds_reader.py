"""RLDS sets as TensorFlow Datasets writes them: two JSON files and TFRecord shards; an episode is a record.

One rule: what a step means is in `features.json`, how many episodes there are in `dataset_info.json`; where shards
disagree with it the set is refused, or rebuilt from the shards.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, ClassVar

from storage.core import arguments
from storage.core.fields import Field, Schema
from storage.errors import CorruptFileError, DataFileError, ForeignFileError, RolloutDataError

from ...sources.episode_reader import NO_FIELDS, EpisodeInfo, ForeignReader
from ..encoded_images import decode_picture, picture_format
from ..format_detection import RLDS_FEATURES, RLDS_INFO, rlds_folders
from ..input_checks import KnownFiles, file_inside, read_object
from .rlds_features import MAX_STEPS, Leaf, declared_leaves, text
from .tfrecord import BYTES, INTEGERS, Array, Feature, check_record, count, features, items, numbers, open_map
from .tfrecord import records as read_records

_STEPS = "steps/"
_METADATA = "episode_metadata/"
_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
_TASKS = ("language_instruction", "natural_language_instruction")
#: Flags of steps that say no more than where the episode begins and stops.
_BOUNDS = ("is_first", "is_last")
_MAX_METADATA_BYTES = 1 << 16
_MAX_JSON_BYTES = 1 << 24
_MAX_SHARDS = 1 << 16
_MAX_EPISODES = 1 << 18
_CHOICES = {"last_step": ("keep", "final"), "on_bad_index": ("refuse", "rebuild")}
_Stored = Mapping[str, Feature]


class Reader(ForeignReader):
    """Reads a version folder, or the folder above the only one.

    Option `last_step`: whether the last stored step is a step ("keep") or holds only the final observation ("final");
    the files do not tell. Option `on_bad_index`: "refuse", or "rebuild" to read what the shards hold.
    """

    format = "rlds"
    OPTIONS: ClassVar[Mapping[str, Any]] = {"last_step": "keep", "on_bad_index": "refuse"}

    def scan(self) -> Sequence[EpisodeInfo]:
        for name, choices in _CHOICES.items():
            arguments.choice("open the set", name, self.options[name], choices)
        folders = rlds_folders(self.path)
        if len(folders) != 1:
            got = ", ".join(folder.name for folder in folders) or "none"
            raise ForeignFileError("open", repr(str(self.path)), "one version", got, "Open the folder of a version")
        self._known = KnownFiles()
        self._folder = folders[0]
        self._checked = set[int]()
        self._numbers = Counter[str]()
        info, tree = (read_object(self._file(name), _MAX_JSON_BYTES) for name in (RLDS_INFO, RLDS_FEATURES))
        try:
            self._leaves = dict(declared_leaves(tree))
            shards = list(self._shards(info))
        except (LookupError, TypeError, ValueError, AttributeError) as cause:
            got = f"{type(cause).__name__}: {cause}"[:200]
            raise CorruptFileError("open", repr(str(self._folder)), "splits and features", got) from cause
        self.metadata = {name: info[name] for name in ("name", "version", "description") if name in info}
        self._choose_leaves()
        episodes: list[EpisodeInfo] = []
        for split, path, length in shards:
            self._scan_shard(split, path, length, episodes)
        if len(episodes) > 1 and all(info.terminated for info in episodes):
            advice = "The recorder may set is_terminal on every last step; then 'terminated' says nothing"
            self.advise("tell ends apart in", repr(str(self._folder)), "other ends too", "terminated only", advice)
        return episodes

    def _file(self, name: str) -> Path:
        return file_inside(self.path, str(self._folder.relative_to(self.path) / name))

    def _shards(self, info: dict[str, Any]) -> Iterator[tuple[str, str, int]]:
        """Yield split, file name and number of episodes of each shard."""
        if (file_format := info.get("fileFormat") or "tfrecord") != "tfrecord":
            raise ForeignFileError("open", repr(str(self._folder)), "TFRecord files", repr(file_format))
        for split in info["splits"]:
            lengths = [int(length) for length in split.get("shardLengths", ())]
            if len(lengths) > _MAX_SHARDS:
                raise ValueError(f"{len(lengths)} shards")
            for shard, length in enumerate(lengths):
                number = f"{shard:05d}"
                total = f"{len(lengths):05d}"
                values = {"DATASET": info["name"], "SPLIT": split["name"], "FILEFORMAT": file_format}
                values |= {"SHARD_INDEX": number, "NUM_SHARDS": total, "SHARD_X_OF_Y": f"{number}-of-{total}"}
                name = split.get("filepathTemplate") or _TEMPLATE
                for key, value in values.items():
                    name = name.replace(f"{{{key}}}", value)
                yield split["name"], name, length

    def _choose_leaves(self) -> None:
        """Take the features of steps that can be delivered; report the others, and what the file holds less of."""
        self._steps: dict[str, Leaf] = {}
        for key, leaf in self._leaves.items():
            where = f"{key!r} of {str(self._folder)!r}"
            name = key.removeprefix(_STEPS)
            if not key.startswith(_STEPS):
                continue
            if -1 in leaf.shape and leaf.kind != "picture":
                self.problem("read", where, "equally many values in each step", "a ragged list", "It is left out")
                continue
            if leaf.kind == "text" and leaf.shape:
                self.problem("read", where, "a text in each step", f"{list(leaf.shape)} texts", "It is left out")
                continue
            self._steps[name] = leaf
            if leaf.dtype != leaf.declared:
                self.advise("read", where, leaf.declared, leaf.dtype, "The file holds no more than is delivered")
        self.metadata["lossy"] = [name for name, leaf in self._steps.items() if leaf.dtype != leaf.declared]

    def _scan_shard(self, split: str, name: str, length: int, episodes: list[EpisodeInfo]) -> None:
        names = list(self.splits.get(split, ()))
        found = 0
        try:
            path = self._file(name)
            data = open_map(path, self._known)
            for start, stop in read_records(data, path):
                number = self._numbers[split]
                found = found + 1
                if len(episodes) + len(self.problems) > _MAX_EPISODES:
                    raise CorruptFileError("read", repr(str(path)), f"at most {_MAX_EPISODES} episodes", "more")
                self._numbers[split] += 1
                try:
                    info = self._episode(data, start, stop, f"{split}_{number}")
                except (ValueError, LookupError, DataFileError) as error:
                    name, where = f"{split}_{number}", f"record {found - 1} of {str(path)!r}"
                    try:
                        check_record(data, start, stop, path)
                    except CorruptFileError as damage:
                        self.problems.append(damage.of("checksum", name))
                    else:
                        wrong = self.problem(
                            "read the episode", where, "steps as declared", str(error)[:200], "It is left out"
                        )
                        wrong.of("unreadable", name)
                    continue
                names.append(info.name)
                episodes.append(replace(info, source=(path, start, stop), metadata={**info.metadata, "split": split}))
            if found != length:
                raise CorruptFileError("read", repr(str(path)), f"{length} episodes", str(found))
        except DataFileError as error:
            if not found and not length:
                return  # no file is written for no episodes
            if self.options["on_bad_index"] == "refuse":
                error.advice = "Pass on_bad_index='rebuild' to read the episodes that are there"
                raise
            self.problems.append(error)
        self.splits[split] = names

    def _episode(self, data: memoryview, start: int, stop: int, name: str) -> EpisodeInfo:
        stored = features(data, start, stop)
        length = self._num_steps(data, stored)
        metadata = self._metadata(data, stored)
        fields = []
        texts = []
        for key, leaf in self._steps.items():
            if (feature := stored.get(_STEPS + key)) is None:
                continue
            if feature.kind != leaf.values or (
                leaf.kind in ("numbers", "text") and leaf.num_steps(data, feature) != length
            ):
                raise ValueError(f"{key!r} does not hold {length} steps of {leaf.dtype}{list(leaf.shape)}")
            if leaf.kind == "text":
                texts.append(key)
                told = set(map(bytes, items(data, feature, length)))
                metadata |= {key.rpartition("/")[2]: text(told.pop())} if len(told) == 1 else {}
            elif leaf.kind == "picture" and feature.stop - feature.start == 2 * length:
                self.problem("read", f"{key!r} of {name!r}", "pictures", "empty ones", "They are left out")
            elif key not in _BOUNDS:
                shape = self._picture_shape(data, feature, key) if leaf.kind == "picture" else leaf.shape
                fields.append(Field(key, shape, leaf.dtype))
        final: Schema = NO_FIELDS
        if self.options["last_step"] == "final":
            final = Schema(field for field in fields if field.name.split("/")[0] == "observation")
            length = length - 1
        if not 0 < length <= MAX_STEPS:
            raise ValueError(f"{length} steps")
        is_terminal, is_last = (_last_flag(data, stored, flag) for flag in ("is_terminal", "is_last"))
        success = metadata.get("success") if isinstance(metadata.get("success"), bool) else None
        task = next((metadata[key] for key in _TASKS if isinstance(metadata.get(key), str)), "")
        return EpisodeInfo(
            name,
            length,
            Schema(fields),
            tuple(texts),
            final,
            terminated=is_terminal if is_terminal or is_last else None,
            truncated=not is_terminal if is_terminal or is_last else None,
            success=success,
            task=task,
            metadata=metadata,
        )

    def _num_steps(self, data: memoryview, stored: _Stored) -> int:
        """Count the steps, by a feature that is quick to count."""
        found = [(leaf.values, prod(leaf.shape), key) for key, leaf in self._steps.items() if _STEPS + key in stored]
        if not found:
            raise ValueError("no feature of steps")
        _, _, key = min(found, key=lambda item: (item[0] != INTEGERS, item[0] == BYTES, item[1]))
        return self._steps[key].num_steps(data, stored[_STEPS + key])

    def _picture_shape(self, data: memoryview, feature: Feature, key: str) -> tuple[int, ...]:
        first = items(data, feature, MAX_STEPS)[0]
        leaf = self._steps[key]
        if picture_format(first) == "JPEG" and key not in self.metadata["lossy"]:
            self.metadata["lossy"].append(key)
        return leaf.shape if -1 not in leaf.shape else decode_picture(first, repr(key)).shape

    def _metadata(self, data: memoryview, stored: _Stored) -> dict[str, Any]:
        """Read what is told once for the episode; what is large is left out."""
        found: dict[str, Any] = {}
        for key, leaf in self._leaves.items():
            feature = stored.get(key)
            if key.startswith(_STEPS) or feature is None or feature.kind != leaf.values or leaf.kind == "picture":
                continue
            if leaf.kind in ("numbers", "text") and feature.stop - feature.start <= _MAX_METADATA_BYTES:
                is_text = leaf.kind == "text"
                stored_values = items(data, feature, MAX_STEPS) if is_text else []
                values = list(map(text, stored_values)) if is_text else _plain(data, feature, leaf.dtype)
                found[key.removeprefix(_METADATA)] = values[0] if not leaf.shape and len(values) == 1 else values
        return found

    def rows_read_together(self, number: int, name: str) -> int | None:
        leaf = self._steps.get(name)
        return 1 if leaf is not None and leaf.kind == "picture" else None

    def read(self, number: int, name: str, start: int, stop: int) -> Any:
        info = self.episodes[number]
        path, first, last = info.source
        where = f"{name!r} of episode {info.name!r} of {str(path)!r}"
        data = open_map(path, self._known)
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
            raise CorruptFileError("read", where, "steps as declared", str(cause)[:200]) from cause

    def read_final(self, number: int, name: str) -> Array:
        length = self.episodes[number].length
        found: Array = self.read(number, name, length, length + 1)[0]
        return found


def _last_flag(data: memoryview, stored: _Stored, name: str) -> bool:
    feature = stored.get(_STEPS + name)
    return feature is not None and feature.kind == INTEGERS and bool(_plain(data, feature, "bool")[-1])


def _plain(data: memoryview, feature: Feature, dtype: str) -> list[Any]:
    values: list[Any] = numbers(data, feature, 0, count(data, feature)).astype(dtype).tolist()
    return values
