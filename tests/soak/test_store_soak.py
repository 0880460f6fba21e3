"""Every store with kill -9, flipped bytes and full disks, many more times than in `make test`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.buffers.crash import NAMES, WORK, check_what_is_left
from tests.buffers.every_store import MAKERS, in_child
from tests.killed import kill_one_at, workers


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_stores_killed_at_260_random_instants_leave_whole_saves(tmp_path: Path) -> None:
    with workers(WORK) as process:
        written = []
        for seed in range(1000, 1000 + 20 * len(NAMES)):
            kill_one_at(process, tmp_path / str(seed), seed, tmp_path / str(seed) / ".begun")
            written.append(check_what_is_left(tmp_path / str(seed), seed))
    print(
        f"killed {len(written)} savers: {sum(count > 0 for count in written)} had saved, {sum(written)} times in all"
    )


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MAKERS)
def test_each_seventh_byte_flipped_is_an_error_or_outside_of_the_data(
    tmp_path: Path, name: str
) -> None:
    MAKERS[name]().save(tmp_path / "b")
    number = sum(path.stat().st_size for path in (tmp_path / "b").iterdir()) * 2 // 7
    code = "flip_and_load(Path(sys.argv[1]), lambda path: load(path).state_dict(), 7, True)"
    in_child(code, tmp_path / "b", timeout_s=1500)
    print(f"{name}: about {number} damaged saves loaded as they were, or were one error")


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", MAKERS)
def test_a_full_disk_at_any_of_forty_sizes_keeps_the_earlier_save(
    tmp_path: Path, name: str
) -> None:
    MAKERS[name]().save(tmp_path / "b")
    largest = max(path.stat().st_size for path in (tmp_path / "b").iterdir())
    code = (
        "for number in range(40):\n"
        "    save_onto_a_full_disk(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) * number // 40)\n"
    )
    in_child(code, tmp_path / "b", name, largest)
