"""Where a cell runs: here, on the ranks, or a part of it here and the rest there.

Pure: source in, source out. What goes to the ranks becomes one call in the controller's shell, so that numbering,
history, `Out` and hooks stay IPython's own. What a name below decides, `%%controller` overrules for any cell.

| a cell, or its first lines                        | runs                                                             |
| ------------------------------------------------- | ---------------------------------------------------------------- |
| plain code, `await`, `!cmd`, `x = !cmd`           | on the ranks                                                     |
| `%timeit`, `%%time`, `%env`, `%who`, `%run`, ...  | on the ranks: every magic that is not named below                |
| `%%mesh`, `%mesh`                                 | here: they say themselves what goes where                        |
| `%%controller`, `%%local`                         | here, its lines numbered as in the cell                          |
| `%pip`, `!pip`, `!conda`, `!apt`, ...             | here, once: ranks that install at the same time break each other |
| `%%writefile`, `%%html`, `%%javascript`, ...      | here, once: one file, one display                                |
| `%history`, `%lsmagic`, `%load`, `%config`, ...   | here: they are about the notebook                                |
| `%load_ext`, `%cd`, `%matplotlib`                 | here and on the ranks: both are to know                          |
| `%tb`, `%debug`                                   | about the failure that was shown last, on its ranks if it is one |
|                                                   | of theirs                                                        |
| `x?`, `?x`, `x??`                                 | asked of the ranks, and here                                     |
| `exit`, `quit`                                    | here: they end the kernel                                        |
| `_`, `Out[7].result()` of a background cell       | here: the future is the notebook's own                           |

Line magics that run here may stand at the top of a cell whose rest runs on the ranks.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# How the shell reaches its notebook in rewritten cells: `Notebook.of` puts it there.
NOTEBOOK = "get_ipython().meshbook"

CONTROLLER = frozenset({"controller", "local"})

# Cell magics that stay here, beside those two.
LOCAL_CELLS = frozenset(
    ["mesh", "code_wrap", "writefile", "file", "html", "HTML", "svg", "SVG", "latex", "markdown", "javascript", "js"]
)

# Line magics that stay here.
LOCAL_LINES = frozenset(
    [
        "mesh", "alias_magic", "autocall", "automagic", "autosave", "clear", "colors", "config", "connect_info",
        "doctest_mode", "ed", "edit", "hist", "history", "less", "load", "loadpy", "logoff", "logon",
        "logstart", "logstate", "logstop", "lsmagic", "macro", "magic", "man", "more", "notebook", "page",
        "pastebin", "pdb", "popd", "pushd", "qtconsole", "quickref", "recall", "rep", "rerun", "save", "store",
        "subshell", "tensorboard", "xmode", "conda", "mamba", "micromamba", "pip", "uv",
    ]
)

# Line magics that run here first and then, with the rest of the cell, on the ranks; and how they are written here.
BOTH_LINES = {
    "load_ext": "%load_ext {}",
    "reload_ext": "%reload_ext {}",
    "unload_ext": "%unload_ext {}",
    "cd": "%cd -q {}",
    "matplotlib": "%matplotlib {}",
}

# Extensions that belong to this process alone.
LOCAL_EXTENSIONS = frozenset({"meshbook", "tensorboard"})

_MAGIC = re.compile(r"%(?P<name>[A-Za-z_]\w*)(?P<rest>.*)")
_CELL_MAGIC = re.compile(r"%%(?P<name>\S+)")
# Also without `%` or `!`, as people write it by heart: `pip install` is no Python.
_INSTALL = re.compile(
    r"(?:!\s*(?:sudo\s+)?)(?:python[\d.]*\s+-m\s+)?(?:uv|pip[\d.]*|conda|mamba|micromamba|apt|apt-get)\b"
    r"|(?:pip|uv|conda|mamba|micromamba)\s+[a-z-]"
)
_LEAVE = re.compile(r"(?:exit|quit)\s*(?:\(\s*\))?\s*;?")
_FAILURE = re.compile(r"%(?P<name>tb|debug)\s*(?P<how>\w*)")
_HELP = re.compile(r"(?P<before>\?{0,2})\s*(?P<name>%{0,2}[^\W\d][\w.\[\]'\"]*)\s*(?P<after>\?{0,2})")


@dataclass(frozen=True)
class Plan:
    """What becomes of a cell.

    Attributes:
        where: "here", "ranks", or "both" when it begins here and goes on there; "help" for a question about a name,
            "failure" for one about what failed last.
        here: source for the controller's shell; with `where == "ranks"` empty.
        there: source for the ranks, its lines numbered as in the cell; of "failure", the magic's argument.
        name: of "help", what is asked about; of "failure", the magic.
        detail: of "help", 1 if the source is wanted.
    """

    where: Literal["here", "ranks", "both", "help", "failure"]
    here: str = ""
    there: str = ""
    name: str = ""
    detail: int = 0


def plan(source: str, *, auto: bool = True) -> Plan:
    """Decide about a cell.

    Args:
        auto: whether cells without a magic of ours go to the ranks.
    """
    lines = source.splitlines(keepends=True)
    first = next((index for index, line in enumerate(lines) if line.strip()), None)
    if first is None:
        return Plan("here", here=source)
    cell_magic = _CELL_MAGIC.match(lines[first])
    if cell_magic is not None:
        name = cell_magic["name"]
        alone = lines[first].strip() == cell_magic[0]
        if name in CONTROLLER and alone:
            return Plan("here", here=_without_line(lines, first))
        if not auto or name in CONTROLLER or name in LOCAL_CELLS:
            return Plan("here", here=source)
        return Plan("ranks", there=source)
    if not auto:
        return Plan("here", here=source)
    if (asked := _help(source)) is not None:
        return asked
    if _LEAVE.fullmatch(source.strip()):
        return Plan("here", here=source)
    if (failure := _FAILURE.fullmatch(source.strip())) is not None:
        return Plan("failure", name=failure["name"], there=failure["how"])
    return _split(lines)


def rewrite(source: str, *, auto: bool = True) -> str:
    """The cell as the controller's shell is to run it."""
    decided = plan(source, auto=auto)
    match decided.where:
        case "help":
            return f"{NOTEBOOK}.show_help({decided.name!r}, {decided.detail})\n"
        case "failure":
            return f"{NOTEBOOK}.show_failure({decided.name!r}, {decided.there!r})\n"
        case "ranks":
            return f"{NOTEBOOK}.run_cell({decided.there!r})\n"
        case "both":
            return f"{decided.here}{NOTEBOOK}.run_cell({decided.there!r})\n"
    return decided.here


def names_read(source: str) -> list[str]:
    """Names that Python code reads, in functions and classes too, in the code's order; none of code that is broken."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    read = []
    for node in ast.walk(tree):
        target = node.target if isinstance(node, ast.AugAssign) else node
        if isinstance(target, ast.Name) and (target is not node or isinstance(target.ctx, ast.Load)):
            read.append(target.id)
    return list(dict.fromkeys(read))


def is_for_ranks(source: str) -> bool:
    """Whether code that is still being written will run on the ranks; what completion looks at first."""
    return plan(source).where != "here"


def at_its_lines(cell: str, part: str) -> str:
    """A part of a cell, below as many commented lines as it had above it, so that tracebacks name the cell's own lines.

    Unchanged where the part is not the end of the cell, or begins with a cell magic, which must come first.
    """
    if part.startswith("%%") or not part or len(part) >= len(cell) or not cell.rstrip("\n").endswith(part.rstrip("\n")):
        return part
    above = cell.rstrip("\n")[: -len(part.rstrip("\n"))]
    if not above.endswith("\n"):
        return part
    return "".join(f"# {line}" for line in above.splitlines(keepends=True)) + part


def _without_line(lines: Sequence[str], index: int) -> str:
    """The cell with its `%%controller` line made a comment, so that the others keep their numbers.

    A cell magic below it comes first.
    """
    rest = "".join(lines[index + 1 :])
    if rest.lstrip().startswith("%%"):
        return rest.lstrip()
    return "".join(lines[:index]) + f"# {lines[index]}" + rest


def _help(source: str) -> Plan | None:
    text = source.strip()
    if "?" not in text or "\n" in text:
        return None
    found = _HELP.fullmatch(text)
    if found is None or not (found["before"] or found["after"]):
        return None
    name = found["name"]
    if name.startswith("%") and name.lstrip("%") in LOCAL_LINES | LOCAL_CELLS | CONTROLLER | BOTH_LINES.keys():
        return Plan("here", here=source)
    return Plan("help", name=name, detail=int("??" in (found["before"], found["after"])))


def _split(lines: Sequence[str]) -> Plan:
    """The magics of this process at the top of the cell, and the rest."""
    here: list[str] = []
    there: list[str] = []
    rest = len(lines)
    for index, line in enumerate(lines):
        text = line.strip()
        if not text or text.startswith("#"):
            there.append(line)
            continue
        words = _local_words(line)
        if words is None:
            rest = index
            break
        local, remote = words
        here.append(local)
        there.append(line if remote else f"# {line}")
    there += lines[rest:]
    if not here:
        return Plan("ranks", there="".join(there))
    only_here = rest == len(lines) and all(not text.strip() or text.startswith("#") for text in there)
    if only_here:
        return Plan("here", here="".join(lines))
    return Plan("both", here="".join(here), there="".join(there))


def _local_words(line: str) -> tuple[str, bool] | None:
    """How a line is written here, and whether the ranks run it too; None: it is theirs alone."""
    line = line if line.endswith("\n") else line + "\n"
    if line.rstrip().endswith("\\"):
        return None
    if _INSTALL.match(line):
        return line if line.startswith("!") else f"%{line}", False
    magic = _MAGIC.match(line)
    if magic is None:
        return None
    name, rest = magic["name"], magic["rest"].strip()
    if name in LOCAL_LINES:
        return line, False
    if name in BOTH_LINES:
        if name.endswith("_ext") and rest.partition(".")[0] in LOCAL_EXTENSIONS:
            return line, False
        return BOTH_LINES[name].format(rest).rstrip() + "\n", True
    return None
