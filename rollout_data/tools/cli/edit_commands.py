"""What the commands answer that edit, unite and divide recordings; see `answers.py`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from storage.errors import UsageError

from ...formats.open_recording import open as open_recording
from ..edit import edits, merge_split, repair_recording
from .commands import Answer, option_value, pairs
from .select_option import selected


def drop(options: argparse.Namespace) -> Answer:
    return _leave_out(options, edits.drop)


def keep(options: argparse.Namespace) -> Answer:
    return _leave_out(options, edits.keep)


def _leave_out(options: argparse.Namespace, call: Callable[..., int]) -> Answer:
    """Answer `drop` and `keep`, which are undone in the same way."""
    if options.undo:
        num = edits.undrop(options.data_dir, _chosen(options), dry_run=options.dry_run)
        return _changed(options, num, "would come back" if options.dry_run else "came back")
    num = call(options.data_dir, _chosen(options) or [], dry_run=options.dry_run)
    if options.dry_run:
        return _changed(options, num, "would be left out")
    line = f"{num:,} trajectories are left out; 'rollout-data drop {options.data_dir} --undo' brings them back"
    return Answer({"num_trajectories": num, "dry_run": False}, [line])


def _changed(options: argparse.Namespace, num: int, says: str) -> Answer:
    return Answer({"num_trajectories": num, "dry_run": options.dry_run}, [f"{num:,} trajectories {says}"])


def tag(options: argparse.Namespace) -> Answer:
    if options.undo:
        num = edits.untag(options.data_dir, _chosen(options), dry_run=options.dry_run)
        line = f"what was said of {num:,} trajectories {'would be' if options.dry_run else 'was'} taken back"
        return Answer({"num_trajectories": num, "dry_run": options.dry_run}, [line])
    said = {name: option_value(text) for name, text in pairs("tag", options.set).items()}
    num = edits.tagged(options.data_dir, _chosen(options) or [], said, dry_run=options.dry_run)
    return _changed(options, num, "would be tagged" if options.dry_run else "were tagged")


def merge(options: argparse.Namespace) -> Answer:
    return _made(merge_split.merge(options.sources, options.to, progress=options.progress))


def split(options: argparse.Namespace) -> Answer:
    parts = {name: option_value(text) for name, text in pairs("split", options.parts).items()}
    done = merge_split.split(options.data_dir, parts or None, options.to, seed=options.seed, progress=options.progress)
    answers = {name: _made(one) for name, one in done.items()}
    about = {name: answer.about for name, answer in answers.items()}
    code = max((answer.code for answer in answers.values()), default=0)
    return Answer(about, [line for answer in answers.values() for line in answer.lines], code)


def repair(options: argparse.Namespace) -> Answer:
    only = [code for code in options.only.split(",") if code]
    done = repair_recording.repair(
        options.data_dir, options.to, only=only, dry_run=options.dry_run, progress=options.progress
    )
    lines = []
    for one in done.actions:
        which = ", ".join(one.trajectories[:3]) + (", ..." if len(one.trajectories) > 3 else "")
        field = f" {one.finding.field}" if one.finding.field else ""
        lines.append(f"{one.finding.code}{field}: {one.says}{f' ({which})' if which else ''}")
    lines += [f"still found: {one.code} {one.message}" for one in done.remaining]
    lines += [f"{name}: {problem}" for name, problem in (done.problems or {}).items()]
    is_left = bool(done.remaining or done.problems)
    holds = "nothing was written" if options.dry_run else f"{done.num_trajectories:,} trajectories"
    lines.append(f"{done.path}: {holds}")
    actions = [one.as_dict() for one in done.actions]
    about = {"path": str(done.path), "num_trajectories": done.num_trajectories, "actions": actions}
    remaining = [{"code": one.code, "message": one.message} for one in done.remaining]
    return Answer({**about, "remaining": remaining, "problems": list(done.problems or {})}, lines, int(is_left))


def _made(done: merge_split.NewFolder) -> Answer:
    counts = f"{done.num_trajectories:,} trajectories, {done.num_frames:,} frames"
    blocks = f"{done.num_linked:,} blocks are hard links, {done.num_copied:,} were written"
    names = {f"{place}:{old}": new for (place, old), new in done.renamed.items()}
    lines = [f"{done.path}: {counts}; {blocks}"]
    lines += [f"  writer {old!r} of source {place} is called {new!r}" for (place, old), new in done.renamed.items()]
    lines += [f"  {problem}" for problem in done.problems]
    lines += [f"  advice: {remark}" for remark in done.advice]
    about = {**vars(done), "path": str(done.path), "renamed": names}
    about["problems"] = [str(problem) for problem in done.problems]
    about["advice"] = [str(remark) for remark in done.advice]
    return Answer(about, lines, 1 if done.problems else 0)


def _chosen(options: argparse.Namespace) -> list[str] | None:
    """Return the ids that are meant; None, to undo, for all."""
    if options.undo and not options.select:
        return options.ids or None
    if not options.ids and not options.select:
        advice = f"'rollout-data ls {options.data_dir}' lists them"
        raise UsageError(options.command, f"trajectories of {options.data_dir!r}", "ids or --select", "neither", advice)
    chosen: list[str] = options.ids
    if options.select:
        recording = open_recording(options.data_dir)
        chosen = selected(recording.select(chosen) if chosen else recording, options.select).ids
    return chosen
