"""The harness reports its measurements and all errors.

An error of one case does not affect the others.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import harness, peers, report
from benchmarks.harness import LIMIT, OURS, PEER, Case, Contender


def sleeper(duration_s: float) -> harness.Call:
    return lambda: time.sleep(duration_s)


def refuse() -> harness.Call:
    raise peers.PeerMissing("nosuchpeer: ModuleNotFoundError: no module")


def explode() -> harness.Call:
    def call() -> object:
        raise OSError("the disk is gone")

    return call


def example_case() -> Case:
    return Case(
        "wait",
        num_bytes=1000,
        contenders=(
            Contender("bare", lambda: sleeper(0.001), LIMIT),
            Contender("twice", lambda: sleeper(0.002), OURS, reach=1e-6),
            Contender("absent", refuse, PEER),
            Contender("broken", explode, PEER),
        ),
    )


def test_every_contender_has_five_repetitions_and_a_ratio_to_the_limit() -> None:
    bare, twice, absent, broken = harness.measure(example_case())
    assert len(bare.times_s) >= 5 and len(twice.times_s) >= 5
    assert bare.ratio == 1.0
    assert twice.ratio == pytest.approx(twice.median_s / bare.median_s)
    assert twice.is_reached is False and bare.is_reached is None
    assert absent.skipped and not absent.times_s
    assert broken.failed == "OSError: the disk is gone"


def test_before_runs_untimed_before_every_repetition_and_close_at_the_end() -> None:
    events: list[str] = []
    contender = Contender(
        "a", lambda: lambda: events.append("call"), LIMIT,
        before=lambda: events.append("before"), close=lambda: events.append("close"),
    )  # fmt: skip
    harness.measure(Case("c", (contender,), num_repeats=5))
    assert events == ["before", "call"] * 5 + ["close"]


def test_a_failing_workload_keeps_the_earlier_measurements() -> None:
    def cases():
        yield example_case()
        raise ValueError("no data")

    timings = harness.run(cases(), "x")
    assert [timing.failed for timing in timings][-1] == "ValueError: no data"
    assert timings[0].ratio == 1.0


def test_the_report_shows_figures_skips_and_failures(tmp_path: Path) -> None:
    timings = harness.measure(example_case())
    text = report.table(timings)
    for expected in ("skipped: nosuchpeer", "FAILED: OSError: the disk is gone", "MISSED", "1.00"):
        assert expected in text
    content = json.loads(report.write_json("x", timings, tmp_path).read_text())
    assert content["machine"]["torch"] and len(content["timings"]) == 4
    assert report.draw("x", timings, tmp_path).stat().st_size > 5000


def test_an_unknown_workload_raises_with_the_known_workloads(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        command.main(["nosuch"])
    assert "no workload nosuch; there are playback" in capsys.readouterr().err


def test_peers_are_the_bench_extra_and_each_is_pinned() -> None:
    pins = (peers.ROOT / "constraints.txt").read_text().splitlines()
    assert len(peers.distributions()) >= 10
    for name in peers.distributions():
        assert any(pin.startswith(f"{name}==") for pin in pins), name
