"""Defaults of a mesh for options that the user does not set.

In increasing precedence: built in, `[tool.meshbook]` of the nearest pyproject.toml, the nearest meshbook.toml, the
environment (`MESHBOOK_RANKS`, `MESHBOOK_ENGINE`, `MESHBOOK_END_ON_ERROR`, `MESHBOOK_LOG_MB`). An unknown key is an
error that lists the known ones.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from meshbook.errors import UsageError
from meshbook.host.cores import num_cores
from meshbook.host.gpus import count_free_gpus

# Below this, machines would be lost as soon as users hear that they do not answer, which is after 3.5 s.
MIN_LOST_AFTER_S = 5.0

# Seconds from when the supervisor counts a machine as lost, by its own checks, until ranks there may end by themselves.
MIN_LEASE_AFTER_LOSS_S = 5.0

# Seconds for which ranks wait for a supervisor on a machine that may sleep. Connections by ssh do not last longer:
# Linux gives up after 15 minutes (net.ipv4.tcp_retries2).
_SLEEP_S = 900.0

# What a cluster of meshbook.toml may say beside `on`, with examples: it is added to the address as an option.
CLUSTER_OPTIONS = {"python": "/opt/venv/bin/python", "before": "module load cuda"}


@dataclass(frozen=True)
class Defaults:
    """Values that `create_mesh()` uses for arguments that are not given.

    Attributes:
        ranks: number of ranks; None: one per visible GPU that nobody else uses, else 2 to 4 by cores.
        engine: "local".
        start_method: "fork" or "fresh".
        device: "auto", "cpu" or "cuda".
        orphan_ttl_s: seconds a mesh lives without clients.
        keep: whether the mesh outlives an orderly exit of the kernel.
        start_timeout_s: seconds that a mesh may take to start.
        end_on_error: whether ranks that wait in a collective for one that has left the cell are released.
        log_mb: megabytes (2**20 bytes) of ranks' output that each machine keeps on its disk, for `%mesh logs --grep`.
        lost_after_s: seconds without a word after which another machine's ranks count as lost.
        cut_off_ttl_s: seconds without a word from the supervisor after which ranks on another machine end; 0: see
            `lease_s`.
        clusters: by name, tables with the machines of each: `on = "ssh://gpu1,gpu2"`, and what may be an option of
            that address: `python = "/opt/venv/bin/python"`, `before = "module load cuda"`.
    """

    ranks: int | None = None
    engine: str = "local"
    start_method: str = "fork"
    device: str = "auto"
    orphan_ttl_s: float = 1800.0
    keep: bool = False
    start_timeout_s: float = 120.0
    end_on_error: bool = True
    log_mb: int = 256
    # A machine that is overloaded, is moved as a virtual machine or pages comes back; of one that is dead users have
    # heard. Precedents: torchrun 15 s (3 x 5 s), Ray 15 s and more (5 x 3 s), Kubernetes 40 s, Slurm 300 s.
    lost_after_s: float = 15.0
    cut_off_ttl_s: float = 0.0
    clusters: dict[str, dict[str, str]] = field(default_factory=dict)

    def lease_s(self) -> float:
        """Return for how many seconds ranks outlive the last word from their supervisor, on another machine.

        Not less than until it counts them as lost, nor much more: others may then be doing in their place what they do.
        """
        own = _SLEEP_S if _has_battery() else 2 * self.lost_after_s
        return self.cut_off_ttl_s or max(own, self.lost_after_s + MIN_LEASE_AFTER_LOSS_S)

    def num_ranks(self) -> int:
        if self.ranks is not None:
            return self.ranks
        return count_free_gpus() or min(4, max(2, num_cores()))


def _has_battery() -> bool:
    return any(Path("/sys/class/power_supply").glob("BAT*"))


def current_folder() -> Path:
    """Return this process's current folder.

    Raises:
        UsageError: it has been deleted.
    """
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise UsageError(
            "the folder that this process works in has been deleted. Change to one that exists (%cd ~ in a notebook, "
            "os.chdir in a script), then run this again"
        ) from None


def read_defaults(start: Path | None = None, environment: dict[str, str] | None = None) -> Defaults:
    """Return the defaults that apply in folder `start` (None: the current one).

    Raises:
        UsageError: a file or variable has an invalid setting; the message names it.
    """
    environment = dict(os.environ) if environment is None else environment
    found = Defaults()
    folder = (start or current_folder()).resolve()
    for name, table in (("pyproject.toml", "tool.meshbook"), ("meshbook.toml", "")):
        path = next((directory / name for directory in (folder, *folder.parents) if (directory / name).is_file()), None)
        if path is None:
            continue
        try:
            settings: dict[str, Any] = tomllib.loads(path.read_text())
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise UsageError(f"{path} cannot be read: {error}") from error
        if table:
            settings = settings.get("tool", {}).get("meshbook", {})
        found = _override(found, settings, str(path))
    from_environment: dict[str, Any] = {}
    if ranks := environment.get("MESHBOOK_RANKS"):
        if not ranks.isdecimal():
            raise UsageError(f"MESHBOOK_RANKS={ranks!r} is not a number of ranks; set it to 4, for example")
        from_environment["ranks"] = int(ranks)
    if engine := environment.get("MESHBOOK_ENGINE"):
        from_environment["engine"] = engine
    if end_on_error := environment.get("MESHBOOK_END_ON_ERROR"):
        if end_on_error not in ("0", "1"):
            raise UsageError(f"MESHBOOK_END_ON_ERROR={end_on_error!r} is neither 0 (off) nor 1 (on)")
        from_environment["end_on_error"] = end_on_error == "1"
    if log_mb := environment.get("MESHBOOK_LOG_MB"):
        if not log_mb.isdecimal():
            raise UsageError(f"MESHBOOK_LOG_MB={log_mb!r} is not a number of megabytes; set it to 256, for example")
        from_environment["log_mb"] = int(log_mb)
    return _override(found, from_environment, "the environment")


def _override(defaults: Defaults, settings: dict[str, Any], source: str) -> Defaults:
    known = {field.name for field in fields(Defaults)}
    for key, value in settings.items():
        if key not in known:
            raise UsageError(
                f"{source} sets {key!r}, which Meshbook does not know; it knows {', '.join(sorted(known))}"
            )
        expected = type(getattr(Defaults(ranks=1), key))
        if not isinstance(value, (int, float) if expected is float else expected) or (
            expected is not bool and isinstance(value, bool)
        ):
            raise UsageError(f"{source} sets {key} = {value!r}; a {expected.__name__} is wanted")
        if key == "clusters":
            _check_clusters(settings[key], source)
    return replace(defaults, **settings)


def _check_clusters(clusters: dict[str, Any], source: str) -> None:
    for name, table in clusters.items():
        is_table = isinstance(table, dict) and {"on"} <= table.keys() <= {"on", *CLUSTER_OPTIONS}
        if not is_table or not all(isinstance(value, str) for value in table.values()):
            options = "".join(f"\n{option} = {example!r}" for option, example in CLUSTER_OPTIONS.items())
            raise UsageError(
                f"{source} has a cluster {name!r} that is not written like this (of which the first is needed):\n"
                f'[clusters.{name}]\non = "ssh://gpu1,gpu2"{options}'
            )
