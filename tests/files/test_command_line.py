"""Promises of all commands: one table, help, JSON, one line per error, and exit codes."""

from __future__ import annotations

import io
import json
import os
import pkgutil
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import rollout_data
from rollout_data import RolloutWriter
from rollout_data.formats.registry import EXPORTS, WRITERS
from rollout_data.tools.cli import commands
from rollout_data.tools.cli.command_line import COMMANDS, main
from rollout_data.tools.cli.select_option import selected
from storage.errors import RolloutDataWarning

LENGTHS = (3, 5, 8)


@pytest.fixture
def walk(tmp_path: Path) -> Path:
    """Three episodes; the last has success, the second a task."""
    with RolloutWriter(tmp_path / "walk", 1, durable=False) as writer:
        for number, length in enumerate(LENGTHS):
            for t in range(length):
                about = (
                    {"task": "pick" if number == 1 else "", "success": number == 2}
                    if t == length - 1
                    else None
                )
                writer.add(
                    observation=np.full((1, 2), 10.0 * number + t),
                    action=np.zeros((1, 1)),
                    reward=np.ones((1, 1)),
                    done=[t == length - 1],
                    episode=[about],
                )
    return tmp_path / "walk"


RunCommand = Callable[[Sequence[str]], tuple[int, str, str]]


@pytest.fixture
def run_command(capsys: pytest.CaptureFixture[str]) -> RunCommand:
    def call(arguments: Sequence[str]) -> tuple[int, str, str]:
        code = main(list(map(str, arguments)))
        output = capsys.readouterr()
        return code, output.out, output.err

    return call


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_the_function_and_an_example_of_the_command(
    name: str, run_command: RunCommand
) -> None:
    row = COMMANDS[name]
    code, out, err = run_command([name, "--help"])
    assert (code, err) == (0, "") and row.summary in " ".join(out.split())
    assert f"rollout-data {row.example}" in out and row.function in out and "--json" in out
    assert shlex.split(row.example)[0] == name
    assert pkgutil.resolve_name(row.function).__doc__
    assert callable(pkgutil.resolve_name(f"rollout_data.tools.cli.{row.module}:{name}"))


def test_the_overview_has_every_command_with_its_summary(run_command: RunCommand) -> None:
    code, out, _ = run_command(["--help"])
    text = " ".join(out.split())
    assert code == 0 and all(f"{name} {row.summary}" in text for name, row in COMMANDS.items())
    assert all(f" {name}" in run_command(["convert", "-h"])[1] for name in (*WRITERS, *EXPORTS))


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("convrt x y", "invalid choice: 'convrt'; did you mean 'convert'?"),
        ("p x", "invalid choice: 'p'; expected one of"),
        ("", "the following arguments are required: COMMAND"),
        ("--nonsense", "unrecognized arguments: --nonsense"),
        ("info x --jsn", "unrecognized arguments: --jsn; did you mean '--json'?"),
        ("convert x y --slect=a", "unrecognized arguments: --slect=a; did you mean '--select'?"),
        ("prune x --frames many", "argument --frames: invalid int value: 'many'"),
        ("info", "the following arguments are required: data_dir"),
        ("info nowhere", "nowhere' does not exist"),
        ("pack x", "Pass either OUT_DIR or --in-place"),
        ("convert WALK y --to lerbot", "Known formats are 'lerobot', "),
        (
            "convert WALK y --option nonsense=1",
            "option 'nonsense' is unknown. The format 'rollout-data' has the options 'obs_disassem",
        ),
        ("convert WALK WALK", "is inside the source"),
        ("convert WALK y --option nonsense", "expected NAME=VALUE, got 'nonsense'"),
        ("ls WALK --select nobody", "'nobody'"),
        ("ls WALK --select size>3", "unknown column 'size', expected one of "),
        ("ls WALK --select length>long", "length must be compared with a number, got 'long'"),
        (
            "ls WALK --select success=perhaps",
            "success must be compared with true, false or unknown, got 'perhaps'",
        ),
        ("ls WALK --select time>soon", "time must be compared with a time such as "),
    ],
)
def test_a_wrong_call_prints_one_line_and_exits_with_2(
    walk: Path, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch, call: str, told: str
) -> None:
    monkeypatch.chdir(walk.parent)
    code, out, err = run_command(call.replace("WALK", walk.name).split())
    assert (
        code == 2
        and out == ""
        and len(err.splitlines()) == 1
        and told in err
        and err.startswith("rollout-data")
    )


@pytest.mark.parametrize("call", ["bench", "doctor WALK --sarif out.json", "repair WALK out --yes"])
def test_removed_commands_and_options_are_wrong_calls(
    walk: Path, run_command: RunCommand, call: str
) -> None:
    code, _, err = run_command(call.replace("WALK", str(walk)).split())
    assert code == 2 and len(err.splitlines()) == 1
    with pytest.raises(TypeError, match="yes"):
        rollout_data.repair(walk, walk.parent / "out", yes=True)  # type: ignore[call-arg]


def test_a_unique_beginning_of_a_command_name_is_enough(
    walk: Path, run_command: RunCommand
) -> None:
    assert run_command(["inf", walk]) == run_command(["info", walk])
    assert run_command(["ver", walk, "--json"]) == run_command(["verify", walk, "--json"])


@pytest.mark.parametrize(
    ("which", "numbers"),
    [
        ([], [0, 1, 2]),
        (["length>3"], [1, 2]),
        (["length >= 5", "length!=8"], [1]),
        (["length<5"], [0]),
        (["length<=5"], [0, 1]),
        (["return==8"], [2]),
        (["success=True"], [2]),
        (["success=false"], [0, 1]),
        (["success!=unknown"], [0, 1, 2]),
        (["task=pick"], [1]),
        (["ends=terminated", "env=0"], [0, 1, 2]),
        (["time>2020-01-01T00:00"], [0, 1, 2]),
        (["time<2020-01-01"], []),
        (["ID0", "ID2"], [0, 2]),
        (["ID0", "ID2", "length>3"], [2]),
    ],
)
def test_select_accepts_ids_and_conditions(
    walk: Path, run_command: RunCommand, which: list[str], numbers: list[int]
) -> None:
    recording = rollout_data.open(walk)
    arguments = [recording.ids[int(item[2:])] if item.startswith("ID") else item for item in which]
    assert selected(recording, arguments).ids == [recording.ids[number] for number in numbers]
    code, out, _ = run_command(
        ["ls", walk, "--json", *(part for item in arguments for part in ("--select", item))]
    )
    assert code == 0 and [row["length"] for row in json.loads(out)] == [
        LENGTHS[number] for number in numbers
    ]


def test_convert_writes_the_selected_episodes_and_resumes_with_the_same(
    walk: Path, run_command: RunCommand
) -> None:
    call = ["convert", walk, walk.parent / "long", "--select", "length>3", "--json"]
    code, out, err = run_command(call)
    assert (code, err) == (0, "") and json.loads(out)["num_episodes"] == 2
    assert rollout_data.open(walk.parent / "long").table["length"].tolist() == [5, 8]
    assert json.loads(run_command(call)[1])["num_present"] == 2


@pytest.mark.parametrize(
    "call", ["info", "ls", "convert - OUT", "verify", "pack - OUT", "prune - --frames 3"]
)
def test_json_prints_nothing_else(walk: Path, run_command: RunCommand, call: str) -> None:
    name, *rest = call.replace("OUT", str(walk.parent / "out")).split()
    code, out, err = run_command([name, walk, *rest[1:], "--json"])
    assert (code, err) == (0, "") and json.loads(out) is not None


#: Arguments of commands besides the data. A command without an entry has a wrong call.
REST = {
    "convert": ["OUT"],
    "pack": ["OUT"],
    "prune": ["--frames", "3"],
    "push": ["memory://nowhere"],
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("kind", ["unknown", "empty", "file", "pipe", "forbidden", "long"])
def test_a_path_without_data_is_an_error_of_one_line_and_creates_nothing(
    tmp_path: Path, run_command: RunCommand, name: str, kind: str
) -> None:
    path = tmp_path / ("x" * 300 if kind == "long" else "data")
    if kind in ("empty", "forbidden"):
        path.mkdir(0 if kind == "forbidden" else 0o700)
    elif kind == "file":
        path.write_bytes(b"no data at all")
    elif kind == "pipe":
        os.mkfifo(path)
    if kind == "forbidden" and os.access(path, os.R_OK):
        pytest.skip("nothing is forbidden to root")
    before = sorted(tmp_path.iterdir())
    code, out, err = run_command(
        [name, path, *(item.replace("OUT", str(tmp_path / "out")) for item in REST.get(name, []))]
    )
    if name == "doctor" and kind in ("empty", "file"):
        assert code == 1 and "FIL03" in out and err == ""  # which is what it found
        return
    assert (
        code in (1, 2)
        and out == ""
        and len(err.splitlines()) == 1
        and err.startswith(f"rollout-data {name}: ")
    )
    assert sorted(tmp_path.iterdir()) == before and not (kind == "empty" and list(path.iterdir()))


@pytest.mark.parametrize("columns", ["1", "20", "500"])
def test_commands_run_in_terminals_of_any_width(
    walk: Path, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for name in COMMANDS:
        assert run_command([name, "--help"])[0] == 0
    for name in ("info", "ls", "play", "verify"):
        code, out, err = run_command([name, walk])
        assert (code, err) == (0, "") and "\x1b" not in out
    assert max(map(len, run_command(["play", walk])[1].splitlines())) <= max(2, int(columns))


def test_a_closed_pipe_prints_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "rollout_data", "--help"], stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    assert len(done.stderr.splitlines()) <= 1 and b"Traceback" not in done.stderr


LONG = (
    "verify",
    "verify - --repair",
    "convert - OUT",
    "pack - OUT",
    "prune - --frames 3",
    pytest.param(
        "push - memory://progress",
        marks=pytest.mark.skipif(not find_spec("fsspec"), reason="no fsspec"),
    ),
)


@pytest.mark.parametrize("call", LONG)
def test_long_commands_show_progress_on_a_terminal_and_only_json_on_stdout(
    walk: Path, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    name, *rest = call.replace("OUT", str(walk.parent / "out")).split()
    code, out, err = run_command([name, walk, *rest[1:], "--json"])
    assert code == 0 and json.loads(out) and "/s" in err


@pytest.mark.filterwarnings("default::storage.errors.RolloutDataWarning")
def test_warnings_are_one_line_each_on_stderr(
    walk: Path, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warn(options: object) -> commands.Answer:
        warnings.warn("two\nlines", RolloutDataWarning)
        return commands.Answer({}, [])

    monkeypatch.setattr(commands, "info", warn)
    assert run_command(["info", walk, "--json"]) == (
        0,
        "{}\n",
        "rollout-data info: warning: two\\nlines\n",
    )


def test_ctrl_c_prints_one_line_and_exits_with_130(
    walk: Path, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "info", stop)
    assert run_command(["info", walk]) == (130, "", "rollout-data info: stopped\n")


def test_an_internal_error_keeps_its_traceback(
    walk: Path, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "info", lambda options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["info", str(walk)])


def test_help_is_quick_because_it_does_not_import_torch() -> None:
    call = "from rollout_data.tools.cli.command_line import main; main(['--help'])"
    script = f"import sys; {call}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0 and done.stdout.endswith("\nFalse\n")


def test_characters_that_the_terminal_cannot_encode_are_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(written, "ascii", write_through=True))
    assert main(["info", str(tmp_path / "größe")]) == 2
    assert rb"gr\xf6\xdfe" in written.getvalue() and written.getvalue().count(b"\n") == 1
