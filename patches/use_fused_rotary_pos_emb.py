"""`--use-fused-rotary-pos-emb`: rotary embedding in one pass over queries and keys.

Reaches `apply_rotary_pos_emb`, which every attention calls, and the two functions of multi-latent attention's fused
path. Provides names that `apply_rope_fusion` imports from Transformer Engine. Leaves the angles, so long-context
scaling, alone. Falls back for shapes that need broadcasting.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from mindspeed_lite.engine import Context, Feature, Function, Override, Provide, Session, matches
from mindspeed_lite.ops.rope import RotationSpec, reference, rope
from mindspeed_lite.ops.rope.angles import cos_sin, packed_positions
from mindspeed_lite.platform.megatron import HOST

from ._shared.conditions import every, local
from ._shared.wrappers import config_field, is_set, placeholder, verify

UTILITIES = "megatron.core.models.common.embeddings.rope_utils"
LATENT = "megatron.core.fusions.fused_mla_yarn_rope_apply"
_REPLACED = "use_fused_rotary_pos_emb replaces apply_rotary_pos_emb, which is to be called: leave the flag out."


def _rotate(wrapped: Function, session: Session) -> Function:
    from megatron.core import parallel_state

    def apply_rotary_pos_emb(
        t: Any,
        freqs: Any,
        config: Any,
        cu_seqlens: Any = None,
        mscale: float = 1.0,
        cp_group: Any = None,
        mla_rotary_interleaved: Any = None,
        max_seqlen: Any = None,
    ) -> Any:
        def unfused(t: Any) -> Any:
            # Megatron's fused path may be this feature's placeholders.
            changed = copy.copy(config)
            changed.apply_rope_fusion = False
            return wrapped(
                t, freqs, changed, cu_seqlens, mscale, cp_group, mla_rotary_interleaved, max_seqlen=max_seqlen
            )

        # [s, b, n, d] or packed [t, n, d]; freqs [s, 1 or b, 1, R]
        reasons = _misfits(t, freqs, cu_seqlens)
        # Before 0.19 it is a property of the model, not a parameter.
        regrouped = config.multi_latent_attention if mla_rotary_interleaved is None else mla_rotary_interleaved
        if regrouped and config.rotary_interleaved:
            reasons.append("regrouped and interleaved pairs together")
        if reasons:
            session.fallback(FEATURE.name, "; ".join(reasons))
            return unfused(t)
        pairs = "regrouped" if regrouped else "interleaved" if config.rotary_interleaved else "half"
        how: dict[str, Any] = {"pairs": pairs, "scale": mscale}
        if cu_seqlens is not None:
            group = parallel_state.get_context_parallel_group() if cp_group is None else cp_group
            ranks = {"cp_size": group.size(), "cp_rank": group.rank()}
            how["positions"] = packed_positions(cu_seqlens, t.shape[0], freqs.shape[0], **ranks)

        return _turn(session, t, cos_sin(freqs), how, unfused)

    return apply_rotary_pos_emb


def _misfits(t: Any, freqs: Any, cu_seqlens: Any) -> list[str]:
    shape, angles = t.shape, freqs.shape
    if len(shape) != (4 if cu_seqlens is None else 3) or len(angles) != 4 or angles[2] != 1:
        return [f"a tensor {tuple(shape)} with angles {tuple(angles)}"]
    if angles[-1] % 2 or angles[-1] > shape[-1]:
        return [f"{angles[-1]} rotary elements of a head of {shape[-1]}"]
    if angles[1] not in (1, shape[1]) if cu_seqlens is None else angles[1] != 1:
        return [f"a tensor {tuple(shape)} with angles {tuple(angles)}"]
    if cu_seqlens is None and angles[0] != shape[0]:
        return [f"{shape[0]} tokens with angles of {angles[0]}"]
    return []


def _turn(session: Session, t: Any, tables: tuple[Any, Any], how: dict[str, Any], original: Any = None) -> Any:
    def ours(t: Any) -> Any:
        return rope(t, *tables, **how)

    def definition(t: Any) -> Any:
        whole = t if t.dim() == 4 else t.unsqueeze(1)
        spec = RotationSpec(**{name: value for name, value in how.items() if name != "positions"})
        return reference.rope(whole, *tables, how.get("positions"), spec).view(t.shape)

    against = "Megatron's unfused rotary embedding" if original else "the plain definition"
    variant = how["pairs"] + (" packed" if how.get("positions") is not None else "")
    verify(session, FEATURE, "rope", ours, original or definition, {"t": t}, against, variant=variant)
    return ours(t)


def _latent_query(wrapped: Function, session: Session) -> Function:
    def fused_apply_mla_rope_for_q(
        t: Any,
        cos: Any,
        sin: Any,
        qk_head_dim: int,
        emb_dim: int,
        cu_seqlens_q: Any = None,
        cp_rank: int = 0,
        cp_size: int = 1,
        rotary_interleaved: bool = False,
    ) -> Any:
        if rotary_interleaved:
            session.fallback(FEATURE.name, "interleaved pairs in multi-latent attention")
            return wrapped(t, cos, sin, qk_head_dim, emb_dim, cu_seqlens_q, cp_rank, cp_size, rotary_interleaved)
        return _turn(session, t, (cos, sin), _latent(t, qk_head_dim, cu_seqlens_q, cp_rank, cp_size))

    return fused_apply_mla_rope_for_q


def _latent_key_value(wrapped: Function, session: Session) -> Function:
    def fused_apply_mla_rope_for_kv(
        kv: Any,
        k_pos_emb: Any,
        cos: Any,
        sin: Any,
        emb_dim: int,
        k_dim: int,
        v_dim: int,
        cu_seqlens_kv: Any = None,
        cp_rank: int = 0,
        cp_size: int = 1,
        rotary_interleaved: bool = False,
    ) -> Any:
        if rotary_interleaved:
            session.fallback(FEATURE.name, "interleaved pairs in multi-latent attention")
            return wrapped(
                kv, k_pos_emb, cos, sin, emb_dim, k_dim, v_dim, cu_seqlens_kv, cp_rank, cp_size, rotary_interleaved
            )
        # One head of positions [..., 1, emb_dim] serves all heads.
        turned = _turn(session, k_pos_emb, (cos, sin), _latent(k_pos_emb, 0, cu_seqlens_kv, cp_rank, cp_size))
        key, value = kv.split([k_dim, v_dim], -1)
        return torch.cat((key, turned.expand(*key.shape[:-1], emb_dim)), -1), value

    return fused_apply_mla_rope_for_kv


def _latent(t: Any, start: int, cu_seqlens: Any, cp_rank: int, cp_size: int) -> dict[str, Any]:
    how: dict[str, Any] = {"pairs": "regrouped", "start": start}
    if cu_seqlens is not None:
        how["positions"] = packed_positions(cu_seqlens, t.shape[0], cp_size=cp_size, cp_rank=cp_rank)
    return how


def _why_not(context: Context) -> list[str]:
    position = context.arg("position_embedding_type", "rope")
    if position in ("rope", "yarn", "mrope") or context.arg("multi_latent_attention", False):
        return []
    return [f"the model has --position-embedding-type {position}, not a rotary one"]


def _arguments(context: Context) -> Mapping[str, Any]:
    latent = context.arg("multi_latent_attention", False)
    refused = (
        context.host_args is None
        or context.arg("position_embedding_type", "rope") != "rope"
        or context.arg("rotary_interleaved", False)
        or context.arg("experimental_attention_variant") is not None
        or (latent and (context.arg("rope_type") == "rope" or context.arg("cache_mla_latents", False)))
        or (latent and matches("<0.13", context.versions.get(HOST, "1")))
    )
    return {} if refused else {"apply_rope_fusion": True}


FEATURE = Feature(
    name="use_fused_rotary_pos_emb",
    summary="rotary embedding in one pass, also where Megatron's own fusion demands Transformer Engine",
    numerics="ulp",
    theme="operators",
    condition=every(local("has its own rotary embedding, without --no-rope-fusion"), _why_not),
    arguments=_arguments,
    operators=("rope",),
    patches=(
        Override(f"{UTILITIES}:apply_rotary_pos_emb", _rotate, by_name=True),
        *(Provide(f"{UTILITIES}:fused_apply_rotary_pos_emb{form}", placeholder(_REPLACED)) for form in ("", "_thd")),
        Override(f"{LATENT}:fused_apply_mla_rope_for_q", _latent_query, by_name=True, versions=">=0.13"),
        Override(f"{LATENT}:fused_apply_mla_rope_for_kv", _latent_key_value, by_name=True, versions=">=0.13"),
        config_field("apply_rope_fusion", is_set(f"{UTILITIES}:fused_apply_rotary_pos_emb")),
    ),
)
