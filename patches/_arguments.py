"""Where flags come in: our groups in Megatron's parser, and the moment at which its arguments are final.

Reaches four functions of `megatron.training`: `add_megatron_arguments` (our groups appear in `--help`),
`parse_args` (flags given beside a YAML file survive it), `validate_args` and `validate_yaml` (before: defaults that
demand an absent package; after: features). They exist in every supported release, and every route to training goes
through them, whether arguments come from the command line, from YAML or from a checkpoint.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from mindspeed_lite import activation, platform
from mindspeed_lite.engine import (
    Collision,
    Feature,
    ImportHandle,
    Session,
    Transaction,
    Wrap,
    add_arguments,
    when_imported,
)
from mindspeed_lite.platform import megatron

from . import _defaults


class _Parsed:
    """What the last parser run said; one object per installed hook."""

    def __init__(self) -> None:
        self.collisions: list[Collision] = []
        self.namespace: argparse.Namespace | None = None
        self.explicit: frozenset[str] = frozenset()


_UNSET = object()
_ACCUMULATING = (argparse._AppendAction, argparse._AppendConstAction, argparse._CountAction, argparse._ExtendAction)


def _explicit(parser: argparse.ArgumentParser, parse: Callable[..., Any], argv: Any) -> frozenset[str]:
    """The dests that `argv` names itself: argparse fills defaults only where the namespace has no attribute."""
    marked = argparse.Namespace()
    for action in parser._actions:
        if not isinstance(action, _ACCUMULATING) and action.dest != argparse.SUPPRESS:
            setattr(marked, action.dest, _UNSET)
    parse(argv, marked)
    return frozenset(dest for dest, value in vars(marked).items() if value is not _UNSET)


def _mend_help(parser: argparse.ArgumentParser) -> None:
    """Escape the help texts that argparse cannot format: a lone % in 0.18 and 0.19 makes `--help` itself fail."""
    for action in parser._actions:
        if action.help and action.help is not argparse.SUPPRESS:
            try:
                action.help % {**vars(action), "prog": parser.prog}
            except (ValueError, TypeError, KeyError):
                action.help = action.help.replace("%", "%%")


def _watch(parser: argparse.ArgumentParser, parsed: _Parsed) -> None:
    """Let this one parser remember what it was given."""
    parse_known = parser.parse_known_args

    def parse_known_args(args: Any = None, namespace: Any = None) -> Any:
        result = parse_known(args, namespace)
        parsed.namespace = result[0]
        parsed.explicit = _explicit(parser, parse_known, args)
        return result

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def _hooks(parsed: _Parsed) -> tuple[Feature, Feature]:
    def around_add(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
        def add_megatron_arguments(parser: argparse.ArgumentParser) -> Any:
            parser = wrapped(parser)
            parsed.collisions = add_arguments(
                parser,
                activation.catalogue(),
                activation.GENERAL,
                host_version=megatron.version() or "0",
            )
            _mend_help(parser)
            _watch(parser, parsed)
            return parser

        return add_megatron_arguments

    def around_parse(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
        def parse_args(extra_args_provider: Any = None, ignore_unknown_args: bool = False) -> Any:
            args = wrapped(extra_args_provider, ignore_unknown_args)
            if args is not parsed.namespace and parsed.namespace is not None:
                # A YAML file has replaced the command line's arguments; ours are still the user's.
                holders = megatron.argument_holders(args)
                for option in (*activation.GENERAL, *activation.catalogue().options()):
                    # A model's field stands a level down and may not stand twice.
                    having = [holder for holder in holders if hasattr(holder, option.dest)]
                    if option.dest in parsed.explicit or not having:
                        value = getattr(parsed.namespace, option.dest, option.default)
                        for holder in having or [args]:
                            setattr(holder, option.dest, value)
                parsed.explicit = frozenset()
            for change in _changes:
                change(args)
            return args

        return parse_args

    def around_validate(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
        def validate_args(args: Any, defaults: Any = {}) -> Any:  # noqa: B006  (Megatron's signature)
            device = platform.activate().name
            notices = _defaults.switch(args, device, parsed.explicit)
            with _defaults.unseen(args):
                validated = wrapped(args, defaults)
            activation.activate_for_training(
                args if validated is None else validated, notices, parsed.collisions, parsed.explicit
            )
            return validated

        return validate_args

    command_line = megatron.always(
        "arguments",
        "flags in Megatron's parser, features after its validation",
        Wrap("megatron.training.arguments:add_megatron_arguments", around_add),
        Wrap("megatron.training.arguments:parse_args", around_parse),
        Wrap("megatron.training.arguments:validate_args", around_validate),
    )
    yaml = megatron.always(
        "yaml_arguments",
        "features after the validation of YAML arguments",
        Wrap("megatron.training.yaml_arguments:validate_yaml", around_validate),
    )
    return command_line, yaml


_waiting: list[ImportHandle] = []
_applied: list[Transaction] = []
_changes: list[Callable[[Any], None]] = []


def before_validation(change: Callable[[Any], None]) -> None:
    """Call `change` with the parsed arguments, from the command line or YAML, before Megatron validates them.

    For the benchmark, which turns features off and on in a command that it does not rewrite.
    """
    _changes.append(change)


def install() -> None:
    """Wait for Megatron's argument modules, or hook them now if they are loaded; again is no change."""
    if _waiting:
        return
    command_line, yaml = _hooks(_Parsed())
    _waiting.append(when_imported("megatron.training.arguments", _applier(command_line)))
    _waiting.append(when_imported("megatron.training.yaml_arguments", _applier(yaml)))


def _applier(feature: Feature) -> Callable[[Any], None]:
    def apply(module: Any) -> None:
        transaction, _ = megatron.place(feature)
        _applied.append(transaction)

    return apply


def remove() -> None:
    """Take the hooks back."""
    _changes.clear()
    while _waiting:
        _waiting.pop().cancel()
    while _applied:
        _applied.pop().undo()


__all__ = ["before_validation", "install", "remove"]
