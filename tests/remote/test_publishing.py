"""Publishing: uploads equal the recording, nothing is replaced, and a killed upload leaves complete
blocks.
"""

from __future__ import annotations

import shutil
import threading

import numpy as np
import pytest
import torch

pytest.importorskip("fsspec")

import fsspec

import rollout_data
from rollout_data import (
    RemoteOptions,
    RolloutDataset,
    RolloutWriter,
    WindowDataset,
    WindowLoader,
    push,
)
from rollout_data.tools.cli.command_line import main
from storage.errors import DataFileError, SchemaError, UsageError

from .places import (
    Store,
    check_epoch,
    far_windows,
    in_memory,
    pushed_until_killed,
    store_at,
    uneven,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return uneven(tmp_path_factory.mktemp("remote") / "walk", 30)


def there(name: str) -> dict[str, bytes]:
    system = fsspec.filesystem("memory")
    return {
        path.rpartition("/")[2]: system.cat_file(path)
        for path in system.ls(f"/{name}", detail=False)
    }


def test_a_pushed_recording_is_read_unchanged(folder):
    num_blocks = len(list(folder.glob("*.h5")))
    assert push(folder, "memory://pushed") == num_blocks > 1
    blocks = {path.name for path in folder.glob("*.h5")}
    assert set(there("pushed")) == {*blocks, *(f"{name}.sums" for name in blocks), "metadata.json"}
    far = far_windows("memory://pushed")
    check_epoch(WindowDataset(folder, 4), far)
    assert far.metadata == WindowDataset(folder, 4).metadata
    assert push(folder, "memory://pushed") == 0


def test_a_pushed_recording_has_its_tasks_and_texts(tmp_path):
    texts = ["open the door", "close it"]
    with RolloutWriter(tmp_path / "told", 2, durable=False) as writer:
        for t in range(4):
            writer.add(
                observation=torch.full((2, 1), t * 1.0),
                action=torch.zeros(2, 1),
                reward=torch.zeros(2),
                done=torch.tensor([t == 3, t == 3]),
                instruction=texts,
                episode=[{"task": item, "seed": 7} for item in texts] if t == 0 else None,
            )
    push(tmp_path / "told", "memory://told")
    near, far = rollout_data.open(tmp_path / "told"), rollout_data.open("memory://told")
    assert (
        sorted(far.table["task"].tolist()) == sorted(near.table["task"].tolist()) == sorted(texts)
    )
    for episode, there in zip(near, far, strict=True):
        assert there.metadata["seed"] == episode.metadata["seed"] == 7
        assert list(there["instruction"]) == list(episode["instruction"]) == [episode.task] * 4
    windows = WindowDataset("memory://told", 1, texts=True)
    batch = windows.collate(windows.__getitems__(range(len(windows))))
    assert {windows.texts[number] for number in batch["task"].tolist()} == set(texts)


class Failing:
    """Lets the uploads of a file system fail from the n-th on."""

    def __init__(self, monkeypatch, num_good, error):
        kind = type(fsspec.filesystem("memory"))
        put, self.num, self.error = kind.put_file, 0, error

        def failing(system, source, target, **options):
            self.num += 1
            if self.num > num_good and self.error is not None:
                raise self.error
            return put(system, source, target, **options)

        monkeypatch.setattr(kind, "put_file", failing)


def test_a_killed_upload_leaves_whole_blocks_and_the_next_push_completes_it(folder, tmp_path):
    blocks = {path.name: path.read_bytes() for path in folder.glob("*.h5")}
    store_at(tmp_path, "store")
    # More than are uploaded at once
    pushed_until_killed(folder, "store://walk", len(blocks), ".h5")
    actual = {path.name: path.read_bytes() for path in (tmp_path / "walk").glob("*.h5")}
    assert not (tmp_path / "walk" / "metadata.json").exists()
    assert 0 < len(actual) < len(blocks) and actual.items() <= blocks.items()
    assert push(folder, "store://walk") == len(blocks) - len(actual)
    check_epoch(WindowDataset(folder, 4), far_windows("store://walk"))


def test_an_interrupted_upload_ends_and_starts_no_other(folder, monkeypatch):
    failing = Failing(monkeypatch, 2, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        push(folder, "memory://interrupted")
    failing.error = None
    num_there = sum(name.endswith(".h5") for name in there("interrupted"))
    assert 0 < num_there < len(list(folder.glob("*.h5")))


def test_an_unanswered_upload_raises_within_its_time_out(folder, tmp_path):
    released = threading.Event()
    store_at(tmp_path, "store")
    Store.fails = staticmethod(
        lambda path, start, stop: released.wait() if stop and start is None else None
    )
    try:
        with pytest.raises(
            DataFileError, match=r"2 attempts to access '.*' at 'store://walk' failed: TimeoutError"
        ):
            push(folder, "store://walk", remote=RemoteOptions(timeout_s=1.0, num_retries=1))
        assert not released.is_set()
    finally:
        released.set()


@pytest.mark.parametrize("url", ["gs://bucket/runs/walk", "hf://datasets/someone/walk@main/data"])
def test_urls_of_other_stores_are_published_read_and_played(folder, tmp_path, url):
    store_at(tmp_path, url.partition(":")[0])
    assert push(folder, url) == len(list(folder.glob("*.h5")))
    check_epoch(WindowDataset(folder, 4), far_windows(url))
    far, near = RolloutDataset(url, 4, device="cpu"), RolloutDataset(folder, 4, device="cpu")
    for _ in range(5):
        assert torch.equal(far.get_batch(7).observation, near.get_batch(7).observation)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConnectionError("the line is down"), "2 attempts to access .* failed: .*the line is down"),
        (
            FileNotFoundError("no such bucket"),
            "FileNotFoundError: no such bucket. Check that",
        ),
        (PermissionError("no right"), "denies access to .*: PermissionError: no right"),
    ],
)
def test_a_failed_upload_is_retried_and_then_raises_one_error(folder, monkeypatch, error, told):
    Failing(monkeypatch, 0, error)
    with pytest.raises(DataFileError, match=told):
        push(folder, "memory://broken", remote=RemoteOptions(num_retries=1))


def test_another_file_of_the_same_name_is_never_replaced(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "walk")
    url, path = in_memory(folder, "taken"), min(other.glob("*.h5"))
    before = there("taken")
    fsspec.filesystem("memory").pipe_file(f"/taken/{path.name}", b"something else")
    with pytest.raises(DataFileError, match="exists and has other content than the block"):
        push(other, url)
    actual = there("taken")
    assert {name: actual[name] for name in before} == {**before, path.name: b"something else"}
    assert f"{path.name}.sums" not in actual


def test_other_fields_and_damaged_blocks_and_empty_folders_are_refused_before_anything_is_sent(
    folder, tmp_path
):
    with RolloutWriter(tmp_path / "other", 1, durable=False) as writer:
        writer.add(observation=np.zeros((1, 9)), action=np.zeros((1, 1)), done=[True])
    url = in_memory(folder, "full")
    before = there("full")
    with pytest.raises(SchemaError, match="the fields differ from the fields at"):
        push(tmp_path / "other", url)
    assert there("full") == before
    next((tmp_path / "other").glob("*.h5")).write_bytes(b"nothing")
    with pytest.raises(DataFileError):
        push(tmp_path / "other", "memory://damaged")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="contains no blocks"):
        push(tmp_path / "empty", "memory://empty")


def test_the_command_pushes(folder, capsys):
    assert main(["push", str(folder), "memory://commanded"]) == 0
    assert "blocks were uploaded" in capsys.readouterr().out
    assert main(["push", str(folder), str(folder)]) == 2
    assert next(iter(WindowLoader(far_windows("memory://commanded"), 4)))["mask"].all()
