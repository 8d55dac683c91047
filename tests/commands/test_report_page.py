"""The page as a browser shows it: no error, no request, every table and plot visible."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

import report
from report_files import RUNS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# Runs in the page once it is loaded, and leaves what it saw where --dump-dom prints it
PROBE = """<script>
addEventListener("load", () => {
  const seen = (element) => { const box = element.getBoundingClientRect(); return box.width > 50 && box.height > 20 };
  const body = document.documentElement;
  document.documentElement.dataset.probe = JSON.stringify({
    tables: [...document.querySelectorAll("table")].map(seen),
    plots: [...document.images].map((image) => seen(image) && image.naturalWidth > 300),
    requests: performance.getEntriesByType("resource").map((entry) => entry.name),
    wide: body.scrollWidth > body.clientWidth,
  });
});
</script>"""


def browse(page: Path, profile: Path, width: int) -> tuple[str, str]:
    """The page's document after loading, and the browser's own log with the console in it."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
               "--no-first-run", f"--user-data-dir={profile}", f"--window-size={width},900", "--enable-logging=stderr",
               "--virtual-time-budget=2000", "--dump-dom", page.as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    return done.stdout, done.stderr


@pytest.mark.skipif(not CHROMIUM, reason="no chromium here; apt-get install chromium")
@pytest.mark.parametrize("width", [1280, 600])
def test_page_in_a_browser(tmp_path, width):
    output = tmp_path / "report"
    report.write_report([RUNS], output, all_runs=False)
    page = tmp_path / "probed.html"
    text = (output / "index.html").read_text().replace("</html>", f"{PROBE}</html>")
    page.write_text(text.replace("default-src 'none'", "script-src 'unsafe-inline'; default-src 'none'"))
    document, log = browse(page, tmp_path / "profile", width)
    probe = re.search(r'data-probe="([^"]*)"', document)
    assert probe, log[-2000:]
    seen = json.loads(unescape(probe[1]))
    assert len(seen["tables"]) == len(list(output.glob("*.csv"))) and all(seen["tables"])
    assert len(seen["plots"]) == len(list(output.glob("*.png"))) and all(seen["plots"])
    assert [name for name in seen["requests"] if not name.startswith("data:")] == []
    assert not seen["wide"], "the page is wider than the window"
    assert "CONSOLE" not in log, log[-2000:]
