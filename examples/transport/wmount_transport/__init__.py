"""Reads a gds_export directory whose weights are encoded for transport, and falls back to the plain one with a reason."""

from .loader import Loader
from .manifest import Invalid, Manifest
from .report import Report

__all__ = ["Invalid", "Loader", "Manifest", "Report"]
