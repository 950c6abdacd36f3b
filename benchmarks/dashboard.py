"""The dashboard with 1,024 ranks in training, told twice per second, in Chromium: what an update costs the page.

Main-thread time is what the page's own scripts take for an update: parsing it, taking it in, and the drawing that it
leads to, frames without news left out. Bytes are those of the messages as JSON, which is what a websocket carries. The
ranks are made up (`tests/dashboard/pictures.py`); everything after them is what users have.

    python -m benchmarks.dashboard [--quick]
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from benchmarks import workbench
from benchmarks.report import Report
from meshbook.controller.mesh import Mesh
from meshbook.dashboard.hub import DashboardClient, DashboardHub
from meshbook.dashboard.web_server import DashboardServer
from tests.dashboard.pictures import Training

AXES = {"dp": 32, "tp": 32}
PERIOD_S = 0.5
MAIN_THREAD_MS, KIB = 16.0, 15.0

# Adds up, in the page, what each message and each frame takes. A frame belongs to the update before it.
_WATCH = """
window.spent = [];
const Native = window.WebSocket;
window.WebSocket = class extends Native {
  set onmessage(handle) {
    super.onmessage = (event) => {
      const began = performance.now();
      handle(event);
      const now = performance.now();
      const last = window.spent[window.spent.length - 1];
      if (last && now - last.at < 200) last.ms += now - began;
      else window.spent.push({ at: now, ms: now - began });
    };
  }
};
const frame = window.requestAnimationFrame.bind(window);
window.requestAnimationFrame = (draw) => frame((at) => {
  const began = performance.now();
  draw(at);
  const last = window.spent[window.spent.length - 1];
  if (last) last.ms += performance.now() - began;
});
"""


class PretendDesk:
    """Tells its audiences of a training run that is not there."""

    def __init__(self, training: Training) -> None:
        self.training, self.audiences = training, list[DashboardClient]()
        self.sizes: list[int] = []
        self.view_ms: list[float] = []

    def join(self, audience: DashboardClient) -> None:
        self.audiences.append(audience)

    def leave(self, audience: DashboardClient) -> None:
        if audience in self.audiences:
            self.audiences.remove(audience)

    def hear(self, audience: DashboardClient, message: Any) -> None:
        if message["kind"] == "ready":
            audience.needs_full_update = True

    def tell(self) -> None:
        picture = self.training.step(PERIOD_S)
        for audience in tuple(self.audiences):
            whole, audience.needs_full_update = audience.needs_full_update, False
            began = time.perf_counter()
            messages = audience.encoder.full_update(picture) if whole else audience.encoder.updates(picture)
            if not whole:
                self.view_ms.append((time.perf_counter() - began) * 1000)
                self.sizes.append(sum(len(json.dumps(message, separators=(",", ":"))) for message in messages))
            for message in messages:
                audience.send(message)


def measure(quick: bool, folder: Path) -> Report:
    from playwright.sync_api import sync_playwright

    report = Report("dashboard", "1,024 tiles at 2 updates/s in Chromium")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    training = Training(AXES)
    desk = PretendDesk(training)
    mesh = cast(Mesh, SimpleNamespace(ranks=tuple(range(training.size)), axes=AXES))
    server = DashboardServer(cast(DashboardHub, desk), mesh)
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=chromium, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
            )
            page = browser.new_page(viewport={"width": 1400, "height": 1000})
            page.add_init_script(_WATCH)
            page.goto(server.address)
            page.wait_for_function("window.spent !== undefined")
            rounds = 20 if quick else 80
            for at in range(rounds):
                desk.tell()
                page.wait_for_timeout(PERIOD_S * 1000)
                if at == rounds // 2:
                    page.get_by_role("tab", name="Scalars").click()
            spent = [one["ms"] for one in page.evaluate("window.spent")][3:]
            browser.close()
    finally:
        server.close()
    report.add("main thread of the page, per update", spent, "ms")
    ordered = sorted(spent)
    p95 = ordered[round((len(ordered) - 1) * 0.95)]
    report.add("the same, 95 % of updates stay below", p95, "ms")
    report.add("bytes of an update", [size / 1024 for size in desk.sizes], "KiB")
    report.add("making an update in Python", desk.view_ms, "ms")
    report.promise("main-thread time of an update with 1,024 tiles, 95th percentile", p95, MAIN_THREAD_MS, "ms")
    report.promise("bytes of a typical update with 1,024 tiles", report.row("bytes of an update").median, KIB, "KiB")
    report.note(f"{len(spent)} updates, every third rank on another line in each; half of them with curves on show")
    return report


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
