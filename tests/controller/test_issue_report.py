"""A file for an issue: what is in it, and what must never be."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from meshbook.controller.issue_report import write_report
from meshbook.controller.mesh import Mesh
from meshbook.controller.redaction import HIDDEN, redact
from meshbook.errors import CellError, UsageError


def redacted(text: str) -> str:
    environment = {"HF_TOKEN": "abcdef-the-token", "DB_PASSWORD": "pw", "EDITOR": "vimvimvim"}
    return redact(text, home="/home/ada", environment=environment, secrets=("mesh-token",))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at /home/ada/run.py and /home/adam/x", "at ~/run.py and /home/adam/x"),
        ("the value abcdef-the-token is here", f"the value {HIDDEN} is here"),
        ("pw is short, vimvimvim is no secret", "pw is short, vimvimvim is no secret"),
        ("says mesh-token", f"says {HIDDEN}"),
        ("api_key='k3y' next", f"api_key='{HIDDEN}' next"),
        ('{"password": "x y"}', f'{{"password": "{HIDDEN} y"}}'),
        ("Authorization: Bearer abc.def", f"Authorization: Bearer {HIDDEN}"),
        ("curl -H 'bearer 12345678'", f"curl -H 'bearer {HIDDEN}'"),
        ("https://ada:pw@host/x", f"https://{HIDDEN}@host/x"),
        ("ssh://gpu1,gpu2 step: 3 token count", "ssh://gpu1,gpu2 step: 3 token count"),
        ("key hf_ABCDEFGHIJKLMNOP1", f"key {HIDDEN}"),
        ("AKIAABCDEFGHIJKLMNOP", HIDDEN),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\nrest", f"{HIDDEN}\nrest"),
    ],
)
def test_secrets_and_the_home_folder_are_taken_out(text: str, shown: str) -> None:
    assert redacted(text) == shown


def test_a_report_says_what_the_mesh_is_and_did_last_and_keeps_secrets(
    mesh: Mesh, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "hidden-by-its-name")
    mesh.run("print('said at last', 'hidden-by-its-name')", echo=False)
    with pytest.raises(CellError):
        mesh.run("{}['not there']", echo=False)
    report = write_report(mesh, lambda: "all is well", folder=tmp_path)
    path = Path(report.path)
    text = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    for expected in (
        "Python 3.", "torch 2.", "libzmq ", "NCCL ", "driver ", "4 ranks (dp=2, tp=2)", "Nothing runs: ranks 0-3 wait",
        "KeyError: 'not there'", "[0-3] said at last [hidden]", "all is well",
    ):  # fmt: skip
        assert expected in text
    token = mesh.session.connection.connection_info.token
    for secret in ("hidden-by-its-name", token, os.environ["PATH"]):
        assert secret not in text
    assert str(report).startswith(f"{path} (")
    assert "What ranks printed last, The supervisor's log, Doctor." in str(report)


def test_a_report_without_a_mesh_says_why_and_one_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    def failing() -> str:
        raise RuntimeError("no doctor")

    report = write_report(None, failing, folder=tmp_path, problem="no mesh is running")
    text = Path(report.path).read_text()
    assert "no mesh is running" in text
    assert "(this could not be found out: RuntimeError: no doctor)" in text
    with pytest.raises(UsageError, match="cannot be written: No such file"):
        write_report(None, failing, folder=tmp_path / "nowhere")
