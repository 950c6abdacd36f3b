"""What a command of `%mesh` is."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from meshbook.kernel.notebook import Notebook


@dataclass(frozen=True)
class MagicCommand:
    """One command of `%mesh`.

    Attributes:
        usage: the syntax of the complete line.
        summary: what it does, in one sentence.
        run: runs it with the parsed options; what it returns is the cell's value.
        arguments: names and options of its arguments, as `ArgumentParser.add_argument` takes them.
        details: what its options mean.
        complete: returns completions for its arguments, beside options, choices and ranks.
    """

    usage: str
    summary: str
    run: Callable[[Notebook, argparse.Namespace], Any]
    arguments: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = ()
    details: str = ""
    complete: Callable[[Notebook], Iterable[str]] = lambda notebook: ()

    @property
    def help_text(self) -> str:
        return "\n".join(filter(None, (self.usage, self.summary, self.details)))

    def completions(self, notebook: Notebook) -> list[str]:
        """Return what may follow the command."""
        found = list(self.complete(notebook))
        for names, options in self.arguments:
            found += options.get("choices", ())
            if names == ("ranks",) and notebook.mesh is not None:
                found += map(str, notebook.mesh.ranks)
            found += (name for name in names if name.startswith("--"))
        return list(dict.fromkeys(found))


def argument(*names: str, **options: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return an argument of a command, as `ArgumentParser.add_argument` takes it."""
    return names, options
