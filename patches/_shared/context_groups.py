"""Who shares a sequence: Megatron's context-parallel groups, and the algorithm that runs over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from mindspeed_lite.engine import OptionError, Session
from mindspeed_lite.parallel.context import Algorithm, Ring
from mindspeed_lite.parallel.context.cost import FLOPS_PER_BYTE, AttentionWork, choose
from mindspeed_lite.parallel.groups import new_groups

# MindSpeed's names and Megatron's, each with what it means here.
ALGORITHMS = {
    "megatron_cp_algo": "ring",
    "ulysses_cp_algo": "ulysses",
    "hybrid_cp_algo": "hybrid",
    "kvallgather_cp_algo": "gathered",
}
COMM_TYPES = {
    "p2p": "ring",
    "a2a": "ulysses",
    "a2a+p2p": "hybrid",
    "all_gather": "gathered",
    "allgather": "gathered",
}


class Options(NamedTuple):
    """The flags of rings and Ulysses."""

    window: int
    two_groups: bool
    cache: str | None
    cache_interval: int
    gather_keys: bool

    @classmethod
    def of(cls, session: Session) -> Options:
        settings = session.settings
        return cls(
            settings["cp_window_size"],
            settings["use_cp_send_recv_overlap"],
            settings["context_parallel_kv_cache_policy"],
            settings["context_parallel_cache_interval"],
            settings["use_ulysses_allgather_kv"],
        )

    def cache_of(self, layer: int) -> Any:
        """What layer `layer`, counted from 1, keeps: with interval n every n + 1-th, from the first on."""
        kept = self.cache is not None and (layer - 1) % (self.cache_interval + 1) == 0
        return self.cache if kept else "none"


def group_of(module: Any, packed_seq_params: Any) -> Any:
    """The ranks that share a call's sequence; None where each has its own.

    Raises:
        OptionError: Megatron's groups are not of as many ranks as the module's configuration says.
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


def algorithm_of(kind: str, group: Any, layer: int, options: Options, session: Session) -> Algorithm:
    """The algorithm of a layer over Megatron's groups."""
    if kind == "ulysses":
        return Algorithm(ulysses=group, gather_keys=options.gather_keys)
    if kind == "gathered":
        return Algorithm(gathered=group)
    if kind == "ring":
        return Algorithm(ring=_ring(group, layer, options, session))
    inner, outer = _hierarchical(group)
    return Algorithm(ulysses=inner, ring=_ring(outer, layer, options, session), gather_keys=options.gather_keys)


def least_exposed(query: Any, key: Any, value: Any, group: Any, causal: bool, session: Session) -> str:
    """The algorithm with the least predicted exposed communication for these tensors."""
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


def _ring(group: Any, layer: int, options: Options, session: Session) -> Ring:
    second = _second(group, session) if options.two_groups else None
    return Ring(group, second, options.window, options.cache_of(layer))


def _second(group: Any, session: Session) -> Any:
    """Another group of the same ranks, made once."""
    import torch.distributed as dist

    made: dict[Any, Any] = session.state("second groups", dict)
    if group not in made:
        (made[group],) = new_groups(group, dist.get_process_group_ranks(group))
    return made[group]


def _hierarchical(group: Any) -> Sequence[Any]:
    """(adjacent ranks, ranks of one place in them)."""
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
