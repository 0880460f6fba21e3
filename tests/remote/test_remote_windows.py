"""Windows of remote files equal local ones. They come in an order of chunks, with few requests."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import threading

import numpy as np
import pytest
from torch.utils.data import DataLoader

pytest.importorskip("fsspec")

import fsspec

from benchmarks.lagging import LaggingFileSystem
from rollout_data import RolloutWriter, WindowDataset, WindowLoader, WindowMixture, push
from rollout_data.remote.locations import remote_path
from storage.errors import DataFileError, UsageError
from tests.files.recorded import record

from .places import check_epoch, coded, far_windows, in_memory, lagging, same, store_at, uneven

FORMS = {
    "plain": {},
    "sparse": {"stride": 9, "next_observations": True},
    "padded": {
        "stride": 3,
        "padding": "zero",
        "delta": {"observation": [-3, 0], "action": [0, 1, 2, 5]},
    },
    "split": {"split": "train"},
    "some fields": {"fields": ["action", "done"]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return uneven(tmp_path_factory.mktemp("remote") / "walk")


@pytest.mark.each_value
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_an_epoch_has_every_window_once_and_equals_the_local_files(folder, form, shuffle):
    near, far = WindowDataset(folder, 4, **FORMS[form]), far_windows(lagging(folder), **FORMS[form])
    LaggingFileSystem.requests.clear()
    loader = check_epoch(near, far, shuffle=shuffle, seed=3)
    assert loader.epoch == 1
    requests = LaggingFileSystem.requests
    assert len(set(requests)) == len(requests) or form == "sparse"  # nothing is fetched twice
    check_epoch(near, far, shuffle=shuffle, seed=3, drop_last=False)


def test_coded_components_equal_those_of_the_local_files(tmp_path):
    folder = coded(tmp_path / "images")
    near, far = WindowDataset(folder, 4), far_windows(in_memory(folder, "images"))
    check_epoch(near, far, seed=1)
    assert same(far.collate([far[0], far[5]]), near.collate([near[0], near[5]]))


def test_the_order_is_a_function_of_seed_epoch_chunk_size_and_pool(folder):
    url = in_memory(folder, "order")

    def order(seed=0, epoch=0, **remote):
        return WindowLoader(far_windows(url, remote=remote), 8, seed=seed).order(epoch).tolist()

    assert order() == order(num_requests=2, timeout_s=3.0)
    others = [order(1), order(0, 1), order(chunk_bytes=5000), order(num_chunks=4)]
    assert all(other != order() and sorted(other) == sorted(order()) for other in others)


def test_windows_of_one_group_of_chunks_are_all_mixed_with_each_other(tmp_path):
    record(tmp_path / "long", [4000])
    far = far_windows(in_memory(tmp_path / "long", "long"), length=1, remote={"num_chunks": 8})
    order = WindowLoader(far, 8).order(0)
    places = order[:400] // 100  # chunks have about a hundred frames
    assert len(np.unique(places)) >= 7
    assert np.abs(np.corrcoef(order[:700], np.arange(700))[0, 1]) < 0.5


@pytest.mark.parametrize("num_before", [1, 7, 40])
def test_a_state_resumes_with_the_next_batch_bit_for_bit(folder, num_before):
    url = in_memory(folder, "resume")
    loader = WindowLoader(far_windows(url), 16, seed=5)
    batches = iter(loader)
    for _ in range(num_before):
        next(batches)
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    other = WindowLoader(far_windows(url), 16, seed=5)
    other.load_state_dict(state)
    for expected, got in zip(batches, other, strict=True):
        assert same(expected, got)


def test_ranks_share_an_epoch(folder):
    url = in_memory(folder, "ranks")
    near, order = WindowDataset(folder, 4), WindowLoader(far_windows(url), 16).order(0)
    parts = [
        list(WindowLoader(far_windows(url), 8, shard=(rank, 2), even="none")) for rank in (0, 1)
    ]
    expected = iter([order[start : start + 8] for start in range(0, len(order), 8)])
    for pair in zip(*parts, strict=False):
        for batch in pair:
            assert len(batch["mask"]) < 8 or same(batch, near.__getitems__(next(expected)))


def test_a_state_of_other_chunks_is_refused(folder):
    url = in_memory(folder, "others")
    loader = WindowLoader(far_windows(url), 16)
    next(iter(loader))
    other = WindowLoader(far_windows(url, remote={"chunk_bytes": 8192}), 16)
    with pytest.raises(UsageError, match="for URLs frames per chunk and chunks per group"):
        other.load_state_dict(loader.state_dict())


def test_a_state_of_deleted_windows_raises_and_new_blocks_wait_for_the_next_epoch(folder, tmp_path):
    url = in_memory(folder, "growing")
    loader = WindowLoader(far_windows(url), 16, seed=2)
    next(iter(loader))
    in_memory(uneven(tmp_path / "more", 5, seed=1), "growing")
    grown = WindowLoader(far_windows(url), 16, seed=2)
    grown.load_state_dict(loader.state_dict())
    for expected, got in zip(loader, grown, strict=True):
        assert same(expected, got)
    assert len(grown) > len(loader)
    next(iter(loader))
    fsspec.filesystem("memory").rm_file(
        f"/growing/{min(path.name for path in folder.glob('*.h5'))}"
    )
    with (
        pytest.warns(UserWarning),
        pytest.raises(
            DataFileError,
            match=r"have changed since the dataset was opened\. Open the dataset again",
        ),
    ):
        WindowLoader(far_windows(url), 16, seed=2).load_state_dict(loader.state_dict())


def test_workers_read_windows_by_number(folder):
    near, far = WindowDataset(folder, 4), far_windows(lagging(folder))
    loader = DataLoader(
        far, 32, collate_fn=far.collate, num_workers=1, multiprocessing_context="fork"
    )
    for number, batch in enumerate(loader):
        assert same(batch, near.__getitems__(range(32 * number, min(32 * number + 32, len(near)))))


def test_a_forked_process_repeats_pending_requests(folder):
    near, far = (
        WindowDataset(folder, 4),
        far_windows(lagging(folder, 0.06), remote={"num_requests": 3}),
    )
    loader = WindowLoader(far, 16)
    batches, order = iter(loader), loader.order(0)
    next(batches)  # the next group is on its way now
    context = multiprocessing.get_context("fork")
    there, here = context.Pipe()
    parts = [order[:200], order[200:300]]
    child = context.Process(
        target=lambda: here.send([far.__getitems__(part)["action"].numpy() for part in parts])
    )
    child.start()
    if not there.poll(100):
        child.kill()
        pytest.fail("the child hangs")
    for part, got in zip(parts, there.recv(), strict=True):
        assert (near.__getitems__(part)["action"].numpy() == got).all()
    child.join(10)


def test_windows_can_be_read_in_any_order(folder):
    near, far, generator = (
        WindowDataset(folder, 4),
        far_windows(in_memory(folder, "any")),
        np.random.default_rng(0),
    )
    for size in (1, 2, 5, 40, 7, 300, 3):
        numbers = generator.integers(len(near), size=size)
        assert same(near.__getitems__(numbers), far.__getitems__(numbers))
        following = np.sort(numbers)[:1] + np.arange(3)
        assert same(
            near.__getitems__(following % len(near)), far.__getitems__(following % len(near))
        )


def test_chunks_are_fetched_one_group_ahead_and_no_further(tmp_path):
    record(tmp_path / "long", [900, 900, 900])
    far = far_windows(
        lagging(tmp_path / "long", 0.005), remote={"num_chunks": 2, "num_requests": 3}
    )
    row_bytes = 36
    LaggingFileSystem.requests.clear()
    num_read, most = 0, 0
    loader = WindowLoader(far, 16, num_ahead=1)
    for batch in loader:
        num_read += len(batch["mask"])
        fetched = sum(stop - start for _, start, stop in LaggingFileSystem.requests)
        most = max(most, fetched - num_read * row_bytes)
    # Two groups, batches that wait, and the rows beyond the ends of all chunks
    assert most <= 4 * 2 * 4096
    assert fetched < 1.2 * far.num_frames * row_bytes
    assert LaggingFileSystem.most_at_once <= 3


def test_num_requests_limits_concurrent_requests(tmp_path):
    record(tmp_path / "long", [900, 900, 900])
    far = far_windows(lagging(tmp_path / "long", 0.0), remote={"num_chunks": 2, "num_requests": 3})
    lock = threading.Lock()
    held = []
    three_are_held = threading.Event()

    def hold_until_three_are_here(path, start, stop):
        with lock:
            held.append(path)
            if len(held) == 3:
                three_are_held.set()
        assert three_are_held.wait(100)

    LaggingFileSystem.fails = staticmethod(hold_until_three_are_here)
    next(iter(WindowLoader(far, 16, num_ahead=1)))
    assert three_are_held.is_set()
    assert LaggingFileSystem.most_at_once == 3


def test_a_mixture_of_urls_is_refused(folder):
    far = far_windows(in_memory(folder, "mixed"))
    with pytest.raises(UsageError, match="WindowMixture: a mixture cannot read URLs"):
        WindowMixture([far, far])


def test_a_url_is_a_path_whose_parts_are_urls():
    url = remote_path("s3://bucket/walk")
    block = url / "rollout_a_000000.h5"
    assert str(block) == os.fspath(block) == "s3://bucket/walk/rollout_a_000000.h5"
    for item in (block, pickle.loads(pickle.dumps(block))):
        assert (item, hash(item), item.name) == (block, hash(block), "rollout_a_000000.h5")
        assert item.parent == url and str(item.parent / "x") == "s3://bucket/walk/x"


def test_urls_and_folders_together_are_refused(folder):
    with pytest.raises(UsageError, match="local folders and URLs cannot be mixed"):
        WindowDataset([folder, in_memory(folder, "both")])


def test_statistics_and_metadata_equal_those_of_the_local_files(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    near, far = WindowDataset(folder, 4), far_windows(in_memory(folder, "about"))
    assert far.metadata == near.metadata
    expected, got = near.statistics(use_cache=False, progress=False), far.statistics(progress=False)
    assert all((expected[name].mean == got[name].mean).all() for name in expected)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """A pushed recording, and copies of it with one changed row: with and without the checksums."""
    root = tmp_path_factory.mktemp("damaged")
    with RolloutWriter(root / "walk", 1, writer_name="arm", durable=False) as writer:
        for number in range(1200):
            row = np.full((1, 64), number, np.float32)
            writer.add(observation=row, action=row[:, :1], done=[number % 60 == 59])
    store_at(root, "store")
    push(root / "walk", "store://whole")
    for name in ("pushed", "bare"):
        shutil.copytree(root / "whole", root / name)
    for path in (root / "bare").glob("*.sums"):
        path.unlink()
    for name in ("pushed", "bare"):
        path = next((root / name).glob("*.h5"))
        data = bytearray(path.read_bytes())
        data[data.index(np.full(64, 1005, np.float32).tobytes()) + 130] ^= 1
        path.write_bytes(data)
    return root


def anchors(batches):
    return [batch["action"][:, 0, 0].int().tolist() for batch in batches]


@pytest.mark.each_value
@pytest.mark.filterwarnings("ignore::storage.errors.RolloutDataWarning")
@pytest.mark.parametrize("chunk_bytes", [4096, 1 << 20])
@pytest.mark.parametrize("shuffle", [True, False])
def test_windows_of_a_damaged_row_of_a_pushed_block_are_skipped_and_no_other_moves(
    damaged, chunk_bytes, shuffle
):
    remote = {"chunk_bytes": chunk_bytes, "num_retries": 0}
    lagging(damaged / "whole")
    whole = anchors(
        WindowLoader(far_windows("lagging://whole", remote=remote), 8, seed=3, shuffle=shuffle)
    )
    lost = set(range(1002, 1006))
    expected = [[item for item in batch if item not in lost] for batch in whole]
    windows = far_windows("lagging://pushed", remote=remote, on_error="skip")
    assert anchors(WindowLoader(windows, 8, seed=3, shuffle=shuffle)) == expected
    assert windows.num_lost_windows == len(lost)
    strict = WindowLoader(far_windows("lagging://pushed", remote=remote), 8, shuffle=shuffle)
    with pytest.raises(DataFileError, match="checksum"):
        list(strict)


@pytest.mark.filterwarnings("ignore::storage.errors.RolloutDataWarning")
def test_damaged_rows_raise_in_every_order_of_reading(damaged):
    lagging(damaged / "bare")
    windows = far_windows("lagging://bare", on_error="skip", remote={"chunk_bytes": 1 << 20})
    actual = [item for batch in anchors(WindowLoader(windows, 8, shuffle=False)) for item in batch]
    assert not {1002, 1003, 1004, 1005} & set(actual)
    assert windows.num_lost_windows == len(windows) - len(actual)
