"""Meshbook in JupyterLab, as somebody at the browser has it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.browser.pages import TIMEOUT_S, Lab, LabNotebook

expect = pytest.importorskip("playwright.sync_api").expect
expect.set_options(timeout=TIMEOUT_S * 1000)

RUNS = "[*]:"
NOT_RUN = "[ ]:"
ENDED = re.compile(r"\[\d+\]:")

# The contrast of the rank before a value with the page behind it, as WCAG 2 defines it.
CONTRAST = """label => {
    const numbers = colour => colour.match(/[\\d.]+/g).slice(0, 3).map(Number);
    const part = value => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    const luminance = colour => {
        const [red, green, blue] = numbers(colour).map(value => part(value / 255));
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    };
    const page = document.querySelector(".jp-Notebook");
    const shades = [getComputedStyle(label).color, getComputedStyle(page).backgroundColor].map(luminance);
    return (Math.max(...shades) + 0.05) / (Math.min(...shades) + 0.05);
}"""


def test_the_rank_before_a_value_can_be_read_in_light_and_in_dark(notebook: LabNotebook) -> None:
    label = notebook.run("rank").result.locator("span").first
    expect(label).to_have_text("[0]")
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        notebook.use_theme(theme)
        assert 4 < label.evaluate(CONTRAST) < 10, f"{theme}: neither lost nor as loud as the value"


def test_a_progress_bar_of_all_ranks_is_one_and_moves_in_its_place(notebook: LabNotebook, gate: Path) -> None:
    cell = notebook.start(
        "from tqdm import tqdm\n"
        "bar = tqdm(total=8, desc='epoch')\n"
        f"bar.update(4), bar.refresh(), wait_for({str(gate)!r})\n"
        "bar.update(4), bar.close();"
    )
    expect(cell.output).to_have_text(re.compile(r"^epoch: +50%\|.*\| 4/8 "))
    expect(cell.prompt).to_have_text(RUNS)
    gate.touch()
    expect(cell.prompt).to_have_text(ENDED)
    # One row, or one of each rank where the last of them came some time after the other.
    expect(cell.output).to_have_text(re.compile(r"^(?:\s*(?:\[\d\] )?epoch: +100%\|[^%]*\| 8/8 [^%]*){1,2}$"))


def test_an_error_of_one_rank_is_an_error_of_the_cell_and_what_was_to_run_after_it_does_not(
    notebook: LabNotebook, gate: Path
) -> None:
    first = notebook.add("ran_by_test = 'before'")
    fails = notebook.add(f"wait_for({str(gate)!r})\nif rank == 1:\n    raise ValueError('bad shard')")
    after = notebook.add("ran_by_test = 'after'")
    first.editor.click()
    notebook.choose("Run", "Run Selected Cell and All Below")
    expect(after.prompt).to_have_text(RUNS)
    gate.touch()
    expect(fails.error).to_contain_text("rank 1: ValueError: bad shard")
    expect(fails.error).to_contain_text("rank 0 ran to its end")
    expect(first.prompt).to_have_text(ENDED)
    expect(after.prompt).to_have_text(NOT_RUN)
    assert notebook.run("ran_by_test").result.inner_text() == "'before'"


def test_the_stop_button_ends_a_stuck_collective_and_the_next_cell_works(notebook: LabNotebook) -> None:
    # Rank 1 stays in the cell: once it has left, rank 0 is released, with or without Stop.
    cell = notebook.start(
        "t = torch.ones(1)\nif rank == 0:\n    print('stuck')\n    dist.all_reduce(t)\nelse:\n    time.sleep(600)"
    )
    expect(cell.output).to_have_text("[0] stuck")
    notebook.stop_button.click()
    expect(cell.error).to_contain_text("rank 0: KeyboardInterrupt")
    expect(cell.error).to_contain_text("rank 1: KeyboardInterrupt")
    # The error is shown before the reply comes; until then ipykernel aborts what is sent to it.
    expect(cell.prompt).to_have_text(ENDED)
    assert notebook.run("t = torch.ones(1)\ndist.all_reduce(t)\nt.item()").result.inner_text() == "2.0"


def test_what_lives_on_the_ranks_is_completed_also_while_a_cell_runs(notebook: LabNotebook, gate: Path) -> None:
    notebook.run(
        "model = torch.nn.Module()\nmodel.fc_first, model.fc_second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)"
    )
    running = notebook.start(f"print('at it')\nwait_for({str(gate)!r})")
    expect(running.output).to_contain_text("at it")
    cell = notebook.add("")
    cell.editor.click()
    notebook.page.keyboard.type("model.fc")
    notebook.page.keyboard.press("Tab")
    expect(notebook.page.locator(".jp-Completer .jp-Completer-match")).to_have_text(["fc_first", "fc_second"])
    expect(running.prompt).to_have_text(RUNS)
    notebook.page.keyboard.press("Enter")
    expect(cell.editor).to_have_text("model.fc_first")
    gate.touch()
    expect(running.prompt).to_have_text(ENDED)


def test_a_restart_from_the_menu_keeps_the_ranks_and_their_names(notebook: LabNotebook) -> None:
    pids = notebook.run("kept_by_test = rank + 1\nos.getpid()").result.inner_text()
    notebook.restart()
    cell = notebook.run("kept_by_test * 10")
    assert cell.result.inner_text() == "[0] 10\n[1] 20"
    expect(cell.output.first).to_contain_text("ranks 0-1 kept what they hold")
    assert notebook.run("os.getpid()").result.inner_text() == pids


@pytest.mark.thorough
def test_the_extension_brings_a_mesh_to_an_ordinary_kernel(jupyterlab: Lab) -> None:
    with jupyterlab.notebook("python3") as notebook:
        started = notebook.run("%load_ext meshbook\n%mesh start -n 2")
        expect(started.output.last).to_contain_text("with 2 ranks is ready")
        cell = notebook.run("%%mesh\nx = rank * 10\nprint(f'from {world_size} ranks')\nx")
        expect(cell.output.first).to_contain_text("from 2 ranks")
        assert cell.result.inner_text() == "[0] 0\n[1] 10"
        assert notebook.run("x").result.inner_text() == "[0] 0\n[1] 10"
        # One value: a cell without a magic runs in the kernel.
        assert notebook.run("import os\nos.getpid()").result.inner_text().isdecimal()
        notebook.run("%mesh stop")


def test_a_breakpoint_asks_under_the_cell_and_shows_folded_answers(notebook: LabNotebook) -> None:
    source = (
        "def train(step):\n    loss = 2.5 + rank\n    breakpoint()\n    return loss * 2\ndist.barrier()\ntrain(812)"
    )
    cell = notebook.start(source)
    first, second = "(ranks 0-1 · h lists the commands)", "(ranks 0-1)"
    for prompt, command, answer in ((first, "p loss * 10", "{25.0, 35.0}"), (second, "c", "[0] 5.0")):
        box = cell.output.filter(has_text=prompt).locator(".jp-Stdin-input")
        box.fill(command)
        box.press("Enter")
        expect(cell.output.filter(has_text=answer).first).to_be_visible()
    expect(cell.output.filter(has_text="in train · step=812 · loss={2.5, 3.5}")).to_have_count(1)
    assert cell.result.inner_text() == "[0] 5.0\n[1] 7.0"
