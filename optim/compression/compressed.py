"""CompressedAveraging: averages tensors through a codec, with error feedback (arXiv 1901.09847) where wanted."""

import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any

import torch
from torch import Tensor

from swarmkit.optim.averaging import Pending
from swarmkit.optim.collective import Collective, Gathered, Reduced, RoundKey
from swarmkit.optim.compression.casting import Casting
from swarmkit.optim.compression.codec import Codec, GatherCodec, LinearCodec, Parameters, compresses
from swarmkit.optim.compression.plan import Plan, check_residual
from swarmkit.optim.compression.powersgd import PowerSGD, check_bases
from swarmkit.optim.compression.qsgd import QSGD, feedback_refusal
from swarmkit.optim.compression.random_k import RandomK
from swarmkit.optim.compression.rounds import GatherRound, LinearRound, Outcome, Round, ShardedRound
from swarmkit.optim.compression.route import Route, choose
from swarmkit.optim.compression.saved import read_parameters, read_tensors
from swarmkit.optim.compression.seeds import digest, number
from swarmkit.optim.compression.slices import CodecWire
from swarmkit.optim.compression.ternary import FEEDBACK_REFUSAL, TernGrad
from swarmkit.optim.errors import KeyTaken, RoundFailed
from swarmkit.optim.norms import is_finite

logger = logging.getLogger(__name__)
_MAX_MEMBERS = 1_000_000
_STATE = ("codec", "seed", "members", "parameters", "residual", "state", "state_id")


class CompressedAveraging:
    """Averages tensors through a codec; see Averaging.

    Linear codecs ride all-reduces. The others ride an all-gather: each member decodes all payloads and takes the
    weighted mean, in float32 and in member order. A payload that isn't one is dropped by all alike and its member is
    not in the result. Where the gather would send more than averaging everything in float16 does, which is when
    members * payload exceeds twice the float16 bytes, payloads travel by slices (see Shards): each is averaged by its
    owner and encoded once more. The count is that of the last closed round, which joiners hear of with the shared
    state; a member that assumes another one brings another form and is not averaged with the others. `route` settles
    it for good. What was chosen is told in the result.

    Tensors that the codec is not for, as they are small or get no smaller, and `exact` ones travel as they are in the
    same round.

    With `error_feedback` what a codec leaves out is added to the next contribution. Residuals change only in `result`,
    by what a closed round contained. A weight of 0 leaves them alone. What an owner leaves out of a slice's mean goes
    into its own residual, times the members' weights over its own: so the next mean has it, and nothing is owed by who
    owns another slice then. An owner of weight 0 has nowhere to put it.

    A member that missed a round of a codec with shared state (PowerSGD's bases) only observes the next one, with
    weight 0, and has it then. Draws depend on the seed, the peer and the round's key alone.
    """

    def __init__(
        self,
        codec: Codec,
        collective: Collective,
        *,
        error_feedback: bool = False,
        generator: torch.Generator | int = 0,
        route: Route | None = None,
    ) -> None:
        """`generator`, or a seed, is where random codecs' draws come from; members may share it.

        `route` is of a gather codec, the same on all members; without one it follows their number.
        """
        if not isinstance(codec, GatherCodec | LinearCodec):
            raise ValueError(f"{type(codec).__name__} is neither a gather codec nor a linear one")
        reason = why_not_fed_back(codec, codec.parameter) if error_feedback else None
        if reason is not None:
            raise ValueError(f"{codec.name} with error_feedback: {reason}")
        if route is not None and not isinstance(codec, GatherCodec):
            raise ValueError(f"route={route.name}: payloads of {codec.name} can be summed, they ride all-reduces")
        self.codec = codec
        self._route = route
        self.error_feedback = error_feedback
        self._collective = collective
        seed = generator
        if isinstance(generator, torch.Generator):
            seed = int(torch.randint(2**62, (1,), generator=generator, device=generator.device))
        self._seed = number(f"{seed}|{collective.peer_id}")
        self._dense = Casting("fp16")
        self._plan: Plan | None = None
        self._expected: tuple[tuple[int, ...], ...] | None = None  # what the codec will get, before there is a plan
        self._parameters: tuple[float, ...] | None = None
        self._residual: Tensor | None = None
        self._loaded: list[Tensor] | None = None  # a residual whose layout the next contribution shows
        self._state: list[Tensor] = []  # of the codec, equal on all members
        self._state_id = ""  # of the round that it comes from
        self._stale = False  # others hold a newer one
        self._members: int | None = None  # of the last closed round; None: nobody has told this member yet
        self._guess = 0  # which route to try first then

    # -- parameters --------------------------------------------------------------------------------------------------

    @property
    def parameters(self) -> tuple[float, ...] | None:
        """The codec's parameter for each tensor that it gets, from the next `begin` on; None: its own for all."""
        return self._parameters

    @parameters.setter
    def parameters(self, parameters: Parameters | None) -> None:
        found = None if parameters is None else tuple(float(parameter) for parameter in parameters)
        for parameter in set(found or ()):
            self.codec.payload_bytes((1, 1), parameter)  # raises for what is none
            reason = why_not_fed_back(self.codec, parameter) if self.error_feedback else None
            if reason is not None:
                raise ValueError(f"{self.codec.name} with error_feedback: {reason}")
        self._parameters = found

    def compressed(self, tensors: Sequence[Tensor]) -> list[int]:
        """Positions of the tensors that the codec gets: the parameters are for these."""
        return [i for i, tensor in enumerate(tensors) if compresses(self.codec, tensor.shape)]

    def expect(self, tensors: Sequence[Tensor]) -> None:
        """See Expecting."""
        self._expected = tuple(tuple(tensors[i].shape) for i in self.compressed(tensors))

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...] | None:
        """Of the tensors that the codec gets; None before any are known."""
        return self._expected if self._plan is None else self._plan.layout.shapes

    @property
    def is_behind(self) -> bool:
        """See Averaging."""
        return self._stale

    # -- rounds ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(
        self, tensors: Sequence[Tensor], exact: Sequence[Tensor] = (), *, round: RoundKey, weight: float
    ) -> Pending:
        """See Averaging. Raises ValueError as `Collective.all_reduce` does, naming the position."""
        if not math.isfinite(weight) or weight < 0:
            raise ValueError(f"weight={weight}: must be finite and not negative")
        plan = self._planned(tensors, exact)
        self._adopt_loaded(plan)
        if self._residual is not None and self._residual.numel() != plan.layout.total:
            raise ValueError("the residual is of other tensors: an averaging with error feedback has one set of them")
        if self._stale:
            weight = 0.0
        flat = plan.layout.flatten([tensors[i] for i in plan.compressed])
        plan.check_finite(flat, [*tensors, *exact])
        if weight > 0 and self._residual is not None:
            flat.add_(self._residual)
            if not is_finite(flat):
                logger.warning("what error feedback had kept overflows with the new contribution: it is dropped")
                self._residual = None
                flat = plan.layout.flatten([tensors[i] for i in plan.compressed])
        kept = [(tensors[i] if i < len(tensors) else exact[i - len(tensors)]).detach() for i in plan.exact]
        under_way = self._send(plan, flat, kept, round, weight)
        return _Pending(self, plan, flat, weight, under_way)

    def _send(self, plan: Plan, flat: Tensor, exact: list[Tensor], key: RoundKey, weight: float) -> Round:
        codec = self.codec
        if not plan.compressed:
            return self._reduce(self._dense, plan, flat, exact, key, weight)
        if isinstance(codec, LinearCodec):
            return self._reduce(codec, plan, flat, exact, key, weight)
        *others, last = self._routes(plan)
        for route in others:
            try:
                return self._travel(route, plan, flat, exact, key, weight)
            except KeyTaken:
                continue  # the others are on another route
        return self._travel(last, plan, flat, exact, key, weight)

    def _routes(self, plan: Plan) -> list[Route]:
        """The route of the next round, or those to try in turn."""
        if self._route is not None:
            return [self._route]
        if self._members is not None:
            return [choose(self._members, plan.payload_bytes(self.codec), plan.elements)]
        routes = list(Route)
        return routes[self._guess :] + routes[: self._guess]

    def _travel(
        self, route: Route, plan: Plan, flat: Tensor, exact: list[Tensor], key: RoundKey, weight: float
    ) -> Round:
        if route is Route.fp16:
            found: Round = self._reduce(self._dense, plan, flat, exact, key, weight)
        elif route is Route.sharded:
            found = self._shard(plan, flat, exact, key, weight)
        else:
            found = self._gather(plan, flat, exact, key, weight)
        found.route = route.name
        return found

    def _reduce(
        self, codec: LinearCodec, plan: Plan, flat: Tensor, exact: list[Tensor], key: RoundKey, weight: float
    ) -> Round:
        if len(codec.stages) > 1:
            # Sums over different bases mean nothing. One who only observes has to fit all: it has no basis yet.
            lineage = digest(f"{key.lineage}|{self._state_id}") if key.lineage or self._state_id else ""
            key = RoundKey(key.name, key.index, lineage if weight > 0 else "", key.digest)
        shared = torch.Generator().manual_seed(number(f"shared|{key}"))
        exchange = codec.exchange(
            flat, plan.layout, shared, self._parameters if codec is self.codec else None, self._state
        )
        return LinearRound(
            self._collective,
            exchange,
            codec.stages,
            exact,
            round=key,
            weight=weight,
            keep_sent=self.error_feedback,
        )

    def _gather(self, plan: Plan, flat: Tensor, exact: list[Tensor], key: RoundKey, weight: float) -> Round:
        codec = self.codec
        assert isinstance(codec, GatherCodec)
        payload = [flat.new_empty(0)]
        if weight > 0:
            own = torch.Generator(device=flat.device).manual_seed(number(f"{self._seed}|{key}"))
            payload = [*plan.pack_exact(exact), *codec.encode(flat, plan.layout, own, self._parameters)]

        def read(gathered: Gathered) -> Outcome:
            return plan.read(codec, gathered, self._collective.peer_id, keep_own=self.error_feedback)

        return GatherRound(self._collective, payload, read, round=key, weight=weight)

    def _shard(self, plan: Plan, flat: Tensor, exact: list[Tensor], key: RoundKey, weight: float) -> Round:
        assert isinstance(self.codec, GatherCodec)
        wire = CodecWire(self.codec, plan.layout, self._parameters, f"{self._seed}|{key}")
        return ShardedRound(
            self._collective, flat, wire, exact, round=key, weight=weight, keep_sent=self.error_feedback
        )

    def _planned(self, tensors: Sequence[Tensor], exact: Sequence[Tensor]) -> Plan:
        if self._plan is None or not self._plan.fits(tensors, exact):
            self._plan = Plan.of(self.codec, tensors, exact)
        return self._plan

    # -- the end of a round ------------------------------------------------------------------------------------------

    def _commit(self, flat: Tensor, weight: float, outcome: Outcome) -> None:
        """Adopt what a closed round says; `flat` is what this member offered."""
        if self.error_feedback and weight > 0:
            self._residual = flat if outcome.sent is None else flat.sub_(outcome.sent)
            if outcome.wired is not None:
                start, left = outcome.wired.start, outcome.wired.left
                total = math.fsum(outcome.stats["weights"])
                self._residual[start : start + left.numel()].add_(left, alpha=total / weight)
        if outcome.state:
            self._state, self._state_id = outcome.state, outcome.stats["id"]
        self._stale = False
        self._members = len(outcome.stats["members"])

    def _on_failure(self, error: RoundFailed) -> None:
        """Forget what others may have changed meanwhile; a round that failed for all leaves everything as it was."""
        has_state = isinstance(self.codec, LinearCodec) and len(self.codec.stages) > 1
        if error.missed:
            self._stale = has_state
            self._members = None
        elif self._stale:
            # Perhaps nobody is left who has a newer one.
            self._state, self._state_id, self._stale = [], "", False
        if self._members is None:
            self._guess = (self._guess + 1) % len(Route)

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """See Averaging: residuals, the codec's shared state, parameters, seed, and the last round's member count."""
        if self._residual is not None:
            assert self._plan is not None
            residual = [view.clone() for view in self._plan.layout.views(self._residual)]
        else:
            residual = [tensor.clone() for tensor in self._loaded or []]
        return {
            "codec": self.codec.name,
            "seed": self._seed,
            "members": self._members,
            "parameters": None if self._parameters is None else list(self._parameters),
            "residual": residual,
            "state": [tensor.clone() for tensor in self._state],
            "state_id": self._state_id,
        }

    def shared_state(self) -> dict[str, Any]:
        """See Averaging: how many members the last closed round had."""
        return {"members": self._members}

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """See Averaging."""
        self._members = check_members(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Averaging. What no tensors are known for is checked against them in the next `begin`."""
        missing = sorted(set(_STATE) - set(state))
        if missing:
            raise ValueError(f"the state of the averaging lacks {missing[0]!r}")
        if state["codec"] != self.codec.name:
            raise ValueError(f"the state is of codec {state['codec']!r}, this run has {self.codec.name!r}")
        shapes = self.shapes
        residual, bases = read_tensors(state["residual"], "residual"), read_tensors(state["state"], "codec's state")
        parameters = read_parameters(state["parameters"], None if shapes is None else len(shapes))
        counts = {len(part) for part in (residual, bases, parameters or ()) if part}
        if len(counts) > 1:
            raise ValueError(f"the residual, the codec's state and the parameters are of {sorted(counts)} tensors")
        members = check_members({"members": state["members"]})
        if type(state["seed"]) is not int or not isinstance(state["state_id"], str):
            raise ValueError(f"seed {str(state['seed'])[:80]!r} or id {str(state['state_id'])[:80]!r} is none")
        if residual and not self.error_feedback:
            raise ValueError("the state has residuals of error feedback, this run has none")
        if residual and shapes is not None:
            check_residual(residual, shapes)
        if isinstance(self.codec, PowerSGD):
            check_bases(bases, shapes)
        elif bases:
            raise ValueError(f"the state has {len(bases)} tensors of a codec's state, {self.codec.name} has none")
        self.parameters = parameters
        self._seed, self._members = state["seed"], members
        self._state, self._state_id = bases, state["state_id"]
        self._stale, self._guess = False, 0
        self._residual, self._loaded = None, residual or None

    def _adopt_loaded(self, plan: Plan) -> None:
        if self._loaded is not None:
            plan.check_residual(self._loaded)
            self._residual = plan.layout.flatten(self._loaded)
            self._loaded = None


class _Pending:
    def __init__(
        self, averaging: CompressedAveraging, plan: Plan, flat: Tensor, weight: float, under_way: Round
    ) -> None:
        self._averaging = averaging
        self._plan = plan
        self._flat = flat
        self._weight = weight
        self._round = under_way

    def done(self) -> bool:
        return self._round.outcome.done()

    @torch.no_grad()
    def result(self) -> Reduced:
        try:
            outcome = self._round.outcome.result()
        except CancelledError:
            raise
        except RoundFailed as error:
            self._averaging._on_failure(error)
            raise
        self._averaging._commit(self._flat, self._weight, outcome)
        stats = {**outcome.stats, "route": self._round.route}
        return Reduced(tensors=self._plan.join(outcome.mean, outcome.exact), **stats)

    def cancel(self) -> None:
        self._round.cancel()


def why_not_fed_back(codec: Codec, parameter: float | None) -> str | None:
    """Why what a codec leaves out with a parameter must not be added to the next contribution; None: it may be."""
    if isinstance(codec, QSGD) and parameter is not None:
        return feedback_refusal(parameter, codec.norm)
    if isinstance(codec, TernGrad):
        return FEEDBACK_REFUSAL
    if isinstance(codec, RandomK) and codec.unbiased:
        return (
            "scaled up for unbiasedness, its error exceeds the signal and grows without end when fed back; "
            "use unbiased=False, or no error feedback"
        )
    return None


def check_members(state: Mapping[str, Any]) -> int | None:
    """The count of members that another one shares, or ValueError when it shares something else."""
    members = state.get("members")
    if set(state) - {"members"} or not (members is None or (type(members) is int and 0 < members <= _MAX_MEMBERS)):
        raise ValueError(f"the averaging shares {str(dict(state))[:80]}, this run's only how many its members are")
    return members
