"""npu_fusion_attention and npu_fusion_attention_grad."""

from __future__ import annotations

import torch

UNLIMITED = 2147483647


def npu_fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    pse: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = UNLIMITED,
    next_tockens: int = UNLIMITED,
    inner_precise: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: torch.Tensor | None = None,
    dropout_mask: torch.Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
    if any(argument is not None for argument in (pse, padding_mask, prefix, dropout_mask)):
        raise NotImplementedError("only what mindspeed_lite passes is emulated")
    if input_layout == "TND":
        parts = [
            npu_fusion_attention(
                *(t.unsqueeze(0) for t in (query[a], key[b], value[b])),
                head_num,
                "BSND",
                atten_mask=atten_mask,
                scale=scale,
                keep_prob=keep_prob,
                pre_tockens=pre_tockens,
                next_tockens=next_tockens,
                sparse_mode=sparse_mode,
            )
            for a, b in _sequences(actual_seq_qlen, actual_seq_kvlen)
        ]
        out = torch.cat([part[0].squeeze(0) for part in parts])
        most, total = (torch.cat([part[i].squeeze(0).transpose(0, 1) for part in parts]) for i in (1, 2))
        return out, most, total, query.new_empty(0), seed, offset, 0
    q = _heads(query, input_layout, head_num)  # [b, n, sq, d]
    size = q.shape[3]
    k = _heads(key, input_layout, _key_heads(key, input_layout, size))  # [b, g, sk, d]
    v = _heads(value, input_layout, k.shape[1])  # [b, g, sk, dv]
    b, n, sq, _ = q.shape
    g, sk = k.shape[1], k.shape[2]

    k, v = (t.repeat_interleave(n // g, dim=1) for t in (k, v))
    scores = q.float() @ k.float().transpose(2, 3) * scale  # [b, n, sq, sk]
    hidden = _hidden(atten_mask, sparse_mode, pre_tockens, next_tockens, (b, n, sq, sk))
    if hidden is not None:
        # The softmax of a row without keys is NaN here: undocumented.
        scores = scores.masked_fill(hidden, float("-inf"))
    # Documented: the sink is one of the numbers of maximum and sum.
    logit = torch.full((n, 1, 1), float("-inf")) if sink is None else sink.view(n, 1, 1)
    top = torch.maximum(scores.amax(-1, keepdim=True), logit)
    total = (scores - top).exp().sum(-1, keepdim=True) + (logit - top).exp()
    probs = torch.nn.functional.dropout((scores - top).exp() / total, 1 - keep_prob, training=keep_prob < 1)
    out = (probs @ v.float()).to(query.dtype)  # [b, n, sq, dv]
    lanes = (top.expand(-1, -1, -1, 8), total.expand(-1, -1, -1, 8))
    return _flat(out, input_layout), *lanes, query.new_empty(0), seed, offset, 0


def npu_fusion_attention_grad(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dy: torch.Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    softmax_max: torch.Tensor | None = None,
    softmax_sum: torch.Tensor | None = None,
    softmax_in: torch.Tensor | None = None,
    attention_in: torch.Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = UNLIMITED,
    next_tockens: int = UNLIMITED,
    inner_precise: int = 0,
    seed: int = 0,
    offset: int = 0,
    numels: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """p = exp(score - softmax_max) / softmax_sum, whatever further keys these two and attention_in hold."""
    unused = (pse, padding_mask, prefix, actual_seq_qlen, actual_seq_kvlen, sink)
    if any(argument is not None for argument in unused) or keep_prob != 1.0 or input_layout != "SBH":
        raise NotImplementedError("only what mindspeed_lite passes is emulated")
    assert softmax_max is not None and softmax_sum is not None and attention_in is not None
    q = _heads(query, input_layout, head_num)
    k = _heads(key, input_layout, _key_heads(key, input_layout, q.shape[3]))
    g, sk = k.shape[1:3]
    v = _heads(value, input_layout, g)
    grad, out = (_heads(t, input_layout, head_num).float() for t in (dy, attention_in))
    b, n, sq, _ = q.shape
    keys, values = (t.float().repeat_interleave(n // g, dim=1) for t in (k, v))
    scores = q.float() @ keys.transpose(2, 3) * scale_value
    hidden = _hidden(atten_mask, sparse_mode, pre_tockens, next_tockens, (b, n, sq, sk))
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    probs = (scores - softmax_max[..., :1]).exp() / softmax_sum[..., :1]
    dscores = probs * (grad @ values.transpose(2, 3) - (grad * out).sum(-1, keepdim=True)) * scale_value

    def of_groups(t: torch.Tensor) -> torch.Tensor:
        return _flat(t.unflatten(1, (g, n // g)).sum(2), input_layout).to(query.dtype)

    dk, dv = of_groups(dscores.transpose(2, 3) @ q.float()), of_groups(probs.transpose(2, 3) @ grad)
    return _flat(dscores @ keys, input_layout).to(query.dtype), dk, dv, query.new_empty(0), query.new_empty(0)


def _sequences(*ends: list[int] | None) -> list[tuple[slice, ...]]:
    """The rows of each sequence from cumulative ends without a leading zero."""
    return list(zip(*([*map(slice, [0, *each[:-1]], each)] for each in ends if each is not None), strict=True))


def _hidden(
    mask: torch.Tensor | None, sparse_mode: int, pre: int, following: int, shape: tuple[int, int, int, int]
) -> torch.Tensor | None:
    """Which scores are hidden, True as in atten_mask; None for none."""
    _, _, sq, sk = shape
    if mask is None:
        return None  # documented: without a mask neither the mode nor the tokens count
    mask = mask.bool()
    row, column = torch.arange(sq)[:, None], torch.arange(sk)[None, :]
    if sparse_mode in (0, 1):
        if sparse_mode == 0:
            mask = mask | (column > row + following) | (column < row - pre)
        return mask
    if sparse_mode == 2:
        return column > row
    if sparse_mode == 3:
        return column > row + sk - sq
    return (column > row + sk - sq + following) | (column < row + sk - sq - pre)


def _key_heads(t: torch.Tensor, layout: str, size: int) -> int:
    return t.shape[2] // size if layout in ("SBH", "BSH") else t.shape[1 if layout == "BNSD" else 2]


def _heads(t: torch.Tensor, layout: str, heads: int) -> torch.Tensor:
    """[b, heads, s, size] of a tensor in `layout`."""
    if layout == "SBH":
        return t.unflatten(2, (heads, -1)).permute(1, 2, 0, 3)
    if layout == "BSH":
        return t.unflatten(2, (heads, -1)).transpose(1, 2)
    if layout == "BSND":
        return t.transpose(1, 2)
    if layout == "BNSD":
        return t
    raise ValueError(f"input_layout {layout}")


def _flat(t: torch.Tensor, layout: str) -> torch.Tensor:
    """The inverse of `_heads`."""
    if layout == "SBH":
        return t.permute(2, 0, 1, 3).flatten(2)
    if layout == "BSH":
        return t.transpose(1, 2).flatten(2)
    return t.transpose(1, 2) if layout == "BSND" else t
