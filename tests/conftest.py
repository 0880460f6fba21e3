"""Shared by all tests: profiles for the property tests, and a pretended GPU for the tests that need one."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.pretend_cuda import PretendCuda

# Processes that tests start keep what they compile; to compile the library anew takes each half a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

#: `make fuzz` multiplies the number of examples of each test by this.
FUZZ_FACTOR = 20
#: Where hypothesis keeps what `@settings` asked for; a test that did not ask follows the profile.
ASKED = "_hypothesis_internal_use_settings"

#: Operations after which an event of the late device completes: more than two calls have.
LATENESS = 100

# A busy machine is no reason to fail.
BUSY = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("default", derandomize=True, **BUSY)
settings.register_profile("fuzz", max_examples=100 * FUZZ_FACTOR, **BUSY)
settings.load_profile("default")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_fuzz = config.getoption("--hypothesis-profile") == "fuzz"
    for item in items:
        if item.get_closest_marker("real_gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        asked = getattr(getattr(item, "obj", None), ASKED, None)
        if is_fuzz and asked is not None:
            # A method's attributes are its function's.
            test = getattr(item.obj, "__func__", item.obj)
            setattr(test, ASKED, settings(asked, max_examples=FUZZ_FACTOR * asked.max_examples, derandomize=False))


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder for `TMPDIR`: sockets below it have names of at most 107 bytes, for which `tmp_path` leaves no room."""
    with tempfile.TemporaryDirectory(prefix="rd_") as name:
        yield Path(name)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Let SIGINT raise `KeyboardInterrupt`, also if a shell has started the tests with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def cuda_device(request: pytest.FixtureRequest) -> Iterator[PretendCuda | None]:
    """The pretended device in tests marked `gpu`, where there is no real one."""
    if request.node.get_closest_marker("gpu") is None or torch.cuda.is_available():
        yield None
        return
    with PretendCuda() as device:
        yield device


@pytest.fixture(params=["in time", "late"])
def any_device(request: pytest.FixtureRequest, cuda_device: PretendCuda | None) -> Iterator[None]:
    """The device, and the pretended one also where events complete late."""
    if request.param == "late":
        if cuda_device is None:
            pytest.skip("a real device completes its events when it does")
        cuda_device.lateness = LATENESS
    yield
