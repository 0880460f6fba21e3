"""One small local cluster of Ray for all tests of this folder.

They skip if Ray is not installed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray", reason="ray is not installed: pip install 'rollout-data[ray]'")
    import ray
    import ray.data

    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=256 << 20,
        log_to_driver=False,
        logging_level="ERROR",
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray").setLevel(logging.ERROR)
    yield ray
    ray.shutdown()
