"""Two meshes of actors that call each other, without the program that started them in between."""

import os

if os.environ.get("ACTORS") == "monarch":
    from monarch.actor import Actor, concurrent_endpoint, context, current_rank, current_size, this_host
else:
    from meshbook.actor import Actor, concurrent_endpoint, context, current_rank, current_size, this_host


class Player(Actor):
    """Its endpoints are concurrent: while one waits for the other player, the next message is taken."""

    def __init__(self, name: str, num_rallies: int) -> None:
        self.name = name
        self.num_rallies = num_rallies
        self.num_hits = 0

    @concurrent_endpoint
    async def meet(self, other: "Player") -> str:
        """A mesh of actors is an argument like any other; a rank of it plays against its counterpart."""
        self.other = other.slice(gpus=current_rank()["gpus"])
        return f"{self.name} {current_rank().rank} of {current_size()['gpus']}"

    @concurrent_endpoint
    async def hit(self, rally: int) -> list[str]:
        """Calls the other one, who calls back here before answering."""
        self.num_hits += 1
        said = f"{self.name} hits {rally}"
        if rally >= self.num_rallies:
            return [said]
        return [said, *await self.other.hit.call_one(rally + 1)]

    @concurrent_endpoint
    async def hits(self) -> int:
        return self.num_hits

    @concurrent_endpoint
    async def where(self) -> str:
        """The place in the mesh that was called, and the place in the mesh of processes."""
        me = context().actor_instance
        return f"{dict(current_rank())} of {dict(current_size())}, {me.rank.rank} of {me.proc_mesh.size()}"


def main() -> None:
    host = this_host()
    left = host.spawn_procs({"gpus": 2}).spawn("left", Player, "left", num_rallies=3)
    right = host.spawn_procs({"gpus": 2}).spawn("right", Player, "right", 4)
    print(list(left.meet.call(right).get().values()))
    print(list(right.meet.call(left).get().values()))

    for point, said in left.hit.call(0).get().items():
        print(point.rank, dict(point), said)
    print("hits on the right:", [hits for _, hits in right.hits.call().get().items()])
    print("one:", right.slice(gpus=1).hit.call_one(2).get())
    print("called together:", list(right.where.call().get().values()))
    print("called alone:", right.slice(gpus=1).where.call_one().get())
    print("called as a slice:", list(right.slice(gpus=slice(1, 2)).where.call().get().values()))
    print("flattened:", list(right.flatten("player").where.call().get().values()))


if __name__ == "__main__":
    main()
