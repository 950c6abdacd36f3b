"""The arguments of `%mesh start` and `%mesh restart`, and what they ask for."""

from __future__ import annotations

import argparse

from meshbook.controller.clusters import choose_machines
from meshbook.controller.config import read_defaults
from meshbook.controller.starting import choose_project
from meshbook.errors import MeshShapeError, UsageError
from meshbook.kernel.magic_command import argument
from meshbook.kernel.mesh_options import MeshOptions
from meshbook.mesh_axes import MeshAxes
from meshbook.selections import parse_axes

TTL_ARGUMENT = argument("--ttl", type=float)
MESH_ARGUMENTS = (
    argument("-n", dest="count", metavar="N"),
    argument("--axes"),
    argument("--engine"),
    argument("--name"),
    argument("--hosts", type=int),
    argument("--on"),
    argument("--nodes", type=int),
    argument("--per-node", type=int),
    argument("--sync", nargs="?", const="", metavar="PATH[,PATH]"),
    argument("--env", choices=("uv",)),
    argument("--fresh", action="store_true"),
    argument("--device"),
    argument("--no-end-on-error", action="store_true"),
    argument("--keep", action="store_true", default=None),
    TTL_ARGUMENT,
)


def mesh_options(options: argparse.Namespace) -> MeshOptions:
    """Return what the arguments ask for. Blocks if machines must be asked how many ranks they have room for."""
    axes = parse_axes(options.axes) if options.axes else None
    count, cluster = None, None
    if options.count is not None:
        if not options.count.isdecimal():
            raise UsageError(f"-n takes a number of ranks, not {options.count!r}. Write it like: %mesh start -n 4")
        count = MeshAxes.of(int(options.count)).size
        if axes is not None and axes.size != count:
            raise MeshShapeError(
                f"axes {axes} make {axes.size} ranks, but -n asks for {count}; leave -n out, or change an axis"
            )
    if options.on is not None:
        cluster = choose_machines(
            options.on,
            read_defaults(),
            nodes=options.nodes,
            gpus_per_node=options.per_node,
            axes=axes.axes if axes is not None else count,
        )
        axes = cluster.grid
    elif options.nodes is not None or options.per_node is not None:
        raise UsageError(
            "--nodes and --per-node are of several machines; say which with --on ssh://gpu1,gpu2, --on slurm://, "
            "--on ray://auto or --on monarch://slurm. To simulate them on this one: --hosts 2"
        )
    return MeshOptions(
        ranks=count,
        axes=axes,
        engine=options.engine if cluster is None else cluster.engine,
        on=None if cluster is None else cluster.on,
        num_hosts=options.hosts if cluster is None else cluster.num_hosts,
        start_method="fresh" if options.fresh else None,
        device=options.device,
        project=choose_project(
            False if options.sync is None else [path for path in options.sync.split(",") if path],
            uv=options.env == "uv",
        ),
        end_on_error=False if options.no_end_on_error else None,
        keep=options.keep,
        orphan_ttl_s=options.ttl,
    )
