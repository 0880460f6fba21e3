"""The processes that read one dataset: their shards, and synchronization of the folder snapshot.

One process scans the folders; the others use its result. Among ranks, rank 0 scans. For workers of
`rollout_data.loader`, the process that receives their batches scans. For workers of a plain
DataLoader, the first worker that needs the result scans.

The rank is determined in the training process and pickled with the dataset, since a spawned worker
has no process group and would see rank 0 of 1.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import operator
import os
import pickle
import struct
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import DupFd
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import get_worker_info

from storage.errors import BackgroundError, RolloutDataError, UsageError

#: "auto" takes the shard from torch.distributed; "none" reads all data in each process; or
#: (rank, world size).
ShardChoice = Literal["auto", "none"] | tuple[int, int]
#: Function that scans the folders. Returns a result that can be pickled; None if nothing changed.
ScanFolders = Callable[[], Any]
#: Function that returns the same scan result to all processes that read a dataset. Its arguments
#: are the number of the pass and a function that scans. One process scans, and the others receive
#: its result. With a name instead of a number, it shares another object between the processes of
#: this machine, which the passed function creates.
Agree = Callable[[int | str, ScanFolders], Any]
_POLL_S = 0.001
_ENDED = "ended"
#: Header of a message in a `Board`: sizes of its name and of its content in bytes.
_HEAD = struct.Struct("<QQ")
#: Positions of the bytes of the file that are locked: while messages are read or written, and while
#: a process scans.
_MESSAGES = 0
_SCANNING = 1


class Shard(NamedTuple):
    """The part of the data that one process reads: shard `number` of `total` shards."""

    number: int
    total: int

    def part_of(self, size: int) -> slice:
        """Return this shard's part of `range(size)`. The parts of all shards are disjoint."""
        return slice(self.number * size // self.total, (self.number + 1) * size // self.total)


ALONE = Shard(0, 1)


def checked_shard(value: Any) -> Shard | None:
    """Check a user's `shard` argument and convert it to a `Shard`; return None for "auto"."""
    if isinstance(value, str) and value in ("auto", "none"):
        return None if value == "auto" else ALONE
    try:
        shard = None if isinstance(value, str) else Shard(*map(operator.index, value))
    except TypeError:
        shard = None
    if shard is None or not 0 <= shard.number < shard.total:
        raise UsageError(
            f"shard {value!r} is invalid: expected 'auto', 'none' or (rank, world_size) with "
            "0 <= rank < world_size."
        )
    return shard


def current_shard(chosen: Shard | None = None) -> Shard:
    """Return the shard that the user chose; None selects the shard of this rank."""
    if chosen is not None:
        return chosen
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return Shard(torch.distributed.get_rank(), torch.distributed.get_world_size())
    return ALONE


def current_worker() -> Shard:
    """Return number and total of DataLoader workers in this process; 0 of 1 outside of workers."""
    worker = get_worker_info()
    return ALONE if worker is None else Shard(worker.id, worker.num_workers)


def is_in_worker() -> bool:
    """Return whether the current process is a DataLoader worker, which must not use CUDA."""
    return get_worker_info() is not None


def refuse_second_split() -> None:
    """Check that accelerate does not divide the batches of this dataset a second time.

    Raises:
        UsageError: Both accelerate and the dataset divide the batches between the ranks.
    """
    state = sys.modules.get("accelerate.state")
    loader = state.GradientState().active_dataloader if state is not None else None
    kinds = {type(loader).__name__, type(getattr(loader, "dataset", None)).__name__}
    if kinds & {"DataLoaderDispatcher", "IterableDatasetShard"}:
        raise UsageError(
            "accelerate splits the batches between ranks, and the dataset does, too. Do not pass "
            "this loader to prepare(), or create the dataset with shard='none' and as_dict=True."
        )


def alone(number: int | str, scan: ScanFolders) -> Any:
    """Scan the folders in this process only, without synchronization; return the result."""
    return scan()


def agreement_of(shard: Shard) -> Agree:
    """Return the function with which this rank shares folder scans with the other ranks."""
    return _among_ranks if shard.total > 1 and shard == current_shard() else alone


def _among_ranks(number: int | str, scan: ScanFolders) -> Any:
    """Scan in rank 0 and broadcast the result. All ranks must call this at the same step."""
    if isinstance(number, str):
        return scan()
    outcomes = [_outcome(scan) if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(outcomes, src=0)
    return _result(outcomes[0])


def _outcome(scan: ScanFolders) -> tuple[Any, RolloutDataError | None]:
    """Scan the folders; return a pair (result, error).

    The error is not raised, so that other processes receive it, too.
    """
    try:
        return scan(), None
    except RolloutDataError as problem:
        return None, problem
    except Exception as cause:  # noqa: BLE001 - other processes wait for any result
        wrapped = BackgroundError(
            f"The folders could not be scanned for all processes: {type(cause).__name__}: {cause}."
        )
        wrapped.__cause__ = cause
        return None, wrapped


def _result(outcome: Any) -> Any:
    """Return the result of a scan that one process made for all, or raise its error."""
    result, problem = outcome
    if problem is not None:
        raise problem
    return result


class Board:
    """Messages between the processes of one dataset, by name, in an unnamed shared file.

    The system deletes the file with the last process. Forked processes inherit the file; spawned
    processes receive its descriptor, so only processes of this dataset can write to it. A name has
    one message: a later message replaces it, unless `write` is called with `is_final`.
    """

    def __init__(self, sent: Any = None) -> None:
        self._file = _unnamed_file() if sent is None else sent.detach()
        #: Maps the name of each known message to its byte offset in the file and its size.
        self._places: dict[str, tuple[int, int]] = {}
        self._stop = 0
        weakref.finalize(self, os.close, self._file).atexit = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle this object so that worker processes share it. Other copies are new and empty."""
        is_for_worker = multiprocessing.context.get_spawning_popen() is not None
        return Board, (DupFd(self._file),) if is_for_worker else ()

    @contextmanager
    def _locked(self, which: int) -> Iterator[None]:
        """Hold a lock between processes during the `with` block: byte `which` of the file.

        If the process ends, the system releases the lock.
        """
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, which)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, which)

    def _catch_up(self) -> None:
        while any(head := os.pread(self._file, _HEAD.size, self._stop)):
            name_bytes, num_bytes = _HEAD.unpack(head)
            first = self._stop + _HEAD.size
            name = os.pread(self._file, name_bytes, first).decode()
            self._places[name] = first + name_bytes, num_bytes
            self._stop = first + name_bytes + num_bytes

    def read(self, name: str) -> Any:
        """Return the last message with this name; None if there is none."""
        with self._locked(_MESSAGES):
            self._catch_up()
            start, num_bytes = self._places.get(name, (0, 0))
            content = os.pread(self._file, num_bytes, start)
        return pickle.loads(content) if content else None

    def names(self) -> list[str]:
        """Return the names of all messages in the order in which they were first written."""
        with self._locked(_MESSAGES):
            self._catch_up()
            return list(self._places)

    def write(self, name: str, note: Any, is_final: bool = False) -> bool:
        """Write a message atomically; return whether it was written.

        With `is_final`, nothing is written if the name already has a message.
        """
        content = b"" if note is None and not is_final else pickle.dumps(note)
        with self._locked(_MESSAGES):
            self._catch_up()
            if is_final and self._places.get(name, (0, 0))[1]:
                return False
            os.ftruncate(self._file, self._stop)  # Removes the partial message of a killed process.
            os.pwrite(self._file, name.encode() + content, self._stop + _HEAD.size)
            os.pwrite(self._file, _HEAD.pack(len(name.encode()), len(content)), self._stop)
        return True

    def end(self) -> None:
        """Stop workers that still wait for a scan result: their call raises `EOFError`."""
        self.write(_ENDED, True)

    def agree(
        self, group: str, number: int | str, scan: ScanFolders, loader_scans: bool = False
    ) -> Any:
        """Return the scan result that all workers of one epoch use; wait for it if necessary.

        Args:
            group: Name of the epoch, common to its workers.
            number: Number of the pass, see `Agree`.
            scan: Function that scans the folders.
            loader_scans: Whether the process of the loader scans. Otherwise the first worker scans.
        """
        name = f"{group}_{number}"
        parent = multiprocessing.parent_process()
        while (note := self.read(name)) is None:
            if not loader_scans:
                # The scan result may be large, so only one process creates it.
                with self._locked(_SCANNING):
                    if self.read(name) is None:
                        self.write(name, _outcome(scan), is_final=True)
            elif self.read(_ENDED) or (parent is not None and not parent.is_alive()):
                raise EOFError("the process that iterates over the batches has ended")
            else:
                time.sleep(_POLL_S)
        return _result(note)


def _unnamed_file() -> int:
    """Open an unnamed file in memory, or in the temporary folder if memfd is unsupported."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("rollout_data_notes")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
