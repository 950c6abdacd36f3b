"""A tensor that a cell bound on every rank is a tensor in the cells of this process, under its bare name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernel.frontend import FrontEnd

pytestmark = pytest.mark.usefixtures("starts_kernels")


@pytest.fixture
def front(shared: FrontEnd) -> Iterator[FrontEnd]:
    yield shared
    shared.run("for name in ('tn_w', 'tn_n'): globals().pop(name, None)")


def test_a_bare_name_is_the_tensor_that_cells_work_with(front: FrontEnd) -> None:
    front.run("import torch; tn_w = torch.zeros(3); tn_n = 7")
    here = "%%controller\nimport torch\n"
    assert front.run(here + "isinstance(tn_w, torch.Tensor), type(tn_w).__name__").result == "(True, 'RemoteTensor')"
    assert front.run(here + "_ = tn_w.add_(1)").status == "ok"
    assert front.run("tn_w.mul_(5); print(tn_w.tolist())").stdout.count("[5.0, 5.0, 5.0]") >= 1
    assert front.run(here + "(tn_w * 2).sum().item()").result == "30.0"


def test_a_gradient_is_there_for_the_next_cell_and_a_new_tensor_is_a_new_one(front: FrontEnd) -> None:
    front.run("import torch; tn_w = torch.ones(2, requires_grad=True)")
    front.run("%%controller\n(tn_w * 3).sum().backward()")
    assert front.run("%%controller\ntn_w.grad.tolist()").result == "[[3.0, 3.0], [3.0, 3.0]]"
    front.run("tn_w = torch.full((4,), 2.0)")
    assert front.run("%%controller\ntn_w.shape, tn_w.grad, tn_w.sum().item()").result == "(torch.Size([4]), None, 8.0)"
    front.run("del tn_w")
    assert front.run("%%controller\n'tn_w' in globals()").result == "False"


def test_what_is_no_tensor_stays_a_handle_and_what_is_not_used_is_not_looked_at(front: FrontEnd) -> None:
    front.run("import torch; tn_w = torch.zeros(3); tn_n = 7")
    assert front.run("%%controller\ntype(tn_n).__name__").result == "'RemoteValue'"
    assert front.run("%%controller\ntype(globals()['tn_w']).__name__").result == "'RemoteValue'"
    front.run("%%controller\ntn_w = 5")
    assert front.run("%%controller\ntn_w").result == "5"
    front.run("%%controller\ndel tn_w")
