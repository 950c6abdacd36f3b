"""The driver process of a mesh on Ray (`engines/ray_main`)."""

from __future__ import annotations

import os
from pathlib import Path

from meshbook.engines.driver import LauncherDriver


class RayDriver(LauncherDriver):
    """A process with a connection to a Ray cluster."""

    launcher = "Ray"
    module = "meshbook.engines.ray_main"
    explanations = (
        ("No module named 'ray'",
         "there is no Ray for {python}",
         "install the version that the cluster has: {python} -m pip install ray==…"),
        ("Version mismatch",
         "Ray or Python here is another than the cluster's",
         "start the notebook from an environment with the cluster's versions: pip install ray==…, in a Python of its "
         "version, the last digit too"),
        ("Could not find any running Ray instance",
         "no Ray runs on this machine",
         "start the notebook on a node of the cluster, such as the head; or start one: ray start --head; or ray://local"),
        ("AuthenticationError",
         "Ray's cluster wants its token",
         "give the notebook RAY_AUTH_MODE=token and the token of the cluster: RAY_AUTH_TOKEN, or ~/.ray/auth_token"),
        ("cannot be reached",
         "Ray's head does not answer",
         "look at its address: that of GCS, port 6379 unless `ray start --port` says another (not Ray Client's 10001)"),
        ("No node info found",
         "this machine is no node of that cluster",
         "start the notebook on a node of it; one without work for Ray is one too: ray start --address=… --num-cpus=0"),
    )  # fmt: skip

    def _environment(self) -> dict[str, str]:
        path = [quick_imports(self._folder), os.environ.get("PYTHONPATH")]
        return {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def quick_imports(folder: Path) -> str:
    """Return a folder in `folder` for PYTHONPATH that makes `import ray` quick where Jupyter is installed too.

    Ray imports jsonschema, which imports rfc3987_syntax if it is there: that compiles a grammar, 2.4 of 3.5 s, to check
    URLs that Ray does not have. Each process of a Ray pays it, and on a busy machine a node gives up waiting for them.
    """
    found = folder / "quick"
    found.mkdir(exist_ok=True)
    (found / "rfc3987_syntax.py").write_text("raise ImportError\n")
    return str(found)
