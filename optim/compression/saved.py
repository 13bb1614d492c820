"""What is refused of a saved state of an averaging: other types, other forms, numbers that are not finite."""

import math

import torch
from torch import Tensor

from swarmkit.optim.norms import is_finite


def read_tensors(found: object, what: str) -> list[Tensor]:
    """Copies of a list of finite float32 tensors, or ValueError naming what of it is none."""
    if not isinstance(found, list | tuple):
        raise ValueError(f"{what} of the state is a {type(found).__name__}, not a list of tensors")
    return [read_tensor(tensor, f"{what}, tensor {i},") for i, tensor in enumerate(found)]


def read_tensor(found: object, what: str) -> Tensor:
    """A copy of a finite float32 tensor, or ValueError saying what it is instead."""
    if not isinstance(found, Tensor):
        raise ValueError(f"{what} of the state is a {type(found).__name__}, not a tensor")
    if found.dtype != torch.float32:
        raise ValueError(f"{what} of the state is of {found.dtype}, not torch.float32")
    if not is_finite(found):
        raise ValueError(f"{what} of the state holds values that are not finite")
    return found.detach().clone()


def read_parameters(found: object, count: int | None) -> list[float] | None:
    """A codec's parameters, `count` of them where it is known, or ValueError."""
    if found is None:
        return None
    if not isinstance(found, list | tuple) or not all(type(p) in (int, float) and math.isfinite(p) for p in found):
        raise ValueError(f"the codec's parameters {str(found)[:80]} are not a list of finite numbers")
    if count is not None and len(found) != count:
        raise ValueError(f"the state has {len(found)} of the codec's parameters, for {count} tensors")
    return list(found)
