"""Narrow moments: the codes, chance that is right on average, and every path bit for bit one."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from mindspeed_lite.ops.adamw import adamw, cpu, cuda, moments, reference
from tests.harness.reasons import why_not_of
from tests.ops.adamw import RULE, on_npu, taken_apart, through

why_not = why_not_of(functools.partial(adamw, **RULE))

Codes = tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]
FORMS = {"bf16": torch.bfloat16, "fp8": torch.uint8}


def narrowed(first: torch.Tensor, second: torch.Tensor, form: str, seed: int | None = None) -> Codes:
    codes = [torch.empty(each.shape, dtype=FORMS[form]) for each in (first, second)]
    size = first.numel()
    blocks = (moments.exponents(size), moments.exponents(size)) if form == "fp8" else None
    moments.pack((first, second), codes[0], codes[1], blocks, seed)
    return codes[0], codes[1], blocks


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_every_code_is_read_and_written_as_itself() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    # Half of a block each, beside the largest number of it that has that exponent.
    parts = [torch.cat((half, torch.full_like(half, 0x78))) for half in codes.view(4, 64)]
    first = torch.cat(parts)
    second = torch.where(first == 0x78, 0x7C, first)
    for exponent in range(256):
        exponents = torch.full((4,), exponent, dtype=torch.uint8)
        both = moments.unpack(first, second, (exponents, exponents))
        numbers_again = moments.unpack(*narrowed(*both, "fp8"))
        for number, again, code in zip(both, numbers_again, (first, second), strict=True):
            assert torch.equal(number.view(torch.int32), again.view(torch.int32)) or exponent == 255
            assert torch.equal(number.signbit(), code >= 0x80)
        there = sum(int((number != 0).sum()) for number in both)
        # All but the two zeros, unless fp32 would hold some as subnormals.
        assert there == 2 * 510 if exponent > 31 else there < 2 * 510


def test_every_bf16_number_is_written_as_itself() -> None:
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    both = moments.unpack(codes, codes)
    assert both[0].isnan().sum() == 254
    for seed in (None, moments.seed(3)):
        for got in narrowed(*both, "bf16", seed)[:2]:
            assert torch.equal(got.isnan(), codes.isnan())
            assert same(got[~codes.isnan()], codes[~codes.isnan()])


def spread(size: int, octaves: int) -> torch.Tensor:
    """Positive numbers over as many powers of two."""
    generator = torch.Generator().manual_seed(octaves)
    return torch.rand(size, generator=generator).mul_(octaves).neg_().exp2_()


@pytest.mark.parametrize(("form", "place", "allowed"), [("bf16", 0, 2**-8), ("bf16", 1, 2**-8), ("fp8", 0, 2**-4),
                                                        ("fp8", 1, 2**-3)])  # fmt: skip
def test_nearest_is_near(form: str, place: int, allowed: float) -> None:
    numbers = spread(1 << 16, 13 if place == 0 else 29) * 1e-6
    both = moments.unpack(*narrowed(numbers, numbers, form)[:2], narrowed(numbers, numbers, form)[2])
    # The largest of a block has no code above it to be rounded to.
    top = numbers.view(-1, moments.BLOCK).amax(dim=1, keepdim=True).expand(-1, moments.BLOCK).flatten()
    inner = numbers < top / 2
    error = ((both[place] - numbers).abs() / numbers)[inner]
    assert allowed / 4 < error.max() <= allowed * 1.001


def test_what_is_too_small_for_its_block() -> None:
    first, second = torch.zeros(128), torch.zeros(128)
    first[:4] = torch.tensor([-1.0, 2.0**-14, -(2.0**-17), 0.0])
    second[:4] = torch.tensor([1.0, 2.0**-30, 2.0**-40, 0.0])
    m, v = moments.unpack(*narrowed(first, second, "fp8"))  # type: ignore[arg-type]
    assert m[:4].tolist() == [-1.0, 2.0**-14, 0.0, 0.0]
    # The step divides by it: it is not zero unless it was.
    assert v[:4].tolist() == [1.0, 2.0**-30, 1.25 * 2.0**-31, 0.0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_seen(form: str, number: float) -> None:
    words = torch.full((300,), 0.5)
    words[130] = number
    for seed in (None, moments.seed(7)):
        codes = narrowed(words, words.abs(), form, seed)
        m, v = moments.unpack(*codes)
        for found, expected in ((m, words), (v, words.abs())):
            assert torch.equal(found[130].isnan(), expected[130].isnan())
            assert found[130].isnan() or found[130] == expected[130]
            assert torch.equal(found[:128], expected[:128]), "another block"


@pytest.mark.parametrize("form", FORMS)
def test_chance_is_right_on_average(form: str) -> None:
    first, second = (torch.randn(512).sign() * spread(512, 10), spread(512, 20))
    total, tries = [torch.zeros(512, dtype=torch.float64) for _ in range(2)], 1000
    for step in range(tries):
        codes = narrowed(first, second, form, moments.seed(step))
        for each, found in zip(total, moments.unpack(*codes), strict=True):
            each += found
    top = first.abs().view(-1, 128).amax(dim=1, keepdim=True).expand(-1, 128).flatten()
    for sums, truth, distance in zip(total, (first, second), (2**-3, 2**-2), strict=True):
        inside = (first.abs() < top) & (truth.abs() < truth.abs().view(-1, 128).amax(1).repeat_interleave(128))
        # The mean of `tries` draws between two numbers that are at most `distance` of them apart: six deviations.
        wide = 6 * 0.5 * (distance if form == "fp8" else 2**-7) / tries**0.5
        assert (((sums / tries - truth) / truth).abs()[inside] < wide).all()


@pytest.mark.parametrize("form", FORMS)
def test_a_second_moment_follows_where_nearest_would_stand_still(form: str) -> None:
    """Gradients become half as large: the mean of their squares goes towards a quarter."""
    size, steps = 4096, 800
    generator = torch.Generator().manual_seed(0)
    means = {}
    for chance in (True, False):
        start = torch.full((size,), 1.0)
        codes = narrowed(start, start, form)
        for step in range(steps):
            m, v = moments.unpack(*codes)
            g = torch.randn(size, generator=generator) * 0.5
            m, v = m + 0.1 * (g - m), v + 0.001 * (g * g - v)
            codes = narrowed(m, v, form, moments.seed(step) if chance else None)
        means[chance] = moments.unpack(*codes)[1].mean().item()
    exact = 0.25 + 0.75 * 0.999**steps
    assert means[True] == pytest.approx(exact, rel=0.03)
    assert means[False] > 1.5 * exact, "then there would be no need of chance"


PATHS: dict[str, Any] = {
    "cpu": through(cpu),
    "cuda, interpreted": through(cuda),
    "reference": through(reference),
    "dispatched": adamw,
    "npu": on_npu,
}
# With these every number of a step is exact, and all paths must draw the same lots.
EXACT = {"lr": 0.0, "betas": (0.5, 0.5), "eps": 1e-8, "weight_decay": 0.0, "step": 3}
SIZES = [1, 0, 127, 128, (43, 3), 5000, 40000]


def exact_numbers(form: str) -> tuple[list[torch.Tensor], list[torch.Tensor], list[Codes]]:
    """(params, grads, moments) that have few bits."""
    generator = torch.Generator().manual_seed(1)

    def integers(size: Any, high: int) -> torch.Tensor:
        shape = size if isinstance(size, tuple) else (size,)
        return torch.randint(-high, high, shape, generator=generator).float()

    params = [integers(size, 1 << 20) * 2.0**-16 for size in SIZES]
    grads = [integers(size, 64) * 2.0**-12 for size in SIZES]
    codes = []
    for size in SIZES:
        m, v = integers(size, 1 << 10) * 2.0**-20, integers(size, 1 << 10).abs() * 2.0**-30
        m.view(-1)[::7] *= 2.0**-9
        v.view(-1)[::5] *= 2.0**-9
        codes.append(narrowed(m, v, form))
    return params, grads, codes


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("parted", [False, True])
@pytest.mark.parametrize("path", [name for name in PATHS if name != "reference"])
@pytest.mark.usefixtures("npu_twin")
def test_every_path_writes_the_same_codes(path: str, parted: bool, form: str) -> None:
    found = []
    for function in (PATHS["reference"], PATHS[path]):
        params, grads, codes = exact_numbers(form)
        blocks = [each[2] for each in codes] if form == "fp8" else None
        more: dict[str, Any] = {"blocks": blocks}
        if parted:
            apart = [taken_apart(param.flatten()) for param in params]
            params = [high.view(param.shape) for (high, _, _), param in zip(apart, params, strict=True)]
            more["lows"] = [low for _, low, _ in apart]
            for (_, second, _), (_, _, sign) in zip(codes, apart, strict=True):
                if form == "bf16":
                    second.view(-1).copysign_(sign)
                else:
                    second.view(-1).bitwise_or_((sign.signbit() * 0x80).to(torch.uint8))
        function(params, grads, [each[0] for each in codes], [each[1] for each in codes], **EXACT, **more)
        found.append((params, codes, more))
    (params, codes, more), (own_params, own_codes, own_more) = found
    for (first, second, blocks), (own_first, own_second, own_blocks) in zip(codes, own_codes, strict=True):
        assert same(first, own_first) and same(second, own_second)
        assert blocks is None or all(map(torch.equal, blocks, own_blocks))
    assert all(map(torch.equal, params, own_params))
    if parted:
        assert all(map(torch.equal, more["lows"], own_more["lows"]))


def test_the_same_numbers_give_the_same_bits_wherever_they_are() -> None:
    """So ranks that hold a weight twice keep it the same, and a run that is repeated is the same."""
    first, second = torch.randn(1000), torch.rand(1000)
    whole = narrowed(first, second, "bf16", moments.seed(5))
    part = narrowed(first[300:900].clone(), second[300:900].clone(), "bf16", moments.seed(5))
    assert same(whole[0][300:900], part[0]) and same(whole[1][300:900], part[1])
    other = narrowed(first, second, "bf16", moments.seed(6))
    assert 0.3 < (other[1] == whole[1]).float().mean() < 0.9


def test_errors_name_what_is_wrong() -> None:
    params, grads, codes = exact_numbers("fp8")
    lists = (params, grads, [m for m, _, _ in codes], [v for _, v, _ in codes])
    blocks = [each[2] for each in codes]
    assert why_not(*lists, blocks=blocks) == [] or cpu.LIBRARY.unusable() is not None
    with pytest.raises(ValueError, match=r"torch\.uint8 without exponents"):
        adamw(*lists, **RULE)
    with pytest.raises(ValueError, match="want 1 exponents in uint8 for 1 numbers"):
        adamw(*lists, **RULE, blocks=[(each[0].repeat(2), each[1]) for each in blocks])  # type: ignore[index]
    with pytest.raises(ValueError, match=r"moments in bfloat16 or uint8, not torch\.float32, torch\.float16"):
        adamw(*lists[:2], *[[each.half() for each in some] for some in lists[2:]], **RULE)
    with pytest.raises(ValueError, match="narrow moments must be contiguous"):
        moment = torch.zeros(16, dtype=torch.bfloat16)[::2]
        adamw([torch.zeros(8)], [torch.zeros(8)], [moment], [moment], **RULE)
