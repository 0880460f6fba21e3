"""For minutes, two collectors record into one folder with retention, and two learners play it.

No use of resources grows.

`make soak` runs it for SOAK_S seconds, the daily tests for 20. A learner stops reading for a while
in between.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_data import RolloutDataset, RolloutWriter

NUM_ENVS, NUM_STEPS, WIDTH = 8, 10, 32
KEPT_BYTES = 3_000_000
#: Blocks stay or go as a whole, and each collector finishes its own.
MAX_FOLDER_BYTES = 3 * KEPT_BYTES
#: What may come on top of what memory, maps and descriptors were after a sixth of the time.
GROWTH, SHORT_GROWTH, SHORT_S = 0.05, 0.35, 200.0

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="memory is read from /proc"
)


def usage() -> tuple[int, int, int]:
    """Return the bytes of memory of this process (mapped files included), its number of mappings,
    and of descriptors.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    num_maps = Path("/proc/self/maps").read_text().count("\n")
    return pages * os.sysconf("SC_PAGE_SIZE"), num_maps, len(os.listdir("/proc/self/fd"))


class Watch:
    """The use of memory, maps and descriptors of this process, taken four times a second."""

    def __init__(self, duration_s: float) -> None:
        self.start_s, self.duration_s, self.samples, self.due_s = (
            time.monotonic(),
            duration_s,
            [],
            0.0,
        )

    def look(self) -> float:
        """Take a sample if it is time. Return the seconds since the start."""
        elapsed_s = time.monotonic() - self.start_s
        if elapsed_s >= self.due_s:
            self.samples.append((elapsed_s, *usage()))
            self.due_s = elapsed_s + 0.25
        return elapsed_s

    def report(self) -> dict[str, list[float]]:
        """Return medians after a sixth of the time, and at the end."""
        early = [item[1:] for item in self.samples if 1 / 6 <= item[0] / self.duration_s < 1 / 3]
        late = [item[1:] for item in self.samples if item[0] / self.duration_s >= 5 / 6]
        names = ("bytes", "maps", "descriptors")
        columns = zip(names, zip(*early, strict=True), zip(*late, strict=True), strict=True)
        return {
            name: [statistics.median(before), statistics.median(after)]
            for name, before, after in columns
        }


def in_process(act: Any, name: str, reports: Any, *arguments: Any) -> None:
    """Run a function in a process. Report its result or its error."""
    torch.set_num_threads(1)
    try:
        reports.put((name, act(*arguments), None))
    except BaseException:  # noqa: BLE001 - the test raises it
        reports.put((name, None, traceback.format_exc()))


def collect(folder: Path, number: int, duration_s: float, is_over: Any) -> dict[str, Any]:
    """Record trajectories whose frames encode (collector, trajectory, frame, length)."""
    chance, watch = torch.Generator().manual_seed(number), Watch(duration_s)
    trajectory, frame = torch.arange(NUM_ENVS), torch.zeros(NUM_ENVS, dtype=torch.long)
    length = torch.randint(20, 60, (NUM_ENVS,), generator=chance)
    options: dict[str, Any] = {
        "durable": False,
        "block_age_s": 0.3,
        "retention": {"bytes": KEPT_BYTES},
    }
    with RolloutWriter(folder, NUM_ENVS, **options) as writer:
        while not is_over.is_set():
            observation = torch.zeros(NUM_ENVS, WIDTH)
            observation[:, 0], observation[:, 1], observation[:, 2], observation[:, 3] = (
                number,
                trajectory,
                frame,
                length,
            )
            done = frame == length - 1
            writer.add(
                observation=observation,
                action=-observation,
                reward=observation[:, 2],
                terminated=done,
            )
            frame = torch.where(done, 0, frame + 1)
            length = torch.where(done, torch.randint(20, 60, (NUM_ENVS,), generator=chance), length)
            trajectory = torch.where(done, trajectory + NUM_ENVS, trajectory)
            watch.look()
            time.sleep(0.004)
    return {"trajectories": int(trajectory.max()), **watch.report()}


def learn(folder: Path, duration_s: float, stops: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Play the folder for a while. A learner that `stops` pauses for a sixth of the time."""
    while not list(folder.glob("rollout_*.h5")):
        time.sleep(0.05)
    watch, seen, num_batches, latest = Watch(duration_s), set(), 0, -1.0
    dataset = RolloutDataset(folder, NUM_ENVS, 0, device="cpu", refresh_s=0.5, **options)
    passes, longest_s = [-1, -1, -1], 0.0
    while (elapsed_s := watch.look()) < duration_s:
        if stops and elapsed_s > duration_s / 3:
            time.sleep(duration_s / 6)
            stops = False
        start_s = time.monotonic()
        batch = dataset.get_batch(NUM_STEPS)
        longest_s = max(longest_s, time.monotonic() - start_s)
        passes = [*passes[1:], dataset.num_dataset_looped]
        check(batch, seen, is_within_a_pass=passes[0] == passes[-1])
        num_batches, latest = (
            num_batches + 1,
            max(latest, float(batch.observation[..., 1][batch.valid].max())),
        )
        time.sleep(0.004)
    # That retention has cut trajectories
    assert dataset.num_lost_trajectories == 0 and len(dataset.problems) <= 1
    about = {
        "batches": num_batches,
        "passes": passes[-1],
        "latest": latest,
        "longest_ms": round(1e3 * longest_s),
    }
    return {**about, **watch.report()}


def check(batch: Any, seen: set[tuple[float, ...]], is_within_a_pass: bool) -> None:
    """Check that frames follow each other, fields agree, and no trajectory begins twice in a
    pass.
    """
    rows, following = batch.observation, batch.next_observation
    assert (
        batch.valid.all()
        and torch.equal(batch.action, -rows)
        and torch.equal(batch.reward, rows[..., 2])
    )
    is_inside = rows[..., 2] < rows[..., 3] - 1
    assert torch.equal(batch.is_last, ~is_inside) and torch.equal(batch.is_first, rows[..., 2] == 0)
    step = torch.zeros(WIDTH)
    step[2] = 1
    assert torch.equal(following[is_inside], rows[is_inside] + step)
    begun = [tuple(item) for item in rows[batch.is_first][:, :2].tolist()]
    # Now or a batch ago: which of them were dealt before the end of the pass is not known
    if not is_within_a_pass:
        seen.clear()
        return
    assert len(set(begun)) == len(begun) and seen.isdisjoint(begun), (
        "a trajectory came twice in a pass"
    )
    seen.update(begun)


def folder_bytes(folder: Path) -> int:
    """Bytes of the blocks of a folder. A block that retention removes meanwhile counts as nothing."""
    num_bytes = 0
    for path in folder.glob("rollout_*.h5"):
        with suppress(FileNotFoundError):
            num_bytes += path.stat().st_size
    return num_bytes


def held_bytes(process: Any, folder: Path) -> int:
    """Return the bytes of deleted files of a folder that a process still uses."""
    lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    spans = [
        line.split()[0].split("-")
        for line in lines
        if str(folder) in line and line.endswith("(deleted)")
    ]
    return sum(int(stop, 16) - int(start, 16) for start, stop in spans)


@pytest.mark.parametrize(
    "duration_s",
    [
        20.0,
        pytest.param(float(os.environ.get("SOAK_S", "1800")), marks=pytest.mark.soak, id="soak"),
    ],
)
def test_collectors_and_learners_share_a_folder_with_bounded_memory_and_files(
    tmp_path: Path, duration_s: float
) -> None:
    context = multiprocessing.get_context("spawn")
    is_over, reports, folder = context.Event(), context.Queue(), tmp_path / "data"
    folder.mkdir()
    in_order, newest = {"random_shuffle_traj_order": True}, {"keep_latest_n_trajs": 32}
    jobs: dict[str, tuple[Any, ...]] = {
        "collector 0": (collect, folder, 0, duration_s, is_over),
        "collector 1": (collect, folder, 1, duration_s, is_over),
        "learner 0": (learn, folder, duration_s, False, in_order),
        "learner 1": (learn, folder, duration_s, True, newest),
    }
    processes = {
        name: context.Process(target=in_process, args=(act, name, reports, *arguments))
        for name, (act, *arguments) in jobs.items()
    }
    most_bytes = most_held = 0
    for process in processes.values():
        process.start()
    try:
        while (
            any(processes[name].is_alive() for name in ("learner 0", "learner 1"))
            and reports.empty()
        ):
            most_bytes = max(most_bytes, folder_bytes(folder))
            for name in ("learner 0", "learner 1"):
                if processes[name].is_alive():
                    most_held = max(most_held, held_bytes(processes[name], folder))
            time.sleep(0.25)
        actual = dict(judged(reports.get(timeout=60)) for _ in range(2))
    finally:
        is_over.set()
    actual |= dict(judged(reports.get(timeout=60)) for _ in range(2))
    for process in processes.values():
        process.join()
    print(
        "",
        *(f"{name}: {actual[name]}" for name in jobs),
        f"folder {most_bytes}, held {most_held} bytes",
        sep="\n",
    )
    assert most_bytes < MAX_FOLDER_BYTES and most_held < MAX_FOLDER_BYTES
    growth = GROWTH if duration_s >= SHORT_S else SHORT_GROWTH
    for name, report in actual.items():
        for what in ("bytes", "maps", "descriptors"):
            before, after = report[what]
            # The folder, and the block that is being written or opened
            open_now = 2 if what == "descriptors" else 0
            assert after <= before * (1 + growth) + open_now, (
                f"{what} of {name}: {before} after a sixth of the time, then {after}"
            )
    recorded = min(actual[f"collector {number}"]["trajectories"] for number in range(2))
    for number in range(2):
        learner = actual[f"learner {number}"]
        assert learner["latest"] > recorded / 2 and learner["passes"] >= 1


def judged(report: tuple[str, Any, str | None]) -> tuple[str, Any]:
    """Return the name and the figures of a process. Raise its error."""
    name, figures, problem = report
    assert problem is None, f"{name}: {problem}"
    return name, figures
