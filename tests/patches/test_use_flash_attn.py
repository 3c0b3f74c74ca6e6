"""`--use-flash-attn` in Megatron's own module: the same attention as without it, or the original with a reason."""

from __future__ import annotations

import enum
from types import SimpleNamespace

import pytest
import torch

import mindspeed_lite
from mindspeed_lite import platform
from mindspeed_lite.engine import Context, Settings
from mindspeed_lite.ops.dispatch import force
from mindspeed_lite.patches import use_flash_attn as patch
from tests.harness.attention_modules import (
    BATCH,
    BESIDE_A_WINDOW,
    HEADS,
    SIZE,
    changed_softmax,
    document_mask,
    inputs_of,
    module_of,
    pack_of,
)
from tests.harness.compare import forward_backward
from tests.harness.processes import forked

FEATURE = patch.FEATURE


@pytest.mark.parametrize("change", BESIDE_A_WINDOW)
@forked("megatron")
def test_a_mask_beside_a_window_is_what_the_loaded_megatron_makes_of_it(change):
    module, (qkv, dout) = module_of(window_size=(8, 0)), inputs_of()

    def run():
        return forward_backward(lambda *qkv: module(*qkv, document_mask()), qkv, dout)

    before = run()
    with changed_softmax(BESIDE_A_WINDOW[change]):
        off = run()
        assert not torch.allclose(off[0], before[0], atol=0.1)
        for asked in ({"use_flash_attn": True}, {"auto": True}):
            with mindspeed_lite.enabled(**asked):
                entry = next(each for each in mindspeed_lite.report().entries if each.feature == FEATURE.name)
                assert entry.status == ("off" if "auto" in asked else "skipped")
                assert "FusedScaleMaskSoftmax.forward_torch_softmax` was replaced by" in entry.reasons[0]
                assert "DotProductAttention.forward` relies on it (override)" in entry.reasons[0]
                assert "--mindspeed-lite-allow-unverified" in entry.reasons[0]
                assert all(torch.equal(a, b) for a, b in zip(run(), off, strict=True))
        with mindspeed_lite.enabled(use_flash_attn=True, allow_unverified=True, verify=1):
            on = run()
            (found,) = mindspeed_lite.report().verifications
    assert found.verdict == "ok" and found.shape.endswith("mask window(8,0)" if change == "joined" else "] mask")
    for ours, theirs in zip(on, off, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@forked("megatron")
def test_dropout_draws_from_megatrons_tracker_and_only_in_training():
    from megatron.core import tensor_parallel

    module = module_of(attention_dropout=0.5)
    (q, k, v), dout = inputs_of()
    mindspeed_lite.enable(use_flash_attn=True)
    module.eval()
    whole = module(q, k, v, None)
    assert torch.equal(module(q, k, v, None), whole)
    module.train()
    tracker = tensor_parallel.get_cuda_rng_tracker()
    start = {name: state.clone() for name, state in tracker.get_states().items()}
    outside = torch.get_rng_state()
    first = forward_backward(lambda *qkv: module(*qkv, None), [q, k, v], dout)
    assert torch.equal(torch.get_rng_state(), outside), "drawn from the tracker's own generator"
    second = module(q, k, v, None)
    tracker.set_states(start)
    again = forward_backward(lambda *qkv: module(*qkv, None), [q, k, v], dout)
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert not torch.equal(first[0], second) and not torch.equal(first[0], whole)
    assert mindspeed_lite.report().fallbacks == []


@forked("megatron")
def test_what_megatron_refuses_is_refused_by_megatron():
    mindspeed_lite.enable(use_flash_attn=True)
    module = module_of()
    (q, k, v), _ = inputs_of()
    with pytest.raises(AssertionError, match="Packed sequence"):
        module(q, k, v, None, packed_seq_params=SimpleNamespace(qkv_format="sbhd"))
    with pytest.raises(AssertionError, match="Attention bias"):
        module(q, k, v, None, attention_bias=torch.zeros(1))
    reasons = [each.reason for each in mindspeed_lite.report().fallbacks]
    assert len(reasons) == 2 and "packed" in reasons[0] and "bias" in reasons[1]


@forked("megatron")
def test_the_scores_are_never_written_out():
    from tests.harness.compare import Sizes

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


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@forked("megatron")
def test_multi_latent_attention_is_built_and_computes_what_is_defined(packed):
    """Megatron's local attention has no parameters for its head sizes: without the feature there is no such model."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import MLATransformerConfig

    platform.activate()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = MLATransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_head_dim=24,
        qk_pos_emb_head_dim=8, v_head_dim=16, multi_latent_attention=True, normalization="RMSNorm", rope_type="rope",
        masked_softmax_fusion=False, attention_dropout=0.0, hidden_dropout=0.0,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(multi_latent_attention=True, normalization="RMSNorm")

    def build():
        return GPTModel(config, spec, vocab_size=64, max_sequence_length=32, position_embedding_type="rope")

    with pytest.raises(TypeError, match="k_channels"):
        build()
    mindspeed_lite.enable(use_flash_attn=True)
    model = build()
    tokens = torch.randint(0, 64, (1, 16))
    positions = torch.arange(16).unsqueeze(0)
    params = pack_of(7, 9, max_seqlen_q=9, max_seqlen_kv=9) if packed else None
    got = model(tokens, positions, None, labels=tokens, packed_seq_params=params)
    got.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with force("attention", "reference"), torch.no_grad():
        want = model(tokens, positions, None, labels=tokens, packed_seq_params=params)
    torch.testing.assert_close(got.detach(), want, rtol=1e-5, atol=1e-5)


def test_attention_backend_asks_in_megatrons_words():
    """As a text, or as the member that Megatron's parser makes of it."""
    backends = enum.Enum("Backend", patch._BACKENDS)
    for each in backends:
        on = each.name in ("flash", "fused")
        for value in (each, each.name):
            settings = Settings.of(FEATURE.options, {"attention_backend": value})
            both = Settings.of(FEATURE.options, {"attention_backend": value, "use_flash_attn": True})
            assert FEATURE.is_enabled(settings) is on and FEATURE.is_enabled(both)
            assert bool(FEATURE.condition(Context(settings, "cpu", {}, {}))) is (each.name == "unfused")
