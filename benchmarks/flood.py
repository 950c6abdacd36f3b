"""Ten megabytes per second of printing on each of four ranks: what of it reaches the front end, and what it does to us.

Twice: with lines that differ between ranks only in numbers, which fold, and with lines that have nothing in common,
which cannot. Counted are the kernel's messages to its front end and their bytes, per second of the worst three seconds,
which is how Jupyter's server counts (beyond 1,000 messages or 1 MB per second it stops passing them on); how much the
kernel and the supervisor grow; and how long the kernel takes to answer a question while it goes on.

    python -m benchmarks.flood [--quick]
"""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path

from benchmarks import notebook, workbench
from benchmarks.notebook import Message, Notebook
from benchmarks.report import Report
from meshbook.wire import keys

RANKS = 4
BYTES_PER_S = 10_000_000
MESSAGES_PER_S, FRONT_END_BYTES_PER_S = 1000.0, 1_000_000.0
# What supervisor and kernel may grow by, each. Four ranks write this much in two seconds.
GROWTH_MIB = 64.0

LINES = {
    "lines that fold": "f'step {count:09d} of rank {rank}: loss 0.{count % 10007:05d} ' + 'x' * 54 + '\\n'",
    "lines with nothing in common": "'%0400x\\n' % random.getrandbits(1600)",
}

# Ten lines with each write, as a program does that writes this much; says how much it came to.
CELL = """
import random, sys, time
def flood(seconds, rate):
    block = ["".join({line} for count in range(start, start + 10)) for start in range(0, 200, 10)]
    began, written = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < seconds:
        if written < passed * rate:
            written += sum(sys.stdout.write(lines) for lines in block)
        else:
            time.sleep(0.001)
    return written / passed / 1e6
"""

_LOOK_S = 0.5
# Jupyter's ServerApp: rate_limit_window.
_WINDOW_S = 3.0


class Watch:
    """What is seen while a flood goes on: messages with output, memory, answers on the control channel."""

    def __init__(self, page: Notebook, supervisor: int) -> None:
        self._page, self._pids = page, {"kernel": page.pid, "supervisor": supervisor}
        self.sent: list[tuple[float, int]] = []  # of each message that carries output: when it was sent, its bytes
        self.before = self.most = {who: workbench.rss_mib(pid) for who, pid in self._pids.items()}
        self.answers: list[float] = []
        self._next_look = time.monotonic() + _LOOK_S

    def on_message(self, message: Message) -> None:
        if message["msg_type"] in ("stream", "display_data", "update_display_data", "clear_output"):
            date = message["header"]["date"]
            sent = date if isinstance(date, datetime) else datetime.fromisoformat(date)
            self.sent.append((sent.timestamp(), len(json.dumps(message["content"]))))
        if time.monotonic() > self._next_look:
            self.look()

    def look(self) -> None:
        self.answers.append(1e3 * self._page.ask_control())
        self.most = {who: max(self.most[who], workbench.rss_mib(pid)) for who, pid in self._pids.items()}
        self._next_look = time.monotonic() + _LOOK_S

    def worst_rates(self) -> tuple[float, float]:
        """Messages per second and bytes per second, each in the window that had most of them."""
        windows = [[size for at, size in self.sent if end - _WINDOW_S < at <= end] for end, _ in self.sent]
        most = max(map(len, windows), default=0), max(map(sum, windows), default=0)
        return most[0] / _WINDOW_S, most[1] / _WINDOW_S


def measure(quick: bool, folder: Path) -> Report:
    seconds = 3 if quick else 10
    report = Report("flood", f"{BYTES_PER_S / 1e6:.0f} MB/s of printing on each of {RANKS} ranks for {seconds} s")
    with notebook.opened("meshbook", folder, env={"MESHBOOK_RANKS": str(RANKS)}) as page:
        page.run("pass")  # starts the ranks
        (found,) = keys.list_connections()
        for what, line in LINES.items():
            page.run(CELL.format(line=line))
            flood(report, what, page, found.pid, seconds)
    return report


def flood(report: Report, what: str, page: Notebook, supervisor: int, seconds: int) -> None:
    watch = Watch(page, supervisor)
    started = time.perf_counter()
    request = page.send(f"achieved = flood({seconds}, {BYTES_PER_S})")
    page.listen(request, watch.on_message)
    took = time.perf_counter() - started
    page.reply_to(request)
    watch.look()
    report.add(f"{what}: written, per rank", achieved(page), "MB/s")
    report.add(f"{what}: from request to idle", took, "s")
    messages, bytes_ = watch.worst_rates()
    report.add(f"{what}: messages to the front end, on average", len(watch.sent) / took, "/s")
    report.add(f"{what}: messages to the front end, at worst", messages, "/s")
    report.add(f"{what}: bytes to the front end, at worst", bytes_ / 1e6, "MB/s")
    report.add(f"{what}: an answer of the kernel meanwhile", watch.answers, "ms")
    growth = {who: watch.most[who] - watch.before[who] for who in watch.before}
    for who, mib in growth.items():
        report.add(f"{what}: growth of the {who}'s memory at most", mib, "MiB")
        report.promise(f"{what}: growth of the {who}'s memory", mib, GROWTH_MIB, "MiB")
    report.promise(f"{what}: messages to the front end per second", messages, MESSAGES_PER_S, "/s")
    report.promise(f"{what}: bytes to the front end per second", bytes_ / 1e6, FRONT_END_BYTES_PER_S / 1e6, "MB/s")


def achieved(page: Notebook) -> float:
    """What the slowest rank wrote, in MB/s, by its own clock."""
    said: list[str] = []
    request = page.send("%%controller\nprint(min(mesh.pull('achieved').values()))")
    page.listen(request, lambda message: said.append(message["content"].get("text", "")))
    page.reply_to(request)
    return float("".join(said))


if __name__ == "__main__":
    workbench.run_alone(measure, __doc__)
