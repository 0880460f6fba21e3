"""Publishing: staged frames become blocks, one after another, in a background thread.

One rule: the state that goes from block to block (sequence, trajectories in progress) is touched
by that thread only. A failure is kept and raised at every later call: after it nothing more is
published, because what follows would have a gap.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import h5py

from storage.core.durable import sync_path
from storage.core.fields import Schema
from storage.core.threads import Worker
from storage.errors import BackgroundError, RolloutDataError, RolloutDataWarning, SchemaError, UsageError

from ..format.block_file import write_block
from ..format.chunk_table import Coding, codings_text
from ..format.header import layouts_of, read_header
from ..format.schema import PACKED
from ..index.folder import save_index_cache
from .cut import Carry
from .journal import Journal
from .retention import prune
from .staging import Staging

#: The index cache is renewed when more than this many blocks, and a quarter of all, are not in it.
_MIN_UNCACHED_BLOCKS = 8
#: HDF5 keeps attributes and types in entries of 64 KiB.
_MAX_ENTRY_BYTES = 60_000


class BlockPublisher:
    """Write the blocks of one writer.

    Args:
        folder: Where to.
        writer: Name of the writer.
        num_envs: Envs of every staging.
        journal: Told what is published.
        max_pending: How many blocks may be in memory, the one being filled included; 1 makes
            `submit` wait for the disk.
        durable: Flush to the disk.
        is_tentative: Mark fragments as valid only once their trajectory has ended.

    Attributes:
        frames_per_chunk: Frames of a chunk of a coded component at most; None is what suits the codec.
        retention: Limits of `prune` for the folder after each block; None for none.
        last_ns: When the last frame of the writer's earlier blocks was added, after `start`.
    """

    def __init__(
        self,
        folder: Path,
        writer: str,
        num_envs: int,
        journal: Journal,
        max_pending: int,
        durable: bool,
        is_tentative: bool,
    ) -> None:
        self._folder, self._writer, self._num_envs, self._journal = folder, writer, num_envs, journal
        self._durable, self._is_tentative = durable, is_tentative
        self._is_synchronous = max_pending == 1
        self._sequence, self._carry, self.last_ns = 0, Carry.start(num_envs, 0), 0
        #: What "auto" chose for each field on the first block.
        self._codecs: dict[str, str] = {}
        self.frames_per_chunk: int | None = None
        self.retention: dict[str, Any] | None = None
        self._worker = Worker(f"writer {writer!r}", max_pending=max_pending)
        self._num_others = max(0, max_pending - 2)  # that may be pending when another one is submitted
        self._failure: BaseException | None = None
        self._is_awaited = False
        self._num_blocks = self._num_uncached = 0

    def start(self) -> None:
        """Go on behind the writer's earlier blocks.

        Raises:
            UsageError: They cannot be read.
        """
        self._sequence, self._carry, self.last_ns = _resume(self._folder, self._writer, self._num_envs)

    def submit(self, staging: Staging, num_accepted: int) -> None:
        """Queue a staging; wait while too many blocks are pending.

        Args:
            staging: Sealed by this; submitting it twice publishes it once.
            num_accepted: How many frames are settled when it is published.
        """
        # A Ctrl-C in here changes nothing: the steps stay staged.
        with self._waiting():
            self._worker.wait_for_room(self._num_others)
        self.raise_failure()
        staging.is_sealed = True
        self._submit(partial(self._publish, staging, num_accepted))
        if self._is_synchronous:
            self.settle()

    def flush_file(self, path: Path) -> None:
        """Queue flushing a small file and its folder to the disk, before the next block."""
        self._submit(partial(_flush, path))

    def settle(self) -> None:
        """Wait until everything submitted is published or has failed."""
        with self._waiting():
            self._worker.drain()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """While a caller waits it needs no processor; otherwise a block is written by one thread, beside its work."""
        self._is_awaited = True
        try:
            yield
        finally:
            self._is_awaited = False

    def has_failed(self) -> bool:
        return self._failure is not None

    def raise_failure(self) -> None:
        """Raise what made a block fail, if one did; again at every call. Raise in a forked child."""
        self._worker.check()
        if self.has_failed():
            raise BackgroundError(
                "publish a block",
                f"in {str(self._folder)!r}",
                "a writable folder with room",
                str(self._failure),
                "What was published before is intact; close this writer and start another one",
            ) from self._failure

    def close(self) -> None:
        """Publish what was submitted, renew the index cache, stop. Raises nothing: ask `raise_failure`."""
        with self._waiting():
            self._worker.close()
        if self._num_uncached and self._failure is None:
            self._save_index()

    def _submit(self, job: Callable[[], object]) -> None:
        self._worker.submit(partial(self._do, job))

    def _do(self, job: Callable[[], object]) -> None:
        """Do a job, unless one before it has failed; keep its failure here, where no Ctrl-C comes in between."""
        if self._failure is None:
            try:
                job()
            except BaseException as failure:  # noqa: BLE001 - raised at every later call
                self._failure = failure

    def _publish(self, staging: Staging, num_accepted: int) -> None:
        if staging.is_published:
            return
        staging.is_published = True
        content, carry = staging.content(self._writer, self._sequence, self._carry, self._is_tentative)
        content.codecs, content.frames_per_chunk = self._codecs, self.frames_per_chunk
        if len(content.fragments):
            self._journal.announce(self._sequence, num_accepted)
            write_block(self._folder, content, self._durable, in_haste=lambda: self._is_awaited)
            self._sequence += 1
            self._num_blocks += 1
            self._num_uncached += 1
        self._carry = carry
        self._journal.publish(num_accepted)
        try:
            if self.retention is not None:
                prune(self._folder, **self.retention)
        except (OSError, RolloutDataError) as error:  # tried again after the next block
            warnings.warn(f"old blocks of {str(self._folder)!r} were not deleted: {error}", RolloutDataWarning)
        if self._num_uncached > max(_MIN_UNCACHED_BLOCKS, self._num_blocks // 4):
            self._save_index()

    def _save_index(self) -> None:
        """Renew the index cache; it is an accelerator, so that a failure only warns."""
        try:
            save_index_cache(self._folder, self._writer)
            self._num_uncached = 0
        except (OSError, RolloutDataError) as error:
            warnings.warn(f"the index cache of {str(self._folder)!r} was not renewed: {error}", RolloutDataWarning)


def _flush(path: Path) -> None:
    sync_path(path)
    sync_path(path.parent)


def check_storable(schema: Schema) -> None:
    """Raise `SchemaError` if a block cannot hold these fields: HDF5 limits a header entry to 64 KiB."""
    for name in schema:
        parts = name.split("/")
        is_text = "\0" not in name and not any("\ud800" <= letter <= "\udfff" for letter in name)
        if parts[0] == PACKED or not is_text or not all(part.strip(".") for part in parts):
            expected = f"a name other than {PACKED!r}, of Unicode text without NUL, no part of it empty or only dots"
            raise SchemaError("store the field", ascii(name), expected, ascii(name), "Rename the field")
        for end in range(1, len(parts)):
            if (parent := "/".join(parts[:end])) in schema:
                raise SchemaError("store the field", repr(name), "no field above it", repr(parent))
    longest = {field.name: Coding(field.codec, 1 / 3, 8) for field in schema.values() if field.codec != "raw"}
    sizes = [len(json.dumps(schema.to_json())), len(codings_text(longest))]
    for layout in layouts_of(schema).values():
        sizes += [
            len(h5py.h5t.py_create(layout.numpy_dtype(c), logical=True).encode()) for c in layout.columns.values()
        ]
    if max(sizes) > _MAX_ENTRY_BYTES:
        expected = f"a description of at most {_MAX_ENTRY_BYTES} bytes"
        raise SchemaError(
            "store", f"{len(schema)} fields", expected, f"{max(sizes)} bytes", "Join fields to wider ones"
        )


def _resume(folder: Path, writer: str, num_envs: int) -> tuple[int, Carry, int]:
    """Find where the numbering of a writer goes on: sequence, trajectories, time in ns."""
    sequence, trajectory, last_ns = 0, 0, 0
    for path in sorted(folder.glob(f"rollout_{writer}_*.h5")):
        try:
            header = read_header(path)
        except (RolloutDataError, OSError) as cause:  # a link that leads nowhere is no block either
            raise UsageError(
                "continue the writer", repr(writer), "readable blocks", str(path), "Use another writer_name"
            ) from cause
        sequence = max(sequence, header.sequence + 1)
        if len(header.fragments):
            trajectory = max(trajectory, int(header.fragments["trajectory"].max()) + 1)
            last_ns = max(last_ns, int(header.fragments["end_time_ns"].max()))
    return sequence, Carry.start(num_envs, trajectory), last_ns
