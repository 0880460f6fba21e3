"""What commands answer: each function calls the library with the options of its row in `command.COMMANDS`."""

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
from ...sources.recording import Recording
from ...sources.recordings_in_folder import check_single, recordings_in
from ...writing.retention import LIMITS
from ...writing.retention import prune as prune_folder
from ..edit.pack_folder import check_folder, open_folder, pack_dataset, repair_folder
from ..report.report_page import report as write_report
from .export_images import save_gif, save_mp4
from .info_command import as_text, describe, listing, listing_as_text
from .list_recordings import as_lines, rows_about
from .play_command import ASCII_BARS, BARS, chosen_episode, describe_episode, episode_as_text
from .select_option import selected


class Answer(NamedTuple):
    """What a command found.

    Attributes:
        about: For programs: what `--json` prints.
        lines: For people.
        code: 0 if all is well, 1 if the data are not.
    """

    about: Any
    lines: Iterable[str]
    code: int = 0


def info(options: argparse.Namespace) -> Answer:
    if several := recordings_in(options.data_dir):
        return _listed(several)
    about = describe(options.data_dir)
    return Answer(about, as_text(about))


def ls(options: argparse.Namespace) -> Answer:
    if several := recordings_in(options.data_dir):
        return _listed(several)
    rows = listing(_opened(options))
    return Answer(rows, listing_as_text(rows))


def _listed(paths: Sequence[Path]) -> Answer:
    """Answer with a row for each of several recordings; 1 if one cannot be opened."""
    rows = rows_about(paths)
    return Answer(rows, as_lines(rows), int(any(row["error"] for row in rows)))


def convert(options: argparse.Namespace) -> Answer:
    chosen = {name: option_value(text) for name, text in pairs("convert", options.option).items()}
    done = convert_recording(_opened(options), options.target, options.to, progress=options.progress, **chosen)
    some = {what: ", ".join(ids[:3]) + (", ..." if len(ids) > 3 else "") for what, ids in done.changes.items()}
    lines = [f"{what}: {len(ids):,} episodes ({some[what]})" for what, ids in done.changes.items()]
    lines += [*map(str, done.problems), f"{done.num_episodes:,} episodes, {done.num_present:,} of them were there"]
    lines += [f"advice: {remark}" for remark in done.advice]
    about = {**vars(done)}
    about["problems"] = [str(problem) for problem in done.problems]
    about["advice"] = [str(remark) for remark in done.advice]
    return Answer(about, lines, 1 if done.problems else 0)


def _opened(options: argparse.Namespace) -> Recording:
    """Open the recording that a command names, by its `--open`, and take what it selects."""
    chosen = {name: option_value(text) for name, text in pairs("open", options.open).items()}
    return selected(open_recording(options.data_dir, **chosen), options.select)


def pairs(action: str, given: Iterable[str]) -> dict[str, str]:
    """Take NAME=VALUE apart."""
    found: dict[str, str] = {}
    for pair in given:
        name, sign, value = pair.partition("=")
        if not sign or name in found:
            raise UsageError(action, "", "NAME=VALUE" + ", each name once" * bool(sign), repr(pair))
        found[name] = value
    return found


def option_value(text: str) -> Any:
    """Read an option as JSON, or as text where it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def report(options: argparse.Namespace) -> Answer:
    if several := recordings_in(options.data_dir):
        answer = _listed(several)
        line = f"{options.data_dir} holds several recordings: no page was written; name one of them"
        is_page_asked_for = options.out is not None or options.compare is not None
        code = 2 if is_page_asked_for else answer.code
        return answer._replace(lines=[*answer.lines, line], code=code)
    further = {"absolute_paths": options.absolute_paths, "progress": options.progress}
    page = write_report(options.data_dir, options.out, options.compare, **further)
    size = page.stat().st_size
    return Answer({"page": str(page), "num_bytes": size}, [f"{page}: {size / 1e6:.1f} MB; open it in a browser"])


def play(options: argparse.Namespace) -> Answer:
    recording, place = chosen_episode(options.data_dir, options.episode)
    width = shutil.get_terminal_size().columns
    about = describe_episode(recording, options.episode, options.field, width)
    is_plain = BARS.encode(sys.stdout.encoding or "ascii", "ignore") == b""
    lines = episode_as_text(about, width, ASCII_BARS if is_plain else BARS)
    rate_hz = recording.metadata.get("frame_rate_hz") or recording.metadata.get("fps") or 20.0
    for path, save in ((options.gif, save_gif), (options.mp4, save_mp4)):
        if path is not None:
            field = next(iter(options.field), None)
            num_frames = save(recording[place], path, field, rate_hz=float(rate_hz), progress=options.progress)
            about.setdefault("files", {})[path] = num_frames
            lines.append(f"{path}: {num_frames:,} frames")
    return Answer(about, lines)


def verify(options: argparse.Namespace) -> Answer:
    report = (repair_folder if options.repair else check_folder)(options.data_dir, options.progress)
    lines = []
    for name, problem in report.problems.items():
        lines.append(f"{name}: {problem}")
        if name in report.lost:
            lines.append(f"  with frames of {', '.join(report.lost[name])}")
        if name in report.salvaged:
            lines.append(f"  kept all but {report.salvaged[name]} of its trajectories")
    for dead in report.dead_writers:
        lines.append(f"writer {dead.writer} died; {dead.num_lost_frames} frames that it had not published are lost")
    counts = f"{report.num_blocks:,} blocks, {report.num_trajectories:,} trajectories, {report.num_frames:,} frames"
    broken = f", {report.num_broken:,} trajectories with a missing part" if report.num_broken else ""
    files = f"{len(report.problems):,} damaged or foreign {'file' if len(report.problems) == 1 else 'files'}"
    lines += [*(f"moved to {moved}" for moved in report.moved), f"{counts} intact; {files}{broken}"]
    about = {
        **vars(report),
        "problems": {name: str(problem) for name, problem in report.problems.items()},
        "moved": list(map(str, report.moved)),
        "dead_writers": [vars(dead) for dead in report.dead_writers],
    }
    return Answer(about, lines, 1 if report.problems or report.num_broken else 0)


def pack(options: argparse.Namespace) -> Answer:
    if bool(options.out_dir) == options.in_place:
        got = "both" if options.in_place else "neither"
        raise UsageError("pack", repr(options.data_dir), "either OUT_DIR or --in-place", got)
    summary = pack_dataset(options.data_dir, options.out_dir, options.block_mb << 20, options.progress)
    packed = f"{summary.num_trajectories:,} trajectories, {summary.num_frames:,} frames"
    line = f"{packed}: {summary.num_blocks_before:,} blocks became {summary.num_blocks_after:,}"
    return Answer(vars(summary), [line])


def prune(options: argparse.Namespace) -> Answer:
    limits = {name: getattr(options, name) for name in LIMITS}
    open_folder(options.data_dir)  # or say that it holds no data
    pruned = prune_folder(options.data_dir, dry_run=options.dry_run, progress=options.progress, **limits)
    paths = list(map(str, pruned))
    line = f"{len(paths):,} blocks {'would be' if options.dry_run else 'were'} deleted"
    return Answer({"files": paths, "dry_run": options.dry_run}, [*paths, line])


def push(options: argparse.Namespace) -> Answer:
    check_single("push", options.data_dir)
    num_blocks = push_folder(options.data_dir, options.url, progress=options.progress)
    return Answer({"num_blocks": num_blocks}, [f"{num_blocks:,} blocks were uploaded"])
