"""How many threads NumPy's OpenBLAS uses, changed after it was loaded.

The fork server loads it with one thread, for its pool would be threads in the process that is forked. A rank then asks
for its own number.
"""

from __future__ import annotations

import contextlib
import ctypes

# NumPy's own builds rename OpenBLAS's functions; distributions' and conda's do not.
_SETTER_NAMES = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)


def set_blas_threads(num_threads: int) -> bool:
    """Have every OpenBLAS in this process use so many threads; whether there was one."""
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
    """Files of loaded libraries with this word in their names."""
    try:
        with open("/proc/self/maps") as maps:
            files = {line.split(maxsplit=5)[5].strip() for line in maps if line.count("/")}
    except OSError:
        return set()
    return {file for file in files if substring in file.rpartition("/")[2]}
