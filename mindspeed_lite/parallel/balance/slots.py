"""Places of experts on ranks where each rank has copies of some behind its own: routing over places, not experts.

A rank has `local` experts and then as many slots as there are copies. A token of a copied expert goes to the slot of
its own rank, and on the expert's owner to the expert itself. So every rank has the same number of places, what is sent
to a slot never leaves its rank, and an exchange for that many experts a rank needs no change.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist


class Slots(NamedTuple):
    """Places of `ranks` times (`local` + copies) experts.

    Attributes:
        local: experts of a rank; neighbouring experts are on a rank, in order.
        copied: experts that have a slot on every rank.
    """

    ranks: int
    local: int
    copied: tuple[int, ...]

    @property
    def owners(self) -> list[int]:
        """The rank of each copied expert."""
        return [expert // self.local for expert in self.copied]

    def experts(self) -> list[int]:
        """[places], the expert of each place."""
        found: list[int] = []
        for rank in range(self.ranks):
            found += [*range(rank * self.local, (rank + 1) * self.local), *self.copied]
        return found

    def open(self, rank: int) -> list[bool]:
        """[places], whether tokens of `rank` go there; each expert has one such place."""
        owners = self.owners
        away = {expert for expert, owner in zip(self.copied, owners, strict=True) if owner != rank}
        found: list[bool] = []
        for other in range(self.ranks):
            found += [expert not in away for expert in range(other * self.local, (other + 1) * self.local)]
            found += [other == rank and owner != rank for owner in owners]
        return found

    def route(self, routing_map: torch.Tensor, probs: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Routing of this rank's tokens over places.

        Args:
            routing_map: [T, experts] bool.
            probs: [T, experts], differentiable.

        Returns:
            Both with [T, places]; a closed place has no token, and its probabilities are those of its expert.
        """
        index = torch.tensor(self.experts(), device=probs.device)
        is_open = torch.tensor(self.open(rank), device=probs.device)
        return routing_map.index_select(1, index) & is_open, probs.index_select(1, index)


def gather_counts(
    routing_map: torch.Tensor, ranks: int, group: dist.ProcessGroup, refuses: bool = False
) -> tuple[list[list[int]], bool]:
    """Tokens of each expert by the rank of the expert-parallel group that they come from, and whether a rank refuses.

    Args:
        routing_map: [T, experts] bool, this rank's tokens.
        group: all ranks that share experts; of each `ranks` those that share shards of the same ones are neighbours.
        refuses: this rank can make no copies.

    Returns:
        [ranks][experts], and whether any rank of the group refuses; alike on all of them.
    """
    counts = routing_map.sum(0, dtype=torch.int64)
    sent = torch.cat([counts, counts.new_full((1,), int(refuses))])
    table = counts.new_empty(group.size() * len(sent))
    dist.all_gather_into_tensor(table, sent, group=group)
    found: list[list[int]] = table.view(ranks, -1, len(sent)).sum(1).tolist()
    return [row[:-1] for row in found], any(row[-1] for row in found)


__all__ = ["Slots", "gather_counts"]
