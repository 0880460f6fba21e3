"""Write recordings of `worlds.py` as block files, or convert them to other formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import rollout_data
from rollout_data.blocks.annotation_table import EPISODES
from rollout_data.blocks.block_content import ArrayRows, BlockContent
from rollout_data.blocks.block_header import (
    DATA,
    FINAL,
    FIRST,
    FRAGMENT_DTYPE,
    OPEN,
    TERMINATED,
    TRUNCATED,
    layouts_of,
)
from rollout_data.blocks.folder_metadata import Metadata, publish_metadata
from rollout_data.blocks.write_block import write_block
from storage.core.fields import Field, Schema
from tests.doctor.worlds import World

FLAGS = {
    "terminated": TERMINATED,
    "truncated": TRUNCATED,
    "both": TERMINATED | TRUNCATED,
    "open": OPEN,
}
_START_NS = 1_700_000_000_000_000_000


@dataclass
class Block:
    """A block before it is written. Tests change it to make it wrong.

    Attributes:
        fragments: Of `FRAGMENT_DTYPE`.
        rows: Field -> `[num_rows, ...]`.
        finals: Observation field -> `[num_finals, ...]`.
        notes: (number of the trajectory, notes).
        sums: `[F, 1]` float64; None to compute them from the rows.
    """

    sequence: int
    fragments: np.ndarray
    rows: dict[str, np.ndarray]
    finals: dict[str, np.ndarray]
    notes: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    sums: np.ndarray | None = None
    writer: str = "w"
    codecs: dict[str, str] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    def schema(self) -> Schema:
        codecs = {name: self.codecs.get(name, "raw") for name in self.rows}
        kinds = {
            name: "float32" if codecs[name] == "normalized_image" else str(tensor.dtype)
            for name, tensor in self.rows.items()
        }
        return Schema(
            Field(name, tensor.shape[1:], kinds[name], codecs[name])
            for name, tensor in self.rows.items()
        )

    def write(self, path: Path) -> Path:
        schema = self.schema()
        tables: dict[str, dict[str, ArrayRows]] = {DATA: {}, FINAL: {}}
        for table, values in ((DATA, self.rows), (FINAL, self.finals)):
            for name, column in layouts_of(schema)[table].columns.items():
                num_rows = len(next(iter(values.values()))) if values else 0
                rows = np.zeros(num_rows, layouts_of(schema)[table].numpy_dtype(column))
                for item in column.offsets if num_rows else ():
                    rows[item] = values[item]
                tables[table][name] = ArrayRows(
                    rows.view(np.uint8).reshape(num_rows, column.row_bytes)
                )
        notes = {
            EPISODES: [(number, json.dumps(metadata).encode()) for number, metadata in self.notes]
        }
        content = BlockContent(
            schema,
            self.writer,
            self.sequence,
            self.fragments,
            self.reward_sums(),
            tables,
            self.errors,
            notes=notes,
        )
        return write_block(path, content, durable=False)

    def reward_sums(self) -> np.ndarray:
        if self.sums is not None or "reward" not in self.rows:
            return np.zeros((len(self.fragments), 0)) if self.sums is None else self.sums
        reward = self.rows["reward"].astype(np.float64)
        bounds = [
            (fragment["row"], fragment["row"] + fragment["length"]) for fragment in self.fragments
        ]
        return np.array([[reward[low:high].sum()] for low, high in bounds]).reshape(-1, 1)


def blocks_of(world: World, num_blocks: int = 3, writer: str = "w") -> list[Block]:
    """Return the rows of all episodes in blocks of equal size. Blocks end within episodes."""
    total = sum(episode.length for episode in world.episodes)
    bounds = [round(total * number / num_blocks) for number in range(num_blocks + 1)]
    flat = {name: np.concatenate(list(world.arrays(name))) for name in world[0].fields}
    actual, number, frame, at = [], 0, 0, 0
    for sequence, (low, high) in enumerate(pairwise(bounds)):
        fragments, finals, notes = [], [], []
        while at < high:
            item = world[number]
            count = min(item.length - frame, high - at)
            is_last = frame + count == item.length
            final = len(finals) if is_last and item.final is not None else -1
            finals += [item.final] if final >= 0 else []
            flags = (0 if frame else FIRST) | (FLAGS[item.end] if is_last else 0)
            time_ns = _START_NS + (at + count) * 50_000_000
            fragments.append((number, item.env, flags, frame, count, at - low, final, time_ns, 3))
            notes += [(number, item.said)] if is_last and item.said else []
            at, frame = at + count, frame + count
            if is_last:
                number, frame = number + 1, 0
        joined = {
            name: np.stack([item[name] for item in finals])
            for name in (finals[0] if finals else ())
        }
        rows = {name: values[low:high] for name, values in flat.items()}
        actual.append(
            Block(sequence, np.array(fragments, FRAGMENT_DTYPE), rows, joined, notes, writer=writer)
        )
    return actual


def write_own(
    path: Path, world: World, edit: Callable[[list[Block]], Any] | None = None, num_blocks: int = 3
) -> Path:
    """Write block files with their metadata. `edit` changes the blocks first."""
    path.mkdir(parents=True, exist_ok=True)
    blocks = blocks_of(world, num_blocks)
    schema = blocks[0].schema()
    if edit is not None:
        edit(blocks)
        schema = blocks[0].schema()
    publish_metadata(path, Metadata.of_schema(schema, world.metadata), "w", durable=False)
    for block in blocks:
        block.write(path)
    return path


#: Name -> format of `convert`, name of the file or folder, and options.
FOREIGN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "robomimic": ("robomimic", "demos.hdf5", {"next_obs": True}),
    "minari": ("minari", "set", {}),
    "lerobot": ("lerobot", "set", {"version": "v3.0", "fps": 20}),
    "lerobot_v21": ("lerobot", "set", {"version": "v2.1", "fps": 20}),
    "d4rl": ("d4rl", "set.hdf5", {}),
    "folders": ("trajectory-folders", "set", {"env": "Arm", "policy": "p"}),
    "isaaclab": ("isaaclab", "demos.hdf5", {}),
}
#: All formats of `write`.
FORMATS = ("own", *FOREIGN)


def write(path: Path, world: World, form: str = "own", **options: Any) -> Path:
    """Write a recording below a new folder. Return the path to open."""
    if form == "own":
        return write_own(path / "own", world)
    source = write_own(path / "source", world)
    kind, name, value = FOREIGN[form]
    target = path / name
    rollout_data.convert(source, target, kind, progress=False, **{**value, **options})
    return target
