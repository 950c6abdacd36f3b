"""Monarch's names for errors, so that programs written for it find what they catch."""

from __future__ import annotations

from meshbook.errors import RankLost

DeviceMeshError = RankLost

__all__ = ["DeviceMeshError"]
