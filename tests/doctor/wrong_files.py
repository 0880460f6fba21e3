"""Single defects in files: in blocks with right or wrong checksums, and in files of careless exporters.

A function writes a folder and damages it. It returns the path to open, and the trajectories that
the doctor must name; None for the whole recording.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rollout_data.blocks.block_header import ABOUT, CODECS, DATA, header_crc
from rollout_data.blocks.chunk_table import OFFSETS
from storage.core.durable_files import crc32
from tests.doctor.folders import Block, write, write_own
from tests.doctor.worlds import Rng, World, arm, walker
from tests.doctor.wrong_values import Named

Broken = tuple[Path, Named]
#: Name -> (code of the rule, function that writes the defect).
FILES: dict[str, tuple[str, Callable[[Path, Rng], Broken]]] = {}


def broken(code: str, **variants: Any) -> Any:
    """Register a defect, or one for each variant: name -> further argument."""

    def register(make: Callable[..., Broken]) -> Callable[..., Broken]:
        for suffix, extra in (variants or {"": None}).items():
            call = make if not variants else (lambda path, rng, g=extra: make(path, rng, g))
            FILES[f"{make.__name__}_{suffix}".rstrip("_")] = (code, call)
        return make

    return register


def edited_table(path: Path, change: Callable[[np.ndarray], Any]) -> None:
    """Change the fragments of a block and its checksum."""
    with h5py.File(path, "r+") as file:
        fragments = file["fragments"][()]
        change(fragments)
        file["fragments"][...] = fragments
        about = [file.attrs[name] for name in (*ABOUT, *([CODECS] if CODECS in file.attrs else []))]
        actual = list(file[DATA].values()) + list(file["final"].values())
        offsets = [item[OFFSETS][()] for item in actual if isinstance(item, h5py.Group)]
        file.attrs["header_crc"] = header_crc(fragments, file["reward_sums"][()], about, offsets)
        low, high = fragments["row"], fragments["row"] + fragments["length"]
        for table in (DATA,):  # the checksum also covers the rows that the changed table names
            for place, column in enumerate(file[table].values() if len(file[table]) == 1 else ()):
                raw = column[()]
                sums = [
                    crc32(np.ascontiguousarray(raw[a:b]).view(np.uint8))
                    for a, b in zip(low, high, strict=True)
                ]
                file[f"checksums/{table}"][:, place] = sums


def edited_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edited_parquet(path: Path, change: Callable[[dict[str, list[Any]]], Any]) -> None:
    table = pq.read_table(path)
    columns = table.to_pydict()
    change(columns)
    arrays = {
        name: pa.array(values, table.schema.field(name).type) for name, values in columns.items()
    }
    pq.write_table(pa.table(arrays).replace_schema_metadata(table.schema.metadata), path)


def flipped(path: Path, at: int, bit: int = 0x10) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= bit
    path.write_bytes(data)


def last_cut(world: World, num_blocks: int = 3) -> list[int]:
    """Return the episodes that continue in the next block."""
    stops = np.cumsum([episode.length for episode in world.episodes])
    return [
        int(np.searchsorted(stops, round(stops[-1] * k / num_blocks), "right"))
        for k in range(1, num_blocks)
    ]


def _block(path: Path, number: int) -> Path:
    return path / f"rollout_w_{number:06d}.h5"


# Structure of our own format


@broken("STR01")
def missing_block(path: Path, rng: Rng) -> Broken:
    world = walker(rng)
    target = write_own(path / "own", world)
    _block(target, 1).unlink()
    return target, set(last_cut(world))


@broken("STR01")
def gap_in_fragments(path: Path, rng: Rng) -> Broken:
    world = walker(rng)

    def edit(blocks: list[Block]) -> None:
        blocks[1].fragments["start"][0] += 3

    return write_own(path / "own", world, edit), {last_cut(world)[0]}


@broken("STR02")
def overlapping_fragments(path: Path, rng: Rng) -> Broken:
    world = walker(rng)

    def edit(blocks: list[Block]) -> None:
        blocks[1].fragments["start"][0] -= 3

    return write_own(path / "own", world, edit), {last_cut(world)[0]}


@broken("STR03", row="row", final="final_row")
def outside_its_table(path: Path, rng: Rng, name: str) -> Broken:
    target = write_own(path / "own", walker(rng))

    def change(fragments: np.ndarray) -> None:
        fragments[name][-2] += 100_000

    edited_table(_block(target, 1), change)
    return target, None


@broken("STR04")
def shared_rows(path: Path, rng: Rng) -> Broken:
    world = walker(rng)
    target = write_own(path / "own", world)
    result: list[int] = []

    def change(fragments: np.ndarray) -> None:
        fragments["row"][3] -= 5
        result.extend(fragments["trajectory"][2:4].tolist())

    edited_table(_block(target, 0), change)
    return target, set(result)


@broken("STR05")
def block_twice(path: Path, rng: Rng) -> Broken:
    target = write_own(path / "own", walker(rng))
    shutil.copy(_block(target, 1), _block(target, 7))
    return target, None


@broken("STR05")
def trajectory_twice(path: Path, rng: Rng) -> Broken:
    def edit(blocks: list[Block]) -> None:
        again = blocks[0]
        blocks.append(Block(3, again.fragments[1:3].copy(), again.rows, again.finals))

    target = write_own(path / "own", walker(rng), edit)
    return target, {1, 2}


@broken("STR06")
def blocks_of_other_fields(path: Path, rng: Rng) -> Broken:
    def edit(blocks: list[Block]) -> None:
        blocks[2].rows["action"] = blocks[2].rows["action"][:, :4]

    return write_own(path / "own", walker(rng), edit), None


@broken("STR07", dtype="dtype", shape="shape")
def metadata_fields(path: Path, rng: Rng, key: str) -> Broken:
    target = write_own(path / "own", walker(rng))
    value = {"dtype": "float64", "shape": [9]}[key]
    edited_json(target / "metadata.json", lambda content: content["fields"][0].update({key: value}))
    return target, None


# Structure of other formats


@broken("STR01")
def missing_chunk(path: Path, rng: Rng) -> Broken:
    target, number = write(path, walker(rng), "folders"), int(rng.integers(24))
    _in_chunks(target / f"trajectory_{number}", [0, 15, 30, 45])
    (target / f"trajectory_{number}" / "traj_000015_000030.pickle").unlink()
    return target, {number}


@broken("STR02")
def overlapping_chunks(path: Path, rng: Rng) -> Broken:
    target, number = write(path, walker(rng), "folders"), int(rng.integers(24))
    folder = target / f"trajectory_{number}"
    _in_chunks(folder, [0, 15, 30, 45])
    (folder / "traj_000015_000030.pickle").rename(folder / "traj_000010_000025.pickle")
    return target, {number}


def _in_chunks(folder: Path, stops: list[int]) -> None:
    (whole,) = folder.iterdir()
    content, about = pickle.loads(whole.read_bytes()), folder.stat()
    times = whole.stat().st_mtime_ns
    whole.unlink()
    stops = [*stops, len(content["actions"])]
    for start, stop in pairwise(stops):
        chunk = folder / f"traj_{start:06d}_{stop:06d}.pickle"
        chunk.write_bytes(
            pickle.dumps({name: values[start:stop] for name, values in content.items()}, 4)
        )
        os.utime(chunk, ns=(times, times))
    os.utime(folder, ns=(about.st_mtime_ns, about.st_mtime_ns))


@broken("STR03")
def range_outside(path: Path, rng: Rng) -> Broken:
    target = write(path, arm(rng), "lerobot")

    def change(columns: dict[str, list[Any]]) -> None:
        columns["dataset_to_index"][-1] += 40
        columns["length"][-1] += 40

    edited_parquet(target / "meta/episodes/chunk-000/file-000.parquet", change)
    return target, {23}


@broken("STR04")
def ranges_share_rows(path: Path, rng: Rng) -> Broken:
    target = write(path, arm(rng), "lerobot")

    def change(columns: dict[str, list[Any]]) -> None:
        columns["dataset_from_index"][4] -= 6

    edited_parquet(target / "meta/episodes/chunk-000/file-000.parquet", change)
    return target, {3, 4}


@broken("STR05")
def episode_twice(path: Path, rng: Rng) -> Broken:
    target = write(path, arm(rng), "lerobot")

    def change(columns: dict[str, list[Any]]) -> None:
        for values in columns.values():
            values.append(values[6])

    edited_parquet(target / "meta/episodes/chunk-000/file-000.parquet", change)
    return target, {6}


@broken("STR05")
def name_and_content(path: Path, rng: Rng) -> Broken:
    target, number = write(path, walker(rng), "minari"), int(rng.integers(24))
    with h5py.File(target / "data/main_data.hdf5", "r+") as file:
        file[f"episode_{number}"].attrs["id"] = (number + 5) % 24
    return target, {number}


@broken("STR06", lacks="lacks", dtype="dtype", shape="shape")
def demo_of_other_fields(path: Path, rng: Rng, kind: str) -> Broken:
    target, number = write(path, arm(rng), "robomimic"), int(rng.integers(1, 24))
    with h5py.File(target, "r+") as file:
        demo = file[f"data/demo_{number}"]
        values = demo["obs/joint_pos"][()]
        for group in ("obs", "next_obs"):
            del demo[f"{group}/joint_pos"]
            if kind != "lacks":
                demo[f"{group}/joint_pos"] = (
                    values.astype(np.float64) if kind == "dtype" else values[:, :6]
                )
    return target, {number}


@broken("STR06")
def episode_of_other_fields(path: Path, rng: Rng) -> Broken:
    target, number = write(path, walker(rng), "minari"), int(rng.integers(1, 24))
    with h5py.File(target / "data/main_data.hdf5", "r+") as file:
        item = file[f"episode_{number}"]
        values = item["observations"][()]
        del item["observations"]
        item["observations"] = values[:, :11]
    return target, {number}


@broken("STR07", lerobot="lerobot", minari="minari")
def description(path: Path, rng: Rng, form: str) -> Broken:
    target = write(path, walker(rng), form)
    if form == "lerobot":
        edited_json(
            target / "meta/info.json", lambda info: info["features"]["action"].update(shape=[9])
        )
    else:
        space = json.dumps(
            {"type": "Box", "dtype": "float32", "shape": [4], "low": [-1.0] * 4, "high": [1.0] * 4}
        )
        edited_json(target / "data/metadata.json", lambda about: about.update(action_space=space))
    return target, None


@broken("STR08", total=("data", "total"), num_samples=("data/demo_5", "num_samples"))
def counts_of_demos(path: Path, rng: Rng, place: tuple[str, str]) -> Broken:
    target = write(path, arm(rng), "robomimic")
    with h5py.File(target, "r+") as file:
        file[place[0]].attrs[place[1]] += 7
    return target, {5} if "5" in place[0] else None


@broken(
    "STR08",
    minari_episodes=("minari", "total_episodes"),
    minari_steps=("minari", "total_steps"),
    lerobot_frames=("lerobot", "total_frames"),
    lerobot_episodes=("lerobot", "total_episodes"),
)
def totals(path: Path, rng: Rng, place: tuple[str, str]) -> Broken:
    form, key = place
    target = write(path, walker(rng), form)
    name = "data/metadata.json" if form == "minari" else "meta/info.json"
    edited_json(target / name, lambda about: about.update({key: about[key] + 3}))
    return target, None


@broken("STR08")
def steps_of_an_episode(path: Path, rng: Rng) -> Broken:
    target, number = write(path, walker(rng), "minari"), int(rng.integers(24))
    with h5py.File(target / "data/main_data.hdf5", "r+") as file:
        file[f"episode_{number}"].attrs["total_steps"] += 2
    return target, {number}


@broken("STR08")
def frame_index(path: Path, rng: Rng) -> Broken:
    target, number = write(path, arm(rng), "lerobot"), int(rng.integers(24))

    def change(columns: dict[str, list[Any]]) -> None:
        columns["frame_index"] = [column + 1 for column in columns["frame_index"]]

    edited_parquet(target / f"data/chunk-000/file-{number:03d}.parquet", change)
    return target, {number}


@broken("STR08", lerobot_v21=None)
def length_of_an_episode(path: Path, rng: Rng, _: Any) -> Broken:
    target, number = write(path, arm(rng), "lerobot_v21"), int(rng.integers(24))
    lines = [json.loads(line) for line in (target / "meta/episodes.jsonl").read_text().splitlines()]
    lines[number]["length"] += 5
    (target / "meta/episodes.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return target, {number}


@broken("STR08")
def unlike_columns(path: Path, rng: Rng) -> Broken:
    target, number = write(path, arm(rng), "robomimic"), int(rng.integers(1, 24))
    with h5py.File(target, "r+") as file:
        demo = file[f"data/demo_{number}"]
        values = demo["rewards"][()]
        del demo["rewards"]
        demo["rewards"] = values[:-2]
    return target, {number}


@broken("STR10", overlap="overlap", nothing="nothing")
def masks(path: Path, rng: Rng, kind: str) -> Broken:
    target = write(path, arm(rng), "robomimic")
    with h5py.File(target, "r+") as file:
        train, valid = list(range(20)), list(range(20, 24))
        valid += [3, 4] if kind == "overlap" else [77]
        for name, numbers in (("train", train), ("valid", valid)):
            file[f"mask/{name}"] = np.array([f"demo_{number}" for number in numbers], "S")
    return target, {3, 4} if kind == "overlap" else None


@broken("STR10")
def splits(path: Path, rng: Rng) -> Broken:
    target = write(path, arm(rng), "lerobot")
    edited_json(
        target / "meta/info.json",
        lambda info: info.update(splits={"train": "0:20", "val": "18:24"}),
    )
    return target, {18, 19}


# Ends in files


@broken("END06")
def both_ends(path: Path, rng: Rng) -> Broken:
    target, number = write(path, walker(rng), "minari"), int(rng.integers(24))
    with h5py.File(target / "data/main_data.hdf5", "r+") as file:
        for name in ("terminations", "truncations"):
            file[f"episode_{number}/{name}"][-1] = True
    return target, {number}


@broken("END02", minari="minari", robomimic="robomimic", lerobot="lerobot", folders="folders")
def end_inside(path: Path, rng: Rng, form: str) -> Broken:
    world, number = arm(rng), int(rng.integers(23))
    target = write(path, world, form)
    if form == "minari":
        with h5py.File(target / "data/main_data.hdf5", "r+") as file:
            file[f"episode_{number}/terminations"][20] = True
    elif form == "robomimic":
        with h5py.File(target, "r+") as file:
            file[f"data/demo_{number}/dones"][20] = 1
            file[f"data/demo_{number}/dones"][-1] = 1
    elif form == "folders":
        (chunk,) = (target / f"trajectory_{number}").iterdir()
        content = pickle.loads(chunk.read_bytes())
        content["dones"][20] = 1
        times = chunk.stat().st_mtime_ns
        chunk.write_bytes(pickle.dumps(content, 4))
        os.utime(chunk, ns=(times, times))
    else:
        for place, item in enumerate(world.episodes):
            done = [
                at == item.length - 1 or (place == number and at == 20) for at in range(item.length)
            ]
            _with_column(
                target / f"data/chunk-000/file-{place:03d}.parquet", "next.done", pa.array(done)
            )
        about = {"dtype": "bool", "shape": [1], "names": None}
        edited_json(
            target / "meta/info.json", lambda info: info["features"].update({"next.done": about})
        )
    return target, {number}


def _with_column(path: Path, name: str, values: Any) -> None:
    table = pq.read_table(path)
    if name in table.column_names:
        table = table.drop_columns([name])
    pq.write_table(
        table.append_column(name, values).replace_schema_metadata(table.schema.metadata), path
    )


@broken("END09", current="current", other="other", robomimic="robomimic")
def next_observations(path: Path, rng: Rng, kind: str) -> Broken:
    world = walker(rng)
    target = write(path, world, "robomimic" if kind == "robomimic" else "d4rl")
    with h5py.File(target, "r+") as file:
        if kind == "current":
            file["next_observations"][...] = file["observations"][()]
        elif kind == "other":  # all rows of the file are shifted by one, across ends
            rows = file["observations"][()]
            file["next_observations"][...] = np.concatenate([rows[1:], rows[:1]])
        else:
            for number in (3, 9):
                rows = file[f"data/demo_{number}/next_obs/state"]
                rows[...] = rows[()] + rng.normal(0, 0.1, rows.shape)
    return target, {3, 9} if kind == "robomimic" else None
