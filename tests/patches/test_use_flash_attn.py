"""`--use-flash-attn` in Megatron's own module: the same attention as without it, or the original with a reason."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace

import pytest
import torch

import mindspeed_lite
from mindspeed_lite import platform
from mindspeed_lite.engine import Context, FallbackError, Settings
from mindspeed_lite.patches import use_flash_attn as patch
from tests.ops.compare import assert_not_worse, forward_backward
from tests.platform.forked import forked

FEATURE = patch.FEATURE
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
@forked("megatron")
def test_on_is_at_least_as_near_to_the_truth_as_off(case, dtype):
    fields, shapes, mask = CASES[case]
    hidden = None if mask is None else mask()
    module, exact_module = module_of(dtype, **fields), module_of(torch.float64, **fields)
    inputs, dout = inputs_of(dtype, **shapes)
    exact = forward_backward(lambda *qkv: exact_module(*qkv, hidden), inputs, dout, torch.float64)
    off = forward_backward(lambda *qkv: module(*qkv, hidden), inputs, dout)
    with mindspeed_lite.enabled(use_flash_attn=True):
        on = forward_backward(lambda *qkv: module(*qkv, hidden), inputs, dout)
        assert mindspeed_lite.report().fallbacks == []
    assert on[0].shape == off[0].shape == dout.shape
    assert on[0].is_contiguous()
    assert any(not torch.equal(*pair) for pair in zip(on, off, strict=True)), "another path computed this"
    # Free are one rounding of the result, which both paths make, and another order of fp32 sums over the sequence,
    # whose errors of eps / 2 each add up as a random walk does.
    slack = torch.finfo(dtype).eps / 2 + math.sqrt(SEQUENCE) * torch.finfo(torch.float32).eps / 2
    assert_not_worse(on, off, exact, slack, ("output", "dq", "dk", "dv"))


def both_ways(module, *arguments, **keywords):
    """The original's answer, and that of a call which must step aside, from the same random state."""
    from megatron.core import tensor_parallel

    tracker = tensor_parallel.get_cuda_rng_tracker()
    states = {name: state.clone() for name, state in tracker.get_states().items()}
    answers = []
    for call in (type(module).forward.__wrapped__, type(module).forward):
        tracker.set_states({name: state.clone() for name, state in states.items()})
        torch.cuda.manual_seed(3)
        answers.append(call(module, *arguments, **keywords))
    return answers


@forked("megatron")
def test_dropout_on_the_cpu_steps_aside_with_one_reason_and_only_in_training():
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("mindspeed_lite").addHandler(handler)
    module = module_of(attention_dropout=0.5)
    (q, k, v), _ = inputs_of()
    mindspeed_lite.enable(use_flash_attn=True)
    module.eval()
    module(q, k, v, None)
    assert mindspeed_lite.report().fallbacks == []
    module.train()
    original, here = both_ways(module, q, k, v, None)
    assert torch.equal(original, here)
    module(q, k, v, None)
    (fallback,) = mindspeed_lite.report().fallbacks
    assert fallback.feature == "use_flash_attn" and "dropout" in fallback.reason
    assert sum("dropout" in text for text in heard) == 1


@forked("megatron")
def test_a_softmax_offset_steps_aside():
    mindspeed_lite.enable(use_flash_attn=True)
    (q, k, v), _ = inputs_of()
    for kind in ("off-by-one", "learnable"):
        original, here = both_ways(module_of(softmax_type=kind, perform_initialization=True), q, k, v, None)
        assert torch.equal(original, here)
    (fallback,) = mindspeed_lite.report().fallbacks
    assert "--softmax-type" in fallback.reason


@forked("megatron")
def test_what_megatron_refuses_is_refused_by_megatron():
    mindspeed_lite.enable(use_flash_attn=True)
    module = module_of()
    (q, k, v), _ = inputs_of()
    with pytest.raises(AssertionError, match="Packed sequence"):
        module(q, k, v, None, packed_seq_params=object())
    with pytest.raises(AssertionError, match="Attention bias"):
        module(q, k, v, None, attention_bias=torch.zeros(1))
    reasons = [each.reason for each in mindspeed_lite.report().fallbacks]
    assert len(reasons) == 2 and "packed" in reasons[0] and "bias" in reasons[1]


@forked("megatron")
def test_strict_raises_where_it_would_step_aside_and_every_time():
    mindspeed_lite.enable(use_flash_attn=True, strict=True)
    (q, k, v), _ = inputs_of()
    assert module_of()(q, k, v, None).shape == (SEQUENCE, BATCH, HEADS * SIZE)
    for _ in range(2):
        with pytest.raises(FallbackError, match=r"use_flash_attn.*dropout"):
            module_of(attention_dropout=0.1)(q, k, v, None)


@forked("megatron")
def test_the_scores_are_never_written_out():
    from tests.ops.compare import Sizes

    # A row of scores is four times a head's size here, so the matrix would be by far the largest tensor.
    length = 4 * SIZE * 4
    module = module_of()
    (q, k, v), dout = inputs_of(queries=length, keys=length)
    largest = {}
    for name in ("off", "on"):
        if name == "on":
            mindspeed_lite.enable(use_flash_attn=True)
        with Sizes() as sizes:
            forward_backward(lambda *qkv: module(*qkv, None), [q, k, v], dout)
        largest[name] = sizes.largest
    scores = BATCH * HEADS * length * length * 4
    assert largest["off"] >= scores and largest["on"] < scores / 8, largest


@forked("megatron")
def test_a_module_from_before_and_one_from_after_are_the_same():
    """The method is swapped on the class, so models that exist already have it, and lose it again."""
    before = module_of()
    (q, k, v), _ = inputs_of()
    off = before(q, k, v, None)
    with mindspeed_lite.enabled(use_flash_attn=True):
        on = before(q, k, v, None)
        assert torch.equal(on, module_of()(q, k, v, None)) and not torch.equal(on, off)
    assert torch.equal(before(q, k, v, None), off)


def reasons(**host_args):
    return list(FEATURE.condition(Context(Settings({}), "cpu", {}, host_args)))


def test_conditions_name_the_flag_that_is_in_the_way():
    assert reasons() == [] == reasons(transformer_impl="local", context_parallel_size=1)
    (engine,) = reasons(transformer_impl="transformer_engine")
    assert "--transformer-impl transformer_engine" in engine
    (context,) = reasons(context_parallel_size=2)
    assert "--context-parallel-size" in context
    assert len(reasons(context_parallel_size=2, transformer_impl="transformer_engine")) == 2


def test_the_mask_is_dropped_only_where_position_says_it_all():
    def adjusted(host_args):
        return dict(FEATURE.adjust(Context(Settings({}), "cpu", {}, host_args)))

    assert adjusted({"reset_attention_mask": False}) == {"create_attention_mask_in_dataloader": False}
    assert adjusted({"reset_attention_mask": True}) == {}, "documents must not see each other"
    assert adjusted(None) == {}, "without arguments there is nothing to adjust"
