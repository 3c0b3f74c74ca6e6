"""Megatron's DotProductAttention of one rank, its inputs, and the cases that features must meet."""

from __future__ import annotations

import contextlib
import inspect
import textwrap
from types import SimpleNamespace

import torch

from mindspeed_lite import platform

SEQUENCE, BATCH, HEADS, SIZE = 24, 2, 4, 16


def module_of(dtype=torch.float32, mask_type="causal", scale=None, layer=1, **fields):
    """A DotProductAttention of one rank, without process groups."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    platform.activate()
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    tracker = tensor_parallel.get_cuda_rng_tracker()
    if "model-parallel-rng" not in tracker.get_states():
        tracker.set_states({"model-parallel-rng": torch.Generator().manual_seed(1).get_state()})
    config = TransformerConfig(
        **{
            "num_layers": 4,
            "hidden_size": HEADS * SIZE,
            "num_attention_heads": HEADS,
            "attention_dropout": 0.0,
            "masked_softmax_fusion": False,
            "bf16": dtype == torch.bfloat16,
            "params_dtype": dtype,
            **fields,
        }
    )
    return DotProductAttention(
        config,
        layer,
        AttnMaskType[mask_type],
        "self",
        softmax_scale=scale,
        pg_collection=SimpleNamespace(tp=SimpleNamespace(size=lambda: 1)),
    )


def inputs_of(dtype=torch.float32, keys=SEQUENCE, queries=SEQUENCE, groups=HEADS, size=SIZE, value=SIZE):
    """q [sq, b, n, d], k [sk, b, g, d], v [sk, b, g, dv], dout [sq, b, n * dv]"""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    q, k, v = draw(queries, BATCH, HEADS, size), draw(keys, BATCH, groups, size), draw(keys, BATCH, groups, value)
    return [q, k, v], draw(queries, BATCH, HEADS * value)


def document_mask():
    """[b, 1, s, s], True hides: causal, and a document begins at row 9 of the second sequence."""
    hidden = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1).repeat(BATCH, 1, 1, 1)
    hidden[1, :, 9:, :9] = True
    return hidden


def padding_mask():
    """[b, 1, s, s], True hides: causal, and the second sequence ends after 15 tokens."""
    hidden = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1).repeat(BATCH, 1, 1, 1)
    hidden[1, :, :, 15:] = True
    return hidden


# module fields, input shapes, mask
CASES = {
    "causal": ({}, {}, None),
    "one_query": ({}, {"queries": 1}, None),  # a key cache: Megatron masks nothing
    "full": ({"mask_type": "no_mask"}, {}, None),
    "cross": ({"mask_type": "no_mask"}, {"queries": 10}, None),
    "mask_tensor": ({"mask_type": "padding"}, {}, padding_mask),
    "mask_tensor_in_a_causal_module": ({}, {}, padding_mask),
    "window": ({"window_size": (8, 0)}, {}, None),
    "window_over_fewer_queries": ({"window_size": (8, 0)}, {"queries": 10}, None),
    "window_takes_no_mask": ({"window_size": (8, 0)}, {}, padding_mask),
    "window_in_some_layers": ({"window_size": (8, 0), "window_attn_skip_freq": 2, "layer": 2}, {}, None),
    "grouped_keys": ({"num_query_groups": 2}, {"groups": 2}, None),
    "one_key_head": ({"num_query_groups": 1}, {"groups": 1}, None),
    "latent": ({"scale": 24**-0.5}, {"size": 24}, None),  # multi-latent attention: q, k wider than v
    "scaled_by_layer": (
        {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True, "layer": 3},
        {},
        None,
    ),
    "own_scale": ({"scale": 0.3}, {}, None),
}


WINDOW_IN_MEGATRON = "mask = get_sliding_window_causal_mask(sq, sk, self.window_size)"

# What another Megatron does with a mask and a window: main since pull request 7040, and one that there is not.
BESIDE_A_WINDOW = {
    "joined": f"given = mask; {WINDOW_IN_MEGATRON}; mask = mask if given is None else given | mask",
    "alone": f"if mask is None: {WINDOW_IN_MEGATRON}",
}


@contextlib.contextmanager
def changed_softmax(line):
    """Gives the loaded softmax another line in the place of its window's."""
    from megatron.core.fusions import fused_softmax

    cls = fused_softmax.FusedScaleMaskSoftmax
    text = textwrap.dedent(inspect.getsource(cls.forward_torch_softmax))
    assert text.count(WINDOW_IN_MEGATRON) == 1
    space = dict(vars(fused_softmax))
    exec(text.replace(WINDOW_IN_MEGATRON, line), space)
    original, cls.forward_torch_softmax = cls.forward_torch_softmax, space["forward_torch_softmax"]
    try:
        yield
    finally:
        cls.forward_torch_softmax = original


def pack_of(*lengths, padded=None, **fields):
    from megatron.core.packed_seq_params import PackedSeqParams

    def ends(lengths):
        return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    if padded is not None:
        fields |= {"cu_seqlens_q_padded": ends(padded), "cu_seqlens_kv_padded": ends(padded)}
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends(lengths), cu_seqlens_kv=ends(lengths), **fields)
