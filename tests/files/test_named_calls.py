"""A wrong argument is named with the class and the call that the user wrote."""

from __future__ import annotations

import pytest

import rollout_data
from rollout_data import RolloutDataset, RolloutFileBase, WindowDataset, WindowLoader, WindowMixture
from storage.errors import UsageError
from tests.files.recorded import record


def stream(folder):
    return RolloutDataset(folder, 1, device="cpu")


def windows(folder):
    return WindowDataset(folder, 2)


CALLS = {
    "call RolloutDataset.set_epoch: expected epoch >= 0, got -1": lambda f: stream(f).set_epoch(-1),
    "call RolloutDataset.get_batch: expected num_transitions_per_env >= 1, got 0": lambda f: stream(f).get_batch(0),
    "call RolloutDataset.get_buffer: expected num_transitions_per_env >= 1, got 0": lambda f: stream(f).get_buffer(0),
    "create a RolloutDataset: expected seed >= 0 and a whole number, got 'a'": lambda f: RolloutDataset(f, 1, seed="a"),
    "create a RolloutDataset: expected num_envs in 1:16777217, got 0": lambda f: RolloutDataset(f, 0),
    "create a RolloutDataset: expected data_dir as a path or a list of paths, got 3": lambda f: RolloutDataset(3, 1),
    "create a RolloutDataset: expected data_dir with at least one data folder": lambda f: RolloutDataset([], 1),
    "create a WindowDataset: expected length in 1:2147483648, got 0": lambda f: WindowDataset(f, 0).frames,
    "create a WindowDataset: expected data_dir as a path or a list of paths, got 3": lambda f: WindowDataset(3),
    "create a WindowLoader: expected batch_size >= 1, got 0": lambda f: WindowLoader(windows(f), 0),
    "create a WindowLoader: expected num_ahead >= 1, got 0": lambda f: WindowLoader(windows(f), 2, num_ahead=0),
    "create a WindowLoader: expected device a torch device": lambda f: WindowLoader(windows(f), 2, device="quantum"),
    "call WindowLoader.set_epoch: expected epoch >= 0, got -1": lambda f: WindowLoader(windows(f), 2).set_epoch(-1),
    "call WindowMixture.sampler: expected num_samples >= 0, got -1": lambda f: WindowMixture([windows(f)]).sampler(-1),
    "call rollout_data.loader: expected num_workers >= 0, got -1": lambda f: rollout_data.loader(stream(f), -1),
    "call rollout_data.open: expected path as a path or a list of paths, got 3": lambda f: rollout_data.open(3),
}


@pytest.mark.parametrize("text", CALLS)
def test_an_error_names_the_class_the_call_and_the_argument(tmp_path, text):
    record(tmp_path, [4, 4])
    with pytest.raises(UsageError) as caught:
        CALLS[text](tmp_path)
    assert str(caught.value).startswith(f"cannot {text}")


def test_a_subclass_of_the_template_is_named_by_its_own_name():
    class Clock(RolloutFileBase):
        reset_all = refresh_handlers = get_buffer = fill_transition = None

    with pytest.raises(UsageError, match=r"^cannot create a Clock: expected num_envs in "):
        Clock("nowhere", 0)
    with pytest.raises(
        UsageError, match=r"^cannot call Clock\.get_batch: expected num_transitions_per_env >= 1, got 0"
    ):
        Clock("nowhere", 1).get_batch(0)
