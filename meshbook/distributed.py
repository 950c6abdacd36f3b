"""`from meshbook.distributed import Mesh`: `meshbook.Mesh`, where users of `torch.distributed` look for it."""

from __future__ import annotations

from meshbook.controller.mesh import Mesh

__all__ = ["Mesh"]
