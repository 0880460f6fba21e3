"""Folders of trajectories: `trajectory_index.json` and `metadata.json` beside the files.

One rule: the index is one file, replaced in one step, and names exactly what is there; a checkpoint is a folder that is
replaced as a whole, so that a crash leaves the old one or the new one. Names and keys of both files are those of
existing trajectory folders, with more keys of ours, so that each side reads the other's. No path stands in them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from storage.core.durable import existing_folder, replace_file, replace_folder
from storage.errors import CorruptFileError, DataFileError, RolloutDataWarning, SchemaError
from storage.saving.plain_files import CHECKSUM, json_checksum, read_json

from ..format.schema import RowLayout
from ..index.index import Block
from .files import (
    FORMATS,
    file_name,
    find_files,
    id_in_name,
    link_file,
    naming,
    open_block,
    read_rows,
    read_trajectory,
    write_trajectory,
)
from .rows import Rows, layout_of

INDEX_NAME, METADATA_NAME = "trajectory_index.json", "metadata.json"
#: What an earlier system called the index.
LEGACY_INDEX_NAME = "trajector_index.json"
_FORMAT, _VERSION = "rollout-data trajectories", 1
#: Of some millions of trajectories.
_MAX_INDEX_BYTES = 1 << 30
#: The names of files have room for 18 digits.
_MAX_COUNTER = 10**18


class MissingTrajectoriesError(DataFileError, FileNotFoundError):
    """There is no folder of trajectories at the path."""

    __str__ = DataFileError.__str__


@dataclass(eq=False)
class Entry:
    """A trajectory that is live.

    Attributes:
        trajectory_id: Its number; never used again.
        layout: What its rows hold.
        shape: (T, B).
        info: Its leaves that are no tensors, by flat name.
        uuid: Tells it from all others, also of other runs.
        weights_version: Number of the policy that acted, or None.
        path: Its file, once it has one.
        rows: Its rows until the file is written.
        block: Where the rows lie in the file, if that is a block.
        place: Position among all that were ever live in a buffer.
    """

    trajectory_id: int
    layout: RowLayout
    shape: tuple[int, int]
    info: dict[str, Any]
    uuid: str = field(default_factory=lambda: uuid.uuid4().hex)
    weights_version: int | None = None
    path: Path | None = None
    rows: Rows | None = None
    block: Block | None = None
    place: int = 0

    @property
    def num_samples(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def weights_id(self) -> str:
        """The name of the policy that acted: `model_weights_id`, or else the version."""
        return str(self.info.get("model_weights_id", "" if self.weights_version is None else self.weights_version))

    def is_recent(self, min_weights_version: int | None) -> bool:
        """Tell whether the policy that acted is this version or a later one; False if it is not known."""
        if min_weights_version is None:
            return True
        return self.weights_version is not None and self.weights_version >= min_weights_version

    def as_filed(self) -> Entry:
        """Give what the folder of its file says of it: under the id of the file, if this one has got another."""
        assert self.path is not None
        filed_id = id_in_name(self.path)
        return self if filed_id == self.trajectory_id else replace(self, trajectory_id=filed_id)

    def put_file(self, target: Path, rows: Rows | None = None) -> None:
        """Link the file to another place, or write one there: of `rows`, or of its own if it names another id."""
        if self.block is not None and self.block.sequence != self.trajectory_id:
            rows = read_rows(self.layout, self.block)
        if rows is not None:
            write_trajectory(target, self.trajectory_id, self.layout, rows, self.shape, self.info)
        else:
            assert self.path is not None
            with naming(self.trajectory_id, self.path):
                link_file(self.path, target)

    def to_json(self) -> dict[str, Any]:
        return {
            "num_samples": self.num_samples,
            "trajectory_id": self.trajectory_id,
            "max_episode_length": self.info.get("max_episode_length", self.shape[0]),
            "shape": list(self.shape),
            "model_weights_id": self.weights_id,
            "uuid": self.uuid,
            "weights_version": self.weights_version,
            "info": self.info,
        }


@dataclass(frozen=True)
class Counters:
    """What a buffer must know besides its trajectories."""

    seed: int
    next_id: int
    file_format: str
    rng: torch.Tensor | None


def save_to(folder: Path, entries: list[Entry], counters: Counters, rows_of: Callable[[Entry], Rows]) -> None:
    """Write entries and their index into `folder`, in the place of an earlier checkpoint."""
    own = {INDEX_NAME, LEGACY_INDEX_NAME, METADATA_NAME}
    if folder.is_dir():
        own |= {path.name for path in find_files(folder.resolve()).values()}
    with replace_folder(folder, own) as made:
        for entry in entries:
            suffix = counters.file_format if entry.path is None else entry.path.suffix[1:]
            target = made / file_name(entry.trajectory_id, entry.weights_id, suffix)
            entry.put_file(target, rows_of(entry) if entry.path is None else None)
        write_index(made, entries, counters)


def write_index(folder: Path, entries: Iterable[Entry], counters: Counters) -> None:
    """Write both files of a folder; the index, which is the truth, in one step."""
    listed = list(entries)
    summary = {
        "trajectory_format": counters.file_format,
        "size": len(listed),
        "total_samples": sum(entry.num_samples for entry in listed),
        "trajectory_counter": counters.next_id,
        "seed": counters.seed,
    }
    assert counters.rng is not None
    index = {
        "trajectory_index": {str(entry.trajectory_id): entry.to_json() for entry in listed},
        "trajectory_id_list": [entry.trajectory_id for entry in listed],
        "format": _FORMAT,
        "version": _VERSION,
        "counters": {**summary, "rng": base64.b64encode(counters.rng.numpy().tobytes()).decode()},
    }
    for name, content in ((INDEX_NAME, {**index, CHECKSUM: json_checksum(index)}), (METADATA_NAME, summary)):
        with replace_file(folder / name) as new:
            new.write_text(json.dumps(content), encoding="utf-8")


def check_json(info: Mapping[str, Any], where: str) -> None:
    """Raise unless the leaves that are no tensors can stand in the index."""
    for name, leaf in info.items():
        try:
            json.dumps(leaf)
        except (TypeError, ValueError, RecursionError) as cause:
            raise SchemaError("store the leaf", f"{name!r} {where}", "what JSON can hold", str(cause)) from cause


def read_folder(folder: Path, trusted: bool, verify: bool) -> tuple[list[Entry], Counters]:
    """Read what a folder lists, oldest first; its `rank_<r>` folders, if it has no index of its own.

    Entries without a file are skipped, with one warning. An id that two ranks have gets a new one.

    Raises:
        MissingTrajectoriesError: There is no index.
        CorruptFileError: The index, or a file, is damaged or contradicts the other.
    """
    folder = existing_folder(folder)
    folders = [folder]
    if not any((folder / name).is_file() for name in (INDEX_NAME, LEGACY_INDEX_NAME)):
        ranks = [path for path in folder.glob("rank_*") if path.name[5:].isdigit()] if folder.is_dir() else []
        folders = sorted(ranks, key=lambda path: int(path.name[5:]))
        if not folders:
            raise MissingTrajectoriesError("load trajectories from", repr(str(folder)), INDEX_NAME, "none")
    found = [_read_one(one, trusted, verify) for one in folders]
    entries = [entry for listed, _ in found for entry in listed]
    next_id = max([counters.next_id for _, counters in found] + [entry.trajectory_id + 1 for entry in entries])
    taken: set[int] = set()
    for entry in entries:
        if entry.trajectory_id in taken:
            entry.trajectory_id, next_id = next_id, next_id + 1
        taken.add(entry.trajectory_id)
    first = found[0][1]
    return entries, Counters(first.seed, next_id, first.file_format, first.rng)


def _read_one(folder: Path, trusted: bool, verify: bool) -> tuple[list[Entry], Counters]:
    name = INDEX_NAME if (folder / INDEX_NAME).is_file() else LEGACY_INDEX_NAME
    about = folder / METADATA_NAME
    try:
        index = read_json(folder / name, _MAX_INDEX_BYTES)
        is_ours = index.get("format") == _FORMAT
        summary = dict((index.get("counters") if is_ours else about.exists() and read_json(about)) or {})
        items = index["trajectory_index"]
        ids = list(dict.fromkeys(int(one) for one in index["trajectory_id_list"]))  # each once
        file_format = str(summary.get("trajectory_format"))
        file_format = file_format if file_format in FORMATS else FORMATS[0]
        seed, next_id = (int(summary.get(name, 0)) for name in ("seed", "trajectory_counter"))
        counters = Counters(seed, next_id, file_format, _rng_of(summary.get("rng")))
        if counters.next_id >= _MAX_COUNTER:
            raise ValueError(f"a trajectory_counter of {counters.next_id}")
        files, entries, missing = find_files(folder), [], []
        for one in ids:
            path = next((files[one, each] for each in (file_format, *FORMATS) if (one, each) in files), None)
            if path is None:
                missing.append(one)
            else:
                entries.append(_read_entry(path, one, items[str(one)], trusted, verify))
    except (FileNotFoundError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as cause:
        if isinstance(cause, DataFileError):
            raise
        got = f"{type(cause).__name__}: {cause}"
        raise CorruptFileError("load trajectories from", repr(str(folder / name)), "an intact index", got) from cause
    if missing:
        listed = ", ".join(map(str, missing[:10]))
        text = f"{len(missing)} of {len(ids)} trajectories in the index of {str(folder)!r}"
        warnings.warn(f"{text} have no file and are left out: {listed}", RolloutDataWarning, stacklevel=4)
    return entries, counters


def _read_entry(path: Path, trajectory_id: int, item: Mapping[str, Any], trusted: bool, verify: bool) -> Entry:
    (num_steps, num_envs), num_samples = map(int, item["shape"][:2]), int(item["num_samples"])
    shape, block = (num_steps, num_envs), None
    if min(shape) < 1 or num_steps * num_envs != num_samples:
        expected, got = f"{num_samples} samples as its index says", f"shape {list(shape)}"
        raise CorruptFileError("read the trajectory", repr(str(path)), expected, got)
    if path.suffix == ".h5":
        layout, block = open_block(path, trajectory_id, shape, verify)
        info = dict(item.get("info", {}))
    else:
        trajectory = read_trajectory(path, trusted)
        if trajectory.shape != shape:
            expected, got = (f"shape {list(one)}" for one in (shape, trajectory.shape))
            raise CorruptFileError("read the trajectory", repr(str(path)), expected, got)
        layout, info = layout_of(trajectory.tensors, f"of {str(path)!r}"), trajectory.info
    version, name = item.get("weights_version"), str(item.get("uuid") or uuid.uuid4().hex)
    version = None if version is None else int(version)
    return Entry(trajectory_id, layout, shape, info, name, version, path, block=block)


def _rng_of(text: Any) -> torch.Tensor | None:
    if text is None:
        return None
    state = torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
    try:
        torch.Generator().set_state(state)
    except RuntimeError as cause:
        raise ValueError(f"the state of a generator: {cause}") from cause
    return state


def folded(rng: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """Derive one rank's random state from a common one."""
    digest = hashlib.sha256(rng.numpy().tobytes() + f"{rank} of {world_size}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1).get_state()
