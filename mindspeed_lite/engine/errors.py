"""Errors of the engine; nothing has been changed when one is raised."""

from __future__ import annotations


class EngineError(Exception):
    """Base class of the engine's errors."""


class OptionError(EngineError, ValueError):
    """A flag has an invalid value."""


class TargetError(EngineError, ValueError):
    """A target names no patchable attribute."""


class FingerprintError(EngineError):
    """A target has no definition in the source."""


class CatalogueError(EngineError):
    """Feature declarations contradict each other."""


class PlanError(EngineError):
    """The requested features cannot be applied."""


class ConflictError(PlanError):
    """Two features exclude each other."""


class RequirementError(PlanError):
    """A feature needs another one that is off."""


class ApplyError(EngineError):
    """A patch of `feature` could not be applied."""

    def __init__(self, text: str, feature: str = "") -> None:
        super().__init__(text)
        self.feature = feature


class FallbackError(EngineError):
    """A feature fell back in strict mode."""


class VerifyError(EngineError):
    """A verified operator exceeds its numerics bound, in strict mode."""
