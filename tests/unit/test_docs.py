"""The pages say what is there: links, knobs, config files, experiments; and no file holds a key."""

import itertools
import json
import re
import subprocess

import pytest
from config import KNOBS
from helpers import REPOSITORY

PAGES = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("data/*.md")])


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name) if name else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), f"{page.name}: {target}"


def test_table_of_knobs_is_that_of_the_code():
    text = (REPOSITORY / "docs" / "knobs.md").read_text()
    rows = re.findall(r"^\| `([A-Z_0-9]+)` \| `--(\w+)` \| (.*?) \|$", text, re.MULTILINE)
    assert [(variable, flag) for variable, flag, _ in rows] == [(variable, flag) for variable, flag, _ in KNOBS]
    for (variable, _, shown), (_, _, default) in zip(rows, KNOBS, strict=True):
        if default is not None:
            assert shown.startswith(f"`{default}`"), variable


def expand(pattern: str) -> list[str]:
    """a{b,c}d -> abd, acd, as the shell does."""
    parts = re.split(r"\{([^}]*)\}", pattern)
    return ["".join(p) for p in itertools.product(*(p.split(",") if i % 2 else [p] for i, p in enumerate(parts)))]


def test_index_of_experiments_is_the_tree():
    table = (REPOSITORY / "README.md").read_text().split("## The workshop")[1].split("\n## ")[0]
    listed = []
    for row in table.splitlines()[4:]:
        patterns = re.findall(r"`([^`]+)`", row.split("|")[3]) if row.startswith("|") else []
        for pattern in patterns:
            family = patterns[0].split("{")[0]
            listed += expand(pattern.replace(".../", family))
    tree = {str(p.parent.relative_to(REPOSITORY / "experiments")) for p in REPOSITORY.glob("experiments/**/*.slurm")}
    assert sorted(listed) == sorted(tree)


def test_table_of_deepspeed_files_is_what_they_say():
    text = (REPOSITORY / "docs" / "deepspeed.md").read_text()
    rows = re.findall(r"^\| `(\w+)\.json` \| (\d) \|([^|]*)\|([^|]*)\|$", text, re.MULTILINE)
    shown = {name: (int(stage), offload.split(";")[0].strip(), pinned.strip()) for name, stage, offload, pinned in rows}
    stated = {}
    for path in (REPOSITORY / "ds_configs").glob("*.json"):
        zero = json.loads(path.read_text())["zero_optimization"]
        parts = {"optimizer": zero.get("offload_optimizer"), "parameters": zero.get("offload_param")}
        sections = [(part, section) for part, section in parts.items() if section]
        pinned = {True: "yes", False: "no"}.get(sections[0][1]["pin_memory"]) if sections else ""
        stated[path.stem] = (zero["stage"], ", ".join(part for part, _ in sections), pinned)
    assert shown == stated


@pytest.mark.parametrize("folder", ["ds_configs", "fsdp_configs"])
def test_every_config_file_is_explained(folder):
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for path in (REPOSITORY / folder).glob("*.json"):
        assert path.name in text, path.name


def test_no_tracked_file_holds_a_key():
    listed = subprocess.run(
        ["git", "-C", REPOSITORY, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True, text=True,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip("not a git checkout")
    named = re.compile(r"(WANDB_API_KEY|HF_TOKEN|api_key)['\"]?\s*[=:]\s*['\"]?\w{16,}|\bhf_[A-Za-z]{30,}\b")
    bare = re.compile(r"\b[0-9a-f]{40}\b")  # the form of a key of Weights & Biases, and of a git commit
    texts = {".py", ".sh", ".slurm", ".md", ".json", ".yml", ".yaml", ".toml", ".txt"}
    for name in filter(None, listed.stdout.split("\0")):
        path = REPOSITORY / name
        if path.is_file() and path.suffix in texts:
            text = path.read_text(encoding="utf-8")
            assert not named.search(text), name
            assert not (name.startswith("experiments/") and bare.search(text)), name
