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
NOTEBOOK_EXPRESSION = "get_ipython().meshbook"

CONTROLLER_MAGICS = frozenset({"controller", "local"})

# Cell magics that stay here, beside those two.
LOCAL_CELL_MAGICS = frozenset(
    ["mesh", "code_wrap", "writefile", "file", "html", "HTML", "svg", "SVG", "latex", "markdown", "javascript", "js"]
)

# Line magics that stay here.
LOCAL_LINE_MAGICS = frozenset(
    [
        "mesh",
        "alias_magic",
        "autocall",
        "automagic",
        "autosave",
        "clear",
        "colors",
        "config",
        "connect_info",
        "doctest_mode",
        "ed",
        "edit",
        "hist",
        "history",
        "less",
        "load",
        "loadpy",
        "logoff",
        "logon",
        "logstart",
        "logstate",
        "logstop",
        "lsmagic",
        "macro",
        "magic",
        "man",
        "more",
        "notebook",
        "page",
        "pastebin",
        "pdb",
        "popd",
        "pushd",
        "qtconsole",
        "quickref",
        "recall",
        "rep",
        "rerun",
        "save",
        "store",
        "subshell",
        "tensorboard",
        "xmode",
        "conda",
        "mamba",
        "micromamba",
        "pip",
        "uv",
    ]
)

# Line magics that run here first and then, with the rest of the cell, on the ranks; and how they are written here.
BOTH_LINE_MAGICS = {
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
_EXIT = re.compile(r"(?:exit|quit)\s*(?:\(\s*\))?\s*;?")
_POSTMORTEM_MAGIC = re.compile(r"%(?P<name>tb|debug)\s*(?P<how>\w*)")
_HELP = re.compile(r"(?P<before>\?{0,2})\s*(?P<name>%{0,2}[^\W\d][\w.\[\]'\"]*)\s*(?P<after>\?{0,2})")


@dataclass(frozen=True)
class CellPlan:
    """What becomes of a cell.

    Attributes:
        where: "here", "ranks", or "both" when it begins here and goes on there; "help" for a question about a name,
            "failure" for one about what failed last.
        here: source for the controller's shell; with `where == "ranks"` empty.
        there: source for the ranks, its lines numbered as in the cell; of "failure", the magic's argument.
        name: of "help", what is asked about; of "failure", the magic.
        detail: of "help", 1 if the source is wanted.
    """

    target: Literal["here", "ranks", "both", "help", "failure"]
    local_source: str = ""
    remote_source: str = ""
    name: str = ""
    detail: int = 0


def plan_cell(source: str, *, auto: bool = True) -> CellPlan:
    """Decide about a cell.

    Args:
        auto: whether cells without a magic of ours go to the ranks.
    """
    lines = source.splitlines(keepends=True)
    first = next((index for index, line in enumerate(lines) if line.strip()), None)
    if first is None:
        return CellPlan("here", local_source=source)
    cell_magic = _CELL_MAGIC.match(lines[first])
    if cell_magic is not None:
        name = cell_magic["name"]
        alone = lines[first].strip() == cell_magic[0]
        if name in CONTROLLER_MAGICS and alone:
            return CellPlan("here", local_source=_comment_out_line(lines, first))
        if not auto or name in CONTROLLER_MAGICS or name in LOCAL_CELL_MAGICS:
            return CellPlan("here", local_source=source)
        return CellPlan("ranks", remote_source=source)
    if not auto:
        return CellPlan("here", local_source=source)
    if (asked := _parse_help(source)) is not None:
        return asked
    if _EXIT.fullmatch(source.strip()):
        return CellPlan("here", local_source=source)
    if (failure := _POSTMORTEM_MAGIC.fullmatch(source.strip())) is not None:
        return CellPlan("failure", name=failure["name"], remote_source=failure["how"])
    return _split_cell(lines)


def rewrite(source: str, *, auto: bool = True) -> str:
    """The cell as the controller's shell is to run it."""
    planned = plan_cell(source, auto=auto)
    match planned.target:
        case "help":
            return f"{NOTEBOOK_EXPRESSION}.show_help({planned.name!r}, {planned.detail})\n"
        case "failure":
            return f"{NOTEBOOK_EXPRESSION}.show_failure({planned.name!r}, {planned.remote_source!r})\n"
        case "ranks":
            return f"{NOTEBOOK_EXPRESSION}.run_cell({planned.remote_source!r})\n"
        case "both":
            return f"{planned.local_source}{NOTEBOOK_EXPRESSION}.run_cell({planned.remote_source!r})\n"
    return planned.local_source


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
    return plan_cell(source).target != "here"


def pad_to_cell_lines(cell: str, part: str) -> str:
    """A part of a cell, below as many commented lines as it had above it, so that tracebacks name the cell's own lines.

    Unchanged where the part is not the end of the cell, or begins with a cell magic, which must come first.
    """
    if part.startswith("%%") or not part or len(part) >= len(cell) or not cell.rstrip("\n").endswith(part.rstrip("\n")):
        return part
    above = cell.rstrip("\n")[: -len(part.rstrip("\n"))]
    if not above.endswith("\n"):
        return part
    return "".join(f"# {line}" for line in above.splitlines(keepends=True)) + part


def _comment_out_line(lines: Sequence[str], index: int) -> str:
    """The cell with its `%%controller` line made a comment, so that the others keep their numbers.

    A cell magic below it comes first.
    """
    remainder = "".join(lines[index + 1 :])
    if remainder.lstrip().startswith("%%"):
        return remainder.lstrip()
    return "".join(lines[:index]) + f"# {lines[index]}" + remainder


def _parse_help(source: str) -> CellPlan | None:
    text = source.strip()
    if "?" not in text or "\n" in text:
        return None
    found = _HELP.fullmatch(text)
    if found is None or not (found["before"] or found["after"]):
        return None
    name = found["name"]
    if (
        name.startswith("%")
        and name.lstrip("%") in LOCAL_LINE_MAGICS | LOCAL_CELL_MAGICS | CONTROLLER_MAGICS | BOTH_LINE_MAGICS.keys()
    ):
        return CellPlan("here", local_source=source)
    return CellPlan("help", name=name, detail=int("??" in (found["before"], found["after"])))


def _split_cell(lines: Sequence[str]) -> CellPlan:
    """The magics of this process at the top of the cell, and the rest."""
    local_lines: list[str] = []
    remote_lines: list[str] = []
    first_remote = len(lines)
    for index, line in enumerate(lines):
        text = line.strip()
        if not text or text.startswith("#"):
            remote_lines.append(line)
            continue
        words = _parse_local_line(line)
        if words is None:
            first_remote = index
            break
        local, remote = words
        local_lines.append(local)
        remote_lines.append(line if remote else f"# {line}")
    remote_lines += lines[first_remote:]
    if not local_lines:
        return CellPlan("ranks", remote_source="".join(remote_lines))
    only_here = first_remote == len(lines) and all(not text.strip() or text.startswith("#") for text in remote_lines)
    if only_here:
        return CellPlan("here", local_source="".join(lines))
    return CellPlan("both", local_source="".join(local_lines), remote_source="".join(remote_lines))


def _parse_local_line(line: str) -> tuple[str, bool] | None:
    """How a line is written here, and whether the ranks run it too; None: it is theirs alone."""
    line = line if line.endswith("\n") else line + "\n"
    if line.rstrip().endswith("\\"):
        return None
    if _INSTALL.match(line):
        return line if line.startswith("!") else f"%{line}", False
    magic = _MAGIC.match(line)
    if magic is None:
        return None
    name, arguments = magic["name"], magic["rest"].strip()
    if name in LOCAL_LINE_MAGICS:
        return line, False
    if name in BOTH_LINE_MAGICS:
        if name.endswith("_ext") and arguments.partition(".")[0] in LOCAL_EXTENSIONS:
            return line, False
        return BOTH_LINE_MAGICS[name].format(arguments).rstrip() + "\n", True
    return None
