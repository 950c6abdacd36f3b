from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from meshbook.ids import CallId
from meshbook.rank.cells.code_runner import CodeRunner
from meshbook.rank.cells.shell import RankShell
from meshbook.rank.interrupt import InterruptGate
from meshbook.rank.output.capture import OutputBuffer
from meshbook.rank.previews import introspection
from meshbook.wire.messages import Preview, RunCell
from tests.budget import WAIT_S

DEADLINE_S = WAIT_S

CELL = '''
import collections
import torch
from torch import nn

class Model(nn.Module):
    """A model of two layers."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 5), nn.Sequential(nn.ReLU(), nn.Linear(5, 6))])
        self.register_buffer("steps", torch.zeros(1))
        self.lr = 0.1

    def forward(self, x, scale=1):
        """Run it."""
        return self.fc(x) * scale

class Loud:
    """Says so when it is asked anything."""
    kind = "loud"

    def __init__(self):
        self.inner = {"deep": [10, 20]}

    def __getattr__(self, name):
        asked.append(name)
        raise AttributeError(name)

    def __repr__(self):
        asked.append("repr")
        return "loud"

    def __len__(self):
        asked.append("len")
        return 1

    @property
    def computed(self):
        asked.append("computed")
        return 1

    def method(self, a, *, b=2):
        """A method."""

class Slotted:
    __slots__ = ("width",)

def train(model, lr=0.1, *, steps: int = 10):
    """Train it."""
    return steps

asked = []
model = Model()
x = torch.ones(2, 3)
table = {"alpha": 1, "beta": {"gamma": 2}, 3: "three"}
loud = Loud()
slotted = Slotted()
slotted.width = 7
batches = [torch.zeros(8), loud]
'''


@pytest.fixture(scope="module")
def shell() -> Iterator[RankShell]:
    patch = pytest.MonkeyPatch()
    for name in ("TERM", "CLICOLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "PAGER", "GIT_PAGER", "MPLBACKEND"):
        patch.setenv(name, "")
        patch.delenv(name)
    for name in ("ps1", "ps2", "ps3"):
        patch.setattr(sys, name, "", raising=False)
    output, gate = OutputBuffer(redirect_fds=False), InterruptGate()
    shell = RankShell.make(output=output, gate=gate)
    run = CodeRunner(shell, output, gate).run(RunCell(CallId("c"), (), CELL, execution_count=1))
    assert run.status == "ok", run.error
    yield shell
    shell.close()
    patch.undo()


@pytest.fixture(autouse=True)
def nothing_is_asked(shell: RankShell, capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """No question runs the user's code, prints, or leaves output."""
    shell.user_ns["asked"].clear()
    yield
    assert shell.user_ns["asked"] == []
    assert shell.output.pop_items() == ()
    assert capfd.readouterr() == ("", "")


def matches(shell: RankShell, code: str) -> list[str]:
    """What the text at the end of `code` may become."""
    answer = introspection.complete(shell, code, len(code))
    assert answer["cursor_end"] == len(code)
    assert len(answer["types"]) == len(answer["matches"])
    prefix = code[answer["cursor_start"] :]
    assert all(match.lstrip("%").lower().startswith(prefix.lstrip("%").lower()) for match in answer["matches"])
    msgspec.msgpack.encode(answer)
    return list(answer["matches"])


def reported(shell: RankShell, code: str, detail: int = 0) -> str:
    answer = introspection.inspect(shell, code, len(code), detail)
    assert answer["found"], code
    return re.sub(r"\x1b\[[0-9;]*m", "", answer["data"]["text/plain"])


# ---------------------------------------------------------------------------------------------------------------------
# Completion


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("mod", "model"),
        ("model.f", "fc"),
        ("model.fc.we", "weight"),
        ("model.layers[0].bi", "bias"),
        ("model.layers[1][1].in_f", "in_features"),
        ("model.layers[-1].app", "append"),
        ("model.ste", "steps"),
        ("y = model.fc.wei", "weight"),
        ("print(model.fc.", "in_features"),
        ("z = 3\nmodel.fc.we", "weight"),
        ("x.sha", "shape"),
        ("x.", "mean"),
        ("torch.nn.Lin", "Linear"),
        ("table['", "alpha"),
        ('table["beta"]["', "gamma"),
        ("train(", "steps="),
        ("loud.", "method"),
        ("loud.inner['", "deep"),
        ("loud.inner[", "'deep'"),
        ("print(loud.inner['de", "deep"),
        ("import collect", "collections"),
        ("%timei", "%timeit"),
        ("prin", "print"),
        ("slotted.wi", "width"),
    ],
)
def test_completion_finds(shell: RankShell, code: str, expected: str) -> None:
    assert expected in matches(shell, code)


def test_magics_are_offered_only_where_a_line_begins(shell: RankShell) -> None:
    assert "%time" in matches(shell, "ti")
    assert "%time" in matches(shell, "x = 1\n  ti")
    assert not [match for match in matches(shell, "train(ti") if match.startswith("%")]
    assert "%time" in matches(shell, "t = %ti")


@pytest.mark.parametrize("code", ["nothing_here.", "loud.computed.", "model.nope.", "1 +* 2.x", ""])
def test_completion_where_nothing_can_be_known_is_empty_or_general(shell: RankShell, code: str) -> None:
    found = matches(shell, code)
    assert not found or code == ""


def test_completion_in_the_middle_of_a_cell_replaces_the_word_before_the_cursor(shell: RankShell) -> None:
    code = "a = 1\nmodel.f + 2"
    answer = introspection.complete(shell, code, len("a = 1\nmodel.f"))
    assert "fc" in answer["matches"]
    assert code[answer["cursor_start"] : answer["cursor_end"]] == "f"


def test_a_cursor_outside_of_the_code_is_no_error(shell: RankShell) -> None:
    assert "model" in introspection.complete(shell, "mod", 99)["matches"]
    introspection.complete(shell, "mod", -5)
    introspection.inspect(shell, "mod", 99)


# ---------------------------------------------------------------------------------------------------------------------
# Inspection


def test_a_function_shows_signature_docstring_and_on_request_its_source(shell: RankShell) -> None:
    text = reported(shell, "train")
    assert "Signature: train(model, lr=0.1, *, steps: int = 10)" in text
    assert "Docstring: Train it." in text
    assert "return steps" not in text
    source = reported(shell, "train", 1)
    assert "Source:" in source
    assert 'def train(model, lr=0.1, *, steps: int = 10):\n    """Train it."""\n    return steps' in source


def test_inside_a_call_the_function_is_shown(shell: RankShell) -> None:
    for code in ("train(", "train(model, ", "train(model, lr=0.2, "):
        assert reported(shell, code).startswith("Signature: train(")


def test_the_source_of_a_class_from_a_cell_is_found(shell: RankShell) -> None:
    source = reported(shell, "Model", 1)
    assert "class Model(nn.Module):" in source
    assert "return self.fc(x) * scale" in source
    assert "class Loud" not in source
    assert "class Slotted:" in reported(shell, "Slotted", 1)


def test_an_instance_shows_its_type_and_what_calling_it_takes(shell: RankShell) -> None:
    text = reported(shell, "model")
    assert "Signature:       model(x, scale=1)" in text
    assert "__main__.Model" in text
    assert "<Model: " in text
    assert "A model of two layers." in text


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("x", "tensor float32 (2, 3) cpu"),
        ("model.fc", "torch.nn.modules.linear.Linear"),
        ("model.fc.weight", "torch.nn.Parameter"),
        ("model.layers[0].weight", "float32 (5, 4)"),
        ("model.forward", "Run it."),
        ("torch.nn.Linear", "Init signature:"),
        ("x.sum", "sum(dim=None"),
        ("table", "Length:"),
        ("len", "Return the number of items"),
        ("%timeit", "Time execution"),
        ("%%timeit", "Time execution"),
        ("loud", "Says so when it is asked anything."),
        ("loud.method", "method(a, *, b=2)"),
        ("loud.inner", "{'deep': [10, 20]}"),
        ("loud.kind", "'loud'"),
        ("batches", "Loud>"),
        ("torch", "module"),
    ],
)
def test_inspection_says(shell: RankShell, code: str, expected: str) -> None:
    assert expected in reported(shell, code)


@pytest.mark.parametrize("code", ["nothing_here", "loud.computed", "loud.nope", "", "   ", "1 + "])
def test_what_cannot_be_known_is_not_found(shell: RankShell, code: str) -> None:
    answer = introspection.inspect(shell, code, len(code))
    assert (answer["found"], answer["data"]) == (False, {})


# ---------------------------------------------------------------------------------------------------------------------
# Peeking


def test_peek_previews_names_and_paths(shell: RankShell) -> None:
    names = (
        "x", "model", "model.fc.weight", "model.layers[1][1].bias", "table['beta']['gamma']", "table[3]", "loud",
        "loud.inner['deep'][-1]", "loud.kind", "batches[1]", "x.shape", "slotted.width", "torch.float32", "model.lr",
        "collections",
    )  # fmt: skip
    answer = introspection.peek(shell, names)
    texts = {name: msgspec.convert(found, Preview).text for name, found in answer.items()}
    assert texts == {
        "x": "tensor float32 (2, 3) cpu  [[1, 1, 1], [1, 1, 1]]",
        "model": "<Model: 77 parameters float32 cpu>",
        "model.fc.weight": texts["model.fc.weight"],
        "model.layers[1][1].bias": texts["model.layers[1][1].bias"],
        "table['beta']['gamma']": "2",
        "table[3]": "'three'",
        "loud": "<__main__.Loud>",
        "loud.inner['deep'][-1]": "20",
        "loud.kind": "'loud'",
        "batches[1]": "<__main__.Loud>",
        "x.shape": "torch.Size([2, 3])",
        "slotted.width": "7",
        "torch.float32": "torch.float32",
        "model.lr": "0.1",
        "collections": "<module collections>",
    }
    assert texts["model.fc.weight"].startswith("Parameter float32 (4, 3) cpu  [[")


def test_peek_has_no_answer_for_what_is_not_there_or_would_have_to_be_computed(shell: RankShell) -> None:
    names = ("nope", "model.nope", "loud.computed", "loud.nope", "train(model)", "x[0]", "table['nope']", "x +", "x.T.")
    assert introspection.peek(shell, names) == dict.fromkeys(names)


def test_a_tensor_class_of_the_users_own_is_not_asked_for_its_shape(shell: RankShell) -> None:
    class Counting(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            shell.user_ns["asked"].append(str(func))
            return super().__torch_function__(func, types, args, kwargs or {})

    Counting.__module__ = "__main__"
    shell.user_ns["counting"] = torch.ones(3).as_subclass(Counting)
    assert introspection.peek(shell, ("counting.shape",)) == {"counting.shape": None}
    del shell.user_ns["counting"]


# ---------------------------------------------------------------------------------------------------------------------
# While a cell runs


def test_questions_are_answered_while_a_cell_runs_and_binds_names(shell: RankShell) -> None:
    answers: list[Any] = []
    started, over = threading.Event(), threading.Event()
    shell.user_ns.update(started=started, over=over)

    def ask() -> None:
        assert started.wait(DEADLINE_S)
        for _ in range(20):
            answers.append(introspection.complete(shell, "model.f", 7)["matches"])
            answers.append(introspection.inspect(shell, "train(", 6)["found"])
            answers.append(introspection.peek(shell, ("model.lr", "counter"))["model.lr"]["text"])
        over.set()

    thread = threading.Thread(target=ask)
    thread.start()
    run = CodeRunner(shell, shell.output, InterruptGate()).run(
        RunCell(
            CallId("c"),
            (),
            "started.set()\nn = 0\nwhile not over.is_set():\n"
            "    n += 1\n    globals()[f'counter{n % 50}'] = n\n    globals().pop(f'counter{(n + 25) % 50}', None)\n"
            "    get_ipython().user_ns['counter'] = n\n(get_ipython() is not None)",
        )
    )
    thread.join(WAIT_S)
    assert (run.status, run.result) == ("ok", True)
    assert len(answers) == 60
    assert all("fc" in answer if isinstance(answer, list) else answer is True or answer == "0.1" for answer in answers)
    for name in [name for name in shell.user_ns if name.startswith("counter")]:
        del shell.user_ns[name]
