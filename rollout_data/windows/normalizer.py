"""`Normalizer`: normalize fields with dataset statistics, and reverse the normalization.

Each field is shifted and scaled, so the inverse is exact up to rounding. A constant feature is only
shifted. Offsets and scales are buffers of the module, so checkpoints include them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any, Literal, get_args

import torch

from storage.core.arguments import choice, real
from storage.errors import MissingFieldError, UsageError, nearest

from ..sources.recordings.field_statistics import FieldStatistics

NormalizationMode = Literal["mean_std", "min_max", "quantiles"]
#: Minimum ratio of the scale of a feature to its offset. A feature with a smaller ratio counts as
#: constant, because its variation is close to the resolution of float32.
_LEAST_PART = 1e-6
#: Minimum difference of the two quantiles of a feature, divided by the larger absolute value of the
#: two. A feature with a smaller ratio counts as constant. Otherwise the normalized value of a frame
#: outside the quantiles could be larger than 1000.
_LEAST_QUANTILE_PART = 1 / 500
_OFFSET = "offset:"
_SCALE = "scale:"
_NEXT = "next_"
#: Replacement for "." in buffer names, since torch modules do not allow dots.
_DOT = "%2E"
Tensor = torch.Tensor


class Normalizer(torch.nn.Module):
    """Normalize fields of batches, `(x - offset) / scale`, and convert network outputs back.

    Args:
        statistics: From `statistics()` of a dataset, a mixture or a recording.
        modes: Map from field or name prefix to mode. Other fields are not changed. A single mode
            applies to all fields. "mean_std": mean 0 and standard deviation 1. "min_max": minimum
            at -1 and maximum at 1. "quantiles": lowest quantile at -1 and highest at 1, without
            clipping.
        min_range: For "quantiles": smallest distance of the lowest and the highest quantile of a
            feature, in the unit of the feature. A number for all fields, or a mapping of fields or
            name prefixes. A feature with a smaller distance counts as constant and is only shifted.
            None means 1/500 of the larger absolute value of the two quantiles.

    Each feature with statistics has an offset and a scale. Both are buffers: `to(device)` moves
    them, and `state_dict()` contains them. `from_state_dict` creates a normalizer without data.

    Raises:
        UsageError: A mode is unknown, or statistics are not finite.
        MissingFieldError: A field has no statistics.
    """

    def __init__(
        self,
        statistics: Mapping[str, FieldStatistics],
        modes: NormalizationMode | Mapping[str, NormalizationMode] = "mean_std",
        *,
        min_range: float | Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()
        is_right = isinstance(statistics, Mapping)
        if not is_right or not all(
            isinstance(value, FieldStatistics) for value in statistics.values()
        ):
            raise UsageError(
                "statistics must be the result of statistics() of a dataset or a recording, got "
                f"{type(statistics).__name__}."
            )
        if not isinstance(modes, (str, Mapping)):
            raise UsageError(
                f"modes must be a mode or a mapping of fields to modes, got {modes!r}."
            )
        ranges = _min_ranges(min_range, statistics)
        chosen = dict.fromkeys(statistics, modes) if isinstance(modes, str) else dict(modes)
        for prefix, mode in chosen.items():
            choice("modes", mode, get_args(NormalizationMode))
            names = [name for name in statistics if name == prefix or name.startswith(f"{prefix}/")]
            if not names:
                raise _without_statistics("modes", prefix, statistics)
            for name in names:
                self._keep(name, *_offset_and_scale(name, statistics[name], mode, ranges.get(name)))

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> Normalizer:
        """Create a normalizer from the `state_dict()` of another normalizer."""
        made = cls({})
        if not isinstance(state, Mapping):
            raise UsageError(f"state must be a mapping, got {type(state).__name__}.")
        for key in state:
            if key.startswith(_OFFSET):
                name = key[len(_OFFSET) :].replace(_DOT, ".")
                made._keep(name, state[key].clone(), state[_SCALE + key[len(_OFFSET) :]].clone())
        return made

    @property
    def fields(self) -> list[str]:
        """Names of the fields that are normalized."""
        names = [name for name, _ in self.named_buffers()]
        return [
            name[len(_OFFSET) :].replace(_DOT, ".") for name in names if name.startswith(_OFFSET)
        ]

    def normalize(self, values: Any, name: str | None = None) -> Any:
        """Normalize a tensor of the field `name`, or the fields of a batch, into new tensors.

        Args:
            values: `[..., *shape]`; or a nested mapping or named tuple of such tensors by field
                name. Next observations use the statistics of observations. Components joined along
                the last axis are normalized together if each is a vector or a scalar.
            name: Name of the field if `values` is a tensor.

        Returns:
            The same type as `values`. Floating-point tensors keep their dtype; others become
            float32. Other entries of a batch are not changed or copied.

        Raises:
            MissingFieldError: The normalizer has no field `name`.
            UsageError: A tensor does not have the shape of the field, or a tensor has no name.
        """
        return self._apply_to_values(values, name, lambda x, offset, scale: (x - offset) / scale)

    def unnormalize(self, values: Any, name: str | None = None) -> Any:
        """Return values in the original scale: the inverse of `normalize`, same arguments."""
        return self._apply_to_values(values, name, lambda x, offset, scale: x * scale + offset)

    def forward(self, values: Any, name: str | None = None) -> Any:
        """Normalize values, so that the module can be called like a layer: see `normalize`."""
        return self.normalize(values, name)

    def extra_repr(self) -> str:
        return ", ".join(self.fields)

    def _keep(self, name: str, offset: Tensor, scale: Tensor) -> None:
        self.register_buffer(_OFFSET + name.replace(".", _DOT), offset)
        self.register_buffer(_SCALE + name.replace(".", _DOT), scale)

    def _apply_to_values(self, values: Any, name: str | None, function: Any) -> Any:
        if not isinstance(values, Tensor):
            if name is not None or not (hasattr(values, "items") or hasattr(values, "_asdict")):
                argument = "" if name is None else f" and name {name!r}"
                raise UsageError(
                    "values must be a tensor with the name of its field, or a batch without a "
                    f"name, got {type(values).__name__}{argument}."
                )
            return self._of_batch(values, "", function)
        if name is None or (numbers := self._parameters_of(name)) is None:
            raise MissingFieldError(f"name must be one of {', '.join(self.fields)}, got {name!r}.")
        return _apply(values, name, *numbers, function)

    def _of_batch(self, values: Any, prefix: str, function: Any) -> Any:
        if hasattr(values, "_asdict"):  # A `Transition`. Statistics have no prefix "extras/".
            named = values._asdict()
            extras = named.pop("extras", None)
            moved = self._of_batch(named, prefix, function)
            return values._replace(
                **moved, **({"extras": self._of_batch(extras, prefix, function)} if extras else {})
            )
        out = values.copy()
        for key in list(values.keys()):
            value = values[key]
            name = f"{prefix}{key}"
            if isinstance(value, Tensor) and (numbers := self._parameters_of(name)) is not None:
                out[key] = _apply(value, name, *numbers, function)
            elif hasattr(value, "items") and not isinstance(value, Tensor):
                out[key] = self._of_batch(value, f"{name}/", function)
        return out

    def _parameters_of(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Return the offset and the scale for the tensor `name` of a batch.

        The name is that of a field, of a next observation, or of joined components. For other names
        the result is None, so that the tensor is not changed.
        """
        names = self.fields
        for field in (name, name.removeprefix(_NEXT)):
            parts = [part for part in names if part == field or part.startswith(f"{field}/")]
            offsets = [getattr(self, _OFFSET + part.replace(".", _DOT)) for part in parts]
            scales = [getattr(self, _SCALE + part.replace(".", _DOT)) for part in parts]
            if parts == [field]:
                return offsets[0], scales[0]
            if parts and field not in parts and all(offset.dim() <= 1 for offset in offsets):
                offset = torch.cat([offset.reshape(-1) for offset in offsets])
                scale = torch.cat([scale.reshape(-1) for scale in scales])
                return offset, scale
        return None


def _min_ranges(min_range: Any, statistics: Mapping[str, FieldStatistics]) -> dict[str, float]:
    """Check the argument `min_range` and return the minimum quantile distance of each field."""
    if min_range is None:
        return {}
    ranges: dict[str, float] = {}
    for prefix, size in (min_range if isinstance(min_range, Mapping) else {"": min_range}).items():
        least = real("min_range", size, ">= 0", lambda number: 0 <= number < inf)
        names = [
            name for name in statistics if prefix in ("", name) or name.startswith(f"{prefix}/")
        ]
        if not names:
            raise _without_statistics("min_range", prefix, statistics)
        ranges |= dict.fromkeys(names, least)
    return ranges


def _without_statistics(argument: str, field: str, statistics: Any) -> MissingFieldError:
    if not statistics:
        return MissingFieldError(f"{argument} names the field {field!r}, and statistics is empty.")
    return MissingFieldError(
        f"{argument} names the field {field!r}, which has no statistics. "
        f"The fields are {nearest(field, statistics)}."
    )


def _offset_and_scale(
    name: str, statistics: FieldStatistics, mode: str, min_range: float | None
) -> tuple[Tensor, Tensor]:
    offset = statistics.mean
    scale = statistics.std
    is_constant = torch.zeros_like(scale, dtype=torch.bool)
    if mode != "mean_std":
        levels = torch.tensor(statistics.levels)
        if mode == "quantiles" and len(levels) < 2:
            raise UsageError(
                f"the statistics of field {name!r} have the quantiles {statistics.levels}, and the "
                "mode 'quantiles' requires at least two. Call statistics(quantiles=(0.01, 0.99))."
            )
        low = statistics.min
        high = statistics.max
        if mode == "quantiles":
            low = statistics.quantiles[levels.argmin()]
            high = statistics.quantiles[levels.argmax()]
            least = _LEAST_QUANTILE_PART * torch.maximum(low.abs(), high.abs())
            is_constant = high - low < (least if min_range is None else min_range)
        offset = low / 2 + high / 2
        scale = high / 2 - low / 2
    if not (offset.isfinite().all() and scale.isfinite().all()):
        raise UsageError(
            f"the statistics of field {name!r} are NaN or infinite. "
            "Drop the field, or the frames with NaN or infinite values."
        )
    is_constant |= scale <= _LEAST_PART * offset.abs()
    return offset.clone(), torch.where(is_constant, torch.ones_like(scale), scale)


def _apply(values: Tensor, name: str, offset: Tensor, scale: Tensor, function: Any) -> Tensor:
    """Normalize values, or reverse the normalization, after a check of their shape.

    `function(values, offset, scale)` computes the result. Floating-point values keep their dtype.
    Other values are converted to float32.
    """
    sizes = zip(offset.shape[::-1], values.shape[::-1], strict=False)
    # Statistics of images have axes of length 1, because all pixels share the same statistics.
    may_repeat = offset.dim() > 1
    if offset.dim() > values.dim() or any(
        mine != size and not (may_repeat and mine == 1) for mine, size in sizes
    ):
        raise UsageError(
            f"field {name!r} has shape {tuple(values.shape)}, expected [..., "
            f"{', '.join(map(str, offset.shape))}]{' (an axis of 1 may be longer)' * may_repeat}."
        )
    wide = values if values.is_floating_point() else values.to(offset.dtype)
    moved: Tensor = function(wide, offset, scale)
    return moved.to(values.dtype if values.is_floating_point() else torch.float32)
