"""Bearer tokens of a server, one for each scope. They are in memory, and in a file that only this user can read."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
from pathlib import Path

import msgspec

from meshbook.errors import StartError
from meshbook.gateway.operations import SCOPES, Scope
from meshbook.wire import folders


class Tokens:
    """The tokens of one server. As a context manager, it removes their file when the block ends.

    Attributes:
        by_scope: scope -> token.
        path: of the file: {"url", "pid", "tokens"}.
    """

    def __init__(self, url: str, port: int) -> None:
        """Make new tokens, and write them into the runtime folder. Raises StartError."""
        self.by_scope: dict[Scope, str] = {scope: secrets.token_urlsafe(24) for scope in SCOPES}
        self.path: Path = folders.runtime_folder() / f".serve-{port}.json"
        content = {"url": url, "pid": os.getpid(), "tokens": self.by_scope}
        try:
            folders.write_atomically(self.path, msgspec.json.encode(content))
        except OSError as error:
            raise StartError(
                f"{self.path} cannot be written: {error.strerror}; free some space, or set MESHBOOK_RUNTIME_DIR to "
                "another disk"
            ) from error

    def scope_of(self, token: str) -> Scope | None:
        """Return what a token allows; None: it is none of these."""
        found: Scope | None = None
        for scope, own in self.by_scope.items():  # all of them, so that the time tells nothing
            if hmac.compare_digest(token.encode("utf-8", "replace"), own.encode()):
                found = scope
        return found

    def __enter__(self) -> Tokens:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()
