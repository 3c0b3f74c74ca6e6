"""Frozen description of a training: model, layout and features."""

from __future__ import annotations

import ast
import dataclasses
import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

# Keys visible before and after a query; -1 is no limit.
Window = tuple[int, int]


class ArgumentError(ValueError):
    """Missing or unsupported argument; one line."""


@dataclass(frozen=True)
class TrainingConfig:
    """A training with Megatron's names and defaults, and features under their own names.

    Attributes:
        device: cpu, cuda or npu, which affects what torch saves.
        padded_vocab_size: rows of the embedding.
        expert_load: tokens of the fullest rank's experts over the mean.
        traced_words: further flags of Megatron's layers, which only a trace reads.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int
    micro_batch_size: int
    device: str = "cuda"
    world_size: int = 1
    padded_vocab_size: int = 0
    global_batch_size: int = 0
    ffn_hidden_size: int = 0
    kv_channels: int = 0
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 32
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    rope_type: str = ""
    mtp_num_layers: int = 0
    group_query_attention: bool = False
    num_query_groups: int = 1
    max_position_embeddings: int = 0
    normalization: str = "LayerNorm"
    position_embedding_type: str = "learned_absolute"
    add_position_embedding: bool = True
    swiglu: bool = False
    quick_geglu: bool = False
    squared_relu: bool = False
    bias_swiglu_fusion: bool = True
    bias_gelu_fusion: bool = True
    bias_dropout_fusion: bool = True
    masked_softmax_fusion: bool = True
    jit_fuser: bool = True
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    untie_embeddings_and_output_weights: bool = False
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    bf16: bool = False
    fp16: bool = False
    attention_softmax_in_fp32: bool = False
    apply_query_key_layer_scaling: bool = False
    fp16_lm_cross_entropy: bool = False
    cross_entropy_loss_fusion: bool = False
    create_attention_mask_in_dataloader: bool = True
    sequence_parallel: bool = False
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 0
    context_parallel_size: int = 1
    hierarchical_context_parallel_sizes: tuple[int, ...] = ()
    cp_comm_type: tuple[str, ...] = ()
    context_parallel_algo: str = ""
    ulysses_degree_in_cp: int = 0
    cp_window_size: int = 1
    use_cp_send_recv_overlap: bool = False
    context_parallel_kv_cache_policy: str = ""
    context_parallel_cache_interval: int = 0
    use_ulysses_allgather_kv: bool = False
    reset_attention_mask: bool = False
    sft: bool = False
    dataloader_inter_document_masking: bool = False
    window_size: Window | None = None
    window_attn_skip_freq: str = ""
    num_layers_per_virtual_pipeline_stage: int = 0
    num_virtual_stages_per_pipeline_rank: int = 0
    microbatch_group_size_per_vp_stage: int = 0
    pipeline_model_parallel_layout: str = ""
    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    use_distributed_optimizer: bool = False
    accumulate_allreduce_grads_in_fp32: bool = False
    grad_reduce_in_bf16: bool = False
    grad_reduce_compression: str = ""
    grad_reduce_compression_scope: str = "auto"
    num_experts: int = 0
    moe_layer_freq: str = "1"
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int = 0
    moe_shared_expert_intermediate_size: int = 0
    moe_shared_expert_gate: bool = False
    moe_token_dispatcher_type: str = "allgather"
    moe_router_load_balancing_type: tuple[str, ...] = ("aux_loss",)
    moe_aux_loss_coeff: tuple[str, ...] = ("0",)
    moe_router_enable_expert_bias: bool = False
    recompute_activations: bool = False
    recompute_granularity: str = ""
    recompute_method: str = ""
    recompute_num_layers: int = 0
    recompute_modules: tuple[str, ...] = ()
    attention_backend: str = "auto"
    transformer_impl: str = ""
    use_flash_attn: bool = False
    use_bias_dropout_fusion: bool = False
    use_masked_softmax_fusion: bool = False
    use_fused_swiglu: bool = False
    use_fused_rmsnorm: bool = False
    use_fused_layernorm: bool = False
    use_fused_rotary_pos_emb: bool = False
    use_fused_cross_entropy: bool = False
    use_fused_linear_cross_entropy: bool = False
    use_fused_adamw: bool = False
    reuse_fp32_param: bool = False
    optimizer: str = "adam"
    use_precision_aware_optimizer: bool = False
    main_grads_dtype: str = "fp32"
    main_params_dtype: str = "fp32"
    exp_avg_dtype: str = "fp32"
    exp_avg_sq_dtype: str = "fp32"
    quant_states: str = ""
    virtual_optimizer: tuple[str, ...] = ()
    swap_optimizer: bool = False
    moe_grouped_gemm: bool = False
    moe_permute_fusion: bool = False
    moe_router_fusion: bool = False
    moe_tp_extend_ep: bool = False
    balanced_moe_experts: bool = False
    balanced_moe_hot_expert_num: int = 3
    moe_zero_memory: str = ""
    moe_zero_memory_num_layers: int | None = None
    recompute_activation_function: bool = False
    recompute_activation_function_num_layers: int | None = None
    recompute_norm: bool = False
    recompute_norm_num_layers: int | None = None
    moe_expert_capacity_factor: float | None = None
    moe_pad_expert_input_to_capacity: bool = False
    expert_load: float = 1.0
    overlap_moe_expert_parallel_comm: bool = False
    moe_fb_overlap: bool = False
    pipeline_schedule: str = ""
    schedules_method: str = ""
    swap_attention: bool = False
    swap_modules: str = "input_layernorm,self_attention,pre_mlp_layernorm"
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    fuses_accumulation: bool | None = None
    tp_comm_overlap: bool = False
    moe_enable_deepep: bool = False
    enable_cuda_graph: bool = False
    external_cuda_graph: bool = False
    cuda_graph_impl: str = "none"
    moe_alltoall_overlap_comm: bool = False
    moe_allgather_overlap_comm: bool = False
    moe_alltoall_mc2: bool = False
    use_ascend_coc: bool = False
    use_ascend_mc2: bool = False
    traced_words: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(vars(self).values()))

    @property
    def tp(self) -> int:
        return self.tensor_model_parallel_size

    @property
    def pp(self) -> int:
        return self.pipeline_model_parallel_size

    @property
    def cp(self) -> int:
        return self.context_parallel_size

    @property
    def dp(self) -> int:
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def ep(self) -> int:
        """Ranks that share whole experts, with `--moe-tp-extend-ep`."""
        return self.expert_model_parallel_size * (self.tp if self.moe_tp_extend_ep else 1)

    @property
    def etp(self) -> int:
        """Ranks that split an expert."""
        return 1 if self.moe_tp_extend_ep else self.expert_tensor_parallel_size or self.tp

    @property
    def edp(self) -> int:
        """Ranks with the same experts."""
        return self.world_size // (self.ep * self.etp * self.pp)

    @property
    def vpp(self) -> int:
        return self.num_virtual_stages_per_pipeline_rank or 1

    @property
    def microbatches(self) -> int:
        return max(1, self.global_batch_size // (self.micro_batch_size * self.dp))

    @property
    def groups(self) -> int:
        """Key-value heads; multi-latent attention has one per query head."""
        shares = self.group_query_attention and not self.multi_latent_attention
        return self.num_query_groups if shares else self.num_attention_heads

    @property
    def query_size(self) -> int:
        """Size of a query or key head."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim if self.multi_latent_attention else self.kv_channels

    @property
    def value_size(self) -> int:
        """Size of a value or output head."""
        return self.v_head_dim if self.multi_latent_attention else self.kv_channels

    @property
    def local_groups(self) -> int:
        return max(1, self.groups // self.tp)

    @property
    def gated(self) -> bool:
        return self.swiglu or self.quick_geglu

    @property
    def width(self) -> int:
        """Bytes per model element."""
        return 2 if self.bf16 or self.fp16 else 4

    @property
    def has_softmax_to_fuse(self) -> bool:
        """Whether our fused softmax, of the CPU, has attention to serve."""
        return self.device == "cpu" and self.masked_softmax_fusion and not self.flash

    @property
    def has_dropout_to_fuse(self) -> bool:
        """Whether our dropout-add needs no saved mask."""
        return self.device == "cpu" and self.bias_dropout_fusion and self.hidden_dropout > 0

    @property
    def flash(self) -> bool:
        """Whether attention keeps no scores; context parallelism never does."""
        return self.use_flash_attn or self.attention_backend in ("flash", "fused") or self.cp > 1

    @property
    def has_fused_norm(self) -> bool:
        fused = self.use_fused_rmsnorm if self.normalization == "RMSNorm" else self.use_fused_layernorm
        return fused or self.uses_engine

    @property
    def uses_engine(self) -> bool:
        """Whether Transformer Engine's fused modules run."""
        return self.transformer_impl == "transformer_engine"

    @property
    def has_jit_fusions(self) -> bool:
        """Whether torch fuses elementwise functions: biases, dropout and activations."""
        return self.device == "cuda" and self.jit_fuser

    @property
    def has_fused_rope(self) -> bool:
        return self.use_fused_rotary_pos_emb or self.uses_engine

    @property
    def accumulates_in_products(self) -> bool:
        """Whether GEMMs add weight gradients to main gradients, Megatron's default on GPUs."""
        return self.device == "cuda" if self.fuses_accumulation is None else self.fuses_accumulation

    @property
    def has_graphs(self) -> bool:
        """Whether CUDA graphs launch attention and MLPs; experts depend on the data."""
        return self.enable_cuda_graph or self.external_cuda_graph or self.cuda_graph_impl != "none"

    @property
    def sends_rows_once(self) -> bool:
        """Whether a row is sent once to a node for all its experts there (DeepEP, HybridEP)."""
        return self.moe_token_dispatcher_type == "flex" or self.moe_enable_deepep

    @property
    def fused_step(self) -> bool:
        """Whether our optimizer step runs, by its own or another feature's flag."""
        asked = self.use_fused_adamw or self.reuse_fp32_param or self.quant_states
        return bool(asked or self.virtual_optimizer or self.swap_optimizer)

    def is_moe(self, layer: int) -> bool:
        if not self.num_experts:
            return False
        every = pattern(self.moe_layer_freq)
        return layer % every == 0 if isinstance(every, int) else bool(every[layer])

    def window_of(self, layer: int) -> Window | None:
        """Sliding window of a layer, from 0, or None."""
        skipped = pattern(self.window_attn_skip_freq) if self.window_attn_skip_freq else []
        if isinstance(skipped, int):
            return self.window_size if (layer + 1) % skipped else None
        return self.window_size if not skipped or skipped[layer] else None

    def replace(self, **changed: object) -> TrainingConfig:
        return dataclasses.replace(self, **changed)  # type: ignore[arg-type]


_Function = TypeVar("_Function", bound=Callable[..., Any])


def cached_by(*names: str) -> Callable[[_Function], _Function]:
    """Caches a function of a training, of which it reads these fields only, and of other arguments."""
    fields = operator.attrgetter(*names)

    def decorate(function: _Function) -> _Function:
        known: dict[object, Any] = {}

        @functools.wraps(function)
        def call(training: TrainingConfig, *others: Any) -> Any:
            key = fields(training), others
            if key not in known:
                known[key] = function(training, *others)
            return known[key]

        call.names = names  # type: ignore[attr-defined]
        return cast(_Function, call)

    return decorate


# Limit on entries of a list expression.
MOST_ENTRIES = 100_000


def _size(value: int | list[int]) -> int:
    return abs(value) if isinstance(value, int) else len(value)


@functools.lru_cache(maxsize=256)
def pattern(text: str) -> int | list[int]:
    """Parse `--moe-layer-freq`: a period, or a list expression such as `([0]*1+[1]*3)*2`."""
    text = text.strip()
    if text.isdigit():
        return int(text)

    def value(node: ast.expr) -> int | list[int]:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.List):
            return [item for each in node.elts if isinstance(item := value(each), int)]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
            left, right = value(node.left), value(node.right)
            if isinstance(node.op, ast.Mult) and _size(left) * _size(right) > MOST_ENTRIES:
                raise ValueError(text)
            found = left + right if isinstance(node.op, ast.Add) else left * right  # type: ignore[operator]
            return found
        raise ValueError(text)

    found = value(ast.parse(text, mode="eval").body)
    return found
