"""Convert recordings between formats, one episode at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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

from ..remote.locations import DataDir
from ..sources.recordings.episode import Episode
from ..sources.recordings.recording import Recording
from ..writing.conversion_record import (
    NOTE_NAME,
    ConversionNote,
    SummedEpisode,
    UnreadableEpisode,
)
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


@dataclass(frozen=True)
class Conversion:
    """Result of a conversion.

    Attributes:
        num_episodes: Episodes in the target.
        num_present: Episodes that an earlier conversion had written.
        changes: Maps the description of each change to the ids of the changed episodes.
        problems: Errors about data that were unreadable, repaired or left out.
        advice: Remarks on suspicious data, which were converted unchanged.
    """

    num_episodes: int
    num_present: int
    changes: Mapping[str, Sequence[str]]
    problems: Sequence[RolloutDataError]
    advice: Sequence[RolloutDataError] = ()


def convert(
    source: DataDir,
    target: str | os.PathLike[str],
    to: str = OWN,
    *,
    progress: bool = True,
    **options: Any,
) -> Conversion:
    """Write the episodes of a recording in another format.

    Only a part of one episode is in memory at a time.

    Repeat the same call to resume a stopped or killed conversion. The target contains a record of
    the source, the options and the checksums of all rows. Source and options are compared with this
    record. Rows of converted episodes are compared only if a file of the source has changed. A
    complete target is not written again. New episodes at the end of the source are added to an
    incomplete target, and to every target of block files.

    Args:
        source: A path of any format, or a `Recording`.
        target: The new file or folder, or the target of an earlier conversion of the same source.
        to: Format of the target.
        progress: Show a progress bar.
        **options: Options of the target's format.

    Returns:
        A summary of the target. Unreadable episodes are left out and listed among the problems.

    Raises:
        UsageError: The format or an option is unknown. The target contains other files, or was
            converted from another source or with other options. Another process is converting into
            the target.
        DataFileError: The source or all of its episodes cannot be read. The type is `AccessError`
            if a remote store refuses access, and `FetchError` if it does not answer. Repeat the
            same call to resume.
        TargetError: The target cannot be written.
    """
    writer_type = _checked_writer(to, options)
    progress = arguments.flag("progress", progress)
    recording = source if isinstance(source, Recording) else open_source("source", source)
    path = arguments.path("target", target).absolute()
    if recording.path in (path, *path.parents):
        raise UsageError(
            f"target {str(path)!r} is inside the source {str(recording.path)!r}. Choose a path "
            "outside of the source."
        )

    with ExitStack() as locks:
        with errors_of_target(path):
            if path.is_symlink() and not path.exists():
                raise occupied(path, "is a link to a missing file")
            locks.enter_context(only_writer_of(path))
        present, removed = present_part(recording)
        problems = [*recording.problems, *removed]
        return _convert(_Job(present, path, writer_type, options, progress), problems)


@dataclass(frozen=True)
class _Job:
    """The checked arguments of a conversion.

    Attributes:
        recording: Episodes of the source whose files exist and are unchanged.
        path: Absolute path of the target.
        writer_type: Writer of the target's format.
        options: Options of the format, as the caller passed them.
        progress: Whether progress bars are shown.
    """

    recording: Recording
    path: Path
    writer_type: type[ForeignWriter]
    options: Mapping[str, Any]
    progress: bool


def _checked_writer(to: str, options: Mapping[str, Any]) -> type[ForeignWriter]:
    """Return the writer of a format.

    Raises:
        UsageError: The format is unknown, or has no option of a given name.
    """
    formats = (OWN, *WRITERS, *EXPORTS)
    if to not in formats:
        raise UsageError(f"to={to!r} is unknown. Known formats are {nearest(to, formats)}.")

    writer_type: type[ForeignWriter] = OwnWriter if to == OWN else writer_class(to)
    unknown = [name for name in options if name not in writer_type.OPTIONS]
    if unknown:
        known = "has no options"
        if writer_type.OPTIONS:
            known = f"has the options {nearest(unknown[0], writer_type.OPTIONS)}"
        raise UsageError(f"option {unknown[0]!r} is unknown. The format {to!r} {known}.")
    return writer_type


def _convert(job: _Job, problems: list[RolloutDataError]) -> Conversion:
    """Start or resume a conversion; append errors to `problems`. The target is already locked."""
    recording = job.recording
    path = job.path
    writer_type = job.writer_type
    check_any_readable(recording, len(recording), problems)
    damaged = recording.damaged()

    plan = writer_type.planned(recording, recording.metadata, job.options)
    # The state is recorded before any row is read, so later changes of the source are noticed.
    plan.source = source_state(recording)
    with errors_of_target(path):
        earlier = writer_type.noted(path)
        is_complete = earlier is not None and writer_type.is_finished(path)

    num_present = 0
    if earlier is not None and (is_complete or earlier.rows):
        _check_earlier(job, earlier, plan, is_complete)
        unreadable = unreadable_episodes(earlier.left_out, recording, damaged)
        readable = sorted(earlier.left_out - unreadable.keys())
        if is_complete:
            check_nothing_gained(earlier, plan, readable, path)
            problems += unreadable.values()
            check_any_readable(recording, len(recording) - len(unreadable), problems)
            num_episodes = len(earlier.rows)
            return Conversion(num_episodes, num_episodes, {}, problems, list(recording.advice))

        if writer_type.can_grow:
            plan.resume(earlier)
        elif readable or shared_forms(earlier) != shared_forms(plan):
            # Resuming would append an episode out of order, or keep the fields of an earlier state
            # of the source. All episodes are therefore written again.
            num_present = len(earlier.rows)
        else:
            plan.resume(earlier)
            plan.left_out = set(unreadable)
            problems += unreadable.values()

    writer, num_earlier = _write_episodes(job, plan, damaged, problems)
    unwritten = set(writer.left_out)
    check_any_readable(recording, len(recording) - len(unwritten), problems)
    for change, ids in writer.report.items():
        if change.startswith("the episode is left out"):
            unwritten.update(ids)
    return Conversion(
        num_episodes=len(recording) - len(unwritten),
        num_present=max(num_present, num_earlier),
        changes=writer.report,
        problems=problems,
        advice=list(recording.advice),
    )


def _check_earlier(
    job: _Job,
    earlier: ConversionNote,
    plan: ConversionNote,
    is_complete: bool,
) -> None:
    """Check that an existing target was converted from this source with these options.

    `plan` is the record of the new conversion. Its options are replaced by the options in the
    earlier record, which lead to the same target.

    Raises:
        UsageError: The source or an option differs. The error states the first difference.
        DataFileError: An episode of the target is no longer readable in the source.
    """
    if is_complete and not earlier.is_whole():
        raise occupied(job.path, f"is a complete target with a damaged {NOTE_NAME!r}")

    def effective(options: Mapping[str, Any]) -> Mapping[str, Any]:
        recording = job.recording
        return job.writer_type.effective(options, job.path, recording, recording.metadata)

    check_same_note(earlier, plan, effective, job.path)
    plan.options = earlier.options
    with errors_of_target(job.path):
        job.writer_type.check_files(job.path, earlier, is_complete)
    check_same_rows(earlier, plan, job.recording, job.path, job.progress)


def _write_episodes(
    job: _Job,
    plan: ConversionNote,
    damaged: Mapping[str, DataFileError],
    problems: list[RolloutDataError],
) -> tuple[ForeignWriter, int]:
    """Write the episodes that are missing from the target; append read errors to `problems`.

    Some formats fix the positions of all rows before writing (`is_laid_out_first`). If an episode
    is unreadable, a target of such a format is written again without the episode.

    Returns:
        The closed writer, and the number of episodes that an earlier conversion had written.
    """
    recording = job.recording
    num_earlier = 0
    while True:
        episodes = recording
        if job.writer_type.is_laid_out_first and plan.left_out:
            episodes = recording.select(name for name in recording.ids if name not in plan.left_out)
        with errors_of_target(job.path):
            writer = job.writer_type(job.path, episodes, recording.metadata, job.options, plan)
        num_earlier = max(num_earlier, writer.num_earlier)

        try:
            bar = tqdm(episodes, desc="convert", unit=" episodes", disable=not job.progress)
            for episode in bar:
                if episode.id in writer.written or episode.id in writer.left_out:
                    continue
                # Damaged rows would get valid checksums in the target, so they are not copied.
                problem = damaged.get(episode.id) or _add_episode(writer, episode)
                if problem is not None:
                    problems.append(problem)
                    with errors_of_target(job.path):
                        writer.leave_out(episode)
        finally:
            with errors_of_target(job.path):
                writer.close()

        if not job.writer_type.is_laid_out_first:
            return writer, num_earlier
        if len(episodes) + len(plan.left_out) == len(recording):
            return writer, num_earlier
        plan.forget()


def _add_episode(writer: ForeignWriter, episode: Episode) -> DataFileError | None:
    """Write an episode. Return the error if the episode is unreadable, otherwise None."""
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
    """Convert errors of writing into a `TargetError`. Also usable as a decorator.

    Errors about the source and about arguments keep their types.
    """
    try:
        yield
    except (UnreadableEpisode, UsageError, TargetError, UnansweredError):
        raise
    except Exception as cause:
        reason = _reason(cause)
        if reason is None:
            raise
        error = TargetError(f"{str(path)!r} cannot be written: {str(reason).rstrip('.')}.")
        error.errno = _errno(reason)
        raise error from cause


def _errno(reason: BaseException | None) -> int | None:
    """Return the first `errno` of an error and its causes; None if no error has an `errno`."""
    while reason is not None:
        number = getattr(reason, "errno", None)
        if isinstance(number, int):
            return number
        reason = reason.__cause__ or reason.__context__
    return None


def _reason(error: Exception) -> BaseException | None:
    """Return the operating system error behind a failed write; None for other errors."""
    if isinstance(error, (DataFileError, BackgroundError, OSError)):
        return error
    if isinstance(getattr(error, "errno", None), int):  # FFmpeg's errors have an `errno`.
        return error
    # After a failed write, `torch.save` raises an error whose context is the error of the file.
    return error.__context__ if isinstance(error.__context__, OSError) else None
