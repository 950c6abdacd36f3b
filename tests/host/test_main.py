"""A host that is a process of its own, without ranks and with a supervisor that is this test."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from meshbook.host.main import HostProcess
from meshbook.wire import codec, messages

SPEC = messages.MeshSpec(axes={"rank": 1}, torch=False, process_group=False)


@pytest.fixture
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostProcess]:
    host = HostProcess(tmp_path_factory.mktemp("h"), 0, "token", lease_s=5.0)
    host._supervisor = SimpleNamespace(accept=lambda frames: frames[0], send=lambda body: None)  # type: ignore[assignment]
    yield host
    host.agent.launcher.close()
    host.agent.close()
    host._context.destroy(linger=0)


def test_a_host_that_ends_starts_no_rank_that_it_is_asked_for_too_late(host: HostProcess) -> None:
    start = messages.StartRanks(spec=SPEC, ranks=(0,), world_size=1, host_ranks=(0,))  # type: ignore[arg-type]
    for heard in (messages.Exit(grace_s=0.0), start):
        host._hear([codec.encode_body(heard)])
    assert host.agent.launcher.starter is None
    assert host.agent.ledger.living() == []


def test_a_host_without_a_keeper_has_no_standby(host: HostProcess) -> None:
    host._report(messages.CallFinished(call="c", outcomes=(), seconds=0.0))  # type: ignore[arg-type]
    host.loop.run_once(0.0)
    assert host.loop._standby is None


def test_a_host_ends_its_ranks_after_looks_without_a_word_as_many_as_its_lease_has_seconds(host: HostProcess) -> None:
    ends: list[str] = []
    host.stop = ends.append  # type: ignore[method-assign]
    for _ in range(6):
        host._check_lease()
    assert ends == ["is there a firewall? No connection to the mesh's supervisor for 5 s"]
    ends.clear()
    host._hear([codec.encode_body(messages.KeepAlive(sent_at=1.0))])
    for _ in range(5):
        host._check_lease()
    assert ends == []
    host._check_lease()
    assert ends == ["no word from the mesh's supervisor for 5 s"]
