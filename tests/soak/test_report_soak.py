"""The page about a million frames: its size, the memory for making it, and the time until a browser
has drawn it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rollout_data import RolloutWriter
from tests.reporting.browser import Visit, started

pytestmark = pytest.mark.soak
NUM_ENVS, NUM_ROUNDS, NUM_STEPS, WIDTH = 20, 100, 500, 17
MAX_PAGE_BYTES, MAX_MEMORY_BYTES, MAX_READY_S = 5_000_000, 500_000_000, 3.0
SCRIPT = """
import resource, sys, time
from rollout_data import report
start = time.perf_counter()
report(sys.argv[1], sys.argv[2])
print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record 2,000 episodes of 500 frames: 17 observations, 6 actions, rewards."""
    rng, made = np.random.default_rng(0), tmp_path_factory.mktemp("data") / "big"
    with RolloutWriter(made, NUM_ENVS, durable=False, metadata={"frame_rate_hz": 20}) as writer:
        for _ in range(NUM_ROUNDS):
            phase = np.arange(NUM_STEPS)[:, None, None] * np.linspace(0.02, 0.3, WIDTH)
            phase = phase + rng.uniform(0, 6, (1, NUM_ENVS, WIDTH))
            observation = (np.sin(phase) + rng.normal(0, 0.2, phase.shape)).astype(np.float32)
            done = np.zeros((NUM_STEPS, NUM_ENVS), bool)
            done[-1] = True
            action, reward = np.tanh(observation[..., :6] * 2), observation[..., 0]
            writer.add_rollout(observation=observation, action=action, reward=reward, done=done)
    return made


def test_a_report_of_a_million_frames_is_small_and_drawn_quickly(folder: Path) -> None:
    page = folder.parent / "page.html"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, folder, page], capture_output=True, text=True, check=True
    )
    duration_s, memory_bytes = map(float, done.stdout.split())
    with started() as browser:
        visits = [Visit(browser, page) for _ in range(3)]
        ready_s = (
            min(
                int(visit.page.evaluate("document.documentElement.dataset.ready"))
                for visit in visits
            )
            / 1000
        )
        assert all(visit.errors == [] and visit.requests == [page.as_uri()] for visit in visits)
    size = page.stat().st_size
    print(
        f"made in {duration_s:.1f} s, {memory_bytes / 1e6:.0f} MB; {size / 1e6:.2f} MB, drawn after {ready_s:.2f} s"
    )
    assert size < MAX_PAGE_BYTES and memory_bytes < MAX_MEMORY_BYTES and ready_s < MAX_READY_S
