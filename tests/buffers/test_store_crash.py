"""kill -9 while stores are saved: what is left is whole, and the last complete save or a newer one."""

from __future__ import annotations

from pathlib import Path

from tests.killed import kill_one_at, workers

from .crash import NAMES, WORK, check_what_is_left, plain, states_of


def test_each_store_is_killed_with_two_states_that_differ() -> None:
    for name in NAMES:
        first, second = (plain(store.state_dict()) for store in states_of(name))
        assert first != second, name


def test_a_killed_save_leaves_the_last_complete_one_or_a_newer_one(tmp_path: Path) -> None:
    with workers(WORK) as process:
        written = []
        for seed in range(len(NAMES)):
            kill_one_at(process, tmp_path / str(seed), seed, tmp_path / str(seed) / ".begun")
            written.append(check_what_is_left(tmp_path / str(seed), seed))
    assert sum(count > 0 for count in written) > len(NAMES) / 2
