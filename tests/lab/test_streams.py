"""Emulated CPU streams: messages overlap with computation, and operators that read them queue after them."""

from __future__ import annotations

import tempfile
import time

import torch
import torch.distributed as dist

from lab import lanes, streams
from mindspeed_lite import platform
from tests.harness.patience import once_of
from tests.harness.processes import forked, on_ranks


class Message:
    """Stands for a collective's handle: writes when it is waited for, as late as a link likes."""

    def __init__(self, out, value):
        self.out, self.value, self.waits = out, value, 0

    def wait(self):
        self.waits += 1
        self.out.copy_(torch.as_tensor(self.value))


def activate():
    platform.activate()
    return streams.install()


def carrying():
    """A stream in which a message has been issued before."""
    side = torch.cuda.Stream()
    side.carries = True
    return side


def sent(stream, shape=(3, 4), value=2.0):
    """A tensor that a message is still to write, in the lane of a stream that carries."""
    out = torch.full(shape, -7.0)
    message = Message(out, value)
    stream.lane.put(message.wait, writes=(out,))
    return out, message


@forked()
def test_operators_that_read_a_message_wait_for_it_and_others_do_not():
    activate()
    side, ready = carrying(), torch.cuda.Event()
    given = torch.full((4, 2), 0.5)
    with torch.cuda.stream(side):
        out, message = sent(side)
        other = given * 3
        product = (out.t().t() + 1) @ given
        low, high = product.min(), product.max(dim=0)[0]
        product.add_(1).mul_(2)
        ready.record(side)
        late = product * 0 + 5
    assert message.waits == 0 and torch.equal(other, torch.full((4, 2), 1.5))
    assert not ready.query() and not side.query()
    ready.wait(torch.cuda.current_stream())
    assert message.waits == 1 and ready.query() and not side.query(), "up to the event, and no further"
    assert torch.equal(product, torch.full((3, 2), 14.0)) and low == 6.0 and torch.equal(high, torch.full((2,), 6.0))
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(late, torch.full((3, 2), 5.0)) and not lanes._open


@forked()
def test_what_needs_values_at_once_gets_them():
    activate()
    side = carrying()
    looks = [
        lambda out: out.sum().item() == 24,
        lambda out: len(out.nonzero()) == 12,
        lambda out: out.tolist() == [[2.0] * 4] * 3,
        lambda out: bool((out.numpy() == 2).all()),
        lambda out: torch.equal(out, torch.full((3, 4), 2.0)),
        lambda out: out.data_ptr() != 0 and bool((out == 2).all()),
        lambda out: bool((out.cpu() == 2).all()),
        lambda out: bool((out.to("cpu", torch.float64) == 2).all()),
        lambda out: bool((torch.from_dlpack(out) == 2).all()),
        lambda out: bool((torch.nn.functional.dropout(out, 0.5) != 1).all()),
    ]
    for look in looks:
        with torch.cuda.stream(side):
            out, message = sent(side)
            assert look(out) and message.waits == 1
            assert not side.lane
    # Random numbers are drawn in the order in which they were asked for.
    torch.manual_seed(3)
    with torch.cuda.stream(side):
        drawn = torch.nn.functional.dropout(sent(side)[0], 0.5)
        after = torch.rand(3)
    side.synchronize()
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.nn.functional.dropout(torch.full((3, 4), 2.0), 0.5))
    assert torch.equal(after, torch.rand(3))


@forked()
def test_who_reads_what_is_being_sent_does_not_wait(tmp_path):
    from mindspeed_lite.ops.rms_norm import rms_norm

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    # A foreign wrapper, without a signature.
    own = dist.all_gather_into_tensor
    dist.all_gather_into_tensor = dist.distributed_c10d.all_gather_into_tensor = lambda *args, **kwargs: own(
        *args, **kwargs
    )
    activate()
    side = carrying()
    given, out, gathered = torch.ones(4, 4), torch.empty(4, 4), torch.empty(4, 4)
    with torch.cuda.stream(side):
        dist.all_to_all_single(out, given)
        twice = given * 2
        dist.all_gather_into_tensor(input_tensor=given, output_tensor=gathered)
        assert len(side.lane._items) == 2 and torch.equal(twice, torch.full((4, 4), 2.0))
        # In the stream's own order.
        given.add_(1)
        assert len(side.lane._items) == 3
    side.synchronize()
    assert torch.equal(out, torch.ones(4, 4)) and torch.equal(gathered, out) and torch.equal(given, out + 1)
    with torch.cuda.stream(side):
        dist.all_to_all_single(out, given)
    for read in (given.tolist, given.numpy, given.data_ptr, lambda: rms_norm(given, torch.ones(4))):
        read()
    assert len(side.lane._items) == 1
    side.synchronize()
    assert torch.equal(out, given)
    with torch.cuda.stream(side):
        dist.all_to_all_single(out, given + 1)
        # Megatron reduces the buckets of gradients so, between instances of the distributed optimizer.
        with dist.distributed_c10d._coalescing_manager(None):
            for each in (out, gathered):
                dist.all_reduce(each, op=dist.ReduceOp.AVG, async_op=False)
    assert not side.lane and torch.equal(out, given + 1) and torch.equal(gathered, torch.ones(4, 4))


@forked()
def test_a_stream_that_waits_for_another_one_holds_up_no_more_than_its_own_readers():
    activate()
    side, third, ready = carrying(), torch.cuda.Stream(), torch.cuda.Event()
    for wait in (lambda: third.wait_event(ready), lambda: third.wait_stream(side), lambda: ready.wait(third)):
        out, message = sent(side)
        ready.record(side)
        wait()
        assert message.waits == 0
        with torch.cuda.stream(third):
            more, other = out + 1, torch.ones(2) + 1
            assert message.waits == 0 and bool((other == 2).all())
        torch.cuda.current_stream().wait_stream(third)
        assert message.waits == 1 and torch.equal(more, torch.full((3, 4), 3.0)) and not lanes._open
    # One that is current already runs what it is given, and so it waits itself.
    late = torch.cuda.Stream()
    with torch.cuda.stream(late):
        out, message = sent(side)
        late.wait_stream(side)
        assert message.waits == 1 and bool((out + 1 == 3).all())


@forked()
def test_undo_finishes_what_is_under_way_and_puts_names_back():
    before = torch.Tensor.data_ptr, torch.UntypedStorage.resize_, dist.all_to_all_single
    undo = activate()
    _, message = sent(torch.cuda.Stream())
    undo()
    platform.deactivate()
    assert message.waits == 1
    assert before == (torch.Tensor.data_ptr, torch.UntypedStorage.resize_, dist.all_to_all_single)


LINK = 0.25


@once_of(8)
@forked()
def test_collectives_of_a_stream_travel_while_the_process_computes():
    """Their time is the link's, which sleep and not arithmetic fills: whatever else runs here only adds."""
    from lab.network import Delays

    folder = tempfile.mkdtemp()

    def body(rank):
        lab = Delays()
        lab.enter()
        activate()
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2)
        given = torch.arange(2.0 * 64).view(2, 64) + 1000 * rank
        expected = torch.stack([given[rank] + 1000 * (other - rank) for other in range(2)])
        lab.set_rate(8e-6 * 64 * 4 / LINK)
        side = torch.cuda.Stream()
        hidden = []
        for _ in range(3):
            dist.barrier()
            out = torch.empty(2, 64)
            start = time.perf_counter()
            with torch.cuda.stream(side):
                dist.all_to_all_single(out, given)
                more = out * 2
            time.sleep(LINK)
            torch.cuda.current_stream().wait_stream(side)
            hidden.append(2 * LINK - (time.perf_counter() - start))
            assert torch.equal(out, expected) and torch.equal(more, 2 * expected)
        # The first message of a stream is waited for.
        assert hidden[0] < 0.1 * LINK and max(hidden[1:]) > 0.9 * LINK, hidden
        # Issued with what has not arrived, it waits for that; and so it does outside of streams.
        lab.set_rate(None)
        with torch.cuda.stream(side):
            dist.all_to_all_single(out, given)
            dist.all_reduce(out)
            out.mul_(3)
        dist.all_reduce(out)
        others = torch.stack([given[1 - rank] + 1000 * (other - rank) for other in range(2)])
        assert torch.equal(out, 2 * 3 * (expected + others))

    on_ranks(2, body)
