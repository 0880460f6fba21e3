"""Options of coded components: frames per chunk, and bytes of the cache of decoded chunks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from rollout_data import RolloutDataset, RolloutWriter, WindowDataset
from rollout_data.blocks.block_content import BlockContent, frames_per_chunk
from rollout_data.blocks.block_header import DATA, read_header
from rollout_data.sources.rows.chunk_decoder import row_cache
from storage.codecs.packers import PACKERS
from storage.core.fields import Schema, flatten
from storage.errors import UsageError
from tests.files import coded
from tests.files.readback import blocks_of


def test_the_cache_of_decoded_chunks_has_a_byte_limit(folders):
    cache = row_cache(1000)
    for key in range(10):
        cache.put(key, np.full(300, key, np.uint8))
        assert cache.get(key - 1 if key else 0) is not None
    cache.put("too large", np.zeros(1001, np.uint8))
    assert [cache.get(key) is not None for key in (*range(10), "too large")] == [False] * 7 + [
        True
    ] * 3 + [False]
    cache.put(9, np.zeros(100, np.uint8))
    cache.put(10, np.zeros(300, np.uint8))
    assert [cache.get(key) is not None for key in range(7, 11)] == [True] * 4, "1000 bytes in all"
    errors = coded.max_errors(folders[0])
    for most in (0, 10_000):
        ours, theirs = (
            RolloutDataset(
                path, 3, device="cpu", flatten_observations=False, chunk_cache_bytes=most
            )
            for path in folders
        )
        for _ in range(20):
            coded.check_equal(ours.get_batch(2), theirs.get_batch(2), errors)
    with pytest.raises(UsageError, match="chunk_cache_bytes"):
        WindowDataset(folders[0], 2, chunk_cache_bytes=-1)


def test_windows_do_not_depend_on_chunk_cache_bytes(folders):
    whole = WindowDataset(folders[1], 3)
    errors = coded.max_errors(folders[0])
    for most in (0, 3000, 1 << 30):
        ours = WindowDataset(folders[0], 3, chunk_cache_bytes=most)
        for _ in range(2):
            batch, expected = (
                ours.__getitems__(range(len(ours))),
                whole.__getitems__(range(len(whole))),
            )
            for name, values in flatten(batch["observation"]).items():
                wanted = flatten(expected["observation"])[name]
                error = errors.get(f"observation/{name}", 0.0)
                assert torch.allclose(
                    values.double(), wanted.double(), rtol=0, atol=error + 1e-9, equal_nan=True
                )


def test_a_chunk_of_several_frames_is_64_mib_at_most(tmp_path):
    with RolloutWriter(
        tmp_path, 1, obs_disassemble_mapping={"a": "lz4"}, durable=False, frames_per_chunk=99
    ) as writer:
        for t in range(65):
            image = np.zeros((1, 1024, 1024), np.uint8)
            writer.add(
                observation={"a": image},
                action=np.zeros((1, 1)),
                reward=np.zeros(1),
                done=[t == 64],
            )
    (path,) = tmp_path.glob("*.h5")
    table = read_header(path).chunks[DATA]["observation/a"]
    assert np.diff(table.rows).tolist() == [64, 1]
    # A chunk that no writer makes: 300 KB that decode to 65 MiB for a reader of one frame.
    forged = replace(table, rows=table.rows[::2], places=table.places[::2], sums=table.sums[:1])
    place, num_bytes = int(forged.places[0]), int(np.diff(forged.places)[0])
    assert "of at most 64 rows" in forged.check(np.array([0]), np.array([65]), 99, place, num_bytes)


def test_a_frame_larger_than_64_mib_is_one_chunk():
    content = BlockContent(Schema([]), "w", 0, np.zeros(0), np.zeros(0), {}, frames_per_chunk=9)
    sizes = [0, 1, 7 << 20, 8 << 20, (64 << 20) + 1, 1 << 40]
    assert [frames_per_chunk(content, DATA, "lz4", size) for size in sizes] == [9, 9, 9, 8, 1, 1]


@pytest.mark.parametrize("codec", ["lz4", "zstd", "blosc2", "shuffle+blosc2zstd"])
def test_a_large_black_frame_is_read_back(tmp_path, codec):
    packer = PACKERS.get(codec.rpartition("+")[2])
    pytest.importorskip(packer.module or "lz4" if packer else "lz4")
    shape = (1080, 1920, 3)
    with RolloutWriter(tmp_path, 1, obs_disassemble_mapping={"a": codec}, durable=False) as writer:
        for value in (1, 0, 2):
            image = np.full((1, *shape), value, np.uint8)
            writer.add(
                observation={"a": image},
                action=np.zeros((1, 1)),
                reward=np.zeros(1),
                done=[value == 2],
            )
    windows = WindowDataset(tmp_path, 1).__getitems__(range(3))["observation"]["a"]
    assert torch.equal(windows.amax((1, 2, 3, 4)), torch.tensor([1, 0, 2], dtype=torch.uint8))
    assert torch.equal(windows.amin((1, 2, 3, 4)), torch.tensor([1, 0, 2], dtype=torch.uint8))


@pytest.mark.parametrize("frames_per_chunk", [1, 3, 50])
def test_chunks_have_frames_per_chunk_frames(tmp_path, folders, frames_per_chunk):
    path = coded.record(tmp_path / "data", frames_per_chunk=frames_per_chunk)
    most = 0
    for header in blocks_of(path):
        for name, table in header.chunks[DATA].items():
            assert (
                np.diff(table.rows).max()
                <= frames_per_chunk
                == header.codings[name].frames_per_chunk
            )
            most = max(most, int(np.diff(table.rows).max()))
    assert most == min(
        frames_per_chunk, max(int(header.fragments["length"].max()) for header in blocks_of(path))
    )
    ours, theirs = (
        RolloutDataset(item, 3, device="cpu", flatten_observations=False)
        for item in (path, folders[1])
    )
    for _ in range(4):
        coded.check_equal(ours.get_batch(7), theirs.get_batch(7), coded.max_errors(path))
    for wrong in (0, 2.5, "8"):
        with pytest.raises(UsageError, match=r"RolloutWriter: frames_per_chunk must be .*>= 1"):
            RolloutWriter(tmp_path / "other", 1, frames_per_chunk=wrong)
