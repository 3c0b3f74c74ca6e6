"""Declarations of features and patches: frozen data."""

from __future__ import annotations

import argparse
import importlib
import math
import pkgutil
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from .errors import CatalogueError, OptionError
from .target import parse

Numerics = Literal["bitwise", "ulp", "deviation"]
Function = Callable[..., Any]


def matches(specifier: str, version: str) -> bool:
    """Whether a range holds a version; a pre-release counts as its release."""
    return SpecifierSet(specifier).contains(Version(version).base_version)


def _check_range(owner: str, specifier: str) -> None:
    try:
        SpecifierSet(specifier)
    except InvalidSpecifier as error:
        raise ValueError(f"{owner}: `{specifier}` is not a version range such as `>=1.2,<2`.") from error


@dataclass(frozen=True)
class Option:
    """One flag; a switch if it has no type and default False.

    Attributes:
        type: class, or function whose ValueError lists valid values.
        upstream: PEP 440 range of host releases with this flag.
        name: dest, if the host uses the flag's.
        on: value of True in the Python API.
        least: smallest number allowed.
    """

    flag: str
    help: str = ""
    default: Any = False
    type: Callable[[str], Any] | None = None
    choices: Sequence[Any] | None = None
    nargs: str | None = None
    metavar: str | None = None
    upstream: str = ""
    name: str = ""
    on: Any = None
    least: float | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"--[A-Za-z][\w-]*", self.flag):
            raise ValueError(f"`{self.flag}` is not a long flag such as `--use-it`.")
        if self.type is bool or (self.default is True and self.type is None):
            raise ValueError(f"{self.flag}: a switch is off by default and untyped; name it for what it turns on.")
        if self.choices is not None:
            object.__setattr__(self, "choices", tuple(self.choices))
        _check_range(self.flag, self.upstream)

    @classmethod
    def count(cls, flag: str, help: str = "", default: int | None = None, least: int | None = 1) -> Option:
        """A flag of a whole number."""
        return cls(flag, help, default, int, metavar="N", least=least)

    @classmethod
    def amount(cls, flag: str, help: str, metavar: str) -> Option:
        """A flag of a number from 0 on, by default not given."""
        return cls(flag, help, None, float, metavar=metavar, least=0)

    @property
    def dest(self) -> str:
        return self.name or self.flag[2:].replace("-", "_")

    @property
    def is_switch(self) -> bool:
        return self.default is False and self.type is None and self.choices is None and self.nargs is None

    @property
    def convert(self) -> Callable[[str], Any]:
        if self.type is not None:
            return self.type
        is_number = isinstance(self.default, (int, float)) and not isinstance(self.default, bool)
        return type(self.default) if is_number else str

    def checked(self, value: Any) -> Any:
        """`value` as parsed by the flag, the default for None; raises OptionError."""
        if self.on is not None and isinstance(value, bool):
            value = self.on if value else None
        if value is None or (type(value) is type(self.default) and value == self.default):
            return self.default
        if self.is_switch:
            if not isinstance(value, bool):
                raise OptionError(f"{self.flag} is a switch and takes True or False, not {value!r}.")
            return value
        if self.nargs is None:
            return self._element(value)
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise OptionError(f"{self.flag} takes a list of values, not {value!r}.")
        return tuple(map(self._element, value))

    def _element(self, value: Any) -> Any:
        convert = self.convert
        try:
            if isinstance(value, str):
                value = convert(value)
            elif isinstance(convert, type) and (
                isinstance(value, bool) or not isinstance(value, (int, float) if convert is float else convert)
            ):
                raise ValueError
        except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
            raise OptionError(f"{self.flag} takes {self._values_text(error)}, not {value!r}.") from error
        if self.choices is not None and value not in self.choices:
            raise OptionError(f"{self.flag} takes {self._values_text()}, not {value!r}.")
        if self.least is not None and not self.least <= value < math.inf:
            raise OptionError(f"{self.flag} takes a number of at least {self.least}, not {value!r}.")
        return value

    def _values_text(self, error: Exception | None = None) -> str:
        if self.choices is not None:
            return f"one of {', '.join(map(str, self.choices))}"
        return _KINDS.get(self.convert) or str(error or "") or "another value"


_KINDS: Mapping[Any, str] = {str: "text", int: "a whole number", float: "a number"}


def given_flags(options: Iterable[Option], settings: Mapping[str, Any]) -> list[str]:
    """Flags that differ from their defaults, as on a command line."""
    found = []
    for option in options:
        value = settings.get(option.dest, option.default)
        if value != option.default and _text(value) != _text(option.default):
            found.append(option.flag if value is True else f"{option.flag} {_text(value)}")
    return found


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(_text, value))
    return str(getattr(value, "name", value))


class Settings(Mapping[str, Any]):
    """Read-only flag values by dest, also as attributes; lists become tuples."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    @classmethod
    def of(cls, options: Iterable[Option], source: Any) -> Settings:
        """Read options from a namespace or mapping, with defaults."""
        values = source if isinstance(source, Mapping) else vars(source)
        return cls({option.dest: option.checked(values.get(option.dest)) for option in options})

    def __getitem__(self, dest: str) -> Any:
        return self._values[dest]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getattr__(self, dest: str) -> Any:
        if dest.startswith("_") or dest not in self._values:
            raise AttributeError(f"no option of any feature has the name `{dest}`.")
        return self._values[dest]


class PartialArguments(dict[str, Any]):
    """Host arguments of which some are undecided: those without a key."""


@dataclass(frozen=True)
class Context:
    """Input of conditions.

    host_args: mapping or object, all of the host's arguments unless PartialArguments. explicit: those given by flag.
    replaced: by feature, arguments as they were before the feature set them; its own condition sees these (`of`).
    """

    settings: Settings
    device: str
    versions: Mapping[str, str]
    host_args: Any = None
    explicit: Collection[str] = frozenset()
    replaced: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    _own: Mapping[str, Any] = field(default_factory=dict)

    def of(self, feature: str) -> Context:
        return replace(self, _own=self.replaced.get(feature, {}))

    def decides(self, name: str) -> bool:
        """Whether `arg` is what the host will have."""
        is_partial = isinstance(self.host_args, PartialArguments)
        return self.host_args is not None and not (is_partial and name not in self.host_args)

    def arg(self, name: str, default: Any = None) -> Any:
        if name in self._own:
            return self._own[name]
        if isinstance(self.host_args, Mapping):
            return self.host_args.get(name, default)
        return getattr(self.host_args, name, default)


@dataclass(frozen=True, eq=False)
class Patch:
    """A replacement of one symbol; see the three kinds below.

    Attributes:
        target: "package.module:Class.attr".
        make: creates the replacement.
        versions: PEP 440 range of host releases that need the patch.
        reads: host attributes that must exist: "name" (target's class), "Class.name" (target's module) or
            "package.module:Class.name".
        relies_on: targets the code repeats or assumes; bodies are verified, and a release may lack one if a verified
            release does.
        order: smaller is closer to the original.
        by_name: match an override's parameters by name (`make_by_name`).
    """

    target: str
    make: Callable[..., Any]
    versions: str = ""
    reads: Sequence[str] = ()
    relies_on: Sequence[str] = ()
    order: int = 0
    by_name: bool = False
    kind: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name in ("reads", "relies_on"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"{self.target}: `{name}` is a sequence of names, not one text.")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        parse(self.target)
        _check_range(self.target, self.versions)


class Around(Patch):
    """Code around the target, which it always calls; verifies the signature.

    `make(wrapped, session)` returns the wrapper.
    """

    kind = "around"


class Override(Patch):
    """Code in place of the target; verifies signature and body.

    `make(wrapped, session)` returns a function for a function, else any value; it may call the original.
    """

    kind = "override"


class Provide(Patch):
    """A symbol that the host imports where it can; `make(session)` returns it."""

    kind = "provide"


def conflict_reasons(conflicting_args: Mapping[str, str], value_of: Callable[[str], Any]) -> list[str]:
    """Reasons of the host arguments that are set."""
    return [why for name, why in conflicting_args.items() if (value := value_of(name)) and value != "none"]


@dataclass(frozen=True)
class Relation:
    """Another feature, and why. unless: where a required one may have been skipped."""

    feature: str
    reason: str
    unless: Callable[[Context], bool] | None = None


@dataclass(frozen=True)
class Feature:
    """One feature that a user can turn on.

    Attributes:
        name: also of module, page and test.
        options: the first enables it unless `enabled` is given; by default a switch of the feature's name. Help that is
            empty is the summary.
        numerics: compared with the replaced path.
        condition: reasons against this model, device and layout.
        conflicting_args: host argument -> reason.
        not_auto: why auto leaves it off.
        arguments: host arguments set before validation.
        operators: names it calls.
        memory: why memory is not predicted; "" if the planner reads its flags.
        unsupported: range of host releases -> reason.
    """

    name: str
    summary: str
    numerics: Numerics
    patches: Sequence[Patch]
    options: Sequence[Option] = ()
    theme: str = ""
    condition: Callable[[Context], Sequence[str]] | None = None
    conflicting_args: Mapping[str, str] = field(default_factory=dict)
    enabled: Callable[[Settings], bool] | None = None
    requires: Sequence[Relation] = ()
    conflicts: Sequence[Relation] = ()
    not_auto: str = ""
    arguments: Callable[[Context], Mapping[str, Any]] | None = None
    operators: Sequence[str] = ()
    memory: str = ""
    unsupported: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("patches", "requires", "conflicts", "operators"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        options = self.options or ([Option(self.flag)] if self.enabled is None else [])
        object.__setattr__(self, "options", tuple(replace(each, help=each.help or self.summary) for each in options))
        for releases in self.unsupported:
            _check_range(self.label, releases)

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def label(self) -> str:
        flags = ", ".join(option.flag for option in self.options)
        return f"`{self.name}` ({flags or 'no flag'})"

    def patches_for(self, version: str) -> tuple[list[Patch], list[str]]:
        """Patches for a host release, or reasons against that release."""
        reasons = [why for releases, why in self.unsupported.items() if matches(releases, version)]
        return [each for each in self.patches if not reasons and matches(each.versions, version)], reasons

    def conflict_reasons(self, value_of: Callable[[str], Any]) -> list[str]:
        return conflict_reasons(self.conflicting_args, value_of)

    def is_enabled(self, settings: Settings) -> bool:
        """Raises OptionError for options given without the first."""
        if self.enabled is not None:
            return bool(self.enabled(settings))
        first, *others = self.options
        is_on = bool(settings.get(first.dest, first.default))
        if not is_on and (given := given_flags(others, settings)):
            raise OptionError(f"{' '.join(given)} has no effect without {first.flag}: add it.")
        return is_on


class Catalogue:
    """The features of a package, one per module."""

    def __init__(self, features: Iterable[Feature]) -> None:
        self._features = {each.name: each for each in sorted(features, key=lambda each: each.name)}
        self._options: dict[str, Option] = {}
        for feature in self:
            for option in feature.options:
                if self._options.setdefault(option.dest, option) != option:
                    raise CatalogueError(f"feature `{feature.name}` declares {option.flag} unlike another feature.")

    @classmethod
    def load(cls, package_name: str) -> Catalogue:
        package = importlib.import_module(package_name)
        found = []
        for info in pkgutil.iter_modules(package.__path__):
            if not info.name.startswith("_"):
                try:
                    found.append(importlib.import_module(f"{package_name}.{info.name}").FEATURE)
                except Exception as error:
                    where = f"`{info.name}.py` in {getattr(info.module_finder, 'path', package_name)}"
                    raise CatalogueError(f"{where} declares no feature ({type(error).__name__}: {error}).") from error
        return cls(found)

    def options(self) -> tuple[Option, ...]:
        return tuple(self._options[dest] for dest in sorted(self._options))

    def __getitem__(self, name: str) -> Feature:
        return self._features[name]

    def __contains__(self, name: object) -> bool:
        return name in self._features

    def __iter__(self) -> Iterator[Feature]:
        return iter(self._features.values())

    def __len__(self) -> int:
        return len(self._features)
