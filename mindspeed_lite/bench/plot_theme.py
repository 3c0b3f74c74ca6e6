"""The colours of a report's plots, for a light and for a dark page."""

from __future__ import annotations

from dataclasses import dataclass, field

from .wording import Json, dig, items, plain

# Okabe and Ito's colours first, which colour-blind readers can tell apart; lighter ones of the same hue for the dark.
_ARMS = (
    ("#0072b2", "#56a9e0"),
    ("#d55e00", "#ff8b4a"),
    ("#009e73", "#2fc79b"),
    ("#cc79a7", "#e8a3c9"),
    ("#b8860b", "#e8b93e"),
    ("#882255", "#d76a9c"),
    ("#44aa99", "#7fd6c8"),
    ("#332288", "#9d8ff0"),
)
_CATEGORIES = {
    "linear": ("#0072b2", "#3d92cc"),
    "attention": ("#d55e00", "#e8773a"),
    "norm": ("#56b4e9", "#8acdf3"),
    "activation": ("#009e73", "#23b489"),
    "rotary": ("#e0cb3c", "#ecdc6e"),
    "embedding": ("#cc79a7", "#dd97bd"),
    "moe": ("#882255", "#b04a7f"),
    "loss": ("#7b5b3a", "#a98258"),
    "optimizer": ("#e69f00", "#f0b23c"),
    "gradient accumulation and reduction": ("#332288", "#7a6bd0"),
    "communication exposed": ("#b22222", "#d95555"),
    "copies": ("#999933", "#b5b55a"),
    "other": ("#bbbbbb", "#8a8f98"),
}
_CONTENDERS = {"mindspeed_lite": 0, "torch.compile": 1}


@dataclass(frozen=True)
class Theme:
    """Colours of a light or a dark page."""

    dark: bool
    background: str
    text: str
    muted: str
    grid: str
    off: str
    rounding_baseline: str
    arms: dict[str, str] = field(default_factory=dict)

    def arm(self, name: str) -> str:
        return self.arms.get(name, self.off)

    def category(self, name: str) -> str:
        return _CATEGORIES.get(name, _CATEGORIES["other"])[self.dark]

    def contender(self, name: str, names: list[str]) -> str:
        """Ours and torch.compile have their own colours, torch is the neutral one, peers take the next."""
        if name == "torch":
            return self.off
        peers = [each for each in names if each != "torch" and each not in _CONTENDERS]
        place = _CONTENDERS[name] if name in _CONTENDERS else 2 + peers.index(name)
        return _ARMS[place % len(_ARMS)][self.dark]


def theme(report: Json, dark: bool) -> Theme:
    """The theme with a colour for every arm of this report, the same in every plot."""
    base = (
        Theme(True, "#16181d", "#e6e8ec", "#9aa1ac", "#333842", "#a0a6b0", "#c9ced6")
        if dark
        else Theme(False, "#ffffff", "#1c1f24", "#667080", "#e3e6ea", "#7d838c", "#4a4f57")
    )
    arms: dict[str, str] = {}
    place = 0
    for arm in items(report, "arms") or items(report, "comparisons"):
        name = plain(dig(arm, "name") or dig(arm, "arm")) or "?"
        role = dig(arm, "role")
        if role == "rounding_baseline" or name == "rounding_baseline":
            arms[name] = base.rounding_baseline
        elif role == "off" or name == "off":
            arms[name] = base.off
        else:
            arms[name] = _ARMS[place % len(_ARMS)][dark]
            place += 1
    return Theme(base.dark, base.background, base.text, base.muted, base.grid, base.off, base.rounding_baseline, arms)
