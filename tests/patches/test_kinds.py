"""A patch that says it goes around its target always calls it, with the arguments it was given; any other overrides."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap

import pytest

from mindspeed_lite import runtime
from mindspeed_lite.engine import Around, Override
from mindspeed_lite.platform import megatron


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
    names = [
        f"*{ast.unparse(each.value)}" if isinstance(each, ast.Starred) else ast.unparse(each) for each in call.args
    ]
    for keyword in call.keywords:
        if keyword.arg is None:
            names.append(f"**{ast.unparse(keyword.value)}")
        elif keyword.arg == ast.unparse(keyword.value):
            names.append(keyword.arg)
        else:
            names.append(f"{keyword.arg}={ast.unparse(keyword.value)}")
    return names


def _rebinds(function):
    """Whether the wrapper assigns to one of its own parameters, or into its keywords."""
    names = {name.lstrip("*") for name in _arguments(function.args)}
    stored = {
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del)
    }
    stored |= {
        node.value.id
        for node in ast.walk(function)
        if isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Store | ast.Del)
        and isinstance(node.value, ast.Name)
    }
    popped = {
        node.func.value.id
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("pop", "update", "setdefault", "clear")
        and isinstance(node.func.value, ast.Name)
    }
    return bool(names & (stored | popped))


def _calls(node, name, arguments):
    """Whether evaluating this expression or simple statement calls the original with these arguments."""
    return any(
        isinstance(each, ast.Call)
        and isinstance(each.func, ast.Name)
        and each.func.id == name
        and _given(each) == arguments
        for each in ast.walk(node)
    )


def _always_calls(body, name, arguments):
    """Whether no path through these statements ends without the call, but by an exception."""
    for node in body:
        if isinstance(node, ast.If):
            if _calls(node.test, name, arguments):
                return True
            branches = [_always_calls(branch, name, arguments) for branch in (node.body, node.orelse)]
            if all(branches):
                return True
            if any(
                _returns(branch) and not done for branch, done in zip((node.body, node.orelse), branches, strict=True)
            ):
                return False
        elif isinstance(node, ast.With):
            if _always_calls(node.body, name, arguments):
                return True
            if _returns(node.body):
                return False
        elif isinstance(node, ast.Try):
            if _always_calls([*node.body, *node.orelse], name, arguments) or _always_calls(
                node.finalbody, name, arguments
            ):
                return not any(_returns(handler.body) for handler in node.handlers)
            if _returns(node.body):
                return False
        elif isinstance(node, ast.For | ast.While | ast.FunctionDef):
            if not isinstance(node, ast.FunctionDef) and _returns(node.body):
                return False
        elif isinstance(node, ast.Raise):
            return True
        elif isinstance(node, ast.Return):
            return node.value is not None and _calls(node.value, name, arguments)
        elif _calls(node, name, arguments):
            return True
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
