"""A file system for fsspec that delays the local files: each request takes at least `latency_s`.

Contents are exact. It counts its requests, and fails or hangs on demand. The tests use it too.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
from fsspec.spec import AbstractFileSystem

PROTOCOL = "lagging"


class LaggingFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Files below the local folder `root` as `lagging://<path>`.

    Attributes (of the class, as fsspec makes the objects):
        root: The folder.
        latency_s: How long a request takes at least.
        fails: Called with (path, start, stop) before a request is answered; may raise or wait.
        requests: (path, start, stop) of each request; of a list of files, (path, None, None).
        most_at_once: Requests under way at the same time, at most.
    """

    protocol = PROTOCOL
    cachable = False
    root = Path("/nowhere")
    latency_s = 0.03
    fails: Any = staticmethod(lambda path, start, stop: None)
    requests: list[tuple[str, Any, Any]] = []  # noqa: RUF012 - of the class on purpose
    most_at_once = 0
    _under_way: list[str] = []  # noqa: RUF012
    _lock = threading.Lock()

    @classmethod
    def start(cls, root: Path, latency_s: float = 0.03) -> None:
        """Serve a folder, and reset the counts."""
        cls.root, cls.latency_s, cls.requests = root, latency_s, []
        # Earlier requests still count in their own list.
        cls.most_at_once, cls._under_way = (
            0,
            [],
        )
        cls.fails = staticmethod(lambda path, start, stop: None)
        fsspec.register_implementation(PROTOCOL, cls, clobber=True)

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        name = self._answer(path, None, None)
        entries = [entry for entry in os.scandir(self.root / name) if entry.is_file()]
        stats = [(f"{name}/{entry.name}", entry.stat()) for entry in entries]
        actual = [
            {"name": name, "size": at.st_size, "mtime": at.st_mtime_ns, "type": "file"}
            for name, at in stats
        ]
        return actual if detail else [entry["name"] for entry in actual]

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **options: Any
    ) -> bytes:
        name = self._answer(path, start, end)
        with open(self.root / name, "rb", buffering=0) as file:
            return os.pread(file.fileno(), (end or 0) - (start or 0), start or 0)

    def _answer(self, path: str, start: int | None, stop: int | None) -> str:
        kind, name = type(self), str(self._strip_protocol(path)).strip("/")
        with kind._lock:
            kind.requests.append((name, start, stop))
            (under_way := kind._under_way).append(name)
            kind.most_at_once = max(kind.most_at_once, len(under_way))
        try:
            kind.fails(name, start, stop)
            time.sleep(kind.latency_s)
        finally:
            with kind._lock:
                under_way.remove(name)
        return name
