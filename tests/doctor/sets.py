"""Recordings for the doctor: sound ones, and ones with a single defect and the expected trajectories."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from zlib import crc32

import numpy as np

import rollout_data
from rollout_data.tools.edit.pack_folder import pack_dataset
from tests.doctor import wrong_bytes, wrong_ends
from tests.doctor.folders import FORMATS, write
from tests.doctor.simulated import CLASSIC, MUJOCO, TABLES, simulate
from tests.doctor.worlds import WORLDS, Rng, World
from tests.doctor.wrong_files import FILES
from tests.doctor.wrong_values import VALUES, Made, Named

assert wrong_bytes.broken and wrong_ends.defect, "importing them registers their defects"
#: World -> formats that cannot hold it.
_CANNOT = {"bandit": ("minari",), "ant": ("lerobot_v21",), "curriculum": ("isaaclab",)}


@dataclass(frozen=True)
class Case:
    """A recording that a test can write.

    Attributes:
        name: Name of the case.
        code: Code of the rule that must find the defect; "" for a sound recording.
        make: Write it below an empty folder. Return the path to open, and the expected
            trajectories.
    """

    name: str
    code: str
    make: Callable[[Path, Rng], tuple[Path, Named]]

    def written(self, path: Path, seed: int) -> tuple[Path, Named]:
        path.mkdir(parents=True)
        return self.make(path, np.random.default_rng([seed, crc32(self.name.encode())]))


def _sound(make: Callable[[Rng], World], form: str, path: Path, rng: Rng) -> tuple[Path, Named]:
    return write(path, make(rng), form), None


def _wrong(made: Made, form: str, path: Path, rng: Rng) -> tuple[Path, Named]:
    world = WORLDS[made.world](rng)
    named = made.change(world, rng)
    return write(path, world, form), named


def _together(path: Path, rng: Rng) -> tuple[Path, Named]:
    """Write the blocks of two writers into one folder."""
    source = write(path / "a", WORLDS["walker"](rng))
    other = write(path / "b", WORLDS["walker"](rng))
    for file in other.glob("*.h5"):
        shutil.copy(file, source / file.name.replace("_w_", "_v_"))
    return source, None


def _pruned(path: Path, rng: Rng) -> tuple[Path, Named]:
    source = write(path, WORLDS["walker"](rng))
    rollout_data.prune(source, trajectories=9)
    return source, None


def _packed(path: Path, rng: Rng) -> tuple[Path, Named]:
    source = write(path, WORLDS["arm"](rng))
    pack_dataset(source)
    return source, None


def sound_cases(forms: tuple[str, ...] = FORMATS) -> Iterator[Case]:
    """Yield every world in every format, the simulators, and pruned and packed folders."""
    for form in forms:
        for name, make in WORLDS.items():
            if form not in _CANNOT.get(name, ()):
                yield Case(f"{name}/{form}", "", partial(_sound, make, form))
    for name, make in (("pruned", _pruned), ("packed", _packed)):
        yield Case(name, "", make)
    if find_spec("gymnasium"):
        names = (*CLASSIC, *TABLES, *(MUJOCO if find_spec("mujoco") else ()))
        for number, name in enumerate(names):
            form = FORMATS[number % len(FORMATS)] if number % 2 else "own"
            yield Case(f"{name}/{form}", "", partial(_sound, partial(simulate, name), form))


def wrong_cases() -> Iterator[Case]:
    """Yield every defect in every format that can hold it."""
    for name, made in VALUES.items():
        for form in made.formats:
            yield Case(f"{name}/{form}", made.code, partial(_wrong, made, form))
    for name, (code, make) in FILES.items():
        yield Case(name, code, make)
