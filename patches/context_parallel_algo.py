"""`--context-parallel-algo`: ring, Ulysses, hybrid or gathered-key context parallelism.

Reaches the local core attention: its constructor refuses context parallelism, its `forward` computes this rank's rows.
Keeps Megatron's split (two chunks per rank), so batches, masks and losses stay. `--context-parallel-algo` or
`--cp-comm-type` chooses; default: least predicted exposed communication. Provides Transformer Engine's partition of
packed sequences, but leaves its attention alone. Never falls back: unsupported calls raise OptionError.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from mindspeed_lite.engine import (
    Context,
    Feature,
    Function,
    Option,
    OptionError,
    Override,
    Provide,
    Session,
    Settings,
    given_flags,
)
from mindspeed_lite.parallel import context as cp
from mindspeed_lite.parallel.context import layout as layouts
from mindspeed_lite.platform.megatron import CONFIG

from ._shared.attention_core import (
    CORE,
    HEAD_SIZES,
    READS,
    RELIES_ON,
    WITHOUT_QUERY_NORM,
    choose_flash_kernels,
    dropout_generator,
    pack_reasons,
    packing_of,
    read_call,
    without_head_sizes,
    without_mask,
)
from ._shared.conditions import local
from ._shared.context_parallel import (
    ALGORITHMS,
    NAME,
    algorithm_named,
    algorithm_of,
    check,
    check_heads,
    group_of,
    least_exposed,
    splits_as_one,
)

_UTILS = "megatron.core.utils"
_OF_CONFIG = (f"{CONFIG}.context_parallel_size", f"{CONFIG}.cp_comm_type")
_SPLIT = "split models"
_CAUSAL, _FREE = (-1, 0), (-1, -1)
# Entries of a micro-batch without a row dimension.
_NOT_OF_ROWS = {"attention_mask", "cu_seqlens", "cu_seqlens_padded", "max_seqlen"}


def _init(wrapped: Function, session: Session) -> Function:
    build, signature = without_head_sizes(wrapped, session), inspect.signature(wrapped)

    def __init__(self: Any, *arguments: Any, **keywords: Any) -> None:
        sizes = {size: keywords.pop(size) for size in HEAD_SIZES if size in keywords}
        given = signature.bind(self, *arguments, **keywords).arguments
        # Megatron asserts that the size is 1.
        config = given["config"]
        given["config"] = copy.copy(config)
        given["config"].context_parallel_size = 1
        build(**given, **sizes)
        self.config = config

    return __init__


def _forward(wrapped: Function, session: Session) -> Function:
    before = session.find(_SPLIT)
    if before is not None:
        core, ranks = before
        session.state(_SPLIT, lambda: _warn_at_end(core, ranks, session))

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
        # Part of a model, such as an image encoder, may have no context parallelism.
        group = group_of(self, packed_seq_params) if self.config.context_parallel_size > 1 else None
        if group is None:
            return wrapped(self, query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params)
        choose_flash_kernels(session, NAME, self, query)
        is_pack = packed_seq_params is not None
        call = read_call(self, query, attention_mask, is_pack)
        reasons = [] if attention_bias is None else ["an attention bias"]
        if is_pack:
            reasons += pack_reasons(self, query, packed_seq_params)
            reasons += [] if reasons else _split_reasons(packed_seq_params)
        elif query.shape[0] != key.shape[0]:
            reasons.append(f"{query.shape[0]} queries and {key.shape[0]} keys on a rank, as in cross attention")
        if reasons:
            raise OptionError(
                f"{NAME}: layer {self.layer_number} asks for {'; '.join(reasons)}, which --context-parallel-size above "
                "1 does not serve on the local implementation; use --context-parallel-size 1."
            )
        if session.verifier is not None:
            session.verifier.leave_out(NAME, "attention", "Megatron's local attention has no context parallelism")
        session.state(_SPLIT, lambda: _warn_at_end(type(self), self.config.context_parallel_size, session))
        layout = _pack_layout(query, packed_seq_params, group, session.context) if is_pack else _layout(query, group)
        tensors, rest = (query, key, value), {"scale": call.scale, "dropout_p": call.dropout_p, "sink": call.sink}
        kind = algorithm_named(self, session.context)
        if call.mask is not None:
            if kind not in (None, "gathered"):
                session.log_decision(f"{NAME}: keys and values are gathered, since an attention mask is given")
            with dropout_generator(self, call.dropout_p):
                out = cp.attend_masked(*tensors, layout, group, call.mask, window=call.window, **rest)
            return out.flatten(-2)
        band = call.window or (_CAUSAL if call.causal else _FREE)
        kind = kind or least_exposed(*tensors, group, call.causal, session)
        algorithm = algorithm_of(kind, group, self.layer_number, session)
        if algorithm.ulysses is not None:
            check_heads(query.shape[-2], key.shape[-2], algorithm.ulysses.size())
        with dropout_generator(self, call.dropout_p):
            return cp.attend(*tensors, layout, algorithm, band=band, **rest).flatten(-2)

    return forward


def _warn_at_end(core: Any, ranks: int, session: Session) -> tuple[Any, int]:
    """Warn, when the feature ends for good, that the model lacks context parallelism."""

    def warn() -> None:
        if not hasattr(core.forward, "__wrapped__"):
            session.log_decision(
                f"{NAME}: taken back: a model of --context-parallel-size {ranks} now attends to each rank's own rows "
                "alone (turn the feature on again before the next step, or build the model anew with "
                "--context-parallel-size 1)"
            )

    session.on_end(warn)
    return core, ranks


def _layout(query: Any, group: Any) -> layouts.Layout:
    rows, ranks = query.shape[0], group.size()
    if rows % 2:
        raise OptionError(
            f"{NAME}: a rank has {rows} rows, which are not two chunks of one length; make the sequence's length "
            f"divisible by {2 * ranks}, twice --context-parallel-size."
        )
    return layouts.zigzag(rows * ranks, ranks)


def _split_reasons(params: Any) -> list[str]:
    packing = packing_of(params)
    return [] if packing.q == packing.k else ["a pack whose queries and keys have sequences of different lengths"]


def _pack_layout(query: Any, params: Any, group: Any, context: Context) -> layouts.Layout:
    """Split of a pack; Megatron's cumulative lengths count whole sequences."""
    total = query.shape[0] * group.size()
    starts = params.cu_seqlens_q_padded if params.cu_seqlens_q_padded is not None else params.cu_seqlens_q
    padded = ((0, total),) if splits_as_one(context) else _spans(starts, total)
    return _packed_zigzag(packing_of(params).q, padded, group.size())


def _spans(cu_seqlens: Any, total: int) -> layouts.Spans:
    ends = cu_seqlens.tolist()
    return tuple(itertools.pairwise([*ends, total] if ends[-1] < total else ends))


def _packed_zigzag(documents: layouts.Spans, padded: layouts.Spans, ranks: int) -> layouts.Layout:
    try:
        return layouts.packed_zigzag(documents, padded, ranks)
    except ValueError as error:
        raise OptionError(f"{error}, twice --context-parallel-size.") from error


def _thd_batch(wrapped: Function, session: Session) -> Function:
    """0.16 and 0.17: the original with this package's partition."""

    def get_thd_batch_on_this_cp_rank(
        batch: dict[str, Any],
        cu_seqlens: Any,
        cu_seqlens_padded: Any,
        max_seqlen: Any,
        cp_size: int | None = None,
        cp_rank: int | None = None,
    ) -> Any:
        from megatron.core import parallel_state

        # With one rank the original only describes the pack.
        batch, params = wrapped(batch, cu_seqlens, cu_seqlens_padded, max_seqlen, 1, 0)
        size = parallel_state.get_context_parallel_world_size() if cp_size is None else cp_size
        rank = parallel_state.get_context_parallel_rank() if cp_rank is None else cp_rank
        if size > 1:
            # Megatron's packed data set gives padded lengths only; a last stage has no tokens.
            ends = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
            rows = {name: its for name, its in batch.items() if its is not None and name not in _NOT_OF_ROWS}
            index = thd_partition(ends, next(iter(rows.values())).size(1), size, rank)
            batch.update((name, its.index_select(1, index)) for name, its in rows.items())
        return batch, params

    return get_thd_batch_on_this_cp_rank


def thd_partition(cu_seqlens: Any, total: int, size: int, rank: int) -> Any:
    """Rows [total / size] int64 of a pack on a rank: Transformer Engine's thd_get_partitioned_indices."""
    import torch

    spans = _spans(cu_seqlens, total)
    rows = layouts.stream_rows(_packed_zigzag(spans, spans, size), rank)
    return torch.tensor(rows, dtype=torch.int64, device=cu_seqlens.device)


def _partition(session: Session) -> Any:
    return SimpleNamespace(thd_get_partitioned_indices=thd_partition)


def _is_split(settings: Settings) -> bool:
    return (settings.get("context_parallel_size") or 1) > 1


def _given_options(settings: Settings) -> list[str]:
    return given_flags(FEATURE.options[1:], settings)


def _enabled(settings: Settings) -> bool:
    return _is_split(settings) or bool(_given_options(settings))


def _why_not(context: Context) -> list[str]:
    if not _is_split(context.settings):
        given = _given_options(context.settings)
        return [f"{', '.join(given)} with --context-parallel-size 1: no sequence is split"] if given else []
    if reasons := local("splits attention itself: --cp-comm-type p2p is the ring, a2a Ulysses")(context):
        return reasons
    check(context)
    return []


def _arguments(context: Context) -> Mapping[str, Any]:
    if context.host_args is None:
        return {}
    found = without_mask(context)
    degree, size = context.settings["ulysses_degree_in_cp"], context.settings["context_parallel_size"]
    if degree is not None and degree > 0:
        found["hierarchical_context_parallel_sizes"] = wanted = [degree, size // degree]
        given = context.arg("hierarchical_context_parallel_sizes", None)
        if given and list(given) != wanted:
            raise OptionError(
                f"{NAME}: --ulysses-degree-in-cp {degree} and --hierarchical-context-parallel-sizes "
                f"{' '.join(map(str, given))} contradict each other: leave one out."
            )
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
            choices=tuple(ALGORITHMS),
            on=next(iter(ALGORITHMS)),
        ),
        Option.count("--ulysses-degree-in-cp", "Hybrid: ranks that share heads; the ring has the rest.", least=None),
        Option.count(
            "--cp-window-size",
            "Double ring: ranks of an inner ring; the outer hop has the time of that many blocks.",
            1,
        ),
        Option(
            "--use-cp-send-recv-overlap",
            help="Ring: send gradients and outer hops on a second communicator, not after the keys.",
        ),
        Option(
            "--context-parallel-kv-cache-policy",
            help="Ring: keep received keys and values (full) or keys (half), and send less in the backward pass.",
            default=None,
            choices=("full", "half"),
        ),
        Option.count("--context-parallel-cache-interval", "Keep them in every N+1-th layer only.", 0, least=0),
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
        Override(f"{CORE}.__init__", _init, order=1),
        WITHOUT_QUERY_NORM,
        Override(
            f"{CORE}.forward", _forward, order=1, reads=(*READS, "layer_number", *_OF_CONFIG), relies_on=RELIES_ON
        ),
        Override(f"{_UTILS}:get_thd_batch_on_this_cp_rank", _thd_batch, versions=">=0.16,<0.18"),
        Provide(f"{_UTILS}:tex", _partition, versions=">=0.18"),
    ),
)
