"""`--adaptive-memory`: keep, recompute or offload parts of layers within a memory budget.

The first steps record what each part saves and its time. A solver minimises time within the budget per pipeline rank,
and the next step measures its memory. Rank 0 prints and stores the choice; `--mindspeed-lite-explain-memory` prints it
and exits. Reaches `get_forward_backward_func`, layers when they are built, and the block that runs a chunk's layers.
Leaves evaluation alone. Experts that overlap communication are recomputed with their router and exchange.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

from mindspeed_lite.engine import Around, Context, Feature, Function, Option, OptionError, Relation, Session
from mindspeed_lite.platform.megatron import CONFIG

from . import recompute_activation_function
from ._shared import linear_layers, recompute
from ._shared.memory_choice import MemoryChoice
from ._shared.wrappers import forward_pass_patch

NAME, BUDGET, EXPLAIN = "adaptive_memory", "memory_budget", "mindspeed_lite_explain_memory"
_MOE_LAYER = "megatron.core.transformer.moe.moe_layer:MoELayer"
_CONFLICTING_ARGS = {
    "recompute_granularity": "--recompute-granularity says what is computed again: leave it out",
    "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm runs layers in pieces",
    "delay_wgrad_compute": "--delay-wgrad-compute keeps inputs until its weight gradients run",
    **recompute.CONFLICTING_ARGS,
}


def _state(session: Session) -> MemoryChoice:
    settings = session.settings
    return session.state(NAME, lambda: MemoryChoice(session, int(settings[BUDGET] * 2**30), bool(settings[EXPLAIN])))


def _prepare(layer: Any, session: Session, index: int | None) -> None:
    if recompute.can_release(NAME, layer.config, session, _CONFLICTING_ARGS):
        _state(session).add(layer)


def _choose(wrapped: Function, session: Session) -> Function:
    # Stages without layers take part in the collectives too.
    _state(session)

    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        original = wrapped(*args, **kwargs)

        @functools.wraps(original)
        def forward_backward(**given: Any) -> Any:
            # A training loop may hold this function after the session has ended.
            state = session.find(NAME)
            return original(**given) if state is None else state.step(original, given)

        return forward_backward

    return get_forward_backward_func


def _check(context: Context) -> list[str]:
    if context.settings.get(NAME):
        if context.settings.get(BUDGET) is None:
            raise OptionError(f"{NAME}: add --memory-budget GIB, which activations of a rank may take")
        if importlib.util.find_spec("scipy") is None:
            raise OptionError(f"{NAME} needs scipy, which solves for the choice: pip install mindspeed-lite[adaptive]")
    return []


_CHOSEN_HERE = "it is chosen here, layer by layer: leave its flag out"

FEATURE = Feature(
    name=NAME,
    summary="what layers keep, compute again and move to the host, chosen within a budget of memory",
    options=(
        Option("--adaptive-memory"),
        Option(
            "--memory-budget",
            help="Memory that the activations of a rank may take, for --adaptive-memory.",
            default=None,
            type=float,
            least=0,
            metavar="GIB",
        ),
        Option("--mindspeed-lite-explain-memory", help="Print what --adaptive-memory chooses, and end."),
    ),
    numerics="ulp",
    theme="memory",
    memory="not predicted: it is within the budget, and is measured after the choice",
    unsupported={"<0.16": "not trained on a release of Megatron before 0.16"},
    condition=_check,
    conflicting_args=_CONFLICTING_ARGS,
    conflicts=(
        Relation("recompute_activation_function", _CHOSEN_HERE),
        Relation("recompute_norm", _CHOSEN_HERE),
        Relation("moe_zero_memory", "it releases what is chosen here: leave its flag out"),
        Relation("swap_attention", "it moves what is chosen here: leave its flag out"),
        Relation("balanced_moe_experts", "its copies of experts have not been trained with it"),
        Relation("pipeline_schedule", "its orders may delay weight gradients, which keeps their inputs"),
    ),
    not_auto=recompute.NOT_AUTO,
    patches=(
        recompute.in_layers(
            _prepare,
            (
                "mlp", "self_attention", "input_layernorm", "pre_mlp_layernorm", "recompute_input_layernorm",
                "recompute_pre_mlp_layernorm", f"{CONFIG}.recompute_modules", f"{CONFIG}.moe_shared_expert_overlap",
                f"{CONFIG}.add_bias_linear", f"{_MOE_LAYER}.experts", f"{_MOE_LAYER}.shared_experts",
            ),
        ),
        Around("megatron.core.pipeline_parallel.schedules:get_forward_backward_func", _choose),
        forward_pass_patch(NAME),
        linear_layers.PLACEHOLDER_PATCH,
        *recompute.CHECKPOINT_PATCHES,
        *recompute_activation_function.MLP_PATCHES,
    ),
)  # fmt: skip
