"""What every Collective checks of what it is offered, and whose past counts when members differ."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmkit.optim.norms import is_finite
from swarmkit.optim.shards import Wire
from swarmkit.peers.layout import MAX_FORM
from swarmkit.peers.wire import MAX_WEIGHT, is_weight

REDUCIBLE = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


def check_weight(weight: float) -> None:
    """Raise ValueError for a weight that is negative, not finite or huge."""
    if not is_weight(weight):
        raise ValueError(f"weight={weight}: must be finite and not negative, {MAX_WEIGHT:.0e} at most")


def check_payload(payload: Sequence[Tensor], weight: float) -> None:
    """Raise ValueError for what an all-gather cannot carry, naming its position."""
    check_weight(weight)
    for position, tensor in enumerate(payload):
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.is_complex():
            raise ValueError(f"tensor {position}: must be a dense real tensor, got {type(tensor).__name__}")


def check_reducible(tensors: Sequence[Tensor], weight: float) -> None:
    """Raise ValueError for what an all-reduce cannot average, naming its position."""
    check_payload(tensors, weight)
    for position, tensor in enumerate(tensors):
        if tensor.dtype not in REDUCIBLE:
            raise ValueError(f"tensor {position} has dtype {tensor.dtype}: only floating-point tensors have a mean")
    for position, tensor in enumerate(tensors):
        if not is_finite(tensor):
            raise ValueError(f"tensor {position} holds values that are not finite")


def check_wired(tensors: Sequence[Tensor], weight: float, wire: Wire | None) -> None:
    """Raise ValueError for what an all-reduce cannot average, through a wire or without, naming its position."""
    if wire is not None:
        if not tensors or tensors[0].dtype is not torch.float32 or tensors[0].dim() != 1:
            raise ValueError("tensor 0 travels through a wire: it must be flat and of float32")
        if not 0 < len(wire.form) <= MAX_FORM:
            raise ValueError(f"the form of a wire is of 1 to {MAX_FORM} characters, not {wire.form!r}")
        if wire.cut(1)[-1] != tensors[0].numel():
            raise ValueError(f"tensor 0 has {tensors[0].numel()} numbers, its wire is of {wire.cut(1)[-1]}")
    check_reducible(tensors, weight)


def major_lineage(lineages: Iterable[str]) -> str:
    """The lineage that counts among members in join order: the most common, on a tie the first; empty if none has any.

    An empty one fits all.
    """
    counts = Counter(lineage for lineage in lineages if lineage)
    return max(counts, key=lambda lineage: counts[lineage], default="")


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a member may not be averaged with the others."""

    reason: str
    diverged: bool  # it holds other bits after the same rounds; False: it had other rounds


def find_diverged(members: Sequence[tuple[str, str, str]]) -> dict[str, Refused]:
    """Who may not be averaged with the others; of (peer, lineage, digest) in join order.

    Members must start from the same rounds and then from the same bits. The majority's count each time, and on a tie
    those of the member that joined first; what is empty fits all.
    """
    found: dict[str, Refused] = {}
    lineage = major_lineage(past for _, past, _ in members)
    for peer, past, _ in members:
        if past not in ("", lineage):
            found[peer] = Refused("this peer does not start from what the others start from", diverged=False)
    same = [(peer, digest) for peer, past, digest in members if past == lineage]
    digest = major_lineage(held for _, held in same)
    for peer, held in same:
        if held not in ("", digest):
            reason = f"the anchor of {peer[-8:]} differs from the majority's: {held[:12]}, not {digest[:12]}"
            found[peer] = Refused(reason, diverged=True)
    return found
