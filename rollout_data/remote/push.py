"""Publishing: the blocks of a folder of this machine, uploaded to a URL from which they are read.

One rule: an object appears whole or not at all, and no block is replaced; metadata.json comes last, or first where it
is replaced as notes of new blocks say how episodes ended. So a killed upload leaves whole blocks, and the next one goes
on. Stores that show half-written files are not for this.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from storage.core import arguments
from storage.errors import CorruptFileError, DataFileError, SchemaError, UsageError

from ..blocks.block_folder import BlockFolder
from ..blocks.block_header import METADATA_NAME
from ..blocks.folder_metadata import ENDS, Metadata, load_metadata
from .fetcher import Fetcher
from .locations import RemoteFiles, RemoteOptions, checked_remote, remote_path
from .piece_checksums import ENDING, Span, parse, spans_of, sums_of
from .remote_folder import HEAD_BYTES, RemoteFolder

#: Threads that upload, and bytes of a block that add the time-out of one request to its own.
_NUM_THREADS, _BYTES = 4, 4 << 20


def push(
    data_dir: str | os.PathLike[str], url: str, *, remote: RemoteOptions | None = None, progress: bool = False
) -> int:
    """Upload the blocks of a folder that are not there yet, then metadata.json; give the number of blocks uploaded.

    Beside each block, before it, go the checksums of its pieces, with which readers compare all that they fetch.
        Each is put on the condition that nothing has its name, where the store can do that; otherwise it is looked up
    before. An upload that fails, or takes longer than `remote.timeout_s` for every 4 MiB of the largest block, is
    repeated `remote.num_retries` times. With `progress`, a bar shows how far it is.

    Raises:
        UsageError: There is no block, or `url` is none.
        DataFileError: A block is damaged (nothing is uploaded then), or another one has its name there, or there is
            no such bucket, or no right to write to it.
        SchemaError: The URL holds data of other fields.
        FetchError: An upload failed each time.
    """
    action = "call rollout_data.push"
    path = arguments.path(action, "data_dir", data_dir)
    remote = checked_remote(action, remote)
    progress = arguments.flag(action, "progress", progress)
    if not arguments.is_url(url):
        raise UsageError(action, "", "url as a URL, such as 's3://bucket/walk'", repr(url))
    folder = BlockFolder.at(path)
    files = RemoteFiles(remote_path(url, action), remote)
    for name, problem in folder.problems.items():
        if name != METADATA_NAME:
            raise problem
    if not folder.blocks or folder.schema is None:
        raise UsageError("push", repr(str(data_dir)), "blocks", "none")
    there = RemoteFolder(files).metadata_there()
    if there is not None and (difference := there.schema.difference(folder.schema)):
        raise SchemaError("push", f"to {url!r}", "the fields that it already holds", difference, "Push elsewhere")
    context = found.context if (found := load_metadata(folder.data_dir)) is not None else {}
    text = _json(Metadata.of_schema(folder.schema, context))
    largest = max(block.file_bytes for block in folder.blocks.values())
    options = files.options
    fetcher = Fetcher(_NUM_THREADS, options.timeout_s * (1 + largest // _BYTES), options.num_retries)
    target = str(files.path / METADATA_NAME)
    if there is not None and ENDS in context and ENDS not in there.context:
        marked = replace(there, context={**there.context, ENDS: context[ENDS]})
        first = partial(files.system.pipe_file, target, _json(marked), mode="overwrite")
        fetcher.wait(fetcher.submit(first, "push", f"to {target!r}"))
    listed = there_now(files)
    puts = []
    for name, block in sorted(folder.blocks.items()):
        path = folder.data_dir / name
        spans = spans_of(block, folder.schema)
        send = partial(_put_block, files, path, spans, name in listed)
        puts.append(fetcher.submit(send, "push", f"{str(path)!r} to {url!r}"))
    try:
        num_new: int = sum(map(fetcher.wait, tqdm(puts, desc="push", unit=" blocks", disable=not progress)))
        with suppress(FileExistsError):
            last = partial(files.system.pipe_file, target, text, mode="create")
            fetcher.wait(fetcher.submit(last, "push", f"to {target!r}"))
    except OSError as cause:
        where = f"{str(data_dir)!r} to {url!r}"
        expected = "blocks that stay, and a place where they may be put"
        raise DataFileError("push", where, expected, f"{type(cause).__name__}: {cause}") from cause
    finally:
        for put in puts:
            put.forget()
    return num_new


def _json(metadata: Metadata) -> bytes:
    return json.dumps(metadata.to_json(), indent=2).encode()


def there_now(files: RemoteFiles) -> set[str]:
    """Name the files at a URL; none if there is no folder yet."""
    try:
        return set(files.listed())
    except UsageError:
        return set()


def _put_block(files: RemoteFiles, path: Path, spans: list[Span], is_listed: bool) -> bool:
    """Upload the checksums of a block, then the block; False if it is there already, as by an unanswered attempt."""
    target = files.path / path.name
    if is_listed:  # first: no checksums of ours beside another file
        _check_same(files, path)
    _put_sums(files, path, spans)
    try:
        files.system.put_file(str(path), str(target), mode="create")
        return True
    except FileExistsError:
        _check_same(files, path)
        return False


def _check_same(files: RemoteFiles, path: Path) -> None:
    """Raise unless the block of this name at the URL is the same."""
    target = files.path / path.name
    head = np.fromfile(path, np.uint8, HEAD_BYTES)
    is_same = files.system.size(str(target)) == path.stat().st_size
    if not is_same or not np.array_equal(files.read(target, 0, len(head)), head):
        raise DataFileError("push", f"to {str(target)!r}", "nothing, or the same block", "another file")


def _put_sums(files: RemoteFiles, path: Path, spans: list[Span]) -> None:
    """Upload the checksums of the pieces of a block; those of the same block that are there are kept."""
    target = str(files.path / (path.name + ENDING))
    content = sums_of(path, spans)
    try:
        files.system.pipe_file(target, content, mode="create")
        return
    except FileExistsError:
        before = bytes(files.system.cat_file(target, start=0, end=files.system.size(target)))
    if before == content:
        return
    with suppress(CorruptFileError):
        there, _ = parse(before, repr(target))
        if there[-1].stop == spans[-1].stop and sums_of(path, there) == before:
            return
    # Damaged, of an earlier layout, or left by an upload of another block that was killed before the block was there.
    files.system.pipe_file(target, content, mode="overwrite")
