"""`--use-fused-rotary-pos-emb` in real Megatron: multi-latent attention, Megatron's own fusion, what falls back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import mindspeed_lite
from mindspeed_lite.engine import OptionError
from mindspeed_lite.patches import use_fused_rotary_pos_emb as patch
from tests.harness.compare import error, forward_backward
from tests.harness.processes import forked

FEATURE = patch.FEATURE
S, B, N, D = 24, 2, 4, 16


def utilities():
    from megatron.core.models.common.embeddings import rope_utils

    return rope_utils


def config_of(**fields):
    """What `apply_rotary_pos_emb` reads of a configuration."""
    plain = dict(apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=False, mrope_section=None)
    return SimpleNamespace(**{**plain, **fields})


class Ranks:
    """A context-parallel group of which this process is one rank."""

    def __init__(self, count=1, rank=0):
        self.size, self.rank = (lambda: count), (lambda: rank)


def angles(rows=S):
    """[rows, 1, 1, D], as Megatron's modules make them."""
    freqs = torch.arange(rows).float()[:, None] * 1e4 ** -(torch.arange(0, D, 2) / D)
    return torch.cat((freqs, freqs), -1)[:, None, None]


@forked("megatron")
def test_megatrons_own_fusion_needs_no_transformer_engine():
    from megatron.core.transformer import TransformerConfig

    def config():
        return TransformerConfig(num_layers=1, hidden_size=N * D, num_attention_heads=N, apply_rope_fusion=True)

    with pytest.raises(ValueError, match="install TE"):
        config()
    with mindspeed_lite.enabled(use_fused_rotary_pos_emb=True):
        config()
        with pytest.raises(OptionError, match="apply_rotary_pos_emb"):
            utilities().fused_apply_rotary_pos_emb(torch.ones(1), torch.ones(1))


@pytest.mark.parametrize("packed", [False, True])
@forked("megatron")
def test_latent_attentions_fused_functions_are_the_unfused_path_in_one_piece(packed):
    from megatron.core.transformer import multi_latent_attention as module

    no_position, positions, value = 12, D, 10
    freqs = angles()
    lead = (S,) if packed else (S, B)
    edges = torch.tensor([0, 10, S]).int() if packed else None
    generator = torch.Generator().manual_seed(5)
    q, kv, k = (
        torch.randn(*lead, *last, generator=generator)
        for last in ((N, no_position + positions), (N, no_position + value), (1, positions))
    )
    config = config_of(multi_latent_attention=True)
    rotate = utilities().apply_rotary_pos_emb

    def unfused(t):
        # One row too many: rows that are as many as tokens would not start again with each sequence.
        rows = torch.cat((freqs, freqs[:1])) if packed else freqs
        return rotate(t, rows, config, edges, 1.5, Ranks(), True)

    def plain_query(q):
        return torch.cat((q[..., :no_position], unfused(q[..., no_position:])), -1)

    def plain_key_value(kv, k):
        key, value = kv.split([no_position, kv.shape[-1] - no_position], -1)
        return torch.cat((key, unfused(k).expand(*key.shape[:-1], -1), value), -1)

    cos, sin = freqs.cos() * 1.5, freqs.sin() * 1.5
    dq, dkv = torch.randn(q.shape, generator=generator), torch.randn(*lead, N, no_position + positions + value)
    want = [*forward_backward(plain_query, (q,), dq), *forward_backward(plain_key_value, (kv, k), dkv)]
    with mindspeed_lite.enabled(use_fused_rotary_pos_emb=True, verify=1):

        def query(q):
            return module.fused_apply_mla_rope_for_q(q, cos, sin, no_position, positions, edges, 0, 1)

        def key_value(kv, k):
            both = module.fused_apply_mla_rope_for_kv(kv, k, cos, sin, positions, no_position, value, edges, 0, 1)
            return torch.cat(both, -1)

        got = [*forward_backward(query, (q,), dq), *forward_backward(key_value, (kv, k), dkv)]
        assert [each.verdict for each in mindspeed_lite.report().verifications] == ["ok", "ok"]
    for ours, exact in zip(got, want, strict=True):
        assert error(ours, exact) < 1e-6
