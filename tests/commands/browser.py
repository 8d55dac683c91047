"""Chromium, a real browser, which apt-get installs if it is missing. Its pages reach no other machine."""

import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
FLAGS += ["--no-first-run", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--enable-logging=stderr"]


def find() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


def program() -> str:
    if not find() and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        apt = ["apt-get", "-qq", "-o", "Acquire::http::Timeout=20", "-o", "DPkg::Lock::Timeout=300"]
        for words in (["update"], ["install", "-y", "--no-install-recommends", "chromium"]):
            subprocess.run([*apt, *words], env=environment, capture_output=True, check=False, timeout=900)
    return find() or pytest.skip("Chromium is missing, and only root on Debian can install it here")


def browse(url: str, profile: Path, *options: str) -> tuple[str, str]:
    """Return the browser's output after the page's scripts have run, and its log, which includes the console.

    profile: a folder for the browser's own files.
    """
    command = [program(), *FLAGS, f"--user-data-dir={profile}", "--virtual-time-budget=10000", *options, url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return done.stdout, done.stderr


# Contrast between each visible text and the nearest background below it, with the text's element
CONTRASTS = """((selector) => {
  const light = (color) => { const [r, g, b] = color.match(/[0-9.]+/g).map((each) => each / 255)
    .map((each) => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05 };
  document.documentElement.style.backgroundColor ||= "Canvas"; // a page without a style has the browser's own
  const ground = (each) => { const color = getComputedStyle(each).backgroundColor;
    return color === "rgba(0, 0, 0, 0)" ? ground(each.parentElement) : color };
  const texts = [...document.querySelectorAll(selector)].filter((each) => each.innerText && each.checkVisibility());
  return texts.map((each) => {
    const [ink, paper] = [light(getComputedStyle(each).color), light(ground(each))];
    return [Math.max(ink, paper) / Math.min(ink, paper), each.outerHTML.slice(0, 99)] }) })"""


class Page:
    """A page under the control of real key strokes, through Chromium's DevTools Protocol over a pipe.

    Chromium reads commands from file descriptor 3 and writes answers to 4. A null byte ends each JSON message.
    """

    def __init__(self, profile: Path):
        (commands, self.commands), (self.answers, answers) = pipe(), pipe()
        browser = [program(), *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        shell = ["bash", "-c", f'exec "$@" 3<&{commands} 4>&{answers}', "bash", *browser]
        log = (profile.parent / f"{profile.name}.log").open("w")
        self.process = subprocess.Popen(shell, pass_fds=(commands, answers), stderr=log)
        os.close(commands)
        os.close(answers)
        self.numbers = itertools.count(1)
        self.unread = b""
        self.messages: list[dict[str, Any]] = []
        self.session: dict[str, str] = {}
        pages = [each for each in self.send("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        attached = self.send("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)
        self.session = {"sessionId": attached["sessionId"]}
        self.send("Page.enable")

    def send(self, method: str, **parameters: object) -> dict[str, Any]:
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": parameters} | self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        answer = self.receive("id", number)
        assert "error" not in answer, answer
        return answer["result"]

    def receive(self, key: str, value: object) -> dict[str, Any]:
        """Wait for the next message in which `key` has this value; store other messages."""
        while True:
            for message in self.messages:
                if message.get(key) == value:
                    self.messages.remove(message)
                    return message
            while b"\0" not in self.unread:
                readable, _, _ = select.select([self.answers], [], [], 300)
                more = os.read(self.answers, 1 << 20) if readable else b""
                assert more, "the browser has ended or does not answer"
                self.unread += more
            text, _, self.unread = self.unread.partition(b"\0")
            self.messages.append(json.loads(text))

    def visit(self, address: str) -> None:
        self.messages.clear()
        self.send("Page.navigate", url=address)
        self.receive("method", "Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def contrasts(self, selector: str) -> list[tuple[float, str]]:
        """Return the contrast of each text, which WCAG 2.2 requires to be at least 4.5, and the text's element."""
        return self.evaluate(f"{CONTRASTS}({selector!r})")

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press a key. code: its Windows key code, which the protocol requires. text: the text that the key types."""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, text=text)

    def tab_to(self, selector: str) -> None:
        """Press Tab until an element that matches `selector` has the focus."""
        for _ in range(300):
            self.press("Tab", 9)
            if self.evaluate(f"document.activeElement.matches('{selector}')"):
                return
        raise AssertionError(f"Tab does not reach {selector}")

    def enter(self) -> None:
        self.press("Enter", 13, "\r")

    def follow(self) -> None:
        """Follow the link that has the focus to another page."""
        self.messages.clear()
        self.enter()
        self.receive("method", "Page.loadEventFired")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.commands)
        os.close(self.answers)


def pipe() -> tuple[int, int]:
    """Create a pipe whose file descriptors are unused in the shell that starts the browser."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]
