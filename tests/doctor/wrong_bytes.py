"""Single defects of statistics, files and provenance. See `wrong_files.py`."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from rollout_data.blocks.block_header import DATA, read_header
from tests.doctor.folders import Block, write, write_own
from tests.doctor.worlds import Rng, arm, cameras, walker
from tests.doctor.wrong_files import Broken, broken, edited_json, edited_parquet, flipped, last_cut


def _block(path: Path, number: int) -> Path:
    return path / f"rollout_w_{number:06d}.h5"


# Pictures that do not decode


@broken("IMG09")
def undecodable(path: Path, rng: Rng) -> Broken:
    target, number = write(path, cameras(rng), "lerobot"), int(rng.integers(1, 10))

    def change(columns: dict[str, list[Any]]) -> None:
        row = columns["observation.images.front"][12]
        row["bytes"] = row["bytes"][: len(row["bytes"]) // 2]

    edited_parquet(target / f"data/chunk-000/file-{number:03d}.parquet", change)
    return target, {number}


@broken("IMG09", cut="cut", empty="empty", gone="gone")
def short_video(path: Path, rng: Rng, kind: str) -> Broken:
    target, number = (
        write(path, cameras(rng, 8, size=64), "lerobot", video="h264"),
        int(rng.integers(1, 8)),
    )
    (video,) = [path for path in target.rglob(f"file-{number:03d}.mp4") if "front" in str(path)]
    if kind == "gone":
        video.unlink()
    else:
        video.write_bytes(video.read_bytes()[: video.stat().st_size // 3] if kind == "cut" else b"")
    return target, {number}


# Statistics


@broken("STA01")
def reward_sums(path: Path, rng: Rng) -> Broken:
    world = walker(rng)
    result: list[int] = []

    def edit(blocks: list[Block]) -> None:
        blocks[1].sums = blocks[1].reward_sums()
        blocks[1].sums[2] *= 1.2
        result.append(int(blocks[1].fragments["trajectory"][2]))

    return write_own(path / "own", world, edit), set(result)


@broken("STA01")
def attributes_of_episodes(path: Path, rng: Rng) -> Broken:
    world, number = walker(rng), int(rng.integers(24))
    target = write(path, world, "minari")
    with h5py.File(target / "data/main_data.hdf5", "r+") as file:
        for place in range(24):
            rewards = file[f"episode_{place}/rewards"][()]
            file[f"episode_{place}"].attrs["rewards_sum"] = rewards.sum() * (
                1.3 if place == number else 1
            )
    return target, {number}


@broken("STA01")
def statistics_of_episodes(path: Path, rng: Rng) -> Broken:
    target, number = write(path, arm(rng), "lerobot_v21"), int(rng.integers(24))
    lines = [
        json.loads(line) for line in (target / "meta/episodes_stats.jsonl").read_text().splitlines()
    ]
    about = lines[number]["stats"]["action"]
    about["mean"] = [item + 0.5 for item in about["mean"]]
    (target / "meta/episodes_stats.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return target, {number}


@broken("STA02", mean=("mean", 3.0, 1.0), std=("std", 0.0, 5.0), max=("max", 0.0, 0.2))
def statistics(path: Path, rng: Rng, change: tuple[str, float, float]) -> Broken:
    target, (key, added, factor) = write(path, arm(rng), "lerobot"), change

    def edit(content: dict[str, Any]) -> None:
        values = content["action"][key]
        content["action"][key] = [value * factor + added for value in values]

    edited_json(target / "meta/stats.json", edit)
    return target, None


# Damage


@broken("FIL01", data=DATA, final="final")
def flipped_byte(path: Path, rng: Rng, table: str) -> Broken:
    target = write_own(path / "own", walker(rng))
    header = read_header(_block(target, 1))
    offset, num_rows = header.locations[table]["frames"]
    row, layout = int(rng.integers(num_rows)), header.layouts[table]
    flipped(_block(target, 1), offset + row * layout.columns["frames"].row_bytes + 1)
    fragments = header.fragments
    at = fragments["final_row"] == row
    if table == DATA:
        at = (fragments["row"] <= row) & (row < fragments["row"] + fragments["length"])
    return target, set(fragments["trajectory"][at].tolist())


@broken("FIL01")
def flipped_note(path: Path, rng: Rng) -> Broken:
    target = write_own(path / "own", arm(rng))
    header = read_header(_block(target, 1))
    table = header.notes["episodes"]
    flipped(_block(target, 1), int(table.bounds[2]) + 5)
    return target, {int(table.keys[2])}


@broken("FIL02", table="fragments", attribute="schema")
def flipped_header(path: Path, rng: Rng, kind: str) -> Broken:
    world = walker(rng)
    target = write_own(path / "own", world)
    data = _block(target, 1).read_bytes()
    if kind == "schema":
        at = data.find(b'"observation"') + 3
    else:
        at = data.find(read_header(_block(target, 1)).fragments.tobytes()) + 200
    flipped(_block(target, 1), at)
    first, second = last_cut(world)
    return target, set(range(first, second + 1))


@broken("FIL03", half="half", empty="empty", text="text")
def unreadable_block(path: Path, rng: Rng, kind: str) -> Broken:
    target = write_own(path / "own", walker(rng))
    data = _block(target, 2).read_bytes()
    _block(target, 2).write_bytes(
        {"half": data[: len(data) // 2], "empty": b"", "text": b"no block\n" * 99}[kind]
    )
    return target, None


@broken("FIL03", robomimic="robomimic", folders="folders", lerobot="lerobot_v21")
def cut_file(path: Path, rng: Rng, form: str) -> Broken:
    target, number = write(path, walker(rng), form), int(rng.integers(1, 24))
    file = target
    if form == "folders":
        (file,) = (target / f"trajectory_{number}").iterdir()
    elif form == "lerobot_v21":
        file = target / f"data/chunk-000/episode_{number:06d}.parquet"
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])
    os.utime(file, (1e9 + number, 1e9 + number))  # no writer is running
    return target, None if form == "robomimic" else {number}


@broken("FIL04", temporary=".tmp_rollout_x_000004.h5", journal=".rollout_x.journal")
def leftovers(path: Path, rng: Rng, name: str) -> Broken:
    target = write_own(path / "own", walker(rng))
    (target / name).write_bytes(b"rdjournl" + bytes(40))
    return target, None


@broken("FIL05", file="file", link="link")
def strangers(path: Path, rng: Rng, kind: str) -> Broken:
    target = write_own(path / "own", walker(rng))
    if kind == "file":
        (target / "thesis_final_v3.docx").write_bytes(b"PK")
    else:
        (path / "elsewhere").mkdir()
        (target / "more").symlink_to(path / "elsewhere")
    return target, None


@broken("FIL06", gone="gone", cut="cut", list="list")
def metadata_file(path: Path, rng: Rng, kind: str) -> Broken:
    target = write_own(path / "own", walker(rng))
    file = target / "metadata.json"
    if kind == "gone":
        file.unlink()
    else:
        file.write_text(file.read_text()[:80] if kind == "cut" else "[1, 2]")
    return target, None


@broken("FIL06", minari="data/metadata.json", lerobot="meta/tasks.parquet")
def metadata_of_others(path: Path, rng: Rng, name: str) -> Broken:
    form = "minari" if "data" in name else "lerobot"
    target = write(path, arm(rng), form)
    if form == "minari":
        (target / name).write_text((target / name).read_text()[:60])
    else:
        (target / name).unlink()
    return target, None


@broken("FIL07")
def lossy(path: Path, rng: Rng) -> Broken:
    world = walker(rng)
    for episode in world.episodes:
        episode.fields["observation/state"], episode.final = episode.fields.pop("observation"), None
        near = 0.5 + 0.003 * np.tanh(episode.fields["observation/state"][:, :4])
        episode.fields["observation/distance"] = (near * 255).astype(np.uint8)

    def edit(blocks: list[Block]) -> None:
        for block in blocks:
            block.codecs, block.errors = (
                {"observation/distance": "normalized_image"},
                {"observation/distance": 0.004},
            )

    return write_own(path / "own", world, edit), None


class _Runs:
    """A hostile pickle: loading it makes a folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


@broken("FIL08")
def hostile_pickle(path: Path, rng: Rng) -> Broken:
    target, number = write(path, walker(rng), "folders"), int(rng.integers(24))
    (chunk,) = (target / f"trajectory_{number}").iterdir()
    content = pickle.loads(chunk.read_bytes())
    content["values"] = _Runs(path / "was_run")
    chunk.write_bytes(pickle.dumps(content, 4))
    return target, {number}


@broken("FIL08")
def external_link(path: Path, rng: Rng) -> Broken:
    target, number = write(path, walker(rng), "robomimic"), int(rng.integers(1, 24))
    with h5py.File(target, "r+") as file:
        del file[f"data/demo_{number}/rewards"]
        file[f"data/demo_{number}/rewards"] = h5py.ExternalLink("/etc/passwd", "/rewards")
    return target, {number}


# Provenance


@broken("PRV01")
def unknown_origin(path: Path, rng: Rng) -> Broken:
    world = walker(rng)
    world.metadata = {}
    return write_own(path / "own", world), None


_SECRETS = {
    "token": {"wandb": {"api_key": "hf_" + "aB3dE5fG7hI9" * 3}},
    "mail": {"contact": "jane.doe@robots.example.org"},
    "home": {"config": {"checkpoint": "/".join(["", "home", "jane", "runs", "model.pt"])}},
}


@broken("PRV02", **_SECRETS)
def secrets(path: Path, rng: Rng, said: dict[str, Any]) -> Broken:
    world = walker(rng)
    world.metadata |= said
    return write_own(path / "own", world), None


@broken("PRV02")
def secret_of_an_exporter(path: Path, rng: Rng) -> Broken:
    target = write(path, arm(rng), "lerobot")
    edited_json(
        target / "meta/info.json",
        lambda info: info.update(recorded_by="jane.doe@robots.example.org"),
    )
    return target, None
