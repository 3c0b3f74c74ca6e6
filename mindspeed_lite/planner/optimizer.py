"""Counts bytes of weights, gradients and optimizer states for a number of parameters.

A 16-bit training has for each parameter 2 bytes of weight, a gradient of 4 (2 where gradients are summed in 16 bits),
and with Adam 12 more: an fp32 main parameter and two moments. The distributed optimizer divides these 12 over the
data- and context-parallel ranks. In fp32 the weight is the main parameter.
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
        main: fp32 main parameters, or what stands in their place.
        moments: Adam's two, in the device's own memory between steps.
        host: those in memory of the host, and main parameters that are there.
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
    """For the parameters of a rank of this pipeline stage."""
    dense, experts = (
        _share(training, parameters.dense, training.dp * training.cp),
        _share(training, parameters.experts, training.edp),
    )
    main, moments = int((dense + experts) * _main_width(training)), int((dense + experts) * _moment_width(training))
    if moves(training):
        # Halves stay, and so do the exponents of fp8, which the step needs at once.
        away = (0 if training.reuse_fp32_param else main, int((dense + experts) * int(_moment_width(training))))
    else:
        away = (0, _in_host_memory(training, moments, stage))
    return States(
        weights=parameters.total * training.width,
        gradients=parameters.total * gradient_width(training),
        main=main - away[0],
        moments=moments - away[1],
        host=sum(away),
    )


def moves(training: TrainingConfig) -> bool:
    """Whether `--swap-optimizer` is in force, which a CPU has no second memory for."""
    return training.swap_optimizer and training.device != "cpu"


def gradient_width(training: TrainingConfig) -> int:
    """Bytes of a number of the buffers that gradients are summed in."""
    if training.bf16:  # Megatron sums in fp32 unless told otherwise
        return 2 if training.grad_reduce_in_bf16 else 4
    return 4 if training.accumulate_allreduce_grads_in_fp32 else training.width


def _share(training: TrainingConfig, count: int, ranks: int) -> float:
    return count / ranks if training.use_distributed_optimizer else float(count)


def _main_width(training: TrainingConfig) -> int:
    if training.width == 4:
        return 0
    return 2 if training.reuse_fp32_param and training.bf16 else 4


def _moment_width(training: TrainingConfig) -> float:
    # In fp8 two bytes of exponents for every block of 128.
    return {"": 8.0, "bf16": 4.0, "fp8": 2 + 2 / 128}[training.quant_states]


def _in_host_memory(training: TrainingConfig, moments: int, stage: int) -> int:
    # Tensors under 64 KiB stay where they are: norms and biases, which are next to nothing of a model.
    budgets = training.virtual_optimizer
    if not budgets:
        return 0
    budget = budgets[stage] if len(budgets) > 1 else budgets[0]
    return moments if budget == "all" else min(moments, int(float(budget) * _GIB))
