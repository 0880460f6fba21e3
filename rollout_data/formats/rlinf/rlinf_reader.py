"""Reader of RLinf's trajectory checkpoints: torch files and an index, optionally a folder per rank.

A torch file contains a block of tensors `[T, B, ...]`: T steps of B environments (columns). Files
are memory-mapped and loaded with `weights_only`. Pickle files raise an error. An episode consists
of the steps of a column between two dones. The last episode of a column usually has an open end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from storage.core import arguments
from storage.core.fields import MAX_FIELDS, Field, Schema, dtype_name
from storage.errors import CorruptFileError, DataFileError, UnsafeFileError

from ...sources.episode_info import ABSENT, EpisodeInfo
from ...sources.file_source import FileSource
from ...sources.trajectory_checkpoints.checkpoint_file import (
    END_FLAGS,
    load_trajectory,
    split_epochs,
)
from ...sources.trajectory_checkpoints.checkpoint_folder import (
    METADATA_NAME,
    checkpoint_folders,
    find_files,
    index_path,
    listed_entries,
)
from ..arrays.npz_arrays import Array
from ..input_checks import KnownFiles, damage_named, file_inside, read_object

#: Suffixes of the trajectory files of RLinf.
_SUFFIXES = (".pt", ".pkl")
_TASKS = ("task", "task_description", "task_descriptions")
#: Maximum bytes of an observation field that are compared with the next observations.
_COMPARED_BYTES = 1 << 26
_NEXT = "next_observation"
_MAX_JSON_BYTES = 1 << 24
_MAX_DEPTH = 16
#: Bits of a trajectory number within the range of its rank.
_RANK_BITS = 40
_PICKLE_ADVICE = "A pickle can run code. Save the trajectories as 'pt'."
#: Errors that damaged indexes and tensors cause.
_DAMAGE = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, OSError)


class RlinfReader(FileSource):
    """Reader of a checkpoint folder, or of a folder with a checkpoint folder per rank.

    Entries of the index without a file are reported and left out.

    Options:
        on_bad_index: "refuse" raises an error if the index contradicts the sizes in the files;
            "rebuild" takes the sizes from the files.
    """

    format = "rlinf"
    OPTIONS: ClassVar[Mapping[str, Any]] = {"on_bad_index": "refuse"}

    def scan(self) -> Sequence[EpisodeInfo]:
        option = self.options["on_bad_index"]
        choices = ("refuse", "rebuild")
        choice = arguments.choice("on_bad_index", option, choices)
        is_rebuilt = choice == "rebuild"
        #: Path and content of the most recently loaded file.
        self._latest: tuple[Path | None, dict[str, Any]] = (None, {})
        self._known = KnownFiles()
        episodes: list[EpisodeInfo] = []
        #: Number of each episode in the trajectory index.
        self._numbers: list[int] = []
        folders = checkpoint_folders(self.path)
        if not folders:
            raise DataFileError(f"{str(self.path)!r} has no index of trajectories.")
        for rank, folder in enumerate(folders):
            # Each rank has its own range of numbers, so new episodes of a rank move no others.
            first_episode = len(episodes)
            for number, entry, path in self._listed(folder, is_rebuilt):
                try:
                    block = self._load(path)
                    shape = _shape(block, path)
                    block_episodes = self._episodes(block, path, shape, number, entry)
                except DataFileError as error:
                    error.message += " The trajectory is left out."
                    self.problems.append(error)
                    continue
                self._check_num_samples(entry, path, shape, is_rebuilt)
                episodes += block_episodes
            num_of_rank = len(episodes) - first_episode
            self._numbers += range(rank << _RANK_BITS, (rank << _RANK_BITS) + num_of_rank)
        if not episodes and self.problems:
            raise self.problems[0]
        return episodes

    def listing_state(self) -> Any:
        """Return the folders of the ranks with the state of their indexes.

        If files without an index entry are read too, the names of all files are included.
        """
        is_rebuilt = self.options["on_bad_index"] == "rebuild"
        states = []
        for folder in checkpoint_folders(self.path):
            index = index_path(folder)
            try:
                status = None if index is None else index.stat()
                numbers = list(find_files(folder)) if is_rebuilt else None
            except OSError:  # A file was removed meanwhile. Reopening the folder reports that.
                return None
            state = None if status is None else (status.st_mtime_ns, status.st_size, status.st_ino)
            states.append((folder, state, numbers))
        return states

    def number_of(self, episode: int) -> int:
        return self._numbers[episode]

    def reopened(self) -> RlinfReader:
        reader = RlinfReader(self.path, self.options)
        number_of = {
            info.name: number for info, number in zip(self.episodes, self._numbers, strict=True)
        }
        used = set(number_of.values())
        for place, info in enumerate(reader.episodes):
            number = number_of.get(info.name)
            if number is None:
                number = reader._numbers[place]
                while number in used:  # Only after the removal of earlier episodes.
                    number += 1
                used.add(number)
            reader._numbers[place] = number
        return reader

    def _check_num_samples(
        self,
        entry: Mapping[str, Any],
        path: Path,
        shape: tuple[int, int],
        is_rebuilt: bool,
    ) -> None:
        """Compare the number of samples in a file with the number in the index.

        Raises:
            CorruptFileError: The numbers differ, and `is_rebuilt` is false.
        """
        num_samples = shape[0] * shape[1]
        if entry.get("num_samples", num_samples) == num_samples:
            return
        message = (
            f"{str(path)!r} has {shape[0]} x {shape[1]} samples, but the index has "
            f"{entry['num_samples']}."
        )
        if not is_rebuilt:
            raise CorruptFileError(f"{message} Pass on_bad_index='rebuild' to use the files.")
        self.problem(f"{message} The file is used.", kind="counts")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_latest": (None, {})}

    def _listed(self, folder: Path, is_rebuilt: bool) -> list[tuple[int, dict[str, Any], Path]]:
        """Return (id, index entry, file) of each trajectory in the order of the index.

        If `is_rebuilt` is true, files that the index does not list are appended.
        """
        path_of_index = index_path(folder)
        if path_of_index is None:
            return []
        where = repr(str(folder))
        inner = folder.relative_to(self.path)
        index = read_object(
            file_inside(self.path, str(inner / path_of_index.name)), _MAX_JSON_BYTES
        )
        if (folder / METADATA_NAME).exists():
            metadata_path = file_inside(self.path, str(inner / METADATA_NAME))
            self.metadata |= read_object(metadata_path, _MAX_JSON_BYTES)
        absent = self.metadata.pop(ABSENT, None)
        file_format = self.metadata.get("trajectory_format", "pt")
        if file_format != "pt":
            raise UnsafeFileError(
                f"{where} has trajectory_format {repr(file_format)[:40]}, expected 'pt'. "
                f"{_PICKLE_ADVICE}"
            )

        entries = _entries(index, where)
        files = {}
        for number, paths in find_files(folder).items():
            names = [path.name for path in paths if path.suffix in _SUFFIXES]
            if names:
                files[number] = names
        self._report_differences(entries, files, where, is_rebuilt)

        numbers = [number for number in entries if number in files]
        if is_rebuilt:
            numbers += files.keys() - entries.keys()
        trajectories = []
        for number in numbers:
            entry = entries.get(number, {})
            name = f"trajectory_{number}_{entry.get('model_weights_id')}.pt"
            if name not in files[number]:
                name = files[number][-1]
            if not name.endswith(".pt"):
                raise UnsafeFileError(
                    f"{name!r} of {where} is a pickle, which is not read. {_PICKLE_ADVICE}"
                )
            absent_fields = _absent_fields(absent, number)
            if absent_fields:
                entry = {**entry, ABSENT: absent_fields}
            path = file_inside(self.path, str(inner / name))
            trajectories.append((number, entry, path))
        return trajectories

    def _report_differences(
        self,
        entries: Mapping[int, Any],
        files: Mapping[int, list[str]],
        where: str,
        is_rebuilt: bool,
    ) -> None:
        """Report entries of the index without a file, and files without an entry."""
        missing = [str(number) for number in entries if number not in files]
        if missing:
            numbers = _short(", ".join(missing))
            self.problem(
                f"{where} has no files for the trajectories {numbers} of its index. These "
                "trajectories are left out.",
                kind="unreadable",
            )

        unlisted = []
        for number, names in files.items():
            if number not in entries:
                unlisted += names
        if unlisted:
            outcome = "Pass on_bad_index='rebuild' to read these files."
            if is_rebuilt:
                outcome = "These files are read."
            unlisted_names = _short(", ".join(unlisted))
            self.problem(
                f"{where} has files that are not in its index: {unlisted_names}. {outcome}"
            )

    def _load(self, path: Path) -> dict[str, Any]:
        self._known.check(path)
        if self._latest[0] != path:
            self._latest = (path, _load(path))
        return self._latest[1]

    def _fields(
        self,
        block: dict[str, Any],
        path: Path,
        shape: tuple[int, int],
    ) -> tuple[dict[str, Field], list[str], dict[str, Any]]:
        """Return the numeric fields of a block, the names of its text fields, and its metadata.

        Values of unsupported types are reported.
        """
        fields = {}
        texts = []
        plain = {}
        for name, value in block.items():
            if name in END_FLAGS:
                continue
            if isinstance(value, torch.Tensor) and value.shape[:2] == shape:
                # bfloat16 is read as float32, because numpy has no bfloat16.
                dtype = torch.float32 if value.dtype == torch.bfloat16 else value.dtype
                fields[name] = Field(name, tuple(value.shape[2:]), dtype_name(dtype))
            elif _is_texts(value, shape):
                texts.append(name)
            elif isinstance(value, (bool, int, float, str)):
                plain[name] = value
            else:
                self.problem(
                    f"{name!r} of {str(path)!r} does not start with the shape {list(shape)}. The "
                    "values are left out."
                )
        return fields, texts, plain

    def _episodes(
        self,
        block: dict[str, Any],
        path: Path,
        shape: tuple[int, int],
        number: int,
        entry: Mapping[str, Any],
    ) -> list[EpisodeInfo]:
        """Divide a block into episodes: the steps of a column (environment) between two dones."""
        prefix = f"{path.parent.name}_{number}" if path.parent != self.path else str(number)
        ends = {}
        for name in END_FLAGS:
            if name in block:
                ends[name] = _flags(block[name], shape, f"{name!r} of {str(path)!r}")
        terminations = ends.get("terminations", np.zeros(shape, bool))
        truncations = ends.get("truncations", np.zeros(shape, bool))
        dones = ends.get("dones", terminations | truncations)

        fields, texts, plain = self._fields(block, path, shape)
        tasks = [name for name in texts if name.split("/")[-1] in _TASKS]
        schema, final = _schemas(fields, is_copy=_is_copy(block, dones))
        episodes = []
        for column, run, start, stop in _runs(dones):
            last = (stop - 1, column)
            is_terminated = bool(terminations[last])
            is_truncated = bool(truncations[last])
            is_known = (is_terminated or is_truncated) and bool(dones[last])
            episode = EpisodeInfo(
                f"{prefix}_{column}_{run}",
                stop - start,
                schema,
                tuple(texts),
                final,
                terminated=is_terminated if is_known else None,
                truncated=is_truncated if is_known else None,
                task=block[tasks[0]][start][column] if tasks else "",
                metadata={**plain, **entry, "trajectory_id": number, "env": column},
                source=(path, column, start),
            )
            episodes.append(episode)
        return episodes

    def read(self, number: int, name: str, start: int, stop: int) -> Any:
        path, column, first = self.episodes[number].source
        value = self._load(path)[name]
        if isinstance(value, torch.Tensor):
            return _numpy(value[first + start : first + stop, column])
        return [row[column] for row in value[first + start : first + stop]]

    def read_final(self, number: int, name: str) -> Array:
        info = self.episodes[number]
        path, column, first = info.source
        return _numpy(self._load(path)[f"next_{name}"][first + info.length - 1, column])


def _entries(index: Mapping[str, Any], where: str) -> dict[int, dict[str, Any]]:
    """Map trajectory ids to the entries of an index, in the order of the index.

    Raises:
        CorruptFileError: The index is damaged, or lists an id twice.
    """
    with damage_named(f"The index of {where}", *_DAMAGE):
        items = listed_entries(index)
        entries = dict(items)
        if len(entries) < len(items):
            raise ValueError("the index has a duplicate trajectory id")
        return entries


def _absent_fields(absent: Any, number: int) -> list[str]:
    """Return the names of a trajectory's fields that a conversion filled with False or NaN."""
    names = absent.get(str(number)) if isinstance(absent, dict) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _schemas(fields: Mapping[str, Field], is_copy: bool) -> tuple[Schema, Schema]:
    """Return the schema of the steps of a block, and the schema of final observations.

    Args:
        fields: Maps the names of all fields of a block to the fields.
        is_copy: Whether the next observations repeat the observations of the next steps. They then
            do not become fields of the steps.
    """
    of_steps = []
    final = []
    for name, field in fields.items():
        group = name.split("/")[0]
        if not (is_copy and group == _NEXT):
            of_steps.append(field)
        next_name = f"next_{name}"
        if group == "observation" and fields.get(next_name) == replace(field, name=next_name):
            final.append(field)
    return Schema(of_steps), Schema(final)


def _short(text: str) -> str:
    return text if len(text) < 200 else f"{text[:200]}..."


def _load(path: Path) -> dict[str, Any]:
    """Load a torch file: map names to memory-mapped tensors, nested lists or plain values.

    Raises:
        CorruptFileError: The file is damaged, or declares more data than its size.
        UnsafeFileError: The file has objects that are neither tensors nor plain values.
    """
    where = repr(str(path))
    with damage_named(where, *_DAMAGE):
        content = load_trajectory(path, is_mapped=True)
        values = {}
        file_bytes = path.stat().st_size
        for stored_name, value in islice(_flat(content, ()), MAX_FIELDS):
            name = _renamed(content, stored_name)
            if isinstance(value, torch.Tensor) and not _is_plain(value, file_bytes):
                raise ValueError(f"{name[:80]!r} is not a dense tensor that fits into the file")
            values[name] = value
    reward = values.get("reward")
    if isinstance(reward, torch.Tensor) and reward.shape[2:] == (1,):
        values["reward"] = reward[..., 0]
    return values


def _is_plain(tensor: torch.Tensor, file_bytes: int) -> bool:
    """Return whether a tensor is dense (not sparse) and not larger than its file.

    A tensor with strides of 0 can be larger than its file.
    """
    is_dense = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return is_dense and not tensor.is_quantized and tensor.nbytes <= file_bytes


def _flat(content: Any, keys: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for the leaves of nested dicts. A name consists of keys joined by "/"."""
    if not isinstance(content, dict) or len(keys) > _MAX_DEPTH:
        yield "/".join(keys), content
    else:
        for key, value in content.items():
            yield from _flat(value, (*keys, str(key)))


def _renamed(content: Mapping[Any, Any], name: str) -> str:
    """Return the field name of a stored name. `states` as the only key becomes "observation"."""
    group, _, part = name.partition("/")
    for stored, field in (("curr_obs", "observation"), ("next_obs", _NEXT)):
        if group == stored:
            is_whole = not part or (part == "states" and len(content[stored]) == 1)
            return field if is_whole else f"{field}/{part}"
    return {"actions": "action", "rewards": "reward"}.get(name, name)


def _shape(block: Mapping[str, Any], path: Path) -> tuple[int, int]:
    """Return the number of steps T and of columns B of a block.

    Raises:
        CorruptFileError: No tensor of the block has the axes T and B.
    """
    names = [name for name in ("prev_logprobs", "reward", "action") if name in block]
    if not names:
        names = [name for name in block if name.split("/")[0] == "observation"]
    for name in names:
        value = block[name]
        if isinstance(value, torch.Tensor) and value.dim() >= 2 and min(value.shape[:2]) > 0:
            return int(value.shape[0]), int(value.shape[1])
    raise CorruptFileError(
        f"{str(path)!r} has neither 'prev_logprobs' nor 'rewards' of shape [T, B, ...]."
    )


def _flags(value: Any, shape: tuple[int, int], where: str) -> Array:
    """Convert end flags to bool `[T, B]`.

    A block of several epochs may have an additional row before the first step of each epoch. These
    rows are removed.

    Raises:
        CorruptFileError: The flags have a different shape.
    """
    num_steps, num_columns = shape
    is_tensor = isinstance(value, torch.Tensor)
    steps = None
    if is_tensor and value.dim() >= 2 and value.shape[1] == num_columns:
        steps = value
        if len(value) != num_steps:
            epochs = split_epochs(value, num_steps)
            steps = None if epochs is None else epochs[:, 1:]
    if steps is None:
        got = f"shape {list(value.shape)}" if is_tensor else f"type {type(value).__name__}"
        raise CorruptFileError(
            f"{where} has {got}, expected shape {list(shape)} or one more row per epoch."
        )
    flags: Array = steps.reshape(*shape, -1).bool().any(-1).numpy()
    return flags


def _runs(dones: Array) -> Iterator[tuple[int, int, int, int]]:
    """Yield (column, number of the run, start, stop) of each run of steps between two dones.

    Runs are numbered from 0 in each column. The last run of a column ends at the end of the block.
    """
    for column in range(dones.shape[1]):
        stops = (np.flatnonzero(dones[:, column]) + 1).tolist()
        bounds = sorted({0, *stops, len(dones)})
        for number, (start, stop) in enumerate(pairwise(bounds)):
            yield column, number, start, stop


def _is_texts(value: Any, shape: tuple[int, int]) -> bool:
    """Return whether a value is a list `[T]` of lists `[B]` of texts."""
    num_steps, num_columns = shape
    if not isinstance(value, list) or len(value) != num_steps:
        return False
    for row in value:
        if not isinstance(row, (list, tuple)) or len(row) != num_columns:
            return False
        if not all(isinstance(text, str) for text in row):
            return False
    return True


def _is_copy(block: Mapping[str, Any], dones: Array) -> bool:
    """Return whether next observations equal the observations of the next steps, except at dones.

    Only the first steps of large observations are compared.
    """
    for name, after in block.items():
        if name.split("/")[0] != _NEXT or not isinstance(after, torch.Tensor):
            continue
        before = block.get(name.removeprefix("next_"))
        if not isinstance(before, torch.Tensor) or before.shape != after.shape:
            return False
        if before.shape[:2] != dones.shape:
            return False
        num_rows = max(1, len(before) * _COMPARED_BYTES // max(1, before.nbytes))
        is_equal = (before[1:][:num_rows] == after[:-1][:num_rows]).numpy()
        is_equal = is_equal.reshape(*is_equal.shape[:2], math.prod(is_equal.shape[2:]))
        if not (is_equal.all(-1) | dones[:-1][:num_rows]).all():
            return False
    return True


def _numpy(tensor: torch.Tensor) -> Array:
    """Copy a tensor to an array; bfloat16 becomes float32."""
    copied = tensor.clone(memory_format=torch.contiguous_format)
    if copied.dtype == torch.bfloat16:
        copied = copied.float()
    array: Array = copied.numpy()
    return array
