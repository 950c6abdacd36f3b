"""The driver process of a mesh on Monarch (`engines/monarch_main`)."""

from __future__ import annotations

import os

from meshbook.engines.driver import LauncherDriver

# Monarch's own timers, unless the user has set them. That a process has ended is heard at once instead of within 10 s;
# whether a machine that is silent is lost, the mesh's own beats say (`lost_after_s`).
_TIMERS = {
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "1s",
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "10m",
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "10m",
}


class MonarchDriver(LauncherDriver):
    """A process that is the client of a Monarch job."""

    launcher = "Monarch"
    module = "meshbook.engines.monarch_main"
    explanations = (
        ("No module named 'monarch'",
         "there is no Monarch for {python}",
         "install it: {python} -m pip install 'meshbook[monarch]'"),
        ("install kubernetes",
         "Monarch's KubernetesJob needs Kubernetes' Python client",
         "install it: {python} -m pip install kubernetes"),
        ("in-cluster Kubernetes config",
         "this machine is no pod of a Kubernetes cluster",
         "name a kubeconfig: monarch://kubernetes?kubeconfig=~/.kube/config&…; or start the notebook in a pod"),
        ("'sbatch'",
         "there is no Slurm on this machine",
         "start the notebook on a machine from which jobs are submitted, such as the login node"),
        ("Failed to submit SLURM job",
         "Slurm does not take Monarch's job",
         "`sinfo` lists the partitions, and `sacctmgr show associations user=$USER` the accounts"),
        ("SLURM job",
         "Monarch's job has failed in Slurm",
         "see its slurm_*.err: in the current folder, or that of log_dir=…, which must be there on all nodes"),
        ("'str' object has no attribute 'get'",
         "Monarch cannot read what `squeue --json` of this Slurm writes, as that of Slurm 22.05",
         "use slurm://, which needs no Monarch"),
    )  # fmt: skip

    def _environment(self) -> dict[str, str]:
        return {name: os.environ.get(name, value) for name, value in _TIMERS.items()}
