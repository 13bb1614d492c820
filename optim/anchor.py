"""The anchor: what all members of a round agreed on last, beside the parameters that move away from it."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from swarmkit.optim.snapshot import digest_tensors


class Anchor:
    """A copy of parameters in float32 (float64 for float64), so that bfloat16 never rounds an outer step away.

    It lies on the device `offload`, or beside the parameters; on the CPU it is pinned when they are on CUDA.
    """

    def __init__(
        self, parameters: list[Tensor], *, names: Mapping[Tensor, str] | None, offload: torch.device | None
    ) -> None:
        self.parameters = parameters
        self.tensors = [_held(parameter, offload) for parameter in parameters]
        self.names = [(names or {}).get(p, f"parameter{i}") for i, p in enumerate(parameters)]
        if len(set(self.names)) < len(self.names):
            raise ValueError("names: two parameters have the same name")

    def part(self, positions: Sequence[int]) -> "Anchor":
        """Some of the parameters with their anchor: the same tensors, not copies."""
        found = object.__new__(type(self))
        found.parameters = [self.parameters[i] for i in positions]
        found.tensors = [self.tensors[i] for i in positions]
        found.names = [self.names[i] for i in positions]
        return found

    def named(self) -> dict[str, Tensor]:
        """The anchor by parameter name."""
        return dict(zip(self.names, self.tensors, strict=True))

    def named_parameters(self) -> dict[str, Tensor]:
        """The parameters by name."""
        return dict(zip(self.names, self.parameters, strict=True))

    def rounded(self) -> list[Tensor]:
        """The anchor as training starts from it: rounded as the parameters are."""
        pairs = zip(self.parameters, self.tensors, strict=True)
        return [held if held.dtype == p.dtype else held.to(p.dtype).to(held.dtype) for p, held in pairs]

    def local(self) -> list[Tensor]:
        """The parameters in the anchor's dtypes and on its device."""
        return [p.detach().to(held) for p, held in zip(self.parameters, self.tensors, strict=True)]

    def like(self, tensors: list[Tensor]) -> list[Tensor]:
        """Tensors of a round, in the anchor's dtypes and on its device."""
        return [tensor.to(held) for tensor, held in zip(tensors, self.tensors, strict=True)]

    def assign(self, tensors: list[Tensor]) -> None:
        """Set the anchor."""
        with torch.no_grad():
            torch._foreach_copy_(self.tensors, tensors)

    def restore(self) -> None:
        """Set the parameters to the anchor, rounded to their own dtypes."""
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.tensors, non_blocking=True)

    def digest(self) -> str:
        """Fingerprint of names, dtypes, shapes and bytes."""
        return digest_tensors(self.named())


class LiveAnchor(Anchor):
    """The parameters as their own anchor: they move in rounds only."""

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters themselves, detached."""
        return [parameter.detach() for parameter in self.parameters]

    @tensors.setter
    def tensors(self, held: list[Tensor]) -> None:
        """Nothing is held beside the parameters."""

    def restore(self) -> None:
        """Nothing has moved."""


def _held(tensor: Tensor, device: torch.device | None) -> Tensor:
    wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    held = tensor.detach().to(device=device or tensor.device, dtype=wide, copy=True)
    return held.pin_memory() if tensor.is_cuda and held.device.type == "cpu" else held
