"""Context parallelism: options, validation, and algorithms over Megatron's groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_lite.engine import Context, OptionError, Session, matches
from mindspeed_lite.parallel.context import Algorithm, Ring
from mindspeed_lite.parallel.context.collectives import split_heads
from mindspeed_lite.parallel.context.cost import FLOPS_PER_BYTE, AttentionWork, choose
from mindspeed_lite.parallel.groups import new_groups
from mindspeed_lite.platform.megatron import HOST

from .conditions import flag

NAME = "context_parallel_algo"
ALGORITHMS = {
    "megatron_cp_algo": "ring",
    "ulysses_cp_algo": "ulysses",
    "hybrid_cp_algo": "hybrid",
    "kvallgather_cp_algo": "gathered",
}
COMM_TYPES = {"p2p": "ring", "a2a": "ulysses", "a2a+p2p": "hybrid", "all_gather": "gathered", "allgather": "gathered"}


def group_of(module: Any, packed_seq_params: Any) -> Any:
    """The group that shares a call's sequence, or None.

    Raises:
        OptionError: the group size differs from the module's configuration.
    """
    from megatron.core import parallel_state

    dynamic = getattr(packed_seq_params, "cp_group", None)
    if dynamic is not None or (getattr(packed_seq_params, "local_cp_size", None) or 0) == 1:
        return dynamic if dynamic is not None and dynamic.size() > 1 else None
    own = getattr(getattr(module, "pg_collection", None), "cp", None)
    group = own if own is not None else parallel_state.get_context_parallel_group(check_initialized=False)
    wanted, found = module.config.context_parallel_size, 0 if group is None else group.size()
    if found != wanted:
        raise OptionError(
            f"context_parallel_algo: the model's context_parallel_size is {wanted}, and Megatron's context-parallel "
            f"groups have {found or 'no'} ranks: call initialize_model_parallel(context_parallel_size={wanted})."
        )
    return group


def algorithm_of(kind: str, group: Any, layer: int, session: Session) -> Algorithm:
    gather_keys = session.settings["use_ulysses_allgather_kv"]
    if kind == "ulysses":
        return Algorithm(ulysses=group, gather_keys=gather_keys)
    if kind == "gathered":
        return Algorithm(gathered=group)
    if kind == "ring":
        return Algorithm(ring=ring_of(group, layer, session))
    inner, outer = _hierarchical(group)
    return Algorithm(ulysses=inner, ring=ring_of(outer, layer, session), gather_keys=gather_keys)


def least_exposed(query: Any, key: Any, value: Any, group: Any, causal: bool, session: Session) -> str:
    batch = query.shape[1] if query.dim() == 4 else 1
    heads, groups, size, value_size = query.shape[-2], key.shape[-2], query.shape[-1], value.shape[-1]
    itemsize, ranks = query.element_size(), group.size()
    work = AttentionWork(query.shape[0], batch, heads, groups, size, value_size, itemsize, ranks, causal)
    chosen: dict[AttentionWork, str] = session.state("chosen", dict)
    if work not in chosen:
        chosen[work], found = choose(work, FLOPS_PER_BYTE.get(query.device.type, FLOPS_PER_BYTE["cuda"]))
        exposed = ", ".join(f"{name} {prediction.exposed / 2**20:.3g}" for name, prediction in found.items())
        session.log_decision(
            f"context_parallel_algo: {chosen[work]} for {work.rows} rows on each of {work.ranks} ranks, with the least "
            f"predicted exposed communication (MiB a layer: {exposed}); --context-parallel-algo chooses another"
        )
    return chosen[work]


def ring_of(group: Any, layer: int, session: Session) -> Ring:
    """Ring of a layer (from 1); every (interval + 1)-th layer caches."""
    settings = session.settings
    second = _second(group, session) if settings["use_cp_send_recv_overlap"] else None
    is_kept = (layer - 1) % (settings["context_parallel_cache_interval"] + 1) == 0
    cache = settings["context_parallel_kv_cache_policy"] if is_kept else None
    return Ring(group, second, settings["cp_window_size"], cache or "none")


def _second(group: Any, session: Session) -> Any:
    import torch.distributed as dist

    made: dict[Any, Any] = session.state("second groups", dict)
    if group not in made:
        (made[group],) = new_groups(group, dist.get_process_group_ranks(group))
    return made[group]


def _hierarchical(group: Any) -> Sequence[Any]:
    """(group of adjacent ranks, group of ranks at equal positions)."""
    from megatron.core import parallel_state

    groups = parallel_state.get_hierarchical_context_parallel_groups(check_initialized=False) or ()
    sizes = [each.size() for each in groups]
    if len(sizes) != 2 or math.prod(sizes) != group.size():
        raise OptionError(
            "context_parallel_algo: a hybrid of Ulysses and ring needs two hierarchical groups over the "
            f"{group.size()} context-parallel ranks: give --ulysses-degree-in-cp, or "
            "--hierarchical-context-parallel-sizes with two sizes; without Megatron's arguments, "
            "initialize_model_parallel(hierarchical_context_parallel_sizes=[...])."
        )
    return groups


_RINGS = {"ring", "hybrid"}
# Option -> its default and the algorithms that it is for.
_ONLY_FOR: dict[str, tuple[Any, set[str]]] = {
    "cp_window_size": (1, _RINGS),
    "use_cp_send_recv_overlap": (False, _RINGS),
    "context_parallel_kv_cache_policy": (None, _RINGS),
    "use_ulysses_allgather_kv": (False, {"ulysses", "hybrid"}),
    "ulysses_degree_in_cp": (None, {"hybrid"}),
}


def algorithm_named(module: Any, context: Context) -> str | None:
    types, asked = module.config.cp_comm_type, context.settings["context_parallel_algo"]
    if asked is not None:
        return ALGORITHMS[asked]
    given = types[module.layer_number - 1] if isinstance(types, list) else types
    # p2p is the parser's default, None a configuration's.
    if given is not None and (context.host_args is None or _is_type_given(context)):
        _check_types([given])
        return COMM_TYPES[given]
    return _implied(context.settings)


def splits_as_one(context: Context) -> bool:
    """Whether Megatron splits a sequence as a whole although attention stays within documents."""
    return bool(context.arg("dataloader_inter_document_masking", False) and not context.arg("sft", False))


def check_heads(heads: int, groups: int, ranks: int) -> None:
    try:
        split_heads(heads, groups, ranks)
    except ValueError as error:
        raise OptionError(f"{NAME}: {error} (--ulysses-degree-in-cp with hybrid_cp_algo).") from error


def check(context: Context) -> None:
    settings, types = context.settings, tuple(context.arg("cp_comm_type", None) or ())
    size, degree = settings["context_parallel_size"], settings["ulysses_degree_in_cp"]
    named, kinds = _named(context)
    if settings["context_parallel_algo"] is not None and "cp_comm_type" in context.explicit:
        if {COMM_TYPES.get(each) for each in types} != kinds:
            raise OptionError(f"{NAME}: {named} and --cp-comm-type contradict each other: leave one out.")
    elif named.startswith("--cp-comm-type") and len(types) not in (1, context.arg("num_layers", len(types))):
        raise OptionError(
            f"{NAME}: --cp-comm-type has {len(types)} values for {context.arg('num_layers', None)} layers: give one, "
            "or one for each layer."
        )
    if len(types) > 1 and matches("<0.17", context.versions.get(HOST, "1")):
        raise OptionError(
            f"{NAME}: --cp-comm-type with a value for each layer: Megatron before 0.17 reads that of the next layer, "
            "and fails at the last one: give one value."
        )
    for name in _given(settings):
        served = _ONLY_FOR[name][1]
        if kinds and not kinds & served:
            others = " or ".join(algorithm for algorithm, kind in ALGORITHMS.items() if kind in served)
            raise OptionError(f"{NAME}: {flag(name)} has no effect with {named}: leave it out, or take {others}.")
    if settings["context_parallel_cache_interval"] and settings["context_parallel_kv_cache_policy"] is None:
        raise OptionError(
            f"{NAME}: --context-parallel-cache-interval says in which layers --context-parallel-kv-cache-policy holds: "
            "give that too."
        )
    sizes = context.arg("hierarchical_context_parallel_sizes", None)
    if "hybrid" in kinds:
        if degree is None and context.host_args is not None and not sizes:
            raise OptionError(
                f"{NAME}: hybrid_cp_algo needs --ulysses-degree-in-cp, the number of ranks that share heads."
            )
        if degree is None and sizes and (len(sizes) != 2 or math.prod(sizes) != size):
            raise OptionError(
                f"{NAME}: --hierarchical-context-parallel-sizes {' '.join(map(str, sizes))} must be two numbers whose "
                f"product is --context-parallel-size {size}: the ranks that share heads, and those of a ring."
            )
        if degree is not None and (degree < 2 or size % degree or degree == size):
            raise OptionError(
                f"{NAME}: --ulysses-degree-in-cp {degree} must divide --context-parallel-size {size} and lie between 1 "
                "and it; for Ulysses alone take --context-parallel-algo ulysses_cp_algo."
            )
    inner, window = degree or (sizes or (1,))[0], settings["cp_window_size"]
    for ring in [size // inner] * ("hybrid" in kinds) + [size] * (kinds != {"hybrid"}):
        if ring % window:
            raise OptionError(f"{NAME}: --cp-window-size {window} must divide the ring's {ring} ranks.")
    length = context.arg("seq_length", None)
    if length and length % (2 * size):
        raise OptionError(
            f"{NAME}: --seq-length {length} is not divisible by {2 * size}, twice --context-parallel-size: each rank "
            "has two chunks of a sequence."
        )
    heads = context.arg("num_attention_heads", None)
    if heads:
        tensor = context.arg("tensor_model_parallel_size", 1) or 1
        groups = context.arg("num_query_groups", None) if context.arg("group_query_attention", False) else None
        for each in sorted(kinds & {"ulysses", "hybrid"}):
            check_heads(heads // tensor, max(1, (groups or heads) // tensor), size if each == "ulysses" else inner)
    if splits_as_one(context) and _goes_by_documents(context):
        raise OptionError(
            f"{NAME}: with --dataloader-inter-document-masking Megatron splits a sequence as a whole, and its rotary "
            "embedding and multi-token prediction read it as if each document were split: use --reset-attention-mask "
            "--reset-position-ids instead."
        )


def _goes_by_documents(context: Context) -> bool:
    """Whether rotary embedding, MLA or MTP assume documents that are split separately."""
    has_rows = context.arg("position_embedding_type", "learned_absolute") in ("learned_absolute", "none")
    return bool(not has_rows or context.arg("multi_latent_attention", False) or context.arg("mtp_num_layers", None))


def _named(context: Context) -> tuple[str, set[str]]:
    settings, types = context.settings, tuple(context.arg("cp_comm_type", None) or ())
    asked, implied = settings["context_parallel_algo"], _implied(settings)
    if asked is not None:
        return f"--context-parallel-algo {asked}", {ALGORITHMS[asked]}
    if types and _is_type_given(context):
        _check_types(types)
        return f"--cp-comm-type {' '.join(types)}", {COMM_TYPES[each] for each in types}
    return ("--use-ulysses-allgather-kv" if implied == "ulysses" else ""), {implied} if implied else set()


def _is_type_given(context: Context) -> bool:
    return "cp_comm_type" in context.explicit or tuple(context.arg("cp_comm_type", None) or ("p2p",)) != ("p2p",)


def _check_types(types: Sequence[str]) -> None:
    for each in types:
        if each not in COMM_TYPES:
            raise OptionError(f"{NAME}: --cp-comm-type {each}: not one of {', '.join(COMM_TYPES)}.")


def _implied(settings: Mapping[str, Any]) -> str | None:
    if settings["ulysses_degree_in_cp"] is not None:
        return "hybrid"
    if settings["use_ulysses_allgather_kv"]:
        return "ulysses"
    return "ring" if _given(settings) else None


def _given(settings: Mapping[str, Any]) -> list[str]:
    return [name for name, (default, _) in _ONLY_FOR.items() if settings[name] != default]
