"""Where a cell runs: in this process, on the ranks, or partly in each.

Pure: source in, source out. A cell for the ranks becomes one call in the controller's shell, so that numbering,
history, `Out` and hooks stay IPython's own. `%%controller` overrides the table below for any cell.

| a cell, or its first lines                        | runs                                                             |
| ------------------------------------------------- | ---------------------------------------------------------------- |
| plain code, `await`, `!cmd`, `x = !cmd`           | on the ranks                                                     |
| `%timeit`, `%%time`, `%env`, `%who`, `%run`, ...  | on the ranks: every magic that is not listed below               |
| `%%mesh`, `%mesh`                                 | here: their arguments select the ranks                           |
| `%%controller`, `%%local`                         | here, its lines numbered as in the cell                          |
| `%pip`, `!pip`, `!conda`, `!apt`, ...             | here, once: concurrent installs by ranks break each other        |
| `%%writefile`, `%%html`, `%%javascript`, ...      | here, once: one file, one display                                |
| `%history`, `%lsmagic`, `%load`, `%config X`, ... | here: they concern the notebook                                  |
| `%load_ext`, `%cd`, `%matplotlib`, `%config X=1`  | here and on the ranks: every magic that sets something in the    |
|                                                   | shell; what it prints is the ranks'                              |
| `%tb`, `%debug`                                   | for the last failure shown, on its ranks if it is one of theirs  |
| `x?`, `?x`, `x??`                                 | queries a rank, and this process                                 |
| `exit`, `quit`                                    | here: they end the kernel                                        |
| `_`, `Out[7].result()` of a background cell       | here: the future is the notebook's own                           |

Line magics that run here may precede code for the ranks at the top of a cell.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# Expression for the shell's notebook in rewritten cells; `Notebook.of` sets the attribute.
NOTEBOOK_EXPRESSION = "get_ipython().meshbook"

CONTROLLER_MAGICS = frozenset({"controller", "local"})

# Other cell magics that run in this process.
LOCAL_CELL_MAGICS = frozenset(
    ["mesh", "code_wrap", "writefile", "file", "html", "HTML", "svg", "SVG", "latex", "markdown", "javascript", "js"]
)

_INSTALLERS = ("pip", "uv", "conda", "mamba", "micromamba")

# Line magics that run in this process.
LOCAL_LINE_MAGICS = frozenset([
    "mesh", "autosave", "clear", "connect_info", "ed", "edit", "hist", "history", "less", "load", "loadpy", "logoff",
    "logon", "logstart", "logstate", "logstop", "lsmagic", "macro", "magic", "man", "more", "notebook", "page",
    "pastebin", "qtconsole", "quickref", "recall", "rep", "rerun", "save", "store", "subshell", "tensorboard",
    *_INSTALLERS,
])  # fmt: skip

# Line magics that set something in the shell: they run here first and then, with the rest of the cell, on the ranks.
BOTH_LINE_MAGICS = frozenset([
    "aimport", "alias", "alias_magic", "autoawait", "autocall", "automagic", "autoreload", "bookmark", "cd", "colors",
    "config", "doctest_mode", "load_ext", "matplotlib", "popd", "precision", "pushd", "reload_ext", "unalias",
    "unload_ext", "xmode",
])  # fmt: skip

# Extensions that are loaded in this process only.
LOCAL_EXTENSIONS = frozenset({"meshbook", "tensorboard"})

_MAGIC = re.compile(r"%(?P<name>[A-Za-z_]\w*)(?P<rest>.*)")
_CELL_MAGIC = re.compile(r"%%(?P<name>\S+)")
# Also without `%` or `!`, as users often type it: `pip install` is not valid Python.
_INSTALL = re.compile(
    r"(?:!\s*(?:sudo\s+)?)(?:python[\d.]*\s+-m\s+)?(?:uv|pip[\d.]*|conda|mamba|micromamba|apt|apt-get)\b"
    r"|(?:pip|uv|conda|mamba|micromamba)\s+[a-z-]"
)
_EXIT = re.compile(r"(?:exit|quit)\s*(?:\(\s*\))?\s*;?")
_POSTMORTEM_MAGIC = re.compile(r"%(?P<name>tb|debug)\s*(?P<how>\w*)")
_HELP = re.compile(r"(?P<before>\?{0,2})\s*(?P<name>%{0,2}[^\W\d][\w.\[\]'\"]*)\s*(?P<after>\?{0,2})")


@dataclass(frozen=True)
class CellPlan:
    """What to do with a cell.

    Attributes:
        target: "here", "ranks", or "both" when it begins here and continues there; "help" for help on a name, "failure"
            for a magic about the last failure.
        local_source: source for the controller's shell; empty with `target == "ranks"`.
        remote_source: source for the ranks, its lines numbered as in the cell; with "failure", the magic's argument.
        name: with "help", the name; with "failure", the magic.
        detail: with "help", 1 if the source is requested.
    """

    target: Literal["here", "ranks", "both", "help", "failure"]
    local_source: str = ""
    remote_source: str = ""
    name: str = ""
    detail: int = 0


def plan_cell(source: str, *, auto: bool = True) -> CellPlan:
    """Decide where a cell runs.

    Args:
        auto: whether cells without one of Meshbook's magics run on the ranks.
    """
    lines = source.splitlines(keepends=True)
    first = next((index for index, line in enumerate(lines) if line.strip()), None)
    if first is None:
        return CellPlan("here", local_source=source)
    asked = _parse_help(source) if auto else None
    cell_magic = _CELL_MAGIC.match(lines[first])
    if cell_magic is not None and asked is None:
        name = cell_magic["name"]
        alone = lines[first].strip() == cell_magic[0]
        if name in CONTROLLER_MAGICS and alone:
            return CellPlan("here", local_source=_comment_out_line(lines, first))
        if not auto or name in CONTROLLER_MAGICS or name in LOCAL_CELL_MAGICS:
            return CellPlan("here", local_source=source)
        return CellPlan("ranks", remote_source=source)
    if not auto:
        return CellPlan("here", local_source=source)
    if asked is not None:
        return asked
    if _EXIT.fullmatch(source.strip()):
        return CellPlan("here", local_source=source)
    if (failure := _POSTMORTEM_MAGIC.fullmatch(source.strip())) is not None:
        return CellPlan("failure", name=failure["name"], remote_source=failure["how"])
    return _split_cell(lines)


def rewrite(source: str, *, auto: bool = True) -> str:
    """Return the source that the controller's shell runs for this cell."""
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


class ShowMeshMagics(ast.NodeTransformer):
    """Has a `%mesh` line show its value wherever it stands in a cell, as IPython does for a cell's last line only."""

    def visit_Module(self, module: ast.Module) -> ast.Module:
        lines = module.body
        for line in lines[:-1] if lines and isinstance(lines[-1], ast.Expr) else lines:
            self.visit(line)
        return module

    def visit_Expr(self, line: ast.Expr) -> ast.Expr:
        match line.value:
            case ast.Call(
                ast.Attribute(ast.Call(ast.Name("get_ipython")), "run_line_magic"), [ast.Constant("mesh"), _]
            ):
                shown = ast.parse(f"{NOTEBOOK_EXPRESSION}.run_shown", mode="eval").body
                line.value.func = ast.copy_location(shown, line)
                ast.fix_missing_locations(line)
        return line


def installs(source: str) -> bool:
    """Whether the lines at the top of a cell that run here install packages."""
    for line in source.splitlines():
        magic = _MAGIC.match(line)
        if _INSTALL.match(line) or (magic is not None and magic["name"] in _INSTALLERS):
            return True
        if line.strip() and not line.startswith("#") and _parse_local_line(line) is None:
            break
    return False


def names_read(source: str) -> list[str]:
    """Return the names that Python code reads, also in functions and classes, in order; none if it does not parse."""
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
    """Whether code that is being edited will run on the ranks; decides which completions come first."""
    return plan_cell(source).target != "here"


def pad_to_cell_lines(cell: str, part: str) -> str:
    """Return a part of a cell with the lines above it commented out, so that tracebacks have the cell's line numbers.

    Unchanged if the part is not the end of the cell, or begins with a cell magic, which must come first.
    """
    if part.startswith("%%") or not part or len(part) >= len(cell) or not cell.rstrip("\n").endswith(part.rstrip("\n")):
        return part
    above = cell.rstrip("\n")[: -len(part.rstrip("\n"))]
    if not above.endswith("\n"):
        return part
    return "".join(f"# {line}" for line in above.splitlines(keepends=True)) + part


def _comment_out_line(lines: Sequence[str], index: int) -> str:
    """Return the cell with its `%%controller` line commented out, so that line numbers stay the same.

    A cell magic below it moves to the top.
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
        and name.lstrip("%") in LOCAL_LINE_MAGICS | LOCAL_CELL_MAGICS | CONTROLLER_MAGICS | BOTH_LINE_MAGICS
    ):
        return CellPlan("here", local_source=source)
    return CellPlan("help", name=name, detail=int("??" in (found["before"], found["after"])))


def _split_cell(lines: Sequence[str]) -> CellPlan:
    """Split a cell into the local magics at its top and the rest."""
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
    """Return a line's local form, and whether the ranks run it too; None: it runs on the ranks only."""
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
    if name not in BOTH_LINE_MAGICS:
        return None
    if name.endswith("_ext") and arguments.partition(".")[0] in LOCAL_EXTENSIONS:
        return line, False
    if name == "config" and "=" not in arguments:  # a question
        return line, False
    return f"{NOTEBOOK_EXPRESSION}.run_setting({name!r}, {arguments!r})\n", True
