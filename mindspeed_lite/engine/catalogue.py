"""The features of a package, one per module."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator

from .errors import CatalogueError
from .feature import Feature, Option


class Catalogue:
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
