"""Swaps attributes of a package it does not own, by declaration, and takes every swap back.

The package being patched is called the host; nothing here knows which one it is. In reading order:

feature.py       the language patches are written in: Feature, Option, Replace, Wrap, Provide
target.py        "pkg.mod:Class.attr" -> who defines it, what stands there, who else holds it, its signature
fingerprints.py  what targets look like in each release of the host; the verdict on the one here
plan.py          features + settings + versions -> ordered steps; every skip with its reasons; conflicts raise
transaction.py   all steps or none; undo by identity
session.py       what a running patch may ask for; fallbacks are said once
report.py        what was swapped, what not and why, as data, JSON and text
catalogue.py     finds the features of a package
options.py       their flags in the host's argument parser
hooks.py         waits for a module to be imported
errors.py        every way to refuse
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .catalogue import Catalogue
from .errors import (
    ApplyError,
    CatalogueError,
    ConflictError,
    EngineError,
    FallbackError,
    FingerprintError,
    OptionError,
    PlanError,
    RequirementError,
    TargetError,
    UndoError,
    VerifyError,
)
from .feature import Context, Feature, Option, Patch, Provide, Relation, Replace, Settings, Wrap, matches
from .hooks import ImportHandle, when_imported
from .options import Collision, add_arguments
from .plan import Outcome, Plan, Step, make_plan
from .report import Entry, Fallback, PatchEntry, Report, Verification
from .session import Session
from .target import Target, resolve
from .transaction import Transaction

if TYPE_CHECKING:
    from .fingerprints import Fingerprint, Table, fingerprint_live, fingerprint_source

__all__ = [
    "ApplyError",
    "Catalogue",
    "CatalogueError",
    "Collision",
    "ConflictError",
    "Context",
    "EngineError",
    "Entry",
    "Fallback",
    "FallbackError",
    "Feature",
    "Fingerprint",
    "FingerprintError",
    "ImportHandle",
    "Option",
    "OptionError",
    "Outcome",
    "Patch",
    "PatchEntry",
    "Plan",
    "PlanError",
    "Provide",
    "Relation",
    "Replace",
    "Report",
    "RequirementError",
    "Session",
    "Settings",
    "Step",
    "Table",
    "Target",
    "TargetError",
    "Transaction",
    "UndoError",
    "Verification",
    "VerifyError",
    "Wrap",
    "add_arguments",
    "fingerprint_live",
    "fingerprint_source",
    "make_plan",
    "matches",
    "resolve",
    "when_imported",
]


def __getattr__(name: str) -> Any:
    # fingerprints.py runs as `python -m`, which complains of a module that its package has imported.
    if name in ("Fingerprint", "Table", "fingerprint_live", "fingerprint_source"):
        from . import fingerprints

        return getattr(fingerprints, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
