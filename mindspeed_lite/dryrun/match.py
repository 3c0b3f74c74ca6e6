"""Finds messages that ranks do not agree on: what would hang or corrupt a training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from .calls import RECEIVES, SENDS, GroupCall


def problems(messages: Mapping[int, Sequence[GroupCall]]) -> list[str]:
    """One line for each mismatch; empty if the ranks, all or some of a world, agree.

    Runs all ranks until each has ended or waits: a synchronous collective waits for the group's ranks among
    `messages`, a blocking send or receive for its peer. The n-th collective of a group, and the n-th message between
    two ranks, must be the same call on all.
    """
    return _Replay(messages).run()


class _Replay:
    def __init__(self, messages: Mapping[int, Sequence[GroupCall]]) -> None:
        self.messages = messages
        self.next = dict.fromkeys(messages, 0)
        # Calls issued so far, by group and rank, and by sender and receiver.
        self.collectives: dict[tuple[int, ...], dict[int, list[GroupCall]]] = {}
        self.sends: dict[tuple[int, int], list[GroupCall]] = defaultdict(list)
        self.receives: dict[tuple[int, int], list[GroupCall]] = defaultdict(list)

    def run(self) -> list[str]:
        issued: set[int] = set()
        moved = True
        while moved:
            moved = False
            for rank, calls in self.messages.items():
                while self.next[rank] < len(calls):
                    call = calls[self.next[rank]]
                    if rank not in issued:
                        issued.add(rank)
                        moved = True
                        if problem := self._issue(rank, call):
                            return [problem]
                    if not call.is_async and not self._is_complete(rank, call):
                        break
                    issued.discard(rank)
                    self.next[rank] += 1
                    moved = True
        return self._waiting() or self._unmatched()

    def _issue(self, rank: int, call: GroupCall) -> str | None:
        if call.kind in SENDS or call.kind in RECEIVES:
            mine, others = self._between(rank, call)
            mine.append(call)
            if len(mine) <= len(others):
                other = others[len(mine) - 1]
                if (other.dtype, other.size) != (call.dtype, call.size):
                    return _difference(call.peer, other, rank, call)
            return None
        ranks = self.collectives.setdefault(call.group, {})
        mine_calls = ranks.setdefault(rank, [])
        mine_calls.append(call)
        place = len(mine_calls) - 1
        for other_rank, calls in ranks.items():
            if other_rank != rank and place < len(calls) and not _agree(other_rank, calls[place], rank, call):
                return _difference(other_rank, calls[place], rank, call)
        return None

    def _is_complete(self, rank: int, call: GroupCall) -> bool:
        if call.kind in SENDS or call.kind in RECEIVES:
            if call.peer not in self.messages:
                return True
            mine, others = self._between(rank, call)
            return len(others) >= len(mine)
        ranks = self.collectives[call.group]
        place = len(ranks[rank])
        return all(len(ranks.get(each, ())) >= place for each in call.group if each in self.messages)

    def _between(self, rank: int, call: GroupCall) -> tuple[list[GroupCall], list[GroupCall]]:
        """Calls of this rank and of its peer for messages of this direction."""
        if call.kind in SENDS:
            return self.sends[rank, call.peer], self.receives[rank, call.peer]
        return self.receives[call.peer, rank], self.sends[call.peer, rank]

    def _waiting(self) -> list[str]:
        stuck = {rank: calls[self.next[rank]] for rank, calls in self.messages.items() if self.next[rank] < len(calls)}
        found = []
        for rank, call in stuck.items():
            other = next((each for each in call.group if each in self.messages and each != rank and self._is_behind(
                each, rank, call)), call.peer)  # fmt: skip
            does = f"waits in {_text(stuck[other])}" if other in stuck else "ends without it"
            found.append(f"rank {rank} waits in {_text(call)}; rank {other} {does}")
        return found

    def _is_behind(self, other: int, rank: int, call: GroupCall) -> bool:
        ranks = self.collectives.get(call.group, {})
        return len(ranks.get(other, ())) < len(ranks.get(rank, ()))

    def _unmatched(self) -> list[str]:
        found = []
        for group, ranks in self.collectives.items():
            present = [each for each in group if each in self.messages]
            counts = {each: len(ranks.get(each, ())) for each in present}
            most, least = max(present, key=counts.__getitem__), min(present, key=counts.__getitem__)
            if counts[most] > counts[least]:
                call = ranks[most][counts[least]]
                found.append(f"rank {most} calls {_text(call)}; rank {least} ends without it")
        for pair in {**self.sends, **self.receives}:
            sent, received = self.sends[pair], self.receives[pair]
            if len(sent) > len(received) and pair[1] in self.messages:
                found.append(f"rank {pair[0]} calls {_text(sent[len(received)])}; rank {pair[1]} does not receive it")
            elif len(received) > len(sent) and pair[0] in self.messages:
                found.append(f"rank {pair[1]} calls {_text(received[len(sent)])}; rank {pair[0]} does not send it")
        return found


def _agree(one_rank: int, one: GroupCall, other_rank: int, other: GroupCall) -> bool:
    if (one.kind, one.dtype, one.peer) != (other.kind, other.dtype, other.peer):
        return False
    if one.sent:
        mine, its = one.group.index(one_rank), one.group.index(other_rank)
        return one.sent[its] == other.received[mine] and other.sent[mine] == one.received[its]
    return one.size == other.size


def _difference(one_rank: int, one: GroupCall, other_rank: int, other: GroupCall) -> str:
    return f"rank {one_rank} calls {_text(one)}; rank {other_rank} calls {_text(other)}"


def _text(call: GroupCall) -> str:
    what = f"{call.kind} of {call.size:,} {call.dtype}" if call.dtype else call.kind
    where = f"with rank {call.peer}" if call.kind in (*SENDS, *RECEIVES) else f"in {_ranks(call.group)}"
    return f"{what} {where} at {call.where}"


def _ranks(group: tuple[int, ...]) -> str:
    return f"ranks {', '.join(map(str, group))}" if len(group) <= 4 else f"{len(group)} ranks from {group[0]}"
