"""Predicts memory and time of a training from its arguments, and searches layouts. Runs nothing.

arguments, flags    command line parsing
training            TrainingConfig
layers, layout      layers of each pipeline stage
parameters, optimizer   parameters, gradients, optimizer states
activations, pieces, context, latent, further_tokens, experts   saved tensors
schedule, orders, pipeline_costs   pipeline schedule
changes, swapped    memory features
estimate            memory of each rank

work, layer_work    operators and messages
devices, published, calibrated, choose_device   their prices
seconds, step_time  time of a step
layouts, candidates, search, why   layout search
"""

from .arguments import read
from .changes import Change, changes
from .estimate import Rank, ranks
from .training import ArgumentError, TrainingConfig

__all__ = ["ArgumentError", "Change", "Rank", "TrainingConfig", "changes", "ranks", "read"]
