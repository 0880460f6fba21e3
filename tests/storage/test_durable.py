"""Replacing files and folders: the old or the new version at every instant.

No foreign file is lost, and no file is left.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYetError
from pathlib import Path
from typing import Any

import pytest

from storage.core.durable_files import existing_folder, replace_file, replace_folder
from storage.errors import DataFileError
from tests.faults import instead_of, killed_at

OWN = ("a", "b")


def put(target: Path, text: str) -> None:
    with replace_folder(target, OWN) as new:
        (new / "a").write_text(text)


def put_file(target: Path, text: str) -> None:
    with replace_file(target) as new:
        new.write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "kept"
    put(target, "old")
    (target / "b").write_text("of the old one")
    put(target, "new")
    assert (
        names(target) == ["a"]
        and (target / "a").read_text() == "new"
        and names(target.parent) == ["kept"]
    )


def test_a_file_is_replaced_whole_and_keeps_usual_permissions(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "kept.bin"
    put_file(target, "old")
    put_file(target, "new")
    usual = tmp_path / "usual"
    usual.write_text("")
    assert target.read_text() == "new" and names(target.parent) == ["kept.bin"]
    assert target.stat().st_mode == usual.stat().st_mode


@pytest.mark.parametrize("write", [put, put_file])
def test_an_error_in_the_block_changes_nothing(
    tmp_path: Path, write: Callable[[Path, str], None]
) -> None:
    write(tmp_path / "kept", "old")
    replace = (
        replace_file(tmp_path / "kept")
        if write is put_file
        else replace_folder(tmp_path / "kept", OWN)
    )
    with pytest.raises(KeyError), replace as new:
        (new if write is put_file else new / "a").write_text("half")
        raise KeyError
    kept = tmp_path / "kept"
    assert (
        names(tmp_path) == ["kept"]
        and (kept if kept.is_file() else kept / "a").read_text() == "old"
    )


def test_a_full_disk_at_the_flush_changes_nothing(tmp_path: Path) -> None:
    put(tmp_path / "kept", "old")

    def no_space(fsync: Any, handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with instead_of("fsync", no_space), pytest.raises(OSError, match="No space"):
        put(tmp_path / "kept", "new")
    assert names(tmp_path) == ["kept"] and (tmp_path / "kept" / "a").read_text() == "old"


def test_every_file_is_flushed_before_the_rename_and_the_parent_folder_after(
    tmp_path: Path,
) -> None:
    events: list[tuple[str, int]] = []

    def synced(fsync: Any, handle: int) -> None:
        events.append(("sync", os.fstat(handle).st_ino))
        fsync(handle)

    def replaced(replace: Any, source: Path, target: Path) -> None:
        events.append(("replace", os.stat(source).st_ino))
        replace(source, target)

    with instead_of("fsync", synced), instead_of("replace", replaced):
        put(tmp_path / "kept", "new")
    folder, file, parent = (
        path.stat().st_ino for path in (tmp_path / "kept", tmp_path / "kept" / "a", tmp_path)
    )
    assert events == [("sync", file), ("sync", folder), ("replace", folder), ("sync", parent)]


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "notes.txt").write_text("mine")
    with pytest.raises(
        DataFileError, match=r"kept' contains 'notes.txt', which no save has written"
    ):
        put(tmp_path / "kept", "new")
    with pytest.raises(DataFileError, match=r"notes.txt' is a file. Choose a new folder"):
        put(tmp_path / "kept" / "notes.txt", "new")
    with pytest.raises(DataFileError, match="kept' is a folder, not a file"):
        put_file(tmp_path / "kept", "new")
    assert names(tmp_path) == ["kept"] and (tmp_path / "kept" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("write", [put, put_file])
def test_a_pipe_is_not_replaced(tmp_path: Path, write: Callable[[Path, str], None]) -> None:
    """The pipe replaces a device in this test: root could replace a device."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for name in ("pipe", "link"):
        with pytest.raises(DataFileError, match=rf"^'.*{name}' is a "):
            write(tmp_path / name, "new")
    assert (
        names(tmp_path) == ["link", "pipe"]
        and (tmp_path / "pipe").is_fifo()
        and (tmp_path / "link").is_symlink()
    )


@pytest.mark.parametrize("write", [put, put_file])
def test_links_are_followed(tmp_path: Path, write: Callable[[Path, str], None]) -> None:
    write(tmp_path / "kept", "old")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    write(tmp_path / "link", "new")
    kept = tmp_path / "kept"
    assert (tmp_path / "link").is_symlink() and names(tmp_path) == ["kept", "link"]
    assert (kept if kept.is_file() else kept / "a").read_text() == "new"
    assert existing_folder(tmp_path / "link") == kept.resolve()


@pytest.mark.each_value
@pytest.mark.parametrize("write", [put, put_file])
@pytest.mark.parametrize("at", ["fsync", "replace", "rmdir", "unlink"])
def test_a_kill_leaves_the_old_or_new_folder_and_the_next_save_removes_temporary_files(
    tmp_path: Path, write: Callable[[Path, str], None], at: str
) -> None:
    target = tmp_path / "kept[1]"  # a name that means something to glob
    seen = set()
    for nth in range(5):
        write(target, "old")
        child = os.fork()
        if not child:
            try:
                with killed_at(at, nth):
                    write(target, "new")
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        actual = existing_folder(target)
        seen.add((actual if actual.is_file() else actual / "a").read_text())
        write(target, "after")
        assert names(tmp_path) == ["kept[1]"]
    assert seen <= {"old", "new"} and "new" in seen


def test_two_savers_do_not_remove_each_others_work(tmp_path: Path) -> None:
    with replace_file(tmp_path / "kept") as first:
        first.write_text("first")
        put_file(tmp_path / "kept", "second")
        assert (tmp_path / "kept").read_text() == "second" and first.exists()
    assert (tmp_path / "kept").read_text() == "first" and names(tmp_path) == ["kept"]


def test_a_new_temporary_folder_removed_by_another_saver_is_created_again(tmp_path: Path) -> None:
    made: list[str] = []

    def taken(mkdir: Any, path: str, *arguments: Any) -> None:
        mkdir(path, *arguments)
        if ".kept.new-" in str(path):
            made.append(str(path))
            if len(made) == 1:  # another saver looks between the making and the lock
                put_file(tmp_path / "kept", "other")
                assert not os.path.exists(path)

    with instead_of("mkdir", taken):
        put_file(tmp_path / "kept", "new")
    assert (
        len(made) == 3 and (tmp_path / "kept").read_text() == "new" and names(tmp_path) == ["kept"]
    )


def test_two_savers_do_not_rename_at_the_same_time(tmp_path: Path) -> None:
    """The second saver starts after the first has moved the old folder.

    It waits for the new folder.
    """
    put(tmp_path / "kept", "old")
    others: list[Future[None]] = []

    def replaced(replace: Any, source: Path, target: Path) -> None:
        replace(source, target)
        if not others:
            others.append(ThreadPoolExecutor(1).submit(put, tmp_path / "kept", "second"))
            with pytest.raises(NotYetError):
                others[0].result(0.2)

    with instead_of("replace", replaced):
        put(tmp_path / "kept", "first")
        others[0].result(20)
    assert (tmp_path / "kept" / "a").read_text() == "second" and names(tmp_path) == ["kept"]


def test_a_folder_moved_by_another_saver_does_not_prevent_a_save(tmp_path: Path) -> None:
    put(tmp_path / "kept", "old")

    def listed(listdir: Any, path: Path) -> list[str]:
        if Path(path) == tmp_path / "kept":
            os.rename(tmp_path / "kept", tmp_path / ".kept.previous")
        actual: list[str] = listdir(path)
        return actual

    with instead_of("listdir", listed):
        put(tmp_path / "kept", "new")
    assert (tmp_path / "kept" / "a").read_text() == "new" and names(tmp_path) == ["kept"]
