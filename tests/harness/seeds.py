"""Draws that are the same in every run."""

from __future__ import annotations

import random

import numpy
import torch

_SEED = 20


def seed() -> None:
    """Let what is drawn without a generator start anew, in this process."""
    random.seed(_SEED)
    numpy.random.seed(_SEED)
    torch.default_generator.manual_seed(_SEED)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(_SEED)
