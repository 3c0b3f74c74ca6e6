"""A CPU emulation of what is documented of two torch_npu operators, for testing our calls of them.

`npu_rms_norm` and `npu_fusion_attention` have exactly the documented argument names, order and defaults, and
do in plain PyTorch what the documentation says: layouts, mask polarity, sparse modes, the compressed
triangle, token limits. What it forbids raises; what it leaves open comes out as NaN, so that nothing can come
to depend on it. Running our code on this proves the call site against the documentation. It proves nothing
about the device: not that the kernels compute this, nor their precision or speed.
"""

from __future__ import annotations

import types

import torch

UNLIMITED = 2147483647
NPU_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def torch_npu() -> types.ModuleType:
    """A module to stand in for torch_npu in sys.modules."""
    module = types.ModuleType("torch_npu")
    module.npu = types.SimpleNamespace(is_available=lambda: True)  # type: ignore[attr-defined]
    module.npu_rms_norm = npu_rms_norm  # type: ignore[attr-defined]
    module.npu_fusion_attention = npu_fusion_attention  # type: ignore[attr-defined]
    return module


def npu_rms_norm(input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    if input.dtype not in NPU_DTYPES or gamma.dtype != input.dtype:
        raise ValueError(f"dtypes {input.dtype} and {gamma.dtype}")
    if not 2 <= input.dim() <= 8:
        raise ValueError(f"{input.dim()} dimensions")
    if gamma.shape != input.shape[-gamma.dim() :]:
        raise ValueError(f"gamma {tuple(gamma.shape)} for input {tuple(input.shape)}")
    wide = input.float()
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(input.dtype), rstd


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
    unused = (pse, padding_mask, prefix, actual_seq_qlen, actual_seq_kvlen, sink, dropout_mask)
    if any(argument is not None for argument in unused):
        raise NotImplementedError("only what mindspeed_lite passes is emulated")
    if type(head_num) is not int:
        raise TypeError(f"head_num must be int, not {type(head_num).__name__}")
    if not query.dtype == key.dtype == value.dtype or query.dtype not in NPU_DTYPES:
        raise ValueError(f"dtypes {query.dtype}, {key.dtype}, {value.dtype}")
    if not 0 < keep_prob <= 1:
        raise ValueError(f"keep_prob {keep_prob}")
    q = _heads(query, input_layout, head_num)  # [b, n, sq, d]
    size = q.shape[3]
    k = _heads(key, input_layout, _key_heads(key, input_layout, size))  # [b, g, sk, d]
    v = _heads(value, input_layout, k.shape[1])  # [b, g, sk, dv]
    b, n, sq, _ = q.shape
    g, sk = k.shape[1], k.shape[2]
    if k.shape[0] != b or v.shape[:3] != k.shape[:3] or k.shape[3] != size or v.shape[3] > size:
        raise ValueError(f"shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    if n % g or not 1 <= n <= 256 or not 1 <= size <= 768:
        raise ValueError(f"{n} heads, {g} key heads, head size {size}")

    k, v = (t.repeat_interleave(n // g, dim=1) for t in (k, v))
    scores = q.float() @ k.float().transpose(2, 3) * scale  # [b, n, sq, sk]
    hidden = _hidden(atten_mask, sparse_mode, pre_tockens, next_tockens, (b, n, sq, sk))
    if hidden is not None:
        # The softmax of a row without keys is NaN here: undocumented.
        scores = scores.masked_fill(hidden, float("-inf"))
    top = scores.amax(-1, keepdim=True)
    total = (scores - top).exp().sum(-1, keepdim=True)
    probs = torch.nn.functional.dropout(scores.softmax(-1), 1 - keep_prob, training=keep_prob < 1)
    out = (probs @ v.float()).to(query.dtype)  # [b, n, sq, dv]
    lanes = (top.expand(-1, -1, -1, 8), total.expand(-1, -1, -1, 8))
    return _flat(out, input_layout), *lanes, query.new_empty(0), seed, offset, 0


def _hidden(
    mask: torch.Tensor | None, sparse_mode: int, pre: int, following: int, shape: tuple[int, int, int, int]
) -> torch.Tensor | None:
    """Which scores are hidden, True as in atten_mask; None for none."""
    b, n, sq, sk = shape
    if mask is None:
        return None  # documented: without a mask neither the mode nor the tokens count
    if mask.dtype not in (torch.bool, torch.uint8):
        raise ValueError(f"atten_mask is {mask.dtype}")
    mask = mask.bool()
    row, column = torch.arange(sq)[:, None], torch.arange(sk)[None, :]
    if sparse_mode in (0, 1):
        if tuple(mask.shape) not in ((b, n, sq, sk), (b, 1, sq, sk), (1, 1, sq, sk), (sq, sk)):
            raise ValueError(f"atten_mask {tuple(mask.shape)} for {shape}")
        if sparse_mode == 0:
            mask = mask | (column > row + following) | (column < row - pre)
        return mask
    if sparse_mode not in (2, 3, 4):
        raise NotImplementedError(f"sparse_mode {sparse_mode}")
    if not torch.equal(mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1)):
        raise ValueError("modes 2 to 4 want the 2048 x 2048 triangle, True above the diagonal")
    if sparse_mode == 2:
        return column > row
    if sparse_mode == 3:
        return column > row + sk - sq
    return (column > row + sk - sq + following) | (column < row + sk - sq - pre)


def _key_heads(t: torch.Tensor, layout: str, size: int) -> int:
    return t.shape[2] // size if layout in ("SBH", "BSH") else t.shape[1 if layout == "BNSD" else 2]


def _heads(t: torch.Tensor, layout: str, heads: int) -> torch.Tensor:
    """[b, heads, s, size] of a tensor in `layout`."""
    if t.dim() != len(layout):
        raise ValueError(f"{t.dim()} dimensions in layout {layout}")
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
