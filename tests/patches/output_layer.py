"""A small GPT in real Megatron for tests of its output layer, and Megatron's reinforcement learning on it."""

from __future__ import annotations

import argparse
import importlib
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from mindspeed_lite import platform
from tests.harness.errors import error

# Its `megatron.rl`, which no wheel holds, imports wandb, openai and more; otherwise a stand-in is used.
CHECKOUT = os.environ.get("MEGATRON_LM", "")
STAND_IN = """
import torch
from megatron.core.utils import unwrap_model


def selective_log_softmax(logits, index):
    return logits.log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)


def get_logprobs(model, tokens, position_ids, no_grad=False, sequence_packing=False, packed_seq_params=None):
    with torch.set_grad_enabled(not no_grad):
        logits = model(tokens, position_ids, None, runtime_gather_output=True, fp32_output=False)
    if not unwrap_model(model).post_process:
        return logits
    return selective_log_softmax(logits[:, :-1, :], tokens[:, 1:])
"""


def ready(rank=0, ranks=1, store=None):
    """The device layer, a group, and chunks of 64 entries of a vocabulary of 256."""
    from mindspeed_lite.ops.linear_cross_entropy import chunks

    platform.activate()
    dist.init_process_group("gloo", store=store or dist.HashStore(), rank=rank, world_size=ranks)
    chunks._NARROWEST = 64
    chunks.CHUNK = 1


def model_of(tied=False, mtp=False, vocabulary=256, dtype=torch.bfloat16, stage=None, **config):
    """A small GPT with its output layer's weights large enough for losses that differ."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    ranks = config.get("tensor_model_parallel_size", 1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(ranks)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2 if stage is not None else 1,
        hidden_size=32,
        num_attention_heads=2,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        init_method_std=0.2,
        mtp_num_layers=1 if mtp else None,
        **config,
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    more = {"mtp_block_spec": get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)} if mtp else {}
    if stage is not None:
        more.update(pre_process=stage == 0, post_process=stage == 1)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=vocabulary,
        max_sequence_length=32,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
        **more,
    )


def assert_near(on, off, dtype=torch.bfloat16):
    """Two runs that round differently, compared over whole tensors."""
    assert on[0].shape == off[0].shape and on[0].dtype == off[0].dtype
    rounding = torch.finfo(dtype).eps
    assert error(on[0], off[0]) <= rounding
    assert on[1].keys() == off[1].keys()
    for name, gradient in on[1].items():
        # Sums over tokens and vocabulary in another order.
        assert error(gradient, off[1][name]) <= 8 * rounding, name


def rl_utils():
    """`megatron.rl.rl_utils`, with what its functions read of Megatron's script."""
    import megatron

    root = Path(CHECKOUT or tempfile.mkdtemp()) / "megatron"
    if not CHECKOUT:
        (root / "rl").mkdir(parents=True)
        (root / "rl" / "rl_utils.py").write_text(STAND_IN)
    megatron.__path__ = [*megatron.__path__, str(root)]
    if CHECKOUT:
        from megatron.core.timers import Timers
        from megatron.training import global_vars

        global_vars.set_args(argparse.Namespace(fp16=False, bf16=True))
        global_vars._GLOBAL_TIMERS = Timers(0, "minmax")
    return importlib.import_module("megatron.rl.rl_utils")
