"""Codecs by name, as configurations give them."""

import inspect
from collections.abc import Callable
from functools import partial

from swarmkit.optim.compression.blockwise import Blockwise
from swarmkit.optim.compression.casting import Casting
from swarmkit.optim.compression.codec import Codec
from swarmkit.optim.compression.minifloat import E3M0
from swarmkit.optim.compression.powersgd import PowerSGD
from swarmkit.optim.compression.qsgd import QSGD
from swarmkit.optim.compression.random_k import RandomK
from swarmkit.optim.compression.sparse import TopK
from swarmkit.optim.compression.ternary import TernGrad
from swarmkit.optim.misspelt import nearest

CODECS: dict[str, Callable[..., Codec]] = {
    "fp16": partial(Casting, "fp16"),
    "bf16": partial(Casting, "bf16"),
    "int8": partial(Blockwise, 8),
    "int4": partial(Blockwise, 4),
    "fp4": E3M0,
    "qsgd": QSGD,
    "ternary": TernGrad,
    "topk": TopK,
    "randomk": RandomK,
    "powersgd": PowerSGD,
}


def make_codec(name: str, **parameters: float | str | bool | None) -> Codec:
    """The codec of a name (see CODECS); raises ValueError naming the nearest one, or the parameters that there are."""
    if name not in CODECS:
        raise ValueError(f"codec {name!r} is unknown{nearest(name, CODECS)}")
    known = [p.name for p in inspect.signature(CODECS[name]).parameters.values()]
    if isinstance(CODECS[name], partial):
        known = [key for key in known if key not in ("bits", "dtype")]
    for parameter in parameters:
        if parameter not in known:
            raise ValueError(f"codec {name!r} has no parameter {parameter!r}{nearest(parameter, known)}")
    return CODECS[name](**parameters)
