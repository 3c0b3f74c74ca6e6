"""Parameters in halves: the codec over every number, and every path bit for bit the fp32 one."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_lite.ops import native
from mindspeed_lite.ops.adamw import Lists, adamw, cpu, cuda, halves, pieces, reference
from mindspeed_lite.optim.fused_adam import FusedAdamW
from mindspeed_lite.optim.split_params import SplitFP32Params
from tests.harness.reasons import why_not_of
from tests.ops.adamw import RULE, make, on_npu, taken_apart, through

why_not = why_not_of(functools.partial(adamw, **RULE))

compiled = pytest.mark.skipif(cpu.LIBRARY.unusable() is not None, reason=str(cpu.LIBRARY.unusable()))


def numbers(above: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    """fp32 from all pairs of upper and lower 16 bits."""
    words = (above.to(torch.int64)[:, None] << 16) | below.to(torch.int64)[None, :]
    return words.flatten().to(torch.int32).view(torch.float32)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


# The lower 16 bits matter by where they stand to the tie alone.
EDGES = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF, 0x1234, 0xABCD])


def test_the_codec_is_exact_for_every_upper_half() -> None:
    word = numbers(torch.arange(1 << 16), EDGES)
    high, low, squares = taken_apart(word)
    assert torch.equal(bits(halves.join(high, low, squares)), bits(word))
    is_number = ~word.isnan()
    assert torch.equal(bits(high)[is_number], bits(word.bfloat16())[is_number])
    # Only NaNs whose upper payload is empty, or in the last place at the most, may read as infinity.
    lost = word.isnan() & ~high.isnan()
    assert high[lost].isinf().all() and not (lost & ((bits(word) & 0x7FFFFF) > 0x8000)).any()
    assert 0 < squares.signbit().sum() < len(word) / 10


@compiled
def test_the_compiled_codec_is_exact_for_every_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """All 2^32: exact there and back, and the upper half rounded as the kernels round."""
    probe = native.Library(Path(__file__).with_name("probe.cpp"))
    assert probe.unusable() is None
    wrong = (ctypes.c_int64 * 2)(-1, -1)
    probe.halves(ctypes.addressof(wrong), 2)
    assert list(wrong) == [0, 0]


def test_without_a_second_moment_a_tie_moves_by_one_unit() -> None:
    word = numbers(torch.arange(1 << 16), EDGES)
    high, low, _ = taken_apart(word, keeps_bit=False)
    found = halves.join(high, low, None)
    is_number = ~word.isnan()
    assert torch.equal(bits(high)[is_number], bits(word.bfloat16())[is_number])
    difference = (bits(found) - bits(word))[is_number]
    tie = (bits(word)[is_number] & 0x1FFFF) == 0x8000
    assert torch.equal(difference, -tie.to(torch.int32))
    assert not found[word.isnan()].isfinite().any(), "no NaN becomes a number"


PATHS: dict[str, Any] = {
    "cpu": through(cpu),
    "cuda, interpreted": through(cuda),
    "reference": through(reference),
    "dispatched": adamw,
    "npu": on_npu,
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("npu_twin")
def test_every_step_is_bit_for_bit_that_of_fp32(path: str, decoupled: bool, grad_dtype: torch.dtype) -> None:
    if path == "npu" and not decoupled:
        pytest.skip("torch_npu computes L2 on the host")
    function, sizes = PATHS[path], [(30, 41), 5000, (7,), 0, 1]
    words, _, exp_avgs, exp_avg_sqs, _ = make(sizes)
    apart = [taken_apart(word.flatten()) for word in words]
    highs = [high.view(word.shape) for (high, _, _), word in zip(apart, words, strict=True)]
    lows = [low for _, low, _ in apart]
    own = [[each.clone() for each in exp_avgs], [each.clone() for each in exp_avg_sqs]]
    for squares, (_, _, signs) in zip(own[1], apart, strict=True):
        squares.view(-1).copysign_(signs)
    for step in range(1, 4):
        grads = make(sizes, grad_dtype, seed=step)[1]
        rule = {**RULE, "step": step, "decoupled": decoupled, "grad_scale": 0.37}
        function(words, grads, exp_avgs, exp_avg_sqs, **rule)
        function(highs, grads, *own, **rule, lows=lows)
        for word, high, low, squares in zip(words, highs, lows, own[1], strict=True):
            assert torch.equal(halves.join(high, low, squares), word)
            assert torch.equal(high, word.bfloat16())
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(own[0], exp_avgs, strict=True))
        assert all(torch.equal(mine.abs(), theirs) for mine, theirs in zip(own[1], exp_avg_sqs, strict=True))


@compiled
def test_large_tensors_have_ties_and_threads_change_no_bit() -> None:
    words, grads, exp_avgs, exp_avg_sqs, _ = make([1 << 20])
    # All numbers are ties: half of them round away from zero.
    words = [((bits(word) & ~0xFFFF) | 0x8000).view(torch.float32) for word in words]
    high, low, signs = taken_apart(words[0])
    assert 0.4 < signs.signbit().float().mean() < 0.6
    squares = exp_avg_sqs[0].clone().copysign_(signs)
    rule = {**RULE, "lr": 0.0}
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        adamw([high], grads, exp_avgs, [squares], **rule, lows=[low])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(halves.join(high, low, squares), words[0])


def test_pieces_are_put_together_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "CHUNK", 1000)
    seen: list[int] = []

    @pieces.piecewise
    def step(lists: Lists, rule: Any) -> None:
        seen.append(lists.params[0].numel())

    high, low, squares = taken_apart(torch.randn(2500))
    step(Lists([high], [torch.zeros(2500)], [torch.zeros(2500)], [squares], lows=[low]), None)
    assert seen == [1000, 1000, 500]


def test_errors_name_what_is_wrong() -> None:
    words, grads, exp_avgs, exp_avg_sqs, outs = make([4, 5])
    highs, lows = [word.bfloat16() for word in words], [torch.zeros(word.numel(), dtype=torch.int16) for word in words]
    state = (grads, exp_avgs, exp_avg_sqs)
    assert why_not(highs, *state, lows=lows) == [] or cpu.LIBRARY.unusable() is not None
    with pytest.raises(ValueError, match=r"want halves in bfloat16 and int16 .* not torch\.float32, torch\.int16"):
        adamw(words, *state, **RULE, lows=lows)
    with pytest.raises(ValueError, match="with outs"):
        adamw(highs, *state, **RULE, lows=lows, outs=outs)
    with pytest.raises(ValueError, match="must be contiguous"):
        adamw([torch.zeros(8, dtype=torch.bfloat16)[::2], highs[1]], *state, **RULE, lows=lows)


def sharing(kind: type = FusedAdamW, **options: Any) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
    """(optimizer whose parameters stand in halves, its parameters, the bf16 weights)."""
    generator = torch.Generator().manual_seed(3)
    mains = [torch.randn(shape, generator=generator) for shape in ((30, 7), (11,), (4,))]
    weights = [main.bfloat16() for main in mains]
    optimizer = kind(mains, lr=1e-2, weight_decay=0.1, **options)
    # The last parameter is none of those that share.
    optimizer.split_params = SplitFP32Params(optimizer, lambda: dict(zip(mains[:2], weights[:2], strict=True)))
    return optimizer, mains, weights


def steps(optimizer: Any, mains: list[torch.Tensor], number: int = 5, first: int = 0) -> None:
    for step in range(first, first + number):
        generator = torch.Generator().manual_seed(step)
        for main in mains:
            main.grad = torch.randn(main.shape, generator=generator)
        optimizer.step()


def test_ties_survive_a_state_that_was_loaded() -> None:
    """torch puts another dictionary in the place of an optimizer's state."""
    optimizer, mains, _ = sharing()
    steps(optimizer, mains, 1)
    words = ((bits(torch.randn(mains[0].shape)) & ~0xFFFF) | 0x8000).view(torch.float32)
    with optimizer.materialized():
        mains[0].copy_(words)
        before = optimizer.state
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.state is not before
    assert torch.equal(optimizer.split_params.joined(mains[0])["param"], words)
    optimizer.param_groups[0]["lr"] = 0.0
    steps(optimizer, mains, 1, first=1)
    assert torch.equal(optimizer.split_params.joined(mains[0])["param"], words)


def test_what_writes_a_parameter_that_is_not_there_fails() -> None:
    _, mains, _ = sharing()
    with pytest.raises(RuntimeError, match="single memory location"):
        mains[0].mul_(2)
