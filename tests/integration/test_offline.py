"""prefetch.py fills the cache on a machine with network; afterwards a run needs none.

The Hub is a small server on 127.0.0.1, with one random BLOOM and one data set.
"""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest
from transformers import BloomConfig, BloomForCausalLM

from helpers import REPOSITORY, run
from test_knobs import small_tokenizer

MODEL, OLD_MODEL, DATASET = "workshop/tiny-hub-bloom", "workshop/old-hub-bloom", "workshop/tiny-hub-squad"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
UNREACHABLE = "http://127.0.0.1:9"  # the discard port: nothing listens there
RUN = {"MODEL_NAME": MODEL, "TRAIN_SIZE": 16, "EVAL_SIZE": 4, "NUM_EPOCHS": 1, "MAX_LENGTH": 512, "PADDING": "longest"}


class FakeHub(BaseHTTPRequestHandler):
    """As much of the Hub's interface as snapshot_download and load_dataset use. `root`: models/, datasets/."""

    root: Path

    def do_GET(self) -> None:
        self.answer(body=True)

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = unquote(urlparse(self.path).path)
        if found := re.fullmatch(
            r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/[^/]+(.*))?", path
        ):
            kind, name, action, folder = found.groups()
            repository = self.root / kind / name
            if repository.is_dir() and action in (None, "revision"):
                return self.send(json.dumps(self.info(repository, name)).encode(), body)
            if repository.is_dir() and action == "tree":
                return self.send(json.dumps(self.tree(repository, (folder or "").strip("/"))).encode(), body)
            if repository.is_dir():
                return self.send(b"[]", body)
        if found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            kind, name, file = found.groups()
            target = self.root / (kind or "models") / name / file
            if target.is_file():
                return self.send(target.read_bytes(), body)
        return self.send(b"{}", body, 404, {"X-Error-Code": "EntryNotFound"})

    def info(self, repository: Path, name: str) -> dict:
        siblings = [{"rfilename": file["path"]} for file in self.tree(repository)]
        return {"id": name, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False, "gated": False}

    def tree(self, repository: Path, folder: str = "") -> list[dict]:
        files = [f for f in sorted((repository / folder).rglob("*")) if f.is_file()]
        return [
            {
                "type": "file",
                "path": str(f.relative_to(repository)),
                "size": f.stat().st_size,
                "oid": hashlib.sha1(f.read_bytes()).hexdigest(),
            }
            for f in files
        ]

    def send(self, content: bytes, body: bool, status: int = 200, headers: dict | None = None) -> None:
        self.send_response(status)
        etag = f'"{hashlib.sha1(content).hexdigest()}"'
        standard = {"Content-Length": str(len(content)), "ETag": etag, "X-Repo-Commit": COMMIT}
        for name, value in (standard | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Address of the server."""
    root = tmp_path_factory.mktemp("hub")
    tokenizer = small_tokenizer(unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    config = BloomConfig(vocab_size=len(tokenizer), hidden_size=32, n_layer=2, n_head=2)
    BloomForCausalLM(config).save_pretrained(root / "models" / MODEL)
    tokenizer.save_pretrained(root / "models" / MODEL)
    for model, copies in ((MODEL, ("flax_model.msgpack", "pytorch_model.bin")), (OLD_MODEL, ("pytorch_model.bin",))):
        for file in copies:
            (root / "models" / model).mkdir(exist_ok=True)
            (root / "models" / model / file).write_bytes(b"0" * 1000)
    write_dataset(root / "datasets" / DATASET)
    handler = type("Handler", (FakeHub,), {"root": root})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def write_dataset(folder: Path) -> None:
    """Rows in the columns of the Hub's squad."""
    folder.mkdir(parents=True)
    articles = json.loads((REPOSITORY / "data" / "squad_sample.json").read_text(encoding="utf-8"))["data"]
    rows = [
        {
            "id": question["id"],
            "title": article["title"],
            "context": paragraph["context"],
            "question": question["question"],
            "answers": {
                "text": [answer["text"] for answer in question["answers"]],
                "answer_start": [answer["answer_start"] for answer in question["answers"]],
            },
        }
        for article in articles
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    ]
    for split, part in (("train", rows[:40]), ("validation", rows[40:50])):
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, part)))


@pytest.fixture(scope="module")
def prefetched(workplace, hub):
    """HF_HOME of a login node after prefetch.py."""
    home = workplace / "login node"
    arguments = ("--model_name", MODEL, "--dataset", DATASET)
    run(workplace, "prefetch", *arguments, script="scripts/prefetch.py", HF_ENDPOINT=hub, HF_HOME=home)
    return home


def test_one_copy_of_the_weights_is_fetched(prefetched: Path):
    assert list(prefetched.rglob(f"snapshots/{COMMIT}/*.safetensors"))
    assert not list(prefetched.rglob("*.msgpack"))
    assert not list(prefetched.rglob("*.bin")), "a second copy of the weights"


def test_weights_of_an_older_model_are_fetched(workplace, hub, tmp_path: Path):
    options = {"script": "scripts/prefetch.py", "HF_ENDPOINT": hub, "HF_HOME": tmp_path}
    run(workplace, "old", "--model_name", OLD_MODEL, **options)
    assert list(tmp_path.rglob("snapshots/*/pytorch_model.bin"))


@pytest.mark.parametrize("network", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": UNREACHABLE}])
def test_run_from_the_cache(workplace, prefetched: Path, network: dict):
    name = f"from_the_cache_{len(str(network))}"
    trained = run(workplace, name, HF_HOME=prefetched, **RUN | {"DATASET": DATASET} | network)
    assert trained.record["status"] == "completed"
    assert trained.record["settings"]["model_name"] == MODEL
    assert (trained.output / "model.safetensors").exists()
    assert ("looking into the local cache only" in trained.log) == ("HF_ENDPOINT" in network)


@pytest.mark.parametrize(
    ("flag", "missing", "model", "fetch"),
    [
        ("--model_name", "bigscience/bloom-560m", "bigscience/bloom-560m", "--model_name bigscience/bloom-560m "),
        ("--dataset", "squad", "tiny-bloom", ""),
    ],
)
def test_neither_network_nor_cache(workplace, tmp_path: Path, flag: str, missing: str, model: str, fetch: str):
    options = {"HF_HOME": tmp_path / "empty", "HF_ENDPOINT": UNREACHABLE}
    refused = run(workplace, "offline", "--model_name", model, "--dataset", "squad", code=2, **options)
    assert refused.error_lines == [
        f"error: {flag}: {missing} is no local path, not in the cache, and there is no network; "
        f"on a login node run: python scripts/prefetch.py {fetch}--dataset squad"
    ]
    assert not refused.record_path.exists()


def test_prefetch_of_an_unknown_name(workplace, hub, tmp_path: Path):
    refused = run(workplace, "unknown", "--model_name", "workshop/no-such-model", script="scripts/prefetch.py",
                  code=3, HF_ENDPOINT=hub, HF_HOME=tmp_path)  # fmt: skip
    assert len(refused.error_lines) == 1
    assert refused.error_lines[0].startswith("error: --model_name: workshop/no-such-model cannot be fetched (")
