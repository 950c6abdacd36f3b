"""A host that is a process of its own, without ranks and with a supervisor that is this test."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from meshbook.host.main import HostProcess
from meshbook.wire import codec, messages

SPEC = messages.MeshSpec(axes={"rank": 1}, torch=False, process_group=False)


def test_a_host_that_ends_starts_no_rank_that_it_is_asked_for_too_late(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    start = messages.StartRanks(spec=SPEC, ranks=(0,), world_size=1, host_ranks=(0,))  # type: ignore[arg-type]
    host = HostProcess(tmp_path_factory.mktemp("h"), 0, "token")
    host._supervisor = SimpleNamespace(accept=lambda frames: frames[0], send=lambda body: None)  # type: ignore[assignment]
    try:
        for heard in (messages.Exit(grace_s=0.0), start):
            host._hear([codec.encode_body(heard)])
        assert host.agent.launcher.starter is None
        assert host.agent.ledger.living() == []
    finally:
        host.agent.launcher.close()
        host.agent.close()
        host._context.destroy(linger=0)
