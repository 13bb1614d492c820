"""Which tensors of a contribution a codec gets, which travel exact, and how both become one mean again."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmkit.optim.collective import Gathered, stats_of
from swarmkit.optim.compression.codec import Codec, GatherCodec, Layout, check_part, compresses
from swarmkit.optim.compression.rounds import Outcome
from swarmkit.optim.errors import RoundFailed
from swarmkit.optim.mean import weighted_mean
from swarmkit.optim.norms import is_finite

_Form = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Plan:
    """How a contribution of tensors of certain forms travels."""

    forms: tuple[_Form, ...]
    given: int  # how many of them were offered for compression
    device: torch.device
    compressed: list[int]
    exact: list[int]
    layout: Layout  # of the compressed ones

    @classmethod
    def of(cls, codec: Codec, tensors: Sequence[Tensor], exact: Sequence[Tensor]) -> "Plan":
        """Let the codec have what it is for; raises ValueError for what has no mean."""
        everything = [*tensors, *exact]
        for position, tensor in enumerate(everything):
            if not tensor.is_floating_point():
                raise ValueError(f"tensor {position} has dtype {tensor.dtype}: only floating-point tensors have a mean")
        compressed = [i for i, t in enumerate(tensors) if compresses(codec, t.shape)]
        taken = set(compressed)
        device = everything[0].device if everything else torch.device("cpu")
        layout = Layout.of([tensors[i] for i in compressed], codec.align)
        rest = [i for i in range(len(everything)) if i not in taken]
        return cls(_forms(everything), len(tensors), device, compressed, rest, layout)

    def fits(self, tensors: Sequence[Tensor], exact: Sequence[Tensor]) -> bool:
        """Whether these are of the plan's forms."""
        device = tensors[0].device if tensors else self.device
        return (self.given, self.forms, self.device) == (len(tensors), _forms([*tensors, *exact]), device)

    @property
    def elements(self) -> int:
        """Elements that the codec gets."""
        return sum(self.layout.sizes)

    def payload_bytes(self, codec: Codec) -> int:
        """Bytes of a payload with the codec's own parameter, without what is exact."""
        return sum(codec.payload_bytes(shape) for shape in self.layout.shapes)

    def check_finite(self, flat: Tensor, everything: Sequence[Tensor]) -> None:
        """Raise ValueError naming the position of the first tensor with values that are not finite."""
        exact = [everything[i] for i in self.exact]
        if is_finite(flat) and all(is_finite(tensor) for tensor in exact):
            return
        of_flat = dict(zip(self.compressed, self.layout.views(flat), strict=True))
        for position, tensor in enumerate(everything):
            if not is_finite(of_flat.get(position, tensor)):
                raise ValueError(f"tensor {position} holds values that are not finite, or not in float32")

    def check_residual(self, residual: Sequence[Tensor]) -> None:
        """Raise ValueError when a residual is not of the compressed tensors."""
        check_residual(residual, self.layout.shapes)

    # -- exact tensors in a gather -----------------------------------------------------------------------------------

    def _dtypes(self) -> list[torch.dtype]:
        return sorted({self.forms[i][1] for i in self.exact}, key=str)

    def pack_exact(self, exact: Sequence[Tensor]) -> list[Tensor]:
        """One flat tensor for each dtype that occurs."""
        return [torch.cat([t.reshape(-1) for t in exact if t.dtype == dtype]) for dtype in self._dtypes()]

    def _read_exact(self, parts: Sequence[Tensor]) -> list[Tensor]:
        for dtype, part in zip(self._dtypes(), parts, strict=True):
            size = sum(math.prod(self.forms[i][0]) for i in self.exact if self.forms[i][1] == dtype)
            if not is_finite(check_part(part, "exact tensors", dtype, size)):
                raise ValueError("exact tensors of the payload are not finite")
        return list(parts)

    def _unpack_exact(self, parts: Sequence[Tensor]) -> list[Tensor]:
        rest = dict(zip(self._dtypes(), parts, strict=True))
        found = []
        for i in self.exact:
            shape, dtype = self.forms[i]
            size = math.prod(shape)
            found.append(rest[dtype][:size].view(shape))
            rest[dtype] = rest[dtype][size:]
        return found

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, codec: GatherCodec, gathered: Gathered, peer_id: str, *, keep_own: bool) -> Outcome:
        """The weighted mean of the payloads that are ones, with `keep_own` also the own one.

        All members read the same bytes, so all drop the same ones. Raises RoundFailed when none is left.
        """
        payloads = [[tensor.to(self.device) for tensor in payload] for payload in gathered.payloads]
        members = list(range(len(payloads)))
        while True:
            total = math.fsum(gathered.weights[i] for i in members)
            if total <= 0:
                raise RoundFailed("nobody contributed a payload that can be read")
            bad, mean, exact, own = self._mean(codec, payloads, gathered, members, total, peer_id if keep_own else None)
            if bad is None:
                break
            # Rare, so begun again: the shares of all others change.
            members.remove(bad)
        return Outcome(stats=stats_of(gathered, members), mean=mean, exact=self._unpack_exact(exact), sent=own)

    def _mean(
        self,
        codec: GatherCodec,
        payloads: Sequence[Sequence[Tensor]],
        gathered: Gathered,
        members: Sequence[int],
        total: float,
        own_id: str | None,
    ) -> tuple[int | None, Tensor, list[Tensor], Tensor | None]:
        """The first member whose payload is none, the mean, the exact ones' mean, and the own buffer."""
        kinds = len(self._dtypes())
        mean = torch.zeros(self.layout.total, device=self.device)
        scratch = torch.empty_like(mean)
        exact: list[list[Tensor]] = []
        own: Tensor | None = None
        for i in members:
            weight = gathered.weights[i]
            if weight == 0:
                continue
            try:
                parts = self._read_exact(payloads[i][:kinds]) if len(payloads[i]) >= kinds else None
                if parts is None:
                    raise ValueError("the payload lacks exact tensors")
                codec.decode(payloads[i][kinds:], self.layout, out=scratch)
            except ValueError:
                return i, mean, [], own
            mean.add_(scratch, alpha=weight / total)
            exact.append(parts)
            if gathered.members[i] == own_id:
                own, scratch = scratch, torch.empty_like(mean)
        if not is_finite(mean):
            mean.nan_to_num_()  # a sum of shares of the largest numbers, rounded up
        weights = [gathered.weights[i] for i in members if gathered.weights[i] > 0]
        return None, mean, [weighted_mean(parts, weights) for parts in zip(*exact, strict=True)], own

    def join(self, mean: Tensor, exact: Sequence[Tensor]) -> list[Tensor]:
        """All tensors of the contribution in order, from the mean of both kinds."""
        found = dict(zip(self.compressed, self.layout.split(mean), strict=True))
        found.update(zip(self.exact, exact, strict=True))
        return [found[i] for i in range(len(self.forms))]


def check_residual(residual: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise ValueError when a residual is not of tensors of these shapes."""
    found = [tuple(tensor.shape) for tensor in residual]
    if found != list(shapes):
        raise ValueError(f"the residual is of tensors {found[:3]}..., these are {list(shapes[:3])}...")


def _forms(tensors: Sequence[Tensor]) -> tuple[_Form, ...]:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
