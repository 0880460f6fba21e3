"""Recordings with coded components of identifiable values, and the values that readers must
return.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from rollout_data import RolloutWriter
from tests.files.readback import blocks_of

#: Component -> (shape, dtype, codec); all but the last two are lossless.
COMPONENTS: dict[str, tuple[tuple[int, ...], str, str]] = {
    "rgb": ((12, 11, 3), "uint8", "lz4"),
    "thermal": ((9, 9), "uint16", "delta+shuffle+lz4hc"),
    "depth": ((8, 9), "float32", "split+lz4"),
    "lidar": ((31,), "float64", "xor+bitshuffle+lz4"),
    "segments": ((7, 7), "int32", "auto"),
    "half": ((5, 3), "float16", "shuffle+lz4"),
    "mask": ((3, 5), "bool", "delta+lz4"),
    "state": ((4,), "float32", "raw"),
    "image": ((6, 6), "float32", "normalized_image+lz4"),
    "far": ((7, 5), "float32", "uint16+shuffle+lz4"),
}
LOSSY = ("image", "far")
CODECS = {name: codec for name, (_, _, codec) in COMPONENTS.items() if codec != "raw"}


def values(name: str, t: int, num_envs: int) -> np.ndarray:
    """Return `[num_envs, *shape]` of a component at a step: a slow wave, different in each env,
    with some noise.
    """
    shape, dtype, _ = COMPONENTS[name]
    place = np.arange(int(np.prod(shape))).reshape(shape) / 9
    env = np.arange(num_envs).reshape(-1, *[1] * len(shape))
    rng = np.random.default_rng([t, *name.encode()])
    wave = (np.sin(place + t / 3 + env) + 1) / 2
    if np.dtype(dtype).kind == "f":
        noisy = wave + 0.001 * rng.standard_normal((num_envs, *shape))
        return np.clip(noisy, 0, 1).astype(dtype) if name == "image" else (5 * noisy).astype(dtype)
    return (
        (wave > 0.5)
        if dtype == "bool"
        else (200 * wave + 100 * (t % 3 == 0) * (wave > 0.9)).astype(dtype)
    )


def record(
    folder: Path,
    num_steps: int = 45,
    num_envs: int = 3,
    codecs: dict[str, str] | None = None,
    **options: Any,
):
    """Record steps.

    Env 0 ends at 10 and at 30, env 1 at 21 by timeout, env 2 does not end. A block ends at step 26.
    """
    with RolloutWriter(
        folder,
        num_envs,
        obs_disassemble_mapping=CODECS if codecs is None else codecs,
        durable=False,
        **{"writer_name": "w", **options},
    ) as writer:
        for t in range(num_steps):
            done, timeout = np.zeros((2, num_envs), bool)
            done[0], timeout[1] = t in (10, 30), t == 21
            writer.add(
                observation={name: values(name, t, num_envs) for name in COMPONENTS},
                action=np.full((num_envs, 2), t, np.float32),
                reward=np.full(num_envs, t, np.float32),
                terminated=done,
                truncated=timeout,
                final_observation={name: values(name, 1000 + t, num_envs) for name in COMPONENTS},
                env_mask=np.arange(num_envs) != t % 40 - 37,
            )
            if t == 26:
                writer.flush()
    return folder


def leaves(batch):
    """Return name -> tensor of all fields of a batch."""
    result = {}
    for name, value in batch._asdict().items():
        parts = (
            {f"{name}/{key}": part for key, part in value.items()}
            if isinstance(value, dict)
            else {name: value}
        )
        result |= {key: part for key, part in parts.items() if isinstance(part, torch.Tensor)}
    return result


def max_errors(folder) -> dict[str, float]:
    result: dict[str, float] = {}
    for header in blocks_of(folder):
        for name, coding in header.codings.items():
            result[name] = max(result.get(name, 0.0), coding.max_error)
    return result


def check_equal(ours, theirs, errors):
    """Compare a batch with the raw batch: equal bits, or a difference within the stated error."""
    ours, theirs = leaves(ours), leaves(theirs)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        component = name.rpartition("/")[2]
        assert tensor.dtype == theirs[name].dtype and tensor.shape == theirs[name].shape, name
        if component in LOSSY:
            difference = (tensor.double() - theirs[name].double()).abs().max()
            assert 0 < float(difference) <= errors[f"observation/{component}"], name
        else:
            assert torch.equal(tensor, theirs[name]), name
