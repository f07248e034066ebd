"""A headless browser on pages that a server on this machine hands out."""

from __future__ import annotations

import functools
import html
import http.server
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from tests.lacks import lacks

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HOW = "apt-get install chromium, or name a Chromium by FABRIC_RAY_BROWSER=/path"
WIDTH, HEIGHT = 1280, 2400

# What is drawn can only be asked of a page that is drawn: this one has the other in a frame.
_ASKING = """<!doctype html><title>asks</title>
<iframe id=asked style="width:{width}px;height:{height}px;border:0"></iframe><pre id=told></pre>
<script>
const asked = document.getElementById("asked");
asked.onload = () => {{
  const page = asked.contentDocument, root = page.documentElement;
  const sizes = [...page.querySelectorAll("svg, img")].map(found => {{
    const box = found.getBoundingClientRect();
    return [box.width, box.height, found.tagName != "IMG" || found.naturalWidth > 0];
  }});
  document.getElementById("told").textContent = JSON.stringify({{
    title: page.title, text: page.body.innerText,
    height: Math.ceil(page.body.getBoundingClientRect().bottom) + 16,
    overflows: root.scrollWidth > root.clientWidth, pictures: sizes,
  }});
}};
asked.src = {path};
</script>"""
_CONSOLE = re.compile(r":CONSOLE[:(]\d+\)?\] \"(.*)\", source: ", re.DOTALL)


class Shown(msgspec.Struct, frozen=True):
    """A page as it was drawn."""

    title: str
    text: str
    """What can be read on it."""
    height: int
    """Pixels."""
    overflows: bool
    """Whether it is wider than the window."""
    pictures: list[tuple[float, float, bool]]
    """Width, height, and whether it was loaded."""
    screenshot: Path
    complaints: list[str] = []
    """What scripts and the browser said on the console."""

    def pixels(self) -> npt.NDArray[np.float32]:
        """``[height, width, 3]``, from 0 to 1."""
        image = pytest.importorskip("matplotlib.image", reason="pip install '.[ray]'")
        pixels: npt.NDArray[np.float32] = image.imread(self.screenshot)
        return pixels[:, :, :3]


class Browser:
    """Opens pages below one directory."""

    def __init__(self, program: str, root: Path, port: int, shots: Path) -> None:
        self._program, self._root, self._port, self._shots = program, root, port, shots

    def show(self, page: Path) -> Shown:
        """Draws a page and takes its picture, as high as it is up to :data:`HEIGHT` pixels."""
        path = "/" + str(page.relative_to(self._root))
        name = "-".join(page.relative_to(self._root).with_suffix("").parts)
        asking = self._root / f"asking-{name}.html"
        asking.write_text(_ASKING.format(width=WIDTH, height=HEIGHT, path=json.dumps(path)))
        dom, complaints = self._run(f"/{asking.name}", "--dump-dom")
        told = re.search(r'<pre id="told">(.+?)</pre>', dom, re.DOTALL)
        assert told, f"{page.name} was not drawn: {complaints or dom[-500:]}"
        answer = json.loads(html.unescape(told[1]))
        shot = self._shots / f"{name}.png"
        height = max(200, min(HEIGHT, answer["height"]))
        self._run(path, f"--screenshot={shot}", f"--window-size={WIDTH},{height}")
        return msgspec.convert(
            {**answer, "screenshot": shot, "complaints": complaints}, Shown, dec_hook=_as_is
        )

    def _run(self, path: str, *options: str) -> tuple[str, list[str]]:
        with tempfile.TemporaryDirectory() as profile:
            command = [
                self._program,
                "--headless=new",
                # In containers the browser has no rights for a sandbox; pages here are our own.
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                "--enable-logging=stderr",
                "--virtual-time-budget=10000",
                f"--user-data-dir={profile}",
                *options,
                f"http://127.0.0.1:{self._port}{path}",
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout, _CONSOLE.findall(done.stderr)


def _as_is(kind: type, value: object) -> object:
    assert isinstance(value, kind)
    return value


def find() -> str:
    """The browser; skips the test, or fails it if ``FABRIC_RAY_BROWSER`` is ``require``."""
    wanted = os.environ.get("FABRIC_RAY_BROWSER", "")
    if wanted not in ("", "require"):
        assert shutil.which(wanted), f"FABRIC_RAY_BROWSER: {wanted} isn't there"
        return wanted
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    return found or lacks("FABRIC_RAY_BROWSER", f"no browser is installed: {HOW}")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing: what went wrong is among the browser's complaints."""


@contextmanager
def browser(root: Path, shots: Path) -> Iterator[Browser]:
    """A browser for the pages below ``root``; pictures go to ``shots``."""
    program = find()
    handler = functools.partial(_Quiet, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield Browser(program, root, server.server_port, shots)
        finally:
            server.shutdown()
