"""Codecs: decode frames of the image set (`images.py`), in whole sequences and random windows.

The limit is a memcpy of the decoded bytes into a reused output. The number before "x" in a name is
the size of the frames divided by that of the coded bytes. Names of lossy codecs state the loss.
Peers code 8 frames together, as we do, except HDF5 (chunks as h5py chooses them) and PNG (single
frames). The limit of two threads is one thread.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import h5py
import numpy as np
import torch

from rollout_data import RolloutWriter
from rollout_data.blocks.block_header import DATA, read_header
from rollout_data.sources.live_source import LiveSource
from storage import compress_image_seq, decompress_many

from . import peers
from .harness import LIMIT, OURS, PEER, Call, Case, Contender
from .images import image_set
from .peers import PeerMissing

FRAMES_PER_CHUNK = 8
WINDOW, NUM_WINDOWS, NUM_DRAWS = 8, 32, 20
NUM_SETTLING = 16
#: Promised time of two threads relative to one: on large frames, and on small frames.
REACH_THREADS = {"rgb": 1 / 1.3, "depth 16x16": 1.05}
_DEPTH = ("split+lz4", "split+lz4hc", "delta+bitshuffle+lz4hc", "shuffle+blosc2")
#: Set -> our chains.
OUR_CHAINS = {
    "rgb": ("lz4", "lz4hc", "zstd"),
    "depth_clean": (*_DEPTH, "shuffle+blosc2zstd", "uint16(0,65.535)+shuffle+lz4"),
    "depth_noisy": (*_DEPTH, "delta+bitshuffle+blosc2", "uint16(0,65.535)+shuffle+lz4"),
}
#: Function that returns the decoder of coded frames: a callable, and its number of bytes.
Coder = Callable[[np.ndarray], tuple[Callable[[Any, np.ndarray], None], list[Any], int]]


def cases(quick: bool) -> Iterator[Case]:
    """Yield whole sequences and windows of each set, and the comparison of threads."""
    images = image_set(2, 16) if quick else image_set(8, 64)
    for name, frames in images.items():
        yield whole(name, frames)
    for name, frames in images.items():
        yield windows(name, frames)
    yield threads("rgb", images["rgb"])
    yield threads("depth 16x16", np.ascontiguousarray(images["depth_noisy"][:, :, ::4, ::4]))


def whole(name: str, frames: np.ndarray) -> Case:
    """Decode all frames of a set: ours from block files, and from blobs with checksums."""
    out = np.empty_like(frames)
    everything = [(np.arange(len(frames)), np.zeros(len(frames), np.int64))]
    contenders = [Contender("memcpy", lambda: lambda: np.copyto(out, frames), LIMIT)]
    contenders += [_ours(frames, chain, everything, frames.shape[1]) for chain in OUR_CHAINS[name]]
    blobs = [compress_image_seq(sequence) for sequence in frames]
    decode = partial(
        decompress_many, blobs, frames.shape[2:], frames.shape[1], frames.dtype, out=out
    )
    contenders.append(
        Contender(_named("decompress_many", frames, sum(map(len, blobs))), lambda: decode, OURS)
    )
    for label, coder in _peers(frames).items():
        contenders.append(_peer(label, coder, frames, out))
    return Case(f"{name}: all frames", tuple(contenders), num_bytes=frames.nbytes)


def _peer(label: str, coder: Coder, frames: np.ndarray, out: np.ndarray) -> Contender:
    try:
        decode, coded, num_bytes = coder(frames)
    except PeerMissing as missing:
        return Contender(label, partial(_skip, str(missing)), PEER)
    flat = out.reshape(-1, *frames.shape[2:])
    size = len(flat) // len(coded)

    def call() -> None:
        for place, chunk in enumerate(coded):
            decode(chunk, flat[place * size : (place + 1) * size])

    return Contender(_named(label, frames, num_bytes), lambda: call, PEER)


def _skip(reason: str) -> Call:
    raise PeerMissing(reason)


def _named(label: str, frames: np.ndarray, num_bytes: int) -> str:
    lossy = " (loses)" if "uint16" in label else ""
    return f"{label}{lossy} {frames.nbytes / num_bytes:.2f}x"


def _peers(frames: np.ndarray) -> dict[str, Coder]:
    coders: dict[str, Coder] = {
        "blosc2 lz4 bitshuffle": partial(_blosc2, codec="LZ4", filter_name="BITSHUFFLE"),
        "blosc2 zstd shuffle": partial(_blosc2, codec="ZSTD", filter_name="SHUFFLE"),
        "zstd-3": _zstd,
        "HDF5 gzip-4": _hdf5,
    }
    return {**coders, "PNG-1": _png} if frames.dtype == np.uint8 else coders


def _chunks(frames: np.ndarray, size: int) -> list[np.ndarray]:
    flat = frames.reshape(-1, *frames.shape[2:])
    return [flat[start : start + size] for start in range(0, len(flat), size)]


def _blosc2(frames: np.ndarray, codec: str, filter_name: str) -> Any:
    blosc2 = peers.load("blosc2")
    settings = {
        "codec": blosc2.Codec[codec],
        "filters": [blosc2.Filter[filter_name]],
        "filters_meta": [0],
    }
    settings |= {"clevel": 5, "typesize": frames.itemsize, "nthreads": 1}
    coded = [blosc2.compress2(chunk, **settings) for chunk in _chunks(frames, FRAMES_PER_CHUNK)]
    return partial(_unblosc, blosc2), coded, sum(map(len, coded))


def _unblosc(blosc2: Any, chunk: bytes, out: np.ndarray) -> None:
    blosc2.decompress2(chunk, dst=out, nthreads=1)


def _zstd(frames: np.ndarray) -> Any:
    zstandard = peers.load("zstandard")
    coded = [
        zstandard.ZstdCompressor(level=3).compress(chunk)
        for chunk in _chunks(frames, FRAMES_PER_CHUNK)
    ]
    reader = zstandard.ZstdDecompressor()

    def decode(chunk: bytes, out: np.ndarray) -> None:
        out.reshape(-1).view(np.uint8)[:] = np.frombuffer(reader.decompress(chunk), np.uint8)

    return decode, coded, sum(map(len, coded))


def _png(frames: np.ndarray) -> Any:
    image = peers.load("pillow", "Image")
    coded = []
    for (frame,) in _chunks(frames, 1):
        memory = io.BytesIO()
        image.fromarray(frame).save(memory, "PNG", compress_level=1)
        coded.append(memory.getvalue())

    def decode(chunk: bytes, out: np.ndarray) -> None:
        out[0] = image.open(io.BytesIO(chunk))

    return decode, coded, sum(map(len, coded))


def _hdf5(frames: np.ndarray) -> Any:
    # Otherwise every chunk of this small set would be in its cache.
    file = h5py.File(io.BytesIO(), "w", rdcc_nbytes=0)
    datasets = [
        file.create_dataset(str(place), data=dataset, compression="gzip", compression_opts=4)
        for place, dataset in enumerate(frames)
    ]
    return (
        lambda dataset, out: dataset.read_direct(out),
        datasets,
        sum(dataset.id.get_storage_size() for dataset in datasets),
    )


def windows(name: str, frames: np.ndarray) -> Case:
    """Read random windows of 8 frames: ours from block files, peers from memory."""
    num, length = frames.shape[:2]
    rng = np.random.default_rng(0)
    draws = [
        (rng.integers(0, num, NUM_WINDOWS), rng.integers(0, length - WINDOW + 1, NUM_WINDOWS))
        for _ in range(NUM_DRAWS)
    ]
    out = np.empty((NUM_WINDOWS, WINDOW, *frames.shape[2:]), frames.dtype)
    contenders = [Contender("gather of raw frames", partial(_gather, frames, draws, out), LIMIT)]
    contenders += [_ours(frames, chain, draws, WINDOW) for chain in ("raw", *OUR_CHAINS[name])]
    for label, coder in _peers(frames).items():
        contenders.append(
            Contender(label, partial(_from_memory, label, coder, frames, draws, out), PEER)
        )
    return Case(
        f"{name}: {NUM_WINDOWS} windows of {WINDOW}", tuple(contenders), num_bytes=out.nbytes
    )


def _gather(frames: np.ndarray, draws: list[Any], out: np.ndarray) -> Call:
    waiting = cycle(draws)

    def call() -> None:
        for place, (trajectory, start) in enumerate(zip(*next(waiting), strict=True)):
            out[place] = frames[trajectory, start : start + WINDOW]

    return call


def _ours(frames: np.ndarray, chain: str, draws: list[Any], length: int) -> Contender:
    """Gather windows of `length` frames from block files with this codec.

    Decoded frames are not cached.
    """
    folder, image = tempfile.TemporaryDirectory(prefix="codecs-"), "observation/image"
    num, num_steps = frames.shape[:2]
    try:
        with RolloutWriter(
            folder.name, num, obs_disassemble_mapping={"image": chain}, durable=False
        ) as writer:
            observation = {"image": torch.from_numpy(frames).transpose(0, 1)}
            writer.add_rollout(observation=observation, action=torch.zeros(num_steps, num, 1))
    except ValueError as missing:
        return Contender(chain, partial(_skip, str(missing)), OURS)
    # Otherwise every chunk of this small set would be in its cache.
    source = LiveSource(folder.name, chunk_cache_bytes=0)
    source.refresh()
    store = source.snapshot()
    chunks = read_header(store.index.blocks[0].path).chunks[DATA].get(image)
    num_bytes = frames.nbytes if chunks is None else int(chunks.places[-1] - chunks.places[0])
    trajectory_of = store.index.find([(store.index.writers[0], number) for number in range(num)])
    width = store.layouts[DATA].columns[image].row_bytes // 4
    count = np.full(len(draws[0][0]), length)
    out = torch.empty(int(count.sum()), width, dtype=torch.int32)
    waiting = cycle(draws)

    def call() -> None:
        trajectory, start = next(waiting)
        runs = store.locate(trajectory_of[trajectory], start, count, np.cumsum(count) - count)
        store.copy((DATA, image), runs, length, out)

    return Contender(_named(chain, frames, num_bytes), lambda: call, OURS, close=folder.cleanup)


def _from_memory(
    label: str, coder: Coder, frames: np.ndarray, draws: list[Any], out: np.ndarray
) -> Call:
    decode, coded, _ = coder(frames)
    length, waiting = frames.shape[1], cycle(draws)
    size = len(frames) * length // len(coded)
    scratch = np.empty((size, *frames.shape[2:]), frames.dtype)

    def call() -> None:
        for place, (trajectory, start) in enumerate(zip(*next(waiting), strict=True)):
            if label.startswith("HDF5"):
                coded[trajectory].read_direct(out[place], np.s_[start : start + WINDOW])
                continue
            first = trajectory * length + start
            for number in range(first // size, (first + WINDOW - 1) // size + 1):
                decode(coded[number], scratch)
                low, high = max(first, number * size), min(first + WINDOW, (number + 1) * size)
                out[place, low - first : high - first] = scratch[
                    low - number * size : high - number * size
                ]

    return call


def threads(name: str, frames: np.ndarray) -> Case:
    """Decode with two threads, where two threads are faster."""
    blobs = [compress_image_seq(sequence) for sequence in frames]
    out = np.empty_like(frames)
    decode = partial(
        decompress_many, blobs, frames.shape[2:], frames.shape[1], frames.dtype, out=out
    )

    def settled() -> Call:
        for _ in range(NUM_SETTLING):  # it has measured both ways before
            decode(num_threads=2)
        return partial(decode, num_threads=2)

    return Case(
        f"threads: {name}",
        (
            Contender("one thread", lambda: partial(decode, num_threads=1), LIMIT),
            Contender("one or two threads", settled, OURS, reach=REACH_THREADS[name]),
        ),
        num_bytes=frames.nbytes,
        num_repeats=15,
    )
