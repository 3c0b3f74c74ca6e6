"""`--context-parallel-algo`: context parallelism on the local implementation, by ring, Ulysses, both or gathered keys.

Reaches the core attention of the local implementation, whose constructor refuses context parallelism and is the only
place that does; its `forward` then computes this rank's rows of the whole sequence's attention. Every algorithm takes
Megatron's own split, two chunks of the sequence for each rank, so that batches, rotary embedding, masks, losses and
multi-token prediction stay Megatron's. `--context-parallel-algo` (MindSpeed's) or `--cp-comm-type` (Megatron's, of each
layer too) chooses; without either the least predicted exposed communication does.

Packed sequences are split sequence by sequence. Megatron takes that split from Transformer Engine; the same is provided
where it looks for it. Leaves Transformer Engine's attention alone. Never hands a call back, since the original has no
context parallelism: what it cannot do is an error.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from mindspeed_lite.engine import Context, Feature, Option, OptionError, Override, Provide, Session, Settings
from mindspeed_lite.parallel import context as cp
from mindspeed_lite.parallel.context import layout as layouts
from mindspeed_lite.parallel.context.ulysses import split_heads

from ._shared.attention_core import (
    CORE,
    HEAD_SIZES,
    READS,
    dropout_generator,
    packing_of,
    read_call,
    why_not_packed,
    without_head_sizes,
)
from ._shared.context_groups import ALGORITHMS, COMM_TYPES, Options, algorithm_of, group_of, least_exposed

NAME = "context_parallel_algo"
_UTILS = "megatron.core.utils"
_CAUSAL, _FREE = (-1, 0), (-1, -1)
_KIND = "cp_comm_type"
_RING_FLAGS = {
    "cp_window_size": 1,
    "use_cp_send_recv_overlap": False,
    "context_parallel_kv_cache_policy": None,
}


def _init(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    build, signature = without_head_sizes(wrapped, session), inspect.signature(wrapped)

    def __init__(self: Any, *arguments: Any, **keywords: Any) -> None:
        sizes = {size: keywords.pop(size) for size in HEAD_SIZES if size in keywords}
        given = signature.bind(self, *arguments, **keywords).arguments
        # Megatron asserts that there is no context parallelism, and reads the size for nothing else.
        config = given["config"]
        given["config"] = copy.copy(config)
        given["config"].context_parallel_size = 1
        build(**given, **sizes)
        self.config = config
        session.mark(self, _KIND, given.get(_KIND))

    return __init__


def _forward(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    options = Options.of(session)

    def forward(
        self: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
    ) -> Any:
        group = group_of(self, packed_seq_params)
        if group is None or group.size() == 1:
            return wrapped(self, query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params)
        is_pack = packed_seq_params is not None
        call = read_call(self, query, attention_mask, is_pack)
        reasons = [] if attention_bias is None else ["an attention bias"]
        if is_pack:
            reasons += why_not_packed(self, query, packed_seq_params)
        elif query.shape[0] != key.shape[0]:
            reasons.append(f"{query.shape[0]} queries and {key.shape[0]} keys on a rank, as in cross attention")
        if reasons:
            raise OptionError(
                f"{NAME}: layer {self.layer_number} asks for {'; '.join(reasons)}, which --context-parallel-size above "
                "1 does not serve on the local implementation; use --context-parallel-size 1."
            )
        if session.verifier is not None:
            session.verifier.leave_out(NAME, "attention", "Megatron's local attention has no context parallelism")
        layout = _pack_layout(packed_seq_params, group) if is_pack else _layout(query, group)
        tensors, rest = (query, key, value), {"scale": call.scale, "dropout_p": call.dropout_p, "sink": call.sink}
        if call.mask is not None:
            with dropout_generator(self, call.dropout_p):
                out = cp.attend_masked(*tensors, layout, group, call.mask, **rest)
            return out.flatten(-2)
        band = call.window or (_CAUSAL if call.causal else _FREE)
        kind = _kind(self, session) or least_exposed(*tensors, group, call.causal, session)
        algorithm = algorithm_of(kind, group, self.layer_number, options, session)
        if algorithm.ulysses is not None:
            _check_heads(query.shape[-2], key.shape[-2], algorithm.ulysses.size())
        with dropout_generator(self, call.dropout_p):
            return cp.attend(*tensors, layout, algorithm, band=band, **rest).flatten(-2)

    return forward


def _layout(query: Any, group: Any) -> layouts.Layout:
    rows, ranks = query.shape[0], group.size()
    if rows % 2:
        raise OptionError(
            f"{NAME}: a rank has {rows} rows, which are not two chunks of one length; make the sequence's length "
            f"divisible by {2 * ranks}, twice --context-parallel-size."
        )
    return layouts.zigzag(rows * ranks, ranks)


def _pack_layout(params: Any, group: Any) -> layouts.Layout:
    """The split of a pack; Megatron's cumulative lengths are those of the whole sequences."""
    documents = packing_of(params).q
    starts = params.cu_seqlens_q_padded if params.cu_seqlens_q_padded is not None else params.cu_seqlens_q
    ends = starts.tolist()
    return layouts.packed_zigzag(documents, tuple(itertools.pairwise(ends)), group.size())


def _kind(module: Any, session: Session) -> str | None:
    """The algorithm that a flag names for a layer, or None."""
    settings = session.settings
    asked = _asked(settings)
    if asked is not None:
        return asked
    given = getattr(module, _KIND, None)
    if given is None or (given == "p2p" and not _comm_type_given(session.context)):
        return None
    if given not in COMM_TYPES:
        raise OptionError(f"--cp-comm-type {given}: not one of {', '.join(COMM_TYPES)}.")
    return COMM_TYPES[given]


def _comm_type_given(context: Context) -> bool:
    """Whether the user named a type; p2p is Megatron's default."""
    return "cp_comm_type" in context.explicit or tuple(context.arg("cp_comm_type", None) or ("p2p",)) != ("p2p",)


def _asked(settings: Mapping[str, Any]) -> str | None:
    """The algorithm that MindSpeed's flags name or imply."""
    algorithm = settings["context_parallel_algo"]
    if algorithm is not None:
        return ALGORITHMS[algorithm]
    if settings["ulysses_degree_in_cp"] is not None:
        return "hybrid"
    if settings["use_ulysses_allgather_kv"]:
        return "ulysses"
    return "ring" if any(settings[name] != off for name, off in _RING_FLAGS.items()) else None


def _thd_batch(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """0.16 and 0.17: as the original, with the partition of this package."""

    def get_thd_batch_on_this_cp_rank(
        batch: dict[str, Any],
        cu_seqlens: Any,
        cu_seqlens_padded: Any,
        max_seqlen: Any,
        cp_size: int | None = None,
        cp_rank: int | None = None,
    ) -> Any:
        from megatron.core import parallel_state

        # For one rank the original only describes the pack.
        batch, params = wrapped(batch, cu_seqlens, cu_seqlens_padded, max_seqlen, 1, 0)
        size = parallel_state.get_context_parallel_world_size() if cp_size is None else cp_size
        rank = parallel_state.get_context_parallel_rank() if cp_rank is None else cp_rank
        if size > 1:
            index = thd_partition(cu_seqlens_padded, batch["tokens"].size(1), size, rank)
            for name in batch.keys() - {"attention_mask", "cu_seqlens", "cu_seqlens_padded", "max_seqlen"}:
                batch[name] = batch[name].index_select(1, index)
        return batch, params

    return get_thd_batch_on_this_cp_rank


def thd_partition(cu_seqlens: Any, total: int, size: int, rank: int) -> Any:
    """The rows [total / size] int64 of a pack that a rank holds: Transformer Engine's thd_get_partitioned_indices."""
    import torch

    ends = cu_seqlens.tolist()
    spans = tuple(itertools.pairwise(ends))
    if ends[-1] < total:
        spans += ((ends[-1], total),)
    rows = layouts.stream_rows(layouts.packed_zigzag(spans, spans, size), rank)
    return torch.tensor(rows, dtype=torch.int64, device=cu_seqlens.device)


def _partition(session: Session) -> Any:
    return SimpleNamespace(thd_get_partitioned_indices=thd_partition)


def _algorithm(text: str) -> str:
    if text in ("adaptive_cp_algo", "hybrid_adaptive_cp_algo"):
        raise ValueError("one of the algorithms but adaptive ones, which MindSpeed drops too: a zigzag is balanced")
    if text not in ALGORITHMS:
        raise ValueError(f"one of {', '.join(ALGORITHMS)}")
    return text


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("a whole number of at least 0")
    return int(text)


def _enabled(settings: Settings) -> bool:
    return (settings.get("context_parallel_size") or 1) > 1


def _why_not(context: Context) -> Sequence[str]:
    if context.arg("transformer_impl", "local") == "transformer_engine":
        return ["--transformer-impl transformer_engine uses Transformer Engine's own attention"]
    _check(context)
    return []


def _check(context: Context) -> None:
    """Raise OptionError for flags that contradict each other or the layout."""
    settings = context.settings
    size, degree = settings["context_parallel_size"], settings["ulysses_degree_in_cp"]
    algorithm, kind = settings["context_parallel_algo"], _asked(settings)
    if algorithm is not None and "cp_comm_type" in context.explicit:
        types = {COMM_TYPES.get(each) for each in context.arg("cp_comm_type", None) or ()}
        if types != {kind}:
            raise OptionError(
                f"{NAME}: --context-parallel-algo {algorithm} and --cp-comm-type contradict each other: leave one out."
            )
    if kind not in (None, "ring", "hybrid"):
        given = [name for name, off in _RING_FLAGS.items() if settings[name] != off]
        if given:
            raise OptionError(
                f"{NAME}: --{given[0].replace('_', '-')} is about a ring, and --context-parallel-algo {algorithm} has "
                "none: leave it out, or take megatron_cp_algo or hybrid_cp_algo."
            )
    if settings["use_ulysses_allgather_kv"] and kind not in ("ulysses", "hybrid"):
        raise OptionError(
            f"{NAME}: --use-ulysses-allgather-kv is about Ulysses: take ulysses_cp_algo or hybrid_cp_algo."
        )
    if settings["context_parallel_cache_interval"] and settings["context_parallel_kv_cache_policy"] is None:
        raise OptionError(
            f"{NAME}: --context-parallel-cache-interval says in which layers --context-parallel-kv-cache-policy holds: "
            "give that too."
        )
    if kind == "hybrid":
        sizes = context.arg("hierarchical_context_parallel_sizes", None)
        if degree is None and context.host_args is not None and not sizes:
            raise OptionError(
                f"{NAME}: hybrid_cp_algo needs --ulysses-degree-in-cp, the number of ranks that share heads."
            )
        if degree is not None and (degree < 2 or size % degree or degree == size):
            raise OptionError(
                f"{NAME}: --ulysses-degree-in-cp {degree} must divide --context-parallel-size {size} and lie between 1 "
                "and it; for Ulysses alone take --context-parallel-algo ulysses_cp_algo."
            )
    elif degree is not None:
        raise OptionError(f"{NAME}: --ulysses-degree-in-cp is about hybrid_cp_algo, not {algorithm}: leave one out.")
    ring = size // (degree or 1) if kind == "hybrid" else size
    window = settings["cp_window_size"]
    if window < 1 or ring % window:
        raise OptionError(f"{NAME}: --cp-window-size {window} must divide the ring's {ring} ranks.")
    heads = context.arg("num_attention_heads", None)
    kinds = {kind} if kind else {COMM_TYPES.get(each) for each in context.arg("cp_comm_type", None) or ()}
    if kinds & {"ulysses", "hybrid"} and heads:
        tensor = context.arg("tensor_model_parallel_size", 1) or 1
        groups = context.arg("num_query_groups", None) if context.arg("group_query_attention", False) else None
        inner = degree or (context.arg("hierarchical_context_parallel_sizes", None) or (size,))[0]
        for each in kinds & {"ulysses", "hybrid"}:
            _check_heads(heads // tensor, max(1, (groups or heads) // tensor), size if each == "ulysses" else inner)


def _check_heads(heads: int, groups: int, ranks: int) -> None:
    try:
        split_heads(heads, groups, ranks)
    except ValueError as error:
        raise OptionError(f"{NAME}: {error} (--ulysses-degree-in-cp with hybrid_cp_algo).") from error


def _arguments(context: Context) -> Mapping[str, Any]:
    if context.host_args is None:
        return {}
    found: dict[str, Any] = {}
    if not context.arg("reset_attention_mask", False):
        found["create_attention_mask_in_dataloader"] = False
    degree, size = context.settings["ulysses_degree_in_cp"], context.settings["context_parallel_size"]
    if degree is not None:
        found["hierarchical_context_parallel_sizes"] = [degree, size // degree]
    return found


FEATURE = Feature(
    name=NAME,
    summary="a sequence split over ranks, with attention as ring, Ulysses, both, or with gathered keys",
    options=(
        Option(
            "--context-parallel-size",
            help="Above 1, with the local implementation: split each sequence over this many ranks.",
            default=1,
            upstream=">=0.12",
        ),
        Option(
            "--context-parallel-algo",
            help="Ring, Ulysses, both or gathered keys; chosen by predicted exposed communication if not given.",
            default=None,
            type=_algorithm,
            metavar="{" + ",".join(ALGORITHMS) + "}",
        ),
        Option(
            "--ulysses-degree-in-cp",
            help="Hybrid: ranks that share heads; the ring has the rest.",
            default=None,
            type=int,
            metavar="N",
        ),
        Option(
            "--cp-window-size",
            help="Double ring: ranks of an inner ring; the outer hop has the time of that many blocks.",
            default=1,
            metavar="N",
        ),
        Option(
            "--use-cp-send-recv-overlap",
            help="Ring: send gradients and outer hops on a second communicator, not behind the keys.",
        ),
        Option(
            "--context-parallel-kv-cache-policy",
            help="Ring: keep received keys and values (full) or keys (half), and send less in the backward pass.",
            default=None,
            choices=("full", "half"),
        ),
        Option(
            "--context-parallel-cache-interval",
            help="Keep them in every N+1-th layer only.",
            default=0,
            type=_count,
            metavar="N",
        ),
        Option(
            "--use-ulysses-allgather-kv",
            help="Ulysses: gather all keys and values instead of sending each rank those of its heads.",
        ),
    ),
    numerics="ulp",
    theme="communication",
    condition=_why_not,
    enabled=_enabled,
    not_auto="--context-parallel-size above 1 turns it on",
    arguments=_arguments,
    operators=("attention",),
    patches=(
        Override(f"{CORE}.__init__", _init, order=1, reads=("config",)),
        Override(f"{CORE}.forward", _forward, order=1, reads=(*READS, "layer_number")),
        Override(f"{_UTILS}:get_thd_batch_on_this_cp_rank", _thd_batch, versions="<0.18", absent_in="<0.16"),
        Provide(f"{_UTILS}:tex", _partition, versions=">=0.18", variant_of=f"{_UTILS}:get_thd_batch_on_this_cp_rank"),
    ),
)
