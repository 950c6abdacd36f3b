"""Handles and values: truthful, fetched when asked for, and let go of."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import duckdb
import matplotlib
import numpy as np
import pandas
import polars
import pyarrow
import pytest
import torch
from matplotlib.figure import Figure

from meshbook.controller.mesh import Mesh
from meshbook.controller.remote import RemoteValue
from meshbook.controller.results import RankValues
from meshbook.errors import (
    CellError,
    MeshNameError,
    MeshShapeError,
    TransferError,
    UsageError,
    ValuesDiffer,
)
from tests.budget import WAIT_S, when
from tests.controller.test_heal import press_stop_when
from tests.gate import Gate

pytestmark = pytest.mark.usefixtures("starts_meshes")


def test_a_value_that_all_ranks_agree_on_is_one_value(mesh: Mesh) -> None:
    assert mesh.run("'same'").values.same() == "same"


def test_values_that_differ_are_not_one_value(mesh: Mesh) -> None:
    with pytest.raises(ValuesDiffer, match="do not agree"):
        mesh.run("rank").values.same()


def test_a_value_is_found_at_a_point_of_the_mesh(mesh: Mesh) -> None:
    assert mesh.run("rank").values.item(dp=1, tp=0) == 2


def test_values_of_tensors_stack_in_rank_order(mesh: Mesh) -> None:
    assert torch.equal(mesh.run("torch.ones(2) * rank").values.stack()[:, 0], torch.arange(4.0))


def test_values_by_rank_are_an_array_and_a_table_with_a_row_per_rank(mesh: Mesh) -> None:
    values = mesh.run("[1.5, rank]").values
    assert np.asarray(values).tolist() == values.stack().tolist() == [[1.5, rank] for rank in range(4)]
    assert pandas.DataFrame(values)[1].tolist() == [0, 1, 2, 3]
    assert np.asarray(mesh.run("torch.arange(2) + rank").values).tolist()[3] == [3, 4]


def test_values_whose_rows_would_lose_their_names_are_no_array_and_the_error_says_what_to_write(mesh: Mesh) -> None:
    with pytest.raises(TypeError, match=r"ranks 2-3.*DataFrame\(dict\(values\)\)"):
        pandas.DataFrame(mesh.run("rank", ranks="2-3").values)
    values = mesh.run("{'loss': 0.5 * rank}").values
    with pytest.raises(TypeError, match=r"DataFrame\(values.values\(\)\)"):
        pandas.DataFrame(values)
    assert pandas.DataFrame(values.values())["loss"].tolist() == [0.0, 0.5, 1.0, 1.5]


def test_a_value_is_formatted_where_all_ranks_agree_on_it(mesh: Mesh) -> None:
    assert f"{mesh.run('3.14159').values:.2f}" == "3.14"
    with pytest.raises(ValuesDiffer, match=r"values\[0\]"):
        f"{mesh.run('1.0 * rank').values:.2f}"


def test_operators_take_the_value_on_which_all_ranks_agree(mesh: Mesh) -> None:
    mesh.run("step, is_done, loss = 3, False, 0.126")
    step = mesh.pull("step")
    assert (step + 1, 10 - step, step == 3, step != 3, step > 2, float(step)) == (4, 7, True, False, True, 3.0)
    assert step == dict.fromkeys(range(4), 3)
    assert step != dict.fromkeys(range(4), 4)
    assert not mesh.pull("is_done")
    assert not mesh.run("pass").values
    assert round(mesh.pull("loss"), 2) == round(mesh["loss"], 2) == 0.13  # type: ignore[call-overload]
    assert mesh.run("rank").values < 4
    with pytest.raises(ValuesDiffer, match=r"values\[0\]"):
        mesh.run("rank").values < 2  # noqa: B015  (asking is the test)


def test_what_could_mean_the_ranks_or_their_values_is_refused_with_what_to_write(mesh: Mesh) -> None:
    values = mesh.run("10 * rank").values
    uses: list[Callable[[Any], object]] = [sum, max, sorted, list, torch.tensor, lambda it: [*it], lambda it: 10 in it]
    for use in uses:
        with pytest.raises(TypeError, match=r"values\.values\(\) are the values, values\.keys\(\) the ranks"):
            use(values)
    assert (sum(values.values()), list(values.keys()), len(values)) == (60, [0, 1, 2, 3], 4)
    assert dict(values) == dict(values.items()) == {0: 0, 1: 10, 2: 20, 3: 30}
    assert (values.get(1), values.get(7, "none")) == (10, "none")
    assert values == mesh.run("rank * 10").values


def test_a_large_value_stays_on_its_rank_until_it_is_asked_for(mesh: Mesh) -> None:
    values = mesh.run("torch.arange(1_000_000) + rank").values
    assert values._loaded == {}
    assert torch.equal(values[2], torch.arange(1_000_000) + 2)
    assert set(values._loaded) == {2}


def test_a_large_value_that_nobody_holds_is_let_go_of_on_the_rank(mesh: Mesh) -> None:
    mesh.run("import gc, weakref\nclass Big(bytearray): pass\nbig = Big(10_000_000); watch = weakref.ref(big)")
    values = mesh.execute(lambda thing: thing, mesh["big"])
    assert len(values) == 4
    mesh.run("del big")
    assert mesh.run("gc.collect(); watch() is not None").values.same() is True
    del values
    gc.collect()
    mesh.session.release_unused()
    when(lambda: set(mesh.run("gc.collect(); watch() is None").values.values()) == {True})


def test_a_pushed_value_arrives_on_every_rank(mesh: Mesh) -> None:
    mesh.push(lr=0.25, names=["a", "b"])
    assert mesh.run("(lr, names)").values.same() == (0.25, ["a", "b"])


def test_a_pushed_tensor_is_each_ranks_own(mesh: Mesh) -> None:
    weights = torch.arange(500_000, dtype=torch.float32)
    mesh["w"] = weights
    mesh.run("w += rank")
    assert torch.equal(mesh.pull("w")[3], weights + 3)
    assert torch.equal(mesh.pull("w")[0], weights)
    assert weights[1] == 1.0


def test_an_array_pushed_and_pulled_comes_back_bit_for_bit(mesh: Mesh) -> None:
    array = np.random.default_rng(0).standard_normal((300, 400))
    mesh["a"] = array
    assert np.array_equal(mesh.pull("a")[1], array)


def test_a_handle_shows_what_the_ranks_hold(mesh: Mesh) -> None:
    mesh.run("h = rank // 2")
    assert repr(mesh["h"]).count("0") >= 1
    assert "[0-1]" in repr(mesh["h"])
    assert "[2-3]" in repr(mesh["h"])


def test_a_handle_is_truthful_after_the_name_is_bound_anew(mesh: Mesh) -> None:
    mesh.run("h = 'first'")
    handle = mesh["h"]
    mesh.run("h = 'second'")
    assert "second" in repr(handle)


def test_attributes_items_and_calls_of_a_handle_happen_on_the_ranks(mesh: Mesh) -> None:
    mesh.run("t = [torch.arange(6.).reshape(2, 3)]")
    t = mesh["t"][0]
    assert tuple(int(n) for n in t.shape) == (2, 3)
    assert float(t[1, 2]) == 5.0
    assert float(t.sum()) == 15.0
    assert float((t @ t.T)[0, 0]) == 5.0
    assert len(t) == 2


def test_a_handle_tells_an_attribute_that_is_not_there(mesh: Mesh) -> None:
    mesh.run("t = [torch.ones(1)]")
    with pytest.raises(AttributeError, match="no attribute 'appen'"):
        _ = mesh["t"].appen
    with pytest.raises(AttributeError, match=r"'value' on ranks 0-3; mesh\.pull\(t\) brings the ranks' values"):
        _ = mesh["t"].value
    assert not hasattr(mesh["t"], "nothing_like_it")


def test_a_result_of_a_handle_has_or_has_not_an_attribute_and_a_length(mesh: Mesh) -> None:
    mesh.run("import numpy as np; array = np.arange(3.0)")
    assert not hasattr(mesh["array"] + 1, "nothing_like_it")
    assert hasattr(mesh["array"] + 1, "shape")
    assert np.iterable(mesh["array"])
    assert not np.iterable(mesh["array"][0])


def test_matplotlib_draws_an_array_of_the_ranks_where_they_agree(mesh: Mesh) -> None:
    matplotlib.use("agg")
    mesh.run("import numpy as np; array, own = np.arange(3.0), np.arange(3.0) + rank; w = torch.arange(3.0)")
    axes = Figure().add_subplot()
    for drawn in (mesh["array"], mesh["w"]):
        (line,) = axes.plot(drawn)
        mesh.run("array += 1")  # what is drawn stays
        assert np.asarray(line.get_ydata()).tolist() == [0.0, 1.0, 2.0]
    assert [bar.get_height() for bar in axes.bar(["a", "b", "c"], mesh["array"])] == [2.0, 3.0, 4.0]
    with pytest.raises(TransferError, match=r"do not agree"):
        axes.plot(mesh["own"])


def test_a_handle_to_a_dict_is_no_array(mesh: Mesh) -> None:
    mesh.run("table = {'a': [1, 2]}")
    with pytest.raises(TransferError, match="a dict here, which is no array; pull it first"):
        pandas.DataFrame(mesh["table"])


def test_setting_through_a_handle_sets_on_the_ranks(mesh: Mesh) -> None:
    mesh.run("class Box: pass\nbox = Box(); box.items = [1, 2]")
    mesh["box"].level = 7
    mesh["box"].items[0] = 10
    assert mesh.run("(box.level, box.items)").values.same() == (7, [10, 2])


def test_one_value_is_asked_of_a_handle_only_where_the_ranks_agree(mesh: Mesh) -> None:
    mesh.run("n = rank")
    with pytest.raises(ValuesDiffer):
        int(mesh["n"])
    assert bool(mesh["n"] >= 0) is True


def test_a_handle_among_arguments_is_the_ranks_own_object(mesh: Mesh) -> None:
    mesh.run("store = {'rank': rank}")
    assert dict(mesh.execute(lambda d: d["rank"], mesh["store"])) == {0: 0, 1: 1, 2: 2, 3: 3}
    assert dict(mesh.execute(lambda n: n, mesh["store"]["rank"])) == {0: 0, 1: 1, 2: 2, 3: 3}


def test_binding_a_handle_to_a_name_binds_the_ranks_own_object(mesh: Mesh) -> None:
    mesh.run("source = [rank]")
    mesh["copy"] = mesh["source"]
    assert mesh.run("copy is source").values.same() is True


def test_a_handle_is_not_pickled(mesh: Mesh) -> None:
    import pickle

    mesh.run("x = 1")
    with pytest.raises(TransferError, match="pull it first"):
        pickle.dumps(mesh["x"])


def test_a_name_that_no_rank_has_is_an_error_that_lists_those_there_are(mesh: Mesh) -> None:
    mesh.run("here = 1")
    with pytest.raises(MeshNameError, match=r"no_such_name.*names there: .*here"):
        mesh["no_such_name"]
    with pytest.raises(MeshNameError, match=r"no_such_name.*names there: .*here"):
        mesh.pull("no_such_name.attribute")


def test_a_name_that_a_cell_is_about_to_bind_is_pulled_when_it_has(mesh: Mesh, gate: Gate) -> None:
    mesh.run(f"{gate.wait}\nabout_to_be = torch.nn.Linear(2, 3)", wait=False)
    pulled: list[RankValues] = []
    puller = threading.Thread(target=lambda: pulled.append(mesh.pull("about_to_be.in_features")))
    puller.start()
    when(lambda: len(mesh.session.connection.pending) >= 2 or not puller.is_alive())
    gate.open()
    puller.join(WAIT_S)
    assert [values.same() for values in pulled] == [2]


def test_stop_ends_a_pull_and_says_so_not_that_there_is_no_such_name(mesh: Mesh, gate: Gate) -> None:
    binding = mesh.run(f"{gate.wait}\nnot_yet = 1", wait=False)
    press_stop_when(lambda: len(mesh.session.connection.pending) >= 2)
    with pytest.raises(KeyboardInterrupt):  # CellInterrupted, or one that came while the request was sent
        mesh.pull("not_yet")
    gate.open()
    binding.result(WAIT_S)


def test_pull_of_a_name_that_a_rank_lacks_names_the_rank(mesh: Mesh) -> None:
    mesh.run("if rank == 1: only_on_one = 1")
    assert mesh.pull("only_on_one", ranks=1)[1] == 1
    with pytest.raises(CellError, match="only_on_one"):
        mesh.pull("only_on_one")


def test_members_of_a_handle_can_be_listed(mesh: Mesh) -> None:
    mesh.run("model = torch.nn.Sequential(torch.nn.Linear(2, 3))")
    assert "weight" in dir(mesh["model"][0]) or "forward" in dir(mesh["model"])


def test_scatter_cuts_and_gather_joins(mesh: Mesh) -> None:
    batch = torch.arange(12.0).reshape(6, 2)
    pieces = mesh.scatter(batch, axis="dp")
    assert isinstance(pieces, RemoteValue)
    assert torch.equal(mesh.pull(pieces)[2], batch[3:])
    assert torch.equal(mesh.pull(pieces)[0], mesh.pull(pieces)[1])
    assert torch.equal(mesh.gather(pieces, axis="dp"), batch)


def test_scatter_cuts_each_array_of_a_batch_and_the_rows_of_a_table(mesh: Mesh) -> None:
    x, y = torch.arange(12.0).reshape(6, 2), np.arange(6)
    inputs, targets = mesh.pull(mesh.scatter((x, y), axis="dp"))[2]
    assert torch.equal(inputs, x[3:])
    assert targets.tolist() == [3, 4, 5]
    for table in (pyarrow.table({"a": y}), polars.DataFrame({"a": y}), duckdb.from_arrow(pyarrow.table({"a": y}))):
        assert mesh.pull(mesh.scatter(table, axis="dp"))[0]["a"].tolist() == [0, 1, 2]
    assert mesh.pull(mesh.scatter([x, y, "z"], axis="dp"))[2] == ["z"]
    assert mesh.pull(mesh.scatter(x, axis="dp", dim=-1))[0].tolist() == x[:, :1].tolist()
    with pytest.raises(UsageError, match=r"shape \(6,\) has no dim 1"):
        mesh.scatter((x, y), axis="dp", dim=1)
    with pytest.raises(UsageError, match=r"a Tensor without rows cannot be cut; mesh\.push"):
        mesh.scatter(torch.tensor(1), axis="dp")


def test_scatter_gives_the_whole_batch_as_one_tensor_where_it_is_asked_to(mesh: Mesh) -> None:
    batch = torch.arange(10.0).reshape(5, 2)
    whole = mesh.scatter({"x": batch}, axis="dp", view="global")["x"]
    assert whole.shape == (5, 2)
    assert torch.equal(whole.local(2), batch[3:])
    assert torch.equal(whole.full_tensor(), batch)
    with pytest.raises(UsageError, match=r"along dim 0; meshbook\.distribute"):
        mesh.scatter(batch, axis="dp", dim=1, view="global")


def test_scatter_over_an_axis_that_is_not_there_is_refused(mesh: Mesh) -> None:
    with pytest.raises(MeshShapeError, match="pp"):
        mesh.scatter([1, 2, 3, 4], axis="pp")


def test_an_expression_that_fails_on_the_ranks_is_a_cell_error(mesh: Mesh) -> None:
    mesh.run("d = {}")
    with pytest.raises(CellError, match="KeyError"):
        mesh["d"]["missing"]
