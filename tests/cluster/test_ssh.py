"""A mesh on two machines that ssh reaches. What every mesh must do is in tests/engines/test_conformance.py."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshbook.controller.mesh import Mesh
from meshbook.controller.starting import create_mesh
from meshbook.engines.addresses import Address
from meshbook.engines.ssh import SshConnection
from meshbook.errors import CheckpointError, StartError
from tests.budget import WAIT_S, when
from tests.cluster.bed import Bed

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("starts_meshes")]

# What somebody may have in ~/.ssh/config for sessions of his own, which is none of the mesh's.
FORWARDING = "Host n1\n  LocalForward 7001 localhost:22\n  RemoteCommand hostname\n"


@pytest.fixture(scope="module")
def mesh(bed: Bed) -> Iterator[Mesh]:
    config = bed.folder / "ssh_config"
    config.write_text(FORWARDING + config.read_text())
    with create_mesh(nodes=2, gpus_per_node=2, on="ssh://n1,n2") as mesh:
        yield mesh


def test_axes_lie_on_machines(mesh: Mesh) -> None:
    assert mesh.axes == {"node": 2, "gpu": 2}
    names = mesh.run("__import__('socket').gethostname()").values
    assert [names.item(node=node, gpu=gpu) for node in (0, 1) for gpu in (0, 1)] == ["n1", "n1", "n2", "n2"]
    assert list(mesh.slice(node=1).run("rank").values.values()) == [2, 3]


def test_hosts_say_what_they_are(mesh: Mesh) -> None:
    when(lambda: all(host.latency_s is not None for host in mesh.hosts()))
    facts = [host.facts for host in mesh.hosts()]
    assert [found and found.hostname for found in facts] == ["n1", "n2"]
    assert [found and found.address for found in facts] == ["10.77.0.1", "10.77.0.2"]
    assert "10.77.0" not in str(mesh.hosts())
    assert str(mesh.hosts()).count("ready") == 2


def test_logs_are_searched_on_the_machines_and_equal_lines_of_both_are_one(mesh: Mesh, bed: Bed) -> None:
    mesh.run("print('searched: all')\nprint(f'searched: loss={rank}.5')", echo=False)
    found = mesh.logs(grep="^searched", since="1h")
    assert [(hit.ranks, hit.text) for hit in found] == [
        ((0, 1, 2, 3), "searched: all"),
        ((0, 1, 2, 3), "searched: loss={0.5, 1.5, 2.5, 3.5}"),
    ]
    assert [kept.host for kept in found.kept] == ["machine n1", "machine n2"]
    assert [hit.ranks for hit in mesh.logs(grep="^searched: all", ranks=(1, 2))] == [(1, 2)]


def test_nccl_uses_the_interface_by_which_the_machines_reach_each_other(mesh: Mesh) -> None:
    assert mesh.run("__import__('os').environ['NCCL_SOCKET_IFNAME']").values.same() == "=eth0"


def test_a_checkpoint_to_a_folder_that_machines_do_not_share_says_so(mesh: Mesh, bed: Bed) -> None:
    mesh.run("model = torch.nn.Linear(2, 2)")
    with pytest.raises(CheckpointError, match="not-shared on n2 is another folder than the one of rank 0; save"):
        mesh.checkpoint("/tmp/not-shared", "model").result(WAIT_S)
    assert "not-shared" not in bed.run("n2", "ls", "/tmp")
    assert mesh.checkpoint(str(bed.folder / "shared"), "model").result(WAIT_S).world_size == 4


def test_nothing_of_the_secret_is_in_a_command_line_or_an_environment(mesh: Mesh, bed: Bed) -> None:
    token = mesh.session.connection.connection_info.token
    for name in bed.running:
        for pid in bed.processes(name):
            for file in ("cmdline", "environ"):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                    assert token.encode() not in Path(f"/proc/{pid}/{file}").read_bytes()


def test_no_port_is_open_but_those_of_gloo_on_one_address(mesh: Mesh, bed: Bed) -> None:
    lines = [line.split() for line in bed.run("n1", "cat", "/proc/net/tcp").splitlines()[1:]]
    listening = {line[1] for line in lines if line[3] == "0A"} - {"00000000:0016"}  # sshd's
    assert {address.partition(":")[0] for address in listening} == {"01004D0A"}  # 10.77.0.1


@pytest.mark.parametrize(
    ("on", "words"),
    [
        ("ssh://n1,gone", ("gone cannot be reached", "No route to host", "Try ssh gone")),
        ("ssh://locked", ("refused to let you log in", "Permission denied", "ssh-copy-id")),
        ("ssh://refusing", ("refused the connection", "Connection refused")),
        ("ssh://no-such-name", ("no-such-name is no name", "~/.ssh/config")),
        ("ssh://n1?python=/no/python", ("n1 has no interpreter /no/python",)),
        ("ssh://n1?python=/usr/bin/python3", ("n1 has no Meshbook", "pip install meshbook==")),
        ("ssh://n1,again", ("n1 and again are one machine",)),
    ],
)
def test_a_machine_that_cannot_be_used_is_named_with_why_and_what_to_do(
    bed: Bed, on: str, words: tuple[str, ...]
) -> None:
    before = time.monotonic()
    with pytest.raises(StartError) as raised:
        create_mesh(2, on=on, torch=False)
    assert [word for word in words if word not in str(raised.value)] == []
    assert time.monotonic() - before < 60  # 10 s on a quiet machine


@pytest.mark.thorough  # ssh waits for 10 s
def test_a_machine_that_drops_all_that_is_sent_to_it_is_named_by_sshs_own_time(bed: Bed) -> None:
    bed.drop("n2")
    before = time.monotonic()
    try:
        with pytest.raises(
            StartError, match=r'n2 does not answer \(".* port 22: Connection timed out"\); is it on, and'
        ):
            create_mesh(2, on="ssh://n1,n2", torch=False)
    finally:
        bed.restore("n2")
    assert time.monotonic() - before < 60  # 10 s on a quiet machine; start_timeout_s is 120


def test_machines_that_differ_are_refused_with_a_table_that_names_them(bed: Bed) -> None:
    python = bed.folder / "other_python"
    (bed.folder / "site" / "torch-2.5.1.dist-info").mkdir(parents=True)
    (bed.folder / "site" / "torch-2.5.1.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.5.1\n")
    path = f"{bed.folder}/site:$PYTHONPATH"
    python.write_text(f'#!/bin/sh\n[ "$(hostname)" = n1 ] || export PYTHONPATH="{path}"\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with pytest.raises(StartError) as raised:
        create_mesh(2, on=f"ssh://n1,n2?python={python}")
    rows = [line.split() for line in str(raised.value).splitlines()]
    assert ["here", "n1", "n2"] in rows
    ours = importlib.metadata.version("torch").partition("+")[0]
    assert ["torch", ours, ours, "2.5.1"] in rows
    with create_mesh(2, on=f"ssh://n1,n2?python={python}&versions=any", torch=False) as mesh:
        assert dict(mesh.run("rank").values) == {0: 0, 1: 1}


def test_a_line_runs_before_python_and_its_failure_is_named(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    clusters = tmp_path / "meshbook.toml"
    clusters.write_text('[clusters.lab]\non = "ssh://n1,n2"\nbefore = "echo hi; export LOADED=$(hostname)-cuda"\n')
    with create_mesh(2, on="lab", torch=False) as mesh:
        assert dict(mesh.run("__import__('os').environ['LOADED']").values) == {0: "n1-cuda", 1: "n2-cuda"}
    clusters.write_text('[clusters.lab]\non = "ssh://n1,n2"\nbefore = "modul load cuda"\n')
    with pytest.raises(StartError, match=r"n[12] did not start Python \(.*modul: command not found.*; see before = in"):
        create_mesh(2, on="lab", torch=False)


def test_a_machine_whose_disk_is_full_is_named(bed: Bed) -> None:
    bed.run("n2", "sh", "-ec", "mkdir -p /run/mb; mount -t tmpfs -o size=64k full /run/mb")
    bed.run("n2", "sh", "-c", "cat /dev/zero > /run/mb/all 2>/dev/null; true")
    try:
        with pytest.raises(StartError, match=r"n2: the folder .* cannot be made: No space left on device; free some"):
            create_mesh(2, on="ssh://n1,n2", torch=False)
    finally:
        bed.run("n2", "umount", "-l", "/run/mb")


def test_a_start_that_is_given_up_leaves_nothing_behind(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "meshbook.toml").write_text("start_timeout_s = 2")
    monkeypatch.chdir(tmp_path)
    before = bed.processes("n1").keys()
    bed.freeze("n2")
    try:
        with pytest.raises(StartError, match="did not come up within 2 s and were stopped"):
            create_mesh(2, on="ssh://n1,n2", torch=False)
    finally:
        bed.thaw("n2")
    when(lambda: bed.processes("n1").keys() <= before)


def test_a_start_shows_from_its_beginning_on_which_machine_it_waits_for(bed: Bed) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            if "n2: ssh connects (" in text:
                bed.thaw("n2")
            return super().write(text)

    bed.freeze("n2")
    try:
        with contextlib.redirect_stdout(Terminal()) as shown, create_mesh(2, on="ssh://n1,n2", torch=False) as mesh:
            assert dict(mesh.run("rank", echo=False).values) == {0: 0, 1: 1}
    finally:
        bed.thaw("n2")
    text = shown.getvalue()
    assert text.index("starting: ") < text.index("n2: ssh connects (") < text.index(" ranks are ready")


def test_ssh_is_asked_for_a_quick_cipher_unless_somebody_has_named_ciphers(bed: Bed) -> None:
    address = Address.parse("ssh://n1")

    def words_of_ssh() -> list[str]:
        connection = SshConnection(address, address.machines[0], ["-m", "meshbook.host.remote", "x", "0"], None, "")
        try:
            connection.open()
            assert connection.process is not None
            return list(map(str, connection.process.args))  # type: ignore[arg-type]
        finally:
            connection.close()

    assert "-oCiphers=^aes128-gcm@openssh.com" in words_of_ssh()
    config = bed.folder / "ssh_config"
    text = config.read_text()
    config.write_text(f"Host n1\n  Ciphers aes256-ctr\n{text}")
    try:
        assert not any("Ciphers" in word for word in words_of_ssh())
    finally:
        config.write_text(text)


@pytest.mark.thorough
def test_machines_that_cannot_reach_each_other_are_named_by_the_doctor_and_by_the_start(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "meshbook.toml").write_text("start_timeout_s = 30")
    bed.run("n1", "ip", "route", "add", "unreachable", "10.77.0.2/32")
    try:
        command = [sys.executable, "-m", "meshbook", "doctor", "--on", "ssh://n1,n2"]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
        assert done.returncode == 1
        assert 'MISSING n1  cannot connect to n2 ("' in done.stdout
        with pytest.raises(StartError, match=r"n1 at 10.77.0.1, n2 at 10.77.0.2\): can they connect to each other\?"):
            create_mesh(2, on="ssh://n1,n2")  # what n2 sends is not answered, so its ranks wait
        bed.run("n2", "ip", "route", "add", "unreachable", "10.77.0.1/32")
        with pytest.raises(StartError, match=r"n1 at 10.77.0.1, n2 at 10.77.0.2\): is there a firewall between them\?"):
            create_mesh(2, on="ssh://n1,n2")  # ranks fail
    finally:
        bed.run("n2", "ip", "route", "flush", "type", "unreachable")
        bed.run("n1", "ip", "route", "del", "unreachable", "10.77.0.2/32")


def test_doctor_looks_at_machines(bed: Bed) -> None:
    command = [sys.executable, "-m", "meshbook", "doctor", "--on", "ssh://n1,n2,locked"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 1
    assert "ok      n1" in done.stdout
    assert done.stdout.count("MB/s") == 2
    assert "n1, n2  each can connect to the others" in done.stdout
    assert "MISSING locked  refused to let you log in" in done.stdout
