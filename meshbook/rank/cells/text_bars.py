"""Has tqdm.notebook draw its bars as text on a rank: its widgets have their state here, and no page that shows them."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODULE = "tqdm.notebook"


class TextBars(MetaPathFinder, Loader):
    """Finds a tqdm.notebook whose classes are those of tqdm, with the arguments that only widgets have."""

    def install(self, undo: contextlib.ExitStack) -> None:
        """Begin to find it, until `undo` is closed."""
        sys.meta_path.insert(0, self)
        undo.callback(sys.meta_path.remove, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname == _MODULE else None

    def exec_module(self, module: ModuleType) -> None:
        tqdm: Any = importlib.import_module("tqdm.std").tqdm

        def __init__(self: Any, *args: Any, display: bool = True, **options: Any) -> None:
            if isinstance(options.get("ncols"), str):  # "100%" of a page
                del options["ncols"]
            tqdm.__init__(self, *args, **options)

        bar: Any = type("tqdm_notebook", (tqdm,), {"__init__": __init__, "__module__": _MODULE})

        def trange(*args: Any, **options: Any) -> Any:
            return bar(range(*args), **options)

        names = {"tqdm_notebook": bar, "tqdm": bar, "tnrange": trange, "trange": trange}
        vars(module).update(names, __all__=list(names))
