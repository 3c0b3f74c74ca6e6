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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mindspeed_lite.engine import Context, Feature, Option, Session, Wrap
from mindspeed_lite.ops.attention import attention, why_not


def _forward(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    from megatron.core import tensor_parallel
    from megatron.core.transformer.enums import AttnMaskType

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
