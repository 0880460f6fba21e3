"""Functions of the commands that edit, merge, split and repair recordings."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from storage.errors import UsageError

from ...formats.open_recording import open as open_recording
from ..edit import edits, merge_split, repair_recording
from .commands import Answer, option_values, some_ids
from .select_option import selected


def drop(options: argparse.Namespace) -> Answer:
    return _leave_out(options, edits.drop)


def keep(options: argparse.Namespace) -> Answer:
    return _leave_out(options, edits.keep)


def _leave_out(options: argparse.Namespace, call: Callable[..., int]) -> Answer:
    """Run the command `drop` or `keep`: drop trajectories, or restore them with `--undo`.

    `call` is the library function of the command: `edits.drop` or `edits.keep`.
    """
    ids = _chosen_ids(options)
    if options.undo:
        count = edits.undrop(options.data_dir, ids, dry_run=options.dry_run)
        verb = "would come back" if options.dry_run else "came back"
        return _counted(options, count, f"{count:,} trajectories {verb}")
    count = call(options.data_dir, ids or [], dry_run=options.dry_run)
    if options.dry_run:
        return _counted(options, count, f"{count:,} trajectories would be dropped")
    undo = f"'rollout-data drop {options.data_dir} --undo' restores them"
    return _counted(options, count, f"{count:,} trajectories are dropped; {undo}")


def tag(options: argparse.Namespace) -> Answer:
    if options.undo:
        count = edits.untag(options.data_dir, _chosen_ids(options), dry_run=options.dry_run)
        verb = "would be" if options.dry_run else "were"
        line = f"the tags of {count:,} trajectories {verb} removed"
        return _counted(options, count, line)
    tags = option_values(options.set)
    ids = _chosen_ids(options) or []
    count = edits.tagged(options.data_dir, ids, tags, dry_run=options.dry_run)
    verb = "would be tagged" if options.dry_run else "were tagged"
    return _counted(options, count, f"{count:,} trajectories {verb}")


def _counted(options: argparse.Namespace, count: int, line: str) -> Answer:
    return Answer({"num_trajectories": count, "dry_run": options.dry_run}, [line])


def merge(options: argparse.Namespace) -> Answer:
    return _new_folder(merge_split.merge(options.sources, options.to, progress=options.progress))


def split(options: argparse.Namespace) -> Answer:
    folders = merge_split.split(
        options.data_dir,
        option_values(options.parts) or None,
        options.to,
        seed=options.seed,
        progress=options.progress,
    )
    about = {}
    lines: list[str] = []
    code = 0
    for name, folder in folders.items():
        answer = _new_folder(folder)
        about[name] = answer.about
        lines += answer.lines
        code = max(code, answer.code)
    return Answer(about, lines, code)


def _new_folder(folder: merge_split.NewFolder) -> Answer:
    counts = f"{folder.num_trajectories:,} trajectories, {folder.num_frames:,} frames"
    blocks = f"{folder.num_linked:,} blocks are hard links, {folder.num_copied:,} were written"
    lines = [f"{folder.path}: {counts}; {blocks}"]
    renamed = {}
    for (place, old), new in folder.renamed.items():
        renamed[f"{place}:{old}"] = new
        lines.append(f"  writer {old!r} of source {place} is called {new!r}")
    problems = [str(problem) for problem in folder.problems]
    advice = [str(remark) for remark in folder.advice]
    lines += [f"  {problem}" for problem in problems]
    lines += [f"  advice: {remark}" for remark in advice]
    about = {
        **vars(folder),
        "path": str(folder.path),
        "renamed": renamed,
        "problems": problems,
        "advice": advice,
    }
    return Answer(about, lines, 1 if problems else 0)


def repair(options: argparse.Namespace) -> Answer:
    result = repair_recording.repair(
        options.data_dir,
        options.to,
        only=[code for code in options.only.split(",") if code],
        dry_run=options.dry_run,
        progress=options.progress,
    )
    problems = result.problems or {}
    lines = [_action_line(action) for action in result.actions]
    lines += [f"still found: {finding.code} {finding.message}" for finding in result.remaining]
    lines += [f"{name}: {problem}" for name, problem in problems.items()]
    written = f"{result.num_trajectories:,} trajectories"
    lines.append(f"{result.path}: {'nothing was written' if options.dry_run else written}")

    remaining = []
    for finding in result.remaining:
        remaining.append({"code": finding.code, "message": finding.message})
    about = {
        "path": str(result.path),
        "num_trajectories": result.num_trajectories,
        "actions": [action.as_dict() for action in result.actions],
        "remaining": remaining,
        "problems": list(problems),
    }
    return Answer(about, lines, 1 if remaining or problems else 0)


def _action_line(action: repair_recording.Action) -> str:
    finding = action.finding
    field = f" {finding.field}" if finding.field else ""
    ids = some_ids(action.trajectories)
    line = f"{finding.code}{field}: {action.says}"
    return f"{line} ({ids})" if ids else line


def _chosen_ids(options: argparse.Namespace) -> list[str] | None:
    """Return the ids of the trajectories that the arguments and `--select` choose.

    None means all trajectories. Only `--undo` may apply to all of them.

    Raises:
        UsageError: The command line has neither ids nor `--select` nor `--undo`.
    """
    ids: list[str] = options.ids
    if not ids and not options.select:
        if options.undo:
            return None
        raise UsageError(
            f"no trajectories of {options.data_dir!r} are chosen. Pass ids or --select; "
            f"'rollout-data ls {options.data_dir}' lists the ids."
        )
    if options.select:
        recording = open_recording(options.data_dir)
        if ids:
            recording = recording.select(ids)
        return selected(recording, options.select).ids
    return ids
