"""Publishing: the blocks of a folder of this machine, uploaded to a URL from which they are read.

One rule: an object appears whole or not at all, and none is replaced; metadata.json comes last. So a killed upload
leaves whole blocks, and the next one goes on. Stores that show half-written files are not for this.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from storage.core.threads import each
from storage.errors import DataFileError, SchemaError, UsageError

from ..format.header import METADATA_NAME
from ..index.folder import BlockFolder
from ..index.metadata import Metadata, load_metadata
from .access import RemoteFiles, RemoteOptions, remote_path
from .fetching import FINAL, FIRST_PAUSE_S, FetchError
from .folder import HEAD_BYTES, RemoteFolder

#: Blocks are uploaded by so many threads; the file system sends large ones in parts.
_NUM_THREADS = 4


def push(data_dir: str | os.PathLike[str], url: str, *, remote: RemoteOptions | None = None) -> int:
    """Upload the blocks of a folder that are not there yet, then metadata.json; give the number of blocks uploaded.

    Each is put on the condition that nothing has its name, where the store can do that; otherwise it is looked up
    before. An upload that fails is repeated `remote.num_retries` times, within the time-outs of the file system.

    Raises:
        UsageError: There is no block, or `url` is none.
        DataFileError: A block is damaged (nothing is uploaded then), or another one has its name there.
        SchemaError: The URL holds data of other fields.
        FetchError: An upload failed each time.
    """
    folder, files = BlockFolder(data_dir), RemoteFiles(remote_path(url, "push"), remote or RemoteOptions())
    folder.refresh()
    for name, problem in folder.problems.items():
        if name != METADATA_NAME:
            raise problem
    if not folder.blocks or folder.schema is None:
        raise UsageError("push", repr(str(data_dir)), "blocks", "none")
    there = RemoteFolder(files).schema_there()
    if there is not None and (difference := there.difference(folder.schema)):
        raise SchemaError("push", f"to {url!r}", "the fields that it already holds", difference, "Push elsewhere")
    names = sorted(folder.blocks)
    num_new = sum(each(lambda name: _put_block(files, folder.data_dir / name), names, _NUM_THREADS))
    context = found.context if (found := load_metadata(folder.data_dir)) is not None else {}
    text = json.dumps(Metadata.of_schema(folder.schema, context).to_json(), indent=2).encode()
    target = str(files.path / METADATA_NAME)
    _again(files, target, lambda: files.system.pipe_file(target, text, mode="create"))
    return num_new


def _put_block(files: RemoteFiles, path: Path) -> bool:
    """Upload a block; False if it is there already."""
    target = files.path / path.name
    if _again(files, str(target), lambda: files.system.put_file(str(path), str(target), mode="create")):
        return True
    head = np.fromfile(path, np.uint8, HEAD_BYTES)
    is_same = files.system.size(str(target)) == path.stat().st_size
    if not (is_same and np.array_equal(files.read(target, 0, len(head)), head)):
        raise DataFileError("push", f"to {str(target)!r}", "nothing, or the same block", "another file")
    return False


def _again(files: RemoteFiles, target: str, put: Callable[[], object]) -> bool:
    """Put something until it is there; False if something is there already, perhaps by an attempt without an answer."""
    num_retries = files.options.num_retries
    for attempt in range(num_retries + 1):
        try:
            put()
            return True
        except FileExistsError:
            return False
        except Exception as cause:  # whatever a store raises, some of which passes
            if isinstance(cause, FINAL) or attempt == num_retries:
                got = f"{type(cause).__name__}: {cause}, {attempt + 1} times"
                raise FetchError("push", f"to {target!r}", "an answer", got, "Push again: it goes on") from cause
            time.sleep(FIRST_PAUSE_S * 2**attempt)
    return False
