"""adamw: its reference against the formula, and every other path against the reference in float64."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from mindspeed_lite.ops.adamw import adamw, cpu, reference
from tests.harness.compare import error
from tests.harness.reasons import why_not_of

pytest.importorskip("triton")
from tests.ops.adamw import RULE, Lists, make, through

why_not = why_not_of(functools.partial(adamw, **RULE))

NAMES = ("param", "exp_avg", "exp_avg_sq")


def run(function: Callable[..., None], lists: Lists, outs: bool = True, **rule: Any) -> Lists:
    """[params, exp_avgs, exp_avg_sqs, outs] after a step on copies."""
    own = copy.deepcopy(lists)
    function(*own[:4], **{**RULE, **rule}, outs=own[4] if outs else None)
    for before, after in zip(lists[1], own[1], strict=True):
        assert torch.equal(before.flatten().view(torch.uint8), after.flatten().view(torch.uint8)), (
            "a gradient was written"
        )
    return [own[0], *own[2:]]


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors])


def exact(lists: Lists, **rule: Any) -> Lists:
    """The reference in float64."""
    wide = [[tensor.double() for tensor in tensors] for tensors in lists]
    return run(through(reference), wide, outs=False, **rule)


def torchs(lists: Lists, **rule: Any) -> Lists:
    """What it stands in for: torch.optim as Megatron makes it, on gradients scaled before."""
    own, options = copy.deepcopy(lists), {**RULE, **rule}
    scale, step = options.pop("grad_scale", None), options.pop("step")
    kind = torch.optim.AdamW if options.pop("decoupled", True) else torch.optim.Adam
    optimizer = kind(own[0], **options)
    for param, grad, exp_avg, exp_avg_sq in zip(*own[:4], strict=True):
        param.grad = grad.float() if scale is None else grad.float() * scale
        state = {"step": torch.tensor(float(step - 1)), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        optimizer.state[param] = state
    optimizer.step()
    return [own[0], own[2], own[3]]


def test_reference_is_the_formula() -> None:
    def one(**rule: Any) -> list[float]:
        lists = [[torch.tensor([number], dtype=torch.float64)] for number in (1.0, 2.0, 0.0, 0.0, 0.0)]
        fixed = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 0.0, "weight_decay": 0.5, "step": 1}
        return [tensor.item() for (tensor,) in run(through(reference), lists, **{**fixed, **rule})]

    # m = 0.1 g, v = 0.01 g^2; after correction both give g: a first step of lr whatever the gradient
    assert one() == pytest.approx([0.95 - 0.1, 0.2, 0.04, 0.85])
    assert one(grad_scale=0.5) == pytest.approx([0.95 - 0.1, 0.1, 0.01, 0.85])
    assert one(grad_scale=torch.tensor(0.5)) == pytest.approx([0.95 - 0.1, 0.1, 0.01, 0.85])
    # L2: the gradient is 2 + 0.5 * 1
    assert one(decoupled=False) == pytest.approx([0.9, 0.25, 0.0625, 0.9])
    # sqrt(v) / sqrt(1 - 0.99) = 2
    assert one(eps=2.0) == pytest.approx([0.95 - 0.1 * 2 / 4, 0.2, 0.04, 0.9])
    # second step: 1 - 0.9^2 = 0.19, 1 - 0.99^2 = 0.0199
    second = 0.95 - 0.1 / 0.19 * 0.2 / (0.2 / 0.0199**0.5)
    assert one(step=2) == pytest.approx([second, 0.2, 0.04, second])


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [None, 0.37])
def test_on_cpu_every_bit_is_that_of_torch(decoupled: bool, grad_dtype: torch.dtype, scale: float | None) -> None:
    if (reason := cpu.LIBRARY.unusable()) is not None:
        pytest.skip(reason)
    lists = make([(300, 41), 40_000, 257, 255, 31, 8, 7, 1, 0], grad_dtype, None)
    theirs = copy.deepcopy(lists)
    for tensors in (lists[2], lists[3], theirs[2], theirs[3]):
        torch._foreach_zero_(tensors)
    for step in range(1, 9):
        # Other gradients each time, of magnitudes far apart.
        for tensors in (lists, theirs):
            fresh = make([tensor.shape for tensor in lists[0]], grad_dtype, None, seed=step)[1]
            tensors[1] = [gradient * 10.0 ** (step % 5 - 2) for gradient in fresh]
        rule = {"decoupled": decoupled, "grad_scale": scale, "step": step}
        lists[0], lists[2], lists[3], _ = run(adamw, lists, outs=False, **rule)
        theirs[0], theirs[2], theirs[3] = torchs(theirs, **rule)
        for name, place in (("param", 0), ("exp_avg", 2), ("exp_avg_sq", 3)):
            assert all(map(torch.equal, lists[place], theirs[place])), (name, step)


def test_on_cpu_every_bit_is_that_of_torch_whatever_the_magnitude() -> None:
    """Square roots, which are torch's and not the nearest: of 0, of every exponent, and of what has none."""
    if (reason := cpu.LIBRARY.unusable()) is not None:
        pytest.skip(reason)
    generator = torch.Generator().manual_seed(7)
    mantissas = 1 + torch.rand(300, 300, generator=generator)
    # Rows of one magnitude, of 2^-150 to 2^149, and of all of them with zeros between, infinity and NaN.
    moments = mantissas * torch.exp2(torch.arange(-150, 150, dtype=torch.float64)).float()[:, None]
    mixed = moments.flatten()[torch.randperm(90_000, generator=generator)].clone()
    mixed[::3] = 0
    mixed[5::1009] = float("inf")
    mixed[7::1009] = float("nan")
    for exp_avg_sq in (moments, mixed, torch.zeros(1000)):
        shape = exp_avg_sq.shape
        lists = [[torch.zeros(shape)], [torch.zeros(shape)], [torch.ones(shape)], [exp_avg_sq], [torch.zeros(shape)]]
        rule = {"eps": 0.0, "step": 1}
        ours, theirs = run(adamw, copy.deepcopy(lists), outs=False, **rule), torchs(lists, **rule)
        for name, (mine,), (their,) in zip(NAMES, ours, theirs, strict=False):
            assert torch.equal(mine.isnan(), their.isnan()), name
            same = (mine.view(torch.int32) == their.view(torch.int32)) | mine.isnan()
            assert same.all(), f"{name}: {int((~same).sum())} of {same.numel()} have other bits"


def test_tensors_that_are_not_contiguous_go_to_the_reference() -> None:
    lists = make([(6, 5)])
    lists = [[tensor.t() for tensor in tensors] for tensors in lists]
    assert why_not(*lists[:4]) == ["a tensor is not contiguous"]
    got, truth = run(adamw, lists), exact(lists)
    assert error(flat(got[0]), flat(truth[0])) < 1e-6


def test_errors_name_what_is_wrong() -> None:
    params, grads, exp_avgs, exp_avg_sqs, _ = make([4, 5])
    with pytest.raises(ValueError, match="lists of different lengths: 2, 1, 2, 2"):
        adamw(params, grads[:1], exp_avgs, exp_avg_sqs, **RULE)
    with pytest.raises(ValueError, match=r"shapes do not fit: \(4,\), \(5,\), \(4,\)"):
        adamw(params, grads[::-1], exp_avgs, exp_avg_sqs, **RULE)
    with pytest.raises(ValueError, match=r"torch\.bfloat16 on cpu beside torch\.float32"):
        adamw(params, [grads[0], grads[1].bfloat16()], exp_avgs, exp_avg_sqs, **RULE)
    with pytest.raises(ValueError, match="want parameters and both moments in float32"):
        adamw([p.bfloat16() for p in params], grads, exp_avgs, exp_avg_sqs, **RULE)


def test_parameters_that_require_a_gradient_are_updated_in_place() -> None:
    lists = make([10])
    parameter = torch.nn.Parameter(lists[0][0].clone())
    adamw([parameter], *lists[1:4], **RULE)
    assert parameter.requires_grad and parameter.grad_fn is None
    assert not torch.equal(parameter, lists[0][0])
