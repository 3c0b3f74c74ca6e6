"""`--use-flash-attn`: attention without the score matrix.

`--attention-backend flash` and `fused` ask for it too. Reaches the local `DotProductAttention.forward`, the same in
every release; also serves packed sequences and multi-latent head sizes. On CUDA the first call activates an installed
FA3 or FA4. Without document resets the data loader builds no causal mask. Leaves projections, rotary embedding and
Transformer Engine alone; `context_parallel_algo` serves context parallelism. Falls back for attention biases and for
what the backend lacks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from mindspeed_lite.engine import Context, Feature, Function, Option, OptionError, Override, Session, Settings
from mindspeed_lite.ops.attention import attend, fallback_reasons, packed, prepare
from mindspeed_lite.platform.megatron import CONFIG

from ._shared.attention_core import (
    CORE,
    READS,
    RELIES_ON,
    WITHOUT_QUERY_NORM,
    check,
    choose_flash_kernels,
    dropout_generator,
    pack_reasons,
    packing_of,
    read_call,
    without_head_sizes,
    without_mask,
)
from ._shared.conditions import every, local

_BACKENDS = ("flash", "fused", "unfused", "local", "auto")


def _forward(wrapped: Function, session: Session) -> Function:
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
        choose_flash_kernels(session, FEATURE.name, self, query)
        call = read_call(self, query, attention_mask, packed_seq_params is not None)
        spec = packing = None
        reasons = [] if attention_bias is None else ["an attention bias needs another kernel"]
        if packed_seq_params is None:
            if not reasons:
                spec = prepare(query, key, value, **call._asdict())
                reasons = fallback_reasons(spec)
        else:
            reasons += pack_reasons(self, query, packed_seq_params)
            if not reasons:
                packing = packing_of(packed_seq_params)
                spec = packed.prepare(query, key, value, packing, **call._asdict())
        if reasons or spec is None:
            session.fallback(FEATURE.name, "; ".join(reasons))
            return wrapped(self, query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params)

        def compute(q: Any, k: Any, v: Any) -> Any:
            """[s, b, n, d] -> [s, b, n, dv], or for a pack [t, n, d] -> [t, n, dv]"""
            return attend(q, k, v, spec) if packing is None else packed.attend(q, k, v, packing, spec)

        if session.verifier is not None:
            check(
                session,
                FEATURE,
                compute,
                functools.partial(wrapped, self),
                self,
                (query, key, value),
                attention_mask,
                spec,
                packing,
            )
        with dropout_generator(self, call.dropout_p):
            return compute(query, key, value).flatten(-2)

    return forward


def _backend(text: str) -> str:
    if text not in _BACKENDS:
        raise ValueError(f"one of {', '.join(_BACKENDS)}")
    return text


def _attention_backend(settings: Mapping[str, Any]) -> str:
    """The flag's word; Megatron's parser makes it an enum member."""
    value = settings.get("attention_backend", "auto")
    return str(getattr(value, "name", value))


def _enabled(settings: Settings) -> bool:
    return bool(settings.get("use_flash_attn", False)) or _attention_backend(settings) in ("flash", "fused")


def _why_not(context: Context) -> list[str]:
    if _attention_backend(context.settings) != "unfused":
        return []
    if context.settings.get("use_flash_attn", False):
        raise OptionError(
            "--use-flash-attn and --attention-backend unfused contradict each other: leave one of them out."
        )
    return ["--attention-backend unfused asks for Megatron's own attention"]


FEATURE = Feature(
    name="use_flash_attn",
    summary="attention as one operator that never stores the matrix of scores",
    options=(
        Option("--use-flash-attn", upstream=">=0.12"),
        Option(
            "--attention-backend",
            help="flash and fused: as --use-flash-attn, with the local implementation.",
            default="auto",
            type=_backend,
            upstream=">=0.12",
        ),
    ),
    numerics="ulp",
    theme="operators",
    condition=every(_why_not, local("uses its own attention, which --attention-backend chooses")),
    enabled=_enabled,
    arguments=without_mask,
    operators=("attention",),
    patches=(
        Override(f"{CORE}.__init__", without_head_sizes),
        WITHOUT_QUERY_NORM,
        Override(f"{CORE}.forward", _forward, reads=(*READS, f"{CONFIG}.window_size"), relies_on=RELIES_ON),
    ),
)
