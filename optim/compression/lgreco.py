"""L-GreCo: each tensor gets the compression at which all together take the fewest bytes (arXiv 2210.17357)."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarmkit.optim.averaging import Pending, TensorChoice
from swarmkit.optim.collective import Reduced, RoundKey
from swarmkit.optim.compression.allocation import Allocation, allocate
from swarmkit.optim.compression.codec import Codec, Layout, Parameters
from swarmkit.optim.compression.compressed import CompressedAveraging, why_not_fed_back
from swarmkit.optim.compression.saved import read_tensor

logger = logging.getLogger(__name__)
_LARGEST = 1e30  # of a table's entries: their weighted sums stay finite in float32
_STATE = {"averaging", "sum"}


class LGreCo:
    """An Averaging that chooses the codec's parameter anew for each tensor every `period` rounds.

    Over the `window` rounds before, each member sums up what it was given to send: without residuals of error feedback,
    which the sum would count again in every round. In rounds whose number is a multiple of `period` it sends along,
    exact, the error that each candidate would leave of each tensor of that sum. All members so get the same mean table
    and from it the same parameters for the rounds after: the fewest bytes whose error is at most `alpha` times that of
    the codec's own parameter for all tensors, which is what counts until the first table. The error is the sum of the
    norms, as in the paper, or with `squared` of their squares. Residuals and bases live on.

    With error feedback a candidate far below the codec's own parameter starves its tensors: what is left out at a
    density of 0.0001 comes thousands of rounds late. The paper stays within a factor of 2 to 4 of it.

    Who comes late gets the others' parameters with `shared_state`. Without, it has the codec's own until the next
    table. That is harmless where payloads are gathered, since each says what it was made with; payloads that are
    averaged in place (PowerSGD's) or by slices are then of another form than the others', and not averaged with them.
    """

    def __init__(
        self,
        averaging: CompressedAveraging,
        *,
        period: int = 100,
        window: int = 10,
        alpha: float = 1.0,
        squared: bool = False,
        candidates: Sequence[float] | None = None,
        names: Sequence[str] | None = None,
        stride: int = 1,
    ) -> None:
        """Wrap an averaging; `candidates` are the codec's unless given, `names` those of the tensors, for the report.

        With error feedback, candidates whose errors must not be fed back are left out.
        `stride` is by how much a round's index exceeds that of the last round here: fragments take turns.

        Raises ValueError for a codec without a parameter, and for candidates that are none.
        """
        codec = averaging.codec
        if codec.parameter is None:
            raise ValueError(f"codec {codec.name!r} has no parameter to choose")
        if period < 1 or window < 1 or stride < 1:
            raise ValueError(f"period={period}, window={window}, stride={stride}: must be at least 1")
        if not (math.isfinite(alpha) and alpha > 0):
            raise ValueError(f"alpha={alpha}: must be positive and finite")
        found = {*(codec.candidates if candidates is None else candidates), codec.parameter}
        for candidate in found:
            codec.payload_bytes((64, 64), candidate)  # raises for what is none
        if averaging.error_feedback:
            found = {candidate for candidate in found if why_not_fed_back(codec, candidate) is None}
        self.candidates = sorted(found)
        self.averaging = averaging
        self.period, self.window, self.alpha, self.squared = period, window, alpha, squared
        self.table: list[TensorChoice] = []  # of the last allocation; empty before one
        self.allocation: Allocation | None = None
        self._stride = stride
        self._baseline = self.candidates.index(codec.parameter)
        self._names = names
        self._is_unchecked = False  # whether parameters came from another member before any tensors were known
        self._sum: Tensor | None = None  # of what was given to send since the window began, flat

    def expect(self, tensors: Sequence[Tensor]) -> None:
        """See Expecting."""
        self.averaging.expect(tensors)

    @property
    def codec(self) -> Codec:
        """The codec that is used."""
        return self.averaging.codec

    @property
    def parameters(self) -> tuple[float, ...] | None:
        """What each tensor that the codec gets is sent with; None: its own parameter for all."""
        return self.averaging.parameters

    # -- rounds ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(
        self, tensors: Sequence[Tensor], exact: Sequence[Tensor] = (), *, round: RoundKey, weight: float
    ) -> Pending:
        """See Averaging."""
        number = round.index // self._stride
        asked = number > 0 and number % self.period == 0
        recorded = weight > 0 and -(number + 1) % self.period < self.window
        self._check_adopted(tensors)
        if not (asked or recorded):
            return self.averaging.begin(tensors, exact, round=round, weight=weight)
        if self._names is not None and len(self._names) != len(tensors):
            raise ValueError(f"{len(self._names)} names for {len(tensors)} tensors")
        positions = self.averaging.compressed(tensors)
        layout = Layout.of([tensors[i] for i in positions], self.codec.align)
        # A table that fails is lost, and its window goes on into the next.
        table = [self._measure(layout, contributes=weight > 0)] if asked and positions else []
        offered = layout.flatten([tensors[i] for i in positions]) if recorded else None
        pending = self.averaging.begin(tensors, [*exact, *table], round=round, weight=weight)
        names = [self._names[i] if self._names is not None else str(i) for i in positions]
        return _Round(self, pending, _Asked(names, layout.shapes) if table else None, offered)

    def _check_adopted(self, tensors: Sequence[Tensor]) -> None:
        """Drop a stranger's parameters that turn out to be of other tensors than those that are sent."""
        adopted = self.parameters if self._is_unchecked else None
        self._is_unchecked = False
        if adopted is not None and len(adopted) != (count := len(self.averaging.compressed(tensors))):
            logger.warning("%d parameters came for %d tensors: the codec's own counts for all", len(adopted), count)
            self.averaging.parameters = None

    def _measure(self, layout: Layout, *, contributes: bool) -> Tensor:
        """This member's table, tensors x candidates; zeros, which only scale the mean, when it has none."""
        nothing = torch.zeros(len(layout.shapes), len(self.candidates), device=layout.device)
        if not contributes or self._sum is None or self._sum.numel() != layout.total:
            return nothing
        found = error_table(self.codec, layout.views(self._sum), self.candidates)
        return found.to(nothing) if bool((found <= _LARGEST).all()) else nothing

    def _conclude(self, reduced: Reduced, asked: "_Asked | None", offered: Tensor | None) -> Reduced:
        """Commit what a closed round contained, and take its table out."""
        if asked is not None:
            *means, table = reduced.tensors
            # The mean of what strangers sent: finite, but perhaps not of this world.
            self._choose(table.cpu().double().clamp_(min=0.0).numpy(), asked)
            reduced, self._sum = replace(reduced, tensors=means), None
        if offered is not None:
            fits = self._sum is not None and self._sum.shape == offered.shape
            self._sum = offered.add_(self._sum) if self._sum is not None and fits else offered
        return reduced

    def _choose(self, errors: NDArray[np.float64], asked: "_Asked") -> None:
        """Adopt the best parameters for a table that all members hold; one without any error changes nothing."""
        if not errors.any():
            return
        sizes = size_table(self.codec, asked.shapes, self.candidates)
        found = allocate(
            sizes, errors, baseline=self._baseline, alpha=self.alpha, squared=self.squared, names=asked.names
        )
        parameters = [self.candidates[choice] for choice in found.choices]
        rows = np.arange(len(asked.names))
        left = errors[rows, found.choices]
        shares = (left**2 if self.squared else left) / (found.error or 1.0)
        counts = [math.prod(shape) for shape in asked.shapes]
        columns = asked.names, counts, sizes[rows, found.choices].tolist(), parameters, shares.tolist()
        self.averaging.parameters, self.allocation = parameters, found
        self.table = [TensorChoice(*row) for row in zip(*columns, strict=True)]

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def is_behind(self) -> bool:
        """See Averaging."""
        return self.averaging.is_behind

    def shared_state(self) -> dict[str, Any]:
        """What a joiner needs in order to send as the others do: plain numbers, equal on all members between rounds."""
        own = {"parameters": None if self.parameters is None else list(self.parameters)}
        return {**self.averaging.shared_state(), **own}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Adopt another member's parameters, or raise ValueError and change nothing: they come from a stranger."""
        found, shapes = state.get("parameters"), self.averaging.shapes
        if found is not None and not (
            isinstance(found, list) and all(type(p) in (int, float) and p in self.candidates for p in found)
        ):
            raise ValueError(f"L-GreCo's parameters {str(found)[:80]} are not all among {self.candidates}")
        if found is not None and shapes is not None and len(found) != len(shapes):
            raise ValueError(f"L-GreCo shares {len(found)} parameters, this run sends {len(shapes)} tensors with one")
        self.averaging.load_shared_state({name: value for name, value in state.items() if name != "parameters"})
        self.averaging.parameters = found
        self._is_unchecked = shapes is None
        self._sum, self.allocation, self.table = None, None, []

    def state_dict(self) -> dict[str, Any]:
        """See Averaging: the averaging's own, with the parameters, and the window's sum so far."""
        return {
            "averaging": self.averaging.state_dict(),
            "sum": None if self._sum is None else self._sum.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Averaging. The report is empty until the next table."""
        if set(state) != _STATE:
            raise ValueError(f"the state holds {sorted(state)[:3]}, it is not of L-GreCo")
        if not isinstance(state["averaging"], Mapping):
            raise ValueError(f"the averaging of L-GreCo's state is a {type(state['averaging']).__name__}")
        offered = None if state["sum"] is None else read_tensor(state["sum"], "the window's sum")
        shapes = self.averaging.shapes
        total = None if shapes is None else _total(shapes, self.codec.align)
        if offered is not None and (offered.dim() != 1 or total not in (None, offered.numel())):
            raise ValueError(f"the window's sum of the state is of shape {list(offered.shape)}, not [{total}]")
        self.averaging.load_state_dict(state["averaging"])
        self._sum, self._is_unchecked = offered, False
        self.allocation, self.table = None, []


def _total(shapes: Sequence[Sequence[int]], align: int) -> int:
    """Elements of the buffer that tensors of these shapes lie in."""
    return Layout(tuple(tuple(shape) for shape in shapes), (torch.float32,) * len(shapes), align=align).total


def size_table(codec: Codec, shapes: Sequence[Sequence[int]], candidates: Parameters) -> NDArray[np.int64]:
    """Bytes of each tensor with each candidate, tensors x candidates."""
    rows = [[codec.payload_bytes(shape, candidate) for candidate in candidates] for shape in shapes]
    return np.array(rows, dtype=np.int64).reshape(len(shapes), len(candidates))


def error_table(codec: Codec, tensors: Sequence[Tensor], candidates: Parameters) -> Tensor:
    """Norm of what each candidate leaves of each tensor, tensors x candidates, float64."""
    return torch.stack([codec.errors(tensor, candidates) for tensor in tensors])


@dataclass(frozen=True, slots=True)
class _Asked:
    """The rows of the table that a round carries."""

    names: list[str]
    shapes: tuple[tuple[int, ...], ...]


class _Round:
    def __init__(self, lgreco: LGreCo, pending: Pending, asked: _Asked | None, offered: Tensor | None) -> None:
        self._lgreco = lgreco
        self._pending = pending
        self._asked = asked
        self._offered = offered

    def done(self) -> bool:
        return self._pending.done()

    @torch.no_grad()
    def result(self) -> Reduced:
        return self._lgreco._conclude(self._pending.result(), self._asked, self._offered)

    def cancel(self) -> None:
        self._pending.cancel()
