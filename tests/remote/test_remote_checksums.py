"""Every fetched piece of a pushed block is compared with its checksum, with few additional
bytes.
"""

from __future__ import annotations

import shutil
import warnings

import fsspec
import numpy as np
import pytest

pytest.importorskip("fsspec")

import rollout_data
from benchmarks.lagging import LaggingFileSystem
from rollout_data import (
    RemoteOptions,
    RolloutDataset,
    RolloutWriter,
    WindowDataset,
    WindowLoader,
    loader,
    prune,
    push,
)
from rollout_data.blocks.block_folder import BlockFolder
from rollout_data.remote.fetcher import FetchError
from rollout_data.remote.piece_checksums import parse, spans_of, sums_of
from storage.errors import DataFileError, RolloutDataWarning
from tests.files.recorded import drain, record

from .places import Store, check_epoch, far_windows, lagging, pushed_until_killed, store_at, uneven


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return uneven(tmp_path_factory.mktemp("remote") / "walk")


def pushed(folder, tmp_path, **options) -> str:
    """Push a folder and serve it by the file system that counts. Return its URL."""
    store_at(tmp_path, "store")
    push(folder, "store://walk", remote=RemoteOptions(**options))
    return lagging(tmp_path / "walk")


class Lying(LaggingFileSystem):
    """Answers with wrong bytes."""

    protocol = "lying"
    lie = staticmethod(lambda data, read, start, stop: data)

    def cat_file(self, path, start=None, end=None, **options):
        def read(low, high):
            return super(Lying, self).cat_file(path, start=low, end=high)

        return self.lie(read(start, end), read, start, end)


def flipped(data, read, start, stop):
    changed = bytearray(data)
    changed[len(data) // 2] ^= 1
    return bytes(changed)


LIES = {
    "shifted": lambda data, read, start, stop: read(start - 64, stop - 64) if start >= 64 else data,
    "flipped": flipped,
    "zeros": lambda data, read, start, stop: bytes(len(data)),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("way", ["windows", "playback", "cache", "header", "verify"])
@pytest.mark.parametrize("chunk_bytes", [4096, pytest.param(1 << 20, marks=pytest.mark.thorough)])
def test_wrong_bytes_of_a_response_raise_and_are_never_returned(
    folder, tmp_path, lie, way, chunk_bytes
):
    if way == "header" and lie == "shifted":
        pytest.skip("small blocks are opened by one request, which begins at 0")
    pushed(folder, tmp_path)
    Lying.start(tmp_path, 0.0)
    fsspec.register_implementation("lying", Lying, clobber=True)
    Lying.lie = staticmethod(lambda data, read, start, stop: data)
    options = RemoteOptions(chunk_bytes=chunk_bytes, num_retries=0)
    windows = WindowDataset("lying://walk", 4, remote=options)
    far = RolloutDataset(
        "lying://walk", 2, device="cpu", remote=options, cache="ram" if way == "cache" else "none"
    )
    if way == "playback":
        far.get_batch(1)
    Lying.lie = staticmethod(LIES[lie])
    with warnings.catch_warnings(), pytest.raises((DataFileError, ValueError)) as actual:
        warnings.simplefilter("ignore")
        if way == "windows":
            list(WindowLoader(windows, 16))
        elif way in ("playback", "cache"):
            drain(far, 5)
        else:
            WindowDataset("lying://walk", 4, remote=options, verify_on_open=way == "verify")
    if way in ("windows", "playback"):
        assert "checksum" in str(actual.value) and "rollout_" in str(actual.value)


@pytest.mark.each_value
@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("options", [{}, {"cache": "ram"}, {"num_envs": 1}], ids=str)
@pytest.mark.parametrize("chunk_bytes", [4096, 1 << 20])
def test_playback_of_a_copy_without_checksums_compares_checksums_of_fragments(
    tmp_path, lie, options, chunk_bytes
):
    record(tmp_path / "walk", [90, 300, 40, 170], num_envs=2, with_final=True)
    Lying.start(tmp_path, 0.0)
    fsspec.register_implementation("lying", Lying, clobber=True)
    Lying.lie = staticmethod(lambda data, read, start, stop: data)
    arguments = {"num_envs": 2, "device": "cpu", **options}
    far = RolloutDataset(
        "lying://walk", remote=RemoteOptions(chunk_bytes=chunk_bytes, num_chunks=2), **arguments
    )
    near = RolloutDataset(tmp_path / "walk", **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for expected, got in zip(drain(near, 5), drain(far, 5), strict=True):
            assert (expected.observation == got.observation).all()
        with pytest.raises(DataFileError, match="checksum"):
            second = RolloutDataset(
                "lying://walk", remote=RemoteOptions(chunk_bytes=chunk_bytes), **arguments
            )
            second.source.refresh()
            Lying.lie = staticmethod(LIES[lie])
            second.source.refresh = lambda *arguments: None  # the headers are known
            drain(second, 5)


def test_workers_compare_checksums_of_fragments_without_checksums_of_pieces(tmp_path):
    record(tmp_path / "walk", [90, 300, 40, 170], num_envs=2)
    Lying.start(tmp_path, 0.0)
    fsspec.register_implementation("lying", Lying, clobber=True)
    Lying.lie = staticmethod(lambda data, read, start, stop: data)
    far = RolloutDataset("lying://walk", 2, device="cpu", remote=RemoteOptions(num_retries=0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        far.get_batch(1)  # this process reads the headers, a worker only rows
        far.reset()
        Lying.lie = staticmethod(flipped)
        with pytest.raises(DataFileError, match="checksum"):
            list(loader(far, num_workers=1, multiprocessing_context="fork"))


WAYS = {
    "opening": lambda url, options: WindowDataset(url, 4, remote=options),
    "windows": lambda url, options: list(WindowLoader(WindowDataset(url, 4, remote=options), 256)),
    "playback": lambda url, options: drain(
        RolloutDataset(url, 8, device="cpu", remote=options), 50
    ),
    "2 frames of 200": lambda url, options: list(
        WindowLoader(WindowDataset(url, 2, stride=200, remote=options), 64)
    ),
    "single windows": lambda url, options: [
        WindowDataset(url, 2, stride=200, fields=["action"], remote=options)[number]
        for number in (0, 5, 11)
    ],
}
#: Kind of recording -> measured growth of the fetched bytes in percent; the law is a twentieth.
GROWTH = {
    "big blocks": 2.5,
    "small blocks": 1.5,
    "narrow rows": 4.4,
    "wide rows": 0.6,
    "coded": 1.2,
}


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """Recordings in two folders: as uploaded by `push`, and without the checksums."""
    root = tmp_path_factory.mktemp("grown")
    generator = np.random.default_rng(0)
    for kind in GROWTH:
        width = {"narrow rows": 6, "wide rows": 1800}.get(kind, 40)
        options = {"block_bytes": 200_000} if kind == "small blocks" else {}
        if kind == "coded":
            options = {"obs_disassemble_mapping": {"rgb": "lz4"}}
        with RolloutWriter(root / "source" / kind, 4, durable=False, **options) as writer:
            for step in range(600 if kind == "wide rows" else 3000):
                row = generator.normal(size=(4, width)).astype(np.float32)
                rgb = generator.integers(0, 255, (4, 8, 8, 3)).astype(np.uint8)
                observation = {"state": row, "rgb": rgb} if kind == "coded" else row
                done = np.full(4, step % 300 == 299)
                writer.add(observation=observation, action=row[:, :4], reward=row[:, 0], done=done)
        store_at(root / "pushed", "store")
        push(root / "source" / kind, f"store://{kind}")
        (root / "bare" / kind).mkdir(parents=True)
        for path in (root / "source" / kind).glob("[!.]*"):
            shutil.copy(path, root / "bare" / kind)
    return root


def fetched(folder, way, options) -> int:
    """Count the bytes that are fetched."""
    url = lagging(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        WAYS[way](url, options)
    return sum(stop - start for _, start, stop in LaggingFileSystem.requests if stop)


@pytest.mark.each_value
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", GROWTH)
@pytest.mark.parametrize("chunk_bytes", [4096, 1 << 16, 1 << 20])
def test_checksums_add_at_most_a_twentieth_to_the_fetched_bytes(recordings, kind, way, chunk_bytes):
    options = RemoteOptions(chunk_bytes=chunk_bytes)
    before = fetched(recordings / "bare" / kind, way, options)
    growth = 100 * (fetched(recordings / "pushed" / kind, way, options) / before - 1)
    assert growth <= GROWTH[kind] <= 5


WHOLE_WAYS = {
    "playback": lambda url, options: drain(
        RolloutDataset(url, 8, device="cpu", remote=options), 20
    ),
    "one env": lambda url, options: drain(RolloutDataset(url, 1, device="cpu", remote=options), 20),
    "shuffled": lambda url, options: drain(
        RolloutDataset(url, 32, device="cpu", remote=options, random_shuffle_traj_order=True), 5
    ),
    "cache": lambda url, options: drain(
        RolloutDataset(url, 8, device="cpu", remote=options, cache="ram"), 20
    ),
    "recording": lambda url, options: [
        episode.observation for episode in rollout_data.open(url, remote=options)
    ],
}


@pytest.fixture(scope="module")
def short_episodes(tmp_path_factory):
    """Episodes of 37 frames with rows of 8 bytes, in two folders: as uploaded by `push`, and
    without the checksums.
    """
    root = tmp_path_factory.mktemp("short")
    with RolloutWriter(root / "source", 4, durable=False) as writer:
        for step in range(3000):
            row = np.full((4, 1), step % 200, np.uint8)
            done = np.full(4, step % 37 == 36)
            writer.add(observation=row, action=row, reward=np.zeros(4, np.float32), done=done)
    store_at(root, "store")
    push(root / "source", "store://pushed")
    (root / "bare").mkdir()
    for path in (root / "source").glob("[!.]*"):
        shutil.copy(path, root / "bare")
    return root


@pytest.mark.each_value
@pytest.mark.parametrize("way", WHOLE_WAYS)
@pytest.mark.parametrize("chunk_bytes", [4096, 1 << 20])
def test_whole_short_episodes_of_narrow_rows_cost_at_most_a_twentieth_more(
    short_episodes, way, chunk_bytes, monkeypatch
):
    monkeypatch.setitem(WAYS, way, WHOLE_WAYS[way])
    options = RemoteOptions(chunk_bytes=chunk_bytes)
    before = fetched(short_episodes / "bare", way, options)
    assert before < fetched(short_episodes / "pushed", way, options) <= 1.05 * before


@pytest.mark.parametrize("lie", LIES)
def test_wrong_bytes_of_short_episodes_raise_and_are_never_returned(short_episodes, lie):
    Lying.start(short_episodes, 0.0)
    fsspec.register_implementation("lying", Lying, clobber=True)
    Lying.lie = staticmethod(lambda data, read, start, stop: data)
    far = RolloutDataset("lying://pushed", 1, device="cpu", remote=RemoteOptions(num_retries=0))
    near = RolloutDataset(short_episodes / "source", 1, device="cpu")
    for _ in range(2):
        assert (far.get_batch(30).observation == near.get_batch(30).observation).all()
    Lying.lie = staticmethod(LIES[lie])
    with pytest.raises(DataFileError, match=r"rows .* of data/frames, expected checksum"):
        while True:
            assert (far.get_batch(30).observation == near.get_batch(30).observation).all()


def test_a_copy_without_checksums_is_read_with_one_warning(folder):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        far = far_windows(lagging(folder))
        check_epoch(WindowDataset(folder, 4), far)
        far.advice  # noqa: B018
    texts = [
        str(warning.message)
        for warning in caught
        if "have no file of checksums" in str(warning.message)
    ]
    assert len(texts) == 1 and "rollout-data push" in texts[0]
    assert far.problems == []


def test_a_pushed_recording_is_read_by_workers_without_a_warning(folder, tmp_path):
    url = pushed(folder, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RolloutDataWarning)
        check_epoch(WindowDataset(folder, 4), far_windows(url))


def test_pushing_again_adds_missing_checksums_and_replaces_damaged_ones(folder, tmp_path):
    system, num_blocks = fsspec.filesystem("memory"), len(list(folder.glob("*.h5")))
    push(folder, "memory://mended")
    names = [path for path in system.ls("/mended", detail=False) if path.endswith(".sums")]
    before = {name: system.cat_file(name) for name in names}
    assert len(names) == num_blocks
    system.rm_file(names[0])
    system.pipe_file(names[1], b"damaged")
    assert push(folder, "memory://mended") == 0
    assert {name: system.cat_file(name) for name in names} == before
    # Other pieces would do as well
    push(folder, "memory://mended", remote=RemoteOptions(chunk_bytes=1 << 13))
    assert {name: system.cat_file(name) for name in names} == before


def test_a_push_that_is_killed_anywhere_is_finished_by_the_next_one(folder, tmp_path):
    store_at(tmp_path, "store")
    for number in (1, 3, 10, 20, 30):
        pushed_until_killed(folder, "store://walk", number)
        for path in (tmp_path / "walk").glob("*.h5") if (tmp_path / "walk").exists() else ():
            assert (path.parent / f"{path.name}.sums").exists()  # they come first
    push(folder, "store://walk")
    blocks = BlockFolder.at(folder)
    for path in folder.glob("*.h5"):
        there = (tmp_path / "walk" / f"{path.name}.sums").read_bytes()
        assert there == sums_of(path, spans_of(blocks.blocks[path.name], blocks.schema))
    check_epoch(WindowDataset(folder, 4), far_windows(lagging(tmp_path / "walk")))


def test_no_checksums_are_put_beside_another_file(folder, tmp_path):
    store_at(tmp_path, "store")
    (tmp_path / "walk").mkdir()
    name = min(path.name for path in folder.glob("*.h5"))
    (tmp_path / "walk" / name).write_bytes(b"something else")
    with pytest.raises(DataFileError, match="has other content"):
        push(folder, "store://walk")
    assert not (tmp_path / "walk" / f"{name}.sums").exists()
    assert Store.root == tmp_path


def test_pruning_a_copied_folder_deletes_its_checksums(tmp_path):
    record(tmp_path / "walk", [40] * 12, num_envs=2, flush_every=45)
    for path in (tmp_path / "walk").glob("*.h5"):
        (path.parent / f"{path.name}.sums").write_bytes(b"checksums")
    deleted = prune(tmp_path / "walk", trajectories=2)
    assert deleted and not any((path.parent / f"{path.name}.sums").exists() for path in deleted)
    assert len(list((tmp_path / "walk").glob("*.sums"))) == len(
        list((tmp_path / "walk").glob("*.h5"))
    )


def test_pieces_are_whole_rows_and_at_most_the_least_chunk(recordings):
    for kind in GROWTH:
        for path in (recordings / "pushed" / kind).glob("*.sums"):
            spans, sums = parse(path.read_bytes(), str(path))
            assert sum(span.num_pieces for span in spans) == len(sums)
            assert all(span.piece_bytes <= 4096 for span in spans)
            assert spans[-1].stop == path.with_suffix("").stat().st_size


@pytest.mark.parametrize("place", ["head", "spans", "checksums"])
def test_damaged_checksums_are_named_and_not_the_block(recordings, tmp_path, place):
    shutil.copytree(recordings / "pushed" / "big blocks", tmp_path / "walk")
    path = next((tmp_path / "walk").glob("*.sums"))
    content = bytearray(path.read_bytes())
    content[{"head": 12, "spans": 40, "checksums": -1000}[place]] ^= 1
    path.write_bytes(content)
    with (
        warnings.catch_warnings(),
        pytest.raises(DataFileError, match=r"checksum file .*\.sums'? is damaged"),
    ):
        warnings.simplefilter("ignore")
        list(WindowLoader(WindowDataset(lagging(tmp_path / "walk"), 4), 256))


def test_checksums_of_an_earlier_layout_are_refused_until_the_next_push(folder, tmp_path):
    url = pushed(folder, tmp_path)
    for path in (tmp_path / "walk").glob("*.sums"):
        path.write_bytes(b"RDSUMS01" + path.read_bytes()[8:])
    with warnings.catch_warnings(), pytest.raises(DataFileError, match="Push the block again"):
        warnings.simplefilter("ignore")
        WindowDataset(url, 4)


@pytest.fixture(scope="module")
def many_pieces(tmp_path_factory):
    """A folder of blocks with more checksums than the cache keeps."""
    folder = tmp_path_factory.mktemp("pieces") / "walk"
    with RolloutWriter(folder, 2, durable=False, block_bytes=500_000) as writer:
        for step in range(3000):
            row = np.full((2, 40), step, np.float32)
            writer.add(observation=row, action=row[:, :4], done=np.full(2, step % 300 == 299))
    assert len(list(folder.glob("*.h5"))) > 2
    return folder


@pytest.mark.parametrize("way", ["windows", "playback", "recording"])
def test_rows_of_a_replaced_block_do_not_match_the_new_checksums(tmp_path, way):
    for name, first in (("before", 0), ("after", 10_000)):
        with RolloutWriter(tmp_path / name, 4, durable=False, writer_name="w") as writer:
            for step in range(5000):
                row = np.full((4, 24), first + step, np.float32)
                writer.add(observation=row, action=row[:, :1], done=np.full(4, step % 100 == 99))
    store_at(tmp_path, "store")
    push(tmp_path / "before", "store://walk")
    push(tmp_path / "after", "store://other")
    remote = RemoteOptions(chunk_bytes=1 << 14, num_chunks=1, num_retries=0)
    url = lagging(tmp_path / "walk")
    far = RolloutDataset(
        url, 4, device="cpu", remote=remote, random_shuffle_traj_order=True, seed=1
    )
    far.get_batch(1)
    windows = WindowDataset(url, 4, remote=remote)
    recording = rollout_data.open(url, remote=remote)
    for path in (tmp_path / "other").glob("rollout_*"):
        shutil.copy(path, tmp_path / "walk")
    ways = {
        "windows": lambda: (
            batch["observation"] for batch in WindowLoader(windows, 64, num_ahead=1)
        ),
        "playback": lambda: (far.get_batch(5).observation for _ in range(1000)),
        "recording": lambda: (episode.observation for episode in recording[50:]),
    }
    with pytest.raises(DataFileError, match="checksum"):
        for observation in ways[way]():
            assert observation.max() < 10_000


@pytest.mark.each_value
@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("way", ["windows", "playback", "endless playback", "recording"])
def test_missing_checksums_raise_and_are_not_reported_as_a_missing_block(
    many_pieces, tmp_path, way, on_error
):
    url = pushed(many_pieces, tmp_path)
    remote = RemoteOptions(chunk_bytes=1 << 16, num_chunks=2, num_retries=0)
    loops = 0 if way == "endless playback" else 1
    far = RolloutDataset(url, 2, loops, device="cpu", remote=remote, on_error=on_error)
    far.get_batch(1)
    windows = WindowDataset(url, 4, remote=remote, on_error=on_error)
    recording = rollout_data.open(url, remote=remote)
    for path in (tmp_path / "walk").glob("*.sums"):
        path.unlink()
    with (
        warnings.catch_warnings(),
        pytest.raises(FetchError, match=r"\.sums' was removed\. Push the block again"),
    ):
        warnings.simplefilter("error")
        if way == "windows":
            list(WindowLoader(windows, 64))
        elif way == "recording":
            [episode.action for episode in recording]
        else:
            for _ in range(1000):
                far.get_batch(5)
    assert (
        far.num_lost_trajectories == windows.num_lost_windows == far.source.num_vanished_blocks == 0
    )
    with pytest.warns(RolloutDataWarning, match="have no file of checksums"):
        again = RolloutDataset(url, 2, device="cpu", remote=remote)
        near = RolloutDataset(many_pieces, 2, device="cpu")
        for expected, got in zip(drain(near, 50), drain(again, 50), strict=True):
            assert (expected.observation == got.observation).all()


def test_checksums_deleted_before_the_header_is_read_hide_no_block(many_pieces, tmp_path):
    url = pushed(many_pieces, tmp_path)

    def vanish(path, start, stop):
        if path.endswith(".sums"):
            (tmp_path / path).unlink(missing_ok=True)

    LaggingFileSystem.fails = staticmethod(vanish)
    with pytest.raises(FetchError, match=r"\.sums' was removed"):
        WindowDataset(url, 4)


def test_a_block_that_vanishes_with_its_checksums_is_played_around(many_pieces, tmp_path):
    url = pushed(many_pieces, tmp_path)
    far = RolloutDataset(
        url, 2, device="cpu", remote=RemoteOptions(chunk_bytes=1 << 16, num_chunks=2)
    )
    far.get_batch(3)
    for path in (tmp_path / "walk").glob(f"{max((tmp_path / 'walk').glob('*.h5')).name}*"):
        path.unlink()
    with pytest.warns(RolloutDataWarning, match=r"Trajector.* cannot be read"):
        drain(far, 50)
    assert far.num_lost_trajectories > 0
