"""Publishing: what arrives is what was recorded; nothing is replaced; a killed upload leaves whole blocks."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

pytest.importorskip("fsspec")

import fsspec

from rollout_data import RemoteOptions, RolloutWriter, WindowDataset, WindowLoader, push
from rollout_data.tools.command import main
from storage.errors import DataFileError, SchemaError, UsageError

from .places import check_epoch, far_windows, in_memory, uneven


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return uneven(tmp_path_factory.mktemp("remote") / "walk", 30)


def there(name: str) -> dict[str, bytes]:
    system = fsspec.filesystem("memory")
    return {path.rpartition("/")[2]: system.cat_file(path) for path in system.ls(f"/{name}", detail=False)}


def test_what_was_pushed_is_read_as_it_was_recorded(folder):
    num_blocks = len(list(folder.glob("*.h5")))
    assert push(folder, "memory://pushed") == num_blocks > 1
    assert set(there("pushed")) == {path.name for path in folder.iterdir() if path.name[0] != "."}
    far = far_windows("memory://pushed")
    check_epoch(WindowDataset(folder, 4), far)
    assert far.metadata == WindowDataset(folder, 4).metadata
    assert push(folder, "memory://pushed") == 0


class Failing:
    """Lets a file system's uploads fail from the n-th on."""

    def __init__(self, monkeypatch, num_good, error):
        kind = type(fsspec.filesystem("memory"))
        put, self.num, self.error = kind.put_file, 0, error

        def failing(system, source, target, **options):
            self.num += 1
            if self.num > num_good and self.error is not None:
                raise self.error
            return put(system, source, target, **options)

        monkeypatch.setattr(kind, "put_file", failing)


def test_an_upload_that_ends_early_leaves_whole_blocks_and_the_next_one_goes_on(folder, monkeypatch):
    failing = Failing(monkeypatch, 2, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        push(folder, "memory://killed")
    found = there("killed")
    assert 0 < len(found) < len(list(folder.glob("*.h5"))) and "metadata.json" not in found
    assert all(data == (folder / name).read_bytes() for name, data in found.items())
    failing.error = None
    assert push(folder, "memory://killed") == len(list(folder.glob("*.h5"))) - len(found)
    check_epoch(WindowDataset(folder, 4), far_windows("memory://killed"))


def test_an_upload_that_fails_is_repeated_and_in_the_end_one_error(folder, monkeypatch):
    failing = Failing(monkeypatch, 0, ConnectionError("the line is down"))
    with pytest.raises(DataFileError, match="the line is down, 2 times"):
        push(folder, "memory://broken", remote=RemoteOptions(num_retries=1))
    assert failing.num >= 2


def test_another_file_of_that_name_is_never_replaced(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "walk")
    url, path = in_memory(folder, "taken"), min(other.glob("*.h5"))
    before = there("taken")
    fsspec.filesystem("memory").pipe_file(f"/taken/{path.name}", b"something else")
    with pytest.raises(DataFileError, match="expected nothing, or the same block, got another file"):
        push(other, url)
    assert there("taken") == {**before, path.name: b"something else"}


def test_other_fields_and_damaged_blocks_and_empty_folders_are_refused_before_anything_is_sent(folder, tmp_path):
    with RolloutWriter(tmp_path / "other", 1, durable=False) as writer:
        writer.add(observation=np.zeros((1, 9)), action=np.zeros((1, 1)), done=[True])
    url = in_memory(folder, "full")
    before = there("full")
    with pytest.raises(SchemaError, match="the fields that it already holds"):
        push(tmp_path / "other", url)
    assert there("full") == before
    next((tmp_path / "other").glob("*.h5")).write_bytes(b"nothing")
    with pytest.raises(DataFileError):
        push(tmp_path / "other", "memory://damaged")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="expected blocks, got none"):
        push(tmp_path / "empty", "memory://empty")


def test_the_command_pushes(folder, capsys):
    assert main(["push", str(folder), "memory://commanded"]) == 0
    assert "blocks were uploaded" in capsys.readouterr().out
    assert main(["push", str(folder), str(folder)]) == 1
    assert next(iter(WindowLoader(far_windows("memory://commanded"), 4)))["mask"].all()
