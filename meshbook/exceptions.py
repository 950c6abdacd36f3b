"""Monarch's names for errors, so that programs written for it can catch them."""

from __future__ import annotations

from meshbook.errors import RankLost

DeviceMeshError = RankLost

__all__ = ["DeviceMeshError"]
