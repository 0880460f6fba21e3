"""Conversions of six small episodes into every format, stopped, killed and compared."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest

import rollout_data
from rollout_data import Episode
from tests.recordings.sets import write_demos

LENGTHS = [3, 2, 4, 3, 2, 5]
NOTE, DATASET = "rollout_conversion.jsonl", "rollout_conversion"
#: Name -> format, name of the target, options.
TARGETS: dict[str, tuple[str, str, Mapping[str, Any]]] = {
    "robomimic": ("robomimic", "set.hdf5", {}),
    "isaaclab": ("isaaclab", "set.hdf5", {}),
    "minari": ("minari", "lab/set-v0", {}),
    "d4rl": ("d4rl", "set.hdf5", {}),
    "lerobot 3.0": ("lerobot", "set", {"fps": 20}),
    "lerobot 2.1": ("lerobot", "set", {"fps": 20, "version": "v2.1"}),
    "rlinf": ("rlinf", "set", {}),
    "trajectory folders": ("trajectory-folders", "set", {}),
    "rollout-data": ("rollout-data", "set", {}),
}
IN_HDF5 = ("robomimic", "isaaclab", "minari", "d4rl")
#: Targets that keep and compare their note by the same code as another target.
_SHARING = ("isaaclab", "d4rl", "lerobot 2.1", "rlinf")
#: Runs a test for one target of each code, and for all targets with `make fuzz`.
every_target = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.thorough) if name in _SHARING else name
        for name in TARGETS
    ],
)


class Stop(BaseException):
    """Raised to stop a conversion, like Ctrl-C."""


def demos(path: Path, num_episodes: int = 6, **more: Any) -> Path:
    """Write a source. Equal arguments produce equal values."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_demos(path, LENGTHS[:num_episodes], **more)


def convert(source: Any, target: Path, name: str, **options: Any) -> rollout_data.Conversion:
    """Convert into `target / name of the target`."""
    to, file, usual = TARGETS[name]
    return rollout_data.convert(source, target / file, to, progress=False, **{**usual, **options})


def place(target: Path, name: str) -> Path:
    """Return the path of a target."""
    return target / TARGETS[name][1]


@contextmanager
def stopped_at(number: int) -> Iterator[None]:
    """Stop at the first row that is read of the episode `demo_<number>`."""
    read = Episode.read

    def stopping(self: Episode, *arguments: Any, **options: Any) -> Any:
        if self.id == f"demo_{number}":
            raise Stop
        return read(self, *arguments, **options)

    with mock.patch.object(Episode, "read", stopping):
        yield


def stop_after_three(source: Path, target: Path, name: str, **options: Any) -> None:
    """Convert three episodes of six."""
    try:
        with stopped_at(3):
            convert(source, target, name, **options)
    except Stop:
        return
    raise AssertionError("the conversion was not stopped")


def content(path: Path) -> dict[str, bytes]:
    """Read all files of a target, and the files beside it that belong to it."""
    return {
        str(item): item.read_bytes() for item in sorted(path.parent.rglob("*")) if item.is_file()
    }


def values(path: Path) -> list[str]:
    """Read everything about the episodes of a target, except names and times of the writer of our
    own format.

    Values are compared as texts, so that NaN equals NaN.
    """
    result = []
    for episode in rollout_data.open(path):
        names = [*episode.schema, *episode.texts]
        about: dict[str, Any] = {name: np.asarray(episode.read(name)).tolist() for name in names}
        final = episode.final_observation
        parts = final if isinstance(final, dict) else {} if final is None else {"": final}
        about["final"] = {key: np.asarray(rows).tolist() for key, rows in parts.items()}
        about["ends"] = episode.terminated, episode.truncated, episode.success, episode.task
        metadata = {
            key: value
            for key, value in episode.metadata.items()
            if key not in ("writer", "end_time_ns", "env")
        }
        about["metadata"] = {key: np.asarray(value).tolist() for key, value in metadata.items()}
        result.append(repr(about))
    return result


def remove_note(path: Path, name: str) -> None:
    """Remove the note of a complete target."""
    if name not in IN_HDF5:
        (path / NOTE).unlink()
        return
    with h5py.File(path / "data" / "main_data.hdf5" if name == "minari" else path, "r+") as file:
        del file[f"metadata/{DATASET}" if name == "d4rl" else DATASET]


def in_child(act: Callable[[], Any]) -> int:
    """Run a function in a forked child; return the status of the child, -9 if it was killed."""
    process_id = os.fork()
    if process_id == 0:
        status = 1
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])


#: Calls at which a child is killed: they change names, or the disk. Writing rows (`pwrite`) is left
#: out for time.
_CALLS = (
    "rename",
    "replace",
    "link",
    "mkdir",
    "rmdir",
    "unlink",
    "fsync",
    "ftruncate",
    "utime",
    "write",
)


class Kills:
    """Count calls that change files, and kill the process before or after one of them.

    Args:
        number: Kill at this call, counted from 0; -1 counts only.
        is_after: Kill after the call instead of before it.
    """

    def __init__(self, number: int = -1, is_after: bool = False) -> None:
        self.number, self.is_after = number, is_after
        self.calls: list[str] = []

    def take_turn(self) -> None:
        """Kill the process at its turn."""
        os.kill(os.getpid(), signal.SIGKILL)

    def counted(
        self, name: str, call: Callable[..., Any], counts: Callable[..., bool]
    ) -> Callable[..., Any]:
        """Return a function that calls `call`, and is killed at its turn."""

        def act(*arguments: Any, **options: Any) -> Any:
            if not counts(*arguments, **options):
                return call(*arguments, **options)
            is_turn = len(self.calls) == self.number
            paths = [
                Path(argument).name
                for argument in arguments
                if isinstance(argument, (str, os.PathLike))
            ]
            self.calls.append(" ".join([name, *paths[-1:]]))
            if is_turn and not self.is_after:
                self.take_turn()
            result = call(*arguments, **options)
            if is_turn and self.is_after:
                self.take_turn()
            return result

        return act

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch calls of `os`, files that Python creates, and flushing and closing HDF5 files."""
        import builtins
        import io

        def always(*arguments: Any, **options: Any) -> bool:
            return True

        def creates(path: Any, flags: Any = "r", *arguments: Any, **options: Any) -> bool:
            if isinstance(flags, int):
                return bool(flags & os.O_CREAT)
            return not isinstance(path, int) and bool(
                set("wax+") & set(str(options.get("mode", flags)))
            )

        opened = self.counted("open", builtins.open, creates)
        patches = [
            mock.patch.object(os, name, self.counted(name, getattr(os, name), always))
            for name in _CALLS
        ]
        patches += [
            mock.patch.object(os, "open", self.counted("os.open", os.open, creates)),
            mock.patch.object(builtins, "open", opened),
            mock.patch.object(io, "open", opened),
            mock.patch.object(h5py.File, "flush", self.counted("flush", h5py.File.flush, always)),
            mock.patch.object(h5py.File, "close", self.counted("close", h5py.File.close, always)),
        ]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()


class FullDisk(Kills):
    """Raise the error of a full disk at one call that writes."""

    def counted(
        self, name: str, call: Callable[..., Any], counts: Callable[..., bool]
    ) -> Callable[..., Any]:
        """Return the call itself if it reads too."""
        return call if name in ("flush", "close") else super().counted(name, call, counts)

    def take_turn(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def calls_of(source: Path, target: Path, name: str, kind: type[Kills] = Kills) -> list[str]:
    """Return the calls of a whole conversion, in order."""
    kills = kind()
    with kills.watching():
        convert(source, target, name)
    return kills.calls


def check_killed(
    source: Path, target: Path, name: str, number: int, is_after: bool, whole: Sequence[Any]
) -> None:
    """Kill a conversion at one call, resume it, and compare the result with that of an uninterrupted one."""
    target.mkdir(parents=True)

    def act() -> None:
        with Kills(number, is_after).watching():
            convert(source, target, name)

    where = f"{name}, {'after' if is_after else 'before'} call {number}"
    status = in_child(act)
    assert status in (0, -signal.SIGKILL), where
    done = convert(source, target, name)
    assert (done.num_episodes, done.problems) == (len(LENGTHS), []), where
    assert values(place(target, name)) == whole, where
    left = [
        path.name for path in place(target, name).parent.iterdir() if path != place(target, name)
    ]
    assert left == [], where
