"""Single defects of ends and pictures, in the arrays of a sound recording. See `wrong_values.py`."""

from __future__ import annotations

import numpy as np

from tests.doctor.worlds import Rng, World, walker
from tests.doctor.wrong_values import Named, defect, some

_PICTURES = ("own", "robomimic", "lerobot")
_FRONT = "observation/front"


@defect("END01", formats=("own", "folders"))
def all_open(world: World, rng: Rng) -> Named:
    for episode in world.episodes:
        episode.end, episode.final = "open", None
    return set(range(len(world)))


@defect("END01", formats=("own",))
def some_open(world: World, rng: Rng) -> Named:
    chosen = some(rng, world, 8)
    for number in chosen:
        world[number].end, world[number].final = "open", None
    return set(chosen) - {max(chosen)}


@defect("END03")
def two_in_one(world: World, rng: Rng) -> Named:
    number = int(rng.integers(len(world) - 1))
    item, other = world[number], world.episodes.pop(number + 1)
    item.fields = {
        name: np.concatenate([values, other.fields[name]]) for name, values in item.fields.items()
    }
    item.end, item.final = other.end, other.final
    return {number}


@defect("END04")
def too_short(world: World, rng: Rng) -> Named:
    chosen = some(rng, world, 3)
    for number in chosen:
        world[number].cut(0, int(rng.integers(2, 6)))
        world[number].end = "terminated"
    return set(chosen)


@defect("END05")
def duplicate(world: World, rng: Rng) -> Named:
    number, other = some(rng, world, 2)
    world.episodes[other] = world.copy()[number]
    return {other}


@defect("END06", formats=("own",))
def two_ends(world: World, rng: Rng) -> Named:
    world.metadata["env"] = "TestCell"
    chosen = some(rng, world, 3)
    for number in chosen:
        world[number].end = "both"
    return set(chosen)


@defect("END07", formats=("own", "robomimic", "d4rl"), zero_action="zero", last_is_final="final")
def one_row_more(world: World, rng: Rng, kind: str) -> Named:
    for item in world.episodes:
        assert item.final is not None
        last = dict(item.final)
        last["action"] = item.fields["action"][-1] * (0 if kind == "zero" else 1)
        last["reward"] = np.float32(0)
        item.fields = {
            name: np.concatenate([values, last[name][None]]) for name, values in item.fields.items()
        }
        item.final = None if kind == "zero" else item.final
    return None


@defect("END08", formats=("own", "minari"))
def final_is_reset(world: World, rng: Rng) -> Named:
    for item, other in zip(world.episodes, world.episodes[1:], strict=False):
        item.final = {name: other.fields[name][0] for name in item.final or ()}
    return set(range(len(world) - 1))


@defect("END10", formats=("own", "minari", "d4rl"))
def reset_rows(world: World, rng: Rng) -> Named:
    before = None
    for item in world.episodes:
        assert item.final is not None
        if before is not None:
            first = {**before, "action": item.fields["action"][0], "reward": np.float32(0)}
            item.fields = {
                name: np.concatenate([first[name][None], values])
                for name, values in item.fields.items()
            }
        before = item.final
    return set(range(1, len(world)))


@defect("END11", formats=("own", "minari", "d4rl", "folders"))
def limit_as_termination(world: World, rng: Rng) -> Named:
    world.episodes = walker(rng, 24).episodes
    for episode in world.episodes:
        episode.cut(0, 50)
        episode.end, episode.final = (
            "terminated",
            {"observation": episode.fields["observation"][-1] * np.float32(0.99)},
        )
    return None


@defect("END12", formats=("own", "robomimic"))
def finals_missing(world: World, rng: Rng) -> Named:
    chosen = some(rng, world, 6)
    for number in chosen:
        world[number].final = None
    return set(chosen)


# Pictures


@defect("IMG01", "cameras", _PICTURES)
def black(world: World, rng: Rng) -> Named:
    (number,) = some(rng, world)
    world[number].fields[_FRONT][10:20] = rng.integers(
        0, 3, world[number].fields[_FRONT][10:20].shape
    )
    return {number}


@defect("IMG02", "cameras", _PICTURES)
def blown_out(world: World, rng: Rng) -> Named:
    (number,) = some(rng, world)
    frames = world[number].fields[_FRONT]
    frames[:] = np.clip(frames.astype(np.int64) * 3, 0, 255)
    return {number}


@defect("IMG03", "cameras", _PICTURES)
def frozen_camera(world: World, rng: Rng) -> Named:
    (number,) = some(rng, world)
    frames = world[number].fields[_FRONT]
    frames[10:30] = frames[10]
    return {number}


@defect("IMG04", "cameras", _PICTURES)
def red_and_blue(world: World, rng: Rng) -> Named:
    chosen = some(rng, world, 2)
    for number in chosen:
        world[number].fields[_FRONT] = world[number].fields[_FRONT][..., ::-1].copy()
        world[number].final[_FRONT] = world[number].final[_FRONT][..., ::-1]  # type: ignore[index]
    return set(chosen)


@defect("IMG05", "cameras", _PICTURES)
def layout(world: World, rng: Rng) -> Named:
    """Store the bytes of channel-first pictures with a channel-last shape."""
    for episode in world.episodes:
        frames = episode.fields[_FRONT]
        episode.fields[_FRONT] = np.ascontiguousarray(frames.transpose(0, 3, 1, 2)).reshape(
            frames.shape
        )
        last = episode.final[_FRONT]  # type: ignore[index]
        episode.final[_FRONT] = np.ascontiguousarray(last.transpose(2, 0, 1)).reshape(last.shape)  # type: ignore[index]
    return None


@defect("IMG06", "cameras", ("own", "robomimic"))
def float_range(world: World, rng: Rng) -> Named:
    chosen = some(rng, world, 3)
    for number, episode in enumerate(world.episodes):
        scale = np.float32(1 if number in chosen else 255)
        episode.fields[_FRONT] = episode.fields[_FRONT].astype(np.float32) / scale
        episode.final[_FRONT] = episode.final[_FRONT].astype(np.float32) / scale  # type: ignore[index]
    return set(chosen)


@defect("IMG06", "cameras", _PICTURES)
def bytes_to_one(world: World, rng: Rng) -> Named:
    for episode in world.episodes:
        episode.fields[_FRONT] = (episode.fields[_FRONT] > 100).astype(np.uint8)
        episode.final[_FRONT] = (episode.final[_FRONT] > 100).astype(np.uint8)  # type: ignore[index]
    return None


@defect("IMG07", "cameras", _PICTURES)
def blurred(world: World, rng: Rng) -> Named:
    chosen = some(rng, world, 2)
    for number in chosen:
        frames = world[number].fields[_FRONT].astype(np.float64)
        for axis in (1, 2, 1, 2):
            frames = (np.roll(frames, 1, axis) + frames + np.roll(frames, -1, axis)) / 3
        world[number].fields[_FRONT] = frames.astype(np.uint8)
    return set(chosen)


@defect("IMG08", "cameras", _PICTURES)
def same_camera(world: World, rng: Rng) -> Named:
    for episode in world.episodes:
        episode.fields["observation/wrist"] = episode.fields[_FRONT].copy()
        episode.final["observation/wrist"] = episode.final[_FRONT].copy()  # type: ignore[index]
    return None
