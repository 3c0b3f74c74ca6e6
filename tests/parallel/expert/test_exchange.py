"""Messages issued and waited for separately: what arrives, what gradients do, and what overlaps."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mindspeed_lite.parallel.expert.exchange import AllGather, AllToAll, Messages, issue
from tests.harness.process_groups import joined
from tests.harness.processes import forked, on_ranks

SENT = [[1, 4], [0, 3]]


class _Noted(torch.autograd.Function):
    """Says when its backward pass runs, and how many messages are under way then."""

    @staticmethod
    def forward(ctx, x, name, log, messages):
        ctx.rest = name, log, messages
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        name, log, messages = ctx.rest
        log.append((name, len(messages)))
        return grad * 2, None, None, None


@forked("features")
def test_a_layer_of_experts_with_work_that_overlaps(tmp_path):
    def body(rank):
        group = joined(rank, 2, tmp_path)
        sent = SENT[rank]
        received = [each[rank] for each in SENT]

        def run(overlapped, has_jobs=False):
            torch.manual_seed(rank)
            x = torch.randn(sum(sent), 3, dtype=torch.float64, requires_grad=True)
            probs = torch.rand(sum(sent), dtype=torch.float64, requires_grad=True)
            other = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
            weight = torch.full((3,), 1.5, dtype=torch.float64, requires_grad=True)
            messages, log = Messages(), []

            def exchange(t, there, back, with_jobs):
                out = issue(t, AllToAll(there, back, group), messages, with_jobs)
                if not overlapped:
                    messages.wait()
                return out

            messages.begin()
            tokens = exchange(x, received, sent, True)
            other_work = _Noted.apply(other, "overlaps with the dispatch", log, messages)
            # As Megatron's shared expert: after the message, and the message as soon as it can.
            other_work.grad_fn._set_sequence_nr(tokens.grad_fn._sequence_nr() - 1)
            ps = exchange(probs, received, sent, True)
            messages.wait()
            y = _Noted.apply(tokens * weight * ps.unsqueeze(-1), "experts", log, messages)
            if has_jobs:
                messages.expect_jobs()
            messages.begin(is_dispatch=False)
            y = exchange(y, sent, received, False)
            y.grad_fn._set_sequence_nr(torch.iinfo(torch.int).max)
            other_work = _Noted.apply(other_work, "overlaps with the combine", log, messages)
            messages.wait()
            ((y**2).sum() + other_work.sum()).backward()
            assert not len(messages)
            return [x.grad, probs.grad, other.grad, weight.grad, y.detach()], log

        on, log = run(True)
        off, _ = run(False)
        for a, b in zip(on, off, strict=True):
            assert torch.equal(a, b) and bool((a != 0).any())
        # One process, which holds all rows: what comes back is what went, times twice the weight and probability.
        torch.manual_seed(rank)
        x = torch.randn(sum(sent), 3, dtype=torch.float64)
        probs = torch.rand(sum(sent), dtype=torch.float64)
        torch.testing.assert_close(on[-1], x * 3 * probs.unsqueeze(-1))
        torch.testing.assert_close(on[0], 2 * (x * 3 * probs.unsqueeze(-1)) * 3 * probs.unsqueeze(-1))
        under_way = dict(log)
        assert [name for name, _ in log] == ["overlaps with the combine", "experts", "overlaps with the dispatch"], log
        assert under_way["overlaps with the combine"] == 1 and under_way["experts"] == 0, log
        assert under_way["overlaps with the dispatch"] == 2, log
        again, log = run(True, has_jobs=True)
        for a, b in zip(again, off, strict=True):
            assert torch.equal(a, b)
        # Weight gradients overlap with gradients that leave experts, all the rest with those that come to them.
        assert log == [("overlaps with the combine", 1), ("overlaps with the dispatch", 1), ("experts", 0)], log

    on_ranks(2, body)


@forked("features")
def test_jobs_overlap_with_the_next_message_and_not_without_one(tmp_path):
    def body(rank):
        group = joined(rank, 2, tmp_path)
        messages, ran = Messages(), []
        assert not messages.put(lambda: ran.append("no message is to come"))
        x = torch.ones(4, 2, requires_grad=True)
        tokens = issue(x, AllToAll(None, None, group), messages, True)
        messages.wait()

        class Expert(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x + 1

            @staticmethod
            def backward(ctx, grad):
                assert messages.put(lambda: ran.append(len(messages._works)))
                return grad

        y = issue(Expert.apply(tokens), AllToAll(None, None, group), messages, False)
        messages.wait()
        y.sum().backward()
        assert ran == [1], "its message was under way"
        assert not messages.put(lambda: None) and torch.equal(x.grad, torch.ones(4, 2))
        dist.barrier()

    on_ranks(2, body)


@forked("features")
def test_the_oldest_are_waited_for_alone(tmp_path):
    def body(rank):
        group = joined(rank, 2, tmp_path)
        messages = Messages()
        first = messages.send(torch.full((1,), rank), AllGather(group))
        second = messages.send(torch.full((1,), rank + 5), AllGather(group))
        messages.wait(leaving=1)
        assert first.tolist() == [0, 1] and len(messages) == 1
        messages.wait()
        assert second.tolist() == [5, 6] and not len(messages)

    on_ranks(2, body)
