"""Caller-side references to actors: `ActorMesh`, its endpoints, and the call methods.

A reference holds the actors' addresses and endpoints; it holds no connection and can be sent in messages. The API is
the same in the notebook and inside an actor.
"""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

from meshbook.actors import base
from meshbook.actors.replies import GatherCollector, ReplyCollector, StreamCollector
from meshbook.actors.runtime.context import context
from meshbook.actors.runtime.futures import Future
from meshbook.actors.runtime.peer import Frame, PeerLost
from meshbook.actors.runtime.ports import Port
from meshbook.actors.runtime.refs import ActorRef
from meshbook.actors.runtime.registry import local_registry
from meshbook.actors.runtime.transport import encode, local_transport
from meshbook.actors.shape import MeshTrait
from meshbook.actors.values import ValueMesh
from meshbook.controller import extensions
from meshbook.mesh_axes import MeshAxes
from meshbook.wire import messages

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


class ActorMesh(MeshTrait, Generic[T]):
    """Actors of one class, one per process of a mesh, or a slice of them. Endpoints are attributes."""

    def __init__(self, ref: ActorRef, axes: MeshAxes) -> None:
        self._ref, self._axes = ref, axes

    def _with_axes(self, axes: MeshAxes) -> ActorMesh[T]:
        return ActorMesh(self._ref, axes)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        ref = self._ref
        info = ref.endpoints.get(name)
        if info is not None:
            handle: ActorEndpoint[..., Any] = ActorEndpoint(self, info)
            self.__dict__[name] = handle
            return handle
        if name == "state":  # not a property: an endpoint may have this name
            return extensions.find("actor_state")(self)
        if name in ref.methods:
            return NotAnEndpoint(self, name)
        raise AttributeError(base.no_such_endpoint(ref.class_name, list(ref.endpoints), name))

    def __getitem__(self, key: Any) -> NoReturn:  # without it Python says "not subscriptable", and no more
        raise TypeError(f"{self._ref.name!r} is a mesh of actors; one of them: .slice({self._axes.names[0]}=0)")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._ref.endpoints})

    def stop(self, reason: str = "stopped by its client") -> Future[None]:
        """Stop the actors after the messages sent before; `__cleanup__` runs. Does not wait.

        An `__init__` that has not returned some seconds later is interrupted, or given up.

        Returns:
            A future, done when the actors have ended. Later calls raise ActorStopped.
        """
        owned = local_registry().owned.get(self._ref.id)
        if owned is not None and self._axes.size == len(self._ref.addresses):
            owned.stopped = True
        gather = self._collector("stop", label=f"{self._ref.name}.stop()", ignore_lost=True)
        self._send_control(lambda number: messages.StopActor(number, self._ref.id, reason), gather)
        return gather.future

    @property
    def initialized(self) -> Future[None]:
        """A future, done when every `__init__` has run; it raises the error of a failed `__init__`."""
        gather = self._collector("__init__", label=f"the start of {self._ref.name}")
        self._send("=apply", (_no_op,), {}, gather)
        return gather.future

    def _apply(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[ValueMesh[Any]]:
        """Run `function(actor, …)` in each actor as an ordinary message: in order, on the actor's own thread."""
        gather = self._collector_for(function)
        gather.future._interrupt_call = gather.interrupt
        self._send("=apply", (function, *args), kwargs, gather)
        return gather.future

    def _apply_concurrently(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[ValueMesh[Any]]:
        """Run `function(actor, …)` concurrently with each actor, on another thread of its process. For inspection."""
        gather = self._collector_for(function)
        self._send("=now", (function, *args), kwargs, gather)
        return gather.future

    def _run(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run `function(…)` on a thread of the one process of this mesh, outside any actor."""
        gather = self._collector(function.__name__, _single_value)
        self._send("=run", (function, *args), {}, gather)
        return gather.future

    def _collector(self, method: str, *args: Any, **options: Any) -> GatherCollector:
        return GatherCollector(self._ref, self._axes, method, *args, **options)

    def _collector_for(self, function: Callable[..., Any]) -> GatherCollector:
        axes = self._axes
        return self._collector(getattr(function, "__name__", "function"), lambda values: ValueMesh(axes, values))

    # ---- sending

    def _send(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        collector: ReplyCollector | None,
        *,
        port: messages.PortAddress | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Send one message to every actor of this mesh (or to `ranks`), packed once: each gets the same bytes."""
        ref = self._ref
        peers = [ref.peer(rank) for rank in (self._axes.ranks if ranks is None else ranks)]
        transport = local_transport()
        living = [peer for peer in peers if peer.lost_reason is None]
        pinned: list[Any] = []
        persistent_id = ref.references and ref.references.persistent_id_for(
            [ref.mesh_ranks[rank] for rank in ranks or self._axes.ranks], pinned
        )
        plain, payload = transport.payloads.pack_arguments(args, kwargs, living, persistent_id=persistent_id)
        view = self._make_view()
        call_id = 0
        if collector is not None:
            # replies through a port carry the sender's index in the complete mesh
            call_id = collector.register(transport, peers, ranks and [self._axes.ranks.index(rank) for rank in ranks])
        message = messages.CallActor(ref.id, method, call_id, plain, payload, port, view)
        send_frames(peers, itertools.repeat(encode(message)), collector)
        if pinned:
            self._pin_until_received(pinned)

    def _pin_until_received(self, pinned: list[Any]) -> None:
        """Keep objects alive here until the actors have processed the messages sent before this call."""
        self._send("=apply", (_no_op,), {}, self._collector("=apply", lambda values: pinned))

    def _send_control(self, make_message: Callable[[int], messages.ActorMessage], collector: ReplyCollector) -> None:
        peers = [self._ref.peer(rank) for rank in self._axes.ranks]
        send_frames(
            peers, itertools.repeat(encode(make_message(collector.register(local_transport(), peers)))), collector
        )

    def _make_view(self) -> messages.ActorMeshSlice | None:
        axes = self._axes
        procs_ref = self._ref.procs_ref
        has_all_axes = procs_ref is not None and (axes.names, axes.shape) == (
            procs_ref.axis_names,
            procs_ref.axis_sizes,
        )
        if has_all_axes and axes.size == len(self._ref.addresses):
            return None
        return messages.ActorMeshSlice(axes.names, axes.shape, axes.ranks)

    def __reduce__(self) -> Any:
        return ActorMesh, (self._ref, self._axes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorMesh) and (self._ref.id, self._axes) == (other._ref.id, other._axes)

    def __hash__(self) -> int:
        return hash((self._ref.id, self._axes))

    def __repr__(self) -> str:
        return f"<ActorMesh {self._ref.name!r} of {self._ref.class_name}: {str(self._axes) or 'one'}>"


def process_mesh(name: str, addresses: tuple[messages.NodeAddress, ...]) -> ActorMesh[Any]:
    """Return processes as if each was an actor without endpoints, for messages to the processes themselves."""
    ref = ActorRef("", name, "", {}, frozenset(), addresses, None)
    return ActorMesh(ref, ref.axes)


def send_frames(peers: Sequence[Any], frames: Iterable[Frame], collector: ReplyCollector | None) -> None:
    """Send to each peer its frame; report lost ones to the collector."""
    for peer, frame in zip(peers, frames):  # noqa: B905  (frames may repeat one for ever)
        try:
            peer.send(frame)
        except PeerLost as error:
            transport = local_transport()
            transport.payloads.pool.remove_reader(peer.id)
            if collector is not None:
                transport.report_lost_peer(collector.call_id, peer, str(error))


def _no_op(actor: Any) -> None:
    pass


# ---------------------------------------------------------------------------------------------------------------------
# Endpoints and their call methods


class ActorEndpoint(Generic[P, R]):
    """`mesh.step`: an endpoint with several call methods. Can be sent in messages, together with its mesh."""

    def __init__(self, mesh: ActorMesh[Any], info: base.EndpointInfo, *, is_marked: bool = True) -> None:
        self._mesh, self._info, self._is_marked = mesh, info, is_marked
        self._name = info.name
        self._label = f"{mesh._ref.name}.{info.name}"
        self._class = mesh._ref.Class
        self._signature, self._positional_range = _signature_of(self._class if is_marked else None, info)

    def _check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise TypeError, as the method itself would, before anything is sent."""
        if self._class is not self._mesh._ref.Class and self._is_marked:
            self._refresh_signature()
        if self._signature is None:
            return
        low, high = self._positional_range
        if kwargs or not low <= len(args) <= high:
            try:
                self._signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{self._label}{self._info.signature}: {error}") from None

    def _refresh_signature(self) -> None:
        """Read the signature again after the class was redefined."""
        ref = self._mesh._ref
        info = ref.endpoints.get(self._name)
        if info is None:
            raise AttributeError(base.no_such_endpoint(ref.class_name, list(ref.endpoints), self._name))
        self._info, self._class = info, ref.Class
        self._signature, self._positional_range = _signature_of(ref.Class, info)

    def _send(self, args: tuple[Any, ...], kwargs: dict[str, Any], collector: Any, **options: Any) -> None:
        self._check_arguments(args, kwargs)
        if self._is_marked:
            self._mesh._send(self._name, args, kwargs, collector, **options)
        else:
            self._mesh._send("=apply", (_call_method, self._name, *args), kwargs, collector, **options)

    def _answering_thread(self) -> int:
        """Return the thread that runs this code, if it is that of one of the called actors."""
        mesh, instance = self._mesh, context().actor_instance
        if instance.runner is not None and instance.mesh_id == mesh._ref.id:
            own_node = local_transport().address.node
            if any(mesh._ref.addresses[rank].node == own_node for rank in mesh._axes.ranks):
                return instance.runner.thread_id
        return 0

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Future[ValueMesh[R]]:
        """Call every actor of the mesh; return a Future of a ValueMesh. Does not wait."""
        mesh = self._mesh
        return self._call_and_gather(args, kwargs, lambda values: ValueMesh(mesh._axes, values))

    def _call_and_gather(
        self, args: Any, kwargs: Any, make_result: Callable[[list[Any]], Any], ranks: Sequence[int] | None = None
    ) -> Future[Any]:
        gather = GatherCollector(self._mesh._ref, self._mesh._axes, self._name, make_result)
        gather.future.answering_thread = self._answering_thread()
        gather.future._interrupt_call = gather.interrupt
        self._send(args, kwargs, gather, ranks=ranks)
        return gather.future

    def call_one(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call the only actor of the mesh; return a Future of its value. Does not wait.

        Raises:
            ValueError: the mesh has several actors; slice it, or use `call` or `choose`.
        """
        mesh = self._mesh
        if mesh._axes.size != 1:
            raise ValueError(
                f"call_one is for a mesh of one actor, and {mesh._ref.name!r} has {mesh._axes.size} here "
                f"({mesh._axes}); slice it first, or use call() or choose()"
            )
        return self._call_and_gather(args, kwargs, _single_value)

    def choose(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call one actor of the mesh, chosen at random; return a Future of its value. Does not wait."""
        return self._call_and_gather(args, kwargs, _single_value, ranks=(random.choice(self._mesh._axes.ranks),))

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[Future[R]]:
        """Call every actor; return an iterator of Futures that resolve in the order in which the values arrive."""
        collector = StreamCollector(self._mesh._ref, self._mesh._axes, self._name)
        for future in collector.futures:
            future._interrupt_call = collector.interrupt
        self._send(args, kwargs, collector)
        return iter(collector.futures)

    def broadcast(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Send to every actor without a reply. A failure is reported to the owner of the mesh (`__supervise__`)."""
        self._send(args, kwargs, None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"{self._label} is called by a verb: {self._label}.call(…).get() for all ranks, call_one, choose, stream, "
            "or broadcast"
        )

    def __reduce__(self) -> Any:
        return _find_endpoint, (self._mesh, self._name)

    def __repr__(self) -> str:
        return f"<endpoint {self._label}{self._info.signature}>"


class NotAnEndpoint:
    """`mesh.method` for a method without `@endpoint`: only usable as the argument of `as_endpoint`."""

    def __init__(self, mesh: ActorMesh[Any], name: str) -> None:
        self._mesh, self._name = mesh, name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        ref = self._mesh._ref
        raise AttributeError(base.no_such_endpoint(ref.class_name, [], self._name, is_method=True))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(base.no_such_endpoint(self._mesh._ref.class_name, [], self._name, is_method=True))

    def __repr__(self) -> str:
        return f"<{self._mesh._ref.class_name}.{self._name}, not an endpoint>"


def as_endpoint(method: Any, *, propagate: Any = None, explicit_response_port: bool = False) -> ActorEndpoint[..., Any]:
    """Return an unmarked method of an actor class as an endpoint: `as_endpoint(mesh.method).call(…)`.

    Raises:
        TypeError: `method` is not a method of a mesh of actors; or an explicit port is requested, which requires
            `@endpoint`.
    """
    if isinstance(method, ActorEndpoint):
        return method
    if not isinstance(method, NotAnEndpoint):
        raise TypeError(f"as_endpoint takes a method of a mesh of actors, `mesh.method`, not a {type(method).__name__}")
    if explicit_response_port:
        raise TypeError("mark the method with @endpoint(explicit_response_port=True); only then it gets a port")
    return ActorEndpoint(method._mesh, base.EndpointInfo(method._name, False, "(…)"), is_marked=False)


def _find_endpoint(mesh: ActorMesh[Any], name: str) -> ActorEndpoint[..., Any]:
    return as_endpoint(getattr(mesh, name))


def _call_method(actor: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(actor, name)(*args, **kwargs)


def _single_value(values: list[Any]) -> Any:
    return values[0]


def interrupt(actors: ActorMesh[Any]) -> None:
    """Interrupt everything that these actors have been sent until now. Does not wait.

    A running `def` endpoint gets a KeyboardInterrupt, an async endpoint is cancelled, and queued messages are dropped.
    Callers that wait for a reply get an ActorError; the actors stay alive. A `time.sleep` or a long C call finishes
    first.
    """
    ref = actors._ref
    message = encode(messages.InterruptActor(ref.id, 0))
    send_frames([ref.peer(rank) for rank in actors._axes.ranks], itertools.repeat(message), None)


def send(
    endpoint: ActorEndpoint[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    port: Port[Any] | None = None,
    selection: str = "all",
) -> None:
    """Send to an endpoint and have its result sent to `port`. Does not wait.

    Args:
        selection: "all", or "choose" for one actor chosen at random.
    """
    mesh = endpoint._mesh
    ranks = (random.choice(mesh._axes.ranks),) if selection == "choose" else None
    endpoint._send(args, kwargs, None, port=port._address if port is not None else None, ranks=ranks)


def _signature_of(Class: type | None, info: base.EndpointInfo) -> tuple[inspect.Signature | None, tuple[int, int]]:
    """Return the signature without self and port, and the range of positional argument counts that are always valid."""
    if Class is None:
        return None, (0, 0)
    mark = inspect.getattr_static(Class, info.name)
    try:
        signature = inspect.signature(mark.method)
    except (TypeError, ValueError):
        return None, (0, 0)
    parameters = list(signature.parameters.values())[2 if info.explicit_response_port else 1 :]
    bare = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in bare if p.default is p.empty]
    only_by_name = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    low = len(needed) if not only_by_name else 1 << 30
    high = 1 << 30 if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(bare)
    return signature.replace(parameters=parameters), (low, high)


def describe_class(Class: type) -> tuple[dict[str, base.EndpointInfo], frozenset[str]]:
    """Return what callers need of a class: its endpoints and the names of its other methods.

    Raises:
        ValueError: an endpoint has the name of an attribute that every mesh has.
    """
    endpoints = {}
    for name, mark in base.endpoints_of(Class).items():
        if hasattr(ActorMesh, name) or name.startswith("_"):
            raise ValueError(
                f"{Class.__name__}.{name} cannot be an endpoint: every mesh of actors has {name!r} itself; rename it"
            )
        try:
            signature = str(inspect.signature(mark.method))
        except (TypeError, ValueError):
            signature = "(…)"
        endpoints[name] = base.EndpointInfo(name, mark.explicit_response_port, signature)
    methods = frozenset(
        name for name in dir(Class) if not name.startswith("_") and name not in endpoints and name != "logger"
    )
    return endpoints, methods
