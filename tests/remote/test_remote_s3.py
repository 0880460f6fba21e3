"""Windows and playback of a bucket, from an S3 server in another process of this machine."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import deque
from importlib.util import find_spec

import pytest

# Where they are installed but lack something, the tests fail.
if not all(map(find_spec, ("s3fs", "moto", "boto3"))):
    pytest.skip("needs s3fs, moto and boto3", allow_module_level=True)

import boto3
import torch

from rollout_data import RemoteOptions, RolloutDataset, WindowDataset, WindowLoader, push
from storage.errors import DataFileError

from .places import check_epoch, same, uneven

KEYS = {"key": "none", "secret": "none"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a server that keeps buckets in memory."""
    command = [sys.executable, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        address = next(
            line.rsplit(maxsplit=1)[1] for line in process.stdout if "Running on" in line
        )
        # Its log is read on, or it would wait for room in the pipe.
        threading.Thread(target=deque, args=(process.stdout, 0), daemon=True).start()
        try:
            yield address
        finally:
            process.kill()


def bucket_of(server, name):
    client = boto3.client(
        "s3",
        endpoint_url=server,
        aws_access_key_id="none",
        aws_secret_access_key="none",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=name)
    return client


def test_a_bucket_is_read_like_the_local_folder(server, tmp_path):
    folder = uneven(tmp_path / "walk")
    bucket_of(server, "reading")
    storage = {**KEYS, "endpoint_url": server}
    small = RemoteOptions(chunk_bytes=4096, num_chunks=3, num_requests=8, storage_options=storage)
    num_blocks = len(list(folder.glob("*.h5")))
    assert [push(folder, "s3://reading/runs/walk", remote=small) for _ in range(2)] == [
        num_blocks,
        0,
    ]
    with pytest.raises(DataFileError, match=r"FileNotFoundError: .* bucket.*the URL is writable"):
        push(folder, "s3://no-such-bucket/walk", remote=small)
    near, far = WindowDataset(folder, 4), WindowDataset("s3://reading/runs/walk", 4, remote=small)
    loader = check_epoch(near, far, 64, seed=1)
    batches = iter(loader)
    next(batches)
    other = WindowLoader(WindowDataset("s3://reading/runs/walk", 4, remote=small), 64, seed=1)
    other.load_state_dict(loader.state_dict())
    assert same(next(batches), next(iter(other)))
    played = RolloutDataset("s3://reading/runs/walk", 4, device="cpu", remote=small)
    expected = RolloutDataset(folder, 4, device="cpu")
    for _ in range(10):
        assert torch.equal(played.get_batch(7).observation, expected.get_batch(7).observation)


def test_a_block_is_uploaded_only_if_its_name_is_free(server, tmp_path):
    folder, client = uneven(tmp_path / "walk", 10), bucket_of(server, "taken")
    name = min(path.name for path in folder.glob("*.h5"))
    client.put_object(Bucket="taken", Key=f"walk/{name}", Body=b"something else")
    options = RemoteOptions(storage_options={**KEYS, "endpoint_url": server})
    with pytest.raises(DataFileError, match="has other content"):
        push(folder, "s3://taken/walk", remote=options)
    assert client.get_object(Bucket="taken", Key=f"walk/{name}")["Body"].read() == b"something else"
