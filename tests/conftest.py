"""Fixtures and options of all tests: numbers of examples and combinations, and a pretended GPU.

`make test` runs a part of the examples and combinations. `make fuzz` runs all of them, and many
more examples.
"""

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.pretend_cuda import PretendCuda

# Processes that tests start share compiled files. Compiling the library again takes half a second
# in each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

#: Share of the examples in `@settings` that a test runs by default.
DEFAULT_SHARE = 1 / 3
#: No test runs fewer examples than this, unless its `@settings` ask for fewer.
MIN_EXAMPLES = 5
#: `make fuzz` multiplies the number of examples of each test by this.
FUZZ_FACTOR = 20
#: Attribute in which hypothesis keeps the `@settings` of a test. A test without it follows the
#: profile.
ASKED = "_hypothesis_internal_use_settings"

#: Operations after which an event of the late device completes: more than two calls have.
LATENESS = 100

# A busy machine must not fail a test.
BUSY = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile(
    "default", max_examples=round(100 * DEFAULT_SHARE), derandomize=True, **BUSY
)
settings.register_profile("fuzz", max_examples=100 * FUZZ_FACTOR, **BUSY)
settings.load_profile("default")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_fuzz = config.getoption("--hypothesis-profile") == "fuzz"
    scaled = set()
    for item in items:
        if item.get_closest_marker("real_gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        # A method's attributes are its function's; all parameters of a test share one function.
        test = getattr(getattr(item, "obj", None), "__func__", getattr(item, "obj", None))
        asked = getattr(test, ASKED, None)
        if asked is None or test in scaled:
            continue
        scaled.add(test)
        if is_fuzz:
            setattr(
                test,
                ASKED,
                settings(asked, max_examples=FUZZ_FACTOR * asked.max_examples, derandomize=False),
            )
        else:
            fewer = max(
                round(DEFAULT_SHARE * asked.max_examples), min(MIN_EXAMPLES, asked.max_examples)
            )
            setattr(test, ASKED, settings(asked, max_examples=fewer))
    if not is_fuzz:
        deselect_combinations(config, items)


def pytest_collection_finish() -> None:
    """Exclude the imported modules and collected tests from garbage collection.

    Tests that call `gc.collect()` repeatedly spent seconds on these objects.
    """
    gc.collect()
    gc.freeze()


def deselect_combinations(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of each test marked `each_value`, keep a few combinations that have every value of every
    parameter.
    """
    combinations: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("each_value"):
            combinations.setdefault(item.nodeid.partition("[")[0], []).append(item)
    deselected = set()
    for candidates in combinations.values():
        deselected |= set(candidates) - set(covering(candidates))
    if deselected:
        config.hook.pytest_deselected(items=[item for item in items if item in deselected])
        items[:] = [item for item in items if item not in deselected]


def covering(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return items that contain all parameter values of `items`, those with most new values first."""
    values = {item: parameter_values(item) for item in items}
    missing = set().union(*values.values())
    chosen = []
    while missing:
        best = max(items, key=lambda item: len(values[item] & missing))
        chosen.append(best)
        missing -= values[best]
    return chosen


def parameter_values(item: pytest.Item) -> set[tuple[object, ...]]:
    """Return one entry per `parametrize` mark and per parametrized fixture of an item.

    Arguments that one mark sets together are one value: each row of a table runs.
    """
    parameters = dict(item.callspec.params)
    values = set()
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        names = names.replace(" ", "").split(",") if isinstance(names, str) else names
        values.add((*names, *(id(parameters.pop(name)) for name in names)))
    for name, value in parameters.items():
        values.add((name, id(value)))
    return values


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder for `TMPDIR`.

    Sockets need names of at most 107 bytes, and `tmp_path` is too long for them.
    """
    with tempfile.TemporaryDirectory(prefix="rd_") as name:
        yield Path(name)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Let SIGINT raise `KeyboardInterrupt`, also if a shell has started the tests with SIGINT
    ignored.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def cuda_device(request: pytest.FixtureRequest) -> Iterator[PretendCuda | None]:
    """The pretended device in tests marked `gpu`, unless there is a real device."""
    if request.node.get_closest_marker("gpu") is None or torch.cuda.is_available():
        yield None
        return
    with PretendCuda() as device:
        yield device


@pytest.fixture(params=["in time", "late"])
def any_device(request: pytest.FixtureRequest, cuda_device: PretendCuda | None) -> Iterator[None]:
    """The device. On the pretended device the test runs again with late events."""
    if request.param == "late":
        if cuda_device is None:
            pytest.skip("a real device completes its events when it does")
        cuda_device.lateness = LATENESS
    yield
