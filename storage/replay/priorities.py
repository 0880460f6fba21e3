"""`motion_priorities`: from tracking errors to how often a motion should be drawn.

One rule: a pure function of the scores; who measures them and who draws is elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..core import arguments
from ..core.memory import as_given
from ..errors import UsageError


def _one_over_bin_size(scores: torch.Tensor) -> torch.Tensor:
    _, bin_of, sizes = torch.unique(scores.floor(), return_inverse=True, return_counts=True)
    shares: torch.Tensor = 1.0 / sizes.to(scores.dtype)
    return shares[bin_of]


_MODES: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": torch.exp2,
    "bin": _one_over_bin_size,
    None: torch.clone,
}


def motion_priorities(
    scores: Any, mode: str | None = "exp", min_value: float = 0.5, max_value: float = 2.0, scale: float = 2.0
) -> torch.Tensor:
    """Turn tracking errors per trajectory into priorities for `TrajectoryDictBuffer.update_priorities`.

    Args:
        scores: `[E]`, larger is tracked worse (for example an earth mover's distance).
        mode: With x = scale * clamp(score, min_value, max_value): "exp" gives 2 ** x; "bin" sorts
            into bins by floor(x) and makes all bins equally likely; None gives x itself.
        min_value, max_value: Where scores are clamped.
        scale: Factor after clamping.

    Returns:
        `[E]` of the scores' floating dtype (float32 for integers and lists) and device; a new tensor, not
        normalized.
    """
    arguments.choice("turn scores into priorities", "mode", mode, _MODES)
    if not min_value <= max_value:
        got = f"{min_value} and {max_value}"
        raise UsageError("turn scores into priorities", "", "min_value <= max_value", got)
    values = as_given(scores).detach()
    if values.dim() != 1:
        raise UsageError("turn scores into priorities", "", "one score per trajectory, shape [E]", str(values.shape))
    if not values.is_floating_point() or not isinstance(scores, (torch.Tensor, np.ndarray)):
        values = values.to(torch.float32)
    wrong = (~torch.isfinite(values)).nonzero()
    if len(wrong):
        place = int(wrong[0])
        raise UsageError("turn scores into priorities", f"at index {place}", "finite scores", str(float(values[place])))
    return _MODES[mode](values.clamp(min_value, max_value) * scale)
