"""Builds patches' functions: wrappers of methods, verification, switches of configurations."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mindspeed_lite.engine import Around, Feature, Function, OptionError, Session

Make = Callable[[Function, Session], Function]


def before(act: Callable[[Session, Any], object]) -> Make:
    """Call `act(session, self)` before the method."""

    def make(wrapped: Function, session: Session) -> Function:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            act(session, self)
            return wrapped(self, *args, **kwargs)

        return method

    return make


def after(act: Callable[[Session, Any], object]) -> Make:
    """Call `act(session, self)` after the method."""

    def make(wrapped: Function, session: Session) -> Function:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = wrapped(self, *args, **kwargs)
            act(session, self)
            return found

        return method

    return make


def act_again(session: Session, known: Iterable[Any], act: Callable[[Any], object]) -> None:
    """When the feature begins, call `act` on each of `known`: objects of its earlier sessions.

    One that fails does not keep the others from it.
    """

    def begin() -> None:
        with contextlib.ExitStack() as stack:
            for each in [*known][::-1]:
                stack.callback(act, each)

    session.on_begin(begin)


def after_init(act: Callable[[Session, Any], object], again: Callable[[Session, Any], object] | None = None) -> Make:
    """Call `act(session, self)` after `__init__`.

    The next time that the feature begins, it calls `again` (default: `act`) on these objects.

    Args:
        act: returns False for objects that the feature leaves alone.
    """
    known: weakref.WeakSet[Any] = weakref.WeakSet()

    def make(wrapped: Function, session: Session) -> Function:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            wrapped(self, *args, **kwargs)
            if act(session, self) is not False:
                known.add(self)

        act_again(session, known, functools.partial(again or act, session))
        return __init__

    return make


def with_arguments(choose: Callable[[Any, Mapping[str, Any]], Any], act: Callable[[Session, Any, Any], object]) -> Make:
    """After `__init__`, call `act(session, self, value)` with what `choose(self, arguments)` returns, unless None.

    The next time that the feature begins, it calls `act` with the same values.
    """
    known: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def make(wrapped: Function, session: Session) -> Function:
        signature = inspect.signature(wrapped)

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            wrapped(self, *args, **kwargs)
            given = signature.bind(self, *args, **kwargs)
            given.apply_defaults()
            value = choose(self, given.arguments)
            if value is not None:
                known[self] = value
                act(session, self, value)

        act_again(session, known, lambda each: act(session, each, known[each]))
        return __init__

    return make


def virtual_stage(given: Mapping[str, Any]) -> int | None:
    """The model chunk that is built, by its constructor's arguments; before 0.13 it is global."""
    from megatron.core import parallel_state

    stage: int | None = (
        given["vp_stage"] if "vp_stage" in given else parallel_state.get_virtual_pipeline_model_parallel_rank()
    )
    return stage


def within(context: Callable[[Session, Any], contextlib.AbstractContextManager[Any]]) -> Make:
    def make(wrapped: Function, session: Session) -> Function:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            with context(session, self):
                return wrapped(self, *args, **kwargs)

        return method

    return make


def forward_pass_patch(feature: str) -> Around:
    """Runs a block of layers within `forward_pass()` of the feature's state, if there is one."""

    def in_pass(session: Session, _: Any) -> contextlib.AbstractContextManager[Any]:
        state = session.find(feature)
        found: contextlib.AbstractContextManager[Any] = (
            contextlib.nullcontext() if state is None else state.forward_pass()
        )
        return found

    return Around("megatron.core.transformer.transformer_block:TransformerBlock.forward", within(in_pass))


def verify(
    session: Session,
    feature: Feature,
    operator: str,
    ours: Function,
    theirs: Function,
    inputs: Mapping[str, Any],
    against: str = "Megatron's function",
    **more: Any,
) -> None:
    """Compare an operator with what it replaces, if --mindspeed-lite-verify is given; more: see `Verifier.check`."""
    if session.verifier is not None:
        session.verifier.check(feature.name, operator, feature.numerics, ours, theirs, inputs, against=against, **more)


def leave_out(session: Session, feature: Feature, operator: str, reason: str) -> None:
    if session.verifier is not None:
        session.verifier.leave_out(feature.name, operator, reason)


def placeholder(message: str) -> Callable[[Session], Function]:
    """A function that Megatron's configuration looks for and no path of a model calls; raises OptionError."""

    def make(session: Session) -> Function:
        def fused_form(*args: Any, **kwargs: Any) -> Any:
            raise OptionError(message)

        return fused_form

    return make


def at_end(session: Session, owner: Any, act: Callable[[Any], object]) -> None:
    """Call `act(owner)` when the feature ends, if the owner still lives."""
    reference = weakref.ref(owner)

    def end() -> None:
        found = reference()
        if found is not None:
            act(found)

    session.on_end(end)


def is_set(symbol: str) -> Callable[[], bool]:
    """Whether the host has `package.module:name` itself, once it is called."""
    module, _, name = symbol.partition(":")
    return lambda: bool(getattr(importlib.import_module(module), name, None))


def switch_off(owner: Any, name: str, session: Session, is_there: Callable[[], bool]) -> bool:
    """Clear `owner.name` when the feature ends, unless Megatron itself has the fused form; False if it is not set.

    Megatron reads it every step from an object that may outlive the feature. is_there: called after the undo.
    """

    def clear(found: Any) -> None:
        if not is_there():
            setattr(found, name, False)

    is_on = bool(getattr(owner, name, False))
    if is_on:
        at_end(session, owner, clear)
    return is_on


def switch_on_again(owner: Any, name: str, session: Session, is_there: Callable[[], bool]) -> None:
    """Set the attribute that `switch_off` has cleared."""
    setattr(owner, name, True)
    switch_off(owner, name, session, is_there)


def config_field(name: str, is_there: Callable[[], bool]) -> Around:
    """Patch that applies `switch_off` to a field of every configuration a module is built with."""
    # By id, since configurations are not hashable.
    known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def around(wrapped: Function, session: Session) -> Function:
        def __init__(self: Any, config: Any) -> None:
            wrapped(self, config)
            if known.get(id(config)) is not config and switch_off(config, name, session, is_there):
                known[id(config)] = config

        act_again(session, known.values(), lambda config: switch_on_again(config, name, session, is_there))
        return __init__

    return Around("megatron.core.transformer.module:MegatronModule.__init__", around)


@functools.cache
def parameters(function: Function) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def filter_kwargs(function: Function, **given: Any) -> dict[str, Any]:
    """Keyword arguments that the function of this release accepts."""
    names = parameters(function)
    return given if given.keys() <= names else {name: value for name, value in given.items() if name in names}
