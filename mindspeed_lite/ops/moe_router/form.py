"""What is computed of the logits: the arguments of `topk_routing` as every backend takes them."""

from __future__ import annotations

from typing import NamedTuple

SOFTMAX = "softmax"
SIGMOID = "sigmoid"
SQRTSOFTPLUS = "sqrtsoftplus"
SCORE_FUNCTIONS = (SOFTMAX, SIGMOID, SQRTSOFTPLUS)
# The softmax over all experts, taken before the choice; SOFTMAX alone is that of the chosen logits.
PRE_SOFTMAX = "pre_softmax"

# Added to a sum of scores before dividing by it.
EPS = 1e-20


class Groups(NamedTuple):
    """Experts side by side in `number` groups, of which a token's `chosen` best are open to it.

    A group is as good as the sum of its `best` highest scores.
    """

    number: int
    chosen: int
    best: int


class Form(NamedTuple):
    """scores: PRE_SOFTMAX or one of SCORE_FUNCTIONS. scale: 1.0 for none. dense: results [T, topk], not [T, E].

    ordered: whether torch.topk is asked for an order, which without groups Megatron wants only with gradients. Not
    read in autograd's Functions, in which there are none.
    """

    scores: str
    topk: int
    groups: Groups | None = None
    scale: float = 1.0
    dense: bool = False
    ordered: bool = True

    @property
    def normalised(self) -> bool:
        """Whether the chosen scores are divided by their sum."""
        return self.scores in (SIGMOID, SQRTSOFTPLUS) and self.topk > 1
