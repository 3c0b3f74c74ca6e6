"""Where flags come in: our groups in Megatron's parser, MindSpeed's flags, and when Megatron's arguments are final.

Reaches four functions of `megatron.training`: `add_megatron_arguments` (our groups appear in `--help`),
`parse_args` (flags given beside a YAML file survive it), `validate_args` and `validate_yaml` (before: defaults that
demand an absent package; after: features). They exist in every supported release, and every route to training goes
through them, whether arguments come from the command line, from YAML or from a checkpoint.
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
    Collision,
    Feature,
    ImportHandle,
    OptionError,
    Override,
    Plan,
    Session,
    add_arguments,
    given_options,
    when_imported,
)
from mindspeed_lite.platform import megatron

from . import megatron_defaults, pipeline_orders, preflight


class _Parsed:
    """What the last parser run said; one object per installed hook."""

    def __init__(self) -> None:
        self.collisions: list[Collision] = []
        self.namespace: argparse.Namespace | None = None
        self.explicit: frozenset[str] = frozenset()
        self.translation = migration.Translation((), ())
        self.flags: frozenset[str] = frozenset()

    def read_yaml(self, values: Mapping[str, Any]) -> None:
        """Take the keys of a YAML file that are flags of MindSpeed's: left out with a notice, or one line for all.

        Raises:
            OptionError: a key asks for what has another name here, or is not served.
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
        """What became of MindSpeed's flags; refused ones get here where the script ignores unknown flags."""
        ignored = [f"{line} (ignored: this script ignores unknown flags)" for line in self.translation.refusals]
        return [*self.translation.notices, *ignored]


def _mend_help(parser: argparse.ArgumentParser) -> None:
    """Escape the help texts that argparse cannot format: a lone % in 0.18 and 0.19 makes `--help` itself fail."""
    for action in parser._actions:
        if action.help and action.help is not argparse.SUPPRESS:
            try:
                action.help % {**vars(action), "prog": parser.prog}
            except (ValueError, TypeError, KeyError):
                action.help = action.help.replace("%", "%%")


def _watch(parser: argparse.ArgumentParser, parsed: _Parsed) -> None:
    """Let this one parser read MindSpeed's flags, remember what it was given, and end with one line for each error."""
    parse_known = parser.parse_known_args

    def translated(args: Any) -> list[str]:
        words = sys.argv[1:] if args is None else list(args)
        parsed.flags = frozenset(parser._option_string_actions)
        device = platform.activate().name
        te = next(each.missing for each in megatron_defaults.DEFAULTS if each.dest == "transformer_impl")
        parsed.translation = migration.translate(
            words, parsed.flags, device=device, transformer_engine=te(device) is None
        )
        return list(parsed.translation.accepted)

    def parse_known_args(args: Any = None, namespace: Any = None) -> Any:
        words = translated(args)
        found, unknown = parse_known(words, namespace)
        parsed.namespace = found
        parsed.explicit = given_options(parser, words)
        file = getattr(found, "yaml_cfg", None)
        if file and not os.path.isfile(file):
            parser.error(f"argument --yaml-cfg: there is no file {file}")
        refused = [word for step in parsed.translation.steps if step.outcome == "refused" for word in step.words]
        return found, [*unknown, *refused]

    def parse_args(args: Any = None, namespace: Any = None) -> Any:
        found, unknown = parser.parse_known_args(args, namespace)
        refusals = parsed.translation.refusals
        if unknown:
            refused = sum(len(step.words) for step in parsed.translation.steps if step.outcome == "refused")
            left = unknown[: len(unknown) - refused]
            parser.error("\n".join([*refusals, *migration.unrecognized(left, parser._option_string_actions)]))
        return found

    def error(message: str) -> None:
        # Megatron's usage has 760 lines; --help shows it. All ranks have the same command line: one of them prints.
        lines = list(dict.fromkeys([*parsed.translation.refusals, *message.splitlines()]))
        error_exit.tell(f"\n{parser.prog}: error: ".join(lines), parser.prog, sys.stderr)
        parser.exit(error_exit.EXIT_CODE)

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]
    parser.parse_args = parse_args  # type: ignore[assignment]
    parser.error = error  # type: ignore[assignment]


def _hooks(parsed: _Parsed) -> tuple[Feature, Feature]:
    def around_add(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
        def add_megatron_arguments(parser: argparse.ArgumentParser) -> Any:
            parser = wrapped(parser)
            parsed.collisions = add_arguments(
                parser,
                runtime.catalogue(),
                runtime.GENERAL,
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
                for option in (*runtime.GENERAL, *runtime.catalogue().options()):
                    # A model's field stands a level down and may not stand twice.
                    having = [holder for holder in holders if hasattr(holder, option.dest)]
                    if option.dest in parsed.explicit or not having:
                        value = getattr(parsed.namespace, option.dest, option.default)
                        for holder in having or [args]:
                            setattr(holder, option.dest, value)
                parsed.explicit = frozenset()
                parsed.read_yaml(_flat(holders))
            for change in _changes:
                change(args)
            return args

        return parse_args

    def around_validate(wrapped: Callable[..., Any], session: Session) -> Callable[..., Any]:
        def validate_args(args: Any, defaults: Any = {}) -> Any:  # noqa: B006  (Megatron's signature)
            return _validate(args, lambda: wrapped(args, defaults), parsed)

        return validate_args

    command_line = megatron.always(
        "arguments",
        "flags in Megatron's parser, features after its validation",
        Override("megatron.training.arguments:add_megatron_arguments", around_add),
        Around("megatron.training.arguments:parse_args", around_parse),
        Around("megatron.training.arguments:validate_args", around_validate),
    )
    yaml = megatron.always(
        "yaml_arguments",
        "features after the validation of YAML arguments",
        Around("megatron.training.yaml_arguments:validate_yaml", around_validate),
    )
    return command_line, yaml


def _validate(args: Any, validate: Callable[[], Any], parsed: _Parsed) -> Any:
    """Megatron's validation with our arguments set before it, and the features put in force after it.

    What a feature sets goes into `args` before Megatron derives others from them. Should the feature not apply to what
    Megatron makes of them, they are put back and validated without it.
    """
    device = platform.activate().name
    notices = dict.fromkeys(parsed.notices(), "") | megatron_defaults.switch(args, device, parsed.explicit)
    restore_compile = megatron_defaults.disable_compile(args, device)
    if restore_compile is not None:
        _undo.append(restore_compile)
    holders = megatron.argument_holders(args)
    flat = _flat(holders)
    preflight.check(flat)
    request = runtime.FeatureRequest(
        runtime.given_flags(flat), flat, parsed.explicit, parsed.collisions, arguments={}, notices=notices
    )
    earlier = [each for each in runtime.requests() if each.arguments is None]
    before = [dict(vars(holder)) for holder in holders]
    while True:
        plan, request = _settled(earlier, request, flat)
        hidden = megatron_defaults.hide(args)
        for each in plan.applied:
            _set(holders, each.arguments)
        validated = validate()
        final = args if validated is None else validated
        request = replace(request, host_args=final)
        found, _ = runtime.plan_of([*earlier, request])
        lost = {
            each.feature.name: "; ".join(found.outcome(each.feature.name).reasons) or "it is off"
            for each in plan.applied
            if each.arguments and found.outcome(each.feature.name).status != "applied"
        }
        if not lost:
            break
        for holder, values in zip(holders, before, strict=True):
            vars(holder).clear()
            vars(holder).update(values)
        without = {**request.without, **lost}
        request = replace(request, host_args=flat, arguments={}, replaced={}, without=without)
    in_force = runtime.put_in_force([*earlier, request])
    for dest in megatron_defaults.REFUSED:
        # It is on where the feature of that name makes it work, asked for by name or not.
        applied = in_force.plan.outcome(dest).status == "applied"
        # An order of passes that asks for delayed gradients is none of Megatron's, whose configuration refuses them.
        applied = applied and not pipeline_orders.delays_weight_gradients(request.flags)
        if applied or dest in hidden:
            _set(megatron.argument_holders(final), {dest: applied})
    runtime.show_report(in_force)
    return validated


def _settled(
    earlier: Sequence[runtime.FeatureRequest], request: runtime.FeatureRequest, flat: Mapping[str, Any]
) -> tuple[Plan, runtime.FeatureRequest]:
    """The plan in which each feature is judged with the arguments that others set, and the request with all of them."""
    seen = [request.arguments]
    while True:
        plan, _ = runtime.plan_of([*earlier, request], may_skip=True)
        arguments = {each.feature.name: each.arguments for each in plan.applied if each.arguments}
        if arguments in seen:
            # Arguments that have come before are settled, or take turns.
            return runtime.plan_of([*earlier, request])[0], request
        seen.append(arguments)
        values = {name: value for each in arguments.values() for name, value in each.items()}
        replaced = {feature: {name: flat[name] for name in own if name in flat} for feature, own in arguments.items()}
        request = replace(request, host_args={**flat, **values}, arguments=arguments, replaced=replaced)


def _flat(holders: Sequence[Any]) -> dict[str, Any]:
    """Every argument by name, wherever a YAML file has it."""
    return {name: value for holder in reversed(holders) for name, value in vars(holder).items()}


def _set(holders: Sequence[Any], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        # Megatron's YAML route takes no name twice.
        for holder in [each for each in holders if hasattr(each, name)] or holders[:1]:
            setattr(holder, name, value)


_waiting: list[ImportHandle] = []
_applied: list[megatron.Placed] = []
_changes: list[Callable[[Any], None]] = []
_undo: list[Callable[[], None]] = []


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
        _applied.append(megatron.place(feature))

    return apply


def remove() -> None:
    """Take the hooks back."""
    _changes.clear()
    while _waiting:
        _waiting.pop().cancel()
    while _applied:
        _applied.pop().remove()
    while _undo:
        _undo.pop()()


__all__ = ["before_validation", "install", "remove"]
