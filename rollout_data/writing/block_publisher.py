"""`BlockPublisher`: writes staged frames as blocks, one after another, in a background thread.

Only that thread uses the state between blocks (sequence number, trajectories in progress). After a
failed block no further block is published, since the recording would have a gap. Every later call
raises the error.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py

from storage.core.durable_files import sync_path
from storage.core.fields import Schema
from storage.core.threads import Worker
from storage.errors import (
    BackgroundError,
    RolloutDataError,
    RolloutDataWarning,
    SchemaError,
    UsageError,
)

from ..blocks.block import Block
from ..blocks.block_folder import save_index_cache
from ..blocks.block_header import METADATA_NAME, layouts_of, read_header
from ..blocks.chunk_table import Coding, codings_text
from ..blocks.row_layout import PACKED
from ..blocks.write_block import write_block
from .retention import prune
from .staged_frames import Carry, Staging
from .writer_journal import Journal

#: Maximum number of blocks of a small folder that are missing in the index cache. In a larger folder
#: up to a quarter of all blocks may be missing before the cache is rewritten.
_MIN_UNCACHED_BLOCKS = 8
#: Maximum size of an HDF5 attribute or type in bytes. HDF5 stores each in an entry of at most
#: 64 KiB.
_MAX_ENTRY_BYTES = 60_000


class BlockPublisher:
    """Writes the blocks of one writer in a background thread.

    If the folder has earlier blocks of the writer, sequence and trajectory numbers continue.

    Args:
        journal: Journal of the writer, in which the number of published frames is stored.
        num_envs: Number of envs, N.
        max_pending: Maximum number of blocks in memory, including the block that is being filled.
            With 1, `submit` waits until the block is published.
        is_tentative: Mark fragments so that readers ignore them until their trajectory has ended.
        durable, frames_per_chunk, retention: As in `RolloutWriter`.

    Attributes:
        last_ns: Time of the last frame in earlier blocks of the writer, ns since the epoch.
        failure: Error of the first block that could not be written; None if there is none.

    Raises:
        UsageError: The earlier blocks of the writer cannot be read.
    """

    def __init__(
        self,
        journal: Journal,
        num_envs: int,
        *,
        max_pending: int,
        durable: bool,
        is_tentative: bool,
        frames_per_chunk: int | None,
        retention: Mapping[str, Any] | None,
    ) -> None:
        self._journal = journal
        self._folder = journal.path.parent
        self._writer = journal.writer
        self._max_pending = max_pending
        self._durable = durable
        self._is_tentative = is_tentative
        self._frames_per_chunk = frames_per_chunk
        self._retention = retention
        #: Maps fields with the codec "auto" to the codec that was chosen for the first block.
        self._codecs: dict[str, str] = {}
        self.failure: BaseException | None = None
        self._is_awaited = False
        self._num_blocks = 0
        self._num_uncached = 0
        self._sequence, self._carry, self.last_ns = _resume(self._folder, self._writer, num_envs)
        self._worker = Worker(f"writer {self._writer!r}", max_pending)
        self.owner = self._worker.owner

    def submit(self, staging: Staging, num_accepted: int) -> None:
        """Queue staged steps to be written as the next block; wait if too many are pending.

        Args:
            staging: Staged steps of the block, which are sealed against changes. Submitting the
                same staging twice publishes it once.
            num_accepted: Total number of frames that the writer has accepted, including these.
        """
        with self._waiting():  # A Ctrl-C here loses nothing, since the steps are still staged.
            self._worker.wait_for_room(max(0, self._max_pending - 2))
        self.check()
        staging.is_sealed = True
        self._worker.submit(self._publish, staging, num_accepted)
        if self._max_pending == 1:
            self.settle()

    def settle(self) -> None:
        """Wait until all submitted blocks are published, or a block could not be written."""
        with self._waiting():
            self._worker.drain()

    def check(self) -> None:
        """Raise an error if a block could not be written. Every later call raises it again.

        Raises:
            BackgroundError: A block could not be written.
            UsageError: This process is a fork of the writer's process.
        """
        self.owner.check()
        if self.failure is not None:
            raise BackgroundError(
                f"A block could not be written to {str(self._folder)!r}: {self.failure}. The "
                "published blocks are intact. Close this writer and create a new writer."
            ) from self.failure

    def close(self) -> None:
        """Publish all submitted blocks, rewrite the index cache and stop the thread.

        Errors are not raised here, but by `check`.
        """
        with self._waiting():
            self._worker.close()
        if self._num_uncached and self.failure is None:
            self._save_index()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Allow several threads to encode blocks while the caller waits in the `with` block.

        At other times one thread encodes, so that the caller keeps its processor time.
        """
        self._is_awaited = True
        try:
            yield
        finally:
            self._is_awaited = False

    def _publish(self, staging: Staging, num_accepted: int) -> None:
        if staging.is_published or self.failure is not None:
            return
        staging.is_published = True
        try:
            content, carry = staging.content(
                self._writer, self._sequence, self._carry, self._is_tentative
            )
            if len(content.fragments):
                content.codecs = self._codecs
                content.frames_per_chunk = self._frames_per_chunk
                if self._durable and not self._num_blocks:
                    sync_path(self._folder / METADATA_NAME)
                self._journal.announce(self._sequence, num_accepted)
                write_block(self._folder, content, self._durable, None if self._is_awaited else 1)
                self._sequence = self._sequence + 1
                self._num_blocks = self._num_blocks + 1
                self._num_uncached += 1
            self._carry = carry
            self._journal.publish(num_accepted)
        except BaseException as failure:  # noqa: BLE001 - raised at every later call
            self.failure = failure
            return
        if self._retention is not None:
            # If deleting old blocks fails, the next block tries again.
            with self._warn_on_failure("Old blocks of {} were not deleted"):
                prune(self._folder, **self._retention)
        if self._num_uncached > max(_MIN_UNCACHED_BLOCKS, self._num_blocks // 4):
            self._save_index()

    def _save_index(self) -> None:
        with self._warn_on_failure("The index cache of {} was not written"):
            save_index_cache(self._folder, self._writer)
            self._num_uncached = 0

    @contextmanager
    def _warn_on_failure(self, text: str) -> Iterator[None]:
        """Convert errors of the `with` block to warnings, since the recording can continue.

        Args:
            text: Text of the warning, in which "{}" stands for the path of the folder.
        """
        try:
            yield
        except (OSError, RolloutDataError) as error:
            warnings.warn(f"{text.format(repr(str(self._folder)))}: {error}", RolloutDataWarning)


def check_storable(schema: Schema) -> None:
    """Raise `SchemaError` if a field name is invalid, or the fields are too many for HDF5."""
    for name in schema:
        parts = name.split("/")
        is_text = "\0" not in name and not any("\ud800" <= letter <= "\udfff" for letter in name)
        if parts[0] == PACKED or not is_text or not all(part.strip(".") for part in parts):
            raise SchemaError(
                f"field name {name!a} is invalid: expected Unicode text without NUL, other than "
                f"{PACKED!r}, with no part that is empty or only dots. Rename the field."
            )
        for end in range(1, len(parts)):
            parent = "/".join(parts[:end])
            if parent in schema:
                raise SchemaError(
                    f"field {name!r} is below {parent!r}, which is a field, too. Rename one of "
                    "the two fields."
                )
    longest = {
        field.name: Coding(field.codec, 1 / 3, 8)
        for field in schema.values()
        if field.codec != "raw"
    }
    sizes = [len(json.dumps(schema.to_json())), len(codings_text(longest))]
    for layout in layouts_of(schema).values():
        types = [layout.numpy_dtype(column) for column in layout.columns.values()]
        sizes += [len(h5py.h5t.py_create(dtype, logical=True).encode()) for dtype in types]
    if max(sizes) > _MAX_ENTRY_BYTES:
        raise SchemaError(
            f"the description of {len(schema)} fields has {max(sizes)} bytes, expected at most "
            f"{_MAX_ENTRY_BYTES}. Concatenate fields."
        )


def _resume(folder: Path, writer: str, num_envs: int) -> tuple[int, Carry, int]:
    """Return the numbers and the time at which a writer continues after its earlier blocks.

    Returns:
        Next sequence number, a `Carry` without unfinished trajectories that contains the next
        trajectory number, and time of the last frame in ns since the epoch.
    """
    sequence = 0
    trajectory = 0
    last_ns = 0
    for path in sorted(folder.glob(f"rollout_{writer}_*.h5")):
        try:
            header = read_header(path)
        except (RolloutDataError, OSError) as cause:  # A dangling link raises OSError.
            raise UsageError(
                f"block {str(path)!r} of writer {writer!r} cannot be read: {cause}. Use another "
                "writer_name."
            ) from cause
        if not Block(path, writer, header.sequence, header.fragments).is_edit:
            sequence = max(sequence, header.sequence + 1)
        trajectory = max(trajectory, int(header.fragments["trajectory"].max(initial=-1)) + 1)
        last_ns = max(last_ns, int(header.fragments["end_time_ns"].max(initial=0)))
    return sequence, Carry.start(num_envs, trajectory), last_ns
