"""What IPython stores in files, in memory instead: history, profile, database. Parts of `RankShell`."""

# mypy: allow-untyped-calls
# (most of IPython's methods have no annotations)

from __future__ import annotations

import contextlib
import fnmatch
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import IPython.core.interactiveshell
from IPython.core.history import HistoryManager
from IPython.core.profiledir import ProfileDir

# How many of `_1`, `_i1`, `_2`, ... exist at a time.
MAX_NUMBERED_NAMES: Final = 200


class RankHistory(HistoryManager):
    """The history of this rank's cells, in memory, each at its own number."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._numbered_names: deque[str] = deque()
        super().__init__(*args, **kwargs)

    def store_inputs(self, line_num: int, source: str, source_raw: str | None = None) -> None:
        raw = source if source_raw is None else source_raw
        parsed_list, raw_list = self.input_hist_parsed, self.input_hist_raw
        # A cell that did not run here leaves a gap; a cell that runs again under its number replaces its entry.
        for entries, text in ((parsed_list, source), (raw_list, raw)):
            while len(entries) < line_num:
                entries.append("")
            entries[line_num : line_num + 1] = [text.rstrip("\n")]
        self._iii, self._ii, self._i, self._i00 = self._ii, self._i, self._i00, raw.rstrip("\n")
        names = {"_i": self._i, "_ii": self._ii, "_iii": self._iii, f"_i{line_num}": self._i00}
        self.shell.user_ns.update(names)
        self.shell.user_ns_hidden.update(names)
        self.register_numbered_name(f"_i{line_num}")

    def register_numbered_name(self, name: str) -> None:
        """Record a name like `_7` or `_i7`, and delete the oldest of them.

        Two more with every cell would make the namespace slow to scan. `In` and `Out` retain the values.
        """
        names, hidden = self.shell.user_ns, self.shell.user_ns_hidden
        self._numbered_names.append(name)
        while len(self._numbered_names) > MAX_NUMBERED_NAMES:
            oldest = self._numbered_names.popleft()
            value = hidden.get(oldest, self)
            if oldest not in self._numbered_names and names.get(oldest) is value:
                del names[oldest], hidden[oldest]


class InMemoryProfileDir(ProfileDir):
    """A profile without a folder."""

    def _location_changed(self, change: Any) -> None:
        """Create nothing."""


class MemoryStore(dict[str, Any]):
    """Stores in memory what `%bookmark`, `%store` and import completion store in a folder."""

    def keys(self, pattern: str | None = None) -> Any:
        names = super().keys()
        return names if pattern is None else fnmatch.filter(names, pattern)


@contextlib.contextmanager
def without_database() -> Iterator[None]:
    """Stop older IPython (9.0) from creating its database folder whenever a shell is created."""
    module: Any = IPython.core.interactiveshell
    eager = getattr(module, "PickleShareDB", None)
    if eager is None:
        yield
        return
    module.PickleShareDB = lambda *_: MemoryStore()
    try:
        yield
    finally:
        module.PickleShareDB = eager
