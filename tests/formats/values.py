"""Values that encode their source, as in the files of `tests/data/formats`, so that arithmetic
shows a wrong index.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def state(episode: int, num_rows: int, columns: int = 3, dtype: str = "float32") -> Array:
    """`[num_rows, columns]`: 1000 * episode + 10 * row + column."""
    return (1000 * episode + 10 * np.arange(num_rows)[:, None] + np.arange(columns)).astype(dtype)


def action(episode: int, num_rows: int, columns: int = 2) -> Array:
    """`[num_rows, columns]` float32: -(100 * episode + row) - column / 8."""
    return (-(100 * episode + np.arange(num_rows)[:, None]) - np.arange(columns) / 8).astype(
        "float32"
    )


def reward(episode: int, num_rows: int) -> Array:
    """`[num_rows]` float32: 100 * episode + row + 0.25."""
    return (100 * episode + np.arange(num_rows) + 0.25).astype("float32")


def picture(episode: int, num_rows: int, height: int = 8, width: int = 10) -> Array:
    """`[num_rows, height, width, 3]` uint8: smooth, and different in each row."""
    y, x = np.mgrid[:height, :width]
    frames = [np.stack([episode + 7 * row + y, x * 3 + row, y + x], -1) for row in range(num_rows)]
    return np.array(frames, dtype="uint8")
