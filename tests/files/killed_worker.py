"""A loader whose worker is killed, in another process, because torch may report it at any later
time.

`python -m tests.files.killed_worker FOLDER START_METHOD`, for a folder of `record`.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys

import rollout_data
from tests.files.test_one_order import opened, seen


def main(folder: str, start_method: str) -> None:
    options = {"num_transitions_per_env": 2, "dataset_loops": 0, "random_shuffle_traj_order": True}
    source = opened(folder, **options)
    expected = [seen(source.get_batch(2)) for _ in range(200)]
    batches, number = (
        rollout_data.loader(opened(folder, **options), 2, multiprocessing_context=start_method),
        0,
    )
    try:
        for batch in batches:
            assert seen(batch) == expected[number]
            number += 1
            if number == 3:
                multiprocessing.active_children()[0].kill()
    except RuntimeError as error:  # ours, or torch's
        # after our error, torch's error would be raised now
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        assert "has died: " in str(error) or str(error).startswith("DataLoader worker"), error
    again = rollout_data.loader(opened(folder, **options), 2, multiprocessing_context=start_method)
    again.load_state_dict(batches.state_dict())
    following = [seen(batch) for batch, _ in zip(again, range(3), strict=False)]
    # torch may raise its error for a batch that has arrived, but that the loop has not counted yet.
    assert following in (expected[number : number + 3], expected[number + 1 : number + 4])
    print("the next batch followed")


if __name__ == "__main__":
    main(*sys.argv[1:])
