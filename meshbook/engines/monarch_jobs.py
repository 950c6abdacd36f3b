"""Monarch jobs as a mesh's address names them: made here, or by a program of the user's."""

from __future__ import annotations

import importlib.util
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from monarch._src.job.job import LoginJob, SSHJob  # they have no public names
from monarch.job import JobTrait, LocalJob, ProcessJob, SlurmJob, job_loads

from meshbook.engines.driver_main import Advised
from meshbook.engines.driver_messages import AllocateJob
from meshbook.engines.slurm_job import JobState, run_slurm
from meshbook.errors import StartError

# By which name a user's program is imported, here and wherever its job is unpickled.
_MODULE = "meshbook_monarch_job"
_MESH = "hosts"
# What the name of a SlurmJob made here begins with; Monarch does not tell its number.
_SLURM_NAME = f"meshbook-{secrets.token_hex(4)}"


def make_job(wanted: AllocateJob) -> JobTrait:
    """Return the job. Nothing is started yet, unless a user's program does.

    Raises:
        Advised: there is no such job.
    """
    if wanted.file:
        return _job_of(wanted.file, wanted.name)
    options: dict[str, Any] = {
        name: int(value) if value.isdecimal() else {"yes": True, "no": False}.get(value, value)
        for name, value in wanted.options.items()
        if name != "mesh"
    }
    return _MAKERS[wanted.kind](wanted.num_hosts, options)


def choose_hosts(state: Any, wanted: AllocateJob) -> Any:
    """Return the mesh of hosts that is used, with one dimension. Raises Advised."""
    meshes = state._hosts  # a JobState has no other list of its meshes
    known = ", ".join(sorted(meshes))
    name = wanted.options.get("mesh") or (next(iter(meshes)) if len(meshes) == 1 else "")
    if name not in meshes:
        what = f"has no mesh {name!r}" if name else f"has {len(meshes)} meshes of hosts"
        raise Advised(f"the job {what} ({known})", f"name one of them: monarch:{wanted.file}:{wanted.name}?mesh=…")
    hosts = meshes[name].flatten(_MESH)
    if hosts.size(_MESH) < wanted.num_hosts:
        raise Advised(
            f"{wanted.num_hosts} nodes are asked for, and the job's mesh {name!r} has {hosts.size(_MESH)}",
            f"ask for --nodes {hosts.size(_MESH)}, or give the job more hosts",
        )
    return hosts


def queue_state() -> str:
    """Return what Slurm says of a SlurmJob made here: "PENDING (Priority), starts about 14:07"; "": nothing. Blocks."""
    try:
        done = run_slurm("squeue", "-h", "-u", str(os.getuid()), "-o", "%j|%T|%r|%N|%S")
    except StartError:
        return ""
    jobs = [line.partition("|") for line in done.stdout.splitlines()]
    return next((JobState.parse(said).describe() for name, _, said in jobs if name.startswith(_SLURM_NAME)), "")


def ended_login(job: JobTrait | None, node: int) -> str | None:
    """Return the host of an SSHJob made here if its ssh has ended, for which Monarch waits a minute; else None."""
    if not isinstance(job, LoginJob):
        return None
    host = job._meshes[_MESH][node]
    ended = os.waitid(os.P_PID, job._host_to_pid[host].pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return host if ended is not None else None


def load_job(data: bytes, file: str) -> JobTrait:
    """Return a job that was pickled by another process of this machine, with the program that its class may be of."""
    if file:
        _import(file)
    return job_loads(data)


def _job_of(file: str, name: str) -> JobTrait:
    try:
        module = _import(file)
    except OSError as error:
        raise Advised(f"{file} cannot be read ({error.strerror})", "look at its path") from error
    except (Exception, SystemExit) as error:
        raise Advised(
            f"{file} does not import ({type(error).__name__}: {error})", f"see that this works: {sys.executable} {file}"
        ) from error
    job = getattr(module, name, None)
    if isinstance(job, JobTrait):
        return job
    jobs = [other for other, value in vars(module).items() if isinstance(value, JobTrait)]
    what = f"{name!r} in {file} is a {type(job).__name__}" if hasattr(module, name) else f"{file} has no {name!r}"
    advice = f"it has {', '.join(jobs)}" if jobs else f"make one there: {name} = ProcessJob({{'hosts': 2}})"
    raise Advised(f"{what}, and no Monarch job (monarch.job.JobTrait)", advice)


def _import(file: str) -> Any:
    spec = importlib.util.spec_from_file_location(_MODULE, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module
    sys.path.append(str(Path(file).parent))
    spec.loader.exec_module(module)
    return module


def _process_job(num_hosts: int, options: dict[str, Any]) -> JobTrait:
    return ProcessJob({_MESH: num_hosts})


def _local_job(num_hosts: int, options: dict[str, Any]) -> JobTrait:
    return LocalJob([_MESH])


def _ssh_job(num_hosts: int, options: dict[str, Any]) -> JobTrait:
    names = str(options.pop("hosts")).split(",")
    # With a terminal, for whose end a worker ends: SSHJob itself ends only the ssh here.
    args = ["-tt", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5"]
    job = SSHJob(options.pop("python", sys.executable), args, **options)
    job.add_mesh(_MESH, names[:num_hosts])
    return job


def _slurm_job(num_hosts: int, options: dict[str, Any]) -> JobTrait:
    python = options.pop("python", sys.executable)
    return SlurmJob({_MESH: num_hosts}, python_exe=python, job_name=_SLURM_NAME, **options)


def _kubernetes_job(num_hosts: int, options: dict[str, Any]) -> JobTrait:
    from monarch.job.kubernetes import ImageSpec, KubeConfig, KubernetesJob

    options.pop("python", None)
    image, gpus, path = options.pop("image", None), options.pop("gpus_per_node", 0), options.pop("kubeconfig", None)
    pods: dict[str, Any] = {name: options.pop(name) for name in ("label_selector", "port") if name in options}
    if image is not None:
        pods["image_spec"] = ImageSpec(str(image), {"nvidia.com/gpu": gpus} if gpus else None)
    job = KubernetesJob(kubeconfig=KubeConfig.from_path(path) if path else None, **options)
    job.add_mesh(f"meshbook{secrets.token_hex(4)}", num_hosts, **pods)  # its name in the cluster
    return job


_MAKERS: dict[str, Callable[[int, dict[str, Any]], JobTrait]] = {
    "process": _process_job,
    "local": _local_job,
    "ssh": _ssh_job,
    "slurm": _slurm_job,
    "kubernetes": _kubernetes_job,
}
