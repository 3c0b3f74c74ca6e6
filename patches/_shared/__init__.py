"""Helpers of several features; no feature is declared here."""
