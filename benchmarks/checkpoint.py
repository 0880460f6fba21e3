"""Checkpoints: time that the training loop waits, time of writing and loading, and sizes after
compression.

The checkpoint has 200 MB: an MLP that was trained for some steps on noise, with the moments of its
AdamW. The limit of the wait is one copy of all tensors into allocated memory. The limit of writing
is a write without compression. The limit of loading is `torch.load`. The names of cases contain the
sizes after compression.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from storage import (
    AsyncCheckpointSaver,
    CompressedTensorDict,
    load_checkpoint,
    load_checkpoint_parallel,
)

from . import data, images
from .harness import LIMIT, OURS, PEER, Call, Case, Contender
from .peers import PeerMissing
from .report import OUT

FOLDER = OUT / "checkpoint"
WIDTH, NUM_LAYERS, NUM_STEPS = 1024, 16, 20
MAX_WAIT, MAX_COMPRESSED = 1.3, 1 / 0.7


def cases(quick: bool) -> Iterator[Case]:
    """Yield waiting, writing and loading, then the compression of records."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    state = trained(64 if quick else WIDTH, 2 if quick else NUM_LAYERS)
    with AsyncCheckpointSaver() as saver:
        saver.save_async(state, FOLDER / "plain.pt")
        saver.save_async(state, FOLDER / "packed.pt", compress=True)
    num_bytes = (FOLDER / "plain.pt").stat().st_size
    saved = f"{num_bytes / (FOLDER / 'packed.pt.lz4').stat().st_size:.3f} times smaller"
    yield waiting(state, num_bytes)
    yield writing(state, num_bytes, saved)
    yield loading(num_bytes)
    shutil.rmtree(FOLDER)
    for name, record in records(quick):
        yield compressing(name, record)


def trained(width: int, num_layers: int) -> dict[str, Any]:
    """Train a network for a few steps, and return the state for a checkpoint."""
    torch.manual_seed(0)
    layers = [
        layer
        for _ in range(num_layers)
        for layer in (torch.nn.Linear(width, width), torch.nn.ELU())
    ]
    net = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        (net(torch.randn(32, width)) - torch.randn(32, width)).square().mean().backward()
        optimizer.step()
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "iteration": NUM_STEPS}


def tensors_in(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return [tensor for part in inner for tensor in tensors_in(part)]


def waiting(state: dict[str, Any], num_bytes: int) -> Case:
    """Measure how long `save_async` takes to return while no other save is running."""

    def copy() -> Call:
        source = tensors_in(state)
        target = [torch.zeros_like(tensor) for tensor in source]
        return lambda: [tensor.copy_(other) for tensor, other in zip(target, source, strict=True)]

    def ours(compress: bool) -> Contender:
        saver = AsyncCheckpointSaver()
        name = "save_async, LZ4" if compress else "save_async"
        return Contender(
            name,
            lambda: lambda: saver.save_async(state, FOLDER / "wait.pt", compress=compress),
            OURS,
            before=saver.wait,
            reach=MAX_WAIT,
            close=saver.shutdown,
        )

    contenders = (
        # With `before`, each repetition is a single call.
        Contender("copy_ of all tensors", copy, LIMIT, before=lambda: None),
        ours(False),
        ours(True),
        Contender(
            "clone of all tensors",
            lambda: lambda: [tensor.clone() for tensor in tensors_in(state)],
            PEER,
        ),
        Contender("torch.save", lambda: lambda: torch.save(state, FOLDER / "wait.pt"), PEER),
    )
    return Case("wait of the training loop", contenders, num_bytes, num_repeats=11)


def writing(state: dict[str, Any], num_bytes: int, saved: str) -> Case:
    """Measure a save from the call to the renamed, flushed file."""

    def ours(name: str, role: str, **options: Any) -> Contender:
        saver = AsyncCheckpointSaver()
        reach = MAX_COMPRESSED if options == {"compress": True} else None

        def save() -> None:
            saver.save_async(state, FOLDER / "write.pt", **options)
            saver.wait()

        return Contender(
            name, lambda: save, role, before=lambda: None, reach=reach, close=saver.shutdown
        )

    def bare() -> Call:
        content = (FOLDER / "plain.pt").read_bytes()
        return lambda: _write(FOLDER / "bare", content)

    def torch_save() -> None:
        with open(FOLDER / "write.pt", "wb") as file:
            torch.save(state, file)
            os.fsync(file.fileno())

    contenders = (
        ours("not compressed", LIMIT),
        ours(f"LZ4 fast, {saved}", OURS, compress=True),
        ours("LZ4 high 9", OURS, compress=True, level=9),
        Contender("plain write of the same bytes", bare, PEER, before=lambda: None),
        Contender("torch.save and fsync", lambda: torch_save, PEER, before=lambda: None),
    )
    return Case("write", contenders, num_bytes)


def loading(num_bytes: int) -> Case:
    """Measure loading, from files in the page cache."""
    contenders = (
        Contender(
            "torch.load", lambda: lambda: torch.load(FOLDER / "plain.pt", weights_only=True), LIMIT
        ),
        Contender(
            "load_checkpoint, checked", lambda: lambda: load_checkpoint(FOLDER / "plain.pt"), OURS
        ),
        Contender(
            "load_checkpoint, LZ4", lambda: lambda: load_checkpoint(FOLDER / "packed.pt"), OURS
        ),
        Contender(
            "load_checkpoint_parallel, LZ4",
            lambda: lambda: load_checkpoint_parallel(FOLDER / "packed.pt"),
            OURS,
        ),
    )
    return Case("load", contenders, num_bytes)


def records(quick: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield real observations, and images whose names state how they are made."""
    num_steps = 20 if quick else 1000
    for task in ("Ant-v5", "Humanoid-v5"):
        try:
            yield f"{task} observations", data.mujoco(task, num_steps, 4)["observation"]
        except PeerMissing:
            continue
    for name, frames in images.image_set(1, 4 if quick else 50).items():
        yield name, torch.from_numpy(frames)
    yield (
        "segmentation (depth in 8 steps)",
        torch.from_numpy((images.image_set(1, 4)["depth_clean"]).astype("uint8")),
    )


def compressing(name: str, record: torch.Tensor) -> Case:
    """Measure compressing and reading one tensor.

    The name of the case contains the ratio of the sizes.
    """
    compressed = CompressedTensorDict({"x": record}, ["x"])
    contenders = (
        Contender("clone", lambda: lambda: record.clone(), LIMIT),
        Contender("compress", lambda: lambda: CompressedTensorDict({"x": record}, ["x"]), OURS),
        Contender("read", lambda: lambda: compressed["x"], OURS),
    )
    return Case(f"{name}, {compressed.ratio():.2f} times smaller", contenders, record.nbytes)


def _write(path: Path, content: bytes) -> float:
    start = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        view = memoryview(content)
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())
    return time.perf_counter() - start
