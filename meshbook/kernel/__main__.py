"""`python -m meshbook.kernel -f CONNECTION_FILE`: how a front end starts a Meshbook kernel."""

from __future__ import annotations

import os
import sys


def main() -> None:
    # `-m` puts the current folder first on the path, so a random.py beside the notebook would shadow the standard
    # library's before the kernel is up. IPython adds the folder again for the user's code.
    if sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # a warning of debugpy's, on the console's first lines
    from ipykernel.kernelapp import IPKernelApp

    from meshbook.kernel.app import MeshKernel

    IPKernelApp.launch_instance(kernel_class=MeshKernel)


if __name__ == "__main__":
    main()
