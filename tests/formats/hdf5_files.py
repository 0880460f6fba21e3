"""Write small HDF5 files with the layouts of other systems.

Every value encodes its episode, frame and column.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

#: Number in the file -> steps: a gap, one frame, and 10 after 9, which comes first as text.
LENGTHS = {2: 3, 9: 1, 10: 4}


def values(
    number: int, length: int, width: int = 3, dtype: str = "f8", first: int = 0
) -> np.ndarray:
    """`[T, D]`: 1000 * episode + 10 * frame + column."""
    frames = np.arange(first, first + length)[:, None]
    return (1000 * number + 10 * frames + np.arange(width)).astype(dtype)


def actions(number: int, length: int) -> np.ndarray:
    """`[T, 2]` float32."""
    return (-(100 * number + np.arange(length))[:, None] - np.arange(2) / 8).astype("f4")


def rewards(number: int, length: int) -> np.ndarray:
    return 100.0 * number + np.arange(length) + 0.25


def pixels(
    number: int, length: int, first: int = 0, shape: tuple[int, ...] = (8, 10, 3)
) -> np.ndarray:
    """`[T, H, W, C]` uint8."""
    start = (number * 40 + np.arange(first, first + length)).reshape(-1, *[1] * len(shape))
    return ((start + np.arange(np.prod(shape)).reshape(shape)) % 251).astype("u1")


#: How the datasets of a file lie in it.
STORAGE: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"chunks": True},
    "gzip": {"compression": "gzip"},
    "lzf": {"compression": "lzf", "shuffle": True},
    "checksums": {"fletcher32": True},
}


def robomimic(
    path: Path,
    lengths: Mapping[int, int] = LENGTHS,
    storage: Mapping[str, Any] = STORAGE["plain"],
    next_obs: bool = True,
    env_type: int = 1,
) -> Path:
    """Write a file with robomimic's layout. Demo 9 has no rewards."""
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["total"] = sum(lengths.values())
        data.attrs["env_args"] = json.dumps(
            {"env_name": "Lift", "type": env_type, "env_kwargs": {}}
        )
        for number in sorted(lengths, key=str):
            length, demo = lengths[number], data.create_group(f"demo_{number}")
            demo.attrs["num_samples"] = length
            demo.attrs["ep_meta"] = json.dumps({"lang": f"öffne {number}"})

            def put(name: str, array: np.ndarray, to: h5py.Group = demo) -> None:
                to.create_dataset(name, data=array, **storage)

            put("actions", actions(number, length))
            put("states", values(number, length, 5))
            put("dones", (np.arange(length) == length // 2).astype("i8"))
            if number != 9:
                put("rewards", rewards(number, length))
            for group, first in (("obs", 0), ("next_obs", 1))[: 1 + next_obs]:
                put(f"{group}/low", values(number, length, first=first))
                put(f"{group}/nested/cam", pixels(number, length, first))
        train = [f"demo_{number}" for number in lengths if number != 9]
        file.create_dataset("mask/train", data=np.array(train, "S"))
    return path


def edited(path: Path, change: Callable[[h5py.File], Any]) -> Path:
    """Change a file, and return it."""
    with h5py.File(path, "r+") as file:
        change(file)
    return path


def replace(file: h5py.File, name: str, array: Any, **storage: Any) -> None:
    """Replace a dataset."""
    del file[name]
    file.create_dataset(name, data=array, **storage)


def jpeg(array: np.ndarray) -> bytes:
    """Encode a picture of one colour per half; see `halves`."""
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(array).save(out, "JPEG", quality=95)
    return out.getvalue()


def halves(number: int, frame: int, shape: tuple[int, int] = (32, 48)) -> np.ndarray:
    """Return `[H, W, 3]` uint8.

    The left half encodes the episode, the right half the frame. Red, green and blue differ.
    """
    actual = np.zeros((*shape, 3), "u1")
    actual[:, : shape[1] // 2] = (200, 20 * number % 200, 60)
    actual[:, shape[1] // 2 :] = (60, 40 * frame % 200, 200)
    return actual
