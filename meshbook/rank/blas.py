"""Sets the number of threads of NumPy's OpenBLAS after it was loaded.

The fork server loads it with one thread, because a pool would be threads in the process that is forked. A rank then
sets its own number.
"""

from __future__ import annotations

import contextlib
import ctypes

# NumPy's own builds rename OpenBLAS's functions; those of distributions and conda do not.
_SETTER_NAMES = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)


def set_blas_threads(num_threads: int) -> bool:
    """Set the number of threads of every OpenBLAS in this process; return whether one was found."""
    found = False
    for path in _find_loaded_libraries("openblas"):
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(path)
            for name in _SETTER_NAMES:
                function = getattr(library, name, None)
                if function is not None:
                    function(ctypes.c_int(num_threads))
                    found = True
                    break
    return found


def _find_loaded_libraries(substring: str) -> set[str]:
    """Return the paths of loaded libraries whose file names contain `substring`."""
    try:
        with open("/proc/self/maps") as maps:
            files = {line.split(maxsplit=5)[5].strip() for line in maps if line.count("/")}
    except OSError:
        return set()
    return {file for file in files if substring in file.rpartition("/")[2]}
