"""Draws rows, pairs that have not been trained first; makes a row that fails as small as it fails."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

from mindspeed_lite import runtime
from mindspeed_lite.engine import Context, EngineError, Settings, make_plan
from mindspeed_lite.platform.megatron import HOST
from tests.harness.feature_layouts import emulated_devices
from tools.pairs.rows import (
    DELAYS,
    DESTS,
    EXCLUSIVE,
    FUSES,
    LATENT,
    LAYOUTS,
    NEEDS_EXPERTS,
    ONLY,
    OPTIONS,
    SPLITS,
    TOKENS,
    Row,
    flags_of,
    name_of,
)
from tools.pairs.train import Bench, Run

# Rows that one layout with its options has in turn: what they are compared with is trained once.
ROWS = 3


@contextlib.contextmanager
def _devices() -> Iterator[None]:
    """As if the device had what the script puts in its place."""
    with emulated_devices(), mock.patch("mindspeed_lite.patches.moe_alltoall_mc2._why_not_here", lambda device: []):
        yield


def why_not(row: Row, arguments: dict[str, Any], release: str) -> str:
    """Why features do not apply together in a training with these arguments of Megatron's; "" if they do."""
    flags = {**{dest: arguments[dest] for dest in DESTS if dest in arguments}, **flags_of(row.features)}
    explicit = {word[2:].replace("-", "_") for word in row.base.arguments if word.startswith("--")}
    try:
        settings = Settings.of(DESTS.values(), flags)
        context = Context(settings, "cpu", {HOST: release}, SimpleNamespace(**{**arguments, **flags}), explicit)
        with _devices():
            make_plan(runtime.catalogue(), context, host_version=release, fingerprints=None, strict=True)
    except EngineError as error:
        return str(error)
    return ""


class Drawn:
    """Draws rows, first those with pairs that have not been trained; knows what was."""

    def __init__(self, seed: int, bench: Bench) -> None:
        self.chance, self.bench = random.Random(seed), bench
        self.trained: Counter[frozenset[str]] = Counter()
        #: What fails together, of which one finding is enough; and what is refused or cannot be trained at all.
        self.known: list[frozenset[str]] = []
        self._base = Row("single")
        self._rows = 0

    def is_known(self, row: Row) -> bool:
        names = frozenset(map(name_of, row.tokens))
        return any(each <= row.tokens or each <= names for each in self.known)

    def note(self, row: Row, applied: frozenset[str]) -> None:
        """Count the pairs of a row that was trained."""
        others = [row.layout, *map(name_of, row.options)]
        for pair in itertools.combinations(sorted({*others, *applied}), 2):
            self.trained[frozenset(pair)] += 1

    def _weight(self, names: Iterable[str], name: str) -> float:
        """How many pairs with it are new; those that are trained often count against it."""
        return sum(1 / (1 + self.trained[frozenset((name, each))]) for each in names) + self.chance.random()

    def base(self) -> Row:
        """A layout and options, with the features that they need."""
        while True:
            layout = min(LAYOUTS, key=lambda each: (self.trained[frozenset((each,))], self.chance.random()))
            self.trained[frozenset((layout,))] += 1
            # Most numbers are told apart in float32.
            options = ["fp32"] if self.chance.random() < 0.3 else []
            for _ in range(self.chance.choice((0, 1, 1, 2, 2, 3))):
                names = [layout, *map(name_of, options)]
                left = [
                    each
                    for each in OPTIONS
                    if name_of(each) not in names and each != "by_name" and layout in ONLY.get(each, LAYOUTS)
                ]
                options.append(max(left, key=lambda each: self._weight(names, name_of(each))))
            if layout == "pp2" and self.chance.random() < 0.3:
                options.append("by_name")
            if any(name_of(each) in NEEDS_EXPERTS for each in options) and "ep2" not in layout:
                options = ["experts", *(each for each in options if each != "experts")]
            always = [LATENT] if "mla" in options else []
            if layout == "cp2":
                always.append(self.chance.choice([each for each in TOKENS if TOKENS[each] == SPLITS]))
            row = Row(layout, tuple(options), tuple(always))
            own = frozenset(map(name_of, row.tokens))
            if not any(len(each & own) > 1 for each in EXCLUSIVE) and not self.is_known(row):
                return row

    def row(self) -> Row:
        """The next row; one without features to add where its layout and options are not trained by Megatron."""
        while True:
            if self._rows % ROWS == 0 or self.is_known(self._base):
                self._base = self.base()
                self._rows = 0
            self._rows += 1
            run = self.bench.run(self._base)
            row = self._base if run.kind else self._filled(self._base, run)
            if run.kind or len(row.features) > len(row.always):
                return row
            self._rows = 0

    def _filled(self, base: Row, run: Run) -> Row:
        chosen, most = [*base.features], self.chance.choice((2, 3, 4, 5, 6, 8))
        left = [each for each in TOKENS if TOKENS[each] != SPLITS]
        self.chance.shuffle(left)
        while left and len(chosen) < most:
            names = [base.layout, *map(name_of, base.options), *map(name_of, chosen)]
            left.sort(key=lambda each: -self._weight(names, TOKENS[each]))
            token = left.pop(0)
            more = [*self._required(token, chosen), token]
            together = base.having([*chosen, *more])
            if (
                (TOKENS[token] != "schedules_method" or "by_name" in base.options)
                and len({*map(name_of, together.features)}) == len(together.features)
                and not self.is_known(together)
                and not why_not(together, run.arguments, self.bench.version)
            ):
                chosen += more
        return base.having(chosen)

    def _required(self, token: str, chosen: Sequence[str]) -> list[str]:
        """What a feature requires and what of it has neither been chosen nor is turned on by its own flags."""
        settings = Settings.of(DESTS.values(), flags_of([*chosen, token]))
        features = runtime.catalogue()
        needed = [each.feature for each in features[TOKENS[token]].requires]
        needed += [FUSES] * token.startswith(DELAYS)
        missing = [each for each in needed if not features[each].is_enabled(settings)]
        return [self.chance.choice([each for each in TOKENS if TOKENS[each] == name]) for name in missing]


def smallest(row: Row, is_same: Callable[[Row], bool]) -> Row:
    """The row without all that it fails without, by `is_same(row)`."""
    if row.layout != "single" and is_same(Row("single", row.options, row.features)):
        row = Row("single", row.options, row.features)
    for token in [*row.features, *row.options]:
        smaller = row.without(token)
        if is_same(smaller):
            row = smaller
    return row
