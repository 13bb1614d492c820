"""What lies in a snapshot and how it is checked: names, forms, the inner optimizer's state, the digest."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

KINDS = ("anchor", "outer", "buffer", "inner")
ANCESTORS = 16  # rounds back that a peer is known to have come from
OWN_KINDS = ("buffer", "inner")  # what differs between members of one round; the others are equal, bit for bit
InnerState = dict[str, dict[str, Any]]


def take(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """BLAKE2b (16 bytes, hex) over names, dtypes, shapes and bytes, in the mapping's order."""
    digest = hashlib.blake2b(digest_size=16)
    for part in digest_parts(tensors):
        digest.update(part)
    return digest.hexdigest()


def digest_parts(tensors: Mapping[str, Tensor], slice_bytes: int = 1 << 62) -> Iterator[bytes | memoryview]:
    """What `digest_tensors` hashes, in slices of so many bytes at most."""
    for name, tensor in tensors.items():
        flat = tensor.detach().contiguous().reshape(-1)
        yield f"{name}:{flat.dtype}:{tuple(tensor.shape)};".encode()
        step = max(1, slice_bytes // flat.element_size())
        for start in range(0, flat.numel(), step):
            yield flat[start : start + step].cpu().view(torch.uint8).numpy().data


def sort_by_kind(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The tensors of a snapshot by kind and by name without it; raises ValueError for an unknown kind."""
    parts: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        if kind not in parts:
            raise ValueError(f"unknown tensor {name!r} in the snapshot")
        parts[kind][rest] = tensor
    return parts


def check_form(kind: str, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Raise ValueError naming the first tensor that is missing, unknown, or of another dtype or shape."""
    for name, tensor in wanted.items():
        if name not in found:
            raise ValueError(f"{kind} tensor {name!r} is missing from the state")
        if found[name].shape != tensor.shape or found[name].dtype != tensor.dtype:
            raise ValueError(
                f"{kind} tensor {name!r} is {found[name].dtype}{list(found[name].shape)} in the state, "
                f"{tensor.dtype}{list(tensor.shape)} here"
            )
    unknown = sorted(set(found) - set(wanted))
    if unknown:
        raise ValueError(f"{kind} tensor {unknown[0]!r} of the state is unknown here")


def read_progress(meta: Mapping[str, Any]) -> tuple[int, int, int | None]:
    """Round, step and window of a snapshot; raises ValueError for what are no counts."""
    counts = [meta.get(name) for name in ("round", "step")]
    if not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError(f"round and step must be counts, got {counts}")
    window = meta.get("window")
    if window is not None and not (type(window) is int and window > 0):
        raise ValueError(f"window={window!r}: must be a positive number of steps or nothing")
    return int(meta["round"]), int(meta["step"]), window


def read_lineage(found: object) -> str:
    """A lineage out of a snapshot; raises ValueError for what is no hash."""
    if not isinstance(found, str) or len(found) > 64:
        raise ValueError(f"lineage {str(found)[:80]!r} is not a hash")
    return found


def read_ancestors(found: object) -> list[str]:
    """The lineages before a snapshot's, oldest first; raises ValueError for what is no list of hashes."""
    if not isinstance(found, list) or len(found) > ANCESTORS:
        raise ValueError(f"ancestors {str(found)[:80]!r} are not a list of at most {ANCESTORS} hashes")
    return [read_lineage(entry) for entry in found]


def inner_tensors(
    inner: torch.optim.Optimizer, parameters: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, dict[str, float | int | bool]]]:
    """The inner optimizer's state as tensors named parameter/key, and what of it are plain numbers."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, dict[str, float | int | bool]] = {}
    for name, parameter in parameters.items():
        for key, value in inner.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{name}/{key}"] = take(value)
            elif isinstance(value, int | float | bool):
                numbers.setdefault(name, {})[key] = value
    return tensors, numbers


def read_inner_state(
    parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor], numbers: Mapping[str, Mapping[str, Any]]
) -> InnerState:
    """The inner state that `inner_tensors` named, by parameter and key; raises ValueError for what does not fit."""
    found: InnerState = {}
    # What another peer sent may be of any kind, whatever the annotations say.
    if not (isinstance(numbers, Mapping) and all(isinstance(values, Mapping) for values in numbers.values())):
        raise ValueError("the inner state's numbers must be given by parameter and key")
    for name, values in numbers.items():
        for key, value in values.items():
            if not isinstance(value, int | float | bool):
                raise ValueError(f"inner state {name}/{key} is of type {type(value).__name__}, not a number")
        found[name] = dict(values)
    for path, tensor in tensors.items():
        name, _, key = path.rpartition("/")
        found.setdefault(name, {})[key] = tensor
    unknown = sorted(set(found) - set(parameters))
    if unknown:
        raise ValueError(f"inner state of {unknown[0]!r}, a parameter that is unknown here")
    for name, state in found.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.numel() > 1 and value.shape != parameters[name].shape:
                raise ValueError(f"inner state {name}/{key} has shape {list(value.shape)}")
    return found


def load_inner_tensors(
    inner: torch.optim.Optimizer,
    parameters: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    numbers: Mapping[str, Mapping[str, Any]],
) -> None:
    """Give the inner optimizer the state that `inner_tensors` named, or raise as `read_inner_state` does."""
    found = read_inner_state(parameters, tensors, numbers)
    # As in torch's own load_state_dict: step counters stay on the CPU unless the kernels want them on the device.
    moving = {p for g in inner.param_groups if g.get("capturable") or g.get("fused") for p in g["params"]}
    for name, parameter in parameters.items():
        inner.state.pop(parameter, None)
        if found.get(name):
            inner.state[parameter] = {
                key: _placed(value, "cpu" if key == "step" and parameter not in moving else parameter.device)
                for key, value in found[name].items()
            }


def drop_broken_state(inner: torch.optim.Optimizer) -> None:
    """Let the inner optimizer start afresh where its state holds NaN or infinity, which no later step would clear."""
    for parameter, state in list(inner.state.items()):
        tensors = (value for value in state.values() if isinstance(value, Tensor) and value.is_floating_point())
        if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
            del inner.state[parameter]


def _placed(value: Any, device: torch.device | str) -> Any:  # noqa: ANN401 - state values are of any kind
    return value.to(device, copy=True) if isinstance(value, Tensor) else value
