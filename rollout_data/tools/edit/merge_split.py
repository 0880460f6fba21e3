"""Merge and split recordings into new folders, with hard links instead of copies if possible.

A new folder is created atomically. No source is changed. A hard-linked block is one file with two
names, which is safe because block files never change.
"""

from __future__ import annotations

import errno
import filecmp
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from storage.core import arguments
from storage.core.arguments import is_real
from storage.core.durable_files import replace_folder
from storage.core.fields import Schema
from storage.core.locks import only_writer_of
from storage.errors import (
    DataFileError,
    RolloutDataError,
    SchemaError,
    TargetError,
    UsageError,
)

from ...blocks.annotation_table import EPISODES, TEXTS
from ...blocks.block import Block
from ...blocks.block_folder import BlockFolder, save_index_cache
from ...blocks.block_header import METADATA_NAME, damaged_fragments, read_header
from ...blocks.folder_metadata import ENDS, Metadata, load_metadata, publish_metadata
from ...blocks.write_block import block_name, write_block
from ...formats.convert import convert
from ...formats.frame_rate import RATE_KEYS
from ...formats.open_recording import check_any_readable, open_source, present_part
from ...formats.open_recording import open as open_recording
from ...remote.locations import DataDir, DataDirs, RemotePath, origins_of
from ...sources.block_scanner import BlockScanner
from ...sources.live_source import scanner_of
from ...sources.origins import MIXED, ORDER_KEY, conventions, mixed_conventions
from ...sources.recordings.recording import Recording
from .copied_blocks import parts_of, rebuilt
from .edits import Edits, Key, publish_edits, read_edits

#: Error numbers of `os.link` which mean that hard links are impossible. Then files are copied.
_NO_LINKS = (
    errno.EXDEV,
    errno.EPERM,
    errno.EMLINK,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EACCES,
)
#: Error numbers of linking or copying a file which mean that the source file is unreadable.
_OF_SOURCE = (errno.ENOENT, errno.ESTALE, errno.EIO)
#: Subfolder of the new folder for sources that had to be converted first.
_CONVERTED = ".converted"
#: Map from trajectory key to the annotations of the trajectory.
Notes = dict[Key, dict[str, Any]]


@dataclass
class NewFolder:
    """Result of creating a folder by `merge` or `split`.

    Attributes:
        path: The folder.
        num_trajectories: Number of trajectories.
        num_frames: Number of frames.
        num_linked: Number of blocks that are hard links.
        num_copied: Number of blocks that were written.
        renamed: Map from (index of the source, writer) to the new name of the writer, for writers
            whose name another source also has.
        problems: Errors about data that were unreadable, repaired or left out.
        advice: Remarks about suspicious data that were not changed. See `Recording.advice`.
    """

    path: Path
    num_trajectories: int = 0
    num_frames: int = 0
    num_linked: int = 0
    num_copied: int = 0
    renamed: dict[tuple[int, str], str] = field(default_factory=dict)
    problems: list[RolloutDataError] = field(default_factory=list)
    advice: list[RolloutDataError] = field(default_factory=list)


@contextmanager
def new_folder(
    name: str,
    target: str | os.PathLike[str],
    *sources: Path | RemotePath,
) -> Iterator[Path]:
    """Yield an empty temporary folder. It is renamed to `target` if the `with` statement succeeds.

    Args:
        name: Name of the argument of the public function that has the target, for errors.
        target: A new or empty folder.
        sources: Paths that are read in the `with` statement. They must not contain the target.

    Raises:
        UsageError: The target is in a source, is not empty, or another process writes to it.
        DataFileError: A file of a source cannot be read.
        TargetError: The target cannot be written.
    """
    place = arguments.path(name, target).resolve()
    for source in sources:
        if isinstance(source, Path) and source.resolve() in (place, *place.parents):
            raise UsageError(
                f"{name} is {str(target)!r}, which lies in the source {str(source)!r}. "
                "Choose a folder outside of it."
            )
    made = None
    try:
        with only_writer_of(place):
            if place.is_dir() and any(place.iterdir()):
                raise UsageError(
                    f"{name} is {str(target)!r}, which has files. Choose a new or empty folder."
                )
            with replace_folder(place, ()) as made:
                yield made
    except (DataFileError, OSError) as cause:
        if made is None:
            raise _target_error(target, cause) from cause
        if isinstance(cause, DataFileError):
            raise
        if _is_about_source(cause, sources):
            raise DataFileError(
                f"{cause.filename!r} cannot be read: {cause.strerror}. "
                "If the file was deleted during this call, for example by prune, call again."
            ) from cause
        raise _target_error(target, cause) from cause


def _target_error(target: str | os.PathLike[str], cause: Exception) -> TargetError:
    """Build the error for a target that cannot be written because of `cause`."""
    problem = f"{type(cause).__name__}: {cause}."
    if isinstance(cause, RolloutDataError):
        problem = cause.message
    error = TargetError(f"{str(target)!r} cannot be written: {problem}")
    error.errno = getattr(cause, "errno", None)
    return error


def _is_about_source(error: OSError, sources: Sequence[Path | RemotePath]) -> bool:
    """Return whether an error was raised by reading a source, and not by writing the target."""
    if not isinstance(error.filename, (str, os.PathLike)):
        return False
    if error.filename2 is not None and error.errno not in _OF_SOURCE:
        return False
    path = Path(error.filename)
    local_sources = [source for source in sources if isinstance(source, Path)]
    return any(source in (path, *path.parents) for source in local_sources)


def merge(
    sources: DataDirs,
    out: str | os.PathLike[str],
    *,
    progress: bool = False,
) -> NewFolder:
    """Merge recordings with the same fields into a new folder of block files.

    Edits of the sources are kept. Blocks become hard links. They are copied if the new folder is on
    another file system, or if writers of two sources have the same name.

    Sources may share blocks, for example parts of `split`. A shared block or trajectory is stored
    once. A shared trajectory is dropped only if it is dropped in every source.

    Recordings of other formats, and folders with a damaged block, are converted, as by `convert`.
    Unreadable data, and episodes that were removed after opening, are left out and listed in
    `NewFolder.problems`.

    Args:
        sources: Paths of any format, or recordings.
        out: A new or empty folder.
        progress: Show progress bars.

    Raises:
        UsageError: There is no source, or `out` is not empty or is in a source.
        SchemaError: The sources have different fields.
        DataFileError: A source cannot be opened, or none of its episodes can be read.
    """
    progress = arguments.flag("progress", progress)
    origins = origins_of(sources, "sources")
    recordings = [open_source("sources", origin) for origin in origins]
    for recording in recordings:
        _check_source(recording)
    result = NewFolder(arguments.path("out", out))
    paths = [recording.path for recording in recordings]
    with new_folder("out", out, *paths) as made:
        _merge_into(recordings, made, result, progress)
    return result


def split(
    path: DataDir,
    parts: Mapping[str, float] | None,
    out: str | os.PathLike[str],
    *,
    seed: int = 0,
    progress: bool = False,
) -> dict[str, NewFolder]:
    """Split a recording into several folders of block files, `out/<name>`.

    With shares, each trajectory is in exactly one folder. Blocks become hard links. If a folder
    needs only some trajectories of a block, the block is linked and its other trajectories are
    dropped. Recordings of other formats, and folders with a damaged block, are converted, as by
    `merge`.

    Args:
        path: A path of any format, or a recording.
        parts: Share of the trajectories for each folder name, such as `{"train": 0.9, "val": 0.1}`.
            None uses the splits that the recording itself defines, which may overlap.
        out: A new or empty folder.
        seed: Seed of the random choice. The choice also depends on the name of a trajectory and on
            the number of trajectories.
        progress: Show progress bars.

    Raises:
        UsageError: The shares do not add up to 1, a name is no valid folder name, or `out` is
            not empty or is in the source.
        DataFileError: The source cannot be opened, or none of its episodes can be read.
    """
    progress = arguments.flag("progress", progress)
    recording = open_source("path", path)
    _check_source(recording)
    target = arguments.path("out", out)
    selections = recording.split(parts, seed)
    for name in selections:
        if not name.strip(".") or {"/", "\0"} & set(name):
            raise UsageError(
                f"the part {name!r} is not a valid name of a folder. Choose a name such as 'train'."
            )
    results: dict[str, NewFolder] = {}
    with new_folder("out", target, recording.path) as made:
        for name, selection in selections.items():
            results[name] = NewFolder(target / name)
            (made / name).mkdir()
            _merge_into([selection], made / name, results[name], progress)
    return results


def _check_source(recording: Recording) -> None:
    """Raise `DataFileError` if no episode of a recording can be read."""
    present, removed = present_part(recording)
    check_any_readable(recording, len(present), [*recording.problems, *removed])


@dataclass
class _MergedSource:
    """Source of a merge as a folder of blocks, after conversion if necessary.

    Attributes:
        recording: The source, or the result of its conversion.
        folder: Folder with the blocks of `recording`.
        writers: Map from writer name to the writer's name in the new folder.
        metadata: Metadata of `folder`; None if it has none.
    """

    recording: Recording
    folder: BlockFolder
    writers: dict[str, str]
    metadata: Metadata | None


def _merge_into(
    recordings: Sequence[Recording],
    made: Path,
    result: NewFolder,
    progress: bool,
) -> None:
    """Link or copy the blocks of recordings into the empty folder `made`.

    If a selection has only some trajectories of a block, the whole block is linked and its other
    trajectories are dropped. Otherwise readers would report that blocks of them are missing.

    Args:
        recordings: Recordings to merge.
        made: The new folder, under its temporary name.
        result: Result for the caller. Its counts, problems and advice are updated in place.
        progress: Show progress bars.
    """
    kept: set[Key] = set()
    notes: Notes = {}
    sources: list[_MergedSource] = []
    first_fields: tuple[Path | RemotePath, Schema] | None = None
    for place, recording in enumerate(recordings):
        present, removed = present_part(recording)
        result.problems += removed
        source = _linkable(present, made)
        ids = present.origin.ids
        is_linked = source is not None
        if source is None:
            ids = None
            source = _converted(present, made, place, result, progress)
        else:
            result.problems += present.problems
            result.advice += present.advice
        sources.append(source)
        schema = source.folder.schema
        if schema is not None:
            if first_fields is None:
                first_fields = recording.path, schema
            _check_fields(recording.path, schema, *first_fields)

        for writer, name in source.writers.items():
            if writer != name:
                result.renamed[place, writer] = name
        blocks = tqdm(
            _blocks_with(source.folder, ids),
            desc="link",
            unit=" blocks",
            disable=not progress,
        )
        for block in blocks:
            was_linked = _add_block(block, source.writers[block.writer], made)
            result.num_linked += was_linked and is_linked
        wanted = _wanted(source.folder, ids)
        kept |= {(source.writers[writer], number) for writer, number in wanted}
        for (writer, number), values in read_edits(source.folder).notes.items():
            if writer in source.writers and (ids is None or (writer, number) in wanted):
                key = source.writers[writer], number
                notes[key] = notes.get(key, {}) | values

    metadata, advice = _merged_metadata([source.metadata for source in sources])
    result.advice += advice
    if {_rate_of(source.metadata) for source in sources} != {_rate_of(metadata)}:
        for source in sources:
            _note_rates(source, notes)
    shutil.rmtree(made / _CONVERTED, ignore_errors=True)
    folder = BlockFolder.at(made)
    finish(folder, metadata, kept, notes)
    save_index_cache(made)
    result.num_trajectories = len(kept)
    if kept:
        result.num_frames = int(folder.index.lengths[folder.index.find([*kept])].sum())
    num_blocks = sum(not block.is_edit for block in folder.blocks.values())
    result.num_copied = num_blocks - result.num_linked


def _linkable(recording: Recording, made: Path) -> _MergedSource | None:
    """Prepare a recording whose blocks can be linked for a merge; None if it must be converted.

    Other formats, remote folders and folders with damaged blocks must be converted.
    """
    folder = _intact_folder(recording)
    if folder is None:
        return None
    writers = _free_names(_blocks_with(folder, recording.origin.ids), made)
    if _are_copies_damaged(folder, writers):
        return None
    return _MergedSource(recording, folder, writers, load_metadata(folder.data_dir))


def _converted(
    recording: Recording,
    made: Path,
    place: int,
    result: NewFolder,
    progress: bool,
) -> _MergedSource:
    """Convert a recording to block files in a temporary subfolder of the new folder `made`.

    Problems and advice of the conversion are added to `result`. `place` is the index of the source.
    """
    scratch = made / _CONVERTED / str(place)
    scratch.mkdir(parents=True)
    if len(recording):  # With few trajectories, `split` may choose none for a small share.
        conversion = convert(recording, scratch, progress=progress)
        result.problems += conversion.problems
        result.advice += conversion.advice
    folder = BlockFolder.at(scratch)
    writers = _free_names(_blocks_with(folder, None), made)
    return _MergedSource(open_recording(scratch), folder, writers, load_metadata(scratch))


def _merged_metadata(
    stated: Sequence[Metadata | None],
) -> tuple[Metadata | None, Sequence[RolloutDataError]]:
    """Return the metadata that all sources share, and advice about different conventions."""
    metadata = _common(stated)
    known = conventions(statement.context for statement in stated if statement is not None)
    orders = {value for name, value in known if name == ORDER_KEY}
    if metadata is not None and len(orders) > 1:
        metadata = replace(metadata, context={**metadata.context, ORDER_KEY: MIXED})
    return metadata, mixed_conventions(known)


def _note_rates(source: _MergedSource, notes: Notes) -> None:
    """Store the frame rate of each episode of a source in its annotations `notes`.

    Sources with different frame rates have no common rate in the new metadata, so the rates would
    be lost. A rate that is already in the annotations is kept.
    """
    rates = _rates_of_episodes(source.recording, _rate_of(source.metadata))
    for (writer, number), rate in rates.items():
        key = source.writers.get(writer, writer), number
        notes[key] = {RATE_KEYS[0]: rate} | notes.get(key, {})


def _rate_of(metadata: Metadata | None) -> float | None:
    """Return the frame rate in the metadata of a folder in Hz; None if it is unknown."""
    return None if metadata is None else _first_rate(metadata.context)


def _first_rate(context: Mapping[str, Any]) -> float | None:
    for key in RATE_KEYS:
        rate = context.get(key)
        if is_real(rate):
            return rate
    return None


def _rates_of_episodes(recording: Recording, default: float | None) -> dict[Key, float]:
    """Return the frame rate of each episode in Hz, by trajectory key.

    Episodes whose metadata have no frame rate get the rate `default`. If `default` is None, they
    are left out.
    """
    rates: dict[Key, float] = {}
    for name, episode in zip(recording.ids, recording, strict=True):
        rate = _first_rate(episode.metadata)
        if rate is None:
            rate = default
        if rate is not None:
            writer, _, number = name.rpartition(":")
            rates[writer, int(number)] = rate
    return rates


def trajectories_in(block: Block) -> set[Key]:
    """Return the keys of the trajectories with fragments in a block."""
    return {(block.writer, number) for number in block.fragments["trajectory"].tolist()}


def finish(
    folder: BlockFolder,
    metadata: Metadata | None,
    kept: Collection[Key],
    notes: Mapping[Key, dict[str, Any]],
) -> None:
    """Write the metadata and the edit blocks of a new folder.

    Args:
        folder: The new folder, which already has its data blocks.
        metadata: Metadata of the folder; None for no metadata.
        kept: Trajectories to keep. All others in the blocks are dropped.
        notes: Annotations by trajectory. Trajectories that are not in the folder are ignored.
    """
    if metadata is not None:
        publish_metadata(folder.data_dir, metadata, "edited")
    present: set[Key] = set()
    for block in folder.blocks.values():
        present |= trajectories_in(block)
    dropped = present - {*kept}
    present_notes = {key: values for key, values in notes.items() if key in present}
    if dropped or present_notes:
        publish_edits(folder, Edits(dropped, present_notes, created_ns=newest_ns(folder)))


def newest_ns(folder: BlockFolder) -> int:
    """Return the end time of the newest fragment in ns; 0 without fragments.

    New blocks of a merge or a repair use it as their creation time. So the same source always
    results in the same bytes.
    """
    times = [int(block.fragments["end_time_ns"].max(initial=0)) for block in folder.blocks.values()]
    return max(times, default=0)


def is_own(recording: Recording) -> bool:
    """Return whether a recording is a folder of block files on this machine."""
    return scanner_of(recording.origin) is BlockScanner and not isinstance(
        recording.path, RemotePath
    )


def _intact_folder(recording: Recording) -> BlockFolder | None:
    """Open the folder of a recording with only the blocks that the recording has opened.

    Returns None if the recording has another format, or if a block is damaged.
    """
    if not is_own(recording):
        return None
    folder = BlockFolder.at(recording.path)
    if folder.problems.keys() - {METADATA_NAME}:
        return None
    folder.keep_only(recording.blocks)
    return folder


def _check_fields(
    path: Path | RemotePath,
    schema: Schema,
    first_path: Path | RemotePath,
    first_schema: Schema,
) -> None:
    """Raise `SchemaError` if a source has other fields than the first source."""
    difference = first_schema.difference(schema)
    if difference:
        raise SchemaError(
            f"{str(path)!r} has other fields than {str(first_path)!r}: {difference}. "
            "Merge recordings with equal fields."
        )


def _wanted(folder: BlockFolder, ids: Sequence[str] | None) -> set[Key]:
    """Return the keys of the trajectories with the names `ids`; all keys if `ids` is None."""
    keys = folder.index.keys()
    if ids is None:
        return {*keys}
    chosen = {*ids}
    return {key for key in keys if f"{key[0]}:{key[1]}" in chosen}


def _blocks_with(folder: BlockFolder, ids: Sequence[str] | None) -> list[Block]:
    """Return the data blocks with fragments of the trajectories `ids`; all blocks if it is None."""
    blocks = [block for block in folder.blocks.values() if not block.is_edit]
    if ids is None:
        return blocks
    wanted = _wanted(folder, ids)
    return [block for block in blocks if not wanted.isdisjoint(trajectories_in(block))]


def _are_copies_damaged(folder: BlockFolder, writers: Mapping[str, str]) -> bool:
    """Return whether any block whose writer is renamed has damaged rows.

    Such a block is written again with new checksums, so that its damaged rows would seem intact.
    `writers` maps old names to new names.
    """
    for block in folder.blocks.values():
        is_renamed = writers.get(block.writer, block.writer) != block.writer
        if is_renamed and any(damaged_fragments(read_header(block.path))):
            return True
    return False


def _free_names(blocks: Sequence[Block], made: Path) -> dict[str, str]:
    """Choose for each writer of blocks a name that is free in the folder `made`.

    A writer keeps its name if possible. Otherwise a number is appended, as in "arm-2".
    """
    blocks_of: dict[str, list[Block]] = {}
    for block in blocks:
        blocks_of.setdefault(block.writer, []).append(block)
    names = {}
    for writer, own_blocks in sorted(blocks_of.items()):
        name = writer
        number = 1
        while not _can_add(own_blocks, name, made):
            number += 1
            name = f"{writer[:90]}-{number}"
        names[writer] = name
    return names


def _can_add(blocks: Sequence[Block], name: str, made: Path) -> bool:
    """Return whether a writer can have the name `name` in the folder `made`.

    It can if no block in the folder has this writer name. If a block has it, it must come from the
    same writer of the same recording, as in a merge of the parts of a split.
    """
    present = {path.name: path for path in made.glob(f"rollout_{name}_*.h5")}
    shared = [block for block in blocks if block_name(name, block.sequence) in present]
    if present and not shared:
        # Every writer numbers its trajectories from 0. So two writers have trajectories with equal
        # numbers. If no number is equal, the blocks are from the same writer.
        numbers: set[int] = set()
        for block in blocks:
            numbers.update(block.fragments["trajectory"].tolist())
        fragments = [read_header(path).fragments for path in present.values()]
        return all(numbers.isdisjoint(table["trajectory"].tolist()) for table in fragments)
    # Blocks with the same sequence number must be the same file.
    pairs = [(block.path, present[block_name(name, block.sequence)]) for block in shared]
    return all(filecmp.cmp(path, other, shallow=False) for path, other in pairs)


def _add_block(block: Block, writer: str, target: Path) -> bool:
    """Link or copy a block into a new folder. If its writer is renamed, write the block again.

    Returns:
        Whether the new block is a hard link.
    """
    path = target / block_name(writer, block.sequence)
    if path.exists():
        return False
    if writer == block.writer:
        return link_or_copy(block.path, path)
    header = read_header(block.path)
    codecs = {name: coding.codec for name, coding in header.codings.items()}
    content = rebuilt(parts_of(header), writer, block.sequence, codecs)
    notes = {}
    for kind in (EPISODES, TEXTS):
        notes[kind] = [(key, text.encode()) for key, text in header.read_notes(kind)]
    write_block(target, replace(content, notes=notes))
    return False


def link_or_copy(source: Path, target: Path) -> bool:
    """Create a hard link to a file, or a copy. Returns whether the new file is a hard link."""
    try:
        os.link(source.resolve(), target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copy2(source, target)
        return False
    return True


def _common(stated: Sequence[Metadata | None]) -> Metadata | None:
    """Return metadata with the entries that all sources share; None if no source has metadata."""
    known = [metadata for metadata in stated if metadata is not None]
    if not known:
        return None
    context = {}
    for name, value in known[0].context.items():
        if all(metadata.context.get(name) == value for metadata in known):
            context[name] = value
    # If one source has the entry `ENDS`, keep it. Without it, readers would ignore the ends that
    # are stored in the annotations of episodes.
    unknown_ends = [metadata.context[ENDS] for metadata in known if ENDS in metadata.context]
    if unknown_ends:
        context[ENDS] = unknown_ends[0]
    return replace(known[0], context=context)
