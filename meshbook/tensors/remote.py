"""`RemoteTensor`: a torch.Tensor whose shape is in this process and whose data is on the ranks.

Autograd, modules and optimizers of torch run here unchanged; each of their operations is sent to the ranks without
waiting (`dispatch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from meshbook.controller.mesh import Mesh
from meshbook.controller.sigint import defer_sigint
from meshbook.rank.tensors import operators
from meshbook.tensors import dispatch, overrides, values, views
from meshbook.tensors.base import MeshTensor


class RemoteTensor(MeshTensor):
    """A tensor on a mesh: one global tensor with `placements`, or one tensor per rank (`placements` is None).

    Its operations are torch's own. Those that need values wait for the ranks: `item()`, `tolist()`, `print`, `bool()`,
    `full_tensor()`, `local(rank)`; all others return at once.
    """

    _keep_alive: Any  # objects that must live as long
    _meshbook_is_tensor = True  # operators of remote handles (`controller.remote`) defer to it

    __torch_dispatch__ = staticmethod(dispatch.torch_dispatch)  # type: ignore[assignment]

    # ---- location

    @property
    def placements(self) -> tuple[Any, ...] | None:
        """torch's placements, one per axis of the mesh; None: every rank has a tensor of its own."""
        return self._spec.placements

    @property
    def mesh(self) -> Mesh:
        """The mesh whose ranks hold the data."""
        engine = self._spec.engine
        return Mesh.of(engine.session, engine.axes)

    # ---- values

    def full_tensor(self, *, force: bool = False) -> torch.Tensor:
        """Return the complete tensor as a local one. Blocks.

        Returns:
            CPU tensor of `self.shape`, without autograd history. Partial placements are reduced first. Of the per-rank
            view: the ranks' tensors stacked along a new first dim, in the mesh's order.

        Args:
            force: fetch it even if it is larger than 1 GiB.

        Raises:
            MemoryError: it is larger than 1 GiB, and `force` was not given.
            OperationFailed: it could not be computed.
            RankLost: a rank that held a part has exited.
        """
        return values.full_tensor(self, force=force)

    def local(self, rank: int) -> torch.Tensor:
        """Return one rank's local tensor unchanged: a shard, a replica, or an unreduced partial value. Blocks.

        Args:
            rank: global rank.

        Raises:
            MeshShapeError: the rank is not in this tensor's mesh.
        """
        return values.local(self, rank)

    def tolist(self) -> Any:
        """Return its values as (nested) lists. Blocks."""
        return self.full_tensor().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the complete tensor as a local array. Blocks."""
        return self.full_tensor().numpy()

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """Return an array of this tensor's shape; of per-rank tensors the one that all ranks hold. Blocks.

        Raises:
            TransferError: ranks hold different ones.
        """
        import numpy

        return numpy.asarray(values.same_on_all(self).numpy(), dtype=dtype)

    # ---- other placements, other views

    def redistribute(self, placements: Sequence[Any] | None = None, *, sharding_spec: Any = None) -> RemoteTensor:
        """Return the same values with other placements. Does not wait. Differentiable.

        Args:
            placements: torch's, one per axis of the mesh.
            sharding_spec: or, per tensor dim, the axis (or axes) that shards it: `["dp", None]`.
        """
        return views.redistribute(self, placements, sharding_spec)  # type: ignore[no-any-return]

    def as_global(self, placements: Sequence[Any]) -> RemoteTensor:
        """View the ranks' own tensors as shards of one global tensor, with the same storage. Does not wait."""
        return views.as_global(self, placements)  # type: ignore[no-any-return]

    def as_local(self) -> RemoteTensor:
        """View each rank's shard as a tensor of its own, with the same storage. Does not wait."""
        return views.as_local(self)  # type: ignore[no-any-return]

    def reduce(self, axis: str, op: str = "sum") -> RemoteTensor:
        """Reduce per-rank tensors over an axis: every rank along it gets the result. Does not wait.

        Args:
            op: "sum", "avg", "max", "min" or "product".
        """
        return views.reduce(self, axis, op)  # type: ignore[no-any-return]

    def slice_mesh(self, **which: int) -> RemoteTensor:
        """Return on every rank the tensor at these coordinates: `t.slice_mesh(dp=0)`. Per-rank view. Does not wait."""
        return views.slice_mesh(self, which)  # type: ignore[no-any-return]

    # ---- torch's own names

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Like torch's, for dtypes and memory formats. The data stays on the ranks' devices, whatever device is named.

        "meta" gives a tensor without data.
        """
        is_first = bool(args) and isinstance(args[0], (str, int, torch.device))
        device = args[0] if is_first else kwargs.get("device")
        if device is None or (not isinstance(device, int) and torch.device(device).type == "meta"):
            return super().to(*args, **kwargs)
        kwargs.pop("device", None)
        # Of another device torch would make a context in this process.
        return super().to("cpu", *args[is_first:], **kwargs)

    def cuda(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return itself: the data is on the ranks' devices."""
        return self

    def requires_grad_(self, requires_grad: bool = True) -> RemoteTensor:
        """Like torch's. A leaf's gradient is redistributed to the leaf's placements once, as soon as it exists.

        Otherwise every operation of an optimizer would reduce a partial sum again.
        """
        super().requires_grad_(requires_grad)
        if requires_grad and self._spec.placements is not None and not getattr(self, "_has_grad_hook", False):
            self._has_grad_hook = True
            self.register_post_accumulate_grad_hook(redistribute_grad)  # type: ignore[no-untyped-call]
        return self

    def backward(self, gradient: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> None:
        """Like torch's. A local gradient is sharded like this tensor."""
        if gradient is not None and not isinstance(gradient, RemoteTensor) and gradient.shape == self.shape:
            gradient = dispatch.upload_grad(self._spec, gradient)
        super().backward(gradient, *args, **kwargs)  # type: ignore[no-untyped-call]

    @property
    def data(self) -> RemoteTensor:
        """The same tensor without autograd; assigning makes this tensor use the storage of the other.

        What a module on the ranks, or a name of their cells, refers to is written into instead.
        """
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if not isinstance(other, RemoteTensor):
            raise TypeError(
                "the data of a remote tensor must be a remote tensor; meshbook.distribute(local, mesh, ...) makes one, "
                "and x.copy_(local) changes the numbers only"
            )
        if self._handle.version_counter is self.engine.foreign_version_counter:
            if (other.shape, other.dtype) != (self.shape, self.dtype):
                raise TypeError(
                    f"the ranks refer to this tensor of shape {tuple(self.shape)} and {self.dtype}; it cannot be "
                    f"one of shape {tuple(other.shape)} and {other.dtype}"
                )
            with torch.no_grad():
                self.copy_(other)
            return
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self._handle = other._handle

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return values.format_repr(self)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else format(str(self), spec)

    def share_memory_(self) -> NoReturn:  # torch's own would access memory that is not here, and crash the process
        raise NotImplementedError("a remote tensor has no memory here to share; take x.full_tensor() first")

    def is_shared(self) -> bool:
        return False

    def _repr_html_(self) -> str:
        """Show which rank holds which part, in colours. Needs no data and does not wait."""
        from meshbook.tensors.display import html_of

        return html_of(self._spec.shape, self._spec.dtype, self._spec.placements, self.engine.axes)

    def stats(self) -> Any:
        """Return minimum, maximum, mean and the number of NaN, computed on the ranks. Blocks."""
        from meshbook.tensors.display import stats

        return stats(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteTensor:
        if id(self) in memo:
            found: RemoteTensor = memo[id(self)]
            return found
        if not self.is_leaf:
            raise RuntimeError("only tensors that autograd did not compute can be copied deeply; detach() it first")
        with defer_sigint(), torch.no_grad():
            copied: Any = self.detach().clone()
        copied.requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            copied._is_param = True
        if self.grad is not None:
            copied.grad = self.grad.__deepcopy__(memo)  # type: ignore[no-untyped-call]
        memo[id(self)] = copied
        return copied  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        values.refuse_pickling(self)

    def _meshbook_key(self, session: Any) -> str:
        """Return the key by which ranks find this tensor among the objects that are sent to them."""
        return values.key_of(self, session)


def redistribute_grad(leaf: Any) -> None:
    """Bring a gradient to its tensor's placements once; otherwise every operation of an optimizer would do so."""
    grad = leaf.grad
    if isinstance(grad, torch.Tensor) and not isinstance(grad, RemoteTensor):
        leaf.grad = dispatch.upload_grad(leaf._spec, grad)  # autograd received a local gradient
        return
    if grad is None or grad._spec.placements is None:
        return
    spec, placements = grad._spec, leaf._spec.placements
    if grad.requires_grad:  # create_graph=True: it may be differentiated again
        leaf.grad = views.redistribute_to(grad, placements)
        return
    engine = spec.engine
    key = (redistribute_grad, spec, leaf._spec)  # specs, as hash and equality of placements run in Python
    template = engine.templates.recent.get(key)
    if template is None:
        if spec.placements == placements:
            return
        template = engine.templates.plan_and_cache(
            key, engine.planner.plan, operators.redistribute, (grad, placements), {}, [grad]
        )
    leaf.grad = dispatch.execute_template(
        engine, template, operators.redistribute, (grad, placements), {}, [0, grad._handle.id], [grad], []
    )


dispatch.tensor_class = RemoteTensor
dispatch.register_overrides(overrides.OVERRIDES)
