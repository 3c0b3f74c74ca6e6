"""Bytes of weights, gradients and optimizer states by parameter count.

16-bit training takes per parameter 2 bytes of weight, 4 of gradient (2 if summed in 16 bits), and with Adam 12 for fp32
main parameter and two moments. The distributed optimizer divides these 12 over data- and context-parallel ranks. In
fp32 the weight is the main parameter.
"""

from __future__ import annotations

from dataclasses import dataclass

from .parameters import Parameters
from .training import TrainingConfig

_GIB = 1 << 30


@dataclass(frozen=True)
class States:
    """Bytes on one rank.

    Attributes:
        main: fp32 main parameters or their replacement.
        moments: Adam's two, in device memory between steps.
        host: moments and main parameters in host memory.
    """

    weights: int
    gradients: int
    main: int
    moments: int
    host: int

    @property
    def optimizer(self) -> int:
        return self.main + self.moments


def states(training: TrainingConfig, parameters: Parameters, stage: int) -> States:
    dense, experts = (
        _share(training, parameters.dense, training.dp * training.cp),
        _share(training, parameters.experts, training.edp),
    )
    main, moments = int((dense + experts) * _main_width(training)), int((dense + experts) * _moment_width(training))
    if moves(training):
        # Low halves and fp8 exponents stay: the step needs them at once.
        away = (0 if training.reuse_fp32_param else main, int((dense + experts) * int(_moment_width(training))))
    else:
        away = (0, _in_host_memory(training, moments, stage))
    return States(
        weights=parameters.total * training.width,
        gradients=parameters.total * gradient_width(training) + _error_feedback(training, parameters),
        main=main - away[0],
        moments=moments - away[1],
        host=sum(away),
    )


def moves(training: TrainingConfig) -> bool:
    """Whether states are swapped; a CPU has no second memory."""
    return training.swap_optimizer and training.device != "cpu"


def gradient_width(training: TrainingConfig) -> int:
    """Bytes per gradient element."""
    if training.bf16:  # Megatron's default is fp32
        return 2 if training.grad_reduce_in_bf16 or training.main_grads_dtype == "bf16" else 4
    return 4 if training.accumulate_allreduce_grads_in_fp32 else training.width


def _error_feedback(training: TrainingConfig, parameters: Parameters) -> int:
    """bf16, of what a rank sends; a group of several nodes may keep less."""
    if not training.grad_reduce_compression:
        return 0
    counts = ((parameters.dense, training.dp * training.cp), (parameters.experts, training.edp))
    return sum(
        2 * (count - count // ranks if training.use_distributed_optimizer else count)
        for count, ranks in counts
        if ranks > 1
    )


def _share(training: TrainingConfig, count: int, ranks: int) -> float:
    return count / ranks if training.use_distributed_optimizer else float(count)


def _main_width(training: TrainingConfig) -> int:
    if training.width == 4:
        return 0
    if training.use_precision_aware_optimizer:
        # Of bf16 weights Transformer Engine's Adam keeps the other 16 bits of fp32.
        return 2 if training.bf16 else WIDTHS[training.main_params_dtype]
    return 2 if training.reuse_fp32_param and training.bf16 else 4


# Bytes of an element of the optimizer's dtypes.
WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


def _moment_width(training: TrainingConfig) -> float:
    if training.use_precision_aware_optimizer:
        return WIDTHS[training.exp_avg_dtype] + WIDTHS[training.exp_avg_sq_dtype]
    # fp8 adds two exponent bytes per block of 128.
    return {"": 8.0, "bf16": 4.0, "fp8": 2 + 2 / 128}[training.quant_states]


def _in_host_memory(training: TrainingConfig, moments: int, stage: int) -> int:
    # Ignores tensors under 64 KiB (norms, biases), which stay on the device.
    budgets = training.virtual_optimizer
    if not budgets:
        return 0
    budget = budgets[stage] if len(budgets) > 1 else budgets[0]
    return moments if budget == "all" else min(moments, int(float(budget) * _GIB))
