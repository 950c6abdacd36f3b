"""A parameter server: workers of one mesh pull weights from an actor of another and push gradients to it."""

import os

import numpy as np

if os.environ.get("ACTORS") == "monarch":
    from monarch.actor import Actor, ActorError, ValueMesh, current_rank, endpoint, this_host
else:
    from meshbook.actor import Actor, ActorError, ValueMesh, current_rank, endpoint, this_host


class Server(Actor):
    def __init__(self, size: int, lr: float) -> None:
        self.weights = np.zeros(size)
        self.lr = lr
        self.num_pushes = 0

    @endpoint
    async def pull(self) -> np.ndarray:
        return self.weights

    @endpoint
    async def push(self, gradient: np.ndarray) -> None:
        if gradient.shape != self.weights.shape:
            raise ValueError(f"a gradient of {gradient.shape} for weights of {self.weights.shape}")
        self.weights = self.weights - self.lr * gradient
        self.num_pushes += 1

    @endpoint
    async def pushes(self) -> int:
        return self.num_pushes


class Worker(Actor):
    """Fits its share of a line: y = 3 x0 - 2 x1 + 1 x2."""

    def __init__(self, server: Server) -> None:
        self.server = server
        place = current_rank()
        rng = np.random.default_rng(place["host_row"] * 10 + place["gpus"])
        self.x = rng.normal(size=(64, 3))
        self.y = self.x @ np.array([3.0, -2.0, 1.0])

    @endpoint
    async def train(self, num_steps: int) -> float:
        for _ in range(num_steps):
            weights = await self.server.pull.call_one()
            error = self.x @ weights - self.y
            await self.server.push.call_one(2 * self.x.T @ error / len(error))
        weights = await self.server.pull.call_one()
        return float(np.abs(self.x @ weights - self.y).mean())

    @endpoint
    async def push_wrong(self) -> None:
        await self.server.push.call_one(np.zeros(5))


def main() -> None:
    host = this_host()
    server = host.spawn_procs({"gpus": 1}).spawn("server", Server, 3, lr=0.05)
    procs = host.spawn_procs({"host_row": 1, "gpus": 3})
    workers = procs.spawn("workers", Worker, server)
    print("workers:", workers.size(), workers.size("gpus"), workers.sizes)

    errors = workers.train.call(60).get()
    print("a ValueMesh:", isinstance(errors, ValueMesh), len(errors), list(errors.extent.labels))
    print("learned:", all(error < 0.05 for error in errors.values()))
    weights = server.pull.call_one().get()
    print("weights:", np.round(weights, 1).tolist())
    print("pushes:", server.pushes.call_one().get())

    print("a slice:", len(workers.slice(gpus=slice(1, 3)).train.call(1).get()))
    for _ in range(5):
        server.push.broadcast(np.zeros(3))
    print("in order:", server.pushes.call_one().get())
    try:
        workers.slice(gpus=0).push_wrong.call_one().get()
    except ActorError as error:
        print("the error crossed two calls:", "a gradient of (5,)" in str(error))
    print("it lives:", server.pushes.call_one().get())
    procs.stop().get()


if __name__ == "__main__":
    main()
