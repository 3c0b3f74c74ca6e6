"""One drawn call of an operator, as data: a text of its `cases.py`, and what a standing case does not have."""

from __future__ import annotations

import dataclasses
import json
import re

LAYOUTS = ("plain", "transposed", "sliced", "strided", "expanded")
VALUES = ("normal", "nan", "inf", "-inf", "large", "zero")
MODES = ("here", "forked", "fake", "compiled")


@dataclasses.dataclass(frozen=True)
class Call:
    """operator, text and dtype are those of a case.

    empty: the place of the size that is 0 instead, among the shape's sizes; or -1.
    layouts: of the inputs in order, again from the first when there are more inputs.
    values: what one element of the first input is, or `normal`.
    mode: where and how it is called; a forked process has one thread, as a DataLoader's workers have.
    """

    operator: str
    text: str
    dtype: str
    empty: int = -1
    layouts: tuple[str, ...] = ("plain",)
    values: str = "normal"
    threads: int = 1
    mode: str = "here"
    seed: int = 0

    def json(self) -> str:
        """Without what is as always."""
        own = dataclasses.asdict(self)
        default = {field.name: field.default for field in dataclasses.fields(self)}
        return json.dumps({name: value for name, value in own.items() if value != default[name]})

    @classmethod
    def of(cls, text: str) -> Call:
        """The call that `json` wrote."""
        own = json.loads(text)
        return cls(**{**own, "layouts": tuple(own.get("layouts", ("plain",)))})


def numbers(text: str) -> list[re.Match[str]]:
    """The sizes in a case's text; neither shares nor switches."""
    return list(re.finditer(r"(?<![\d.])[1-9]\d*(?![\d.])", text))


def kind(call: Call, text: str) -> str:
    """What tells findings apart: the operator and the words, not the figures."""
    return f"{call.operator}: {' '.join(word for word in text.split() if word.isalpha())}"
