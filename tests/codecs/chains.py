"""Chains of codecs and values for them, shared by the tests of codecs."""

from __future__ import annotations

import importlib.util

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from storage.codecs import packers
from storage.codecs.codec_chains import STAGES

HAS_BLOSC2 = importlib.util.find_spec("blosc2") is not None
DELTAS, SHUFFLES = ("", *STAGES["delta"]), ("", *STAGES["shuffle"])
_BEHIND_ANY = {
    name: packer.module for name, packer in packers.PACKERS.items() if not packer.shuffles
}
PACKERS = (
    "",
    *(
        name
        for name, module in _BEHIND_ANY.items()
        if not module or importlib.util.find_spec(module)
    ),
)
#: Every lossless chain.
LOSSLESS = ["delta+blosc2", "shuffle+blosc2zstd", "xor+bitshuffle+blosc2"] if HAS_BLOSC2 else []
LOSSLESS += [
    "+".join(part for part in (a, b, c) if part) or "raw"
    for a in DELTAS
    for b in SHUFFLES
    for c in PACKERS
]
DTYPES = ("?", "u1", "i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8")


def frames(max_frames: int = 9) -> st.SearchStrategy[np.ndarray]:
    """Draw stacks of frames of any dtype and shape: noise, NaN and Inf, runs, and empty stacks."""
    shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9)
    return st.builds(
        lambda count, shape, dtype, data: _filled((count, *shape), dtype, data),
        st.integers(1, max_frames),
        shapes,
        st.sampled_from(DTYPES),
        st.binary(min_size=1, max_size=64),
    )


def _filled(shape: tuple[int, ...], dtype: str, data: bytes) -> np.ndarray:
    """Repeat some bytes until the array is full."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    raw = np.resize(np.frombuffer(data, np.uint8), size) & (1 if dtype == "?" else 255)
    return raw.astype(np.uint8).view(dtype).reshape(shape)


def smooth(num_frames: int, shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Return frames that compress: slow waves over time and space, with a little noise."""
    rng = np.random.default_rng(seed)
    grid = np.arange(int(np.prod(shape))).reshape(shape) / 40
    time = np.arange(num_frames).reshape(-1, *[1] * len(shape)) / 5
    values = np.sin(grid + time) + 0.001 * rng.standard_normal((num_frames, *shape))
    kind = np.dtype(dtype).kind
    return values.astype(dtype) if kind == "f" else np.round((values + 1.1) * 50).astype(dtype)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
