"""A project's files on hosts: before their ranks start, when a client asks for it; and which files hosts may read."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshbook.ids import CallId
from meshbook.supervisor import effects as s
from meshbook.supervisor.project_server import ProjectServer
from meshbook.wire import messages
from meshbook.wire.messages import FilePart, HostFiles, MeshSpec, PartRead, ProjectFile, ProjectSpec
from tests.supervisor.test_silent_hosts import Silence
from tests.supervisor.test_state import World, facts_of, messages_of, steps_of

FILES = (ProjectFile("a.py", 3, b"1"),)
NEWER = (ProjectFile("a.py", 4, b"2"),)
CALL = CallId("sync-1")


def starting() -> World:
    """A mesh on two machines that comes up."""
    world = World(num_ranks=2, num_hosts=2, start=False)
    project = ProjectSpec("/p", uv="sub")
    world.spec = MeshSpec({"rank": 2}, engine="ssh", on="ssh://n1,n2", num_hosts=2, project=project)
    world.say(messages.StartMesh(call=CallId("start"), spec=world.spec, files=FILES))
    world.state.machines.watch = Silence()
    return world


def ready(world: World, host: int) -> list[s.Effect]:
    return world.host(messages.HostReady(host=host, hostname=f"b{host}", pid=3, facts=facts_of(f"m{host}")), host)


def synced(world: World, host: int, call: str, **found: object) -> list[s.Effect]:
    return world.host(messages.FilesSynced(CallId(call), **found), host)  # type: ignore[arg-type]


@pytest.fixture
def world() -> World:
    """A mesh on two machines that is up."""
    world = starting()
    for host in (0, 1):
        ready(world, host)
    for host in (0, 1):
        formed = synced(world, host, f"files-{host}")
    world.finish(messages_of(formed, messages.FormGroups)[0].call, ranks=(0,), host=0, reply={"backend": "gloo"})
    world.finish(messages_of(formed, messages.FormGroups)[0].call, ranks=(1,), host=1, reply={"backend": "gloo"})
    return world


def test_ranks_start_when_their_machine_has_the_files_and_the_wait_counts_as_a_queue() -> None:
    world = starting()
    first, second = ready(world, 0), ready(world, 1)
    for host, effects in enumerate((first, second)):
        (sent,) = steps_of(effects, s.SendToHosts)
        assert sent == s.SendToHosts((host,), messages.SyncFiles(CallId(f"files-{host}"), "/p", FILES, "sub"))
    (queued,) = messages_of(first, messages.MeshStarting)
    assert queued.state == "/p goes to 2 machines: 1 file, 0.0 MiB; uv sync --frozen runs there"
    assert messages_of(synced(world, 0, "files-0"), messages.StartRanks) == []
    last = synced(world, 1, "files-1")
    assert [queued.state for queued in messages_of(last, messages.MeshStarting)] == [""]
    assert [start.ranks for start in messages_of(last, messages.StartRanks)] == [(0,), (1,)]


def test_a_machine_that_comes_when_the_first_has_the_files_is_waited_for_too() -> None:
    world = starting()
    ready(world, 0)
    assert [queued.state for queued in messages_of(synced(world, 0, "files-0"), messages.MeshStarting)] == [""]
    assert [queued.state for queued in messages_of(ready(world, 1), messages.MeshStarting)] == [
        "n2 gets the project too"
    ]
    assert messages_of(synced(world, 1, "files-1"), messages.StartRanks)


def test_a_machine_that_cannot_have_the_files_ends_the_start_with_its_name() -> None:
    world = starting()
    ready(world, 0)
    ready(world, 1)
    effects = synced(world, 1, "files-1", error="No space left on device")
    (refused,) = messages_of(effects, messages.Refused)
    assert (refused.error, refused.text) == ("StartError", "n2: No space left on device")
    assert steps_of(effects, s.Shutdown)


def test_a_machine_that_is_lost_while_it_gets_the_files_ends_the_start_with_its_name() -> None:
    world = starting()
    ready(world, 1)
    (refused,) = messages_of(world.state.host_exited(1, "has not answered", 1.0), messages.Refused)
    assert refused.text.startswith("machine n2 has not answered while the mesh was coming up")


def test_a_sync_is_over_when_all_machines_have_reported_with_what_came_to_each(world: World) -> None:
    (sent,) = steps_of(world.say(messages.SyncProject(CALL, NEWER)), s.SendToHosts)
    assert sent.hosts == (0, 1)
    assert isinstance(sent.message, messages.SyncFiles)
    assert sent.message.files == NEWER
    assert synced(world, 1, CALL, num_files=1, num_bytes=4, num_removed=2) == []
    (reply,) = messages_of(synced(world, 0, CALL, error="no space"), messages.CommandReply)
    assert reply.synced == (HostFiles("n1", error="no space"), HostFiles("n2", 1, 4, 2))


def test_a_sync_does_not_wait_for_a_machine_that_is_lost(world: World) -> None:
    world.say(messages.SyncProject(CALL, NEWER))
    synced(world, 0, CALL, num_files=1, num_bytes=4)
    lost = world.state.host_exited(1, "has not answered for 15 s", 1.0)
    assert [reply.synced for reply in messages_of(lost, messages.CommandReply)] == [(HostFiles("n1", 1, 4),)]
    (sent,) = steps_of(world.say(messages.SyncProject(CallId("sync-2"), NEWER)), s.SendToHosts)
    assert sent.hosts == (0,)


def test_a_machine_that_comes_back_gets_the_files_of_the_last_sync_before_its_ranks(world: World) -> None:
    world.say(messages.SyncProject(CALL, NEWER))
    world.state.host_exited(1, "has not answered for 15 s", 1.0)
    world.say(messages.HealMesh(CallId("heal")))
    back = ready(world, 1)
    assert [sent.files for sent in messages_of(back, messages.SyncFiles)] == [NEWER]
    assert messages_of(back, messages.StartRanks) == []
    assert messages_of(world.state.timer_fired("hosts 0", 90.0), messages.Refused) == []  # its uv may take long
    assert [
        sent.hosts for sent in steps_of(world.say(messages.SyncProject(CallId("sync-2"), FILES)), s.SendToHosts)
    ] == [(0, 1)]
    assert [start.ranks for start in messages_of(synced(world, 1, "files-1"), messages.StartRanks)] == [(1,)]


def test_a_mesh_without_a_project_refuses_a_sync_and_says_how_it_gets_one() -> None:
    world = World(num_hosts=2)
    (refused,) = messages_of(world.say(messages.SyncProject(CALL, NEWER)), messages.Refused)
    assert refused.error == "SyncError"
    assert "%mesh restart --sync" in refused.text


# ---- what hosts may read


@pytest.fixture
def server(tmp_path: Path) -> ProjectServer:
    server = ProjectServer()
    root = tmp_path / "p"
    root.mkdir()
    (root / "a.py").write_text("abc")
    (root / "private.txt").write_text("no")
    (root / "turned").symlink_to(tmp_path / "outside")
    (tmp_path / "outside").write_text("no")
    files = (*FILES, ProjectFile("turned"), ProjectFile("gone"), ProjectFile("l", link="private.txt"))
    server.allow(messages.SyncFiles(CALL, str(root), files))
    return server


def read(server: ProjectServer, path: str, offset: int = 0, nbytes: int = 10) -> PartRead:
    reply = server.serve(messages.FetchFiles(7, (FilePart(path, offset, nbytes),)))
    assert reply.batch == 7
    return reply.parts[0]


def test_a_host_reads_the_files_of_the_sync_with_their_size_and_time(server: ProjectServer) -> None:
    part = read(server, "a.py", 1)
    assert (part.data, part.file_bytes) == (b"bc", 3)
    assert part.mtime_ns > 0


@pytest.mark.parametrize("path", ["private.txt", "../outside", "/etc/passwd", "turned", "gone", "l"])
def test_a_host_reads_no_other_file(server: ProjectServer, path: str) -> None:
    assert read(server, path) == PartRead(b"", -1, 0)
