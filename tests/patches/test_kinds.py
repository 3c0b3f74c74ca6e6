"""A patch that says it goes around its target always calls it, with the arguments it was given; any other overrides."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap

import pytest

from mindspeed_lite import runtime
from mindspeed_lite.engine import Around, Override
from mindspeed_lite.platform import megatron

CHANGES = ("pop", "update", "setdefault", "clear")


def handed_on(make):
    """Whether every wrapper that `make(wrapped, session)` returns hands its own arguments on to `wrapped`."""
    while isinstance(make, functools.partial):
        make = make.func
    tree = ast.parse(textwrap.dedent(inspect.getsource(make))).body[0]
    first = tree.args.args[0].arg
    inner = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert inner, f"{make.__qualname__} defines no wrapper"
    return all(_always_calls(each.body, first, _arguments(each.args)) and not _rebinds(each) for each in inner)


def _arguments(args):
    names = [each.arg for each in (*args.posonlyargs, *args.args)]
    names += [f"*{args.vararg.arg}"] if args.vararg else []
    names += [each.arg for each in args.kwonlyargs]
    return [*names, *([f"**{args.kwarg.arg}"] if args.kwarg else [])]


def _given(call):
    """Arguments of a call as written, `name` for `name=name`."""
    return [re.sub(r"^(\w+)=\1$", r"\1", ast.unparse(each)) for each in (*call.args, *call.keywords)]


def _rebinds(function):
    """Whether the wrapper assigns to one of its own parameters, or changes what is in it."""
    changed = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            is_change = isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES
            owner = node.func.value if is_change else None
        else:
            is_change = isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
            owner = node.value if is_change and isinstance(node, ast.Subscript) else node if is_change else None
        if isinstance(owner, ast.Name):
            changed.add(owner.id)
    return bool(changed & {name.lstrip("*") for name in _arguments(function.args)})


def _calls(node, name, arguments):
    """Whether evaluating this expression or simple statement calls the original with these arguments."""
    calls = (each for each in ast.walk(node) if isinstance(each, ast.Call))
    return any(ast.unparse(each.func) == name and _given(each) == arguments for each in calls)


def _always_calls(body, name, arguments):
    """Whether no path through these statements ends without the call, but by an exception."""
    for node in body:
        if isinstance(node, ast.Return):
            return node.value is not None and _calls(node.value, name, arguments)
        if isinstance(node, ast.Raise):
            return True
        if isinstance(node, ast.If):
            branches, is_done = (node.body, node.orelse), _calls(node.test, name, arguments)
        elif isinstance(node, ast.Try):
            branches = ([*node.body, *node.orelse], *(each.body for each in node.handlers))
            is_done = _always_calls(node.finalbody, name, arguments)
        elif isinstance(node, ast.With):
            branches, is_done = (node.body,), False
        elif isinstance(node, ast.For | ast.While):
            branches, is_done = (node.body, []), False
        elif isinstance(node, ast.FunctionDef):
            continue
        else:
            branches, is_done = (), _calls(node, name, arguments)
        done = [_always_calls(branch, name, arguments) for branch in branches]
        if is_done or (done and all(done)):
            return True
        if any(_returns(branch) and not each for branch, each in zip(branches, done, strict=True)):
            return False
    return False


def _returns(body):
    return any(isinstance(each, ast.Return) for node in body for each in ast.walk(node))


FEATURES = [*runtime.catalogue(), *megatron.ASSUMPTIONS]
CASES = [
    pytest.param(patch, id=f"{feature.name}-{patch.target.rpartition(':')[2]}-{index}")
    for feature in FEATURES
    for index, patch in enumerate(feature.patches)
    if isinstance(patch, Around | Override)
]


@pytest.mark.parametrize("patch", CASES)
def test_what_goes_around_its_target_hands_every_call_on(patch):
    if isinstance(patch, Around):
        assert handed_on(patch.make), f"{patch.target}: {patch.make} is declared Around and does not always hand on"


def _hands_on(wrapped, session):
    def target(self, x, *args, **kwargs):
        if x:
            session.notice("x")
        try:
            return wrapped(self, x, *args, **kwargs)
        finally:
            session.notice("done")

    return target


def _hands_on_sometimes(wrapped, session):
    def target(self, x):
        if x:
            return None
        return wrapped(self, x)

    return target


def _hands_something_else_on(wrapped, session):
    def target(self, x):
        return wrapped(self, x + 1)

    return target


def _rebinds_first(wrapped, session):
    def target(self, **kwargs):
        kwargs["x"] = 1
        return wrapped(self, **kwargs)

    return target


def test_the_check_tells_them_apart():
    assert handed_on(_hands_on)
    assert not any(map(handed_on, (_hands_on_sometimes, _hands_something_else_on, _rebinds_first)))
