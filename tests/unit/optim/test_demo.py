"""DeMo against its identities and against the paper's arithmetic on whole tensors, over LocalSwarm."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from swarmkit.optim.collective import Collective
from swarmkit.optim.dct import dct_basis
from swarmkit.optim.demo import DeMo
from swarmkit.optim.demo_averaging import DeMoAveraging
from swarmkit.optim.demo_momentum import Mean, Momentum, entries
from swarmkit.optim.demo_payload import Sparse
from swarmkit.optim.schedule import Every
from swarmkit.peers.local import LocalCollective, LocalSwarm
from tests.unit.optim.replicas import held_out_loss, same, trained

CPU = torch.device("cpu")
SHAPES = [(16, 24), (8, 8), (24, 8)]  # multiples of the chunk, so that tensors are easily cut by hand
CHUNK, LR = 8, 2**-6
EVERYTHING = 10**6  # more entries than any chunk has

Gradient = Callable[[int, int, int], Tensor]  # rank, step, tensor


def randn(shape: Sequence[int], *seed: int) -> Tensor:
    number = sum(place * 1009**i for i, place in enumerate(seed))
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(number))


def noise(rank: int, step: int, tensor: int) -> Tensor:
    return randn(SHAPES[tensor], rank, step, tensor)


def start() -> list[Tensor]:
    return [torch.nn.Parameter(randn(shape, 77, i)) for i, shape in enumerate(SHAPES)]


def make_demo(
    parameters: list[Tensor],
    collective: Collective,
    *,
    k: int = 20,
    lr: float = LR,
    chunk: int = CHUNK,
    weight_decay: float = 0.0,
    **options: object,
) -> DeMo:
    """As the paper has it, unless the options say otherwise."""
    sgd = torch.optim.SGD(parameters, lr=lr, weight_decay=weight_decay)
    options = {"precondition": None, "average": "senders"} | options
    return DeMo(sgd, collective=collective, k=k, chunk=chunk, **options)  # type: ignore[arg-type]


def run(
    gradient: Gradient = noise,
    *,
    replicas: int = 1,
    steps: int = 5,
    make: Callable[[list[Tensor], Collective], DeMo] = make_demo,
) -> list[tuple[list[Tensor], DeMo]]:
    """Parameters and optimizers of all replicas after training."""

    def task(collective: LocalCollective, rank: int) -> tuple[list[Tensor], DeMo]:
        parameters = start()
        optimizer = make(parameters, collective)
        for step in range(steps):
            for i, parameter in enumerate(parameters):
                parameter.grad = gradient(rank, step, i)
            optimizer.step()
        return [parameter.detach() for parameter in parameters], optimizer

    return LocalSwarm(replicas).run(task)


def to_chunks(x: Tensor) -> Tensor:
    """Coefficients of a matrix [chunks, area], cut by hand."""
    (h, w), basis = x.shape, dct_basis(CHUNK, CPU)
    cut = x.view(h // CHUNK, CHUNK, w // CHUNK, CHUNK).transpose(1, 2)
    return (basis @ cut @ basis.T).reshape(-1, CHUNK * CHUNK)


def from_chunks(z: Tensor, h: int, w: int) -> Tensor:
    basis = dct_basis(CHUNK, CPU)
    cut = basis.T @ z.view(h // CHUNK, w // CHUNK, CHUNK, CHUNK) @ basis
    return cut.transpose(1, 2).reshape(h, w)


class Reference:
    """Algorithm 1 of the paper with the public code's average: residuals of whole tensors, all workers in one place."""

    def __init__(self, workers: int, *, k: int, beta: float, sign: bool) -> None:
        self.parameters = [parameter.detach() for parameter in start()]
        self.residuals = [[torch.zeros(shape) for shape in SHAPES] for _ in range(workers)]
        self.beta, self.sign = beta, sign
        self.k = max(1, min(CHUNK**2, math.ceil(k * CHUNK / 64)))

    def step(self, gradient: Gradient, step: int) -> None:
        for i, parameter in enumerate(self.parameters):
            total = torch.zeros(parameter.numel() // CHUNK**2, CHUNK**2)
            senders = torch.zeros_like(total)
            for rank, residuals in enumerate(self.residuals):
                residuals[i] = self.beta * residuals[i] + gradient(rank, step, i)
                z = to_chunks(residuals[i])
                index = z.abs().topk(self.k, dim=1).indices
                sent = torch.zeros_like(z).scatter_(1, index, z.gather(1, index))
                residuals[i] = residuals[i] - from_chunks(sent, *parameter.shape)
                total += sent
                senders.scatter_add_(1, index, torch.ones_like(z))
            mean = from_chunks(total / senders.clamp(min=1), *parameter.shape)
            parameter -= LR * (mean.sign() if self.sign else mean)


def share_that_differs(left: list[Tensor], right: list[Tensor], tolerance: float) -> float:
    pairs = list(zip(left, right, strict=True))
    return sum(int(((a - b).abs() > tolerance).sum()) for a, b in pairs) / sum(a.numel() for a, _ in pairs)


def assert_close(left: list[Tensor], right: list[Tensor], tolerance: float = 1e-5) -> None:
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


# -- identities ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.9, 0.999])
def test_sending_everything_is_sign_sgd_and_leaves_no_residual(beta: float) -> None:
    """(2)"""

    def clear(rank: int, step: int, tensor: int) -> Tensor:
        g = noise(rank, step, tensor)
        return g + 0.1 * g.sign()

    make = partial(make_demo, k=EVERYTHING, beta=beta, values="float32", sign=True)
    ((found, optimizer),) = run(clear, make=make)
    wanted = [parameter.detach() for parameter in start()]
    for step in range(5):
        for i, parameter in enumerate(wanted):
            parameter -= LR * clear(0, step, i).sign()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert all(float(t.abs().max()) <= 2e-8 for t in optimizer.averaging.momentum.tensors)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("average", ["senders", "members"])
def test_sending_everything_unsigned_is_sgd_on_the_mean_gradient(replicas: int, average: str) -> None:
    """(3)"""
    make = partial(make_demo, k=EVERYTHING, values="float32", average=average)
    wanted = start()
    sgd = torch.optim.SGD(wanted, lr=LR)
    for step in range(5):
        for i, parameter in enumerate(wanted):
            parameter.grad = torch.stack([noise(rank, step, i) for rank in range(replicas)]).mean(0)
        sgd.step()
    for found, _ in run(replicas=replicas, make=make):
        assert_close(found, [parameter.detach() for parameter in wanted])


@pytest.mark.parametrize("values", ["float32", "float16", "int8", "sign"])
@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_without_decay_what_is_sent_and_what_is_left_are_all_gradients(values: str, alpha: float) -> None:
    """(4): the parameters moved by alpha times what has left the momentum."""
    make = partial(make_demo, beta=1.0, values=values, alpha=alpha)
    ((found, optimizer),) = run(make=make, steps=8)
    left = torch.split(optimizer.averaging.momentum.tensors[0], [6, 1, 3])
    for i, (after, before) in enumerate(zip(found, start(), strict=True)):
        sent = alpha * (before.detach() - after) / LR
        total = torch.stack([noise(0, step, i) for step in range(8)]).sum(0)
        torch.testing.assert_close(to_chunks(sent) + left[i], to_chunks(total), rtol=0, atol=1e-3)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("sign", [True, False])
def test_a_momentum_of_coefficients_is_the_papers_residual_of_tensors(replicas: int, sign: bool) -> None:
    """(5)"""
    assert_matches_the_reference(make_demo, replicas=replicas, sign=sign)


def assert_matches_the_reference(
    make: Callable[..., DeMo], *, replicas: int = 3, sign: bool = False, gradient: Gradient = noise
) -> None:
    reference = Reference(replicas, k=20, beta=0.9, sign=sign)
    for step in range(6):
        reference.step(gradient, step)
    found = run(gradient, replicas=replicas, steps=6, make=partial(make, beta=0.9, values="float32", sign=sign))
    for rank, (parameters, optimizer) in enumerate(found):
        if sign:  # One rounding apart, a sum near zero has the other sign.
            assert share_that_differs(parameters, reference.parameters, LR) < 0.005
        else:
            assert_close(parameters, reference.parameters)
        left = torch.split(optimizer.averaging.momentum.tensors[0], [6, 1, 3])
        for held, residual in zip(left, reference.residuals[rank], strict=True):
            torch.testing.assert_close(held, to_chunks(residual), rtol=0, atol=1e-5)


@pytest.mark.parametrize("values", ["float32", "float16", "int8", "sign"])
def test_the_scale_of_gradients_changes_no_signed_step(values: str) -> None:
    """(7)"""
    make = partial(make_demo, values=values, sign=True)
    for (once, _), (eight, _) in zip(
        run(replicas=2, make=make), run(lambda *at: 8 * noise(*at), replicas=2, make=make), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(once, eight, strict=True))


@pytest.mark.parametrize("sign", [True, False])
@pytest.mark.parametrize("average", ["senders", "members"])
def test_identical_replicas_are_one_replica(sign: bool, average: str) -> None:
    """(8)"""

    def shared(rank: int, step: int, tensor: int) -> Tensor:
        return noise(0, step, tensor)

    make = partial(make_demo, sign=sign, average=average)
    ((alone, _),) = run(shared, make=make)
    for found, _ in run(shared, replicas=4, make=make):  # quarters are exact
        assert_close(found, alone, 0 if sign else 1e-6)


def test_the_order_of_replicas_turns_no_sign() -> None:
    """(9)"""
    order = [2, 0, 1]
    make = partial(make_demo, values="float32", sign=True)
    forward = run(replicas=3, make=make)
    turned = run(lambda rank, step, i: noise(order[rank], step, i), replicas=3, make=make)
    assert share_that_differs(forward[0][0], turned[0][0], LR / 2) == 0


@pytest.mark.parametrize(("beta", "steps"), [(0.0, 20), (0.999, 1)])
def test_one_bit_of_a_single_coefficient_loses_nothing_under_the_sign(beta: float, steps: int) -> None:
    """(12): of the step; the momentum keeps what its scale's rounding lost, which later shifts what is largest."""
    make = partial(make_demo, k=1, beta=beta, sign=True)
    ((one_bit, _),) = run(make=partial(make, values="sign"), steps=steps)
    ((exact, _),) = run(make=partial(make, values="float32"), steps=steps)
    assert share_that_differs(one_bit, exact, LR / 2) == 0


def test_normalised_chunks_all_move_by_the_learning_rate() -> None:
    make = partial(make_demo, normalise=True)
    ((found, optimizer),) = run(make=make, steps=1)
    for after, before in zip(found, start(), strict=True):
        moved = to_chunks((before.detach() - after) / LR)
        torch.testing.assert_close(moved.square().mean(1), torch.ones(len(moved)), rtol=0, atol=1e-5)
    ((plain, _),) = run(make=partial(make, normalise=False), steps=1)
    for after, other, before in zip(found, plain, start(), strict=True):
        left, right = (to_chunks(before.detach() - x) for x in (after, other))
        torch.testing.assert_close(torch.cosine_similarity(left, right), torch.ones(len(left)), rtol=0, atol=1e-5)
    assert optimizer.last_report is not None
    assert optimizer.last_report.pseudo_gradient_norm > 0


def test_chunks_of_zeros_stay_zeros_when_normalised() -> None:
    make = partial(make_demo, normalise=True)
    ((found, _),) = run(lambda rank, step, i: torch.zeros(SHAPES[i]), make=make)
    assert all(torch.equal(a, b.detach()) for a, b in zip(found, start(), strict=True))


# -- planted slips ---------------------------------------------------------------------------------------------------


def test_a_sum_in_place_of_the_mean_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mean, "_shares", lambda self, index, scratch: [1.0] * len(index))
    with pytest.raises(AssertionError):
        assert_matches_the_reference(make_demo)


def test_a_mean_over_members_in_place_of_senders_is_noticed() -> None:
    with pytest.raises(AssertionError):
        assert_matches_the_reference(partial(make_demo, average="members"))


def test_an_error_that_is_not_subtracted_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Momentum, "subtract", lambda self, parts, alpha: None)
    with pytest.raises(AssertionError):
        assert_matches_the_reference(make_demo)


def test_positions_off_by_one_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = Momentum.largest

    def slipped(self: Momentum) -> list[Sparse]:
        return [Sparse((part.index + 1).clamp(max=CHUNK**2 - 1), part.values) for part in largest(self)]

    monkeypatch.setattr(Momentum, "largest", slipped)
    # Two entries at the border may coincide, which members refuse; then nothing moves, which is noticed as well.
    with pytest.raises(AssertionError):
        assert_matches_the_reference(make_demo)


def test_a_decay_that_comes_after_the_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    accumulate = Momentum.accumulate

    def slipped(self: Momentum, gradients: Sequence[Tensor], decay: float) -> None:
        accumulate(self, gradients, 1.0)
        torch._foreach_mul_(self.tensors, decay)

    monkeypatch.setattr(Momentum, "accumulate", slipped)
    with pytest.raises(AssertionError):
        assert_matches_the_reference(make_demo)


# -- an ordinary optimizer -------------------------------------------------------------------------------------------


def test_weight_decay_is_decoupled_from_the_sign() -> None:
    make = partial(make_demo, k=EVERYTHING, values="float32", sign=True, weight_decay=0.1)
    ((found, _),) = run(make=make, steps=1)
    before = [parameter.detach() for parameter in start()]
    wanted = [p * (1 - LR * 0.1) - LR * noise(0, 0, i).sign() for i, p in enumerate(before)]
    assert_close(found, wanted, 1e-6)


def test_between_rounds_parameters_stay_and_the_momentum_gathers() -> None:
    parameters = start()
    before = [parameter.detach().clone() for parameter in parameters]
    (collective,) = LocalSwarm(1).collectives
    optimizer = make_demo(parameters, collective, beta=0.5, sync=Every(3))
    for step in range(2):
        for i, parameter in enumerate(parameters):
            parameter.grad = noise(0, step, i)
        optimizer.step()
    assert all(torch.equal(a.detach(), b) for a, b in zip(parameters, before, strict=True))
    wanted = torch.cat([to_chunks(0.5 * noise(0, 0, i) + noise(0, 1, i)) for i in range(3)])
    torch.testing.assert_close(optimizer.averaging.momentum.tensors[0], wanted, rtol=0, atol=1e-5)
    for i, parameter in enumerate(parameters):
        parameter.grad = noise(0, 2, i)
    optimizer.step()
    assert optimizer.round == 1
    assert not torch.equal(parameters[0].detach(), before[0])


def test_members_are_weighted_by_their_samples_per_step() -> None:
    def task(collective: LocalCollective, rank: int) -> list[Tensor]:
        parameters = start()
        optimizer = make_demo(parameters, collective, k=EVERYTHING, values="float32")
        for i, parameter in enumerate(parameters):
            parameter.grad = noise(rank, 0, i)
        optimizer.samples += [1.0, 3.0][rank]
        optimizer.step()
        return [parameter.detach() for parameter in parameters]

    wanted = [p.detach() - LR * (noise(0, 0, i) + 3 * noise(1, 0, i)) / 4 for i, p in enumerate(start())]
    for found in LocalSwarm(2).run(task):
        assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_any_precision_of_parameters_learns_and_stays_equal_on_all_replicas(dtype: torch.dtype) -> None:
    def make(parameters: list[Tensor], collective: Collective) -> DeMo:
        return make_demo(parameters, collective, lr=0.1, k=32, beta=0.9)

    nets = trained(make, replicas=2, steps=30, dtype=dtype)
    untrained = trained(make, replicas=1, steps=0, dtype=dtype)[0][0]
    assert all(same(net, nets[0][0]) for net, _ in nets)
    assert len({optimizer.digest() for _, optimizer in nets}) == 1
    assert held_out_loss(nets[0][0]) < 0.8 * held_out_loss(untrained)


def test_the_same_training_gives_the_same_bits() -> None:
    first, second = (run(replicas=3) for _ in range(2))
    for (left, _), (right, _) in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k=0"),
        ({"chunk": 300}, "chunk=300"),
        ({"beta": 1.5}, "beta=1.5"),
        ({"alpha": 0.0}, "alpha=0.0"),
        ({"values": "int3"}, "values='int3'"),
        ({"average": "all"}, "average='all'"),
        ({"precondition": 1.0}, "precondition=1.0"),
        ({"precondition": math.nan}, "precondition=nan"),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_demo(start(), LocalSwarm(1).collectives[0], **options)  # type: ignore[arg-type]


def test_a_codec_beside_its_own_payload_is_refused() -> None:
    averaging = make_demo(start(), LocalSwarm(1).collectives[0]).averaging
    assert isinstance(averaging, DeMoAveraging)
    with pytest.raises(ValueError, match="averaging"):
        make_demo(start(), LocalSwarm(1).collectives[0], averaging=averaging)


def test_smaller_chunks_send_fewer_entries() -> None:
    chunks = make_demo(
        [torch.nn.Parameter(torch.zeros(64, 64)), torch.nn.Parameter(torch.zeros(500))],
        LocalSwarm(1).collectives[0],
        k=32,
        chunk=64,
    ).averaging.momentum.chunks
    assert [entries(group, 32) for group in chunks.groups] == [4, 32]
