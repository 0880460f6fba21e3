"""Functions that run the commands, except `doctor` and the commands that edit recordings.

A function has the name of its command in `command_line.COMMANDS`. It calls the library with the
parsed options. `doctor_command.py` and `edit_commands.py` have the functions of the other commands.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from storage.errors import UsageError

from ...formats.convert import convert as convert_recording
from ...formats.open_recording import open as open_recording
from ...remote.push import push as push_folder
from ...sources.recordings.recording import Recording
from ...sources.recordings.recordings_in_folder import check_single, recordings_in
from ...writing.retention import LIMITS
from ...writing.retention import prune as prune_folder
from ..edit.pack_folder import check_folder, open_folder, pack_dataset, repair_folder
from ..report.report_page import report as write_report
from .export_images import save_gif, save_mp4
from .info_command import as_text, describe, listing, listing_as_text
from .list_recordings import recording_rows, rows_as_text
from .play_command import ASCII_BARS, BARS, chosen_episode, describe_episode, episode_as_text
from .select_option import selected

#: Maximum number of episode ids in a line of text. A line with more ids ends in "...".
_MAX_IDS = 3
#: Frame rate in Hz of a GIF or video, if the metadata have no frame rate.
_RATE_HZ = 20.0


class Answer(NamedTuple):
    """Result of a command, which `command_line.py` prints.

    Attributes:
        about: Result as JSON values, which are printed with `--json`.
        lines: Result as lines of text, which are printed without `--json`.
        code: Exit code: 0 without problems, 1 if the data have problems.
    """

    about: Any
    lines: Iterable[str]
    code: int = 0


def info(options: argparse.Namespace) -> Answer:
    recordings = recordings_in(options.data_dir)
    if recordings:
        return _listed(recordings)
    about = describe(options.data_dir)
    return Answer(about, as_text(about))


def ls(options: argparse.Namespace) -> Answer:
    recordings = recordings_in(options.data_dir)
    if recordings:
        return _listed(recordings)
    rows = listing(_selected_episodes(options))
    return Answer(rows, listing_as_text(rows))


def _listed(paths: Sequence[Path]) -> Answer:
    """Build the answer for a folder of several recordings: a table with one row per recording.

    The exit code is 1 if a recording cannot be opened.
    """
    rows = recording_rows(paths)
    has_errors = any(row["error"] for row in rows)
    return Answer(rows, rows_as_text(rows), int(has_errors))


def convert(options: argparse.Namespace) -> Answer:
    format_options = option_values(options.option)
    conversion = convert_recording(
        _selected_episodes(options),
        options.target,
        options.to,
        progress=options.progress,
        **format_options,
    )
    about = {**vars(conversion)}
    about["problems"] = [str(problem) for problem in conversion.problems]
    about["advice"] = [str(remark) for remark in conversion.advice]

    lines = []
    for change, ids in conversion.changes.items():
        lines.append(f"{change}: {len(ids):,} episodes ({some_ids(ids)})")
    lines += about["problems"]
    present = f"{conversion.num_present:,} of them already converted"
    lines.append(f"{conversion.num_episodes:,} episodes, {present}")
    lines += [f"advice: {remark}" for remark in about["advice"]]
    return Answer(about, lines, 1 if conversion.problems else 0)


def _selected_episodes(options: argparse.Namespace) -> Recording:
    """Open a recording with the options in `--open`, and select episodes by `--select`."""
    open_options = option_values(options.open)
    return selected(open_recording(options.data_dir, **open_options), options.select)


def some_ids(ids: Sequence[str]) -> str:
    """Return the first 3 ids as text, separated by commas."""
    text = ", ".join(ids[:_MAX_IDS])
    return f"{text}, ..." if len(ids) > _MAX_IDS else text


def option_values(pairs: Iterable[str]) -> dict[str, Any]:
    """Parse NAME=VALUE pairs into a dict. A value is parsed as JSON if possible, else kept as text.

    Raises:
        UsageError: A pair has no "=", or a name occurs twice.
    """
    values: dict[str, Any] = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not sign:
            raise UsageError(f"expected NAME=VALUE, got {pair!r}.")
        if name in values:
            raise UsageError(f"{name!r} is set twice, the second time by {pair!r}.")
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return values


def report(options: argparse.Namespace) -> Answer:
    recordings = recordings_in(options.data_dir)
    if recordings:
        return _several_recordings(options, recordings)
    page = write_report(
        options.data_dir,
        options.out,
        options.compare,
        absolute_paths=options.absolute_paths,
        progress=options.progress,
    )
    num_bytes = page.stat().st_size
    line = f"{page}: {num_bytes / 1e6:.1f} MB; open it in a browser"
    return Answer({"page": str(page), "num_bytes": num_bytes}, [line])


def _several_recordings(options: argparse.Namespace, recordings: Sequence[Path]) -> Answer:
    """Build the answer of `report` for a folder of several recordings: a table of them.

    `report` writes a page about a single recording only. With `--out` or `--compare`, the user
    expects a page, so the exit code is 2.
    """
    answer = _listed(recordings)
    reason = f"{options.data_dir} contains several recordings"
    lines = [*answer.lines, f"{reason}: no page was written; name one of them"]
    wants_page = options.out is not None or options.compare is not None
    return Answer(answer.about, lines, 2 if wants_page else answer.code)


def play(options: argparse.Namespace) -> Answer:
    recording, place = chosen_episode(options.data_dir, options.episode)
    width = shutil.get_terminal_size().columns
    about = describe_episode(recording, options.episode, options.field, width)
    is_ascii = BARS.encode(sys.stdout.encoding or "ascii", "ignore") == b""
    lines = episode_as_text(about, width, ASCII_BARS if is_ascii else BARS)

    metadata = recording.metadata
    rate_hz = float(metadata.get("frame_rate_hz") or metadata.get("fps") or _RATE_HZ)
    field = options.field[0] if options.field else None
    for path, save in ((options.gif, save_gif), (options.mp4, save_mp4)):
        if path is None:
            continue
        episode = recording[place]
        num_frames = save(episode, path, field, rate_hz=rate_hz, progress=options.progress)
        about.setdefault("files", {})[path] = num_frames
        lines.append(f"{path}: {num_frames:,} frames")
    return Answer(about, lines)


def verify(options: argparse.Namespace) -> Answer:
    check = repair_folder if options.repair else check_folder
    report = check(options.data_dir, options.progress)
    lines = []
    for name, problem in report.problems.items():
        lines.append(f"{name}: {problem}")
        if name in report.lost:
            lines.append(f"  with frames of {', '.join(report.lost[name])}")
        if name in report.salvaged:
            lines.append(f"  kept all but {report.salvaged[name]} of its trajectories")
    for dead in report.dead_writers:
        lost = f"{dead.num_lost_frames} frames that it had not published are lost"
        lines.append(f"writer {dead.writer} died; {lost}")
    lines += [f"moved to {path}" for path in report.moved]

    trajectories = f"{report.num_trajectories:,} trajectories"
    intact = f"{report.num_blocks:,} blocks, {trajectories}, {report.num_frames:,} frames intact"
    num_damaged = len(report.problems)
    damaged = f"{num_damaged:,} damaged or foreign {'file' if num_damaged == 1 else 'files'}"
    last_line = f"{intact}; {damaged}"
    if report.num_broken:
        last_line += f", {report.num_broken:,} trajectories with a missing part"
    lines.append(last_line)

    about = {
        **vars(report),
        "problems": {name: str(problem) for name, problem in report.problems.items()},
        "moved": list(map(str, report.moved)),
        "dead_writers": [vars(dead) for dead in report.dead_writers],
    }
    return Answer(about, lines, 1 if report.problems or report.num_broken else 0)


def pack(options: argparse.Namespace) -> Answer:
    if bool(options.out_dir) == options.in_place:
        problem = "the target is missing"
        if options.in_place:
            problem = "OUT_DIR and --in-place exclude each other"
        raise UsageError(f"{problem}. Pass either OUT_DIR or --in-place.")
    block_bytes = options.block_mb << 20
    summary = pack_dataset(options.data_dir, options.out_dir, block_bytes, options.progress)
    packed = f"{summary.num_trajectories:,} trajectories, {summary.num_frames:,} frames"
    before = f"{summary.num_blocks_before:,} blocks"
    return Answer(vars(summary), [f"{packed}: {before} became {summary.num_blocks_after:,}"])


def prune(options: argparse.Namespace) -> Answer:
    open_folder(options.data_dir)  # Raises an error if the folder has no data.
    pruned = prune_folder(
        options.data_dir,
        dry_run=options.dry_run,
        progress=options.progress,
        **{name: getattr(options, name) for name in LIMITS},
    )
    paths = list(map(str, pruned))
    line = f"{len(paths):,} blocks {'would be' if options.dry_run else 'were'} deleted"
    return Answer({"files": paths, "dry_run": options.dry_run}, [*paths, line])


def push(options: argparse.Namespace) -> Answer:
    check_single(options.data_dir)
    num_blocks = push_folder(options.data_dir, options.url, progress=options.progress)
    return Answer({"num_blocks": num_blocks}, [f"{num_blocks:,} blocks were uploaded"])
