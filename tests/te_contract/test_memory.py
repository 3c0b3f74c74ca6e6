"""Features save as many bytes on Transformer Engine's layers as follows from what release 2.20.2 saves there."""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.harness import checkouts
from tests.harness.gpt_block import BATCH, FFN, HIDDEN, LAYERS, SEQUENCE
from tests.harness.training import Trainer
from tests.te_contract import saved_bytes

TOKENS, TOP, WIDTH = SEQUENCE * BATCH, 2, 2
HIDDEN_STATES, ACTIVATION, STATISTICS = WIDTH * TOKENS * HIDDEN, WIDTH * TOKENS * FFN, 4 * TOKENS
# Of the layer of experts, which has a norm apart from a linear layer: its output, and its rows' scales.
NORM = HIDDEN_STATES + STATISTICS
# Parameters of `tests.harness.optimizers`; all but a router are bf16.
PARAMETERS, HALVES = 32 * 8 + 24 * 40 + 24 + 6 * 8, 32 * 8 + 24 * 40 + 24
EXPECTED = {
    # Without fusion the gate also keeps both of its factors.
    "recompute_activation_function": {
        "dense": LAYERS * ACTIVATION, "experts": LAYERS * TOP * ACTIVATION, "unfused": LAYERS * 3 * ACTIVATION,
    },
    "recompute_norm": LAYERS * NORM,
    "use_fused_swiglu": LAYERS * 2 * ACTIVATION,
    # Rows and the activation's output, and also its input.
    "moe_zero_memory": [LAYERS * TOP * (HIDDEN_STATES + times * ACTIVATION) for times in (1, 3)],
    "adaptive_memory": {
        "dense": {"nothing": 0, "activation": LAYERS * ACTIVATION, "norm": 0, "layer": LAYERS * HIDDEN_STATES},
        "experts": {
            "nothing": 0, "activation": LAYERS * TOP * ACTIVATION, "norm": LAYERS * NORM,
            "layer": LAYERS * HIDDEN_STATES,
        },
    },
    # Input, scales and output of the norm, and attention's output; not the last layer, nor the first layer's input.
    "swap_attention": (LAYERS - 1) * (3 * HIDDEN_STATES + STATISTICS) - HIDDEN_STATES,
    # A weight is half of its main parameter, which stays as four bytes for each of three.
    "reuse_fp32_param": 2 * HALVES - 3 * 4,
    "quant_states": {"bf16": 2 * 2 * PARAMETERS, "fp8": 2 * 3 * PARAMETERS},
    # Moments and main parameters; four bytes stay.
    "swap_optimizer": 8 * PARAMETERS + 4 * HALVES - 4,
    "virtual_optimizer": 8 * PARAMETERS,
}  # fmt: skip


def test_bytes_saved_are_those_counted_by_hand(te_trainer: Callable[[str], Trainer]) -> None:
    done = te_trainer(checkouts.ALL[-1]).run(entry="script", arm="adaptor", argv=[saved_bytes.__file__]).check()
    (line,) = (each for each in done.log().splitlines() if each.startswith("{"))
    assert json.loads(line) == EXPECTED
