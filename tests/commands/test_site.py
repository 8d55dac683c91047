"""make docs: the pages as a web site, looked at in a real browser."""

import functools
import html
import http.server
import re
import subprocess
import threading
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin

import pytest

from browser import browse
from helpers import REPOSITORY

# A page as wide as a telephone, in a frame; it tells how wide its content is, once that is there
PHONE = """
<iframe src="{page}" style="width: 390px; height: 844px; border: 0" onload="setTimeout(() => {{
  const page = this.contentDocument.documentElement;
  document.title = 'content ' + page.scrollWidth + ' of ' + page.clientWidth }}, 500)"></iframe>
"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A copy of the pages, so that the repository stays as it is, built as `make docs` does."""
    folder = tmp_path_factory.mktemp("site")
    # --old-file: with the packages that are there, as all tests
    command = ["make", "--old-file=.venv/installed-dev", "docs", f"SITE_FOLDER={folder}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site):
    """Of the site on this machine."""
    handler = functools.partial(Quiet, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_search_finds_a_page(address, tmp_path):
    page, _ = browse(f"{address}/search.html?q=reduce-scatter", tmp_path, "--dump-dom")
    assert 'href="docs/collectives.html' in page


@pytest.mark.parametrize("name", ["index.html", "docs/fsdp.html", "docs/original-documents.html"])
def test_a_page_fits_a_telephone(site, address, tmp_path, name):
    (site / "phone.html").write_text(PHONE.format(page=name))
    shown, _ = browse(f"{address}/phone.html", tmp_path, "--dump-dom")
    content, room = map(int, re.search(r"<title>content (\d+) of (\d+)</title>", shown).groups())
    assert content == room
    assert 370 <= room <= 390


def test_every_link_leads_somewhere(site):
    pages = {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert len(pages) > 30
    anchors = {name: set(re.findall(r'\bid="([^"]+)"', text)) for name, text in pages.items()}
    for name, text in pages.items():
        for link in re.findall(r'<a [^>]*href="([^"]+)"', text):
            target, anchor = urldefrag(urljoin(f"/{name}", html.unescape(link)))
            if target.startswith(("http", "mailto:")):
                continue
            file = unquote(target).strip("/") or "index.html"
            assert (site / file).is_file(), f"{name}: {link}"
            assert not anchor or file not in anchors or anchor in anchors[file], f"{name}: {link}"


def test_nothing_is_taken_from_another_server(site):
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        text = path.read_text(encoding="utf-8")
        taken = re.findall(
            r'(?:src|srcset)="(https?:|//)[^"]*"|<link [^>]*href="(?:https?:|//)[^"]*"|url\(["\']?https?:', text
        )
        assert not taken, path
