"""Converting recordings from format to format, one episode at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from storage.core import arguments
from storage.core.locks import only_writer_of
from storage.errors import (
    BackgroundError,
    DataFileError,
    RolloutDataError,
    TargetError,
    UnansweredError,
    UsageError,
    nearest,
)

from ..blocks.block_folder import BlockFolder
from ..blocks.block_header import damaged_fragments, read_header
from ..remote.locations import DataDir, RemotePath
from ..sources.episode import Episode
from ..sources.recording import Recording
from ..writing.conversion_record import SummedEpisode, UnreadableEpisode
from .block_episode_writer import OWN, OwnWriter
from .conversion_resume import (
    check_nothing_gained,
    check_same_note,
    check_same_rows,
    shared_forms,
    source_state,
    unreadable_episodes,
)
from .episode_writer import ForeignWriter, occupied
from .open_recording import check_any_readable, open_source, present_part
from .registry import EXPORTS, WRITERS, writer_class

_ACTION = "call rollout_data.convert"


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Attributes:
        num_episodes: Episodes in the result.
        num_present: How many of them an earlier conversion had written.
        changes: What was changed or left out -> the ids of the episodes.
        problems: Data that were not read, were repaired or were left out.
        advice: Remarks on data that were written as they are stored; see `Recording.advice`.
    """

    num_episodes: int
    num_present: int
    changes: Mapping[str, Sequence[str]]
    problems: Sequence[RolloutDataError]
    advice: Sequence[RolloutDataError] = ()


def convert(
    source: DataDir, target: str | os.PathLike[str], to: str = OWN, *, progress: bool = True, **options: Any
) -> Conversion:
    """Write the episodes of a recording in another format; in memory there is a part of one episode at a time.

    A conversion that was stopped or killed is resumed when it is called again with the same source and options. The
    target keeps a note of both and checksums of all rows, with which every episode that is there is compared; rows are
    not read again if no file of the source has changed. A complete target is left as it is. A source that has gained
    episodes at its end is converted into a target that is not complete, or is of block files.

    Args:
        source: A path of any format, or a `Recording`.
        target: The new file or folder, or that of an earlier conversion of the same source.
        to: The format.
        progress: Show a progress bar.
        **options: Of the format that is written.

    Returns:
        What was changed or left out. An episode that cannot be read is left out and is among the problems.

    Raises:
        UsageError: The format or an option is not known; the target holds something else, or was converted from another
            source or with other options; or another process is converting into it.
        DataFileError: The source cannot be read, or no episode of it; an `AccessError` or `FetchError` if its store
            refuses access or does not answer. Call it again to resume.
        TargetError: The target cannot be written.
    """
    kind = _writer_of(to, options)
    progress = arguments.flag(_ACTION, "progress", progress)
    recording = source if isinstance(source, Recording) else open_source(_ACTION, "source", source)
    path = arguments.path(_ACTION, "target", target).absolute()
    if recording.path in (path, *path.parents):
        raise UsageError(_ACTION, "", f"target as a place outside of {str(recording.path)!r}", repr(str(path)))
    with ExitStack() as held:
        with errors_of_target(path):
            if path.is_symlink() and not path.exists():
                raise occupied(path, "a link to nothing")
            held.enter_context(only_writer_of(path, "convert into"))
        return _convert(recording, path, kind, options, progress)


def _writer_of(to: str, options: Mapping[str, Any]) -> type[ForeignWriter]:
    if to not in (formats := (OWN, *WRITERS, *EXPORTS)):
        raise UsageError(
            _ACTION,
            "",
            f"to as one of {nearest(str(to), formats).removeprefix('one of ')}",
            repr(to),
        )
    kind: type[ForeignWriter] = OwnWriter if to == OWN else writer_class(to)
    if unknown := [name for name in options if name not in kind.OPTIONS]:
        known = nearest(unknown[0], kind.OPTIONS) if kind.OPTIONS else "no option"
        raise UsageError(_ACTION, f"with to={to!r}", known, repr(unknown[0]))
    return kind


def _convert(
    recording: Recording, path: Path, kind: type[ForeignWriter], options: Mapping[str, Any], progress: bool
) -> Conversion:
    """Convert into a target that nobody else writes."""
    recording, removed = present_part(recording)
    problems = [*recording.problems, *removed]
    check_any_readable(recording, len(recording), problems)
    damaged = _damaged(recording)
    plan = kind.planned(recording, recording.metadata, options)
    plan.source = source_state(recording)  # before a row is read: what changes later is another state
    with errors_of_target(path):
        there = kind.noted(path)
        is_complete = there is not None and kind.is_finished(path)
    if there is not None and is_complete and not there.is_whole():
        raise occupied(path, "a complete target whose note is damaged")
    num_present = 0
    if there is not None and (is_complete or there.rows):
        check_same_note(there, plan, lambda options: kind.effective(options, path, recording, recording.metadata), path)
        plan.options = there.options  # of the same effect
        with errors_of_target(path):
            kind.check_files(path, there, is_complete)
        check_same_rows(there, plan, recording, path, progress)
        unread = unreadable_episodes(there.left_out, recording, damaged)
        readable = sorted(there.left_out - unread.keys())
        if is_complete:
            check_nothing_gained(there, plan, readable, path)
            problems += unread.values()
            check_any_readable(recording, len(recording) - len(unread), problems)
            return Conversion(len(there.rows), len(there.rows), {}, problems, list(recording.advice))
        if kind.can_grow:
            plan.resume(there)
        elif readable or shared_forms(there) != shared_forms(plan):
            # Another episode would come after later ones, or episodes would have other fields than those before.
            num_present = len(there.rows)
        else:
            plan.resume(there)
            plan.left_out = set(unread)
            problems += unread.values()
    while True:
        chosen = recording
        if kind.is_laid_out_first and plan.left_out:
            chosen = recording.select(one for one in recording.ids if one not in plan.left_out)
        with errors_of_target(path):
            writer = kind(path, chosen, recording.metadata, options, plan)
        num_present = max(num_present, writer.num_earlier)
        try:
            for episode in tqdm(chosen, desc="convert", unit=" episodes", disable=not progress):
                if episode.id not in writer.written | writer.left_out:
                    problem = damaged.get(episode.id) or _added(writer, episode)
                    if problem is not None:  # damaged rows would have right checksums in the result
                        problems.append(problem)
                        with errors_of_target(path):
                            writer.leave_out(episode)
        finally:
            with errors_of_target(path):
                writer.close()
        if not kind.is_laid_out_first or len(chosen) + len(plan.left_out) == len(recording):
            break
        plan.forget()
    unwritten = set(writer.left_out)
    check_any_readable(recording, len(recording) - len(unwritten), problems)
    for change, ids in writer.report.items():
        if change.startswith("the episode is left out"):
            unwritten.update(ids)
    num_episodes = len(recording) - len(unwritten)
    return Conversion(num_episodes, num_present, writer.report, problems, list(recording.advice))


def _added(writer: ForeignWriter, episode: Episode) -> DataFileError | None:
    """Write an episode; return the error of an episode that cannot be read."""
    try:
        with errors_of_target(writer.path):
            writer.add(SummedEpisode(episode))
            writer.note_placed()
        for name, (num_values, difference) in episode.rounded().items():
            writer.rounded(name, num_values, difference, episode)
    except UnreadableEpisode as error:
        return error.problem
    return None


@contextmanager
def errors_of_target(path: Path) -> Iterator[None]:
    """Turn what goes wrong in the block into a `TargetError`, except for callers' mistakes and errors of the source."""
    try:
        yield
    except (UnreadableEpisode, UsageError, TargetError, UnansweredError):
        raise
    except Exception as cause:
        reason = _reason(cause)
        if reason is None:
            raise
        error = TargetError("write", repr(str(path)), "a place that can be written", str(reason))
        error.errno = _errno(reason)
        raise error from cause


def _errno(reason: BaseException | None) -> int | None:
    """Return the first error number of an error and its causes; None if there is none."""
    while reason is not None:
        number = getattr(reason, "errno", None)
        if isinstance(number, int):
            return number
        reason = reason.__cause__ or reason.__context__
    return None


def _reason(error: Exception) -> BaseException | None:
    """Return what an error says of a file that could not be written; None if it says something else."""
    if isinstance(error, (DataFileError, BackgroundError, OSError)):
        return error
    if isinstance(getattr(error, "errno", None), int):  # FFmpeg's
        return error
    # torch.save fails once more after the error of the file.
    return error.__context__ if isinstance(error.__context__, OSError) else None


def _damaged(recording: Recording) -> dict[str, DataFileError]:
    """Return the episodes of block files on this machine whose rows their checksums contradict: id -> error."""
    found: dict[str, DataFileError] = {}
    if recording.format == OWN and not isinstance(recording.path, RemotePath):
        for block in BlockFolder.at(recording.path).blocks.values():
            with suppress(FileNotFoundError):  # removed by retention: its episodes tell
                for _, error in damaged_fragments(read_header(block.path)):
                    found[f"{block.writer}:{error.trajectory}"] = error
    return found
