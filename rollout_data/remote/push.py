"""`push`: upload of the blocks of a data folder to a URL.

Blocks are never replaced, and metadata.json is uploaded last. A killed upload therefore leaves
complete blocks, and the next call resumes it. This requires a store in which an object is invisible
until its upload is complete, as S3 and similar stores guarantee. An existing metadata.json is
replaced in one case: new blocks state in annotations how episodes ended, and readers would not look
for ends there. It is then replaced before these blocks are uploaded.
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

#: Number of uploads at a time.
_NUM_THREADS = 4
#: Bytes of a block that must be uploaded within `timeout_s`.
_TIMEOUT_BYTES = 4 << 20


def push(
    data_dir: str | os.PathLike[str],
    url: str,
    *,
    remote: RemoteOptions | None = None,
    progress: bool = False,
) -> int:
    """Upload the blocks of a folder that the URL does not have yet, then metadata.json.

    The checksum file of a block is uploaded before the block. Readers use it to check the data that
    they fetch. If the store supports conditional requests, an existing block is never overwritten.

    Args:
        data_dir: Data folder.
        url: Target, such as "s3://bucket/walk".
        remote: Options of requests. The time-out of an upload is `timeout_s` per 4 MiB of the
            largest block. Failed uploads are retried `num_retries` times.
        progress: Show a progress bar.

    Returns:
        Number of uploaded blocks.

    Raises:
        UsageError: The folder has no blocks, or `url` is no URL.
        DataFileError: A block is damaged (then nothing is uploaded), the URL has another block of
            the same name, the bucket does not exist, or the store denies access.
        SchemaError: The URL has data with other fields.
        FetchError: All attempts of an upload failed.
    """
    path = arguments.path("data_dir", data_dir)
    remote = checked_remote(remote)
    progress = arguments.flag("progress", progress)
    if not arguments.is_url(url):
        raise UsageError(f"url must be a URL such as 's3://bucket/walk', got {url!r}.")
    folder = BlockFolder.at(path)
    files = RemoteFiles(remote_path(url), remote)
    for name, problem in folder.problems.items():
        if name != METADATA_NAME:
            raise problem
    if not folder.blocks or folder.schema is None:
        raise UsageError(f"{str(data_dir)!r} contains no blocks.")
    remote_metadata = RemoteFolder(files).read_metadata()
    if remote_metadata is not None:
        difference = remote_metadata.schema.difference(folder.schema)
        if difference:
            raise SchemaError(
                f"the fields differ from the fields at {url!r}: {difference}. Push to another URL."
            )
    local_metadata = load_metadata(folder.data_dir)
    context = {} if local_metadata is None else local_metadata.context
    text = _json(Metadata.of_schema(folder.schema, context))
    largest = max(block.file_bytes for block in folder.blocks.values())
    timeout_s = remote.timeout_s * (1 + largest // _TIMEOUT_BYTES)
    fetcher = Fetcher(_NUM_THREADS, timeout_s, remote.num_retries)
    target = str(files.path / METADATA_NAME)
    if remote_metadata is not None and ENDS in context and ENDS not in remote_metadata.context:
        # Readers must know that annotations state ends before they find the first such block.
        marked = replace(remote_metadata, context={**remote_metadata.context, ENDS: context[ENDS]})
        overwrite = partial(files.system.pipe_file, target, _json(marked), mode="overwrite")
        fetcher.wait(fetcher.submit(overwrite, repr(target)))
    listed = _existing_names(files)
    uploads = []
    for name, block in sorted(folder.blocks.items()):
        path = folder.data_dir / name
        spans = spans_of(block, folder.schema)
        send = partial(_put_block, files, path, spans, name in listed)
        uploads.append(fetcher.submit(send, f"{name!r} at {url!r}"))
    num_new = 0
    try:
        for upload in tqdm(uploads, desc="push", unit=" blocks", disable=not progress):
            is_new = fetcher.wait(upload)
            num_new += int(is_new)
        with suppress(FileExistsError):
            create = partial(files.system.pipe_file, target, text, mode="create")
            fetcher.wait(fetcher.submit(create, repr(target)))
    except OSError as cause:
        raise DataFileError(
            f"{str(data_dir)!r} could not be pushed to {url!r}: {type(cause).__name__}: {cause}. "
            "Check that the blocks exist and that the URL is writable."
        ) from cause
    finally:
        for upload in uploads:
            upload.forget()
    return num_new


def _json(metadata: Metadata) -> bytes:
    return json.dumps(metadata.to_json(), indent=2).encode()


def _existing_names(files: RemoteFiles) -> set[str]:
    """Return the names of the files at a URL; an empty set if the URL does not exist."""
    try:
        return set(files.listed())
    except UsageError:
        return set()


def _put_block(files: RemoteFiles, path: Path, spans: list[Span], is_listed: bool) -> bool:
    """Upload the checksum file of a block, then the block.

    Returns:
        Whether the block was uploaded. False means that the URL has the block already, for example
        after an attempt whose answer was lost.
    """
    target = files.path / path.name
    if is_listed:
        # If the URL has another block of this name, its checksum file must not be replaced.
        _check_same(files, path)
    _put_sums(files, path, spans)
    try:
        files.system.put_file(str(path), str(target), mode="create")
        return True
    except FileExistsError:
        _check_same(files, path)
        return False


def _check_same(files: RemoteFiles, path: Path) -> None:
    """Check that the block of this name at the URL has the same size and the same first bytes.

    Raises:
        DataFileError: It is another block.
    """
    target = files.path / path.name
    head = np.fromfile(path, np.uint8, HEAD_BYTES)
    is_same = files.system.size(str(target)) == path.stat().st_size
    if not is_same or not np.array_equal(files.read(target, 0, len(head)), head):
        raise DataFileError(
            f"{str(target)!r} exists and has other content than the block. Push to another URL."
        )


def _put_sums(files: RemoteFiles, path: Path, spans: list[Span]) -> None:
    """Upload the checksum file of a block, unless the URL has a valid checksum file for it."""
    target = str(files.path / (path.name + ENDING))
    content = sums_of(path, spans)
    try:
        files.system.pipe_file(target, content, mode="create")
        return
    except FileExistsError:
        existing = bytes(files.system.cat_file(target, start=0, end=files.system.size(target)))
    if existing == content:
        return
    with suppress(CorruptFileError):
        existing_spans, _ = parse(existing, repr(target))
        is_of_same_size = existing_spans[-1].stop == spans[-1].stop
        if is_of_same_size and sums_of(path, existing_spans) == existing:
            return
    # The existing file is damaged or has an earlier layout. Or it is from a killed upload of another
    # block, which ended before the block itself was uploaded.
    files.system.pipe_file(target, content, mode="overwrite")
