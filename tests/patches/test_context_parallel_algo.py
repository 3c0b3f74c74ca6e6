"""Megatron's core attention over context-parallel ranks against the same on one, its flags, and the split of packs."""

from __future__ import annotations

import itertools
import logging
from types import SimpleNamespace

import pytest
import torch

from mindspeed_lite.engine import Context, OptionError, Settings
from mindspeed_lite.parallel.context import zigzag
from mindspeed_lite.parallel.context.layout import stream_rows
from mindspeed_lite.patches import context_parallel_algo as patch
from mindspeed_lite.patches.context_parallel_algo import FEATURE, thd_partition
from tests.harness.attention_modules import (
    BATCH,
    BESIDE_A_WINDOW,
    HEADS,
    SIZE,
    changed_softmax,
    document_mask,
    module_of,
    pack_of,
)
from tests.harness.attention_modules import SEQUENCE as ROWS
from tests.harness.compare import error
from tests.harness.processes import forked, on_ranks

RANKS = 2
PACK, PADDED = (5, 1, 0, 8), (8, 4, 0, 12)
# Of ROWS rows, and of no length that could be split.
DOCUMENTS = (5, 1, 11, 7)

# module fields, shapes, what `enable` is given, mask
CASES = {
    "chosen": ({}, {}, {}, False),
    "ring": ({}, {}, {"context_parallel_algo": "megatron_cp_algo"}, False),
    "ring that keeps keys": (
        {},
        {},
        {"context_parallel_kv_cache_policy": "half", "use_cp_send_recv_overlap": True, "cp_window_size": 2},
        False,
    ),
    "ulysses, keys gathered": ({"num_query_groups": 1}, {"groups": 1}, {"use_ulysses_allgather_kv": True}, False),
    "latent": ({"softmax_scale": 24**-0.5}, {"size": 24}, {"context_parallel_algo": "kvallgather_cp_algo"}, False),
    "window": ({"window_size": (5, 0)}, {}, {"context_parallel_algo": "megatron_cp_algo"}, False),
    "offset": ({"softmax_type": "learnable"}, {}, {"context_parallel_algo": "ulysses_cp_algo"}, False),
    "offset in a ring": ({"softmax_type": "learnable"}, {}, {"context_parallel_algo": "megatron_cp_algo"}, False),
    "a mask of documents": ({}, {}, {}, True),
}


def draw(rows, batch=BATCH, groups=HEADS, size=SIZE, value=SIZE):
    generator = torch.Generator().manual_seed(7)
    shapes = [(rows, batch, HEADS, size), (rows, batch, groups, size), (rows, batch, groups, value)]
    if batch == 0:
        shapes = [(rows, *shape[2:]) for shape in shapes]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    return tensors, torch.randn(*shapes[0][:-2], HEADS * value, generator=generator)


def test_a_split_call_chooses_the_flash_kernels(monkeypatch):
    """As use_flash_attn does, which never sees such a call."""
    chosen = []
    monkeypatch.setattr(patch, "group_of", lambda *_: object())
    monkeypatch.setattr(patch, "choose_flash_kernels", lambda session, name, *_: chosen.append(name))
    module = SimpleNamespace(config=SimpleNamespace(context_parallel_size=2), layer_number=1)
    forward = patch._forward(None, SimpleNamespace(find=lambda key: None))
    monkeypatch.setattr(patch, "read_call", lambda *_: None)
    query = torch.zeros(2, 1, 1, 1)
    with pytest.raises(OptionError, match="an attention bias"):
        forward(module, query, query, query, None, attention_bias=query)
    assert chosen == ["context_parallel_algo"]


def run(module, tensors, dout, mask, params=None):
    leaves = [t.clone().requires_grad_() for t in tensors]
    if isinstance(module.softmax_offset, torch.nn.Parameter):
        torch.nn.init.constant_(module.softmax_offset, 0.5)
    out = module(*leaves, mask, packed_seq_params=params)
    out.backward(dout)
    offset = [module.softmax_offset.grad] if isinstance(module.softmax_offset, torch.nn.Parameter) else []
    return [out.detach(), *(leaf.grad for leaf in leaves), *offset]


def start(rank, store):
    """Megatron's groups with context parallelism; returns them for modules."""
    from megatron.core import parallel_state

    from mindspeed_lite import platform

    platform.activate()
    # `module_of` has made one for the modules of one rank.
    parallel_state._GLOBAL_MEMORY_BUFFER = None
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    parallel_state.initialize_model_parallel(context_parallel_size=RANKS)


def store_of(tmp_path):
    return torch.distributed.FileStore(str(tmp_path / "store"), RANKS)


@forked("megatron")
def test_each_layer_computes_its_rows_of_the_whole(tmp_path):
    import mindspeed_lite

    pack, padded = pack_of(*PACK, padded=PADDED), sum(PADDED)
    mindspeed_lite.enable(use_flash_attn=True)
    exact = {}
    for name, (fields, shapes, _, masked) in CASES.items():
        module = module_of(scale=fields.get("softmax_scale"), **without_scale(fields))
        tensors, dout = draw(ROWS, **shapes)
        exact[name] = run(module, tensors, dout, document_mask() if masked else None)
    packs = draw(padded, batch=0)
    exact["pack"] = run(module_of(), *packs, None, pack)
    documents = pack_of(*DOCUMENTS)
    exact["documents"] = run(module_of(), *draw(ROWS, batch=0), None, documents)
    mindspeed_lite.disable()
    with changed_softmax(BESIDE_A_WINDOW["joined"]):
        tensors, dout = draw(ROWS)
        exact["a window and a mask"] = run(module_of(window_size=(5, 0)), tensors, dout, document_mask())

    def body(rank):
        start(rank, store_of(tmp_path))
        layout = zigzag(ROWS, RANKS)
        own = torch.tensor(stream_rows(layout, rank))
        for name, (fields, shapes, flags, masked) in CASES.items():
            with mindspeed_lite.enabled(context_parallel_size=RANKS, **flags):
                module = module_of(
                    scale=fields.get("softmax_scale"), context_parallel_size=RANKS, **without_scale(fields)
                )
                assert module.config.context_parallel_size == RANKS
                tensors, dout = draw(ROWS, **shapes)
                mask = document_mask()[:, :, own] if masked else None
                got = run(module, [t[own] for t in tensors], dout[own], mask)
            if len(got) > 4:
                torch.distributed.all_reduce(got[4])
            compare(name, got, [t[own] if t.dim() > 1 else t for t in exact[name]])
        with changed_softmax(BESIDE_A_WINDOW["joined"]):
            with mindspeed_lite.enabled(context_parallel_size=RANKS) as report:
                reasons = [each.reasons[0] for each in report.entries if each.feature == FEATURE.name]
                assert "forward_torch_softmax` was replaced" in reasons[0]
            with mindspeed_lite.enabled(context_parallel_size=RANKS, allow_unverified=True):
                module, (tensors, dout) = module_of(context_parallel_size=RANKS, window_size=(5, 0)), draw(ROWS)
                got = run(module, [t[own] for t in tensors], dout[own], document_mask()[:, :, own])
        compare("a window and a mask", got, [t[own] for t in exact["a window and a mask"]])
        own = thd_partition(pack.cu_seqlens_q_padded, padded, RANKS, rank)
        for algorithm in ("megatron_cp_algo", "ulysses_cp_algo", "kvallgather_cp_algo"):
            with mindspeed_lite.enabled(
                context_parallel_size=RANKS, context_parallel_algo=algorithm, use_flash_attn=True
            ):
                tensors, dout = packs
                got = run(module_of(context_parallel_size=RANKS), [t[own] for t in tensors], dout[own], None, pack)
            compare(f"pack, {algorithm}", got, [t[own] for t in exact["pack"]])
        own = torch.tensor(stream_rows(layout, rank))
        whole = SimpleNamespace(dataloader_inter_document_masking=True)
        with mindspeed_lite.enabled(host_args=whole, context_parallel_size=RANKS):
            tensors, dout = draw(ROWS, batch=0)
            got = run(module_of(context_parallel_size=RANKS), [t[own] for t in tensors], dout[own], None, documents)
        compare("documents of a sequence that is split as a whole", got, [t[own] for t in exact["documents"]])
        with mindspeed_lite.enabled(context_parallel_size=RANKS):
            got = run(module_of(), *draw(ROWS), None)
        compare("a model beside it that is not split", got, exact["chosen"])
        assert refusal(rank) and told_at_its_end()
        goes_on_after_an_undo(rank)

    on_ranks(RANKS, body)


def without_scale(fields):
    return {name: value for name, value in fields.items() if name != "softmax_scale"}


def compare(name, got, exact):
    assert len(got) == len(exact)
    for ours, truth in zip(got, exact, strict=True):
        assert error(ours, truth) < 3e-6, f"{name}: {error(ours, truth):.2g}"


def refusal(rank):
    """What a layer cannot do is an error that names the flag."""
    import mindspeed_lite

    with mindspeed_lite.enabled(context_parallel_size=RANKS):
        module = module_of(context_parallel_size=RANKS)
        q = torch.zeros(8, 1, HEADS, SIZE)
        with pytest.raises(OptionError, match="layer 1 asks for an attention bias, which --context-parallel-size"):
            module(q, q, q, None, attention_bias=torch.zeros(1))
        with pytest.raises(OptionError, match="8 queries and 12 keys on a rank"):
            module(q, torch.zeros(12, 1, HEADS, SIZE), torch.zeros(12, 1, HEADS, SIZE), None)
        with pytest.raises(OptionError, match=r"a rank has 7 rows.*divisible by 4"):
            module(q[:7], q[:7], q[:7], None)
        row = q[:, 0]
        with pytest.raises(OptionError, match=r"a sequence of 6 rows cannot be split.*twice --context-parallel-size"):
            module(row, row, row, None, packed_seq_params=pack_of(6, 10))
        with pytest.raises(OptionError, match="queries and keys have sequences of different lengths"):
            params = pack_of(8, 8)
            params.cu_seqlens_kv = pack_of(4, 12).cu_seqlens_q
            module(row, row, row, None, packed_seq_params=params)
        with pytest.raises(OptionError, match=r"context_parallel_size is 4, and .* groups have 2 ranks: call"):
            module_of(context_parallel_size=4)(q, q, q, None)
    return True


def told_at_its_end():
    """A model that is split cannot go on without the feature: not when it is taken back, unlike with other flags."""
    import mindspeed_lite

    found, handler = [], logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logging.getLogger("mindspeed_lite").addHandler(handler)
    q = torch.zeros(8, 1, HEADS, SIZE)
    with mindspeed_lite.enabled(context_parallel_size=RANKS):
        module_of(context_parallel_size=RANKS)(q, q, q, None)
        with mindspeed_lite.enabled(context_parallel_algo="ulysses_cp_algo"):
            module_of(context_parallel_size=RANKS)(q, q, q, None)
        assert not [text for text in found if "taken back" in text]
    (text,) = [text for text in found if "taken back" in text]
    assert f"--context-parallel-size {RANKS} now attends to each rank's own rows alone" in text
    assert "turn the feature on again before the next step" in text and "\n" not in text
    logging.getLogger("mindspeed_lite").removeHandler(handler)
    return True


def goes_on_after_an_undo(rank):
    """A backward pass after the undo, and the next step with the feature on again."""
    import mindspeed_lite

    own = torch.tensor(stream_rows(zigzag(ROWS, RANKS), rank))
    tensors, dout = draw(ROWS)
    leaves = [t[own].requires_grad_() for t in tensors]
    steps = []
    with mindspeed_lite.enabled(context_parallel_size=RANKS, context_parallel_algo="megatron_cp_algo"):
        module = module_of(context_parallel_size=RANKS)
        steps.append(run(module, [t[own] for t in tensors], dout[own], None))
        out = module(*leaves, None)
    out.backward(dout[own])
    steps.append([out.detach(), *(leaf.grad for leaf in leaves)])
    assert not torch.equal(module(*leaves, None), out), "without the feature a rank has its own rows alone"
    with mindspeed_lite.enabled(context_parallel_size=RANKS, context_parallel_algo="megatron_cp_algo"):
        steps.append(run(module, [t[own] for t in tensors], dout[own], None))
    for step in steps[1:]:
        assert all(torch.equal(ours, first) for ours, first in zip(step, steps[0], strict=True))


@forked("megatron")
def test_megatrons_batches_of_packs_are_split_without_transformer_engine(tmp_path):
    """By the names under which releases have it: each rank gets two chunks of every sequence."""
    import mindspeed_lite

    def body(rank):
        start(rank, store_of(tmp_path))
        from megatron.core import parallel_state, utils

        ends = torch.tensor([[0, 8, 12, 12, 24]], dtype=torch.int32)
        batch = {
            "tokens": torch.arange(24).unsqueeze(0), "labels": torch.arange(24).unsqueeze(0), "loss_mask": None,
            "position_ids": None, "attention_mask": None, "cu_seqlens": ends, "cu_seqlens_padded": ends,
            "max_seqlen": torch.tensor([12]), "local_cp_size": None, "hybrid_cp_group": None,
        }  # fmt: skip
        with mindspeed_lite.enabled(context_parallel_size=RANKS):
            got = utils.get_batch_on_this_cp_rank(batch, False, cp_group=parallel_state.get_context_parallel_group())
        wanted = [[0, 1, 6, 7, 8, 11, 12, 13, 14, 21, 22, 23], [2, 3, 4, 5, 9, 10, 15, 16, 17, 18, 19, 20]]
        assert got["tokens"].tolist() == [wanted[rank]] and got["labels"].tolist() == [wanted[rank]]
        assert got["cu_seqlens"] is ends

    on_ranks(RANKS, body)


def test_the_partition_is_that_of_transformer_engine():
    """Chunks r and 2P - 1 - r of each sequence, for every rank; together they are all rows."""
    ends = torch.tensor([0, 12, 12, 36, 48])
    parts = [thd_partition(ends, 54, 3, rank).tolist() for rank in range(3)]
    assert parts[0] == [0, 1, 10, 11, 12, 13, 14, 15, 32, 33, 34, 35, 36, 37, 46, 47, 48, 53]
    assert sorted(itertools.chain(*parts)) == list(range(54))


def context(explicit=(), host=None, versions=None, **settings):
    settings.setdefault("context_parallel_size", 4)
    return Context(Settings.of(FEATURE.options, settings), "cpu", versions or {}, host, frozenset(explicit))


def test_it_is_on_above_one_rank_and_leaves_transformer_engine_alone():
    assert FEATURE.is_enabled(context().settings)
    assert not FEATURE.is_enabled(context(context_parallel_size=1).settings)
    assert FEATURE.condition(context()) == []
    (reason,) = FEATURE.condition(context(host={"transformer_impl": "transformer_engine"}))
    assert "--transformer-impl transformer_engine" in reason


def test_flags_of_a_split_are_not_left_unmentioned_where_there_is_none():
    given = context(context_parallel_size=1, context_parallel_algo="ulysses_cp_algo", cp_window_size=2)
    assert FEATURE.is_enabled(given.settings)
    assert FEATURE.condition(given) == [
        "--context-parallel-algo ulysses_cp_algo, --cp-window-size 2 with --context-parallel-size 1: no sequence is "
        "split"
    ]
    assert FEATURE.condition(context(context_parallel_size=1)) == []


def test_it_asks_for_no_mask_and_for_hierarchical_groups():
    assert FEATURE.arguments(context()) == {}
    assert FEATURE.arguments(context(host={"a": 1})) == {"create_attention_mask_in_dataloader": False}
    asked = FEATURE.arguments(
        context(host={"reset_attention_mask": True}, ulysses_degree_in_cp=2, context_parallel_size=8)
    )
    assert asked == {"hierarchical_context_parallel_sizes": [2, 4]}
    with pytest.raises(OptionError, match="--hierarchical-context-parallel-sizes 4 2 contradict each other"):
        sizes = {"hierarchical_context_parallel_sizes": [4, 2]}
        FEATURE.arguments(context(host=sizes, ulysses_degree_in_cp=2, context_parallel_size=8))


ULYSSES, RING = ({"context_parallel_algo": f"{name}_cp_algo"} for name in ("ulysses", "megatron"))
HIERARCHY = {"cp_comm_type": ["a2a+p2p"]}
DOCUMENTS_APART = {"dataloader_inter_document_masking": True, "position_embedding_type": "none"}


@pytest.mark.parametrize(
    ("words", "settings", "host"),
    [
        ("contradict each other", ULYSSES, {"cp_comm_type": ["p2p"]}),
        ("--cp-window-size has no effect with --context-parallel-algo", {**ULYSSES, "cp_window_size": 2}, {}),
        ("--use-ulysses-allgather-kv has no effect with", {**RING, "use_ulysses_allgather_kv": True}, {}),
        ("give that too", {"context_parallel_cache_interval": 1}, {}),
        ("sizes 3 2 must be two numbers", {}, {**HIERARCHY, "hierarchical_context_parallel_sizes": [3, 2]}),
        ("sizes 4 must be two numbers", {}, {**HIERARCHY, "hierarchical_context_parallel_sizes": [4]}),
        ("--seq-length 60 is not divisible by 8", {}, {"seq_length": 60}),
        ("needs --ulysses-degree-in-cp", {"context_parallel_algo": "hybrid_cp_algo"}, {"num_layers": 2}),
        ("must divide --context-parallel-size 4", {"ulysses_degree_in_cp": 3}, {}),
        ("must divide --context-parallel-size 4", {"ulysses_degree_in_cp": 4}, {}),
        ("--ulysses-degree-in-cp has no effect with .*hybrid_cp_algo", {**RING, "ulysses_degree_in_cp": 2}, {}),
        ("--cp-window-size 3 must divide the ring's 4 ranks", {"cp_window_size": 3}, {}),
        ("--cp-window-size 4 must divide the ring's 2 ranks", {"cp_window_size": 4, "ulysses_degree_in_cp": 2}, {}),
        ("2 query heads in 2 groups", ULYSSES, {"num_attention_heads": 2}),
        ("2 query heads in 2 groups", {}, {"num_attention_heads": 2, "cp_comm_type": ["p2p", "a2a"]}),
        ("--cp-comm-type ring: not one of p2p", {}, {"cp_comm_type": ["ring"]}),
        ("has 3 values for 2 layers", {}, {"cp_comm_type": ["p2p", "a2a", "p2p"], "num_layers": 2}),
        ("--cp-window-size has no effect with --cp-comm-type a2a", {"cp_window_size": 2}, {"cp_comm_type": ["a2a"]}),
        ("has no effect with --cp-comm-type p2p", {"ulysses_degree_in_cp": 2}, {"cp_comm_type": ["p2p"]}),
        ("kv has no effect with --cp-comm-type p2p", {"use_ulysses_allgather_kv": True}, {"cp_comm_type": ["p2p"]}),
        ("has no effect with --use-ulysses-allgather-kv", {"use_ulysses_allgather_kv": True, "cp_window_size": 2}, {}),
        ("--reset-position-ids instead", {}, {**DOCUMENTS_APART, "position_embedding_type": "rope"}),
        ("--reset-position-ids instead", {}, {**DOCUMENTS_APART, "mtp_num_layers": 1}),
    ],
)
def test_flags_that_contradict_each_other_or_the_layout_are_refused(words, settings, host):
    explicit = {"cp_comm_type"} & host.keys()
    with pytest.raises(OptionError, match=words):
        FEATURE.condition(context(explicit, host or None, **settings))


@pytest.mark.parametrize(
    ("settings", "host"),
    [
        ({"context_parallel_kv_cache_policy": "full"}, {"cp_comm_type": ["p2p", "a2a"], "num_layers": 2}),
        ({"use_ulysses_allgather_kv": True}, {"cp_comm_type": ["p2p", "a2a"], "num_layers": 2}),
        ({"ulysses_degree_in_cp": 2, "cp_window_size": 2}, {"cp_comm_type": ["a2a+p2p"]}),
        ({}, DOCUMENTS_APART),
        ({}, {**DOCUMENTS_APART, "position_embedding_type": "rope", "sft": True}),
    ],
)
def test_flags_that_go_together_are_taken(settings, host):
    assert FEATURE.condition(context({"cp_comm_type"} & host.keys(), host, **settings)) == []


def test_types_of_layers_are_refused_where_megatron_misreads_them():
    host = {"cp_comm_type": ["p2p", "a2a"], "num_layers": 2}
    with pytest.raises(OptionError, match=r"Megatron before 0\.17 reads that of the next layer"):
        FEATURE.condition(context(host, host, {"megatron-core": "0.16.1"}))
    for its, release in ((host, "0.17.1"), ({"cp_comm_type": ["p2p"]}, "0.16.1")):
        assert FEATURE.condition(context(its, its, {"megatron-core": release})) == []
