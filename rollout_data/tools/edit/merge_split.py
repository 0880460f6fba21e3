"""Uniting and dividing recordings: new folders of block files, of hard links to whole blocks where that is possible.

One rule: a new folder is there as a whole or not at all, and no source is touched. A linked block is one file under two
names: nothing of ours ever writes into a block.
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
from storage.core.locks import only_writer_of
from storage.errors import DataFileError, RolloutDataError, SchemaError, TargetError, UsageError

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
from ...sources.block_source import Blocks
from ...sources.episode_reader import NO_FIELDS
from ...sources.recording import Recording
from ...sources.source import kind_of
from ...sources.source_kind import MIXED, ORDER_KEY, conventions, mixed_conventions
from .copied_blocks import rebuilt
from .edits import Edits, Key, publish_edits, read_edits

#: What linking raises where files cannot have another name there.
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EACCES)
#: What linking and copying raise because of the file that is linked or copied, not because of its new place.
_OF_SOURCE = (errno.ENOENT, errno.ESTALE, errno.EIO)
#: Where recordings of other formats are converted to, within the new folder.
_CONVERTED = ".converted"


@dataclass
class NewFolder:
    """What a new folder was made of.

    Attributes:
        path: The folder.
        num_trajectories, num_frames: What it holds.
        num_linked, num_copied: Blocks that are hard links, and blocks that were written anew.
        renamed: (place of the source, its writer) -> the writer's name in the new folder, where another had it.
        problems: Data of the sources that were not read, were repaired or were left out.
        advice: Remarks on data that were taken as they are stored; see `Recording.advice`.
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
def new_folder(action: str, name: str, target: str | os.PathLike[str], *sources: Path | RemotePath) -> Iterator[Path]:
    """Yield an empty folder that takes the place of `target` when all went well.

    Errors name the `action` and the argument by its `name`.

    Raises:
        UsageError: The target is, or lies in, one of the sources, or it is not empty, or somebody else writes it.
        DataFileError: A file of a source cannot be read.
        TargetError: The target cannot be written.
    """
    place = arguments.path(action, name, target).resolve()
    verb = action.rpartition(".")[2]
    for source in sources:
        if isinstance(source, Path) and source.resolve() in (place, *place.parents):
            raise UsageError(action, "", f"{name} as a place outside of {str(source)!r}", repr(str(target)))
    made = None
    try:
        with only_writer_of(place, f"{verb} into"):
            if place.is_dir() and any(place.iterdir()):
                raise UsageError(action, "", f"{name} as a new or empty folder", f"files in {str(target)!r}")
            with replace_folder(place, ()) as made:
                yield made
    except (DataFileError, OSError) as cause:
        if made is not None and isinstance(cause, DataFileError):
            raise
        if made is not None and isinstance(cause, OSError) and _names_one_of(cause, sources):
            advice = "If it was removed meanwhile, as by prune, call it again"
            where = repr(cause.filename)
            raise DataFileError(verb, where, "a file that can be read", str(cause.strerror), advice) from cause
        where, got = f"into {str(target)!r}", f"{type(cause).__name__}: {cause}"
        if isinstance(cause, TargetError):
            got = cause.got
        error = TargetError(verb, where, "a place that can be written", got)
        error.errno = getattr(cause, "errno", None)
        raise error from cause


def _names_one_of(error: OSError, places: Sequence[Path | RemotePath]) -> bool:
    """Return whether an error is of a file in one of some places."""
    if not isinstance(error.filename, (str, os.PathLike)):
        return False
    if error.filename2 is not None and error.errno not in _OF_SOURCE:
        return False
    path = Path(error.filename)
    return any(place in (path, *path.parents) for place in places if isinstance(place, Path))


def merge(sources: DataDirs, out: str | os.PathLike[str], *, progress: bool = False) -> NewFolder:
    """Unite recordings of equal fields in a new folder of block files; edits of the sources are kept.

    Blocks become hard links; they are copied to other file systems, and where two writers have one name. A block that
    two sources share, as the parts of `split` do, is there once, and so is each trajectory; it is dropped only if no
    source has it. Recordings of other formats, and folders with a damaged block, are converted: data that cannot be
    read, and episodes of an open recording that were removed since, are left out and named in `NewFolder.problems`,
    as by `convert`.

    Args:
        sources: Paths of any format, or recordings.
        out: A new or empty folder.
        progress: Show progress bars.

    Raises:
        UsageError: There is no source, or `out` is not empty, or lies in one.
        SchemaError: The fields differ.
        DataFileError: A source cannot be opened, or none of its episodes can be read.
    """
    action = "call rollout_data.merge"
    progress = arguments.flag(action, "progress", progress)
    recordings = [open_source(action, "sources", one) for one in origins_of(sources, action, "sources")]
    for recording in recordings:
        _check_source(recording)
    done = NewFolder(arguments.path(action, "out", out))
    with new_folder(action, "out", out, *(one.path for one in recordings)) as made:
        _unite(recordings, made, done, progress)
    return done


def split(
    path: DataDir,
    parts: Mapping[str, float] | None,
    out: str | os.PathLike[str],
    *,
    seed: int = 0,
    progress: bool = False,
) -> dict[str, NewFolder]:
    """Divide a recording into folders `out/<name>` of block files: disjoint, and complete together.

    Blocks become hard links, whole also where a part has some of their trajectories only; the others are dropped there.
    Of another format, or of a folder with a damaged block, the parts are converted, as by `merge`.

    Args:
        path: A path of any format, or a recording.
        parts: Name -> share, as in `{"train": 0.9, "val": 0.1}`; None gives the parts that the file itself names.
        out: A new or empty folder.
        seed: Which trajectory goes where is a function of it and of their names.
        progress: Show progress bars.

    Raises:
        UsageError: The shares do not add up to 1, a name cannot be that of a folder, or `out` is not empty, or lies in
            the source.
        DataFileError: The source cannot be opened, or none of its episodes can be read.
    """
    action = "call rollout_data.split"
    progress = arguments.flag(action, "progress", progress)
    recording = open_source(action, "path", path)
    _check_source(recording)
    done = dict[str, NewFolder]()
    target = arguments.path(action, "out", out)
    chosen = recording.parts(action, parts, seed)
    for name in chosen:
        if not name.strip(".") or {"/", "\0"} & set(name):
            raise UsageError(action, "", "parts with names that folders can have", repr(name))
    with new_folder(action, "out", target, recording.path) as made:
        for name, part in chosen.items():
            done[name] = NewFolder(target / name)
            (made / name).mkdir()
            _unite([part], made / name, done[name], progress)
    return done


def _check_source(recording: Recording) -> None:
    """Raise `DataFileError` if no episode of a recording can be read."""
    present, removed = present_part(recording)
    check_any_readable(recording, len(present), [*recording.problems, *removed])


def _unite(recordings: Sequence[Recording], made: Path, done: NewFolder, progress: bool) -> None:
    """Link the blocks of recordings into a new folder, or write them anew, and tell what is left out there.

    A block of which a selection has some trajectories is taken as a whole, and the others are dropped: without their
    other blocks they would seem whole, or not void.
    """
    kept = set[Key]()
    said = dict[Key, dict[str, Any]]()
    found = list[BlockFolder]()
    selections: list[Recording] = []
    renamed: list[dict[str, str]] = []
    for place, source in enumerate(recordings):
        recording, removed = present_part(source)
        done.problems += removed
        ids = recording.origin.ids
        folder = _intact_folder(recording)
        names = {} if folder is None else _free_names(_blocks_with(folder, ids), made)
        is_linked = folder is not None and not _are_copies_damaged(folder, names)
        if folder is None or not is_linked:
            ids = None
            folder = _converted(recording, made / _CONVERTED / str(place), done, progress)
            names = _free_names(_blocks_with(folder, ids), made)
        else:
            done.problems += recording.problems
            done.advice += recording.advice
        found.append(folder)
        selections.append(recording if is_linked else open_recording(folder.data_dir))
        renamed.append(names)
        _check_fields(recordings, found)
        wanted = _wanted(folder, ids)
        blocks = _blocks_with(folder, ids)
        done.renamed |= {(place, old): new for old, new in names.items() if old != new}
        listed = tqdm(blocks, desc="link", unit=" blocks", disable=not progress)
        num_linked = sum([_take(block, names[block.writer], made) for block in listed])
        done.num_linked += num_linked if is_linked else 0
        kept |= {(names[writer], number) for writer, number in wanted}
        for (writer, number), told in read_edits(folder).said.items():
            if writer in names and (ids is None or (writer, number) in wanted):
                said[names[writer], number] = said.get((names[writer], number), {}) | told
    described = [load_metadata(one.data_dir) for one in found]
    metadata = _common(described)
    stated = conventions(one.context for one in described if one is not None)
    done.advice += mixed_conventions(stated)
    if metadata is not None and len({value for name, value in stated if name == ORDER_KEY}) > 1:
        metadata = replace(metadata, context={**metadata.context, ORDER_KEY: MIXED})
    if {_rate_of(one) for one in described} != {_rate_of(metadata)}:
        for selection, of_source, names in zip(selections, described, renamed, strict=True):
            for (writer, number), rate in _rates_of_episodes(selection, _rate_of(of_source)).items():
                key = (names.get(writer, writer), number)
                said[key] = {RATE_KEYS[0]: rate} | said.get(key, {})
    shutil.rmtree(made / _CONVERTED, ignore_errors=True)
    folder = BlockFolder.at(made)
    finish(folder, metadata, kept, said)
    save_index_cache(made)
    done.num_trajectories = len(kept)
    done.num_frames = int(folder.index.lengths[folder.index.find([*kept])].sum()) if kept else 0
    done.num_copied = sum(not block.is_edit for block in folder.blocks.values()) - done.num_linked


def _rate_of(metadata: Metadata | None) -> float | None:
    """Return the frame rate that metadata of a folder state; None without one."""
    stated = [] if metadata is None else [metadata.context.get(name) for name in RATE_KEYS]
    return next((rate for rate in stated if is_real(rate)), None)


def _rates_of_episodes(selection: Recording, rate: float | None) -> dict[Key, float]:
    """Return the frame rates of the episodes of a source: their own, or that of its metadata."""
    rates = {}
    for name, episode in zip(selection.ids, selection, strict=True):
        writer, _, number = name.rpartition(":")
        stated = [episode.metadata.get(key) for key in RATE_KEYS]
        own_rate = next((one for one in (*stated, rate) if is_real(one)), None)
        if own_rate is not None:
            rates[writer, int(number)] = own_rate
    return rates


def held_in(block: Block) -> set[Key]:
    """Return the trajectories of which a block has a part."""
    return {(block.writer, number) for number in block.fragments["trajectory"].tolist()}


def finish(
    folder: BlockFolder, metadata: Metadata | None, kept: Collection[Key], said: Mapping[Key, dict[str, Any]]
) -> None:
    """Describe a new folder: its metadata, what was said, and which trajectories of its blocks are dropped."""
    if metadata is not None:
        publish_metadata(folder.data_dir, metadata, "edited")
    held = {key for block in folder.blocks.values() for key in held_in(block)}
    theirs = {key: told for key, told in said.items() if key in held}
    if held - {*kept} or theirs:
        publish_edits(folder, Edits(held - {*kept}, theirs, created_ns=newest_ns(folder)))


def newest_ns(folder: BlockFolder) -> int:
    """Return the time of the newest frame: what is made of a folder has no other, so that it is the same each time."""
    return max((int(one.fragments["end_time_ns"].max(initial=0)) for one in folder.blocks.values()), default=0)


def is_own(recording: Recording) -> bool:
    return kind_of(recording.origin) is Blocks and not isinstance(recording.path, RemotePath)


def _intact_folder(recording: Recording) -> BlockFolder | None:
    """Return the folder of a recording whose blocks can all be linked; None of other formats and of damaged blocks."""
    if not is_own(recording):
        return None
    folder = BlockFolder.at(recording.path)
    if {*folder.problems} - {METADATA_NAME}:
        return None
    folder.keep_only(recording.blocks)
    return folder


def _converted(recording: Recording, scratch: Path, done: NewFolder, progress: bool) -> BlockFolder:
    """Convert a recording to the folder `scratch`; its problems and advice are appended to those of `done`."""
    scratch.mkdir(parents=True)
    if not len(recording):  # a part without episodes
        return BlockFolder.at(scratch)
    conversion = convert(recording, scratch, progress=progress)
    done.problems += conversion.problems
    done.advice += conversion.advice
    return BlockFolder.at(scratch)


def _check_fields(recordings: Sequence[Recording], folders: Sequence[BlockFolder]) -> None:
    """Raise `SchemaError` if the last folder has other fields than the first one that has any."""
    last = len(folders) - 1
    schema = folders[-1].schema
    first = next((number for number, folder in enumerate(folders) if folder.schema is not None), last)
    if schema is not None and (difference := (folders[first].schema or NO_FIELDS).difference(schema)):
        where = f"{str(recordings[last].path)!r}"
        expected = f"the fields of {str(recordings[first].path)!r}"
        raise SchemaError("merge", where, expected, difference, "Merge what has equal fields")


def _wanted(folder: BlockFolder, ids: Sequence[str] | None) -> set[Key]:
    """Return the trajectories of these names; None is all."""
    every = folder.index.keys()
    chosen = None if ids is None else {*ids}
    return {key for key in every if chosen is None or f"{key[0]}:{key[1]}" in chosen}


def _blocks_with(folder: BlockFolder, ids: Sequence[str] | None) -> list[Block]:
    """Return the blocks in which trajectories of these names have a part; None is all blocks."""
    blocks = [block for block in folder.blocks.values() if not block.is_edit]
    if ids is None:
        return blocks
    wanted = _wanted(folder, ids)
    return [block for block in blocks if not wanted.isdisjoint(held_in(block))]


def _are_copies_damaged(folder: BlockFolder, names: Mapping[str, str]) -> bool:
    """Return whether a block is damaged that would be written for a writer of another name, with a right checksum."""
    copied = [block for block in folder.blocks.values() if names.get(block.writer, block.writer) != block.writer]
    return any(True for block in copied for _ in damaged_fragments(read_header(block.path)))


def _free_names(blocks: Sequence[Block], made: Path) -> dict[str, str]:
    """Return a name in `made` for each writer of some blocks: its own unless another writer has it."""
    found: dict[str, list[Block]] = {}
    for block in blocks:
        found.setdefault(block.writer, []).append(block)
    names = {}
    for writer, mine in sorted(found.items()):
        name = writer
        number = 1
        while not _is_same(mine, name, made):
            number += 1
            name = f"{writer[:90]}-{number}"
        names[writer] = name
    return names


def _is_same(blocks: Sequence[Block], name: str, made: Path) -> bool:
    """Whether blocks can stand beside those of a name: it is free, or both are of one recording."""
    there = {path.name: path for path in made.glob(f"rollout_{name}_*.h5")}
    shared = [block for block in blocks if block_name(name, block.sequence) in there]
    if not shared and there:  # parts of one recording, or two recordings: then their numbers overlap
        numbers = {int(one) for block in blocks for one in block.fragments["trajectory"]}
        return all(numbers.isdisjoint(read_header(path).fragments["trajectory"].tolist()) for path in there.values())
    return all(filecmp.cmp(block.path, there[block_name(name, block.sequence)], shallow=False) for block in shared)


def _take(block: Block, writer: str, target: Path) -> bool:
    """Link or copy a block into a new folder, or write it anew for a writer of another name; True if it is linked."""
    path = target / block_name(writer, block.sequence)
    if path.exists():
        return False
    if writer == block.writer:
        return link_or_copy(block.path, path)
    header = read_header(block.path)
    parts = [(header, *part) for part in zip(header.fragments, header.reward_sums, strict=True)]
    codecs = {name: coding.codec for name, coding in header.codings.items()}
    notes = {kind: [(key, text.encode()) for key, text in header.read_notes(kind)] for kind in (EPISODES, TEXTS)}
    write_block(target, replace(rebuilt(parts, writer, block.sequence, codecs), notes=notes))
    return False


def link_or_copy(source: Path, target: Path) -> bool:
    """Link a file to a second name, or copy it where that is impossible; return whether it was linked."""
    try:
        os.link(source.resolve(), target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copy2(source, target)
        return False
    return True


def _common(found: Sequence[Metadata | None]) -> Metadata | None:
    """Return metadata of several folders: what all say alike."""
    known = [one for one in found if one is not None]
    if not known:
        return None
    alike = {
        name: told for name, told in known[0].context.items() if all(one.context.get(name) == told for one in known)
    }
    unknown = [one.context[ENDS] for one in known if ENDS in one.context]  # notes of episodes tell whose
    return replace(known[0], context={**alike, **({ENDS: unknown[0]} if unknown else {})})
