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

#: Fraction of the hypothesis examples in `@settings` that a test runs by default.
DEFAULT_SHARE = 1 / 3
#: Minimum number of hypothesis examples of a test, unless its `@settings` ask for fewer.
MIN_EXAMPLES = 5
#: Factor by which `make fuzz` multiplies the number of hypothesis examples of each test.
FUZZ_FACTOR = 20
#: Attribute of a test function in which hypothesis stores the test's `@settings`. A test without
#: `@settings` uses the registered profile.
ASKED = "_hypothesis_internal_use_settings"

#: Number of operations after which an event of a late pretended device completes. It is larger than
#: the number of operations in two calls of the library.
LATENESS = 100

# No time limits, so that no test fails because the machine is busy.
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
        # All parameters of a test share one function, whose settings are changed only once. The
        # attributes of a method can be set only on its function.
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
    """Deselect combinations of parameters in tests marked `each_value`, to save time.

    The remaining combinations of a test contain every value of every parameter.
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
    """Choose few test items that together have all parameter values of `items`."""
    values = {item: parameter_values(item) for item in items}
    missing = set().union(*values.values())
    chosen = []
    while missing:
        best = max(items, key=lambda item: len(values[item] & missing))
        chosen.append(best)
        missing -= values[best]
    return chosen


def parameter_values(item: pytest.Item) -> set[tuple[object, ...]]:
    """Return the parameter values of a test item, one for each `parametrize` mark or fixture.

    Several arguments that one mark sets are one value, so that each row of a table is run.
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
    """A folder with a short path, for `TMPDIR`.

    A socket path has at most 107 bytes, and sockets in `tmp_path` would have longer paths.
    """
    with tempfile.TemporaryDirectory(prefix="rd_") as name:
        yield Path(name)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Make SIGINT raise `KeyboardInterrupt`, even if a shell started the tests with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def cuda_device(request: pytest.FixtureRequest) -> Iterator[PretendCuda | None]:
    """The pretended CUDA device in tests marked `gpu`; None if the machine has a real GPU."""
    if request.node.get_closest_marker("gpu") is None or torch.cuda.is_available():
        yield None
        return
    with PretendCuda() as device:
        yield device


@pytest.fixture(params=["in time", "late"])
def any_device(request: pytest.FixtureRequest, cuda_device: PretendCuda | None) -> Iterator[None]:
    """Run a test twice on the pretended device: events complete at once, or after a delay.

    A real device runs the test only once.
    """
    if request.param == "late":
        if cuda_device is None:
            pytest.skip("a real device completes its events when it does")
        cuda_device.lateness = LATENESS
    yield
