"""Reinforcement learning of many parts: generators answer, a scorer judges, a replay buffer keeps, a trainer learns.

The task: sort four digits, seen as a reward for each digit in its place. Data flows between the actors directly; the
trainer's weights are read by the generators themselves, out of its memory. A generator is killed on the way.
"""

import os
import signal

import torch

if os.environ.get("ACTORS") == "monarch":
    import monarch.actor as actor_module
    from monarch.actor import Actor, current_rank, endpoint, this_host
    from monarch.rdma import RDMABuffer
else:
    import meshbook.actor as actor_module
    from meshbook.actor import Actor, current_rank, endpoint, this_host
    from meshbook.rdma import RDMABuffer

LENGTH, NUM_DIGITS = 4, 8


class Policy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)
        torch.manual_seed(0)
        wide = LENGTH * NUM_DIGITS
        self.layers = torch.nn.Sequential(torch.nn.Linear(wide, 128), torch.nn.ReLU(), torch.nn.Linear(128, wide))

    def forward(self, prompts: torch.Tensor) -> torch.Tensor:
        one_hot = torch.nn.functional.one_hot(prompts, NUM_DIGITS).float()
        return self.layers(one_hot.flatten(1)).view(-1, LENGTH, NUM_DIGITS)


class Scorer(Actor):
    @endpoint
    async def score(self, prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        """1 for each digit in its place."""
        return (answers == prompts.sort(-1).values).float()


class Replay(Actor):
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.kept: list[tuple[torch.Tensor, ...]] = []

    @endpoint
    async def put(self, batch: tuple[torch.Tensor, ...]) -> None:
        self.kept = [*self.kept, batch][-self.capacity :]

    @endpoint
    async def newest(self, num_batches: int) -> list[torch.Tensor]:
        return [torch.cat(parts) for parts in zip(*self.kept[-num_batches:], strict=True)]


class Generator(Actor):
    def __init__(self, scorer: Scorer, replay: Replay) -> None:
        self.scorer, self.replay = scorer, replay
        self.policy = Policy()
        self.flat = torch.nn.utils.parameters_to_vector(self.policy.parameters()).detach().clone()
        torch.manual_seed(current_rank().rank)

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def sync(self, weights: RDMABuffer) -> None:
        """The weights come out of the trainer's memory, which the trainer does not notice."""
        await weights.read_into(self.flat)
        torch.nn.utils.vector_to_parameters(self.flat, self.policy.parameters())

    @endpoint
    async def generate(self, size: int) -> float:
        """Answers, has them scored, and gives them to the replay buffer: from process to process."""
        prompts = torch.randint(NUM_DIGITS, (size, LENGTH))
        with torch.no_grad():
            choice = torch.distributions.Categorical(logits=self.policy(prompts))
            answers = choice.sample()
            log_probs = choice.log_prob(answers)
        rewards = await self.scorer.score.call_one(prompts, answers)
        await self.replay.put.call_one((prompts, answers, log_probs, rewards))
        return float(rewards.mean())


class Trainer(Actor):
    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self.policy = Policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), 2e-2)
        self.flat = torch.nn.utils.parameters_to_vector(self.policy.parameters()).detach().clone()
        self.step = 0

    @endpoint
    async def weights(self) -> RDMABuffer:
        return RDMABuffer(self.flat)

    @endpoint
    async def learn(self, num_batches: int) -> int:
        prompts, answers, old, rewards = await self.replay.newest.call_one(num_batches)
        advantages = rewards - rewards.mean(0)
        new = torch.distributions.Categorical(logits=self.policy(prompts)).log_prob(answers)
        ratio = (new - old).exp()
        loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.flat.copy_(torch.nn.utils.parameters_to_vector(self.policy.parameters()).detach())
        self.step += 1
        return self.step

    @endpoint
    async def accuracy(self) -> float:
        """On digits that nobody learned from."""
        prompts = torch.randint(NUM_DIGITS, (1000, LENGTH), generator=torch.Generator().manual_seed(9))
        return float((self.policy(prompts).argmax(-1) == prompts.sort(-1).values).float().mean())


def main(num_generators: int = 2, num_steps: int = 30) -> None:
    actor_module.unhandled_fault_hook = lambda failure: None  # a lost generator is no reason to end
    host = this_host()
    services = host.spawn_procs({"gpus": 1})
    scorer = services.spawn("scorer", Scorer)
    replay = services.spawn("replay", Replay, capacity=8)
    trainer = host.spawn_procs({"gpus": 1}).spawn("trainer", Trainer, replay)
    generators = host.spawn_procs({"gpus": num_generators}).spawn("generators", Generator, scorer, replay)

    weights = trainer.weights.call_one().get()
    victim = generators.slice(gpus=0).pid.call_one().get()
    before = trainer.accuracy.call_one().get()
    lost = False
    for step in range(num_steps):
        if step == num_steps // 3:
            os.kill(victim, signal.SIGKILL)
        try:
            generators.generate.call(256).get()
        except Exception as error:
            print("lost a generator:", type(error).__name__)
            lost = True
            generators = generators.slice(gpus=slice(1, num_generators))
            generators.generate.call(256).get()
        trainer.learn.call_one(len(generators) if lost else num_generators).get()
        generators.sync.call(weights).get()

    after = trainer.accuracy.call_one().get()
    print("before:", before < 0.25, "after:", after > 0.5, "generators left:", len(generators))


if __name__ == "__main__":
    main()
