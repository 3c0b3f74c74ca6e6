"""Builds and runs a GPT as Megatron's `pretrain_gpt.py` does, for layers that are traced without a script."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.initialize import initialize_megatron
from megatron.training.training import destroy_global_state, get_model


def build(words: Sequence[str]) -> tuple[Any, Any]:
    """The model of a command's words, without DDP, and Megatron's arguments. Ignores flags that Megatron has not."""
    sys.argv[:] = ["trace", *words]
    try:
        from megatron.training.arguments import parse_and_validate_args
    except ImportError:
        initialize_megatron(ignore_unknown_args=True)
    else:
        parse_and_validate_args(ignore_unknown_args=True)
        initialize_megatron()
    (model,) = get_model(_provide, wrap_with_ddp=False)
    return model, get_args()


def forget() -> None:
    """Let Megatron start anew."""
    destroy_global_state()
    torch.distributed.destroy_process_group()


def _provide(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:  # fmt: skip
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    how = {"use_transformer_engine": False, "normalization": args.normalization, "qk_l2_norm": args.qk_l2_norm}
    mtp = None
    if args.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, get_gpt_decoder_layer_specs(config, **how)[-1], False)
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(config, **how),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        mtp_block_spec=mtp,
    )


def forward_step(batches: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Output of a micro-batch, and what makes its loss of it."""
    how = {"is_hybrid_cp": False} if "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters else {}
    batch = get_batch_on_this_cp_rank(next(batches), cp_group=mpu.get_context_parallel_group(), **how)
    output = model(batch["tokens"], batch["position_ids"], batch.get("attention_mask"), labels=batch["labels"])
    mask = batch["loss_mask"].view(-1).float()
    return output, lambda losses: torch.sum(losses.view(-1).float() * mask)
