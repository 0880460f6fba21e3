"""Commands on a folder of several recordings, `--dry-run` of edits, misspelt flags, and names of reports."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

import rollout_data
from rollout_data import convert, drop, edits_of, keep, prune, tag, undrop, untag
from rollout_data.tools.cli.command_line import COMMANDS, main
from storage.errors import UsageError
from tests.editing.folders import files, folder_of


@pytest.fixture
def walks(tmp_path: Path) -> Path:
    """A folder of two recordings of ours and a robomimic file, and of files that are no
    recording.
    """
    folder_of(tmp_path / "all" / "walk_2", writers=("a",))
    folder_of(tmp_path / "all" / "walk_10", writers=("b",), num=3)
    convert(
        tmp_path / "all" / "walk_10", tmp_path / "all" / "demos.hdf5", "robomimic", progress=False
    )
    (tmp_path / "all" / "notes.txt").write_text("none")
    (tmp_path / "all" / "empty").mkdir()
    return tmp_path / "all"


@pytest.mark.parametrize("command", ["info", "ls", "doctor", "report"])
def test_a_folder_of_several_recordings_is_printed_as_one_row_each(
    walks: Path, command: str, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(walks.parent)
    code = main([command, "all"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["demos.hdf5", "walk_2", "walk_10"]
    assert code == 0 and not list(walks.parent.glob("*.html"))
    main([command, "all", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["format"], row["episodes"]) for row in rows] == [
        ("demos.hdf5", "robomimic", 3),
        ("walk_2", "rollout-data", 10),
        ("walk_10", "rollout-data", 3),
    ]
    assert all(row["frames"] and row["problems"] == 0 and row["error"] is None for row in rows)


def test_a_report_page_of_several_recordings_is_a_wrong_call(walks: Path, capsys) -> None:
    assert main(["report", str(walks), "--out", str(walks / "page.html")]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["demos.hdf5", "walk_2", "walk_10"]
    assert (
        lines[-1].endswith("no page was written; name one of them")
        and not (walks / "page.html").exists()
    )


@pytest.mark.parametrize(
    "given",
    [
        ["merge", "all", "--to", "new"],
        ["merge", "all/walk_2", "all", "--to", "new"],
        ["split", "all", "a=0.5", "b=0.5", "--to", "new"],
        ["repair", "all", "--to", "new"],
        ["convert", "all", "new"],
        ["play", "all"],
        ["drop", "all", "a:0"],
        ["keep", "all", "--select", "length>3"],
        ["tag", "all", "a:0", "--set", "task=push"],
        ["verify", "all"],
        ["verify", "--repair", "all"],
        ["pack", "all", "new"],
        ["pack", "all", "--in-place"],
        ["prune", "all", "--frames", "5"],
        ["push", "all", "memory://new/walks"],
    ],
)
def test_commands_that_need_one_recording_list_the_recordings_of_a_folder(
    walks: Path, given: list[str], capsys, monkeypatch
) -> None:
    monkeypatch.chdir(walks.parent)
    before = files(walks)
    assert main(given) == 2
    out, error = capsys.readouterr()
    assert not out and "3 recordings ('demos.hdf5', 'walk_2', 'walk_10'). Name one of them" in error
    assert files(walks) == before and not Path("new").exists()


def test_a_recording_that_cannot_be_opened_is_a_row_with_the_error(walks: Path, capsys) -> None:
    path = walks / "set" / "meta"
    path.mkdir(parents=True)
    (path / "info.json").write_text("{")
    assert main(["info", str(walks)]) == 1
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("set ")]
    assert "info.json" in row


@pytest.mark.parametrize("command", ["drop", "keep", "tag"])
def test_a_dry_run_counts_and_changes_nothing(walks: Path, command: str, capsys) -> None:
    walk = walks / "walk_2"
    drop(walk, "a:9"), tag(walk, "a:8", task="push")
    before, more = files(walk), ["--set", "task=pull"] if command == "tag" else []
    assert main([command, str(walk), "a:0", "a:1", *more, "--dry-run", "--json"]) == 0
    expected = {"drop": 2, "keep": 7, "tag": 2}[command]
    assert json.loads(capsys.readouterr().out) == {"num_trajectories": expected, "dry_run": True}
    assert main([command, str(walk), "--undo", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith(
        "the tags of 1" if command == "tag" else "1 trajectories would"
    )
    assert files(walk) == before
    assert main([command, str(walk), "a:0", "a:1", *more, "--json"]) == 0
    assert (
        json.loads(capsys.readouterr().out)["num_trajectories"] == expected
        and files(walk) != before
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_abbreviated_flags_are_errors(name: str, walks: Path, capsys) -> None:
    command, walk = COMMANDS[name], str(walks / "walk_2")
    before = files(walks)
    arguments = command.arguments() if callable(command.arguments) else command.arguments
    for flag in (flag for flag in arguments if flag.startswith("--") and len(flag) > 4):
        for wrong in (flag[:-1], flag.replace("-", "", 1)[:-1] + "x", flag + "o"):
            value = [name, walk, *([f"{wrong}=1"] if wrong.startswith("--") else [f"-{wrong}"])]
            assert main(value) == 2
            out, error = capsys.readouterr()
            suggested = error.partition("did you mean ")[2].split("?")[0].strip("'")
            assert not out and suggested not in {"--undo", "--repair", "--in-place", "--set"}
    assert files(walks) == before and edits_of(walks / "walk_2") == {"dropped": [], "said": {}}


def test_a_report_is_named_after_its_recording(walks: Path, monkeypatch, capsys) -> None:
    pytest.importorskip("plotly", reason="the extra `report` is missing")
    monkeypatch.chdir(walks.parent)
    assert main(["report", "all/walk_10"]) == 0 and (walks.parent / "walk_10.html").is_file()
    assert rollout_data.report(walks / "demos.hdf5") == Path("demos.html")
    assert rollout_data.report(walks / "demos.hdf5", "page.html") == Path("page.html")


def test_no_command_waits_for_pipes_and_sockets(walks: Path, capsys, monkeypatch) -> None:
    with socket.socket(socket.AF_UNIX) as unix:
        for folder in (walks, walks / "walk_2", walks / "empty"):
            for name in (
                "camera.h5",
                "x.hdf5",
                "rollout_x_000000.h5",
                "a.npz",
                "b.mcap",
                "c.parquet",
                "metadata.pt",
            ):
                os.mkfifo(folder / name)
        monkeypatch.chdir(walks)
        unix.bind("walk_10/socket.h5")
        for name in (
            "info",
            "ls",
            "doctor",
            "verify",
            "convert",
            "merge",
            "split",
            "repair",
            "prune",
        ):
            for folder in ("walk_2", "walk_10", "empty"):
                more = {
                    "convert": [f"../{name}_{folder}"],
                    "prune": ["--trajectories", "1", "--dry-run"],
                    "split": ["x=1", "--to", f"../{name}_{folder}"],
                }.get(name, ["--to", f"../{name}_{folder}"] if name in ("merge", "repair") else [])
                assert main([name, folder, *more]) in (0, 1, 2)
                capsys.readouterr()
        assert any(
            "camera.h5" in finding.message
            for finding in rollout_data.doctor("walk_2", only=["FIL"]).findings
        )


@pytest.mark.parametrize(
    "change",
    [
        drop,
        keep,
        undrop,
        untag,
        lambda path, ids: tag(path, ids, task="push"),
        lambda path, _: prune(path, frames=5),
    ],
)
def test_editing_a_folder_of_several_recordings_names_them(walks: Path, change: Any) -> None:
    os.mkfifo(walks / "pipe.h5")
    before = files(walks)
    with pytest.raises(
        UsageError, match=r"3 recordings \('demos\.hdf5', 'walk_2', 'walk_10'\)\. Name one of them"
    ):
        change(walks, [0])
    assert files(walks) == before


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("a pipe", os.mkfifo),
        ("a device", lambda path: os.symlink("/dev/null", path)),
        ("Too many levels of symbolic links", lambda path: os.symlink(path, path)),
        ("does not exist", lambda path: os.symlink(path.parent / "nowhere", path)),
    ],
)
@pytest.mark.parametrize("command", ["info", "ls", "doctor", "drop", "verify"])
def test_a_path_without_data_is_named_by_its_kind(
    tmp_path: Path, command: str, kind: str, make: Any, capsys
) -> None:
    make(tmp_path / "x.h5")
    assert main([command, str(tmp_path / "x.h5"), *(["a:0"] if command == "drop" else [])]) in (
        1,
        2,
    )
    out, error = capsys.readouterr()
    assert not out and kind in error


def test_a_recording_that_needs_an_option_is_a_row_of_the_doctor(tmp_path: Path, capsys) -> None:
    session = Path(__file__).parent.parent / "data" / "formats" / "mcap" / "session" / "run_0.mcap"
    shutil.copy(session, tmp_path / "run_0.mcap")
    os.mkfifo(tmp_path / "pipe.mcap")
    for command in ("ls", "doctor"):
        assert main([command, str(tmp_path)]) == 1
        row = capsys.readouterr().out.splitlines()[1]
        assert row.startswith("run_0.mcap") and "a topic as action=" in row
