"""Output of ranks as text on a terminal, in a script or under a marimo cell."""

from __future__ import annotations

import getpass
import secrets
import sys
import textwrap
from collections.abc import Callable
from typing import Any

from meshbook.fold import rendering
from meshbook.ids import Ranks
from meshbook.marimo import page
from meshbook.wire import messages

# Asks the user with a prompt, for a password if True, and returns the reply; None: nobody is there.
Prompter = Callable[[str, bool], str | None]

_MARIMO_WIDTH = 80


class Console:
    """Writes folded output to the standard streams, and stores its plain text."""

    def __init__(self, ranks: Ranks, *, echo: bool) -> None:
        self.ranks, self._echo = ranks, echo
        self._text: list[str] = []
        self._progress_shown = False  # the terminal's last line is a progress bar

    def __call__(self, items: tuple[messages.FoldedItem, ...]) -> None:
        for item in items:
            if isinstance(item, messages.Line):
                self._write_line(item)
            elif isinstance(item.item, messages.Display):
                text = item.item.data.get("text/plain")
                label_ranks = item.ranks if item.ranks != self.ranks else None
                if self._echo and page.append_output(page.marimo_mime(item.item.data), label_ranks):
                    self._text.append(f"{text}\n" if text else "")
                elif text:
                    shown = messages.Line(ranks=item.ranks, stream="stdout", text=str(text))
                    self._write_line(shown)
            elif isinstance(item.item, messages.Notice):
                text = item.item.text
                self._write(
                    "stderr", f"[meshbook] {_wrap_for_marimo(text) if page.running_cell() is not None else text}\n"
                )
                self._text.append(f"[meshbook] {item.item.text}\n")
        if self._echo:
            sys.stdout.flush()
            sys.stderr.flush()

    def note(self, text: str) -> None:
        """Show a note of Meshbook's own; it is not part of the text."""
        self._write("stdout", f"{text}\n")

    def close(self) -> None:
        """Do nothing: no output is pending."""

    @property
    def text(self) -> str:
        return "".join(self._text)

    def _write_line(self, line: messages.Line) -> None:
        text = rendering.render_line(line, self.ranks, colour=_is_terminal(line.stream))
        if line.live:
            self._write(line.stream, "\r" + text)
            self._progress_shown = True
            return
        self._write(line.stream, ("\r" if self._progress_shown else "") + text + line.end)
        self._progress_shown = False
        self._text.append(rendering.plain_text(text) + line.end)

    def _write(self, stream: str, text: str) -> None:
        if self._echo:
            (sys.stderr if stream == "stderr" else sys.stdout).write(text)


class StatusLine:
    """One line that is updated, in a notebook's cell or on a terminal. It is cleared when the block ends without error.

    Attributes:
        is_updated: False: standard output is a file or a pipe, where each state is a line of its own.
    """

    def __init__(self) -> None:
        self._shell = _jupyter_shell()
        self._display_id = f"meshbook-{secrets.token_hex(8)}"
        self._shown = ""
        self.is_updated = self._shell is not None or _is_terminal("stdout")

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._shown and self.is_updated:
            if kind is None:
                self.show("")
            elif self._shell is None:
                print(flush=True)

    def show(self, text: str) -> None:
        """Show this text in place of the one before."""
        if self._shell is not None:
            self._shell.display_pub.publish(
                {"text/plain": text}, transient={"display_id": self._display_id}, update=bool(self._shown)
            )
        elif self.is_updated:
            print(f"\r{text}\x1b[K", end="", flush=True)
        else:
            print(text, flush=True)
        self._shown = text or self._shown


def current_cell_number() -> int | None:
    """Return the number of the cell that runs in this process; None: it is not a notebook."""
    shell = _ipython_shell()
    # since IPython 9, execution_count is already the next cell's
    return None if shell is None else int(shell.displayhook.prompt_count)


def _ipython_shell() -> Any:
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()


def _jupyter_shell() -> Any:
    """Return IPython's shell if a Jupyter kernel runs in this process, else None."""
    shell = _ipython_shell()
    return shell if getattr(shell, "kernel", None) is not None else None


def _wrap_for_marimo(text: str) -> str:
    """Wrap lines to the width of a marimo cell, which does not wrap lines itself."""
    lines = []
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        lines += textwrap.wrap(line, _MARIMO_WIDTH, subsequent_indent=indent, break_on_hyphens=False) or [""]
    return "\n".join(lines)


def find_prompter() -> Prompter | None:
    """Return what prompts the user of this process: a marimo page, a Jupyter cell, or the terminal; None: nobody."""
    cell = page.running_cell()
    if cell is not None and cell.mode != "script":
        return _prompt_in_marimo if cell.mode == "edit" else None  # readers of a running notebook cannot type
    if (shell := _jupyter_shell()) is not None:  # its kernel has replaced input() and getpass()
        return prompt_on_terminal if getattr(shell.kernel, "_allow_stdin", False) else None
    return prompt_on_terminal if sys.stdin is not None and sys.stdin.isatty() else None


def _prompt_in_marimo(prompt: str, password: bool) -> str | None:
    return page.ask(prompt, password=password)


def prompt_on_terminal(prompt: str, password: bool) -> str | None:
    """Prompt for input() of ranks, or for a command for the debugger, on the terminal and return the reply."""
    return getpass.getpass(prompt) if password else input(prompt)


def _is_terminal(stream: str) -> bool:
    isatty = getattr(sys.stderr if stream == "stderr" else sys.stdout, "isatty", None)
    return bool(isatty is not None and isatty())
