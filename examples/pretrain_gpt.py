"""Pretrain a GPT with the `megatron.training` of an installed megatron-core (0.17 to 0.19): a complete, short script.

    torchrun --nproc-per-node 2 examples/pretrain_gpt.py --tensor-model-parallel-size 2 --use-flash-attn ...

All of Megatron's flags work that concern a GPT under data, tensor, sequence, context, pipeline and expert
parallelism. A Megatron-LM checkout brings a script of its own: `mindspeed-lite run /path/to/pretrain_gpt.py ...` runs
that one as it is.
"""

from __future__ import annotations

import mindspeed_lite.megatron_adaptor  # noqa: F401  # isort: skip

import inspect
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu, tensor_parallel
from megatron.core.datasets import utils as datasets
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.multi_token_prediction import get_mtp_num_layers_to_build, get_mtp_ranks
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank

try:
    from megatron.training import get_args, get_timers, get_tokenizer, pretrain
    from megatron.training.arguments import core_transformer_config_from_args
    from megatron.training.utils import get_blend_and_blend_per_split
except ModuleNotFoundError as error:
    if error.name != "megatron.training":
        raise
    sys.exit(
        "examples/pretrain_gpt.py needs megatron.training, which the wheels of megatron-core have from 0.17 on: "
        "install one of those, or use the pretrain_gpt.py of a Megatron-LM checkout."
    )

Batch = dict[str, torch.Tensor | None]


def refuse_what_is_not_here(args: Any) -> None:
    """This script leaves out what would double its length; say so instead of training something else."""
    absent = {
        "--fim-data": bool(args.fim_data),
        "--sft": bool(args.sft),
        "--hybrid-context-parallel": bool(getattr(args, "hybrid_context_parallel", False)),
    }
    asked = [flag for flag, given in absent.items() if given]
    if asked:
        sys.exit(f"examples/pretrain_gpt.py does not support {', '.join(asked)}; Megatron-LM's pretrain_gpt.py does.")


def use_compiled_dataset_helpers() -> None:
    """A wheel brings them compiled, without the makefile by which Megatron compiles them at every start."""
    if not Path(datasets.__file__).with_name("Makefile").exists():
        datasets.compile_helpers = lambda: None


def separates_documents() -> bool:
    """Whether attention stays within documents; every pipeline stage then needs their ends (from 0.19 on)."""
    return bool(getattr(get_args(), "dataloader_inter_document_masking", False))


def holds_tokens(vp_stage: int | None) -> bool:
    """Whether this pipeline stage embeds tokens, predicts several or computes the loss; the others need no data."""
    if separates_documents():
        return True
    where = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    if mpu.is_pipeline_first_stage(**where) or mpu.is_pipeline_last_stage(**where):
        return True
    args = get_args()
    if not args.mtp_num_layers:
        return False
    return bool(get_mtp_num_layers_to_build(core_transformer_config_from_args(args), vp_stage=vp_stage))


def embedding_ranks(stages: list[int]) -> list[int]:
    """Of one pipeline's ranks those that hold word embeddings: multi-token prediction has them on its own stage."""
    args = get_args()
    has_output = not args.mtp_num_layers or not args.untie_embeddings_and_output_weights
    predictors = get_mtp_ranks(stages, core_transformer_config_from_args(args)) if args.mtp_num_layers else []
    return sorted({stages[0], *([stages[-1]] if has_output else []), *predictors})


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """The part of the model that this rank holds."""
    args = get_args()
    refuse_what_is_not_here(args)
    config = config or core_transformer_config_from_args(args)
    if separates_documents():
        # A micro-batch of several samples is one row then, and not of the shape that stages expect.
        config.variable_seq_lengths = True
    how: dict[str, Any] = {
        "use_transformer_engine": args.transformer_impl == "transformer_engine",
        "normalization": args.normalization,
        "qk_l2_norm": args.qk_l2_norm,
    }
    layers, mtp = get_gpt_decoder_block_spec(config, **how, vp_stage=vp_stage), None
    if args.mtp_num_layers:
        # Alike the model's last layer, which need not be on the stage that predicts several tokens.
        last = get_gpt_decoder_layer_specs(config, **how)[-1]
        mtp = get_gpt_mtp_block_spec(config, last, how["use_transformer_engine"], vp_stage=vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        mtp_block_spec=mtp,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def datasets_provider(
    samples: Sequence[int], vp_stage: int | None = None
) -> tuple[GPTDataset | None, GPTDataset | None, GPTDataset | None]:
    """The training, validation and test sets, with so many samples each; on the ranks that read data."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        **({"inter_document_masking": True} if separates_documents() else {}),
    )
    dataset = MockGPTDataset if args.mock_data else GPTDataset

    def reads_data() -> bool:
        return holds_tokens(vp_stage) and mpu.get_tensor_model_parallel_rank() == 0

    train, valid, test = BlendedMegatronDatasetBuilder(dataset, list(samples), reads_data, config).build()
    return train, valid, test


# Every rank calls the provider; `reads_data` decides who builds.
datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def get_batch(data_iterator: Iterator[Batch] | None, vp_stage: int | None) -> Batch:
    """The next micro-batch: read by the first rank of each tensor-parallel group, sent to the others."""
    names = {"tokens": torch.int64, "labels": torch.int64, "position_ids": torch.int64, "loss_mask": torch.float32}
    if get_args().create_attention_mask_in_dataloader:
        names["attention_mask"] = torch.bool
    if separates_documents():
        names |= {"cu_seqlens": torch.int32, "max_seqlen": torch.int32}
    batch: Batch = dict.fromkeys((*names, "attention_mask"))
    if holds_tokens(vp_stage):
        data = next(data_iterator) if data_iterator is not None else None
        for dtype in dict.fromkeys(names.values()):
            keys = [name for name, its_dtype in names.items() if its_dtype == dtype]
            batch |= tensor_parallel.broadcast_data(keys, data, dtype)
    # From 0.18 on it also knows contexts of changing size, and asks whether this is one.
    how = {"is_hybrid_cp": False} if "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters else {}
    if separates_documents():
        from megatron.core.utils import flatten_batch_for_packed_sequences

        batch = flatten_batch_for_packed_sequences(batch)
        how["use_per_sequence_balancing"] = True
    own: Batch = get_batch_on_this_cp_rank(batch, cp_group=mpu.get_context_parallel_group(), **how)
    return own


def ends_of_documents(batch: Batch) -> dict[str, Any]:
    """What tells attention where documents end, if they are separated."""
    ends, longest = batch.get("cu_seqlens"), batch.get("max_seqlen")
    if ends is None or longest is None:
        return {}
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.training.training import update_seqlen_stats_from_cu_seqlens

    ends, tokens = ends.squeeze(0), int(longest)
    update_seqlen_stats_from_cu_seqlens(ends)
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": tokens, "max_seqlen_kv": tokens}
    return {"packed_seq_params": PackedSeqParams(qkv_format="thd", **lengths, tokens_per_sample=get_args().seq_length)}


def loss_func(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Sum of the loss over the tokens that count, how many they are, and both for the log."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}


def forward_step(
    data_iterator: Iterator[Batch] | None, model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    """One micro-batch through this stage, and the function that turns its output into the loss.

    The schedule of `--overlap-moe-expert-parallel-comm` asks for a plan that it runs piece by piece itself.
    """
    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timer.stop()
    run = get_attr_wrapped_model(model, "build_schedule_plan") if return_schedule_plan else model
    output = run(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        **ends_of_documents(batch),
    )
    return output, partial(loss_func, batch["loss_mask"])


def main() -> None:
    use_compiled_dataset_helpers()
    run: dict[str, Any] = {
        "train_valid_test_dataset_provider": datasets_provider,
        "model_provider": model_provider,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": forward_step,
        "get_embedding_ranks": embedding_ranks,
    }
    try:
        from megatron.training.argument_utils import pretrain_cfg_container_from_args
    except ImportError:  # 0.17: pretrain parses the command line itself
        pretrain(**run)
        return
    from megatron.training.arguments import parse_and_validate_args

    pretrain(pretrain_cfg_container_from_args(parse_and_validate_args()), **run)


if __name__ == "__main__":
    main()
