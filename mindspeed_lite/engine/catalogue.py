"""Finds the features: every module of one package declares FEATURE and is named like it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator

from .errors import CatalogueError
from .feature import Feature, Option


class Catalogue:
    """Features by name, in the order of their names."""

    def __init__(self, features: Iterable[Feature]) -> None:
        self._features: dict[str, Feature] = {}
        self._options: dict[str, tuple[Option, str]] = {}
        for feature in sorted(features, key=lambda each: each.name):
            if feature.name in self._features:
                raise CatalogueError(f"feature `{feature.name}` is declared twice; rename one.")
            self._features[feature.name] = feature
            for option in feature.options:
                known, owner = self._options.setdefault(option.dest, (option, feature.name))
                if known != option:
                    raise CatalogueError(
                        f"features `{owner}` and `{feature.name}` declare {option.flag} differently; "
                        "share one Option or rename the flag."
                    )

    @classmethod
    def load(cls, package_name: str) -> Catalogue:
        """Import every module of a package whose name has no leading underscore, and take its FEATURE."""
        package = importlib.import_module(package_name)
        found: dict[str, Feature] = {}
        # A package mapped in from another folder is not seen from its parent, so its own path counts.
        folders = dict.fromkeys(package.__path__)
        for info in (each for folder in folders for each in pkgutil.iter_modules([folder])):
            if info.name.startswith("_"):
                continue
            where = f"`{info.name}.py` in {getattr(info.module_finder, 'path', package_name)}"
            if info.name in found:
                raise CatalogueError(f"{where}: another folder has a module of this name.")
            try:
                module = importlib.import_module(f"{package_name}.{info.name}")
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                raise CatalogueError(f"{where} cannot be imported ({problem}).") from error
            feature = getattr(module, "FEATURE", None)
            if not isinstance(feature, Feature):
                raise CatalogueError(f"{where} declares no FEATURE; without one, call it `_{info.name}.py`.")
            if feature.name != info.name:
                raise CatalogueError(f"{where} declares feature `{feature.name}`; name both alike.")
            found[info.name] = feature
        catalogue = cls(found.values())
        for feature in catalogue:
            for relation in (*feature.requires, *feature.conflicts):
                if relation.feature not in found:
                    unknown = f"names `{relation.feature}`, which does not exist"
                    raise CatalogueError(f"feature `{feature.name}` {unknown}; correct the name.")
        return catalogue

    def options(self) -> tuple[Option, ...]:
        """Every flag once, sorted by dest."""
        return tuple(self._options[dest][0] for dest in sorted(self._options))

    def __getitem__(self, name: str) -> Feature:
        return self._features[name]

    def __contains__(self, name: object) -> bool:
        return name in self._features

    def __iter__(self) -> Iterator[Feature]:
        return iter(self._features.values())

    def __len__(self) -> int:
        return len(self._features)
