"""Data must be local, and errors if another package replaces ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import storage
from rollout_data import (
    RolloutDataset,
    RolloutWriter,
    TrajectoryReplayBuffer,
    WindowDataset,
    load_expert_trajectories,
    prune,
)
from rollout_data.tools.cli.command_line import main
from storage.errors import UsageError

ROOT = Path(__file__).parents[2]


def saved_async(where):
    with storage.AsyncCheckpointSaver() as saver:
        saver.save_async({"a": torch.zeros(1)}, where)


def a_storage():
    return storage.RolloutStorage(2, 3, (4,), None, (1,))


ENTRIES = {
    "writer": lambda where: RolloutWriter(where, 1),
    "replay": lambda where: TrajectoryReplayBuffer(auto_save=True, auto_save_path=where),
    "replay checkpoint": lambda where: TrajectoryReplayBuffer().load_checkpoint(where),
    "prune": lambda where: prune(where, frames=1),
    "motions": lambda where: load_expert_trajectories("list.txt", where, 2, "cpu"),
    "checkpoint": saved_async,
    "load checkpoint": lambda where: storage.load_checkpoint(where),
    "save store": lambda where: a_storage().save(where),
    "load store": lambda where: storage.RolloutStorage.load(where),
    "save buffer": lambda where: storage.ZBuffer(4, 2).save(where),
    "load buffer": lambda where: storage.load_buffer(where),
}


@pytest.mark.parametrize(
    "url", ["s3://bucket/walk", "gs://b/x", "https://a.b/c", "hf://datasets/x", "my+fs://x"]
)
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_url_raises_and_creates_no_folder(tmp_path, monkeypatch, entry, url):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="must be a local path, got the URL"):
        ENTRIES[entry](url)
    assert not list(tmp_path.iterdir())


def test_a_url_wrapped_in_path_raises(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="got the URL"):
        RolloutWriter(Path("s3://bucket/walk"), 1)
    assert not list(tmp_path.iterdir())


READERS = [
    lambda where: RolloutDataset(where, 1),
    lambda where: RolloutDataset([where], 1),
    WindowDataset,
]


@pytest.mark.parametrize("reader", READERS)
def test_a_url_without_fsspec_raises_with_the_install_command(monkeypatch, reader):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(
        UsageError,
        match=r"fsspec, which reads 's3://b/x', is not installed\. Install it with: pip install rollout-data\[remote\]",
    ):
        reader("s3://b/x")


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("url", ["my+fs://x", "file://tmp/x"])
def test_a_url_of_an_unknown_protocol_raises(tmp_path, monkeypatch, reader, url):
    pytest.importorskip("fsspec")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"fsspec does not support the protocol '.*' of '"):
        reader(url)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments", [["verify"], ["pack", "--in-place"], ["prune", "--frames", "1"]]
)
def test_commands_raise_for_a_url(capsys, arguments):
    assert main([arguments[0], "s3://bucket/walk", *arguments[1:]]) == 2
    assert "got the URL" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["run:1", "C:/data", "a:b/c", "s3", "2026-01-01T10:00:00"])
def test_file_names_may_have_a_colon(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with RolloutWriter(name, 1, durable=False) as writer:
        writer.add(observation=np.zeros((1, 1)), action=np.zeros((1, 1)), done=[True])
    assert RolloutDataset(name, 1, device="cpu").num_frames == 1


@pytest.mark.parametrize("kind", ["package", "with errors", "module", "folder"])
def test_a_folder_named_storage_that_shadows_the_package_is_reported(tmp_path, kind):
    hiding = tmp_path / ("storage.py" if kind == "module" else "storage")
    if kind == "module":
        hiding.write_text("")
    else:
        hiding.mkdir()
        (hiding / ("data.txt" if kind == "folder" else "__init__.py")).write_text("")
        if kind == "with errors":
            (hiding / "errors.py").write_text("")
    (tmp_path / "there").mkdir()
    os.symlink(ROOT / "rollout_data", tmp_path / "there" / "rollout_data")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, tmp_path / "there"))),
    }
    command = [sys.executable, "-c", "import rollout_data"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "ImportError: cannot import rollout_data: its package 'storage' is hidden by"
    )
    assert str(hiding) in last and "Rename" in last
