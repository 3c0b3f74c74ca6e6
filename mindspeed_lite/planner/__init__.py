"""Predicts memory and time of a training on each rank from its arguments alone, and searches; nothing is run.

arguments    the words of a training command -> the training they describe
training     that training, frozen: model, layout and features
flags        which of Megatron's flags that reads, and which it refuses
layers       which layers a pipeline stage holds
layout       the same, written down by hand
parameters   how many parameters those are on a rank
optimizer    bytes of weights, gradients and optimizer states for them
activations  what one micro-batch keeps for the backward pass, entry by entry
context      what a sequence that is split over ranks keeps in attention
latent       multi-latent attention: its parameters, and what it keeps
further_tokens  the same for multi-token prediction
pieces       what its layers have in common
experts      the same for a layer of experts
schedule     how many micro-batches a stage keeps at once, and what it keeps then
pipeline_costs  seconds and bytes of the steps of a pipeline schedule
estimate     all of it, for every kind of rank
changes      what each feature gives or takes
swapped      what waits in host memory
orders       the pipeline schedule of a training, and where it places chunks

work         operators and messages, and what a device says of each
layer_work   those of each part of the model
seconds      their time, with what runs beside what
devices      published figures of devices
published    time by those
calibrated   time by measurements
choose_device  which of the two
step_time    a whole step
layouts      layers over stages, as even as can be
candidates   what a search chooses among, and the flags for it
search       the fastest that fit
why          what another layout lacks
"""

from .arguments import read
from .changes import Change, changes
from .estimate import Rank, ranks
from .training import ArgumentError, TrainingConfig

__all__ = ["ArgumentError", "Change", "Rank", "TrainingConfig", "changes", "ranks", "read"]
