"""A training loop on Megatron-core alone, as Megatron-Bridge, verl and NeMo use it: no `megatron.training`.

`train` runs on every supported release and returns, on the last pipeline stage, each step's loss and gradient norm
as exact hexadecimal floats.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mindspeed_lite
from mindspeed_lite import runtime
from mindspeed_lite.tuning.synchronizations import SynchronizationRecorder
from tests.harness import frozen

VOCABULARY, SEQUENCE, MICRO_BATCH = 256, 32, 2
# Ends of the documents of a micro-batch that is a pack, one of them empty and two padded, without and with padding.
DOCUMENTS, PADDED = (0, 21, 29, 29, 59), (0, 24, 32, 32, 64)


def _batches(seed: int, data_rank: int, text: bytes = b"") -> Iterator[dict[str, torch.Tensor]]:
    """Runs of consecutive numbers, which a model learns within twenty steps; or of `text`, a byte being a token."""
    generator = torch.Generator().manual_seed(1000 * seed + data_rank)
    position_ids = torch.arange(SEQUENCE).repeat(MICRO_BATCH, 1)
    corpus = torch.frombuffer(bytearray(text), dtype=torch.uint8).long() if text else None
    while True:
        last = VOCABULARY if corpus is None else len(corpus) - SEQUENCE
        start = torch.randint(0, last, (MICRO_BATCH, 1), generator=generator)
        places = start + torch.arange(SEQUENCE + 1)
        tokens = places % VOCABULARY if corpus is None else corpus[places]
        yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "position_ids": position_ids}


def micro_batches(options: dict[str, Any]) -> int:
    """How many a step has on one rank: two unless `options` say so, and in a pipeline four."""
    return int(options.get("micro_batches", 4 if options.get("pp", 1) > 1 else 2))


def _dtype(options: dict[str, Any]) -> torch.dtype:
    return torch.float32 if options.get("fp32") else torch.bfloat16


def build(options: dict[str, Any]) -> tuple[list[Any], Any]:
    """Model chunks and configuration for `options`: tp, pp, vpp, cp, ep, sp, experts, layers, fp32, config and MoE
    fields, and `unchecked` ones, which are set past the configuration's checks."""
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    tp, pp, vpp = options.get("tp", 1), options.get("pp", 1), options.get("vpp")
    if not ps.model_parallel_is_initialized():
        ps.initialize_model_parallel(
            tp,
            pp,
            virtual_pipeline_model_parallel_size=vpp,
            context_parallel_size=options.get("cp", 1),
            expert_model_parallel_size=options.get("ep", 1),
            expert_tensor_parallel_size=options.get("etp"),
        )
    model_parallel_cuda_manual_seed(options.get("seed", 1))
    experts, with_te = options.get("experts"), options.get("transformer_engine", False)
    moe: dict[str, Any] = {}
    if experts:
        moe = {
            "num_moe_experts": experts,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 1e-2,
            "expert_model_parallel_size": options.get("ep", 1),
            "expert_tensor_parallel_size": options.get("etp"),
            **options.get("moe", {}),
        }
    dtype = _dtype(options)
    fields = dict(
        num_layers=options.get("layers", 2),
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        num_query_groups=options.get("query_groups", 4),
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=options.get("bias", False),
        hidden_dropout=options.get("dropout", 0.0),
        attention_dropout=options.get("dropout", 0.0),
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=options.get("cp", 1),
        virtual_pipeline_model_parallel_size=vpp,
        overlap_p2p_comm=vpp is not None,
        batch_p2p_comm=vpp is None,
        sequence_parallel=options.get("sp", False),
        gradient_accumulation_fusion=options.get("wgrad_fusion", False),
        masked_softmax_fusion=options.get("softmax_fusion", False),
        persist_layer_norm=False,
        qk_layernorm=options.get("qk_layernorm", False),
        qk_l2_norm=options.get("qk_l2_norm", False),
    )
    if "qk_l2_norm" not in inspect.signature(TransformerConfig).parameters:
        del fields["qk_l2_norm"]  # before 0.16 the layer specification alone is told
    config = TransformerConfig(**{**fields, **moe, **options.get("config", {})})
    for name, value in options.get("unchecked", {}).items():
        setattr(config, name, value)
    if isinstance(config.moe_layer_freq, list):
        spec: Any = get_gpt_decoder_block_spec(config, use_transformer_engine=with_te)
    else:
        norms: dict[str, Any] = {"qk_layernorm": config.qk_layernorm, "qk_l2_norm": options.get("qk_l2_norm", False)}
        if with_te:
            norms["moe_grouped_gemm"] = config.moe_grouped_gemm
            spec = get_gpt_layer_with_transformer_engine_spec(num_experts=experts, **norms)
        else:
            spec = get_gpt_layer_local_spec(num_experts=experts, normalization=config.normalization, **norms)
    chunks = []
    for chunk in range(vpp or 1):
        stage: dict[str, Any] = {"vp_stage": chunk} if vpp is not None else {}
        if stage and "vp_stage" not in inspect.signature(GPTModel).parameters:
            ps.set_virtual_pipeline_model_parallel_rank(stage.pop("vp_stage"))  # before 0.13
        first = ps.is_pipeline_first_stage(ignore_virtual=False, **stage)
        last = ps.is_pipeline_last_stage(ignore_virtual=False, **stage)
        more: dict[str, Any] = {}
        if config.mtp_num_layers:
            more["mtp_block_spec"] = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=with_te, **stage)
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=options.get("tied", False),
            position_embedding_type="rope",
            **stage,
            **more,
        )
        chunks.append(model)
    return chunks, config


def _requested(feature: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of a configuration that the features in force set for a script, and Megatron's own flags among theirs,
    which the configuration may refuse for want of what this machine has not.
    """
    from megatron.core.transformer import TransformerConfig

    active = runtime.current()
    assert active is not None
    outcome = active.plan.outcome(feature)
    assert outcome.status == "applied", outcome.reasons
    fields = {each.name for each in dataclasses.fields(TransformerConfig)}
    applied = [each for each in active.plan.applied if each.feature.patches]
    asked = {name: value for each in applied for name, value in each.arguments.items() if name in fields}
    options = [option for each in applied for option in each.feature.options if option.upstream and option.is_switch]
    return asked, {each.dest: True for each in options if each.dest in fields and each.dest not in asked}


def _nudge(chunks: list[Any], seed: int) -> None:
    """Move every weight by one rounding, up or down at random."""
    generator = torch.Generator().manual_seed(seed)
    for chunk in chunks:
        for parameter in chunk.parameters():
            sign = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            parameter.data.copy_(parameter.data.double() * (1 + sign * 2.0**-8))


def weigh_by_name(chunks: list[Any], local_experts: int) -> None:
    """Give every matrix weights that follow from its name, a layer's and an expert's from its number among all: alike
    in any layout of the pipeline, of experts and of the sequence."""
    from megatron.core import parallel_state as ps

    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
                name = "embedding.word_embeddings.weight"  # the copy of it on another stage
            name = frozen.global_name(chunk, name)
            # Transformer Engine has the weights of all experts in one layer.
            name = re.sub(r"experts\.(linear_fc[12])\.weight(\d+)$", r"experts.local_experts.\2.\1.weight", name)
            before, _, number_and_rest = name.partition("local_experts.")
            if number_and_rest:
                number, _, rest = number_and_rest.partition(".")
                first = ps.get_expert_model_parallel_rank() * local_experts
                name = f"{before}{first + int(number)}.{rest}"
            if parameter.dim() > 1:
                seed = zlib.crc32(name.encode()) + ps.get_tensor_model_parallel_rank()
                generator = torch.Generator().manual_seed(seed)
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)


def _part_of_context(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's columns: two chunks of the sequence, one from either end, as Megatron splits it."""
    from megatron.core import parallel_state as ps

    ranks, rank = ps.get_context_parallel_world_size(), ps.get_context_parallel_rank()
    if ranks == 1:
        return batch
    return {
        name: torch.cat([each.chunk(2 * ranks, 1)[place] for place in (rank, 2 * ranks - 1 - rank)], 1)
        for name, each in batch.items()
    }


def _part_of_pack(batch: dict[str, torch.Tensor], has_padding: bool) -> tuple[dict[str, Any], Any]:
    """A micro-batch as one pack of documents, this rank's rows of it, and what Megatron tells attention.

    has_padding: Megatron is told of the padding; its own data set of packs counts it to the documents.
    """
    from megatron.core import parallel_state as ps
    from megatron.core import utils
    from megatron.core.packed_seq_params import PackedSeqParams

    ends, starts = (torch.tensor(each, dtype=torch.int32) for each in (DOCUMENTS if has_padding else PADDED, PADDED))
    padded = starts if has_padding else None
    longest = torch.tensor([SEQUENCE], dtype=torch.int32)
    rows: dict[str, Any] = {name: each.reshape(1, -1) for name, each in batch.items()}
    if hasattr(utils, "get_thd_batch_on_this_cp_rank"):
        split: tuple[dict[str, Any], Any] = utils.get_thd_batch_on_this_cp_rank(rows, ends, padded, longest)
        return split
    whole = None if padded is None else padded.unsqueeze(0)
    told = {"cu_seqlens": ends.unsqueeze(0), "cu_seqlens_padded": whole, "max_seqlen": longest}
    rows = utils.get_batch_on_this_cp_rank({**rows, **told}, False, cp_group=ps.get_context_parallel_group())
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": SEQUENCE, "max_seqlen_kv": SEQUENCE}
    return rows, PackedSeqParams(qkv_format="thd", **lengths, cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded)


class Training:
    """A model, its configuration and its optimizer, trained a step at a time; needs torchrun's variables."""

    def __init__(self, options: dict[str, Any]) -> None:
        from megatron.core import parallel_state as ps
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        if not dist.is_initialized():
            dist.init_process_group("nccl")
        #: What features in force have asked of the configuration.
        self.asked: dict[str, Any] = {}
        if "requested" in options:
            asked, late = _requested(options["requested"])
            options = {**options, "config": {**options.get("config", {}), **asked}, "unchecked": late}
            self.asked = {**asked, **late}
        self.options = options
        chunks, self.config = build(options)
        if options.get("by_name"):
            weigh_by_name(chunks, (options.get("experts") or 0) // options.get("ep", 1))
        if options.get("nudge"):
            _nudge(chunks, options["nudge"])
        if options.get("frozen"):
            for chunk in chunks:
                frozen.freeze(chunk, options["frozen"])
        distributed_optimizer = options.get("distributed_optimizer", False)
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=options.get("grad_reduce_in_fp32", True),
            use_distributed_optimizer=distributed_optimizer,
            overlap_grad_reduce=options.get("overlap_grad_reduce", False),
            overlap_param_gather=options.get("overlap_param_gather", False),
            align_param_gather=options.get("align_param_gather", False),
            bucket_size=options.get("bucket_size"),
            **({"delay_wgrad_compute": True} if options.get("ddp_delay_wgrad_compute") else {}),
        )
        self.models = [
            DistributedDataParallel(
                self.config, ddp_config, Float16Module(self.config, chunk) if self.config.bf16 else chunk
            )
            for chunk in (each.cuda() for each in chunks)
        ]
        self.config.finalize_model_grads_func = finalize_model_grads
        told = "overlap_param_gather" in inspect.signature(OptimizerConfig).parameters
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=options.get("lr", 3e-3),
                bf16=_dtype(options) == torch.bfloat16,
                params_dtype=_dtype(options),
                use_distributed_optimizer=distributed_optimizer,
                clip_grad=options.get("clip_grad", 1.0),
                # Before 0.14 the wrapped model alone is told.
                **({"overlap_param_gather": options.get("overlap_param_gather", False)} if told else {}),
            ),
            self.models,
        )
        text = Path(options["text"]).read_bytes() if "text" in options else b""
        self.iterators = [_batches(options.get("seed", 1), ps.get_data_parallel_rank(), text) for _ in self.models]
        self.losses: list[torch.Tensor] = []
        self.checkpointed: list[bool | None] = []

    def forward_step(
        self, iterator: Any, model: Any, is_checkpointed: bool | None = None, return_schedule_plan: bool = False
    ) -> Any:
        """What Megatron's schedules call for each micro-batch."""
        from megatron.core import parallel_state as ps

        self.checkpointed.append(is_checkpointed)
        mask, packs = None, {}
        if "packed" in self.options:
            batch, packs["packed_seq_params"] = _part_of_pack(next(iterator), self.options["packed"] == "padded")
        else:
            batch = _part_of_context(next(iterator))
        if self.options.get("mask_tensor"):
            mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, device="cuda"), diagonal=1).bool()
        # The combined schedule of --overlap-moe-expert-parallel-comm asks for a plan instead of an output.
        call = model.build_schedule_plan if return_schedule_plan else model
        tokens, positions, labels = (batch[name].cuda() for name in ("tokens", "position_ids", "labels"))
        output = call(tokens, positions, mask, labels=labels, **packs)

        def loss_of(losses: torch.Tensor) -> Any:
            loss = losses.float().mean()
            self.losses.append(loss.detach().clone())
            if self.config.calculate_per_token_loss:
                return losses.float().sum(), torch.tensor(losses.numel(), dtype=torch.int), {}
            # Megatron's schedules take a share of the loss of the whole sequence, and divide by nothing else.
            return loss / ps.get_context_parallel_world_size(), {}

        return output, loss_of

    def zero(self) -> None:
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.losses.clear()
        self.checkpointed.clear()

    def forward_backward(self, forward_only: bool = False) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        if self.options.get("no_sync"):
            # As Megatron's script: gradients are ready after the last micro-batch alone.
            self.config.no_sync_func = self.models[0].no_sync
        if self.options.get("sync_functions"):
            self._set_sync_functions()
        get_forward_backward_func()(
            forward_step_func=self.forward_step,
            data_iterator=self.iterators if len(self.models) > 1 else self.iterators[0],
            model=self.models if len(self.models) > 1 else self.models[0],
            num_microbatches=micro_batches(self.options),
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            forward_only=forward_only,
        )
        # It holds the model, which a copy of the configuration would copy.
        self.config.no_sync_func = self.config.grad_sync_func = self.config.param_sync_func = None

    def _set_sync_functions(self) -> None:
        """As Megatron's script: one function, or one for each model chunk."""

        def each(name: str) -> Any:
            functions = [getattr(model, name) for model in self.models]
            return functions if len(functions) > 1 else functions[0]

        self.config.no_sync_func, self.config.grad_sync_func = each("no_sync"), each("start_grad_sync")
        if self.options.get("align_param_gather"):
            self.config.param_sync_func = each("start_param_sync")

    def digest(self) -> str:
        """The main gradients of this rank, all bits of them, and which forwards recompute fully, as one short text."""
        found = hashlib.sha256(repr(self.checkpointed).encode())
        for model in self.models:
            for name, parameter in model.named_parameters():
                found.update(name.encode() + parameter.main_grad.contiguous().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()[:16]

    def evaluate(self) -> list[tuple[str, str]]:
        """The losses of one evaluation, exact, where there are losses."""
        self.losses.clear()
        with torch.no_grad():
            self.forward_backward(forward_only=True)
        return [("evaluation", float(loss).hex()) for loss in self.losses]

    def step(self) -> list[tuple[str, str]]:
        """One step; its loss and gradient norm as exact hexadecimal floats where there is a loss."""
        from megatron.core import parallel_state as ps

        self.zero()
        self.forward_backward()
        digest = [("gradients", self.digest())] if self.options.get("digest") else []
        _, grad_norm, _ = self.optimizer.step()
        if not self.losses:
            return digest
        loss = torch.stack(self.losses).mean()
        if ps.get_context_parallel_world_size() > 1:
            dist.all_reduce(loss, group=ps.get_context_parallel_group())
            loss /= ps.get_context_parallel_world_size()
        return [(float(loss).hex(), float(grad_norm).hex()), *digest]


# Of the last step of a training.
SYNCHRONIZATIONS = SynchronizationRecorder(host_is_device=True)


def train(options: dict[str, Any]) -> list[tuple[str, str]]:
    """Train `options["steps"]` steps, and two more without features if `undone`; needs torchrun's variables."""
    training = Training(options)
    found = []
    for number in range(steps := options.get("steps", 5)):
        with SYNCHRONIZATIONS if number == steps - 1 else contextlib.nullcontext():
            found += training.step()
        if options.get("evaluate"):
            found += training.evaluate()
    if options.get("undone"):
        for model in training.models if options.get("overlap_param_gather") else ():
            model.start_param_sync(force_sync=True)
        mindspeed_lite.disable()
        found += [*training.step(), *training.step()]
    return found


def destroy() -> None:
    """End the process group and Megatron's view of it."""
    from megatron.core import parallel_state as ps

    ps.destroy_model_parallel()
    dist.destroy_process_group()
