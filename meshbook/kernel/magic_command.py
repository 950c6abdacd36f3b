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
        complete: returns completions for its first argument.
    """

    usage: str
    summary: str
    run: Callable[[Notebook, argparse.Namespace], Any]
    arguments: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = ()
    details: str = ""
    complete: Callable[[Notebook], Iterable[str]] = lambda notebook: ()


def argument(*names: str, **options: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return an argument of a command, as `ArgumentParser.add_argument` takes it."""
    return names, options
