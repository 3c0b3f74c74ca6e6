"""What a patch reads off Megatron's objects is what it declares: its code is read for it, and compared.

Followed is the wrapper's first parameter, parameters with the names below, what is known to hang on them, and the
functions of `patches/` that receive any of these. A read that has a default (`getattr(x, name, default)`) is none,
nor is one of what torch or the patch itself has put there.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from types import FunctionType, ModuleType

import pytest

from mindspeed_lite import runtime
from mindspeed_lite.engine import Around, Override, resolve
from mindspeed_lite.engine.source import attributes, definitions, reader_of
from mindspeed_lite.engine.target import parse
from mindspeed_lite.platform import megatron
from mindspeed_lite.platform.megatron import CONFIG
from tests.harness import checkouts

DDP_CONFIG = "megatron.core.distributed.distributed_data_parallel_config:DistributedDataParallelConfig"
GROUP = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"
MLP = "megatron.core.transformer.mlp:MLP"
COLUMN = "megatron.core.tensor_parallel.layers:ColumnParallelLinear"
# What a parameter of this name is.
PARAMETERS = {
    "config": CONFIG,
    "ddp_config": DDP_CONFIG,
    "packed_seq_params": "megatron.core.packed_seq_params:PackedSeqParams",
}
# What hangs on an object, or each of what does, by the attribute.
MEMBERS = {
    "config": CONFIG,
    "ddp_config": DDP_CONFIG,
    "scale_mask_softmax": "megatron.core.fusions.fused_softmax:FusedScaleMaskSoftmax",
    "bucket_groups": GROUP,
    "expert_parallel_bucket_groups": GROUP,
    "buffers": "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer",
    "buckets": "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucket",
    "output_layer": COLUMN,
    "local_experts": MLP,
    "linear_fc1": COLUMN,
    "linear_fc2": COLUMN,
    "mlp": MLP,
}
OWN = ("mindspeed_lite.patches", "mindspeed_lite.platform.megatron")


class Reader(ast.NodeVisitor):
    """Reads of one function; `known` says of which class the object under a name is."""

    def __init__(self, function, known, found, seen):
        self.found = found
        self.seen = seen
        self.known = dict(known)
        closure = inspect.getclosurevars(function)
        self.names = {**function.__globals__, **closure.nonlocals}

    def of(self, node):
        """The class of what an expression gives, or of its elements; None if that is not known."""
        if isinstance(node, ast.Name):
            return self.known.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.of(node.value)
            return MEMBERS.get(node.attr) if owner and is_megatrons(owner, node.attr) else None
        if isinstance(node, ast.Subscript | ast.Starred):
            return self.of(node.value)
        if isinstance(node, ast.ListComp | ast.GeneratorExp):
            self.bind_loops(node)
            return self.of(node.elt)
        if isinstance(node, ast.List | ast.Tuple):
            return next(filter(None, map(self.of, node.elts)), None)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("list", "reversed"):
            return self.of(node.args[0])
        return None

    def bind(self, target, value):
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for each, its in zip(target.elts, value.elts, strict=True):
                self.bind(each, its)
        elif isinstance(target, ast.Name):
            self.known[target.id] = self.of(value)

    def bind_loops(self, node):
        for each in node.generators:
            self.bind(each.target, each.iter)

    def visit_Assign(self, node):
        for target in node.targets:
            self.bind(target, node.value)
        self.generic_visit(node)

    def visit_For(self, node):
        self.bind(node.target, node.iter)
        self.generic_visit(node)

    def visit_comprehension_of(self, node):
        self.bind_loops(node)
        self.generic_visit(node)

    visit_ListComp = visit_GeneratorExp = visit_SetComp = visit_DictComp = visit_comprehension_of

    def visit_Attribute(self, node):
        owner = self.of(node.value)
        if owner:
            self.found.add((owner, node.attr))
        self.generic_visit(node)

    def visit_Call(self, node):
        if isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) == 2:
            owner, name = self.of(node.args[0]), node.args[1]
            if owner and isinstance(name, ast.Constant):
                self.found.add((owner, name.value))
        called = self.called(node.func)
        if called is not None:
            given = [self.of(each) for each in node.args]
            named = {each.arg: self.of(each.value) for each in node.keywords if each.arg}
            if any(given) or any(named.values()):
                names = list(inspect.signature(called).parameters)
                known = {**dict(zip(names, given, strict=False)), **named}
                read_function(called, {name: each for name, each in known.items() if each}, self.found, self.seen)
        self.generic_visit(node)

    def called(self, node):
        """The function of `patches/` that is called, if it is one."""
        if isinstance(node, ast.Name):
            found = self.names.get(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = self.names.get(node.value.id)
            found = getattr(module, node.attr, None) if isinstance(module, ModuleType) else None
        else:
            return None
        return found if isinstance(found, FunctionType) and found.__module__.startswith(OWN) else None


def source_of(function):
    return ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]


def read_function(function, known, found, seen):
    key = function, frozenset(known.items())
    if key not in seen:
        seen.add(key)
        reader = Reader(function, known, found, seen)
        for statement in source_of(function).body:
            reader.visit(statement)


def reads_of(patch):
    """What the code of a patch reads: (class, attribute)."""
    make = patch.make
    while isinstance(make, functools.partial):
        make = make.func
    tree = source_of(make)
    if not isinstance(tree, ast.FunctionDef):
        return set()  # a value
    target = resolve(patch.target)
    found = set()
    inner = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for returned in [node.value for node in tree.body if isinstance(node, ast.Return)]:
        wrapper = inner[returned.id]
        names = [each.arg for each in wrapper.args.args]
        known = {name: PARAMETERS[name] for name in names if name in PARAMETERS}
        if target.is_bound:
            known[names[0]] = patch.target.rpartition(".")[0]
        reader = Reader(make, known, found, set())
        for statement in wrapper.body:
            reader.visit(statement)
    return found


def is_megatrons(owner, name):
    """Whether the class has the attribute of Megatron's making, and not from torch or a patch."""
    return any(
        name in attributes(each) for each in resolve(owner).raw.__mro__ if each.__module__.startswith("megatron")
    )


def needed(patch):
    """What the patch has to declare, as it would be spelled in full."""
    return {f"{owner}.{name}" for owner, name in reads_of(patch) if is_megatrons(owner, name)}


def body_reads(patch):
    """Attributes that the body of an override's target reads itself, which is verified."""
    if not isinstance(patch, Override):
        return set()
    found = (ast.walk(node) for _, node in definitions(reader_of(megatron.root()), patch.target))
    return {node.attr for each in found for node in each if isinstance(node, ast.Attribute)}


def in_full(text, target):
    module, path = parse(target)
    if ":" in text:
        return text
    return f"{module}:{text}" if "." in text else f"{module}:{'.'.join([*path[:-1], text])}"


CASES = [
    pytest.param(patch, id=f"{feature.name}-{patch.target.rpartition(':')[2]}-{index}")
    for feature in [*runtime.catalogue(), *megatron.ASSUMPTIONS]
    for index, patch in enumerate(feature.patches_for(megatron.version())[0])
    if checkouts.holds(megatron.root(), patch.target)
    if isinstance(patch, Around | Override)
]


@pytest.mark.parametrize("patch", CASES)
def test_what_a_patch_reads_is_declared(patch):
    declared = {in_full(text, patch.target) for text in patch.reads}
    missing = {text for text in needed(patch) - declared if text.rpartition(".")[2] not in body_reads(patch)}
    assert not missing
    for text in declared:
        owner, _, name = text.rpartition(".")
        assert not isinstance(resolve(owner).raw, type) or is_megatrons(owner, name), f"{text} is not Megatron's"


def _helper(thing, other):
    return thing.layer_number + getattr(other, "hidden_size", 0)


_helper.__module__ = "mindspeed_lite.patches.test"


def _factory(wrapped, session):
    def forward(self, x, packed_seq_params=None):
        first, config = self.mlp, self.config
        for each in reversed([self.input_layernorm]):
            each(x)
        self.recompute_mlp = config.fp8
        _helper(self, other=config)
        return [layer.weight for layer in [first.linear_fc1]], packed_seq_params.cu_seqlens_q

    return forward


def test_the_check_finds_what_is_read():
    layer = "megatron.core.transformer.transformer_layer:TransformerLayer"
    patch = Override(f"{layer}.forward", _factory)
    assert body_reads(patch) >= {"_forward_mlp"} and "mlp" not in body_reads(patch)
    assert needed(patch) == {
        *(f"{layer}.{each}" for each in ("mlp", "config", "input_layernorm", "recompute_mlp", "layer_number")),
        f"{CONFIG}.fp8",
        f"{MLP}.linear_fc1",
        f"{COLUMN}.weight",
        "megatron.core.packed_seq_params:PackedSeqParams.cu_seqlens_q",
    }
