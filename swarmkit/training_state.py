"""What a checkpoint holds of a training peer: enough to go on bit for bit, and to start on any number of peers."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from swarmkit.optim.snapshot import take
from swarmkit.optim.synced import SyncedOptimizer

State = tuple[dict[str, Tensor], dict[str, Any]]
# The parts of a snapshot: what all peers share, as opposed to what this one has of its own.
_SHARED = ("anchor/", "outer/", "buffer/", "inner/")


def flatten(tree: Any, prefix: str, tensors: dict[str, Tensor]) -> Any:  # noqa: ANN401 - any state_dict
    """Move the tensors of a nested state into `tensors`; returns the rest as JSON that `restore` puts them back into.

    Dictionaries become lists of pairs, because JSON would turn the integer keys of torch's state into text.
    """
    if isinstance(tree, Tensor):
        name = f"{prefix}/{len(tensors)}"
        tensors[name] = take(tree)
        return {"tensor": name}
    if isinstance(tree, Mapping):
        return {"pairs": [[key, flatten(value, prefix, tensors)] for key, value in tree.items()]}
    if isinstance(tree, list | tuple):
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [flatten(value, prefix, tensors) for value in tree]}
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise TypeError(f"{prefix}: a {type(tree).__name__} cannot be part of a checkpoint")


def restore(tree: Any, tensors: Mapping[str, Tensor]) -> Any:  # noqa: ANN401
    """The inverse of `flatten`."""
    if not isinstance(tree, dict):
        return tree
    if "tensor" in tree:
        return tensors[tree["tensor"]].clone()
    if "pairs" in tree:
        return {key: restore(value, tensors) for key, value in tree["pairs"]}
    if "list" in tree:
        return [restore(value, tensors) for value in tree["list"]]
    return tuple(restore(value, tensors) for value in tree["tuple"])


def collect(model: nn.Module, optimizer: SyncedOptimizer, data: Mapping[str, Any]) -> State:
    """Everything of a peer as tensors and JSON; equal tensors are held once, under their first name."""
    shared, snapshot = optimizer.snapshot()
    own: dict[str, Tensor] = {}
    skeleton = flatten(optimizer.state_dict(), "optimizer", own)
    own |= {f"model/{name}": take(tensor) for name, tensor in model.state_dict().items()}
    own["rng/cpu"] = torch.get_rng_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        own["rng/cuda"] = torch.cuda.get_rng_state()
    tensors, aliases = _share(shared | own)
    meta = {
        "step": optimizer.step_count,
        "round": optimizer.round,
        "digest": optimizer.digest(),
        "snapshot": snapshot,
        "optimizer": skeleton,
        "aliases": aliases,
        "data": dict(data),
    }
    return tensors, meta


def _share(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Leave out tensors that are bitwise equal to an earlier one: after a round the model is the anchor."""
    first: dict[tuple[str, torch.dtype, torch.Size], str] = {}
    kept: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        content = tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""
        key = (hashlib.blake2b(content, digest_size=16).hexdigest(), tensor.dtype, tensor.shape)
        if key in first:
            aliases[name] = first[key]
        else:
            first[key] = name
            kept[name] = tensor
    return kept, aliases


def _unshare(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> dict[str, Tensor]:
    return dict(tensors) | {name: tensors[source] for name, source in meta["aliases"].items()}


def resume_exactly(model: nn.Module, optimizer: SyncedOptimizer, state: State) -> None:
    """Go on as if nothing had happened: parameters, optimizer, counters and random numbers."""
    tensors, meta = _unshare(*state), state[1]
    model.load_state_dict({name.removeprefix("model/"): t for name, t in tensors.items() if name.startswith("model/")})
    optimizer.load_state_dict(restore(meta["optimizer"], tensors))
    torch.set_rng_state(tensors["rng/cpu"])
    if "rng/cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["rng/cuda"])


def resume_shared(optimizer: SyncedOptimizer, state: State) -> None:
    """Start from what all peers shared when the checkpoint was written: for a peer more than there were."""
    tensors, meta = _unshare(*state), state[1]
    shared = {name: tensor for name, tensor in tensors.items() if name.startswith(_SHARED)}
    optimizer.load_snapshot(shared, meta["snapshot"])


def model_tensors(state: State) -> dict[str, Tensor]:
    """The model's `state_dict` at the anchor, for evaluation and generation."""
    tensors, aliases = _unshare(*state), state[1]["aliases"]
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        if kind == "model":
            # A tied parameter is in the anchor under its first name only.
            first = aliases.get(name, name).partition("/")[2]
            anchor = tensors.get(f"anchor/{rest}", tensors.get(f"anchor/{first}"))
            result[rest] = tensor if anchor is None else anchor.to(tensor.dtype)
    return result
