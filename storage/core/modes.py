"""What a class keeps is made alike in every mode that the caller may be in.

One rule: tensors that outlive a call are made outside of inference mode. torch forbids writing to those made inside
it once it is over, and a policy may make the first call in inference mode and the next one outside.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def lasting(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate what makes tensors that are kept: it is called outside of inference mode, and without gradients."""

    @wraps(function)
    def made(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        with torch.inference_mode(False), torch.no_grad():
            return function(*arguments, **options)

    return made
