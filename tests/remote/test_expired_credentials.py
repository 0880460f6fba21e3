"""Credentials that expire at any request of a call: one error that names them, or the complete
result.
"""

from __future__ import annotations

import os
import threading
import warnings

import numpy as np
import pytest

pytest.importorskip("fsspec")

import rollout_data
from benchmarks.lagging import LaggingFileSystem
from rollout_data import (
    RemoteOptions,
    RolloutDataset,
    RolloutWriter,
    WindowDataset,
    WindowLoader,
    loader,
    push,
)
from rollout_data.remote.access_errors import AccessError
from rollout_data.tools.cli.command_line import main
from storage.errors import RolloutDataError
from tests.files.recorded import drain

from .places import Store, store_at

EXPIRED = "403 Forbidden: the provided token has expired"
REMOTE = RemoteOptions(chunk_bytes=4096, num_chunks=1, num_requests=2, num_retries=1)


class Expiring:
    """Answers the first requests and denies all others, in any thread; see
    `LaggingFileSystem.fails`.
    """

    def __init__(self, num_answered: int) -> None:
        self.left, self.lock = num_answered, threading.Lock()
        self.has_expired = False

    def __call__(self, path, start, stop):
        with self.lock:
            self.left -= 1
            self.has_expired |= self.left < 0
        if self.left < 0:
            raise PermissionError(EXPIRED)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder with two blocks, a copy as uploaded by `push`, and a folder for more copies."""
    root = tmp_path_factory.mktemp("expiring")
    with RolloutWriter(root / "walk", 2, durable=False, block_bytes=8_000) as writer:
        for step in range(48):
            row = np.full((2, 40), step, np.float32)
            row[:, 0] = [0, 1]
            writer.add(
                observation=row,
                action=row[:, :4],
                reward=row[:, 1],
                done=np.full(2, step % 12 == 11),
            )
    assert len(list((root / "walk").glob("*.h5"))) > 1
    store_at(root / "pushed", "store")
    push(root / "walk", "store://walk")
    return root


def rows(batches):
    return sorted(
        row for batch in batches for row in batch.observation[batch.valid][:, :2].tolist()
    )


def skipped(url):
    windows = WindowDataset(url, 4, stride=4, remote=REMOTE, on_error="skip")
    actual = sorted(batch["action"].tolist() for batch in WindowLoader(windows, 8))
    assert windows.num_lost_windows == 0
    return actual


def commanded(capsys, *words):
    code = main(list(words))
    printed = capsys.readouterr()
    if code == 1 and "expired" in printed.err:
        raise AccessError(printed.err)
    return code, printed.out


def played(url, **options):
    return RolloutDataset(url, 2, device="cpu", remote=REMOTE, **options)


WAYS = {
    "stream": lambda url, capsys: rows(drain(played(url), 5)),
    "shuffled stream that skips": lambda url, capsys: rows(
        drain(played(url, random_shuffle_traj_order=True, on_error="skip", refresh_s=0.0), 5)
    ),
    "two passes from memory": lambda url, capsys: rows(
        drain(played(url, dataset_loops=2, cache="ram"), 5)
    ),
    "read ahead": lambda url, capsys: rows(loader(played(url), num_workers=0)),
    "windows": lambda url, capsys: sorted(
        batch["action"].tolist()
        for batch in WindowLoader(WindowDataset(url, 4, stride=4, remote=REMOTE), 8)
    ),
    "windows that skip": lambda url, capsys: skipped(url),
    "recording": lambda url, capsys: [
        (episode.id, episode["action"].tolist())
        for episode in rollout_data.open(url, remote=REMOTE)
    ],
    "statistics": lambda url, capsys: (
        WindowDataset(url, 4, remote=REMOTE)
        .statistics(use_cache=False, progress=False)["action"]
        .mean.tolist()
    ),
    "table": lambda url, capsys: rollout_data.open(url, remote=REMOTE).table["length"].tolist(),
    "doctor": lambda url, capsys: [
        str(finding) for finding in rollout_data.doctor(rollout_data.open(url)).findings
    ],
    "info": lambda url, capsys: commanded(capsys, "info", url),
    "ls": lambda url, capsys: commanded(capsys, "ls", url),
}


#: Ways that read rows; without checksums they compare others.
OF_ROWS = ("stream", "windows that skip", "recording")


@pytest.mark.parametrize(
    ("place", "way"), [*(("pushed/walk", way) for way in WAYS), *(("walk", way) for way in OF_ROWS)]
)
@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.thorough) for first in range(1, 3))]
)
def test_credentials_that_expire_at_any_request_leave_a_complete_result_or_one_error(
    folders, monkeypatch, tmp_path, capsys, place, way, first
):
    """Every third request is denied in turn, starting with number `first`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    LaggingFileSystem.start(folders, 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = WAYS[way](f"lagging://{place}", capsys)
        num_requests = len(LaggingFileSystem.requests)
        assert num_requests > 2
        for number in range(first, num_requests, 3):
            LaggingFileSystem.start(folders, 0.0)
            LaggingFileSystem.fails = expiring = Expiring(number)
            try:
                assert WAYS[way](f"lagging://{place}", capsys) == expected, number
            except RolloutDataError as error:
                assert isinstance(error, AccessError) and EXPIRED in str(error), number
                assert expiring.has_expired


def test_a_push_whose_credentials_expire_raises_and_the_next_push_completes_it(folders, tmp_path):
    names = {path.name for path in (folders / "pushed/walk").iterdir()}
    store_at(tmp_path, "store")
    push(folders / "walk", "store://whole", remote=REMOTE)
    num_requests = len(Store.requests)
    for number in range(num_requests):
        store_at(tmp_path, "store")
        Store.fails = Expiring(number)
        with pytest.raises(AccessError, match=EXPIRED):
            push(folders / "walk", f"store://{number}", remote=REMOTE)
        Store.fails = staticmethod(lambda *request: None)
        assert not (tmp_path / str(number) / "metadata.json").exists() or number == num_requests - 1
        push(folders / "walk", f"store://{number}", remote=REMOTE)
        assert set(os.listdir(tmp_path / str(number))) == names
