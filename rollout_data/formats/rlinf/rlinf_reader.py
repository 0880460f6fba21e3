"""RLinf's trajectory checkpoints: torch files of blocks `[T, B, ...]`, named by an index, perhaps one set per rank.

One rule: tensors are mapped and loaded with weights only; pickle files are refused. An episode is what lies between two
dones of a column; the last of a column mostly has an open end.
"""

from __future__ import annotations

import math
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from storage.core import arguments
from storage.core.durable_files import open_regular
from storage.core.fields import MAX_FIELDS, Field, Schema, dtype_name
from storage.errors import CorruptFileError, DataFileError, UnsafeFileError

from ...sources.episode_reader import ABSENT, EpisodeInfo, ForeignReader
from ..arrays.npz_arrays import Array
from ..format_detection import rlinf_folders, rlinf_index
from ..input_checks import KnownFiles, damage_named, file_inside, listed, read_object

_FILE = re.compile(r"trajectory_(\d+)(_.*)?\.(pt|pkl)")
_ENDS = ("dones", "terminations", "truncations")
_TASKS = ("task", "task_description", "task_descriptions")
_COMPARED_BYTES = 1 << 26
_NEXT = "next_observation"
_MAX_PICKLE_BYTES = 1 << 24
_MAX_JSON_BYTES = 1 << 24
_MAX_DEPTH = 16
_PICKLE_ADVICE = "A pickle can run code; save the trajectories as 'pt'"
_DAMAGE = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, EOFError, OSError, zipfile.BadZipFile)


class Reader(ForeignReader):
    """Reads a checkpoint folder, or one with a folder for each rank.

    Option `on_bad_index`: "refuse" a set whose index tells other sizes than its files, or "rebuild" from the files.
    Entries without a file are reported and left out.
    """

    format = "rlinf"
    OPTIONS: ClassVar[Mapping[str, Any]] = {"on_bad_index": "refuse"}

    def scan(self) -> Sequence[EpisodeInfo]:
        given = self.options["on_bad_index"]
        choices = ("refuse", "rebuild")
        is_rebuilt = arguments.choice("open the checkpoint", "on_bad_index", given, choices) == "rebuild"
        self._latest: tuple[Path | None, dict[str, Any]] = (None, {})
        self._known = KnownFiles()
        episodes: list[EpisodeInfo] = []
        for folder in rlinf_folders(self.path):
            for number, entry, path in self._listed(folder, is_rebuilt):
                try:
                    block = self._load(path)
                    shape = _shape(block, path)
                    found = self._episodes(block, path, shape, number, entry)
                except DataFileError as error:
                    error.advice = error.advice or "The trajectory is left out"
                    self.problems.append(error)
                    continue
                if entry.get("num_samples", shape[0] * shape[1]) != shape[0] * shape[1]:
                    got = f"{shape[0]} x {shape[1]}"
                    advice = "Pass on_bad_index='rebuild' to believe the files"
                    told = f"{entry['num_samples']} samples, as the index tells"
                    if not is_rebuilt:
                        raise CorruptFileError("open", repr(str(path)), told, got, advice)
                    self.problem("agree with the index on", repr(str(path)), told, got, "The file is believed").of(
                        "counts"
                    )
                episodes += found
        if not episodes and self.problems:
            raise self.problems[0]
        return episodes

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_latest": (None, {})}

    def _listed(self, folder: Path, is_rebuilt: bool) -> list[tuple[int, dict[str, Any], Path]]:
        """List id, entry and file of each trajectory: in the order of the index, then, if rebuilt, what it lacks."""
        index = rlinf_index(folder)
        where = repr(str(folder))
        at = folder.relative_to(self.path)
        if index is None:
            return []
        about = read_object(file_inside(self.path, str(at / index)), _MAX_JSON_BYTES)
        if (folder / "metadata.json").exists():
            self.metadata |= read_object(file_inside(self.path, str(at / "metadata.json")), _MAX_JSON_BYTES)
        noted = self.metadata.pop(ABSENT, None)
        if (kind := self.metadata.get("trajectory_format", "pt")) != "pt":
            raise UnsafeFileError("open", where, "trajectories as 'pt'", repr(kind)[:40], _PICKLE_ADVICE)
        with damage_named("read the index of", where, "'trajectory_index' and 'trajectory_id_list'", *_DAMAGE):
            known = about["trajectory_index"]
            entries = {int(one): dict(known.get(str(one), {})) for one in about["trajectory_id_list"]}
            if len(entries) < len(about["trajectory_id_list"]):
                raise ValueError("an id twice")
        files: dict[int, list[str]] = {}
        for path in listed(folder):
            if one := _FILE.fullmatch(path.name):
                files.setdefault(int(one[1]), []).append(path.name)
        if lacking := [number for number in entries if number not in files]:
            got = f"no file of {', '.join(map(str, lacking))}"
            self.problem("find what is in the index of", where, "every file", _short(got), "They are left out").of(
                "unreadable"
            )
        if spare := [name for number in files if number not in entries for name in files[number]]:
            advice = "They are read" if is_rebuilt else "They are left out; on_bad_index='rebuild' reads them"
            self.problem("find in the index of", where, "every file", _short(f"not {', '.join(spare)}"), advice)
        found = []
        for number in [*entries, *(files.keys() - entries.keys() if is_rebuilt else ())]:
            entry = entries.get(number, {})
            there = files.get(number, [])
            named = f"trajectory_{number}_{entry.get('model_weights_id')}.pt"
            if there and not (chosen := named if named in there else there[-1]).endswith(".pt"):
                raise UnsafeFileError("read", f"{chosen!r} of {where}", "a file of 'pt'", "a pickle", _PICKLE_ADVICE)
            if there:
                absent = noted.get(str(number)) if isinstance(noted, dict) else None
                names = [name for name in absent if isinstance(name, str)] if isinstance(absent, list) else []
                entry = {**entry, ABSENT: names} if names else entry
                found.append((number, entry, file_inside(self.path, str(at / chosen))))
        return found

    def _load(self, path: Path) -> dict[str, Any]:
        self._known.check(path)
        if self._latest[0] != path:
            self._latest = path, _load(path)
        return self._latest[1]

    def _fields(
        self, block: dict[str, Any], path: Path, shape: tuple[int, int]
    ) -> tuple[dict[str, Field], list[str], dict[str, Any]]:
        """Sort what a block holds into fields, names of texts, and plain values."""
        fields = {}
        texts = []
        plain = {}
        for name, value in block.items():
            if name in _ENDS:
                continue
            if isinstance(value, torch.Tensor) and value.shape[:2] == shape:
                dtype = torch.float32 if value.dtype == torch.bfloat16 else value.dtype  # numpy has no bfloat16
                fields[name] = Field(name, tuple(value.shape[2:]), dtype_name(dtype))
            elif _is_texts(value, shape):
                texts.append(name)
            elif isinstance(value, (bool, int, float, str)):
                plain[name] = value
            else:
                where = f"{name!r} of {str(path)!r}"
                self.problem("read", where, f"values {list(shape)}", "others", "They are left out")
        return fields, texts, plain

    def _episodes(
        self, block: dict[str, Any], path: Path, shape: tuple[int, int], number: int, entry: Mapping[str, Any]
    ) -> list[EpisodeInfo]:
        prefix = f"{path.parent.name}_{number}" if path.parent != self.path else str(number)
        ends = {name: _flags(block[name], shape, f"{name!r} of {str(path)!r}") for name in _ENDS if name in block}
        dones = ends.get("dones", np.logical_or(*(ends.get(name, np.zeros(shape, bool)) for name in _ENDS[1:])))
        fields, texts, plain = self._fields(block, path, shape)
        tasks = [name for name in texts if name.split("/")[-1] in _TASKS]
        is_copy = _is_copy(block, dones)
        schema = Schema(one for name, one in fields.items() if not (is_copy and name.split("/")[0] == _NEXT))
        with_next = (one for name, one in fields.items() if name.split("/")[0] == "observation")
        final = Schema(
            one for one in with_next if fields.get(f"next_{one.name}") == replace(one, name=f"next_{one.name}")
        )
        found = []
        for column, run, start, stop in _runs(dones):
            flags = [bool(ends[name][stop - 1, column]) if name in ends else False for name in _ENDS[1:]]
            is_known = any(flags) and bool(dones[stop - 1, column])
            found.append(
                EpisodeInfo(
                    f"{prefix}_{column}_{run}",
                    stop - start,
                    schema,
                    tuple(texts),
                    final,
                    terminated=flags[0] if is_known else None,
                    truncated=flags[1] if is_known else None,
                    task=block[tasks[0]][start][column] if tasks else "",
                    metadata={**plain, **entry, "trajectory_id": number, "env": column},
                    source=(path, column, start),
                )
            )
        return found

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


def _short(text: str) -> str:
    return text if len(text) < 200 else f"{text[:200]}..."


def _load(path: Path) -> dict[str, Any]:
    """Map the tensors of a file: names in our words -> tensors, texts, and whatever else it holds."""
    where = repr(str(path))
    with damage_named("read", where, "a torch file of plain tensors", *_DAMAGE):
        with open(open_regular(path), "rb") as file, zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                most = _MAX_PICKLE_BYTES if member.filename.endswith(".pkl") else member.compress_size
                if member.compress_type != zipfile.ZIP_STORED or member.file_size > most:
                    raise ValueError(f"{member.filename[:80]!r} is packed or too large")
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as cause:
            expected, got = "tensors and plain containers only", str(cause).split("\n")[0][:200]
            raise UnsafeFileError("read", where, expected, got, "Nothing in the file was run") from cause
        if not isinstance(content, dict):
            raise ValueError(f"a {type(content).__name__} instead of a dict")
        found = {_renamed(content, name): value for name, value in islice(_flat(content, ()), MAX_FIELDS)}
        for name, one in found.items():
            if isinstance(one, torch.Tensor):
                is_plain = one.device.type == "cpu" and one.layout == torch.strided and not one.is_quantized
                if not is_plain or one.nbytes > path.stat().st_size:  # it may repeat one value without end
                    raise ValueError(f"{name[:80]!r} is no plain tensor")
    reward = found.get("reward")
    if isinstance(reward, torch.Tensor) and reward.shape[2:] == (1,):
        found["reward"] = reward[..., 0]
    return found


def _flat(content: Any, keys: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if not isinstance(content, dict) or len(keys) > _MAX_DEPTH:
        yield "/".join(keys), content
    else:
        for key, value in content.items():
            yield from _flat(value, (*keys, str(key)))


def _renamed(content: dict[str, Any], name: str) -> str:
    """Return how a field is called here; the only part of an observation goes without a name."""
    head, _, rest = name.partition("/")
    for stored, ours in (("curr_obs", "observation"), ("next_obs", _NEXT)):
        if head == stored:
            return f"{ours}/{rest}" if rest and (rest != "states" or len(content[stored]) > 1) else ours
    return {"actions": "action", "rewards": "reward"}.get(name, name)


def _shape(block: Mapping[str, Any], path: Path) -> tuple[int, int]:
    named = [name for name in ("prev_logprobs", "reward", "action") if name in block]
    for name in named or [name for name in block if name.split("/")[0] == "observation"]:
        value = block[name]
        if isinstance(value, torch.Tensor) and value.dim() >= 2 and min(value.shape[:2]) > 0:
            return int(value.shape[0]), int(value.shape[1])
    raise CorruptFileError("read", repr(str(path)), "'prev_logprobs' or 'rewards' of [T, B, ...]", "none")


def _flags(value: Any, shape: tuple[int, int], where: str) -> Array:
    """Return flags `[T, B]`; where there is a row more for each of e epochs, the first of each is before its steps."""
    rows = len(value) if isinstance(value, torch.Tensor) and value.dim() >= 2 else 0
    epochs = rows - shape[0]
    if not rows or value.shape[1] != shape[1] or epochs < 0 or (epochs and shape[0] % epochs):
        got = str(list(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__
        raise CorruptFileError("read", where, f"flags {list(shape)}, or a row more for each epoch", got)
    flags: Array = value.reshape(rows, shape[1], -1).bool().any(-1).numpy()
    return flags if not epochs else flags.reshape(epochs, -1, shape[1])[:, 1:].reshape(shape)


def _runs(dones: Array) -> Iterator[tuple[int, int, int, int]]:
    """Yield column, number, start and stop of what lies between dones; the last of a column stops with the block."""
    for column in range(dones.shape[1]):
        stops = (np.flatnonzero(dones[:, column]) + 1).tolist()
        for number, (start, stop) in enumerate(pairwise(sorted({0, *stops, len(dones)}))):
            yield column, number, start, stop


def _is_texts(value: Any, shape: tuple[int, int]) -> bool:
    return (
        isinstance(value, list)
        and len(value) == shape[0]
        and all(isinstance(row, (list, tuple)) and len(row) == shape[1] for row in value)
        and all(isinstance(text, str) for row in value for text in row)
    )


def _is_copy(block: Mapping[str, Any], dones: Array) -> bool:
    """Return whether the observations after steps are those of the next ones, unless done; of large parts the first."""
    for name, after in block.items():
        if name.split("/")[0] == _NEXT and isinstance(after, torch.Tensor):
            now = block.get(name.removeprefix("next_"))
            if not isinstance(now, torch.Tensor) or now.shape != after.shape or now.shape[:2] != dones.shape:
                return False
            rows = slice(0, max(1, len(now) * _COMPARED_BYTES // max(1, now.nbytes)))
            same = (now[1:][rows] == after[:-1][rows]).numpy()
            if not (same.reshape(*same.shape[:2], math.prod(same.shape[2:])).all(-1) | dones[:-1][rows]).all():
                return False
    return True


def _numpy(tensor: torch.Tensor) -> Array:
    """Copy a tensor; bfloat16 as float32."""
    copied = tensor.clone(memory_format=torch.contiguous_format)
    array: Array = (copied.float() if copied.dtype == torch.bfloat16 else copied).numpy()
    return array
