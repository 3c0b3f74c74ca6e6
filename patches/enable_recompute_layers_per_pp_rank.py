"""`--enable-recompute-layers-per-pp-rank`: count recomputed layers per rank, not per chunk.

Divides the number over a rank's virtual stages, first layers first (MindSpeed's flag). Reaches
`TransformerBlock.__init__`, whose block reads its own number. Leaves `--recompute-method uniform` and models without
virtual stages alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_lite.engine import Around, Context, Feature, Relation, Session
from mindspeed_lite.platform.megatron import CONFIG

from ._shared.proxies import AttributeOverride
from ._shared.wrappers import virtual_stage, with_arguments

NAME = "enable_recompute_layers_per_pp_rank"


def layers_of_chunk(number: int, chunks: int, chunk: int) -> int:
    """A chunk's share of a rank's `number` of recomputed layers; first chunks round up.

    >>> [layers_of_chunk(5, 2, chunk) for chunk in range(2)]
    [3, 2]
    """
    return max(0, -(-(number - chunk) // chunks))


def _share(block: Any, given: Mapping[str, Any]) -> int | None:
    config, chunk = block.config, virtual_stage(given)
    chunks, number = config.virtual_pipeline_model_parallel_size, config.recompute_num_layers
    if chunk is None or not chunks or not number or config.recompute_method != "block":
        return None
    return layers_of_chunk(number, chunks, chunk)


def _set_share(session: Session, block: Any, share: int) -> None:
    session.mark(block, "config", AttributeOverride(block.config, recompute_num_layers=share))


def _why_not(context: Context) -> list[str]:
    if context.host_args is None:
        return []
    if context.arg("recompute_method", None) != "block":
        return ["without --recompute-method block no number of layers is recomputed"]
    return []


FEATURE = Feature(
    name=NAME,
    summary="the number of layers that are recomputed counts for a pipeline rank, not for each virtual stage",
    numerics="bitwise",
    theme="memory",
    condition=_why_not,
    conflicts=tuple(
        Relation(name, "it passes over as many layers of each virtual stage")
        for name in ("recompute_norm", "recompute_activation_function")
    ),
    not_auto="it means another number of layers: enable it explicitly with its flag",
    memory="not predicted: as --recompute-num-layers divided by the virtual stages",
    patches=(
        Around(
            "megatron.core.transformer.transformer_block:TransformerBlock.__init__",
            with_arguments(_share, _set_share),
            reads=(
                "config",
                f"{CONFIG}.recompute_method",
                f"{CONFIG}.recompute_num_layers",
                f"{CONFIG}.virtual_pipeline_model_parallel_size",
            ),
        ),
    ),
)
