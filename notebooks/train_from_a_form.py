"""A web form that starts a training run on a mesh and shows its loss, through `meshbook serve`. Standard library only.

    meshbook serve                                          # prints where its tokens are
    python notebooks/train_from_a_form.py TOKEN_FILE MESH   # and open http://127.0.0.1:8000

The token stays in this process; the browser never sees it. What is typed into the form becomes numbers before it
becomes source.
"""

import argparse
import html
import json
import urllib.error
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TRAINING = """
import meshbook
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
opt = torch.optim.SGD(model.parameters(), lr={lr})
torch.manual_seed(rank)
for step in range({steps}):
    x = torch.randn(64, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    meshbook.log(loss=loss.item(), step=step)
print(f"loss {{loss.item():.4f}}")
"""
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8">{head}<title>Training</title>
<body style="font: 16px system-ui; max-width: 40rem; margin: 2rem auto"><h1>Training</h1>{body}"""
FORM = """<form method="post">
<p><label>learning rate <input name="lr" value="0.05"></label></p>
<p><label>steps <input name="steps" value="100"></label></p>
<button>Train</button></form>"""


class Meshbook:
    """The HTTP API of `meshbook serve`, with one of its tokens."""

    def __init__(self, token_file, mesh, scope="run"):
        found = json.loads(Path(token_file).read_text())
        self.mesh, self._url = mesh, f"{found['url']}/meshes/{urllib.parse.quote(mesh)}"
        self._headers = {"Authorization": f"Bearer {found['tokens'][scope]}"}

    def ask(self, path, body=None):
        data = json.dumps(body).encode() if body is not None else None
        try:
            with urllib.request.urlopen(urllib.request.Request(self._url + path, data, self._headers)) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error)["error"]["message"]) from None


def serve(token_file, mesh, port):
    """Return a server for the form; `serve_forever` runs it."""
    meshbook = Meshbook(token_file, mesh)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.show(self.run_page(self.path.removeprefix("/runs/")) if self.path.startswith("/runs/") else ("", FORM))

        def do_POST(self):
            form = urllib.parse.parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            try:
                source = TRAINING.format(lr=float(form["lr"][0]), steps=int(form["steps"][0]))
                ticket = meshbook.ask("/run", {"source": source})["ticket"]
            except (KeyError, ValueError) as error:
                return self.show(("", f"<p>Not started: {html.escape(str(error))}</p>{FORM}"))
            self.send_response(303)
            self.send_header("Location", f"/runs/{ticket}")
            self.end_headers()

        def run_page(self, ticket):
            try:
                run = meshbook.ask(f"/results/{urllib.parse.quote(ticket)}")
                losses = meshbook.ask("/metrics?name=loss")["metrics"]
            except ValueError as error:
                return "", f"<p>{html.escape(str(error))}</p>"
            curve = [(step, value) for step, value in (losses[0]["curve"] if losses else ()) if value != "nan"]
            top = max((value for _, value in curve), default=1) or 1
            bars = "".join(
                f"<div style='background:#88f;width:{value / top:.1%}'>{step}</div>" for step, value in curve
            )
            printed = html.escape("".join(run["untrusted_output"].values())) if "untrusted_output" in run else ""
            again = "<meta http-equiv='refresh' content='1'>" if run["status"] == "running" else ""
            return again, f"<p>{run['status']}</p><pre>{printed}</pre>{bars}<p><a href='/'>Another</a></p>"

        def show(self, page):
            content = PAGE.format(head=page[0], body=page[1]).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("token_file")
    parser.add_argument("mesh")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    with serve(options.token_file, options.mesh, options.port) as server:
        print(f"http://127.0.0.1:{options.port}")
        server.serve_forever()
