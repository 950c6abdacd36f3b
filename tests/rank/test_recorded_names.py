"""Which names a cell reads."""

from __future__ import annotations

import ast
from types import CodeType
from typing import Any

from meshbook.rank.recording.names import names_bound_first, names_read


def compiled(source: str) -> list[CodeType]:
    return [compile(source, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)]


def read(source: str, **namespace: Any) -> set[str]:
    return set(names_read(compiled(source), namespace, namespace))


def cells(source: str, **names: Any) -> dict[str, Any]:
    """The namespace after a cell."""
    namespace: dict[str, Any] = {"__name__": "__main__", **names}
    exec(compiled(source)[0], namespace)
    return namespace


def test_a_cell_reads_what_it_loads_or_deletes_and_not_what_it_only_binds_or_has_as_attributes() -> None:
    assert read("y = x.z + 1; del w; z = 2", x=1, y=2, z=3, w=4) == {"x", "w"}
    assert read("def f(): return x\nclass C:\n    size = y", x=1, y=2, size=3) == {"x", "y"}


def test_functions_and_classes_of_earlier_cells_are_followed() -> None:
    namespace = cells(
        "def inner(): return scale\n"
        "def outer(): return inner()\n"
        "class Net:\n    @property\n    def size(self): return width\n    @staticmethod\n    def make(): return depth\n"
        "net = Net()",
        scale=1,
        width=2,
        depth=3,
        other=4,
    )
    assert set(names_read(compiled("outer()"), namespace, ())) == {"outer", "inner", "scale"}
    assert set(names_read(compiled("net.size"), namespace, ())) == {"net", "width", "depth"}


def test_code_that_can_read_anything_reads_all_names_of_the_user() -> None:
    assert read("eval('x')", x=1, y=2) == {"x", "y"}
    assert read("get_ipython().run_line_magic('timeit', 'f(x)')", x=1, f=2) == {"x", "f"}


def test_a_name_that_is_bound_before_it_is_read_is_missed_by_nobody() -> None:
    source = "for work in works: work.wait()\ntotal += 1\nx = x + 1"
    assert names_bound_first(compiled(source)) == {"work"}
