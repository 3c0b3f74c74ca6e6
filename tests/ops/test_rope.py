"""rope: its definition by hand, every backend against it in float64, what is kept and what is computed again."""

from __future__ import annotations

import gc
import importlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_lite.ops.dispatch import force
from mindspeed_lite.ops.rope import (
    OPERATOR,
    PAIRS,
    RotationSpec,
    cpu,
    cuda,
    reference,
    rope,
)
from mindspeed_lite.ops.rope.angles import cos_sin, packed_positions
from mindspeed_lite.ops.storage_cache import StorageVersionCache
from tests.harness.compare import error, forward_backward
from tests.harness.errors import bound
from tests.harness.reasons import why_not_of

from . import twin

why_not = why_not_of(rope)

NAMES = ("y", "dx")
EVERY_BACKEND = pytest.mark.parametrize("backend", ["cpu", "cuda"])
FUNCTIONS = (reference.rope, cpu.rope, cuda.rope)


def on(backend: str, *given: Any, **options: Any) -> torch.Tensor:
    """`rope` on a backend, on tensors of the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        module = importlib.import_module(f"mindspeed_lite.ops.rope.{backend}")
        patch.setattr(OPERATOR, "_backend", lambda case, tensors: module)
        return rope(*given, **options)


def table(rows: int, width: int, pairs: str = "half", batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Angles [rows, batch, 1, width], of a usual base; those of a pair are equal."""
    generator = torch.Generator().manual_seed(seed)
    position = torch.arange(rows).float()[:, None] + 100 * torch.rand(1, batch, generator=generator)
    angles = position[..., None] * 100.0 ** -torch.linspace(0, 1, width // 2)  # [rows, batch, width / 2]
    both = torch.stack((angles, angles), -1).flatten(-2) if pairs == "interleaved" else torch.cat((angles, angles), -1)
    return both[:, :, None]


def make(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return x, dy


# ---- the definition ----


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [("half", [-3, -4, 1, 2]), ("interleaved", [-2, 1, -4, 3]), ("regrouped", [-2, -4, 1, 3])],
)
def test_a_quarter_turn_swaps_the_elements_of_each_pair(pairs: Any, expected: list[float]) -> None:
    x = torch.tensor([9.0, 1, 2, 3, 4, 8]).view(1, 1, 1, 6)
    cos, sin = torch.zeros(1, 1, 1, 4), torch.ones(1, 1, 1, 4)
    for function in FUNCTIONS:
        got = function(x, cos, sin, None, RotationSpec(pairs, 1, 2.0))
        assert got.flatten().tolist() == [9, *(2 * each for each in expected), 8]


def test_each_half_of_the_factors_goes_to_its_half_of_the_result() -> None:
    x = torch.tensor([1.0, 10]).view(1, 1, 1, 2)
    cos, sin = torch.tensor([2.0, 3]).view(1, 1, 1, 2), torch.tensor([5.0, 7]).view(1, 1, 1, 2)
    for pairs in PAIRS:
        for function in FUNCTIONS:
            assert function(x, cos, sin, None, RotationSpec(pairs)).flatten().tolist() == [2 - 50, 30 + 7]


def test_rows_belong_to_positions_and_sequences_may_have_their_own() -> None:
    x = torch.ones(3, 2, 1, 2)
    cos = torch.arange(10.0).view(5, 2, 1, 1).expand(5, 2, 1, 2)
    positions = torch.tensor([4, 0, 1])
    for function in FUNCTIONS:
        assert function(x, cos, 0 * cos, None, RotationSpec())[..., 0, 0].tolist() == [[0, 1], [2, 3], [4, 5]]
        assert function(x, cos, 0 * cos, positions, RotationSpec())[..., 0, 0].tolist() == [[8, 9], [0, 1], [2, 3]]


# ---- backends against the definition ----


@EVERY_BACKEND
@pytest.mark.parametrize("pairs", PAIRS)
def test_the_gradient_is_the_transposed_rotation_whatever_the_factors(backend: str, pairs: Any) -> None:
    """Factors that belong to no angle: both halves of both count."""
    generator = torch.Generator().manual_seed(4)
    cos, sin = (torch.randn(5, 2, 1, 6, generator=generator) for _ in range(2))
    x, dy = make((5, 2, 3, 9), torch.float32)
    spec = RotationSpec(pairs, 2, 0.5)
    exact = forward_backward(lambda x: reference.rope(x, cos, sin, None, spec), (x,), dy, torch.float64)
    got = forward_backward(lambda x: on(backend, x, cos, sin, pairs=pairs, start=2, scale=0.5), (x,), dy)
    for name, ours, truth in zip(NAMES, got, exact, strict=True):
        assert error(ours, truth) < bound(torch.float32, 2), name


@EVERY_BACKEND
def test_a_position_without_a_row_is_seen_and_harms_nobody_else(backend: str) -> None:
    x, (cos, sin) = torch.randn(4, 1, 2, 6), cos_sin(table(3, 4))
    positions = torch.tensor([0, -1, 3, 2])
    got = on(backend, x, cos, sin, start=2, positions=positions)
    assert got[1:3, ..., 2:].isnan().all() and not got[[0, 3]].isnan().any()
    with pytest.raises((IndexError, RuntimeError)):
        reference.rope(x, cos, sin, positions, RotationSpec())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize("backend", ["reference", "cpu", "cuda", "npu"])
@pytest.mark.usefixtures("npu_twin")
def test_positions_may_be_any_integers_with_any_stride(backend: str, dtype: torch.dtype) -> None:
    (x, dy), (cos, sin) = make((4, 2, 3, 8), torch.float32), cos_sin(table(6, 8))
    index = torch.tensor([5, 0, 3, 1])
    strided = torch.full((4, 3), 2, dtype=dtype)
    strided[:, 1] = index
    want = forward_backward(lambda x: reference.rope(x, cos[index], sin[index], None, RotationSpec()), (x,), dy)
    for positions in (index.to(dtype), strided[:, 1]):
        got = forward_backward(lambda x, at=positions: on(backend, x, cos, sin, positions=at), (x,), dy)
        torch.testing.assert_close(got, want)
    same = on(backend, x, cos, sin, positions=torch.tensor(3, dtype=dtype).expand(4))
    torch.testing.assert_close(same, reference.rope(x, *(t[[3] * 4] for t in (cos, sin)), None, RotationSpec()))


@pytest.mark.usefixtures("npu_twin")
def test_a_position_without_a_row_is_nan_on_npus() -> None:
    x, (cos, sin) = torch.randn(4, 1, 2, 4), cos_sin(table(3, 4))
    with force("rope", "npu"):
        got = rope(x, cos, sin, positions=torch.tensor([0, -1, 3, 2]))
    assert got[1:3].isnan().all() and not got[[0, 3]].isnan().any()


# ---- what is kept ----


def test_cos_and_sin_are_computed_once_for_all_who_hold_the_angles() -> None:
    angles = table(6, 8)
    cos, sin = cos_sin(angles)
    torch.testing.assert_close((cos, sin), (angles.cos(), angles.sin()))
    # As in a recomputed layer, and as a slice of all of it.
    for same in (angles, angles.detach(), angles[:6]):
        assert cos_sin(same)[0] is cos
    shorter = cos_sin(angles[:4])[0]
    assert shorter.shape[0] == 4 and torch.equal(shorter, cos[:4])
    angles.mul_(2)
    torch.testing.assert_close(cos_sin(angles)[0], angles.cos())


def test_cos_and_sin_made_without_autograd_serve_it() -> None:
    angles = table(3, 4)
    with torch.inference_mode():
        cos, sin = cos_sin(angles)
        fresh = angles * 1.0
        assert torch.equal(cos_sin(fresh)[0], cos)  # an inference tensor counts no writes, and is not kept
    x = torch.randn(3, 1, 1, 4, requires_grad=True)
    rope(x, cos, sin).sum().backward()
    assert x.grad is not None


def test_angles_in_half_precision_are_widened_first() -> None:
    angles = table(3, 4).bfloat16()
    assert torch.equal(cos_sin(angles)[0], angles.float().cos())


def test_what_is_kept_goes_with_the_tensor_and_has_a_limit() -> None:
    kept, made = StorageVersionCache(), []

    def make_one() -> object:
        made.append(torch.zeros(1))
        return made[-1]

    first = torch.zeros(4)
    assert kept.get(first, "key", make_one) is kept.get(first[:], "key", make_one)
    assert kept.get(first, "other", make_one) is not kept.get(first, "key", make_one) and len(made) == 2
    for _ in range(200):
        kept.get(torch.zeros(2), "key", make_one)
    assert len(kept._entries) <= 2, "what has no owner any more is dropped when the next comes"
    many = [torch.zeros(2) for _ in range(100)]
    for each in many:
        kept.get(each, "key", make_one)
    for number in range(100):
        kept.get(many[-1], number, make_one)
    assert len(kept._entries) <= 32 and sum(len(entry.values) for entry in kept._entries.values()) <= 32 + 16
    gc.collect()
    assert kept.get(many[-1], 99, make_one) is made[-1]


def in_pieces(t: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """What context parallelism leaves of one sequence on `rank`: a piece from the front, and its mirror image."""
    pieces = t.chunk(2 * ranks)
    return torch.cat((pieces[rank], pieces[2 * ranks - 1 - rank]))


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    ranks=st.sampled_from([1, 1, 2, 3]),
    whole=st.booleans(),
)
def test_positions_in_a_packing(lengths: list[int], ranks: int, whole: bool) -> None:
    lengths = [2 * ranks * each if ranks > 1 else each for each in lengths]
    edges = torch.tensor([0, *lengths]).cumsum(0).int()
    total = sum(lengths)
    for rank in range(ranks):
        starts = edges[:-1].tolist() if whole else [0] * len(lengths)
        parts = [torch.arange(at, at + length) for at, length in zip(starts, lengths, strict=True)]
        want = torch.cat([in_pieces(part, ranks, rank) if ranks > 1 and len(part) else part for part in parts])
        got = packed_positions(edges, total // ranks, total if whole else total + 1, cp_size=ranks, cp_rank=rank)
        assert got.tolist() == want.tolist()


def test_positions_are_computed_once_and_a_wrong_packing_is_an_error() -> None:
    edges = torch.tensor([0, 3, 3, 5])
    assert packed_positions(edges, 5, 4).tolist() == [0, 1, 2, 0, 1]
    assert packed_positions(edges, 5, 4) is packed_positions(edges, 5, 4)
    assert packed_positions(edges, 5, 5).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="6 tokens, but the sequences of cu_seqlens have 5"):
        packed_positions(edges, 6, 4)


# ---- falling back, compiling, refusing ----


def test_angles_that_learn_go_to_the_reference() -> None:
    x, cos = torch.randn(3, 1, 2, 8), torch.randn(3, 1, 1, 8, requires_grad=True)
    assert why_not(x, cos, cos.detach()) == ["cos and sin want a gradient"]
    with pytest.raises(RuntimeError, match="want a gradient"), force("rope", "cpu"):
        rope(x, cos, cos.detach())
    rope(x, cos, cos.detach()).sum().backward()
    assert cos.grad is not None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(x=torch.zeros(2, 3)), "want x"),
        (dict(sin=torch.zeros(3, 1, 1, 2)), "want x"),
        (dict(pairs="thirds"), "pairs is one of half, interleaved, regrouped"),
        (dict(cos=torch.zeros(3, 3, 1, 4), sin=torch.zeros(3, 3, 1, 4)), "do not fit"),
        (dict(cos=torch.zeros(3, 1, 1, 3), sin=torch.zeros(3, 1, 1, 3)), "R even"),
        (dict(start=5), "from element 5 on"),
        (dict(cos=torch.zeros(2, 1, 1, 4), sin=torch.zeros(2, 1, 1, 4)), "2 rows"),
        (dict(positions=torch.zeros(2, dtype=torch.long)), "positions"),
        (dict(positions=torch.zeros(3)), "positions are torch.float32: want integers"),
        (dict(positions=torch.zeros(3, dtype=torch.bool)), "positions are torch.bool: want integers"),
        (dict(positions=torch.zeros(3, dtype=torch.long, device="meta")), "on cpu, cpu, meta: want x's device, cpu"),
        (dict(cos=torch.zeros(3, 1, 1, 4, device="meta")), "on meta, cpu: want x's device, cpu"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], words: str) -> None:
    given = dict(x=torch.zeros(3, 2, 2, 8), cos=torch.zeros(3, 1, 1, 4), sin=torch.zeros(3, 1, 1, 4))
    with pytest.raises(ValueError, match=words):
        rope(**{**given, **changed})  # type: ignore[arg-type]


# ---- NPU, on an emulation of its documentation ----


def test_npu_keeps_no_input_and_rounds_the_factors_once(npu_twin: list[twin.Call]) -> None:
    x, angles = torch.randn(5, 1, 2, 8, dtype=torch.bfloat16, requires_grad=True), table(5, 8)
    saved: list[torch.Tensor] = []
    with force("rope", "npu"), torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = sum(rope(x, *cos_sin(angles)).sum() for _ in range(2))
        assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in cos_sin(angles)}
        out.backward()  # type: ignore[union-attr]
    factors = [[t.data_ptr() for t in call.args[1:]] for call in npu_twin]
    assert len(factors) == 4 and factors[0] == factors[1] and factors[2] == factors[3]
