"""Recordings in tests/data/golden: how they were made, and the values that every later version must
read.

`python -m tests.files.golden` writes the missing recordings of the present version. Existing
recordings are never rewritten.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollout_data.blocks.block_header import FORMAT_VERSION
from rollout_data.writing.rollout_writer import RolloutWriter

FOLDER = Path(__file__).parents[1] / "data" / "golden"
DTYPES = ["bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
DTYPES += ["float16", "bfloat16", "float32", "float64"]


def value(name: str, t: int, num_envs: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Create `[num_envs, *shape]` values that encode field, step and env, exactly in every
    dtype.
    """
    code = (sum(map(ord, name)) + 7 * t + 3 * np.arange(num_envs)) % 100
    tensor = torch.from_numpy(code + np.zeros((*shape, num_envs), np.int64)).movedim(-1, 0)
    return (tensor % 2).bool() if dtype == "bool" else tensor.to(getattr(torch, dtype))


def all_dtypes(t: int) -> dict[str, Any]:
    """Return steps of two envs: every kind of end, a final observation, every dtype, scalars and
    matrices.
    """
    fields = {
        f"x_{dtype}": value(dtype, t, 2, (2, 1) if dtype == "int16" else (), dtype)
        for dtype in DTYPES
    }
    return {
        "observation": value("observation", t, 2, (3,), "float32"),
        "privileged_observation": value("privileged", t, 2, (2,), "float64"),
        "action": value("action", t, 2, (), "int64"),
        "reward": value("reward", t, 2, (2,), "float32"),
        "terminated": np.array([t == 3, False]),
        "truncated": np.array([False, t == 5]),
        "final_observation": value("final", t, 2, (3,), "float32"),
        "final_privileged_observation": value("final", t, 2, (2,), "float64"),
        "policy_version": t // 4,
        **fields,
    }


def components(t: int) -> dict[str, Any]:
    """Return steps of three envs with a coded image, a large field, and ends that drop a
    trajectory.
    """
    image = value("image", t, 3, (1, 4, 4), "float32") / 100
    return {
        "observation": {"state": value("state", t, 3, (2,), "float32"), "depth": image},
        "action": value("action", t, 3, (1,), "float32"),
        "sim": {"grid": value("grid", t, 3, (1100,), "int32"), "on": value("on", t, 3, (), "bool")},
        "terminated": np.array([t == 2, False, False]),
        "truncated": np.array([t == 6, t == 4, False]),
    }


#: Component -> (shape, dtype, divisor, codec); values are exact in each.
CODED: dict[str, tuple[tuple[int, ...], str, int, str]] = {
    "rgb": ((4, 4, 3), "uint8", 1, "lz4"),
    "depth": ((4, 5), "float32", 2, "uint16(0,63.9990234375)+shuffle+lz4"),
    "lidar": ((9,), "float64", 1, "split+lz4hc"),
    "segments": ((3, 3), "int32", 1, "delta+bitshuffle+lz4"),
    "image": ((3, 5), "float32", 100, "normalized_image+lz4"),
    "heat": ((5,), "uint16", 1, "auto"),
    "mask": ((7,), "bool", 1, "xor+lz4"),
    "half": ((3,), "bfloat16", 1, "shuffle+lz4"),
    "state": ((2,), "float32", 1, "raw"),
}


def coded(t: int) -> dict[str, Any]:
    """Return steps of two envs with a component for each kind of codec, and final observations."""
    observation, final = (
        {
            name: (made / divisor if divisor > 1 else made)
            for name, (shape, dtype, divisor, _) in CODED.items()
            for made in [value(name, step, 2, shape, dtype)]
        }
        for step in (t, t + 50)
    )
    return {
        "observation": observation,
        "action": value("action", t, 2, (1,), "float32"),
        "terminated": np.array([t == 10, False]),
        "truncated": np.array([False, t == 4]),
        "final_observation": final,
    }


#: Name -> (steps, number of steps, envs, options of the writer).
RECORDINGS = {
    "dtypes": (all_dtypes, 9, 2, {"block_bytes": 1500}),
    "coded": (
        coded,
        20,
        2,
        {
            "obs_disassemble_mapping": {
                name: one[3] for name, one in CODED.items() if one[3] != "raw"
            }
        },
    ),
    "components": (
        components,
        8,
        3,
        {"success_only": True, "obs_disassemble_mapping": {"depth": "normalized_image"}},
    ),
}


def record(name: str, folder: Path) -> None:
    steps, num_steps, num_envs, options = RECORDINGS[name]
    with RolloutWriter(
        folder, num_envs, writer_name=f"golden-{name}", metadata={"made_by": "tests"}, **options
    ) as writer:
        for t in range(num_steps):
            values = steps(t)
            success = {"success": values["truncated"]} if "success_only" in options else {}
            writer.add(**values, **success)


def main() -> None:
    for name in RECORDINGS:
        target = FOLDER / f"v{FORMAT_VERSION}" / name
        if target.exists():
            continue
        with tempfile.TemporaryDirectory() as folder:
            record(name, Path(folder))
            target.mkdir(parents=True)
            for path in [*Path(folder).glob("rollout_*.h5"), Path(folder) / "metadata.json"]:
                shutil.copy(path, target)


if __name__ == "__main__":
    main()
