"""The examples run, and print, draw and record their results.

`make demo` shows how well they learn.
"""

from __future__ import annotations

import re
import resource
from pathlib import Path

import pytest
import torch

from rollout_data import RolloutDataset, RolloutWriter
from tests.examples.running import EXAMPLES, run

#: The time-out is long, because a busy machine needs minutes for half a minute of work.
pytestmark = pytest.mark.timeout(900)

#: Seconds of processor time, so that a busy machine does not fail the test.
MAX_QUICK_S = 60


def processor_s() -> float:
    """Return the processor time of ended child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run all steps once. Return the folder and the output."""
    pytest.importorskip("gymnasium")
    folder = tmp_path_factory.mktemp("job")
    before_s = processor_s()
    text = run(folder, "record_stream_learn.py", "--quick")
    assert processor_s() - before_s < MAX_QUICK_S
    return folder, text


def test_the_job_prints_returns_and_throughput(demo: tuple[Path, str]) -> None:
    _, text = demo
    for policy in ("random", "expert (PPO)", "clone"):
        row = next(line for line in text.splitlines() if line.startswith(policy))
        assert len(re.findall(r"-?[\d.]+", row)) == 5
    for name in ("DataLoader, batches", "RolloutWriter, durable", "memcpy of the same"):
        row = next(line for line in text.splitlines() if line.startswith(name))
        assert float(row[42:].split()[0].replace(",", "")) > 0


def test_the_job_leaves_a_picture_and_a_recording(demo: tuple[Path, str]) -> None:
    folder, text = demo
    assert (folder / "demo" / "report.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "demo" / "report.png").stat().st_size > 20_000
    assert "report.html: open it first" in text
    assert "VAL01" in (folder / "demo" / "report.html").read_text()
    dataset = RolloutDataset(folder / "demo" / "data", 4, device="cpu")
    assert dataset.num_trajectories >= 48
    assert f"{dataset.num_frames:,}" in text
    assert sorted(path.name for path in (folder / "demo").iterdir()) == [
        "data",
        "report.html",
        "report.png",
    ]


def test_playback_shows_every_frame(demo: tuple[Path, str]) -> None:
    folder, _ = demo
    lines = run(folder, "playback.py", "demo/data", "7").splitlines()
    assert sum("rewards" in line for line in lines) == 7
    assert sum("begins a trajectory" in line for line in lines) >= 4


def test_playback_needs_no_rewards(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path / "data", 4) as writer:
        for step in range(3):
            writer.add(
                observation=torch.zeros(4, 5), action=torch.zeros(4, 1), done=[step == 2] * 4
            )
    lines = run(tmp_path, "playback.py", "data", "3").splitlines()
    assert sum("rewards none" in line for line in lines) == 3


def test_ppo_returns_are_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gymnasium")
    monkeypatch.syspath_prepend(EXAMPLES)
    import ppo
    import torch

    returns: list[float] = []
    settings = ppo.Settings(
        num_envs=4, num_steps=32, num_updates=3, num_epochs=2, num_mini_batches=2
    )
    policy = ppo.train(
        "InvertedDoublePendulum-v5", settings, lambda update, finished: returns.extend(finished)
    )
    assert len(returns) > 5 and all(0 < value < 1000 for value in returns)
    assert all(torch.isfinite(parameter).all() for parameter in policy.parameters())


def test_a_categorical_policy_learns_to_balance_the_pole(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    before_s = processor_s()
    text = run(tmp_path, "categorical_ppo.py")
    assert processor_s() - before_s < MAX_QUICK_S
    actual = re.search(r"without exploration: (\d+) of 500", text)
    assert actual and int(actual[1]) >= 475


def test_the_examples_are_short_enough_to_copy() -> None:
    lengths = {
        name: len((EXAMPLES / name).read_text().splitlines()) for name in ("ppo.py", "playback.py")
    }
    assert lengths["ppo.py"] < 200 and lengths["playback.py"] <= 30
