"""A store that denies access ends the iteration with one error. It never counts data as deleted."""

from __future__ import annotations

import time
import warnings
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("fsspec")

import rollout_data
from benchmarks.lagging import LaggingFileSystem
from rollout_data import RemoteOptions, RolloutDataset, WindowDataset, WindowLoader, loader, push
from rollout_data.remote.access_errors import AccessError, denial
from storage.errors import DataFileError, UnansweredError
from tests.files.recorded import drain, record

from .places import Store, far_windows, lagging, store_at, uneven

EXPIRED = "the provided token has expired"
OPTIONS = RemoteOptions(timeout_s=5, num_retries=3, chunk_bytes=4096, num_chunks=2)


class ClientError(Exception):
    """The error of botocore, which this test does not need."""

    def __init__(self, code: str, status: int) -> None:
        super().__init__(f"An error occurred ({code}): {EXPIRED}")
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


class ClientResponseError(Exception):
    """The error of aiohttp."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status}, message={EXPIRED!r}")
        self.status = status


class NoCredentialsError(Exception):
    """The error of botocore."""


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


REFUSALS = {
    "permission": PermissionError(f"403 Forbidden: {EXPIRED}"),
    "code of an expired token": ClientError("ExpiredTokenException", 400),
    "status of a client": ClientError("SomethingElse", 401),
    "wrapped": caused(OSError(5, EXPIRED), ClientError("AccessDenied", 403)),
    "status of HTTP": ClientResponseError(403),
    "hidden behind a missing file": caused(FileNotFoundError(EXPIRED), ClientResponseError(403)),
    "no credentials": NoCredentialsError(EXPIRED),
    "text": OSError(f"Forbidden: bucket/walk. {EXPIRED}"),
    "text with a status": OSError(f"request failed with status 401: {EXPIRED}"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return uneven(tmp_path_factory.mktemp("remote") / "walk")


def refuse(
    error: Exception, is_refused=lambda path, start, stop: True, system=LaggingFileSystem
) -> list[tuple]:
    """Deny further requests. Return the growing list of denied requests."""
    refused: list[tuple] = []

    def act(path, start, stop):
        if is_refused(path, start, stop):
            refused.append((path, start, stop))
            raise error

    system.fails = staticmethod(act)
    return refused


def played(url: str, **options) -> RolloutDataset:
    return RolloutDataset(
        url, 2, device="cpu", remote=OPTIONS, num_transitions_per_env=5, **options
    )


@pytest.mark.each_value
@pytest.mark.parametrize("error", REFUSALS.values(), ids=REFUSALS)
@pytest.mark.parametrize("moment", ["listing", "headers", "playing", "windows"])
def test_a_denied_request_raises_one_error_and_is_not_retried(folder, moment, error):
    url = lagging(folder)
    far, windows = played(url), far_windows(url)
    batches = iter(WindowLoader(windows, 8))
    far.get_batch(3), next(batches)
    is_listing = moment == "listing"
    refused = refuse(error, lambda path, start, stop: (stop is None) == is_listing)
    with warnings.catch_warnings(), pytest.raises(AccessError, match=EXPIRED) as actual:
        warnings.simplefilter("error")
        if moment == "windows":
            list(batches)
        elif moment == "playing":
            drain(far, 5)
        else:
            played(url).get_batch(3)
    assert isinstance(actual.value, DataFileError) and "Renew the credentials" in str(actual.value)
    assert len(set(refused)) == len(refused) > 0
    assert far.num_lost_trajectories == 0 and far.problems == []


@pytest.mark.each_value
@pytest.mark.parametrize("loops", [1, 2, 0])
@pytest.mark.parametrize(
    "options",
    [{}, {"on_error": "skip"}, {"refresh_s": 0.0}, {"keep_latest_n_trajs": 50}, {"cache": "ram"}],
    ids=str,
)
def test_credentials_that_expire_end_a_stream_of_any_length_and_new_ones_continue_it(
    folder, loops, options
):
    url = lagging(folder)
    far, near = (
        RolloutDataset(
            item, 2, loops, device="cpu", remote=OPTIONS, num_transitions_per_env=5, **options
        )
        for item in (url, folder)
    )
    far.get_batch(5), near.get_batch(5)
    refuse(REFUSALS["permission"])
    if options.get("cache") != "ram" or loops == 0:
        with pytest.raises(AccessError, match=EXPIRED):
            for _ in range(2000):
                far.get_batch(5)
        state = far.state_dict()
        near.load_state_dict(state)
    LaggingFileSystem.fails = staticmethod(lambda *request: None)
    for _ in range(5):
        assert (far.get_batch(5).observation == near.get_batch(5).observation).all()
    assert far.num_lost_trajectories == 0


@pytest.mark.parametrize("way", ["prefetch", "workers", "windows", "skipped windows"])
def test_a_denied_request_in_threads_and_workers_raises_in_the_reading_process(folder, way):
    url = lagging(folder)
    far = played(url, dataset_loops=0)
    windows = far_windows(url, on_error="skip" if way == "skipped windows" else "raise")
    batches = {
        "prefetch": far.prefetch,
        "workers": lambda: loader(far, num_workers=2, multiprocessing_context="fork"),
        "windows": lambda: WindowLoader(windows, 8),
        "skipped windows": lambda: WindowLoader(windows, 8),
    }[way]()
    if way == "workers":  # which have a copy of the switch
        far.get_batch(5)
        refuse(REFUSALS["permission"], lambda path, start, stop: stop is not None)
    read = iter(batches)
    if way != "workers":
        next(read)
        refuse(REFUSALS["permission"])
    with pytest.raises(DataFileError, match=EXPIRED):
        for _ in range(2000):
            next(read)
    if way == "skipped windows":
        assert windows.num_lost_windows == 0


def test_a_missing_block_counts_as_denied_if_the_folder_cannot_be_listed(folder):
    far = played(lagging(folder))
    far.get_batch(3)

    def act(path, start, stop):
        raise FileNotFoundError(path) if stop is not None else PermissionError(EXPIRED)

    far.source.adopt(far.source.listing())
    far.source.snapshot()
    LaggingFileSystem.fails = staticmethod(act)
    now_s = time.monotonic()
    with (
        mock.patch.object(time, "monotonic", lambda: now_s + 10),
        pytest.raises(AccessError, match=EXPIRED),
    ):
        drain(far, 5)  # a listing of a moment ago counts as access


@pytest.mark.parametrize("loops", [1, 0])
def test_a_stream_raises_if_all_blocks_are_missing_and_continues_if_some_are(tmp_path, loops):
    for place in ("all", "some"):
        record(tmp_path / place, [40] * 12, num_envs=2, flush_every=45)
    deleted, left = (
        RolloutDataset(lagging_at(tmp_path, place), 2, loops, device="cpu", remote=OPTIONS)
        for place in ("all", "some")
    )
    deleted.get_batch(3), left.get_batch(3)
    for path in (tmp_path / "all").glob("*.h5"):
        path.unlink()
    max((tmp_path / "some").glob("*.h5")).unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(DataFileError, match=r"None of the \d+ trajectories"):
            for _ in range(500):
                deleted.get_batch(5)
        num_valid = sum(int(left.get_batch(5).valid.sum()) for _ in range(10))
    assert num_valid > 0


def lagging_at(root, name: str) -> str:
    LaggingFileSystem.start(root, 0.0)
    return f"lagging://{name}"


def test_a_local_stream_of_which_every_trajectory_is_damaged_raises(tmp_path):
    from .places import coded

    coded(tmp_path / "images")
    path = next((tmp_path / "images").glob("*.h5"))
    near = RolloutDataset(tmp_path / "images", 2, 0, device="cpu", on_error="skip")
    near.get_batch(1)
    data = bytearray(path.read_bytes())
    for start in range(30_000, len(data) - 200, 64):
        data[start] ^= 1
    with path.open("r+b") as file:  # the mapped file itself
        file.write(data)
    with (
        warnings.catch_warnings(),
        pytest.raises(DataFileError, match=r"None of the \d+ trajectories"),
    ):
        warnings.simplefilter("ignore")
        for _ in range(500):
            near.get_batch(5)


def test_a_denied_upload_raises_one_error(folder, tmp_path):
    store_at(tmp_path, "store")
    refused = refuse(
        ClientError("ExpiredToken", 400), lambda path, start, stop: path.endswith(".h5"), Store
    )
    with pytest.raises(AccessError, match=f"denies access to .*{EXPIRED}"):
        push(folder, "store://walk", remote=OPTIONS)
    assert len(set(refused)) == len(refused)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("the line is down"),
        FileNotFoundError("/bucket/403/forbidden.h5"),
        OSError("500 Internal Server Error at /runs/401/x.h5"),
        TimeoutError("no answer within 403 s"),
        OSError(
            "An error occurred (SlowDown) when calling the GetObject operation: Reduce your request rate"
        ),
        Exception("/runs/forbidden: no such run"),
        OSError(5, "Please reduce your request rate"),
        ValueError("expected 403 bytes, got 401"),
    ],
    ids=str,
)
def test_other_errors_do_not_count_as_denied(error):
    assert denial(error) is None


@pytest.mark.parametrize(
    "error",
    [
        OSError("An error occurred (403) when calling the HeadObject operation: Forbidden"),
        OSError(5, "An error occurred (ExpiredToken) when calling the GetObject operation"),
        OSError("SignatureDoesNotMatch: the signature that was computed does not match"),
        Exception("ExpiredTokenException: the security token in the request is expired"),
        RuntimeError("Invalid authentication credentials"),
    ],
    ids=str,
)
def test_denied_requests_are_recognized_by_the_error_text(error):
    assert denial(error) is error


def after(num_requests: int):
    """Return a condition of `refuse` that is true for all requests of bytes except the first
    few.
    """
    left = iter(range(num_requests))
    return lambda path, start, stop: stop is not None and next(left, None) is None


@pytest.mark.each_value
@pytest.mark.parametrize(
    "error", [REFUSALS["permission"], ConnectionError(EXPIRED)], ids=["refused", "unanswered"]
)
@pytest.mark.parametrize(
    "to", ["rollout-data", "trajectory-folders", "minari", "d4rl", "robomimic", "lerobot"]
)
def test_a_conversion_that_its_store_stops_raises_and_is_resumed(tmp_path, to, error):
    if to == "lerobot":
        pytest.importorskip("pyarrow")
    record(tmp_path / "walk", [100] * 6, num_envs=1)
    url = lagging(tmp_path / "walk")
    options = {"fps": 20} if to == "lerobot" else {}
    remote = RemoteOptions(num_retries=0, chunk_bytes=4096, num_chunks=1)
    source = rollout_data.open(url, remote=remote)
    refuse(error, after(2))
    with pytest.raises(UnansweredError, match=EXPIRED):
        rollout_data.convert(source, tmp_path / "made", to, progress=False, **options)
    LaggingFileSystem.fails = staticmethod(lambda *request: None)
    conversion = rollout_data.convert(url, tmp_path / "made", to, progress=False, **options)
    assert conversion.num_episodes == 6 and not conversion.problems
    rollout_data.convert(url, tmp_path / "at once", to, progress=False, **options)
    resumed, whole = (rollout_data.open(tmp_path / name) for name in ("made", "at once"))
    for got, expected in zip(resumed, whole, strict=True):
        assert np.array_equal(expected.read("action"), got.read("action"))


CALLS = {
    "merge": lambda source, place: rollout_data.merge([source], place / "out"),
    "split": lambda source, place: rollout_data.split(source, {"train": 1.0}, place / "out"),
    "doctor": lambda source, place: rollout_data.doctor(source),
    "report": lambda source, place: rollout_data.report(source, place / "out.html"),
    "table": lambda source, place: source.table,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_calls_that_a_store_stops_raise_and_leave_nothing(tmp_path, call):
    record(tmp_path / "walk", [100] * 6, num_envs=1)
    remote = RemoteOptions(num_retries=0, chunk_bytes=4096, num_chunks=1)
    source = rollout_data.open(lagging(tmp_path / "walk"), remote=remote)
    refuse(REFUSALS["permission"], after(2))
    with pytest.raises(AccessError, match=EXPIRED):
        call(source, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["walk"]


def test_windows_without_a_readable_row_raise(tmp_path):
    record(tmp_path / "walk", [40] * 6, num_envs=2)
    far = WindowDataset(lagging(tmp_path / "walk"), 4, on_error="skip", remote=OPTIONS)
    for path in (tmp_path / "walk").glob("*.h5"):
        path.unlink()
    with warnings.catch_warnings(), pytest.raises(DataFileError, match="and none is readable"):
        warnings.simplefilter("ignore")
        for _ in WindowLoader(far, 16):
            pass


@pytest.mark.parametrize("is_far", [False, True])
def test_a_report_without_an_episode_that_can_be_read_is_one_error(tmp_path, is_far):
    record(tmp_path / "walk", [30, 25, 40], num_envs=1)
    source = rollout_data.open(lagging(tmp_path / "walk") if is_far else tmp_path / "walk")
    for path in (tmp_path / "walk").glob("*.h5"):
        path.unlink()
    with warnings.catch_warnings(record=True) as printed:
        warnings.simplefilter("always")
        with pytest.raises(DataFileError, match="has 3 episodes, and none is readable"):
            rollout_data.report(source, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
    # Means of no values
    assert not [warning for warning in printed if warning.category is RuntimeWarning]
