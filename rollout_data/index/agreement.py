"""The processes that read one dataset: who reads what, and how they agree on what is in the folders.

One rule: one process looks at the folders, and the others take over what it found. Among ranks that is rank 0; for the
workers of `rollout_data.loader` the process that takes their batches; of a plain DataLoader the first worker that needs
it. The rank is asked in the process that trains and travels with the dataset from there: a worker process that was not
forked has no process group, and would take itself for rank 0 of 1.
"""

from __future__ import annotations

import hmac
import multiprocessing
import operator
import os
import pickle
import secrets
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import get_worker_info

from storage.errors import CorruptFileError, RolloutDataError, UsageError

#: "auto" asks torch.distributed, "none" reads everything in each process, (rank, world size) says it outright.
ShardChoice = Literal["auto", "none"] | tuple[int, int]
#: Look at the folders; what was seen can be pickled. None: the same as before.
Look = Callable[[], Any]
#: Give what was seen for the pass of this number, here or by the process that looks for all.
Agree = Callable[[int, Look], Any]
_POLL_S = 0.001
_ENDED = "ended"
#: The notes of this many passes stay, in case one worker is far behind another.
_NUM_NOTES = 20_000
_KEY_BYTES = 32


class Shard(NamedTuple):
    """Number `number` of `total` shares."""

    number: int
    total: int

    def part_of(self, size: int) -> slice:
        """Give the share of `size` things in a row: all shares together are all of them, each once."""
        return slice(self.number * size // self.total, (self.number + 1) * size // self.total)


ALONE = Shard(0, 1)


def checked_shard(value: Any) -> Shard | None:
    """Check a `shard` argument; None stands for "auto"."""
    if isinstance(value, str) and value in ("auto", "none"):
        return None if value == "auto" else ALONE
    try:
        shard = None if isinstance(value, str) else Shard(*map(operator.index, value))
    except TypeError:
        shard = None
    if shard is None or not 0 <= shard.number < shard.total:
        expected = "shard 'auto', 'none' or (rank, world size) with 0 <= rank < world size"
        raise UsageError("share the data out", "", expected, repr(value))
    return shard


def current_shard(chosen: Shard | None = None) -> Shard:
    """Give the share that was `chosen`, or else that of this rank (torch.distributed, if initialized)."""
    if chosen is not None:
        return chosen
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return Shard(torch.distributed.get_rank(), torch.distributed.get_world_size())
    return ALONE


def current_worker() -> Shard:
    """Give the number of this DataLoader worker among those of its loader; 0 of 1 outside of workers."""
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


def alone(number: int, look: Look) -> Any:
    """Look, without asking other processes."""
    return look()


def agreement_of(shard: Shard) -> Agree:
    """Choose how this process agrees with the others, outside of workers."""
    return _among_ranks if shard.total > 1 and shard == current_shard() else alone


def _among_ranks(number: int, look: Look) -> Any:
    """Let rank 0 look and tell the others; all ranks call this at the same step of their streams."""
    told = [_told(look) if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(told, src=0)
    return _heard(told[0])


def _told(look: Look) -> tuple[Any, RolloutDataError | None]:
    """Look; what goes wrong is told as well, since the others would wait for it."""
    try:
        return look(), None
    except RolloutDataError as problem:
        return None, problem


def _heard(told: Any) -> Any:
    seen, problem = told
    if problem is not None:
        raise problem
    return seen


class Board:
    """Notes of the plain DataLoader workers of one dataset, in a temporary folder that is made with the first of them.

    Of several workers that leave a note of one name, the first one's counts. A note is read only if it was signed with
    the key of this board, which the processes of the dataset alone have.
    """

    def __init__(self) -> None:
        self._path = Path(tempfile.gettempdir()) / f"rollout_data_{secrets.token_hex(16)}"
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._finish = weakref.finalize(self, _remove, self._path, os.getpid())

    def __getstate__(self) -> dict[str, Any]:
        """Workers get the same board; any other copy one of its own."""
        is_for_worker = multiprocessing.context.get_spawning_popen() is not None
        return {"_path": self._path, "_key": self._key} if is_for_worker else {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state:
            vars(self).update(state)
        else:
            Board.__init__(self)

    def read(self, name: str) -> Any:
        """Give a note, None if there is none."""
        try:
            note = (self._path / name).read_bytes()
        except FileNotFoundError:
            return None
        signature, content = note[:_KEY_BYTES], note[_KEY_BYTES:]
        if not hmac.compare_digest(signature, hmac.digest(self._key, content, "sha256")):
            raise CorruptFileError("read the note", repr(str(self._path / name)), "one of this dataset", "another")
        return pickle.loads(content)

    def write(self, name: str, note: Any, is_final: bool = False) -> bool:
        """Leave a note, whole or not at all; one that `is_final` only where there is none: False if there was."""
        self._path.mkdir(mode=0o700, exist_ok=True)
        temporary, content = self._path / f".{name}.{os.getpid()}", pickle.dumps(note)
        temporary.write_bytes(hmac.digest(self._key, content, "sha256") + content)
        try:
            (os.link if is_final else os.replace)(temporary, self._path / name)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def forget(self, name: str) -> None:
        """Take a note away, if there is one."""
        (self._path / name).unlink(missing_ok=True)

    def end(self) -> None:
        """Let workers wait no more, unless the folder is gone already."""
        if self._path.exists():
            self.write(_ENDED, True)

    def agree(self, group: str, number: int, look: Look, is_told: bool = False) -> Any:
        """Agree with the workers of one epoch: the first one looks for all, unless the loader's process tells."""
        name, parent = f"{group}_{number}", multiprocessing.parent_process()
        while (note := self.read(name)) is None:
            if not is_told:
                self.write(name, _told(look), is_final=True)
            elif self.read(_ENDED) or (parent is not None and not parent.is_alive()):
                raise EOFError("the process that takes the batches takes no more")
            else:
                time.sleep(_POLL_S)
        self.forget(f"{group}_{number - _NUM_NOTES}")
        return _heard(note)


def _remove(path: Path, process: int) -> None:
    if process == os.getpid():
        shutil.rmtree(path, ignore_errors=True)
