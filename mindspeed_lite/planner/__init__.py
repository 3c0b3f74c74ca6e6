"""Predicts memory and time of a training from its arguments, and searches layouts.

arguments, flags, training   command line -> TrainingConfig
layers, layout      layers of each stage
traces              parameters and saved tensors of a layer of each kind, as Megatron builds it
pieces, context     which layers recompute what; algorithms of context parallelism
parameters, optimizer   parameters by products, for time; gradients, optimizer states
schedule, orders, pipeline_costs   pipeline schedule
changes, swapped    memory features
estimate            memory of each rank
work, layer_work    operators and messages
devices, published, calibrated, choose_device   prices
seconds, step_time  step time
layouts, candidates, search, why   layout search
"""

from .arguments import read
from .changes import Change, changes
from .estimate import Rank, ranks
from .training import ArgumentError, TrainingConfig

__all__ = ["ArgumentError", "Change", "Rank", "TrainingConfig", "changes", "ranks", "read"]
