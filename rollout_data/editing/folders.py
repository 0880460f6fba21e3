"""Uniting and dividing recordings: new folders of block files, of hard links to whole blocks where that is possible.

One rule: a new folder is there as a whole or not at all, and no source is touched. A linked block is one file under two
names: nothing of ours ever writes into a block.
"""

from __future__ import annotations

import errno
import filecmp
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from storage.core import arguments
from storage.core.durable import replace_folder
from storage.errors import DataFileError, SchemaError, UsageError

from ..foreign.reader import NO_FIELDS
from ..format.header import METADATA_NAME, read_header
from ..format.notes import EPISODES, TEXTS
from ..format.write import block_name, write_block
from ..frames.blocks import Blocks
from ..frames.source import kind_of
from ..index.block import Block
from ..index.folder import BlockFolder, save_index_cache
from ..index.index import TrajectoryIndex
from ..index.metadata import ENDS, Metadata, load_metadata, publish_metadata
from ..recordings.converting import convert
from ..recordings.opening import open as open_recording
from ..recordings.recording import Recording
from ..remote.access import DataDir, RemotePath
from .edits import Edits, Key, publish_edits, read_edits
from .parts import rebuilt

#: What linking raises where files cannot have another name there.
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EACCES)
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
    """

    path: Path
    num_trajectories: int = 0
    num_frames: int = 0
    num_linked: int = 0
    num_copied: int = 0
    renamed: dict[tuple[int, str], str] = field(default_factory=dict)


def merge(sources: Sequence[DataDir], out: str | os.PathLike[str]) -> NewFolder:
    """Unite recordings of equal fields in a new folder of block files; edits of the sources are kept.

    Blocks become hard links; they are copied to other file systems, and where two writers have one name. A block that
    two sources share, as the parts of `split` do, is there once, and so is each trajectory; it is dropped only if no
    source has it. Recordings of other formats are converted.

    Args:
        sources: Paths of any format, or recordings.
        out: A new or empty folder.

    Raises:
        UsageError: There is no source.
        SchemaError: The fields differ.
        DataFileError: A source is damaged, or `out` is not empty.
    """
    listed = [sources] if isinstance(sources, (str, os.PathLike, Recording)) else list(sources)
    if not listed:
        raise UsageError("merge", f"into {str(out)!r}", "at least one recording", "none")
    with replace_folder(out, ()) as made:
        folders = [_as_blocks(one, made / _CONVERTED / str(place)) for place, one in enumerate(listed)]
        done, edits, present = NewFolder(arguments.path("merge", "", out)), Edits(), set[Key]()
        for place, folder in enumerate(folders):
            if difference := (folders[0].schema or NO_FIELDS).difference(folder.schema or NO_FIELDS):
                where, expected = f"{str(listed[place])!r}", f"the fields of {str(listed[0])!r}"
                raise SchemaError("merge", where, expected, difference, "Merge what has equal fields")
            index = TrajectoryIndex(list(folder.blocks.values()))
            names = _free_names(folder, made)
            done.renamed |= {(place, old): new for old, new in names.items() if old != new}
            for block in index.blocks:
                if not block.is_edit:
                    _take(block, names[block.writer], made, done)
            theirs = read_edits(folder)
            present |= {(names[writer], number) for writer, number in index.keys(np.arange(len(index)))}
            edits.dropped |= {(names[writer], number) for writer, number in theirs.dropped if writer in names}
            for (writer, number), said in theirs.said.items():
                if writer in names:
                    edits.said[names[writer], number] = edits.said.get((names[writer], number), {}) | said
        edits.dropped -= present
        _finish(made, done, _common([load_metadata(folder.data_dir) for folder in folders]), edits)
        shutil.rmtree(made / _CONVERTED, ignore_errors=True)
    return done


def split(
    path: DataDir, parts: Mapping[str, float] | None, out: str | os.PathLike[str], *, seed: int = 0
) -> dict[str, NewFolder]:
    """Divide a recording into folders `out/<name>` of block files: disjoint, and complete together.

    Blocks become hard links, whole also where a part has some of their trajectories only; the others are dropped there.
    Of another format, the parts are converted.

    Args:
        path: A path of any format, or a recording.
        parts: Name -> share, as in `{"train": 0.9, "val": 0.1}`; None gives the parts that the file itself names.
        out: A new or empty folder.
        seed: Which trajectory goes where is a function of it and of their names.

    Raises:
        UsageError: The shares do not add up to 1, or a name cannot be that of a folder.
        DataFileError: The source is damaged, or `out` is not empty.
    """
    recording = path if isinstance(path, Recording) else open_recording(path)
    chosen, done = recording.split(parts, seed), {}
    for name in chosen:
        if not name.strip(".") or {"/", "\0"} & set(name):
            raise UsageError("split", f"{str(recording.path)!r}", "parts named as folders can be", repr(name))
    with replace_folder(out, ()) as made:
        for name, part in chosen.items():
            done[name] = NewFolder(arguments.path("split", "", out) / name)
            if is_own(part):
                (made / name).mkdir()
                _take_part(opened(part.path), part.ids, made / name, done[name])
            else:
                _as_blocks(part, made / name)
                _count(made / name, done[name])
    return done


def take(
    folder: BlockFolder, dropped: Iterable[Key], target: Path, done: NewFolder, leave: Iterable[str] = ()
) -> Edits:
    """Link the blocks of which a trajectory is left, but for those named `leave`; give the edits that belong to them.

    What a block holds of others than the trajectories that are kept is dropped: without their other blocks they would
    seem whole, or not void.
    """
    index, edits = TrajectoryIndex(list(folder.blocks.values())), read_edits(folder)
    kept = {*index.keys(np.arange(len(index)))} - set(dropped)
    new = Edits(said={key: said for key, said in edits.said.items() if key in kept})
    for name, block in sorted(folder.blocks.items()):
        held = {(block.writer, number) for number in block.fragments["trajectory"].tolist()}
        if name not in leave and not block.is_edit and held & kept:
            _take(block, block.writer, target, done)
            new.dropped |= held - kept
    return new


def _take_part(folder: BlockFolder, ids: Sequence[str], target: Path, done: NewFolder) -> None:
    index, wanted = TrajectoryIndex(list(folder.blocks.values())), set(ids)
    others = [key for key in index.keys(np.arange(len(index))) if f"{key[0]}:{key[1]}" not in wanted]
    metadata = load_metadata(folder.data_dir)
    _finish(target, done, metadata, take(folder, others, target, done))


def _finish(made: Path, done: NewFolder, metadata: Metadata | None, edits: Edits) -> None:
    """Describe a new folder: metadata, edits and the cache of its index."""
    if metadata is not None:
        publish_metadata(made, metadata, "edited")
    folder = BlockFolder(made)
    folder.refresh()
    if edits.dropped or edits.said:
        publish_edits(folder, edits)
    save_index_cache(made)
    _count(made, done)


def _count(made: Path, done: NewFolder) -> None:
    folder = BlockFolder(made)
    folder.refresh()
    index = TrajectoryIndex(list(folder.blocks.values()))
    done.num_trajectories, done.num_frames = len(index), index.num_frames
    done.num_copied = done.num_copied or sum(not block.is_edit for block in index.blocks) - done.num_linked


def is_own(recording: Recording) -> bool:
    return kind_of(recording.origin) is Blocks and not isinstance(recording.path, RemotePath)


def opened(path: Path) -> BlockFolder:
    """Open a folder of block files, all of which must be readable.

    Raises:
        DataFileError: One is not.
    """
    folder = BlockFolder(path)
    folder.refresh()
    for name, problem in folder.problems.items():
        if name != METADATA_NAME:
            advice = f"Run 'rollout-data repair {path} --to NEW' first"
            raise DataFileError("link the blocks", f"of {str(path)!r}", "intact ones", repr(name), advice) from problem
    return folder


def _as_blocks(source: DataDir, scratch: Path) -> BlockFolder:
    """Give a folder of block files of any recording: itself, or what it is converted to in `scratch`."""
    recording = source if isinstance(source, Recording) else open_recording(source)
    if is_own(recording) and recording.origin.ids is None:
        return opened(recording.path)
    scratch.parent.mkdir(parents=True, exist_ok=True)
    if problems := convert(recording, scratch, progress=False).problems:
        raise problems[0]
    return opened(scratch)


def _free_names(folder: BlockFolder, made: Path) -> dict[str, str]:
    """Give each writer of a folder a name in `made`: its own, unless that is another one's there."""
    found: dict[str, list[Block]] = {}
    for block in folder.blocks.values():
        if not block.is_edit:
            found.setdefault(block.writer, []).append(block)
    names = {}
    for writer, blocks in sorted(found.items()):
        name, number = writer, 1
        while not _is_same(blocks, name, made):
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


def _take(block: Block, writer: str, target: Path, done: NewFolder) -> None:
    """Link or copy a block into a new folder, or write it anew for a writer of another name."""
    path = target / block_name(writer, block.sequence)
    if path.exists():
        return
    if writer == block.writer:
        is_linked = link_or_copy(block.path, path)
        done.num_linked, done.num_copied = done.num_linked + is_linked, done.num_copied + (not is_linked)
        return
    header = read_header(block.path)
    parts = [(header, *part) for part in zip(header.fragments, header.reward_sums, strict=True)]
    codecs = {name: coding.codec for name, coding in header.codings.items()}
    content = rebuilt(parts, writer, block.sequence, codecs)
    content.notes = {
        kind: [(key, text.encode()) for key, text in header.read_notes(kind)] for kind in (EPISODES, TEXTS)
    }
    write_block(target, content)
    done.num_copied += 1


def link_or_copy(source: Path, target: Path) -> bool:
    """Give a file a second name, or copy it where that cannot be; True if it was linked."""
    try:
        os.link(source.resolve(), target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copy2(source, target)
        return False
    return True


def _common(found: Sequence[Metadata | None]) -> Metadata | None:
    """Give metadata of several folders: what all say alike."""
    known = [one for one in found if one is not None]
    if not known:
        return None
    first: Mapping[str, Any] = known[0].context
    alike = {name: told for name, told in first.items() if all(one.context.get(name) == told for one in known)}
    unknown = [one.context[ENDS] for one in known if ENDS in one.context]  # notes of episodes tell whose
    return Metadata(
        known[0].schema,
        known[0].obs_segments,
        known[0].obs_disassemble_mapping,
        {**alike, **({ENDS: unknown[0]} if unknown else {})},
    )
