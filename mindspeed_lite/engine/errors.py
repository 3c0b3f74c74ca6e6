"""Every way the engine refuses; when one of these is raised, nothing has been changed."""

from __future__ import annotations


class EngineError(Exception):
    """Root of all errors of the engine."""


class OptionError(EngineError, ValueError):
    """A flag has a value it cannot have."""


class TargetError(EngineError, ValueError):
    """A target names no attribute that may be patched."""


class FingerprintError(EngineError):
    """A target has no definition in the source."""


class CatalogueError(EngineError):
    """The declarations of features contradict each other."""


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
    """A replaced operator is further from the original than its numerics class allows, in strict mode."""
