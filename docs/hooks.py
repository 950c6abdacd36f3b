"""What the docs site has beside docs/: the pages of the repository's root, and those that come from tables of the code.

mkdocs calls the functions by their names (mkdocs.yml, `hooks`).
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
# Pages of the root, by their names on the site.
FROM_ROOT = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
MENTION = re.compile(r"(?<![\w/`\[])docs/([a-z_]+)\.md")  # a page named in running text
CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add generated pages, and the notebooks as files to download."""
    for page, source in FROM_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    files.append(File.generated(config, "reference/magics.md", content=magics()))
    files.append(File.generated(config, "reference/commands.md", content=commands()))
    for path in sorted((ROOT / "notebooks").iterdir()):
        if path.suffix in (".ipynb", ".py"):
            files.append(File.generated(config, f"notebooks/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **context: Any) -> str:
    """Point links of the repository at pages of the site, and make links of pages that are named in running text."""
    up = "../" * page.file.src_uri.count("/")
    for root_page, source in FROM_ROOT.items():
        markdown = re.sub(rf"\]\((?:\.\./)*{re.escape(source)}", f"]({up}{root_page}", markdown)
    if page.file.src_uri in FROM_ROOT:
        markdown = markdown.replace("](docs/", "](")
    else:
        markdown = re.sub(r"\]\((?:\.\./)+notebooks/", f"]({up}notebooks/", markdown)
    parts = CODE.split(markdown)
    parts[::2] = [MENTION.sub(lambda found: f"[{found[1]}]({up}{found[1]}.md)", text) for text in parts[::2]]
    return "".join(parts)


def magics() -> str:
    """Return the page on `%mesh`, from the table that its help is made from."""
    from meshbook.kernel.commands import COMMANDS
    from meshbook.kernel.magics import ControllerMagics, MeshMagics

    usage, cell_options = (MeshMagics.mesh.__doc__ or "").partition("As a cell magic:")[2].strip().split("\n\n", 1)
    lines = [
        "# Magics",
        "",
        "The kernel Meshbook has all; `%load_ext meshbook` adds `%mesh` and `%%mesh` elsewhere.",
        "",
    ]
    lines += ["## %%mesh", "", "A cell for some ranks:", "", "```text", usage.strip(), "```", ""]
    lines += [f"- {_prose(line.strip())}" for line in cell_options.splitlines()]
    lines += ["", "## %%controller", "", ControllerMagics.controller.__doc__ or "", "", "## %mesh", ""]
    lines += ["`%mesh help` shows this list, `%mesh WORD --help` one command.", "", "| command | |", "| --- | --- |"]
    lines += [f"| [`%mesh {name}`](#{name}) | {_prose(command.summary)} |" for name, command in COMMANDS.items()]
    lines += [""]
    for name, command in COMMANDS.items():
        lines += [f"### {name}", "", "```text", command.usage, "```", "", _prose(command.summary), ""]
        lines += [_prose(command.details), ""] if command.details else []
    return "\n".join(lines)


def commands() -> str:
    """Return the page on the command `meshbook`, from its parser."""
    from meshbook.cli.main import _parser

    parser = _parser()
    lines = ["# Command line", "", "```text", _help(parser), "```", ""]
    (subparsers,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    summaries = {action.dest: action.help for action in subparsers._choices_actions}
    for name, command in subparsers.choices.items():
        lines += [
            f"## meshbook {name}",
            "",
            f"{_prose(summaries.get(name) or '')}",
            "",
            "```text",
            _help(command),
            "```",
            "",
        ]
    return "\n".join(lines)


def _help(parser: argparse.ArgumentParser) -> str:
    parser.formatter_class = lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=88)  # type: ignore[assignment]
    return parser.format_help().rstrip()


def _prose(text: str) -> str:
    """Return text of a help message as Markdown: what is in backticks stays as it is."""
    return re.sub(r"(`[^`]*`)|([<>|*_])", lambda found: found[1] or f"\\{found[2]}", text)
