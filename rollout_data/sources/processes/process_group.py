"""The processes that read one dataset: who reads what, and how they agree on what is in the folders.

One rule: one process looks at the folders, and the others take over what it found. Among ranks that is rank 0; for the
workers of `rollout_data.loader` the process that takes their batches; of a plain DataLoader the first worker that needs
it. The rank is asked in the process that trains and travels with the dataset from there: a worker process that was not
forked has no process group, and would take itself for rank 0 of 1.
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

#: "auto" asks torch.distributed, "none" reads everything in each process, (rank, world size) says it outright.
ShardChoice = Literal["auto", "none"] | tuple[int, int]
#: Look at the folders; what was seen can be pickled. None: the same as before.
Look = Callable[[], Any]
#: Give what was seen for the pass of this number, here or by the process that looks for all; for a name instead of a
#: number, what was made by one of the processes that read together on this machine.
Agree = Callable[[int | str, Look], Any]
_POLL_S = 0.001
_ENDED = "ended"
#: Before each note: the bytes of its name, and of what it says.
_HEAD = struct.Struct("<QQ")
_NOTES, _LOOKING = 0, 1  # locks


class Shard(NamedTuple):
    """Number `number` of `total` shares."""

    number: int
    total: int

    def part_of(self, size: int) -> slice:
        """Return the share of `size` things in a row: all shares together are all of them, each once."""
        return slice(self.number * size // self.total, (self.number + 1) * size // self.total)


ALONE = Shard(0, 1)


def checked_shard(value: Any, action: str) -> Shard | None:
    """Check a `shard` argument of the call that `action` names; return None for "auto"."""
    if isinstance(value, str) and value in ("auto", "none"):
        return None if value == "auto" else ALONE
    return checked_share(value, action, "shard 'auto', 'none' or (rank, world size) with 0 <= rank < world size")


def checked_share(value: Any, action: str, expected: str) -> Shard:
    """Check a pair (number, total)."""
    try:
        share = None if isinstance(value, str) else Shard(*map(operator.index, value))
    except TypeError:
        share = None
    if share is None or not 0 <= share.number < share.total:
        raise UsageError(action, "", expected, repr(value))
    return share


def current_shard(chosen: Shard | None = None) -> Shard:
    """Return the share that was `chosen`, or else that of this rank (torch.distributed, if initialized)."""
    if chosen is not None:
        return chosen
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return Shard(torch.distributed.get_rank(), torch.distributed.get_world_size())
    return ALONE


def current_worker() -> Shard:
    """Return the number of this DataLoader worker among those of its loader; 0 of 1 outside of workers."""
    worker = get_worker_info()
    return ALONE if worker is None else Shard(worker.id, worker.num_workers)


def is_in_worker() -> bool:
    """True inside a DataLoader worker process, where CUDA must not be touched."""
    return get_worker_info() is not None


def refuse_second_split() -> None:
    """Raise where accelerate reads in rank 0 alone, or lets each rank keep a part of what it reads."""
    state = sys.modules.get("accelerate.state")
    loader = state.GradientState().active_dataloader if state is not None else None
    kinds = {type(loader).__name__, type(getattr(loader, "dataset", None)).__name__}
    if kinds & {"DataLoaderDispatcher", "IterableDatasetShard"}:
        advice = "Do not prepare this loader, or give the dataset shard='none' and as_dict=True"
        raise UsageError("share the data out", "", "ranks that read a share each", "accelerate, which splits", advice)


def alone(number: int | str, look: Look) -> Any:
    """Look, without asking other processes."""
    return look()


def agreement_of(shard: Shard) -> Agree:
    """Choose how this process agrees with the others, outside of workers."""
    return _among_ranks if shard.total > 1 and shard == current_shard() else alone


def _among_ranks(number: int | str, look: Look) -> Any:
    """Let rank 0 look and tell the others; all ranks call this at the same step of their streams."""
    if isinstance(number, str):
        return look()
    told = [_told(look) if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(told, src=0)
    return _heard(told[0])


def _told(look: Look) -> tuple[Any, RolloutDataError | None]:
    """Look; what goes wrong is told as well, since the others would wait for it."""
    try:
        return look(), None
    except RolloutDataError as problem:
        return None, problem
    except Exception as cause:  # noqa: BLE001 - of any kind, they would wait
        got = f"{type(cause).__name__}: {cause}"
        wrapped = BackgroundError("look at the folders", "for all processes", "an answer", got)
        wrapped.__cause__ = cause
        return None, wrapped


def _heard(told: Any) -> Any:
    seen, problem = told
    if problem is not None:
        raise problem
    return seen


class Board:
    """Notes of the worker processes of one dataset, in a file without a name: nothing of it outlives them.

    Forked processes have it; others get its descriptor when they are started, so that what is read was written by a
    process of this dataset. Of several final notes of one name the first one counts.
    """

    def __init__(self, sent: Any = None) -> None:
        self._file = _unnamed_file() if sent is None else sent.detach()
        #: Name -> where its last note lies, as far as this process has read.
        self._places: dict[str, tuple[int, int]] = {}
        self._stop = 0
        weakref.finalize(self, os.close, self._file).atexit = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Workers get the same board; any other copy is a new one."""
        is_for_worker = multiprocessing.context.get_spawning_popen() is not None
        return Board, (DupFd(self._file),) if is_for_worker else ()

    @contextmanager
    def _locked(self, which: int) -> Iterator[None]:
        """Hold one of the locks of this board; the system gives it back when the process ends."""
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
        """Return a note, None if there is none."""
        with self._locked(_NOTES):
            self._catch_up()
            start, num_bytes = self._places.get(name, (0, 0))
            content = os.pread(self._file, num_bytes, start)
        return pickle.loads(content) if content else None

    def names(self) -> list[str]:
        """List the names of all notes, in the order in which they were first written."""
        with self._locked(_NOTES):
            self._catch_up()
            return list(self._places)

    def write(self, name: str, note: Any, is_final: bool = False) -> bool:
        """Leave a note, whole or not at all; one that `is_final` only where there is none: False if there was."""
        content = b"" if note is None and not is_final else pickle.dumps(note)
        with self._locked(_NOTES):
            self._catch_up()
            if is_final and self._places.get(name, (0, 0))[1]:
                return False
            os.ftruncate(self._file, self._stop)  # of what a killed process has begun
            os.pwrite(self._file, name.encode() + content, self._stop + _HEAD.size)
            os.pwrite(self._file, _HEAD.pack(len(name.encode()), len(content)), self._stop)
        return True

    def end(self) -> None:
        """Let workers wait no more."""
        self.write(_ENDED, True)

    def agree(self, group: str, number: int | str, look: Look, is_told: bool = False) -> Any:
        """Agree with the workers of one epoch: the first one looks for all, unless the loader's process tells."""
        name = f"{group}_{number}"
        parent = multiprocessing.parent_process()
        while (note := self.read(name)) is None:
            if not is_told:
                with self._locked(_LOOKING):  # what is found may be large: only one process makes it
                    if self.read(name) is None:
                        self.write(name, _told(look), is_final=True)
            elif self.read(_ENDED) or (parent is not None and not parent.is_alive()):
                raise EOFError("the process that takes the batches takes no more")
            else:
                time.sleep(_POLL_S)
        return _heard(note)


def _unnamed_file() -> int:
    """Open a file that is in no folder; where the system has none in memory, one of the temporary folder."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("rollout_data_notes")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
