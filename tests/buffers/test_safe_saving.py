"""Saved folders and motions under real faults: flipped bytes, full disks, links, pipes, forged sizes, other savers."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import subprocess
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from storage import (
    DictBuffer,
    NaiveReplayBuffer,
    load_buffer,
    load_store,
)
from storage.errors import CorruptFileError, DataFileError, RolloutDataError, UnsafeFileError
from tests.saved import config_of

from .every_store import (
    BUFFERS,
    MAKERS,
    columns_of,
    in_child,
    items,
    load,
    plain,
    ring,
    rollout,
)


def flip_and_load(
    folder: Path, load_it: Callable[[Path], Any], stride: int, has_sums: bool, num_first: int = 0
) -> None:
    """Flip bytes of every file, one at a time.

    Loading must return the saved data, or raise our error with the name of the file.

    Every `stride`th byte is flipped, and the first bytes, in which HDF5 stores the positions of the
    rest.
    """
    whole = plain(load_it(folder))
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for place in (
            *range(min(num_first, len(content))),
            *range(len(content) % stride, len(content), stride),
        ):
            for bits in (0x01, 0xFF):
                damaged = bytearray(content)
                damaged[place] ^= bits
                path.write_bytes(damaged)
                try:
                    actual = plain(load_it(folder))
                except RolloutDataError as error:
                    assert str(folder) in str(error), f"{path.name} {place}: {error}"
                    continue
                assert actual == whole or not has_sums, (
                    f"byte {place} of {path.name} gave other data"
                )
        path.write_bytes(content)


def read_heaps(folder: Path) -> None:
    """Flip each byte that the guard reads, in saves whose attributes are texts, as written by
    earlier releases.
    """
    path = folder / "buffer.hdf5"
    content = path.read_bytes()
    start = content.index(b"GCOL")
    for place in range(start, start + 80):
        for bits in (0x01, 0x80, 0xFF, content[place]):
            damaged = bytearray(content)
            damaged[place] ^= bits
            path.write_bytes(damaged)
            try:
                load(folder)
            except RolloutDataError as error:
                assert str(path) in str(error)


def test_a_damaged_heap_of_an_earlier_save_does_not_hang(tmp_path: Path) -> None:
    ring().save(tmp_path / "b")
    path = tmp_path / "b" / "buffer.hdf5"
    with h5py.File(path) as file:
        save_id, columns = file.attrs["save_id"], {key: file[key][()] for key in file}
    with h5py.File(path, "w", libver=("v110", "v110"), track_order=True) as file:
        file.attrs["save_id"] = save_id
        for key, rows in columns.items():
            file[key] = rows
            file[key].attrs["crc32"] = np.uint32(zlib.crc32(rows.tobytes()))
    in_child("read_heaps(Path(sys.argv[1]))", tmp_path / "b")


def legacy(folder: Path, **extra: Any) -> Path:
    """Write a folder as earlier systems did: with h5py alone, without checksums."""
    folder.mkdir()
    values = np.arange(10, dtype=np.float32)[:, None]
    with h5py.File(folder / "buffer.hdf5", "w") as file:
        file["observation-state"], file["reward"] = values, values
        file.create_dataset("packed", data=values.repeat(8, 1), compression="gzip", chunks=(3, 4))
    config = {
        "capacity": 10,
        "_idx": 0,
        "_is_full": True,
        "nested_key_separator": "-",
        "__target__": "old.DictBuffer",
    }
    (folder / "config.json").write_text(json.dumps({**config, **extra}))
    return folder


def test_a_flipped_byte_of_an_earlier_folder_raises_a_library_error(
    tmp_path: Path,
) -> None:
    code = "flip_and_load(Path(sys.argv[1]), lambda path: load(path).get_full_buffer(), 61, False)"
    in_child(code, legacy(tmp_path / "old"))


def save_onto_a_full_disk(folder: Path, name: str, most_bytes: int) -> None:
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = plain(load(folder).state_dict())
    store = MAKERS[name]()
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))
    try:
        store.save(folder)
    except OSError as error:
        assert isinstance(error, RolloutDataError) and error.errno and str(folder) in str(error), (
            error
        )
    else:
        raise AssertionError("saved")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert plain(load(folder).state_dict()) == before and [
        x.name for x in folder.parent.iterdir()
    ] == [folder.name]
    store.save(folder)


@pytest.mark.parametrize("most_bytes", [0, 200, 3000])
@pytest.mark.parametrize("name", ["dict", "expert", "z", "sarsa", "advanced"])
def test_a_full_disk_is_an_os_error_that_names_the_folder_and_keeps_the_save(
    tmp_path: Path, name: str, most_bytes: int
) -> None:
    MAKERS[name]().save(tmp_path / "b")
    if max(path.stat().st_size for path in (tmp_path / "b").iterdir()) <= most_bytes:
        pytest.skip("the save is smaller")
    in_child(
        "save_onto_a_full_disk(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))",
        tmp_path / "b",
        name,
        most_bytes,
    )


def save_until_the_disk_is_full(folder: Path) -> None:
    ring().save(folder / "b")
    buffer = DictBuffer(capacity=100_000)
    buffer.extend({"x": torch.ones(100_000, 16)})
    storage = rollout(num_envs=50_000)
    for store, name in ((buffer, "b"), (storage, "c")):
        try:
            store.save(folder / name)
        except OSError as error:
            assert isinstance(error, RolloutDataError) and error.errno == 28, error
            assert f"{folder / name}" in str(error) and error.filename == str(folder / name), error
        else:
            raise AssertionError("saved")
    assert len(load(folder / "b")) == 3 and [x.name for x in folder.iterdir()] == ["b"]


def test_a_really_full_disk_does_not_kill_the_process(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("only root may mount a small disk")
    try:
        in_child("save_until_the_disk_is_full(Path(sys.argv[1]))", tmp_path)
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "kind", ["external", "soft", "virtual", "outside", "chunks", "group", "text"]
)
@pytest.mark.parametrize("name", MAKERS)
def test_external_and_virtual_datasets_raise(tmp_path: Path, name: str, kind: str) -> None:
    MAKERS[name]().save(tmp_path / "b")
    path = columns_of(tmp_path / "b")
    shutil.copy(path, tmp_path / "other.h5")
    with h5py.File(path, "r+") as file:
        key = next(iter(file))
        key = key if isinstance(file[key], h5py.Dataset) else f"{key}/{next(iter(file[key]))}"
        while not isinstance(file[key], h5py.Dataset):
            key = f"{key}/{next(iter(file[key]))}"
        rows = file[key][()]
        attributes = dict(file[key].attrs)
        if kind == "soft":
            file.move(key, "moved")
            file[key] = h5py.SoftLink("/moved")
        else:
            del file[key]
        if kind == "external":
            file[key] = h5py.ExternalLink(str(tmp_path / "other.h5"), key)
        elif kind == "virtual":
            layout = h5py.VirtualLayout(rows.shape, rows.dtype)
            layout[...] = h5py.VirtualSource(str(tmp_path / "other.h5"), key, rows.shape)
            file.create_virtual_dataset(key, layout)
        elif kind == "outside":
            file.create_dataset(key, rows.shape, rows.dtype, external=str(tmp_path / "other.h5"))
        elif kind == "chunks":
            file.create_dataset(
                key, (1 << 40, *rows.shape[1:]), rows.dtype, chunks=(1, *rows.shape[1:])
            )
        elif kind == "group":
            file.create_group(key)
        elif kind == "text":
            file.create_dataset(key, data=["x"] * len(rows), dtype=h5py.string_dtype())
        if kind != "soft":
            file[key].attrs.update(attributes) if kind in ("chunks", "group", "text") else None
    with pytest.raises(DataFileError, match=str(path)) as caught:
        load(tmp_path / "b")
    assert isinstance(caught.value, UnsafeFileError) == (
        kind in ("external", "soft", "virtual", "outside")
    )


@pytest.mark.each_value
@pytest.mark.parametrize("what", ["pipe", "device", "folder", "missing"])
@pytest.mark.parametrize("name", ["rollout", "dict", "expert", "z", "manager"])
def test_a_path_that_is_not_a_file_raises_at_once(tmp_path: Path, name: str, what: str) -> None:
    MAKERS[name]().save(tmp_path / "whole")
    file_names = [path.name for path in (tmp_path / "whole").iterdir()]
    for file_name in file_names:
        folder = tmp_path / file_name
        MAKERS[name]().save(folder)
        path = folder / file_name
        path.unlink()
        if what == "pipe":
            os.mkfifo(path)
        elif what == "device":
            path.symlink_to("/dev/zero")
        elif what == "folder":
            path.mkdir()
    code = (
        "for place in sys.argv[3:]:\n"
        "    try:\n"
        "        (load_buffer if sys.argv[2] in BUFFERS else load_store)(Path(sys.argv[1]) / place)\n"
        "    except DataFileError as error:\n"
        "        print(error)\n"
    )
    text = in_child(code, tmp_path, name, *file_names, timeout_s=60).splitlines()
    assert len(text) == len(file_names) and all(str(tmp_path) in line for line in text)


FORGED: dict[str, tuple[tuple[str, ...], Any]] = {
    "rollout": (("arguments", "num_envs"), 10**8),
    "queue": (("arguments", "num_transitions_per_env"), 10**8),
    "sarsa": (("arguments", "obs_shape"), [10**8]),
    "replay": (("numbers", "total"), 10**9),
    "naive": (("numbers", "total"), 10**9),
    "advanced": (("columns",), [{"name": "rng", "dtype": "float32", "shape": [10**9], "crc32": 0}]),
    "dict": (("total",), 10**9),
    "laned": (("num_lanes",), 10**9),
    "expert": (("lengths",), [10**9, 10**9]),
    "z": (("dim",), 10**9),
}


def load_with_little_memory(folder: Path, keeps_checksum: bool) -> None:
    load(folder.parent / "small")  # everything is imported and mapped once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        load(folder)
    except RolloutDataError as error:
        assert str(folder) in str(error), error
    else:
        assert "total" in str(FORGED) and not keeps_checksum
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


@pytest.mark.each_value
@pytest.mark.parametrize("keeps_checksum", [True, False])
@pytest.mark.parametrize("name", FORGED)
def test_a_config_with_large_declared_sizes_allocates_no_memory(
    tmp_path: Path, name: str, keeps_checksum: bool
) -> None:
    for folder in ("small", "b"):
        MAKERS[name]().save(tmp_path / folder)
    path = tmp_path / "b" / "config.json"
    config = json.loads(path.read_text()) if keeps_checksum else config_of(path)
    (*parents, last), value = FORGED[name]
    level = config
    for key in parents:
        level = level[key]
    assert last in level
    level[last] = value
    path.write_text(json.dumps(config))
    in_child(
        "load_with_little_memory(Path(sys.argv[1]), bool(int(sys.argv[2])))",
        tmp_path / "b",
        int(keeps_checksum),
    )


def numbers_of(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """List the paths of all ints of a config."""
    parts = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, part in parts:
        yield from numbers_of(part, (*path, key))
    if type(tree) is int and path != ("version",):
        yield path


def load_with_any_number(folder: Path) -> None:
    """Replace each number of a config by large numbers.

    Loading must need little memory, or raise one clear error.
    """
    load(folder)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    file = folder / "config.json"
    config = config_of(file)
    for path in numbers_of(config):
        for value in (10**8, 10**12):
            changed = json.loads(json.dumps(config))
            level = changed
            for key in path[:-1]:
                level = level[key]
            level[path[-1]] = value
            file.write_text(json.dumps(changed))
            with contextlib.suppress(RolloutDataError):
                load(folder)
            taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            assert taken < 100 << 10, f"{taken} KiB for {path} = {value}"


@pytest.mark.parametrize("name", MAKERS)
def test_no_number_of_a_config_allocates_memory(tmp_path: Path, name: str) -> None:
    MAKERS[name]().save(tmp_path / "b")
    in_child("load_with_any_number(Path(sys.argv[1]))", tmp_path / "b")


@pytest.mark.parametrize("name", ["rollout", "dict"])
def test_a_config_has_a_size_limit_and_a_checksum(tmp_path: Path, name: str) -> None:
    MAKERS[name]().save(tmp_path / "b")
    path = tmp_path / "b" / "config.json"
    text = path.read_text()
    rest = json.loads(text)
    assert rest.pop("crc32") == f"{zlib.crc32(json.dumps(rest).encode()):08x}"
    path.write_text(json.dumps(json.loads(text)))  # stored with another layout
    load(tmp_path / "b")
    changed = json.loads(text)
    changed["device"] = "cuda"
    path.write_text(json.dumps(changed))
    with pytest.raises(
        CorruptFileError,
        match=rf"^'{path}' is damaged or was edited: expected checksum [0-9a-f]{{8}}, got",
    ):
        load(tmp_path / "b")
    path.write_text(json.dumps(config_of(path) | {"device": "cpu"}))  # as in earlier saves
    load(tmp_path / "b")
    os.truncate(path, 1 << 40)
    too_large = f"has {1 << 40} bytes, expected at most {64 << 20}"
    with pytest.raises(CorruptFileError, match=f"^'{path}' {too_large}"):
        (load_buffer if name in BUFFERS else load_store)(tmp_path / "b")


@pytest.mark.parametrize("config", [{}, {"_idx": 0, "_is_full": False}, {"device": "cpu"}])
def test_a_folder_of_an_earlier_system_without_its_rows_is_an_error(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    folder = legacy(tmp_path / "old")
    (folder / "buffer.hdf5").unlink()
    (folder / "config.json").write_text(
        json.dumps({"capacity": 10, "__target__": "old.DictBuffer", **config})
    )
    with pytest.raises(CorruptFileError, match=r"does not contain the file buffer\.hdf5"):
        load_buffer(folder)
    DictBuffer(capacity=3).save(tmp_path / "new")  # a buffer that never had a row has no file
    assert load_buffer(tmp_path / "new").empty()
    cleared = ring()
    cleared.clear()
    cleared.save(tmp_path / "cleared")
    (tmp_path / "cleared" / "buffer.hdf5").unlink()
    with pytest.raises(CorruptFileError, match=r"does not contain the file buffer\.hdf5"):
        load_buffer(tmp_path / "cleared")


@pytest.mark.parametrize("kind", ["bfloat16", "nested"])
def test_stores_of_earlier_releases_load(tmp_path: Path, kind: str) -> None:
    store = items(NaiveReplayBuffer)
    if kind == "bfloat16":
        store = NaiveReplayBuffer(4, generator=0)
        store.append({"x": torch.arange(3).to(torch.bfloat16)})
    store.save(tmp_path / "b")
    config = config_of(tmp_path / "b" / "config.json")
    del config["save_id"]
    with h5py.File(tmp_path / "b" / "columns.hdf5", "r") as file:
        columns = {item["name"]: file[item["name"]][()] for item in config["columns"]}
    with h5py.File(tmp_path / "b" / "columns.hdf5", "w") as file:
        for item in config["columns"]:
            rows = columns[item["name"]]
            file[item["name"]] = rows.view("<u2") if item["dtype"] == "bfloat16" else rows
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    assert plain(load_store(tmp_path / "b").state_dict()) == plain(store.state_dict())


def save_trajectories_onto_a_full_disk(folder: Path, file_format: str) -> None:
    import signal

    from rollout_data import TrajectoryReplayBuffer

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    buffer = TrajectoryReplayBuffer(trajectory_format=file_format, trusted=True)
    buffer.add({"x": torch.rand(1000, 2, 10)})
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
    try:
        buffer.save_checkpoint(folder)
    except OSError as error:
        assert str(folder.parent) in str(error), error
    else:
        raise AssertionError("saved")


@pytest.mark.parametrize("file_format", ["h5", "pt", "pkl"])
def test_saving_trajectories_on_a_full_disk_raises_an_os_error(
    tmp_path: Path, file_format: str
) -> None:
    in_child(
        "save_trajectories_onto_a_full_disk(Path(sys.argv[1]), sys.argv[2])",
        tmp_path / "b",
        file_format,
    )
