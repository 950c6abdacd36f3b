"""`meshbook completion bash|zsh`: a script that completes commands, options, files, and the names of running meshes."""

from __future__ import annotations

import argparse
from pathlib import Path

from meshbook.errors import UsageError
from meshbook.wire.folders import runtime_folder

# Meshes by their folders: a shell that asked `meshbook list` at each key would wait for a Python interpreter.
_PREAMBLE = {
    "bash": """
_meshbook_meshes() {
  local folder=${MESHBOOK_RUNTIME_DIR:+$MESHBOOK_RUNTIME_DIR/meshbook}
  compgen -W "$(cd "${folder:-FOLDER}" 2>/dev/null && ls)" -- "$1"
}
""",
    "zsh": """
_meshbook_meshes() {
  local folder=${MESHBOOK_RUNTIME_DIR:+$MESHBOOK_RUNTIME_DIR/meshbook}
  compadd -- ${folder:-FOLDER}/*(N/:t)
}
""",
}


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script for a shell. Raises UsageError without shtab."""
    try:
        import shtab
    except ImportError:
        raise UsageError("completion needs shtab: pip install 'meshbook[completion]'") from None
    for command in _commands(parser):
        for action in command._actions:
            if action.dest == "name" and not action.option_strings:
                action.complete = dict.fromkeys(_PREAMBLE, "_meshbook_meshes")  # type: ignore[attr-defined]
            elif action.type is Path or action.dest in ("path", "prefix"):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    preamble = _PREAMBLE[shell].replace("FOLDER", str(runtime_folder()))
    completed: str = shtab.complete(parser, shell, preamble=preamble)
    return completed


def _commands(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    return [
        command
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for command in action.choices.values()
    ]
