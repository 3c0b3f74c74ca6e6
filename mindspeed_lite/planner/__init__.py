"""Predicts memory and time of a training from its arguments, and searches layouts. Runs nothing.

arguments, flags, training   command line -> TrainingConfig
layers, layout      layers of each stage
parameters, optimizer   parameters, gradients, optimizer states
activations, pieces, context, latent, further_tokens, experts   saved tensors
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
