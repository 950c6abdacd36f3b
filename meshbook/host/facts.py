"""What this machine says of itself before ranks start on it: versions, cores, memory, GPUs. Does not import torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import sys
from pathlib import Path
from typing import Any

import psutil

from meshbook.clock import SystemClock
from meshbook.host.cores import num_cores
from meshbook.host.gpus import Nvml
from meshbook.version import __version__
from meshbook.wire.messages import GpuFacts, MachineFacts
from meshbook.wire.regions import machine_id


def gather_facts(address: str = "127.0.0.1") -> MachineFacts:
    """Return the facts of this machine. Blocks for a moment: it reads the metadata of packages and asks NVML."""
    return MachineFacts(
        machine=machine_id(),
        hostname=socket.gethostname(),
        address=address,
        executable=sys.executable,
        meshbook=__version__,
        python=platform.python_version(),
        torch=_installed("torch"),
        nccl=next(filter(None, map(_installed, ("nvidia-nccl-cu13", "nvidia-nccl-cu12"))), None),
        driver=_driver_version(),
        num_cpus=num_cores(),
        free_memory_bytes=psutil.virtual_memory().available,
        wall_time=SystemClock().wall(),
        gpus=_gpus(),
    )


def own_address(peers: tuple[str, ...], launcher: str = "") -> str:
    """Return the address by which machines with these addresses reach this one.

    That of the interface which the system chooses for the way to them: right on a machine with many networks, and
    whatever /etc/hosts says its name is. Nothing is sent.
    """
    for peer in peers:
        address = address_towards(peer)
        if address is not None and address != peer:  # else that peer is this machine
            return address
    return launch_address(launcher)


def address_towards(peer: str) -> str | None:
    """Return this machine's address on the way to a peer; the peer's if it is this machine. None: there is no way."""
    with socket.socket(socket.AF_INET6 if ":" in peer else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, 9))
        except OSError:
            return None
        address: str = probe.getsockname()[0]
        return address


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with an address of this machine, "eth0"; None: loopback, or none."""
    interfaces: dict[str, list[Any]] = psutil.net_if_addrs()
    names = (name for name, found in interfaces.items() if any(one.address == address for one in found))
    return next((name for name in names if name != "lo"), None)


def launch_address(launcher: str = "") -> str:
    """Return this machine's address on the way to who started this process; if there is no way, any of its own.

    Args:
        launcher: that machine's address; "": the one that ssh or srun has left in the environment.
    """
    words = os.environ.get("SSH_CONNECTION", "").split()
    if len(words) == 4 and not launcher:
        return words[2]
    launcher = launcher or os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    return (address_towards(launcher) if launcher else None) or _first_address()


def _first_address() -> str:
    """Return the IPv4 address of this machine's first network interface; loopback's if it has none."""
    interfaces: dict[str, list[Any]] = psutil.net_if_addrs()
    found = (one for name, addresses in interfaces.items() if name != "lo" for one in addresses)
    return next((one.address for one in found if one.family == socket.AF_INET), "127.0.0.1")


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver_version() -> str | None:
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return None


def _gpus() -> tuple[GpuFacts, ...]:
    nvml = Nvml.load() if Path("/dev/nvidiactl").exists() else None
    if nvml is None:
        return ()
    found = []
    for uuid in nvml.uuids():
        sample = nvml.sample(uuid)
        if sample is not None:
            found.append(
                GpuFacts(
                    nvml.name(uuid), sample.total_bytes, sample.total_bytes - sample.used_bytes, nvml.other_user(uuid)
                )
            )
    return tuple(found)
