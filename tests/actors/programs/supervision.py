"""A process is killed: calls on it fail at once, its owner hears of it and decides, the rest goes on."""

import os
import signal
import threading

if os.environ.get("ACTORS") == "monarch":
    import monarch.actor as actor_module
    from monarch.actor import Actor, ActorError, MeshFailure, current_rank, endpoint, this_host
else:
    import meshbook.actor as actor_module
    from meshbook.actor import Actor, ActorError, MeshFailure, current_rank, endpoint, this_host


class Worker(Actor):
    def __init__(self) -> None:
        self.num_calls = 0

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def work(self) -> str:
        self.num_calls += 1
        return f"worker {os.getpid() > 0 and self.num_calls}"

    @endpoint
    def fail(self) -> None:
        raise KeyError(f"worker {current_rank().rank} has no such thing")

    @endpoint
    def hang(self) -> None:
        threading.Event().wait(100)


class Manager(Actor):
    """Owns workers, and handles their failure itself."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.workers = this_host().spawn_procs({"gpus": 2}).spawn("workers", Worker)

    @endpoint
    def pids(self) -> list[int]:
        return list(self.workers.pid.call().get().values())

    @endpoint
    def lose(self, pid: int) -> str:
        os.kill(pid, signal.SIGKILL)
        try:
            for _ in range(10_000):
                self.workers.work.call().get(timeout=60)
        except Exception as error:
            return type(error).__name__
        return "nothing was raised"

    @endpoint
    def survivor(self) -> str:
        return self.workers.slice(gpus=0).work.call_one().get()

    @endpoint
    def heard(self) -> list[str]:
        return self.failures

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.failures.append(failure.mesh_name)
        return True


def main() -> None:
    unhandled: list[str] = []
    arrived = threading.Event()

    def hook(failure: MeshFailure) -> None:
        unhandled.append(failure.report())
        arrived.set()

    actor_module.unhandled_fault_hook = hook

    # An error in an endpoint is the caller's, and the actor lives.
    workers = this_host().spawn_procs({"gpus": 2}).spawn("own", Worker)
    pids = list(workers.pid.call().get().values())
    try:
        workers.fail.call().get()
    except ActorError as error:
        print("ActorError:", "has no such thing" in str(error), type(error.exception).__name__)
    print("it lives:", workers.slice(gpus=1).work.call_one().get())

    # The manager handles the loss of a worker of its own: nobody else hears of it.
    manager = this_host().spawn_procs({"gpus": 1}).spawn("manager", Manager)
    theirs = manager.pids.call_one().get()
    print("raised at the manager:", manager.lose.call_one(theirs[1]).get())
    print("its other worker:", manager.survivor.call_one().get() != "")
    while not (heard := manager.heard.call_one().get()):
        pass
    print(f"the manager heard: {len(heard) > 0}, unhandled: {len(unhandled)}")

    # The loss of a worker of the program's own fails the open call, and comes to the hook.
    waiting = workers.hang.call()
    os.kill(pids[1], signal.SIGKILL)
    try:
        waiting.get(timeout=60)
    except Exception as error:
        print("an open call:", type(error).__name__)
    print("the hook was called:", arrived.wait(60))
    os.kill(pids[0], signal.SIGKILL)


if __name__ == "__main__":
    main()
