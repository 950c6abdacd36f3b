"""A pipeline: a source streams through a port, stages answer through explicit ports, a sink collects as they come."""

import os
from typing import Any

if os.environ.get("ACTORS") == "monarch":
    from monarch.actor import Accumulator, Actor, Channel, Port, as_endpoint, current_rank, endpoint, send, this_host
else:
    from meshbook.actor import Accumulator, Actor, Channel, Port, as_endpoint, current_rank, endpoint, send, this_host


class Source(Actor):
    @endpoint
    def produce(self, port: Port, count: int) -> int:
        """Sends to whoever opened the channel, one by one, in order."""
        for number in range(count):
            port.send((current_rank().rank, number))
        return count

    @endpoint
    def fail_through(self, port: Port) -> None:
        port.exception(ValueError(f"source {current_rank().rank} is empty"))


class Stage(Actor):
    def __init__(self, factor: int) -> None:
        self.factor = factor
        self.waiting: list[tuple[Port, int]] = []

    @endpoint
    def scale(self, number: int) -> int:
        return self.factor * number

    @endpoint(explicit_response_port=True)
    def later(self, port: Port, number: int) -> None:
        """Answers when the batch is full: an endpoint need not answer before it returns."""
        self.waiting.append((port, number))
        if len(self.waiting) == 3:
            for waiting, value in self.waiting:
                waiting.send(self.factor * value)
            self.waiting.clear()

    def plain(self, number: int) -> int:
        return self.factor + number


def main() -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    sources = procs.spawn("sources", Source)
    stages = procs.spawn("stages", Stage, 10)

    port, receiver = Channel[Any].open()
    counts = sources.produce.call(port, 4).get()
    heard = [receiver.recv().get() for _ in range(sum(counts.values()))]
    for rank in range(2):
        print("from source", rank, [number for sender, number in heard if sender == rank])

    print("scaled:", [stages.slice(gpus=0).scale.call_one(number).get() for rank, number in sorted(heard)])
    print("sum over the mesh:", Accumulator(stages.scale, 0, lambda a, b: a + b).accumulate(7).get())

    first = stages.slice(gpus=1)
    waiting = [first.later.call_one(number) for number in (1, 2, 3)]
    print("answered later:", [future.get() for future in waiting])

    once, one = Channel[Any].open(once=True)
    sources.slice(gpus=1).fail_through.call_one(once).get()
    try:
        one.recv().get()
    except Exception as error:
        print("through the port:", type(error).__name__, error)

    reply, answers = Channel[Any].open()
    send(stages.scale, (4,), {}, port=reply)
    print("both sent:", sorted(answers.recv().get() for _ in range(2)))

    print("streamed:", sorted(future.get() for future in stages.scale.stream(6)))
    print("chosen:", stages.scale.choose(5).get())
    print("a method that is no endpoint:", list(as_endpoint(stages.plain).call(1).get().values()))


if __name__ == "__main__":
    main()
