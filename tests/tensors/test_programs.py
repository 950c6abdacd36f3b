"""Small programs as strangers write them, on a mesh as in one process: torch.func, hooks, optimizers, scalers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import func, nn
from torch.distributed.tensor import Shard
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import meshbook
from meshbook.controller.mesh import Mesh
from meshbook.tensors.remote import RemoteTensor

pytestmark = [pytest.mark.numbers, pytest.mark.usefixtures("starts_meshes")]


def loss_of(parameters: Any, model: Any, x: Any) -> Any:
    return func.functional_call(model, parameters, (x,)).square().sum()


def derivatives(model: Any, x: Any) -> Any:
    parameters = {name: tensor.detach() for name, tensor in model.named_parameters()}
    out, back = func.vjp(model, x)
    return (
        (out, back(torch.ones_like(out))),
        func.jvp(lambda y: func.functional_call(model, parameters, (y,)), (x,), (torch.ones_like(x),)),
        func.grad(loss_of)(parameters, model, x),
        func.jvp(lambda y: (y * y).sin(), (x,), (torch.ones_like(x),)),
        func.jacrev(lambda y: model(y).sum(0))(x),
        func.jacfwd(lambda y: model(y).sum(0))(x),
        func.hessian(lambda y: (y[0] ** 3).sum())(x[:2]),
        func.vmap(model)(x),
        func.vmap(func.grad(lambda p, row: loss_of(p, model, row[None])), (None, 0))(parameters, x),
    )


def without_gradients(model: Any, x: Any) -> Any:
    with torch.inference_mode():
        made = model(x)
        rows, more = made[2:5], made[3:7]
        made.add_(1.0)
        rows.mul_(2.0)
        more[:, 1] = 0.0
        inferred = (made + 0.0).clone(), rows * 1.0
    with torch.no_grad():
        quiet = model(x)
    return inferred, quiet, quiet.requires_grad


def hooked(model: Any, x: Any) -> Any:
    model[0].register_forward_hook(lambda part, given, out: out * 2)
    model[2].register_forward_pre_hook(lambda part, given: (given[0] + 1,))
    model[1].register_full_backward_pre_hook(lambda part, grads: (grads[0] * 0.5,))
    model[2].register_full_backward_hook(lambda part, grads, outs: (grads[0] * 3,))
    model[0].weight.register_hook(lambda grad: grad * 2)
    checkpoint(model, x, use_reentrant=False).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def copied(model: Any, x: Any) -> Any:
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other = copy.deepcopy(model)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    average.update_parameters(model)
    changed = model(x)
    model.load_state_dict(kept)
    return changed, other(x), model(x), average(x), nn.utils.parameters_to_vector(model.parameters())


def scaled(model: Any, x: Any) -> Any:
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")
    schedules = [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)]
    schedules.append(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        loss = model(x).square().mean() * factor
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedules[0].step()
        schedules[1].step(loss.item())
    return list(model.parameters()), scaler.get_scale()


def in_odd_ways(model: Any, x: Any) -> Any:
    basis = x.t().contiguous() * 1.0
    nn.init.orthogonal_(basis)
    rows = torch.distributions.Categorical(logits=x)
    return x.quantile(0.5, 1), (basis.t() @ basis).diagonal(), rows.entropy(), rows.log_prob(torch.arange(8))


def optimized(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[Any, Any], Any]:
    def run(model: Any, x: Any) -> Any:
        optimizer = make(model.parameters())

        def closure() -> Any:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        return list(model.parameters())

    return run


PROGRAMS = [derivatives, without_gradients, hooked, copied, scaled, in_odd_ways]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam, for each": lambda p: torch.optim.Adam(p, 1e-2, eps=1e-3, amsgrad=True, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-3, fused=True),
    "AdamW, fused, its rate a tensor": lambda p: torch.optim.AdamW(p, torch.tensor(1e-2), eps=1e-3, fused=True),
    "SGD, fused": lambda p: torch.optim.SGD(p, 0.1, fused=True),
    "SGD, fused, with momentum": lambda p: torch.optim.SGD(p, torch.tensor(0.1), 0.9, nesterov=True, fused=True),
    "Adagrad, fused": lambda p: torch.optim.Adagrad(p, 1e-2, lr_decay=0.1, eps=1e-3, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-2, eps=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-2, eps=1e-3, momentum=0.9),
    "Rprop, for each": lambda p: torch.optim.Rprop(p, 1e-2, foreach=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
    "LBFGS": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3, line_search_fn="strong_wolfe"),
}


def here_and_there(program: Callable[[Any, Any], Any], mesh: Mesh) -> None:
    torch.manual_seed(3)
    alone, x = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)), torch.randn(8, 12)
    model = meshbook.module_to_mesh(copy.deepcopy(alone), mesh)
    there = meshbook.distribute(x, mesh, [Shard(0)])
    wanted, got = pytree.tree_leaves(program(alone, x)), pytree.tree_leaves(program(model, there))
    assert len(got) == len(wanted)
    for mine, plain in zip(got, wanted, strict=True):
        if isinstance(plain, torch.Tensor):
            assert isinstance(mine, RemoteTensor)
            torch.testing.assert_close(mine.detach().full_tensor(), plain.detach(), rtol=2e-4, atol=2e-5)
        else:
            assert mine == plain


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # functorch's own
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_gives_what_it_gives_in_one_process(program: Callable[[Any, Any], Any], mesh2: Mesh) -> None:
    here_and_there(program, mesh2)


def test_optimizers_step_as_in_one_process(mesh2: Mesh) -> None:
    wrong = []
    for name, make in OPTIMIZERS.items():
        try:
            here_and_there(optimized(make), mesh2)
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    assert not wrong, "\n".join(wrong)


def test_an_optimizer_goes_on_from_a_state_that_was_saved_in_one_process(mesh2: Mesh) -> None:
    torch.manual_seed(0)
    plain, x = nn.Linear(4, 2), torch.randn(8, 4)

    def make(model: Any) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)

    def step(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    optimizer = make(plain)
    step(plain, optimizer)
    model = meshbook.distribute(copy.deepcopy(plain), mesh2, strategy="fsdp")
    there = make(model)
    there.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert there.state[model.weight]["exp_avg"].placements == model.weight.placements
    step(plain, optimizer)
    step(model, there)
    torch.testing.assert_close(model.weight.full_tensor().detach(), plain.weight.detach())
