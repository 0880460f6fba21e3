"""LeRobot sets and HDF5 files at a URL are read like local ones.

Every other format raises an error with its name.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import shutil
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fsspec")
pytest.importorskip("pyarrow")

import fsspec

import rollout_data
from benchmarks.lagging import LaggingFileSystem
from rollout_data import RemoteOptions, RolloutDataset, RolloutWriter, WindowDataset
from rollout_data.formats.registry import FORMATS
from rollout_data.remote.access_errors import AccessError
from rollout_data.remote.local_copy import COPIED, local_origin
from rollout_data.remote.locations import Origin, remote_path
from rollout_data.tools.cli.command_line import main
from storage.errors import DataFileError, ForeignFileError, RolloutDataError, UsageError

WRITTEN = {"lerobot": {"fps": 10}, "robomimic": {}, "isaaclab": {}, "minari": {}, "d4rl": {}}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rollout_data" / "remote"


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets") / "own"
    with RolloutWriter(folder, 1, writer_name="arm", durable=False) as writer:
        for episode, length in enumerate((5, 6, 7)):
            for t in range(length):
                row = np.array([[episode, t, 1]], np.float32)
                writer.add(
                    observation=row,
                    action=row[:, :2] + 1,
                    reward=row[:, 0],
                    terminated=[t == length - 1],
                )
    return folder


def converted(own, target, form):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rollout_data.convert(own, target, form, progress=False, **WRITTEN[form])
    return target


def at_url(path, name: str) -> str:
    system = fsspec.filesystem("memory")
    if system.exists(f"/{name}"):
        system.rm(f"/{name}", recursive=True)
    system.put(str(path), f"/{name}", recursive=path.is_dir())
    return f"memory://{name}"


def check_same(near, far):
    assert far.ids == near.ids and len(near) == 3 and far.format == near.format
    for expected, got in zip(near, far, strict=True):
        assert got.schema == expected.schema and got.task == expected.task
        for name in expected.schema:
            assert np.array_equal(got.read(name), expected.read(name))


@pytest.mark.parametrize("form", WRITTEN)
def test_a_set_at_a_url_equals_the_local_set(own, tmp_path, form):
    path = converted(
        own, tmp_path / ("set.hdf5" if form in ("robomimic", "isaaclab", "d4rl") else "set"), form
    )
    url = at_url(path, f"bucket/{path.name}")
    check_same(rollout_data.open(path), rollout_data.open(url))
    near, far = WindowDataset(path, 2), WindowDataset(url, 2)
    everything = range(len(near))
    assert len(far) == len(near) > 0
    assert all(
        (near.__getitems__(everything)[name] == far.__getitems__(everything)[name]).all()
        for name in ("action",)
    )
    batches = (
        RolloutDataset(item, 2, device="cpu").get_batch(4)
        for item in (path, url, rollout_data.open(url))
    )
    first, *others = (batch.observation for batch in batches)
    assert all((first == other).all() for other in others)


def test_every_format_is_either_copied_or_refused():
    assert set(COPIED) <= set(FORMATS)
    assert {name for name, format in FORMATS.items() if format.reader.startswith("hdf5.")} <= set(
        COPIED
    )


@pytest.mark.parametrize(
    ("files", "name"),
    [
        (["data.zarr/.zgroup", "data.zarr/data/.zgroup"], "zarr"),
        (["data/.zarray", "meta/episode_ends/.zarray"], "zarr"),
        (
            [
                "1.0.0/dataset_info.json",
                "1.0.0/features.json",
                "1.0.0/x-train.tfrecord-00000-of-00001",
            ],
            "rlds",
        ),
        (["run.mcap"], "mcap"),
        (["walk.npz"], "ogbench or motion"),
        (["motions/walk.json"], "motion"),
        (["rank_0/x.pt"], "rlinf"),
        (["trajectory_0_w0.pt", "metadata.json"], "rlinf"),
        (["trajectory_0/chunk_0.npz"], "trajectory folders|ogbench"),
        (["README.txt"], "unknown, with files such as README.txt"),
        (["data/part-0.arrow", "metadata.json"], "minari of Arrow or Parquet files"),
    ],
)
@pytest.mark.parametrize("way", ["open", "windows", "stream", "named"])
def test_another_format_at_a_url_is_refused_by_its_name(files, name, way):
    system = fsspec.filesystem("memory")
    if system.exists("/refused"):
        system.rm("/refused", recursive=True)
    for file in files:
        system.pipe_file(f"/refused/{file}", b"{}")
    calls = {
        "open": lambda: rollout_data.open("memory://refused"),
        "windows": lambda: WindowDataset("memory://refused", 1),
        "stream": lambda: RolloutDataset("memory://refused", 1, device="cpu").get_batch(1),
        "named": lambda: rollout_data.open("memory://refused", "zarr"),
    }
    with pytest.raises(
        ForeignFileError, match=f"the format ({name if way != 'named' else 'zarr'}).*Copy the data"
    ):
        calls[way]()


def test_a_set_is_copied_once_and_again_after_a_change_within_its_space_limit(own, tmp_path, cache):
    path = converted(own, tmp_path / "set", "lerobot")
    root = tmp_path / "set"
    LaggingFileSystem.start(tmp_path, 0.0)
    monkey = Recursive.started(tmp_path)
    url = "recursive://set"
    check_same(rollout_data.open(path), rollout_data.open(url))
    fetched = sum(stop - start for _, start, stop in monkey.requests if stop)
    assert fetched == sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    monkey.requests.clear()
    check_same(rollout_data.open(path), rollout_data.open(url))
    assert not [request for request in monkey.requests if request[2]]
    table = next(root.glob("data/**/*.parquet"))
    table.touch()
    rollout_data.open(url)
    assert [request for request in monkey.requests if request[2]]
    with pytest.raises(UsageError, match="cache_bytes is 1000"):
        rollout_data.open(
            "recursive://set", remote=RemoteOptions(cache_bytes=1000, chunk_bytes=5000)
        )
    assert sum(path.is_dir() for path in cache.iterdir()) == 2


class Recursive(LaggingFileSystem):
    """Nested folders, in the order of `find`."""

    protocol = "recursive"

    @classmethod
    def started(cls, root):
        cls.start(root, 0.0)
        fsspec.register_implementation(cls.protocol, cls, clobber=True)
        return cls

    def ls(self, path, detail=True, **options):
        name = self._answer(path, None, None)
        if (self.root / name).is_file():
            raise NotADirectoryError(name)
        result = []
        for item in sorted((self.root / name).iterdir()):
            kind = "directory" if item.is_dir() else "file"
            result.append({"name": f"{name}/{item.name}", "size": item.stat().st_size, "mtime": item.stat().st_mtime_ns,
                          "type": kind})  # fmt: skip
        return result if detail else [entry["name"] for entry in result]


class Stamped(Recursive):
    """Lists stamps under other names, and sizes only for single files, as web servers do."""

    protocol = "stamped"
    stamps = staticmethod(lambda content: {})

    def ls(self, path, detail=True, **options):
        return [entry | {"size": None} for entry in map(self._stamped, super().ls(path))]

    def info(self, path, **options):
        name = self._answer(path, None, None)
        file = self.root / name
        if not file.exists():
            raise FileNotFoundError(name)
        kind = "directory" if file.is_dir() else "file"
        return self._stamped({"name": name, "size": file.stat().st_size, "type": kind})

    def _stamped(self, entry):
        file = self.root / entry["name"]
        entry.pop("mtime", None)
        return entry | (self.stamps(file.read_bytes()) if file.is_file() else {})


def replaced_in_place(own, tmp_path):
    """Convert two recordings of equal shape.

    Return the first one, and the content of the other with the same size.
    """
    other = tmp_path / "other_recording"
    with RolloutWriter(other, 1, writer_name="arm", durable=False) as writer:
        for episode in rollout_data.open(own):
            for t, row in enumerate(episode.read("observation")):
                row = row[None] + 100
                writer.add(
                    observation=row,
                    action=row[:, :2],
                    reward=row[:, 0],
                    terminated=[t == len(episode) - 1],
                )
    path = converted(own, tmp_path / "served" / "set.hdf5", "robomimic")
    content = converted(other, tmp_path / "other.hdf5", "robomimic").read_bytes()
    assert len(content) == path.stat().st_size
    return path, content


@pytest.mark.parametrize("name", ["blob_id", "Last-Modified", "sha", "modified", "ETag", None])
def test_a_replaced_file_is_copied_again_for_every_form_of_version(
    own, tmp_path, monkeypatch, name
):
    path, content = replaced_in_place(own, tmp_path)
    system = Stamped.started(path.parent)
    monkeypatch.setattr(
        system, "stamps", staticmethod(lambda data: {name: hash(data)} if name else {})
    )
    check_same(rollout_data.open(path), rollout_data.open("stamped://set.hdf5"))
    path.write_bytes(content)
    check_same(rollout_data.open(path), rollout_data.open("stamped://set.hdf5"))
    system.requests.clear()
    check_same(rollout_data.open(path), rollout_data.open("stamped://set.hdf5"))
    assert bool(name) != any(stop for _, _, stop in system.requests)


def test_a_file_that_is_replaced_while_it_is_copied_is_an_error_and_is_copied_whole_the_next_time(
    own, tmp_path, monkeypatch
):
    path, content = replaced_in_place(own, tmp_path)
    system = Stamped.started(path.parent)
    monkeypatch.setattr(system, "stamps", staticmethod(lambda data: {"ETag": hash(data)}))
    remote = RemoteOptions(chunk_bytes=4096, num_requests=1)

    def act(name, start, stop):
        if start:
            path.write_bytes(content)

    system.fails = staticmethod(act)
    with pytest.raises(
        DataFileError,
        match=r"changed while they were copied: 'set\.hdf5' was replaced",
    ):
        rollout_data.open("stamped://set.hdf5", remote=remote)
    system.fails = staticmethod(lambda *request: None)
    check_same(rollout_data.open(path), rollout_data.open("stamped://set.hdf5", remote=remote))


@pytest.mark.parametrize("names", [(), ("set.hdf5",)])
def test_a_file_removed_while_it_is_copied_raises_with_the_url(own, tmp_path, names):
    path, _ = replaced_in_place(own, tmp_path)
    system = Stamped.started(path.parent)

    def act(name, start, stop):
        if stop:
            raise FileNotFoundError(errno.ENOENT, "no such object", *names)

    system.fails = staticmethod(act)
    with pytest.raises(
        DataFileError,
        match=r"The files of 'stamped://set\.hdf5' changed while they were copied: .*no such object",
    ):
        rollout_data.open("stamped://set.hdf5")


@pytest.mark.parametrize("form", ["rollout-data", "lerobot"])
def test_a_listing_without_sizes_finds_every_file(own, tmp_path, form):
    path = (
        shutil.copytree(own, tmp_path / "set")
        if form == "rollout-data"
        else converted(own, tmp_path / "set", form)
    )
    Stamped.started(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_same(rollout_data.open(path), rollout_data.open("stamped://set"))


def test_a_store_without_file_sizes_raises(own, tmp_path, monkeypatch):
    shutil.copytree(own, tmp_path / "set")
    system = Stamped.started(tmp_path)
    monkeypatch.setattr(
        system, "info", lambda self, path, **options: {"name": path, "size": None, "type": "file"}
    )
    with pytest.raises(DataFileError, match="reports no size of the file"):
        rollout_data.open("stamped://set")


@pytest.mark.parametrize("url", ["simplecache::memory://set", "blockcache::s3:/bucket/set"])
def test_a_url_of_chained_file_systems_raises_and_creates_no_folder(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"the protocol '{url.partition(':/')[0]}'"):
        rollout_data.open(url)
    with pytest.raises(UsageError, match="must be a local path, got the URL"):
        RolloutWriter(url, 1)
    assert not list(tmp_path.iterdir())


def test_a_denied_request_while_copying_raises_and_leaves_no_partial_copy(own, tmp_path):
    path = converted(own, tmp_path / "set", "lerobot")
    system = Recursive.started(tmp_path)

    def act(name, start, stop):
        if name.endswith(".parquet") and stop:
            raise PermissionError("403 Forbidden: the token has expired")

    system.fails = staticmethod(act)
    with pytest.raises(AccessError, match="the token has expired"):
        rollout_data.open("recursive://set")
    system.fails = staticmethod(lambda *request: None)
    check_same(rollout_data.open(path), rollout_data.open("recursive://set"))


def numbers(batches):
    return [batch.observation.tolist() for batch in batches]


#: What takes a recording -> a call with it and a new folder; the same as locally, but for the name.
SAME = {
    "stream": lambda path, out: numbers([RolloutDataset(path, 2, device="cpu").get_batch(4)]),
    "latest": lambda path, out: numbers(
        [RolloutDataset(path, 2, device="cpu", keep_latest_n_trajs=2).get_batch(4)]
    ),
    "refresh": lambda path, out: RolloutDataset(path, 2, device="cpu", refresh_s=1).get_batch(4),
    "loader": lambda path, out: numbers(
        rollout_data.loader(RolloutDataset(path, 2, device="cpu"), num_workers=1)
    ),
    "windows": lambda path, out: WindowDataset(path, 2)[3]["action"].tolist(),
    "no such field": lambda path, out: WindowDataset(path, 2, fields=["other"]),
    "no such episode": lambda path, out: rollout_data.open(path).select("other"),
    "convert": lambda path, out: (rollout_data.convert(path, out, progress=False), read(out))[1],
    "merge": lambda path, out: (rollout_data.merge([path], out), read(out))[1],
    "split": lambda path, out: (rollout_data.split(path, {"all": 1.0}, out), read(out / "all"))[1],
    "repair": lambda path, out: (rollout_data.repair(path, out), read(out))[1],
    "doctor": lambda path, out: [str(finding) for finding in rollout_data.doctor(path).findings],
    "report": lambda path, out: (
        rollout_data.report(path, out.with_suffix(".html")).stat().st_size > 0
    ),
    "info": lambda path, out: commanded("info", path),
    "ls": lambda path, out: commanded("ls", path),
    "play": lambda path, out: commanded("play", path),
}
#: What only works on this machine.
REFUSED = {
    "drop": lambda path, out: rollout_data.drop(path, 0),
    "keep": lambda path, out: rollout_data.keep(path, 0),
    "tag": lambda path, out: rollout_data.tag(path, 0, task="push"),
    "prune": lambda path, out: rollout_data.prune(path, frames=3),
    "push": lambda path, out: rollout_data.push(path, "memory://elsewhere"),
    "verify": lambda path, out: commanded("verify", path),
    "pack": lambda path, out: commanded("pack", path, str(out)),
}


def read(path):
    return [episode.read("action").tolist() for episode in rollout_data.open(path)]


def commanded(name, path, *rest):
    """Run a command. Return its lines, or raise its error."""
    printed, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(printed), redirect_stderr(errors):
        code = main([name, str(path), *rest])
    if code:
        raise UsageError(errors.getvalue())
    return printed.getvalue()


def outcome(call, path, out):
    """Return the result of a call, or its error, with "PATH" for the path."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = call(path, out)
        except RolloutDataError as error:
            result = f"{type(error).__name__}: {error}"
    return repr(result).replace(str(path), "PATH")


@pytest.mark.parametrize("call", [*SAME, *REFUSED])
@pytest.mark.parametrize("form", ["lerobot", "robomimic"])
def test_each_call_returns_the_local_result_or_raises_with_the_url(
    own, tmp_path, cache, form, call
):
    path = converted(own, tmp_path / ("set.hdf5" if form == "robomimic" else "set"), form)
    url = at_url(path, f"calls/{path.name}")
    far = outcome({**SAME, **REFUSED}[call], url, tmp_path / "far")
    assert str(cache) not in far
    if call in SAME:
        assert far == outcome(SAME[call], path, tmp_path / "near")
    else:
        assert "Error" in far and "PATH" in far


@pytest.mark.parametrize("form", ["lerobot", "robomimic"])
def test_errors_of_damaged_files_name_the_url(own, tmp_path, cache, form):
    path = converted(own, tmp_path / ("set.hdf5" if form == "robomimic" else "set"), form)
    damaged = path if path.is_file() else next(path.glob("data/**/*.parquet"))
    damaged.write_bytes(damaged.read_bytes()[:-200])
    url = at_url(path, f"damaged/{path.name}")
    far = outcome(lambda item, out: (read(item), rollout_data.open(item).problems), url, tmp_path)
    assert "PATH" in far and "Error" in far and str(cache) not in far
    assert far == outcome(
        lambda item, out: (read(item), rollout_data.open(item).problems), path, tmp_path
    )


def test_a_path_of_a_copy_shows_the_url_and_opens_the_copy(own, tmp_path):
    path = converted(own, tmp_path / "set", "lerobot")
    url = at_url(path, "shown/set")
    rollout_data.open(url)
    far = local_origin(Origin(remote_path(url)), RemoteOptions()).path
    file = far / "meta" / "info.json"
    assert (
        str(file) == f"{url}/meta/info.json"
        and file.read_bytes() == (path / "meta/info.json").read_bytes()
    )
    assert (
        pickle.loads(pickle.dumps(file)) == file == Path(os.fspath(file))
        and len({file, Path(os.fspath(file))}) == 1
    )
    assert {path.name for path in far.iterdir() if path.name[0] != "."} == {
        item.name for item in path.iterdir()
    } - {item.name for item in path.glob(".*")}
    assert {str(path) for path in far.rglob("info.json")} == {str(file)}
