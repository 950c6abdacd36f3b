"""What `%mesh start` and `%mesh restart` ask for, and how a running mesh differs from it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshbook.controller.tables import describe_size
from meshbook.ids import format_ranks
from meshbook.mesh_axes import MeshAxes
from meshbook.wire.messages import MeshInfo, MeshSpec, ProjectSpec

_SPEC_FIELDS = ("engine", "on", "num_hosts", "start_method", "device", "end_on_error", "project")


@dataclass(frozen=True)
class MeshOptions:
    """The options of a mesh. None: not given.

    Attributes:
        ranks: how many; `axes` comes before it.
        engine, on, num_hosts, start_method, device, end_on_error: as `meshbook.create_mesh`.
        project: that goes to the machines.
        keep: it outlives the notebook's kernel, for `orphan_ttl_s`.
        orphan_ttl_s: seconds that it may live without any client.
    """

    ranks: int | None = None
    axes: MeshAxes | None = None
    engine: str | None = None
    on: str | None = None
    num_hosts: int | None = None
    start_method: str | None = None
    device: str | None = None
    end_on_error: bool | None = None
    project: ProjectSpec | None = None
    keep: bool | None = None
    orphan_ttl_s: float | None = None

    @property
    def grid(self) -> MeshAxes | None:
        """The axes that are asked for, by name or as a number of ranks."""
        return MeshAxes.of(self.ranks) if self.axes is None and self.ranks is not None else self.axes

    def spec_fields(self, old: MeshSpec | None = None) -> dict[str, Any]:
        """Return the given options as arguments of `make_spec`; for others those of an old mesh."""
        given = {name: value for name in _SPEC_FIELDS if (value := getattr(self, name)) is not None}
        if old is None:
            return given
        return {name: getattr(old, name) for name in (*_SPEC_FIELDS, "process_group", "torch")} | given

    def differences(self, info: MeshInfo) -> list[str]:
        """Return how a running mesh differs from these options, as clauses; empty if it is what they ask for."""
        spec, grid = info.spec, self.grid
        assert spec is not None
        found = []
        by_axes = self.axes is not None
        if grid is not None and (grid.axes != dict(spec.axes) if by_axes else grid.size != len(info.ranks)):
            asked_for = f"axes {grid}" if by_axes else str(grid.size)
            found.append(f"it has {describe_size(spec)}, and {asked_for} are asked for")
        for what, requested, actual in (
            ("engine", self.engine, spec.engine),
            ("address", self.on, spec.on or "this machine"),
            ("start method", self.start_method, spec.start_method),
            ("number of hosts", self.num_hosts, spec.num_hosts),
        ):
            if requested is not None and requested != actual:
                found.append(f"its {what} is {actual}, and {requested} is asked for")
        if self.end_on_error not in (None, spec.end_on_error):
            found.append(f"it has end_on_error={spec.end_on_error}, and {self.end_on_error} is asked for")
        if self.project not in (None, spec.project):
            found.append("its machines do not have this project, or not in this way, and --sync is asked for")
        kinds = {rank.device.partition(":")[0] for rank in info.ranks}
        if self.device not in (None, "auto", spec.device) and kinds != {self.device}:
            found.append(f"its ranks are on {' and '.join(sorted(kinds))}, and {self.device} is asked for")
        if lost := [rank.rank for rank in info.ranks if rank.state == "dead"]:
            found.append(f"of its ranks {format_ranks(lost)} {'is' if len(lost) == 1 else 'are'} gone")
        return found
