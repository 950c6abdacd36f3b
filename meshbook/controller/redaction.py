"""Takes out of a text what is nobody else's: secrets, and the user's home folder. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping

HIDDEN = "[hidden]"

# Names of environment variables whose values are secrets, and how short a value may be that is looked for.
_SECRET_NAME = re.compile(
    r"(?i)token|secret|passw|credential|api_?key|access_?key|private|auth|cookie|session_key|_key$"
)
_MIN_SECRET_CHARS = 6

# What is a secret by its form: private keys, tokens of well-known services, JSON web tokens.
_BY_FORM = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\b(?:hf_|gh[pousr]_|github_pat_|glpat-|xox[abeprs]-|sk-|pypi-|npm_|dop_v1_|AIza)[A-Za-z0-9_\-]{12,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    r"|\beyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]*",
    re.DOTALL,
)
# ... and by what stands before it: `password=…`, `"api_key": "…"`, `Authorization: Bearer …`, https://user:…@host.
_BY_NAME = re.compile(
    r"(?i)((?:[\w-]*(?:token|secret|passw(?:or)?d|api[_-]?key|access[_-]?key|credentials?)|authorization|cookie)"
    r"['\"]?\s*[=:]\s*(?:bearer\s+|basic\s+)?['\"]?)([^\s'\",;)}\]]+)"
)
_BEARER = re.compile(r"(?i)\b(bearer\s+)([A-Za-z0-9._~+/=\-]{8,})")
_IN_ADDRESS = re.compile(r"(\b[a-z][a-z0-9+.\-]*://)[^\s/@:]+:[^\s/@]+@")


def redact(text: str, *, home: str, environment: Mapping[str, str], secrets: tuple[str, ...] = ()) -> str:
    """Return the text without secrets, and with `~` for the home folder.

    Args:
        environment: values of variables that are named like secrets are hidden wherever they stand.
        secrets: more texts to hide.
    """
    values = [value for name, value in environment.items() if _SECRET_NAME.search(name)]
    for secret in sorted({*values, *secrets}, key=len, reverse=True):
        if len(secret) >= _MIN_SECRET_CHARS:
            text = text.replace(secret, HIDDEN)
    text = _BY_FORM.sub(HIDDEN, text)
    text = _IN_ADDRESS.sub(rf"\1{HIDDEN}@", text)
    text = _BY_NAME.sub(rf"\1{HIDDEN}", text)
    text = _BEARER.sub(rf"\1{HIDDEN}", text)
    return re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text) if len(home) > 1 else text
