"""packed attention: each sequence by itself, whatever stands between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mindspeed_lite.ops.attention import packed
from mindspeed_lite.ops.attention.packed import Packing
from tests.harness.compare import Sizes, error, forward_backward


def make(
    rows: int,
    keys: int,
    n: int = 4,
    g: int = 2,
    d: int = 8,
    dv: int = 8,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, n, d), (keys, g, d), (keys, g, dv), (rows, n, dv))
    q, k, v, dout = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return [q, k, v], dout


def test_packing_reads_the_conventions_of_flash_attention_and_megatron() -> None:
    ends = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    assert Packing.of(ends) == Packing(((0, 3), (3, 3), (3, 8)), ((0, 3), (3, 3), (3, 8)))
    starts = torch.tensor([0, 4, 8, 16], dtype=torch.int32)  # cu_seqlens_padded: sequences of 4, 4 and 8 rows
    assert Packing.of(ends, ends, starts, starts).q == ((0, 3), (4, 4), (8, 13))
    assert Packing.of(ends, starts_q=starts).k == ((0, 3), (4, 4), (8, 13))
    assert Packing.of([0, 2, 5], [0, 4, 6]) == Packing(((0, 2), (2, 5)), ((0, 4), (4, 6)))


@pytest.mark.parametrize(
    ("match", "make_it"),
    [
        ("begin before", lambda: Packing.of([0, 5, 3])),
        ("begin before", lambda: Packing.of([0, 5, 8], starts_q=[0, 4, 8])),
        ("2 sequences of queries, but 1", lambda: Packing.of([0, 5, 8], [0, 8])),
    ],
)
def test_wrong_packings_are_refused(match: str, make_it: Any) -> None:
    with pytest.raises(ValueError, match=match):
        make_it()


def test_wrong_arguments_are_refused() -> None:
    (q, k, v), _ = make(8, 8)
    with pytest.raises(ValueError, match="row 9 of 8 queries"):
        packed.attention(q, k, v, Packing.of([0, 9]))
    with pytest.raises(ValueError, match="row 9 of 8 keys"):
        packed.attention(q, k, v, Packing.of([0, 8], [0, 9]))
    with pytest.raises(ValueError, match="tokens, head"):
        packed.attention(q.unsqueeze(1), k, v, Packing.of([0, 8]))
    with pytest.raises(ValueError, match="fit together"):
        packed.attention(q, k[..., :4], v, Packing.of([0, 8]))


@pytest.mark.parametrize("layout", [[0, 7, 16], [0, 8, 16]], ids=["lengths differ", "one length"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nothing_crosses_sequences_and_views_are_taken(layout: list[int], dtype: torch.dtype) -> None:
    """Cut out of one packed projection, as Megatron hands them over."""
    mixed = torch.randn(16, 2, 4 * 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    q, k, v = mixed.split([16, 8, 8], dim=2)
    q = q.reshape(16, 4, 8)
    out = packed.attention(q, k, v, Packing.of(layout), causal=True)
    other = mixed.clone()
    other[layout[1] :] += 1
    q, k, v = other.split([16, 8, 8], dim=2)
    again = packed.attention(q.reshape(16, 4, 8), k, v, Packing.of(layout), causal=True)
    assert out.dtype == dtype and torch.equal(again[: layout[1]], out[: layout[1]])
    assert not torch.equal(again[layout[1] :], out[layout[1] :])


def test_dropout_draws_for_each_sequence_and_again_for_none() -> None:
    inputs, dout = make(24, 24)
    layout = Packing.of([0, 5, 11, 24])

    def run(*qkv: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        return packed.attention(*qkv, layout, causal=True, dropout_p=0.5)

    first, second = forward_backward(run, inputs, dout), forward_backward(run, inputs, dout)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    assert error(first[0], packed.attention(*inputs, layout, causal=True)) > 0.1


def test_gradients_of_a_pack_are_not_added_up_sequence_by_sequence() -> None:
    inputs, dout = make(64, 64, n=2, g=2)
    layout = Packing.of([0, 3, 10, 12, 20, 33, 64])
    with Sizes() as sizes:
        forward_backward(lambda *qkv: packed.attention(*qkv, layout, causal=True), inputs, dout)
    assert not {name for name in sizes.names if "slice_backward" in name or "new_zeros" in name}


def test_lengths_on_a_device_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Remote(torch.Tensor):
        """On the CPU, and said to be elsewhere."""

        device = torch.device("cuda")  # type: ignore[assignment]

    reads = []
    spans = packed._spans
    monkeypatch.setattr(packed, "_spans", lambda *given: reads.append(1) or spans(*given))
    ends = torch.tensor([0, 4, 8]).as_subclass(Remote)
    first = Packing.of(ends, ends)
    assert Packing.of(ends, ends) is first and len(reads) == 2
    ends += 1
    assert Packing.of(ends, ends).q == ((1, 5), (5, 9)), "written to since"
