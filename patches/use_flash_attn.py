"""`--use-flash-attn`: attention without the matrix of scores.

Reaches the core attention of the local implementation. `DotProductAttention.forward` is the whole of it, its
signature and body are the same in every supported release, and the module around it (heads per rank, scale, masks)
stays Megatron's. Leaves the projections, rotary embedding, Transformer Engine's attention and multi-latent
up-projections alone. Steps aside, with a reason, for what the operator's backend cannot do: a softmax offset
anywhere, dropout on the CPU, where no kernel has it.

A causal mask is not built: when the data has no document resets, the data loader is told not to make one
(`--no-create-attention-mask-in-dataloader`), and the kernel masks by position.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from mindspeed_lite.engine import Context, Feature, Option, Session, Wrap
from mindspeed_lite.ops.attention import attention, reference, why_not
from mindspeed_lite.verify import Exact

# Scores (b * n * sq * sk) up to which a verification evaluates all of them in float64 at once, and those of one
# head up to which it does so at all: 1 GiB a matrix.
_SCORES_AT_ONCE = 1 << 26
_SCORES_OF_A_HEAD = 1 << 27


def _forward(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    from megatron.core import tensor_parallel
    from megatron.core.transformer.enums import AttnMaskType

    verifier = session.verifier

    def forward(
        self: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
    ) -> Any:
        softmax = self.scale_mask_softmax
        window = softmax.window_size
        dropout = self.attention_dropout.p if self.training else 0.0
        how: dict[str, Any] = {
            # Megatron's local path looks at the module's own mask type and ignores the argument.
            "causal": self.attn_mask_type == AttnMaskType.causal
            and attention_mask is None
            and window is None
            and query.size(0) > 1,
            "mask": attention_mask if window is None else None,
            "window": window,
            # Layer-wise query-key scaling divides here and multiplies before the softmax.
            "scale": self.softmax_scale * (softmax.scale or 1.0),
            "dropout_p": dropout,
        }
        reasons = [
            f"{name} needs another kernel"
            for name, given in (
                ("the softmax offset of --softmax-type", self.softmax_offset),
                ("a packed sequence", packed_seq_params),
                ("an attention bias", attention_bias),
            )
            if given is not None
        ] or why_not(query, key, value, **how)
        if reasons:
            session.fallback(FEATURE.name, "; ".join(reasons))
            return wrapped(self, query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params)
        if verifier is not None and dropout > 0.0:
            verifier.leave_out(FEATURE.name, "attention", "dropout is on, and each draws in its own way")
        elif verifier is not None:
            _verify(
                verifier,
                lambda *qkv: wrapped(self, *qkv, attention_mask, attn_mask_type, attention_bias, packed_seq_params),
                (query, key, value),
                how,
            )
        # Under sequence parallelism Megatron has forked the generator already.
        fork = (
            tensor_parallel.get_cuda_rng_tracker().fork()
            if dropout > 0.0 and not self.config.sequence_parallel
            else contextlib.nullcontext()
        )
        with fork:
            # [s, b, n, d] -> [s, b, n, dv]
            context = attention(query, key, value, **how)
        return context.flatten(-2)

    return forward


def _verify(verifier: Any, original: Callable[..., Any], qkv: Sequence[torch.Tensor], how: Mapping[str, Any]) -> None:
    """Hand both ways to compute this call to the verifier."""
    from megatron.core import parallel_state

    mask = how["mask"]
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)  # [b or 1, n or 1, sq, sk]

    def without_padding(context: torch.Tensor) -> torch.Tensor:
        """Zero in rows that see no key: ours are zero, Megatron's an average, and nothing may depend on either."""
        if mask is None:
            return context
        empty = mask.all(-1).permute(2, 0, 1).unsqueeze(-1)  # [sq, b or 1, n or 1, 1]
        return context.reshape(*context.shape[:2], heads, -1).masked_fill(empty, 0.0).flatten(-2)

    def ours(*qkv: torch.Tensor) -> torch.Tensor:
        return without_padding(attention(*qkv, **how).flatten(-2))

    def megatrons(*qkv: torch.Tensor) -> torch.Tensor:
        # Megatron keeps the memory of its scores for the next call, which there will not be.
        buffers = parallel_state.get_global_memory_buffer().buffer
        kept = dict(buffers)
        try:
            return without_padding(original(*qkv))
        finally:
            buffers.clear()
            buffers.update(kept)

    heads = qkv[0].shape[2]
    variant = "causal" if how["causal"] else ""
    if mask is not None:
        variant = "mask"
    elif how["window"] is not None:
        variant = "window({},{})".format(*how["window"])
    verifier.check(
        FEATURE.name,
        "attention",
        FEATURE.numerics,
        ours,
        megatrons,
        dict(zip("qkv", qkv, strict=True)),
        against="Megatron's DotProductAttention",
        exact=_exact(qkv, how, mask),
        variant=variant,
    )


def _exact(qkv: Sequence[torch.Tensor], how: Mapping[str, Any], mask: torch.Tensor | None) -> list[Exact]:
    """The definition for float64: in one piece, or where that is too large each sequence's groups of heads."""
    (sq, b, n, _), (sk, _, g, dv) = qkv[0].shape, qkv[2].shape
    if b * n * sq * sk <= _SCORES_AT_ONCE:
        return [Exact(lambda *qkv: reference.attention(*qkv, **how).flatten(-2))]
    if sq * sk > _SCORES_OF_A_HEAD:
        return []
    every, size = slice(None), n // g

    def part(batch: int, group: int) -> Exact:
        one, keys = slice(batch, batch + 1), slice(group, group + 1)
        queries = slice(group * size, (group + 1) * size)
        output = slice(queries.start * dv, queries.stop * dv)
        hidden = mask
        if hidden is not None:
            hidden = hidden[one if hidden.shape[0] > 1 else every, queries if hidden.shape[1] > 1 else every]

        def of_head(head: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            its = hidden if hidden is None or hidden.shape[1] == 1 else hidden[:, head : head + 1]
            return reference.attention(q[:, :, head : head + 1], k, v, **{**how, "mask": its})

        def of_group(*qkv: torch.Tensor) -> torch.Tensor:
            # Recomputed in the backward pass, so that the scores of one head exist at a time.
            recomputed = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
            return torch.cat([recomputed(of_head, head, *qkv) for head in range(size)], 2).flatten(-2)

        return Exact(of_group, (every, one, output), [(every, one, queries), *[(every, one, keys)] * 2])

    return [part(batch, group) for batch in range(b) for group in range(g)]


def _why_not(context: Context) -> Sequence[str]:
    reasons = []
    if context.arg("transformer_impl", "local") == "transformer_engine":
        reasons.append("--transformer-impl transformer_engine uses Transformer Engine's own attention")
    if context.arg("context_parallel_size", 1) > 1:
        reasons.append("--context-parallel-size is above 1, which Megatron's local attention does not support")
    return reasons


def _adjust(context: Context) -> Mapping[str, Any]:
    if context.host_args is None or context.arg("reset_attention_mask", False):
        return {}
    return {"create_attention_mask_in_dataloader": False}


FEATURE = Feature(
    name="use_flash_attn",
    summary="attention without the matrix of scores, in time and in memory",
    options=(
        Option(
            "--use-flash-attn",
            help="Compute attention with a fused operator that never stores the scores.",
            upstream=">=0.16,<0.20",
        ),
    ),
    numerics="ulp",
    condition=_why_not,
    adjust=_adjust,
    operators=("attention",),
    patches=(Wrap("megatron.core.transformer.dot_product_attention:DotProductAttention.forward", _forward),),
)
