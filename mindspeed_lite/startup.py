"""Activates features from Megatron's command line.

Steps of a flag:
    `_add_arguments`: Megatron's parser gets the flags (`engine/options.py`).
    `_CommandLine.attach`: translates MindSpeed's flags (`migration`).
    `_after_parsing`: command-line flags survive a YAML file.
    `_prepare`: switches defaults, checks arguments, forms the request.
    `_validate`: sets features' arguments (`runtime.with_arguments`); Megatron validates.
    `runtime.plan_requests`: plans, again only if validation makes a feature that set arguments inapplicable.
    `runtime.apply_requests`: swaps all or none; `runtime.show_report` prints.

Every route to training passes these hooks: command line, YAML or checkpoint.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mindspeed_lite import error_exit, migration, platform, runtime
from mindspeed_lite.engine import (
    Around,
    Feature,
    OptionError,
    Override,
    Plan,
    Session,
    add_arguments,
)
from mindspeed_lite.patches._shared import megatron_arguments, pipeline_orders
from mindspeed_lite.platform import megatron


class _CommandLine:
    def __init__(self) -> None:
        self.collisions: dict[str, str] = {}
        self.namespace: argparse.Namespace | None = None
        self.explicit: set[str] = set()
        self.flags: frozenset[str] = frozenset()
        self.translation = migration.Translation((), ())

    def attach(self, parser: argparse.ArgumentParser) -> None:
        """Make a parser translate MindSpeed's flags, record options, and end with one-line errors."""
        parse_known, get_values = parser.parse_known_args, parser._get_values

        def parse_known_args(args: Any = None, namespace: Any = None) -> Any:
            self.flags = frozenset(parser._option_string_actions)
            self.explicit.clear()
            self._translate(sys.argv[1:] if args is None else list(args))
            self.namespace, unknown = parse_known(list(self.translation.accepted), namespace)
            file = getattr(self.namespace, "yaml_cfg", None)
            if file and not os.path.isfile(file):
                parser.error(f"argument --yaml-cfg: there is no file {file}")
            return self.namespace, [*unknown, *self._refused_words()]

        def _get_values(action: argparse.Action, words: list[str]) -> Any:
            self.explicit.add(action.dest)
            return get_values(action, words)

        def parse_args(args: Any = None, namespace: Any = None) -> Any:
            found, unknown = parser.parse_known_args(args, namespace)
            if unknown:
                unknown = unknown[: len(unknown) - len(self._refused_words())]
                lines = migration.unrecognized(unknown, parser._option_string_actions)
                parser.error("\n".join([*self.translation.refusals, *lines]))
            return found

        def error(message: str) -> None:
            # Instead of Megatron's 760-line usage, which --help shows.
            lines = list(dict.fromkeys([*self.translation.refusals, *message.splitlines()]))
            error_exit.print_error(f"\n{parser.prog}: error: ".join(lines), parser.prog, sys.stderr)
            parser.exit(error_exit.EXIT_CODE)

        parser._get_values = _get_values  # type: ignore[method-assign, assignment]
        parser.parse_known_args = parse_known_args  # type: ignore[method-assign]
        parser.parse_args = parse_args  # type: ignore[assignment]
        parser.error = error  # type: ignore[assignment]

    def _translate(self, words: Sequence[str]) -> None:
        device = platform.activate().name
        default = next(each for each in megatron_arguments.DEFAULTS if each.dest == "transformer_impl")
        self.translation = migration.translate(
            words, self.flags, device=device, transformer_engine=not default.is_missing(device)
        )

    def _refused_words(self) -> list[str]:
        return [word for step in self.translation.steps if step.outcome == "refused" for word in step.words]

    def read_yaml(self, values: Mapping[str, Any]) -> None:
        """Read MindSpeed's flags in YAML; notices for those without effect.

        Raises:
            OptionError: a key has another name here, or is unsupported.
        """
        words: list[str] = []
        for name, value in values.items():
            if isinstance(value, (bool, int, float, str, list)) and value is not False:
                given = value if isinstance(value, list) else [] if value is True else [value]
                words += [f"--{name.replace('_', '-')}", *map(str, given)]
        found = migration.translate(words, self.flags, device=platform.activate().name)
        steps = [each for each in found.steps if each.use.flag not in self.flags]
        wrong = [each.line for each in steps if each.outcome not in ("not needed", "skipped")]
        if wrong:
            raise OptionError(
                f"--yaml-cfg: MindSpeed's keys are not translated in a file, write what they mean: {'; '.join(wrong)}"
            )
        self.translation = replace(found, steps=tuple(steps))

    def notices(self) -> list[str]:
        ignored = [f"{line} (ignored: this script ignores unknown flags)" for line in self.translation.refusals]
        return [*self.translation.notices, *ignored]


def _add_arguments(parser: argparse.ArgumentParser, line: _CommandLine) -> None:
    version = megatron.version() or "0"
    line.collisions = add_arguments(parser, runtime.catalogue(), runtime.GENERAL, host_version=version)
    megatron_arguments.add_flags(parser)
    for action in parser._actions:  # a lone % in the help of 0.18 and 0.19 breaks `--help`
        if action.help and action.help is not argparse.SUPPRESS:
            try:
                action.help % {**vars(action), "prog": parser.prog}
            except (ValueError, TypeError, KeyError):
                action.help = action.help.replace("%", "%%")
    line.attach(parser)


def _after_parsing(args: Any, line: _CommandLine) -> None:
    if args is not line.namespace and line.namespace is not None:
        # A YAML file has replaced the command line's arguments.
        holders = megatron.argument_holders(args)
        for option in (*runtime.GENERAL, *runtime.catalogue().options()):
            is_there = any(hasattr(holder, option.dest) for holder in holders)
            if option.dest in line.explicit or not is_there:
                _set(holders, {option.dest: getattr(line.namespace, option.dest, option.default)})
        line.explicit.clear()
        line.read_yaml(_flat(holders))
    for change in _changes:
        change(args)


def _prepare(args: Any, defaults: Mapping[str, Any], line: _CommandLine) -> runtime.FeatureRequest:
    device = platform.activate().name
    notices = dict.fromkeys(line.notices(), "") | megatron_arguments.switch(args, device, line.explicit)
    restore_compile = megatron_arguments.disable_compile(args, device)
    if restore_compile is not None:
        _undo.append(restore_compile)
    flat = _flat(megatron.argument_holders(args))
    megatron_arguments.check_arguments(
        {**flat, **{name: each for name, each in defaults.items() if not flat.get(name)}}
    )
    return runtime.FeatureRequest(
        runtime.given_flags(flat),
        flat,
        frozenset(line.explicit),
        arguments={},
        without=line.collisions,
        notices=notices,
    )


def _validate(args: Any, defaults: Mapping[str, Any], validate: Callable[..., Any], line: _CommandLine) -> Any:
    """Set features' arguments, run Megatron's validation, apply features.

    If one does not apply to the result, restore and validate without it.
    """
    request = _prepare(args, defaults, line)
    earlier = [each for each in runtime.requests() if each.arguments is None]
    holders = megatron.argument_holders(args)
    before = [dict(vars(holder)) for holder in holders]
    while True:
        asked = runtime.with_arguments(request, earlier)
        hidden = megatron_arguments.hide(args)
        for values in (asked.arguments or {}).values():
            _set(holders, values)
        validated = validate(args, defaults)
        final = args if validated is None else validated
        asked = replace(asked, host_args=final)
        planned = runtime.plan_requests([*earlier, asked])
        lost = _inapplicable(planned[0], asked)
        if not lost:
            break
        request = replace(request, without={**request.without, **lost})
        for holder, values in zip(holders, before, strict=True):
            vars(holder).clear()
            vars(holder).update(values)
    active = runtime.apply_requests([*earlier, asked], planned)
    for dest in megatron_arguments.REFUSED:
        # `hide` has cleared it for the validation. It is on again if the feature of its name is, but not with an order
        # of the pipeline that delays weight gradients itself: Megatron's configuration refuses both.
        applied = active.plan.outcome(dest).status == "applied"
        applied = applied and not pipeline_orders.delays_weight_gradients(asked.flags)
        if applied or dest in hidden:
            _set(megatron.argument_holders(final), {dest: applied})
    runtime.show_report(active)
    return validated


def _inapplicable(plan: Plan, asked: runtime.FeatureRequest) -> dict[str, str]:
    outcomes = [plan.outcome(name) for name in asked.arguments or ()]
    return {each.feature.name: "; ".join(each.reasons) or "it is off" for each in outcomes if each.status != "applied"}


def _flat(holders: Sequence[Any]) -> dict[str, Any]:
    return {name: value for holder in reversed(holders) for name, value in vars(holder).items()}


def _set(holders: Sequence[Any], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        # Megatron's YAML route refuses duplicate names.
        for holder in [each for each in holders if hasattr(each, name)] or holders[:1]:
            setattr(holder, name, value)


# Hooks


def _features(line: _CommandLine) -> tuple[Feature, ...]:
    def around_add(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
        def add_megatron_arguments(parser: argparse.ArgumentParser) -> Any:
            parser = wrapped(parser)
            _add_arguments(parser, line)
            return parser

        return add_megatron_arguments

    def around_parse(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
        def parse_args(extra_args_provider: Any = None, ignore_unknown_args: bool = False) -> Any:
            args = wrapped(extra_args_provider, ignore_unknown_args)
            _after_parsing(args, line)
            return args

        return parse_args

    def around_validate(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
        def validate_args(args: Any, defaults: Any = {}) -> Any:  # noqa: B006  (Megatron's signature)
            return _validate(args, defaults, wrapped, line)

        return validate_args

    summary = "features by flag"
    return (
        megatron.without_flag(
            "arguments",
            summary,
            Override(megatron.ADD_ARGUMENTS, around_add),
            Around(megatron.PARSE_ARGS, around_parse),
            Around(megatron.VALIDATE_ARGS, around_validate),
        ),
        megatron.without_flag("yaml_arguments", summary, Around(megatron.VALIDATE_YAML, around_validate)),
    )


_hooks: list[megatron.ImportHook] = []
_changes: list[Callable[[Any], None]] = []
_undo: list[Callable[[], None]] = []


def before_validation(change: Callable[[Any], None]) -> None:
    _changes.append(change)


def install() -> None:
    """Hook Megatron's argument modules now or on import; idempotent."""
    if not _hooks:
        _hooks.extend(map(megatron.ImportHook, _features(_CommandLine())))


def remove() -> None:
    _changes.clear()
    while _hooks:
        _hooks.pop().remove()
    while _undo:
        _undo.pop()()


__all__ = ["before_validation", "install", "remove"]
