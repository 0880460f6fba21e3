"""Trajectory folders for tests: a naive writer, and a reader that joins each trajectory."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollout_data.blocks.block_header import DATA, FIRST, OPEN, TERMINATED, TRUNCATED, layouts_of
from rollout_data.formats.trajectory_folders.trajectory_folder import (
    FolderScan,
    read_chunk_rows,
    scan_trajectory_folder,
)
from storage.errors import DataFileError

KINDS = TERMINATED | TRUNCATED | OPEN


class NaiveFolder:
    """A naive writer of trajectory folders. Each value encodes its field, trajectory and frame."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.time_ns = 10**18

    def chunk(
        self,
        folder: int | str,
        start: int,
        stop: int,
        *,
        done: bool = False,
        name: str | None = None,
        drop: tuple[str, ...] = (),
        protocol: int = 4,
        **overrides: Any,
    ) -> Path:
        """Write frames `start:stop`. Each call is a second later than the previous one."""
        number = folder if isinstance(folder, int) else 0
        arrays: dict[str, Any] = {
            "observations": values(1, number, start, stop, 3),
            "privileged_observations": values(2, number, start, stop, 2),
            "actions": values(3, number, start, stop, 2),
            "rewards": values(4, number, start, stop, 1),
            "dones": np.zeros((stop - start, 1), np.uint8),
            "values": np.zeros((stop - start, 1), np.float32),
            "timeouts": np.zeros(stop - start, bool),
        }
        arrays["dones"][-1:] = done
        arrays = {key: value for key, value in {**arrays, **overrides}.items() if key not in drop}
        path = self.data_dir / (folder if isinstance(folder, str) else f"trajectory_{folder}")
        path = path / (name or f"traj_{start:06d}_{stop:06d}.pickle")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(arrays, protocol=protocol))
        self.time_ns += 10**9
        os.utime(path, ns=(0, self.time_ns))
        return path


def values(field: int, trajectory: int, start: int, stop: int, width: int) -> np.ndarray:
    """Return float32 `[stop - start, width]`, exact because all values are below 2**24."""
    frames = np.arange(start, stop, dtype=np.float32)[:, None]
    return frames + 1000 * trajectory + 100_000 * field + 0.25 * np.arange(width, dtype=np.float32)


def write_metadata(folder: NaiveFolder, **content: Any) -> None:
    (folder.data_dir / "metadata.json").write_text(json.dumps(content))


def read(scan: FolderScan) -> list[dict[str, np.ndarray]]:
    """Read every trajectory as field -> decoded frames, joined fragment by fragment, and
    "flags".
    """
    layout = layouts_of(scan.schema)[DATA]
    rows = [read_chunk_rows(scan, chunk) for chunk in range(len(scan.chunk_paths))]
    trajectories: list[dict[str, Any]] = []
    for fragment, chunk in zip(scan.fragments, scan.chunk_of, strict=True):
        start = int(fragment["row"])
        stop = start + int(fragment["length"])
        part = {
            name: layout.decoded(
                name, torch.from_numpy(rows[chunk][layout.column_of[name].name][start:stop])
            ).numpy()
            for name in scan.schema
        }
        if fragment["flags"] & FIRST:
            assert fragment["start"] == 0 and fragment["trajectory"] == len(trajectories)
            trajectories.append({"flags": 0, "parts": []})
        trajectory = trajectories[fragment["trajectory"]]
        assert fragment["start"] == sum(
            len(next(iter(part.values()))) for part in trajectory["parts"]
        )
        trajectory["flags"] |= int(fragment["flags"])
        trajectory["parts"].append(part)
    return [
        {"flags": t["flags"] & KINDS}
        | {name: np.concatenate([part[name] for part in t["parts"]]) for name in scan.schema}
        for t in trajectories
    ]


def check_valid(scan: FolderScan) -> None:
    """Check the promises of every scan."""
    assert len(scan.fragments) == len(scan.chunk_of)
    assert (np.diff(scan.chunk_of) >= 0).all()
    assert set(scan.chunk_of.tolist()) == set(range(len(scan.chunk_paths)))
    ends = [
        scan.fragments["end_time_ns"][scan.fragments["trajectory"] == k]
        for k in set(scan.fragments["trajectory"])
    ]
    assert all((end == end[0]).all() for end in ends)
    assert (np.diff([end[0] for end in ends]) > 0).all()
    assert (scan.fragments["length"] > 0).all()
    for problem in scan.problems:
        assert isinstance(problem, DataFileError)
        assert str(scan.data_dir) in str(problem)
        assert str(problem).endswith(".")


def scan_of(data_dir: Path) -> FolderScan:
    scan = scan_trajectory_folder(data_dir)
    check_valid(scan)
    return scan


def frames_of(scan: FolderScan) -> list[tuple[int, int, int]]:
    """Return each trajectory as (first frame value, number of frames, flags), by the numbers of the
    folder.
    """
    return [(int(t["action"][0, 0] - 300_000), len(t["action"]), t["flags"]) for t in read(scan)]


def one_problem(scan: FolderScan, kind: type[DataFileError] = DataFileError) -> str:
    assert len(scan.problems) == 1, [str(problem) for problem in scan.problems]
    assert type(scan.problems[0]) is kind
    return str(scan.problems[0]).replace(str(scan.data_dir), "DIR")
