"""What torch has set for a thread comes back when a call was interrupted in a mode's own code."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from meshbook.rank.thread_modes import ThreadModes


def test_a_mode_whose_beginning_was_interrupted_is_left() -> None:
    before = ThreadModes()
    torch.set_grad_enabled(False)
    FakeTensorMode().__enter__()
    assert type(torch.ones(2)).__name__ == "FakeTensor"
    before.restore()
    assert type(torch.ones(2)) is torch.Tensor
    assert torch.is_grad_enabled()
    assert not torch._C._only_lift_cpu_tensors()


def test_a_mode_that_there_was_before_stays() -> None:
    with FakeTensorMode():
        before = ThreadModes()
        before.restore()
        assert type(torch.ones(2)).__name__ == "FakeTensor"
