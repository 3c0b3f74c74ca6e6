"""Lists one micro-batch's operators and messages on one rank.

Forward, input gradient and weight gradient of a GEMM have equal flops. Messages overlap with `products` of the same
pass, `attention` in a ring, the other micro-batch of a `pair`, or nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from . import context
from .pieces import activation_is_recomputed, norm_is_recomputed, norm_tokens, tokens, zero_memory_level
from .training import TrainingConfig
from .work import Collective, CollectiveCall, Group, Product, Scores, Vector

# Bytes of a rank's query, key and value lengths.
LENGTHS = 24
# Operators of a layer with an MLP, and what experts (unfused and fused) and latent attention add, in both passes: as
# counted in Megatron-LM 0.19.
LAUNCHES = (46.0, 45.0)
EXPERT_LAUNCHES = (45.0, 60.0)
EXPERT_LAUNCHES_FUSED = (25.0, 35.0)
# Operators of each expert, if not grouped.
ONE_EXPERT_LAUNCHES = (5.0, 6.0)
LATENT_LAUNCHES = (24.0, 27.0)
Beside = Literal["", "products", "attention", "pair"]


@dataclass(frozen=True)
class Traffic:
    """Message, its counts by pass, and what overlaps with it."""

    category: str
    message: CollectiveCall
    forward: int
    backward: int
    beside: Beside = ""


@dataclass(frozen=True)
class PartWork:
    """Work of one micro-batch in a part of the model.

    Attributes:
        launches: operators that the host starts, forward and backward.
    """

    products: tuple[Product, ...] = ()
    scores: tuple[Scores, ...] = ()
    vectors: tuple[Vector, ...] = ()
    traffic: tuple[Traffic, ...] = ()
    layers: int = 0
    launches: tuple[float, float] = (0.0, 0.0)

    def __add__(self, other: PartWork) -> PartWork:
        return PartWork(
            self.products + other.products,
            self.scores + other.scores,
            self.vectors + other.vectors,
            self.traffic + other.traffic,
            self.layers + other.layers,
            (self.launches[0] + other.launches[0], self.launches[1] + other.launches[1]),
        )


def total(parts: Iterable[PartWork]) -> PartWork:
    found = PartWork()
    for each in parts:
        found += each
    return found


def layer(training: TrainingConfig, has_experts: bool, number: int = 0) -> PartWork:
    """Transformer layer; `number` selects the context-parallel algorithm."""
    norms = Vector("norm", 2 * norm_tokens(training) * training.hidden_size, training.has_fused_norm)
    is_fused = training.use_bias_dropout_fusion or training.has_jit_fusions
    residual = Vector("residual", 2 * norm_tokens(training) * training.hidden_size, is_fused)
    launches = (0.0, 0.0) if training.has_graphs else LAUNCHES
    parts = [PartWork(vectors=(norms, residual), layers=1, launches=launches), attention(training, number)]
    parts.append(experts(training) if has_experts else mlp(training))
    return _accumulated(training, total(parts))


def attention(training: TrainingConfig, number: int) -> PartWork:
    rows, hidden, tp = tokens(training), training.hidden_size, training.tp
    heads, groups = training.num_attention_heads / tp, training.local_groups
    query, value = training.query_size, training.value_size
    vectors = []
    if training.multi_latent_attention:
        narrow, local = training.kv_lora_rank, training.num_attention_heads // tp
        products = [
            Product(rows, hidden, (narrow + training.qk_pos_emb_head_dim) // tp or 1),
            Product(rows, narrow, local * (training.qk_head_dim + value)),
        ]
        if training.q_lora_rank:
            products += [
                Product(rows, hidden, training.q_lora_rank // tp),
                Product(rows, training.q_lora_rank, local * query),
            ]
        else:
            products.append(Product(rows, hidden, local * query))
        vectors.append(Vector("latent", rows * local * (query + value)))
        groups = local
    else:
        products = [Product(rows, hidden, int((heads + 2 * groups) * query))]
    products.append(Product(rows, int(heads * value), hidden))
    if training.qk_layernorm:
        vectors.append(Vector("norm", rows * (heads + groups) * query, training.has_fused_norm))
    if training.position_embedding_type == "rope":
        size = training.qk_pos_emb_head_dim if training.multi_latent_attention else query
        vectors.append(Vector("rope", rows * (heads + groups) * size, training.has_fused_rope))
    scores = Scores(
        training.micro_batch_size,
        training.seq_length / training.cp,
        training.seq_length,
        heads,
        query,
        value,
        _share(training, number) if training.flash else 1.0,
        training.flash,
        4 if training.attention_softmax_in_fp32 and not training.use_masked_softmax_fusion else 2,
    )
    traffic = [*_tensor_parallel(training), *_context_parallel(training, number)]
    launches = LATENT_LAUNCHES if training.multi_latent_attention and not training.has_graphs else (0.0, 0.0)
    return PartWork(tuple(products), (scores,), tuple(vectors), tuple(traffic), launches=launches)


def _share(training: TrainingConfig, number: int) -> float:
    """Share of pairs of queries and keys that a causal mask leaves, in a window if the layer has one."""
    window = training.window_of(number)
    if window is None or window[0] < 0:
        return 0.5
    share = min(1.0, window[0] / training.seq_length)
    return share - share**2 / 2


def mlp(training: TrainingConfig) -> PartWork:
    width = training.ffn_hidden_size // training.tp
    return _feed_forward(training, tokens(training), width, 0) + PartWork(traffic=tuple(_tensor_parallel(training)))


def experts(training: TrainingConfig) -> PartWork:
    rows, hidden = norm_tokens(training), training.hidden_size
    chosen = routed(training)
    local = training.num_experts // training.ep
    width = training.moe_ffn_hidden_size // training.etp
    found = _feed_forward(training, chosen, width, local if training.moe_grouped_gemm else -local)
    is_fused = training.moe_permute_fusion and training.moe_router_fusion
    launches = EXPERT_LAUNCHES_FUSED if is_fused else EXPERT_LAUNCHES
    found += PartWork(
        launches=launches,
        vectors=(
            Vector("router", rows * training.num_experts, training.moe_router_fusion),
            Vector("permute", 2 * chosen * hidden, training.moe_permute_fusion),
        ),
        products=(Product(rows, hidden, training.num_experts),),
        traffic=tuple(_expert_parallel(training)),
    )
    if training.moe_shared_expert_intermediate_size:
        shared = training.moe_shared_expert_intermediate_size // training.tp
        found += _feed_forward(training, tokens(training), shared, 0)
        found += PartWork(traffic=tuple(_tensor_parallel(training)))
    return found


def routed(training: TrainingConfig) -> int:
    """Tokens of a rank's experts."""
    # All ranks send equally many; an expert split over ranks gets each rank's tokens.
    count = norm_tokens(training) * training.moe_router_topk
    # Each rank alone has all experts, and all tokens.
    even = round(count * training.expert_load) if training.ep > 1 else count
    factor = training.moe_expert_capacity_factor
    if factor is not None:
        # Capacity per rank and expert: drops excess tokens, padding fills up.
        most = math.ceil(count / training.num_experts * factor) * training.num_experts
        even = most if training.moe_pad_expert_input_to_capacity else min(even, most)
    return even * training.etp


def embedding(training: TrainingConfig) -> PartWork:
    """Lookup; its gradient writes the whole weight."""
    found = Vector("embedding", tokens(training) * training.hidden_size, False)
    weights = training.padded_vocab_size / training.tp * training.hidden_size
    messages = []
    if training.tp > 1:
        kind: Collective = "reduce_scatter" if training.sequence_parallel else "all_reduce"
        message = CollectiveCall(kind, _hidden(training), Group(training.tp))
        messages = [Traffic("tensor parallel", message, 1, 0)]
    return PartWork(vectors=(found, Vector("accumulate", weights)), traffic=tuple(messages))


def output(training: TrainingConfig) -> PartWork:
    rows, columns = tokens(training), training.padded_vocab_size // training.tp
    norm = Vector("norm", norm_tokens(training) * training.hidden_size, training.has_fused_norm)
    fused = training.use_fused_cross_entropy or training.use_fused_linear_cross_entropy
    fused = fused or (training.cross_entropy_loss_fusion and training.uses_engine)
    return _accumulated(
        training,
        PartWork(
            products=(Product(rows, training.hidden_size, columns),),
            vectors=(norm, Vector("loss", rows * columns, fused)),
            traffic=tuple(_tensor_parallel(training, enters_only=True)),
        ),
    )


def further(training: TrainingConfig) -> PartWork:
    """MTP layer with its embedding and logits."""
    joined = PartWork(
        products=(Product(tokens(training), 2 * training.hidden_size, training.hidden_size // training.tp),)
    )
    last = training.num_layers - 1
    inner = layer(training, training.is_moe(last), last)
    return total([embedding(training), _accumulated(training, joined), inner, output(training)])


def recomputed(training: TrainingConfig, has_experts: bool, number: int, place: int, chunk: int) -> PartWork:
    granularity, count = training.recompute_granularity, training.recompute_num_layers or 1
    if granularity == "full" and (training.recompute_method != "block" or place < count):
        return layer(training, has_experts, number)
    parts: list[PartWork] = []
    hidden = norm_tokens(training) * training.hidden_size
    if norm_is_recomputed(training, place, chunk):
        parts.append(PartWork(vectors=(Vector("norm", 2 * hidden, training.has_fused_norm),)))
    if activation_is_recomputed(training, place, chunk):
        inside = experts(training) if has_experts else mlp(training)
        parts.append(PartWork(vectors=tuple(each for each in inside.vectors if each.name.startswith("activation"))))
    if has_experts and (level := zero_memory_level(training, place, chunk)):
        parts.append(_zero_memory(training, level))
    if granularity == "selective":
        if "core_attn" in training.recompute_modules:
            whole = attention(training, number)
            parts.append(PartWork(scores=whole.scores))
        if "mlp" in training.recompute_modules and not has_experts:
            parts.append(mlp(training))
        if "mla_up_proj" in training.recompute_modules and training.multi_latent_attention:
            up = (training.kv_lora_rank, training.q_lora_rank)
            whole = attention(training, number)
            parts.append(PartWork(products=tuple(each for each in whole.products if each.inner in up)))
        if "moe" in training.recompute_modules and has_experts:
            parts.append(experts(training))
        elif has_experts:
            inside = experts(training)
            if "moe_act" in training.recompute_modules:
                parts.append(PartWork(vectors=tuple(each for each in inside.vectors if each.name == "activation")))
            if "shared_experts" in training.recompute_modules and training.moe_shared_expert_intermediate_size:
                shared = training.moe_shared_expert_intermediate_size // training.tp
                parts.append(_feed_forward(training, tokens(training), shared, 0))
    return total(parts)


def _zero_memory(training: TrainingConfig, level: str) -> PartWork:
    """`--moe-zero-memory`: level0 exchanges rows again during GEMMs, level1 repeats the first GEMM."""
    inside = experts(training)
    again = [each for each in inside.vectors if each.name == "permute" or each.name.startswith("activation")]
    first = training.moe_ffn_hidden_size // training.etp * (2 if training.gated else 1)
    beside: Beside = "products" if level == "level0" else ""
    # Half of the forward exchange: dispatch without combine.
    rows = tuple(
        replace(each, forward=1, backward=0, beside=beside)
        for each in inside.traffic
        if each.category == "expert parallel"
    )
    products = [each for each in inside.products if each.columns == first and each.experts]
    if training.moe_shared_expert_intermediate_size:
        shared = training.moe_shared_expert_intermediate_size // training.tp
        products += _feed_forward(training, tokens(training), shared, 0).products[:1]
    return PartWork(tuple(products) if level == "level1" else (), vectors=tuple(again), traffic=rows)


def _feed_forward(training: TrainingConfig, rows: float, width: int, grouped: int) -> PartWork:
    """Two GEMMs; `grouped` experts together, negative: sequentially."""
    first = width * (2 if training.gated else 1)
    hidden, count, launches = training.hidden_size, abs(grouped), (0.0, 0.0)
    if grouped < 0:
        # Each expert has its own GEMMs.
        pair = (Product(rows / count, hidden, first), Product(rows / count, width, hidden))
        products = pair * count
        launches = (count * ONE_EXPERT_LAUNCHES[0], count * ONE_EXPERT_LAUNCHES[1])
    else:
        products = (Product(rows, hidden, first, count), Product(rows, width, hidden, count))
    fused = training.has_jit_fusions and (training.bias_swiglu_fusion or not training.gated)
    fused = fused or (training.use_fused_swiglu and training.swiglu)
    name = "activation" if training.gated else "activation, not gated"
    return PartWork(products=products, vectors=(Vector(name, rows * width, fused),), launches=launches)


def _accumulated(training: TrainingConfig, work: PartWork) -> PartWork:
    weights = sum(each.inner * each.columns * max(1, each.experts) for each in work.products)
    return work + PartWork(vectors=(Vector("accumulate", weights, training.accumulates_in_products),))


def _hidden(training: TrainingConfig) -> float:
    return float(tokens(training) * training.hidden_size * training.width)


def _tensor_parallel(training: TrainingConfig, enters_only: bool = False) -> Iterator[Traffic]:
    """Messages of a linear layer pair, or its first; Megatron overlaps some with backward GEMMs."""
    if training.tp == 1:
        return
    size, group = _hidden(training), Group(training.tp)
    is_split = training.use_ascend_coc or training.use_ascend_mc2 or training.tp_comm_overlap
    forward: Beside = "products" if is_split else ""
    name = "tensor parallel"
    if not training.sequence_parallel:
        reduced = CollectiveCall("all_reduce", size, group)
        yield Traffic(name, reduced, 0, 1, "products")
        if not enters_only:
            yield Traffic(name, reduced, 1, 0, forward)
        return
    gathered, scattered = CollectiveCall("all_gather", size, group), CollectiveCall("reduce_scatter", size, group)
    yield Traffic(name, gathered, 1, 0, forward)
    yield Traffic(name, gathered, 0, 1, "products")
    yield Traffic(name, scattered, 0, 1, "products")
    if not enters_only:
        yield Traffic(name, scattered, 1, 0, forward)
        yield Traffic(name, gathered, 0, 1, forward)


def _context_parallel(training: TrainingConfig, number: int) -> Iterator[Traffic]:
    if training.cp == 1:
        return
    kind, sharing = context.algorithm(training, number), context.sharing(training, number)
    heads = training.num_attention_heads / training.tp
    rows = tokens(training)
    keys = rows * training.local_groups * (training.query_size + training.value_size) * training.width
    name, stride = "context parallel", training.tp
    yield Traffic(name, CollectiveCall("all_gather", LENGTHS * training.cp, Group(training.cp, stride)), 1, 0)
    if kind == "gathered":
        group = Group(training.cp, stride)
        yield Traffic(name, CollectiveCall("all_gather", keys * training.cp, group), 1, 0)
        yield Traffic(name, CollectiveCall("reduce_scatter", keys * training.cp, group), 0, 1)
        return
    if sharing > 1:
        # Queries, keys and values together, and the output.
        group, row = Group(sharing, stride), rows * heads * training.width
        yield Traffic(name, CollectiveCall("all_to_all", keys + row * training.query_size, group), 1, 1)
        yield Traffic(name, CollectiveCall("all_to_all", row * training.value_size, group), 1, 1)
    ring = training.cp // sharing
    if ring > 1:
        # Keys and values go round once; in backward also their gradients.
        message = CollectiveCall("send", keys, Group(ring, stride * sharing))
        yield Traffic(name, message, ring - 1, 2 * (ring - 1), "attention")


def _expert_parallel(training: TrainingConfig) -> Iterator[Traffic]:
    rows = norm_tokens(training) * training.moe_router_topk
    row = training.hidden_size * training.width
    beside: Beside = ""
    if training.overlap_moe_expert_parallel_comm:
        beside = "pair"
    elif training.moe_alltoall_mc2 or training.moe_alltoall_overlap_comm or training.moe_allgather_overlap_comm:
        beside = "products"
    if training.ep > 1:
        group = Group(training.ep, training.etp)
        if training.moe_token_dispatcher_type == "allgather":
            size = norm_tokens(training) * row * training.ep
            yield Traffic("expert parallel", CollectiveCall("all_gather", size, group), 1, 1, beside)
            yield Traffic("expert parallel", CollectiveCall("reduce_scatter", size, group), 1, 1, beside)
        else:
            sent = rows * row * training.expert_load
            chosen = training.moe_router_topk if training.sends_rows_once else 1
            yield Traffic("expert parallel", CollectiveCall("all_to_all", sent, group, chosen=chosen), 2, 2, beside)
            if training.sends_rows_once:
                return
            # First the token counts per expert; probabilities accompany tokens.
            counts = CollectiveCall("all_gather", 8.0 * training.num_experts * training.ep, group)
            yield Traffic("expert parallel", counts, 1, 0)
            share = 4.0 * rows * training.expert_load
            yield Traffic("expert parallel", CollectiveCall("all_to_all", share, group), 1, 1, beside)
    if training.etp > 1:
        routed_bytes, split = rows * row * training.etp * training.expert_load, Group(training.etp)
        yield Traffic("tensor parallel", CollectiveCall("all_gather", routed_bytes, split), 1, 1)
        yield Traffic("tensor parallel", CollectiveCall("reduce_scatter", routed_bytes, split), 1, 1)
