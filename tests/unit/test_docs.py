"""The pages say what is there: links, knobs, config files, experiments, commands."""

import itertools
import json
import re
import shlex
import textwrap
from pathlib import Path

import pytest
import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from config import KNOBS
from distributed.fsdp_config import check_fsdp_file
from estimate.command_line import parse_memory_plan
from estimate.memory import GIB
from helpers import EXPERIMENT_SCRIPTS, PAGES, REPOSITORY, bash_blocks, directives_of, program
from settings.command_line import parse_command_line


def page(name: str) -> str:
    return (REPOSITORY / "docs" / name).read_text(encoding="utf-8")


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_that_a_page_names_are_there(page):
    names = re.findall(r"`((?:scripts|experiments)/[\w/.-]+\.(?:py|sh|yaml))`", page.read_text(encoding="utf-8"))
    missing = [name for name in names if not (REPOSITORY / name).exists() and "<" not in name]
    assert not missing or page.name in ("CHANGELOG.md", "original-documents.md")  # which name what was renamed


def test_each_promise_names_tests_that_there_are():
    table = (REPOSITORY / "CONTRIBUTING.md").read_text().split("## Promises and their tests")[1].split("\n## ")[0]
    rows = re.findall(r"^\| [^|]+ \| (`.*`) \|$", table, re.MULTILINE)
    assert len(rows) == table.count("\n| ") - 2
    for path, test in re.findall(r"`([\w/.]+)::(\w+)`", " ".join(rows)):
        assert f"def {test}(" in (REPOSITORY / "tests" / path).read_text(), f"{path}::{test}"


def test_table_of_knobs_is_that_of_the_code():
    text = (REPOSITORY / "docs" / "knobs.md").read_text()
    rows = re.findall(r"^\| `([A-Z_0-9]+)` \| `--(\w+)` \| (.*?) \|$", text, re.MULTILINE)
    assert [(variable, flag) for variable, flag, _ in rows] == [(variable, flag) for variable, flag, _ in KNOBS]
    for (variable, _, shown), (_, _, default) in zip(rows, KNOBS, strict=True):
        if default is not None:
            assert shown.startswith(f"`{default}`"), variable


def test_functions_of_the_libraries_are_where_the_page_says():
    text = page("training-loop.md").split("## Where to read it")[1]
    rows = re.findall(r"^- `([\w/]+\.py)`: (`.*`)$", text, re.MULTILINE)
    assert len(rows) == text.count("\n- ") > 5
    libraries = Path(torch.__file__).parents[1]
    for file, functions in rows:
        content = (libraries / file).read_text()
        for function in re.findall(r"`(\w+)`", functions):
            assert re.search(rf"^ *def {function}\(", content, re.MULTILINE), f"{file}: {function}"


@pytest.mark.parametrize(
    ("name", "shown", "file", "line"),
    [
        ("ddp.md", "bf16_compress_hook", "torch/distributed/algorithms/ddp_comm_hooks/default_hooks.py", "def {}("),
        ("efficiency.md", "DataCollatorWithFlattening", "transformers/data/data_collator.py", "class {}("),
        ("offload.md", "adamw_8bit", "transformers/training_args.py", '= "{}"'),
        ("offload.md", "adafactor", "transformers/training_args.py", '= "{}"'),
        ("offload.md", "nvme_path", "deepspeed/runtime/zero/offload_config.py", "    {}: "),
        ("zero.md", "zero_quantized_weights", "deepspeed/runtime/zero/config.py", "    {}: "),
        ("zero.md", "zero_quantized_gradients", "deepspeed/runtime/zero/config.py", "    {}: "),
        ("zero.md", "zero_hpz_partition_size", "deepspeed/runtime/zero/config.py", "    {}: "),
        (
            "deepspeed-config.md",
            "500 million",
            "deepspeed/runtime/zero/config.py",
            "reduce_bucket_size: int = Field(pp_int(5e8)",
        ),
    ],
)
def test_what_a_page_names_of_a_library_exists(name, shown, file, line):
    assert shown in page(name)
    assert line.format(shown) in (Path(torch.__file__).parents[1] / file).read_text()


def test_the_build_for_older_gpus_is_told_where_it_is_looked_for():
    pin = re.search(r"^torch==(\S+)$", (REPOSITORY / "requirements.txt").read_text(), re.MULTILINE)[1]
    places = ["docs/environment.md", "docs/instructor/README.md", "experiments/sites/example.sh"]
    for place in [*places, "scripts/checks/machine.py"]:
        command = f"python -m pip install torch=={pin}+cu126 --index-url https://download.pytorch.org/whl/cu126"
        assert command in (REPOSITORY / place).read_text(encoding="utf-8"), place


def folder_of(script: Path) -> str:
    return str(script.parent.relative_to(REPOSITORY / "experiments"))


def experiment_of(script: Path) -> tuple[str, str, str]:
    """Folder, nodes x GPUs and config of an experiment's script."""
    asked = directives_of(script)
    config = re.search(r"(?:ds|fsdp)_configs/([\w.]+)", script.read_text())
    return folder_of(script), f"{asked['nodes']} x {asked['gpus-per-node']}", f"`{config[1]}`" if config else "-"


NO_EXPERIMENTS = ("gpu-check", "demo/plain", "demo/ddp", "demo/zero3", "demo/fsdp")


def test_index_of_experiments_is_the_tree():
    index = (REPOSITORY / "experiments" / "README.md").read_text()
    row = r"^\| `experiments/submit\.sh (\S+)` \| [^|]+ \| (\d+ x \d+) \| (\S+) \| (?:-|\[\d+\]\(\S+\)) \|$"
    listed = re.findall(row, index, re.MULTILINE)
    assert len(listed) == index.count("\n| `")
    assert sorted(listed) == sorted(map(experiment_of, EXPERIMENT_SCRIPTS))
    number = len(EXPERIMENT_SCRIPTS) - len(NO_EXPERIMENTS)
    assert f"{number} experiments, each a folder" in index
    assert f"Each of the {number} experiments" in (REPOSITORY / "README.md").read_text()


def test_an_experiment_is_filed_under_the_section_that_teaches_it():
    index = (REPOSITORY / "experiments" / "README.md").read_text()
    row = r"^\| `experiments/submit\.sh (\S+)` .* \[\d+\]\(\.\./docs/(\S+)\) \|$"
    rows = re.findall(row, index, re.MULTILINE)
    assert len(rows) == len(EXPERIMENT_SCRIPTS) - len(NO_EXPERIMENTS)
    assert [f"{name}: {link}" for name, link in rows if name.split("/")[0] not in page(link)] == []


def test_experiments_that_need_a_gpu_are_named():
    configs = {path.name: json.loads(path.read_text()) for path in (REPOSITORY / "fsdp_configs").glob("*.json")}
    refused = [name for name, config in configs.items() if config.get("cpu_offload") or config["version"] == 1]
    scripts = [script for script in EXPERIMENT_SCRIPTS if any(name in script.read_text() for name in refused)]
    assert all(directives_of(script)["nodes"] == "1" for script in scripts)
    expected = sorted(map(folder_of, scripts))
    index = (REPOSITORY / "experiments" / "README.md").read_text()
    row = r"^\| `experiments/submit\.sh (\S+)` \| .+ \(needs a GPU\) \|"
    assert sorted(re.findall(row, index, re.MULTILINE)) == expected
    front = (REPOSITORY / "README.md").read_text()
    assert [experiment for experiment in expected if f"`{experiment}`" not in front] == []


def test_table_of_deepspeed_files_is_what_they_say():
    text = (REPOSITORY / "docs" / "deepspeed-config.md").read_text()
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


def test_table_of_fsdp_files_is_what_they_say():
    rows = re.findall(r"^\| `(\w+)\.json` \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", page("fsdp.md"), re.MULTILINE)
    assert sorted(name for name, *_ in rows) == sorted(
        path.stem for path in (REPOSITORY / "fsdp_configs").glob("*.json")
    )
    for name, strategy, between, over in rows:
        config = check_fsdp_file(str(REPOSITORY / "fsdp_configs" / f"{name}.json"))
        hybrid = "dp_shard_size" in config
        assert ("HYBRID_SHARD" in strategy, "of FSDP1" in strategy) == (hybrid, config["version"] == 1), name
        assert ("stay gathered" in between) == (config["reshard_after_forward"] is False), name
        assert ("computed again" in between) == config.get("activation_checkpointing", False), name
        assert ("CPU memory" in between) == config.get("cpu_offload", False), name
        assert (over == "all ranks") == (not hybrid), name


# Commands in fenced blocks. Those of "bash" work on a laptop, those of "bash cluster" need Slurm or a GPU.

NEEDS_CLUSTER = re.compile(r"\b(sbatch|srun|squeue|scancel)\b")
BLOCKS = [
    pytest.param(path, kind, text, id=f"{path.name}-{number}")
    for path in PAGES
    for number, (kind, text) in enumerate(bash_blocks(path))
]


def commands(text: str):
    """(folder, variables, words) of each simple command of a block, following cd."""
    here = REPOSITORY
    for line in textwrap.dedent(text).splitlines():
        before = here
        words = shlex.split(line.strip("()") if line.startswith("(") else line, comments=True)
        for is_operator, group in itertools.groupby(words, lambda word: word in ("&&", ";", "|", ">")):
            command = list(group)
            variables = {}
            while command and re.match(r"[A-Z_]+=", command[0]):
                name, _, value = command.pop(0).partition("=")
                variables[name] = value
            if command[:1] == ["cd"]:
                here = (here / command[1]).resolve()
                assert here.is_dir(), f"{line}: there is no {here}"
            elif command and not is_operator:
                yield here, variables, command
        if line.startswith("("):
            here = before


@pytest.mark.parametrize(("path", "kind", "text"), BLOCKS)
def test_commands_are_those_that_there_are(path, kind, text, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    for here, variables, words in commands(text):
        submits = words[0].endswith("submit.sh") and "--dry-run" not in words
        if NEEDS_CLUSTER.search(words[0]) or submits:
            assert kind.strip() == "cluster", f"{words} needs a cluster: mark its block as such"
        while words[0] == "srun" or words[0].startswith("--"):
            words = words[1:]
        assert not {"scripts/launch.py", "torch.distributed.run"} & set(words), "pages start ranks by torchrun"
        if words[0] == "torchrun":
            assert re.fullmatch(r"--nproc_per_node=\d", words[1]), words
            assert "OMP_NUM_THREADS=" in path.read_text(), "torchrun would set 1, and print a warning"
            words = ["python", *words[2:]]
        check(here, variables, words)


def check(here: Path, variables: dict[str, str], words: list[str]) -> None:
    """Whether this command is there, with these flags."""
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in words[1:] if "=" not in word} <= set(targets), words
    elif words[0] in ("sbatch", "bash") and len(words) > 1:
        script = next(word for word in words[1:] if word.endswith((".slurm", ".sh")))
        assert (here / script).is_file(), f"{script} is not in {here}"
    elif words[0].endswith("submit.sh"):
        assert (here / words[0]).is_file(), f"{words[0]} is not below {here}"
        assert (REPOSITORY / "experiments" / words[-1]).exists() or words[-1] in ("all", "own/mine")
    elif words[0] == "python" and words[1].endswith(".py"):
        check_flags(here / words[1], words[2:], variables)


def check_flags(script: Path, flags: list[str], variables: dict[str, str]) -> None:
    if script.name == "estimate_memory.py":
        settings = parse_memory_plan(flags, environment=variables)
    elif script.name in ("train.py", "evaluate.py"):
        settings = parse_command_line("", flags, gpu=True, environment=variables)
    else:  # whose flags are in their own lines
        names = {flag.partition("=")[0] for flag in flags if flag.startswith("--")}
        assert names <= set(re.findall(r"--[\w-]+", script.read_text())), script
        return
    for config in (settings.trainer.deepspeed, settings.trainer.fsdp_config):
        assert not config or (REPOSITORY / config).is_file()


SECTIONS = sorted(
    (path for path in PAGES if re.match(r"# \d+\. ", path.read_text())),
    key=lambda path: int(re.match(r"# (\d+)", path.read_text())[1]),
)


@pytest.mark.parametrize("path", SECTIONS, ids=lambda p: p.name)
def test_a_section_is_in_the_map_and_its_quiz_has_answers(path):
    """Its place in the map, and an answer and something to discuss for each question."""
    text = path.read_text()
    number, title = re.match(r"# (\d+)\. (.*)", text).groups()
    row = re.search(
        rf"^\| {number} \| \[(.*)\]\(docs/{path.name}\)", (REPOSITORY / "README.md").read_text(), re.MULTILINE
    )
    assert row, f"{number} {title} is not in the map"
    quiz = text.split("## Quiz")[1].split("\n## ")[0]
    questions = len(re.findall(r"^\d+\. ", quiz, re.MULTILINE))
    assert quiz.count("<details><summary>Answer</summary>") == quiz.count("</details>") == questions >= 3
    discussion = re.split(r"^## ", page("instructor/answers.md"), flags=re.MULTILINE)[int(number)]
    assert len(re.findall(r"^\d+\. ", discussion, re.MULTILINE)) == questions


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_link_to_a_section_has_its_number(path):
    numbers = {section.name: re.match(r"# (\d+)", section.read_text())[1] for section in SECTIONS}
    for number, target in re.findall(r"\[(?:[Ss]ection )?(\d+)\]\(([\w./-]+\.md)", path.read_text()):
        assert numbers.get(Path(target).name, number) == number, f"{path.name}: [{number}]({target})"


def test_each_page_of_the_map_leads_to_the_next():
    the_map = (REPOSITORY / "README.md").read_text().split("## The workshop")[1].split("For reference:")[0]
    pages = re.findall(r"^\|[\d ]+\| \[[^]]*\]\(docs/([\w-]+\.md)\)", the_map, re.MULTILINE)
    assert {path.name for path in SECTIONS} < set(pages)
    for name, following in itertools.pairwise(pages):
        assert re.search(rf"^Next: \[.*\]\({following}\)$", page(name), re.MULTILINE), name


def test_the_bill_is_that_of_the_scripts():
    families = {
        "2": [r"baseline"],
        "3": [r"efficiency/.*"],
        "6": [r"ddp/.*"],
        "7": [r"batch-size/.*"],
        "9": [r"deepspeed-single-gpu/zero_\d"],
        "10": [r"deepspeed-single-gpu/cpu_offloading/.*"],
        "11": [r"deepspeed-multi-gpu/.*", r"deepspeed-native-launch/.*"],
        "12": [r"deepspeed-multi-node/.*"],
        "13": [r"fsdp-.*"],
        "15": [r"custom-model/.*"],
        "16": [r"tensor-parallel/.*"],
        "18": [r"methods-comparison/.*"],
    }
    bill = page("instructor/README.md").partition("## The bill")[2]
    rows = re.findall(r"^\| (\w+).* \| (\d+) \| (\d+) \| (\d+) \|$", bill, re.MULTILINE)
    found = {}
    for section, patterns in families.items():
        scripts = [s for s in EXPERIMENT_SCRIPTS if any(re.fullmatch(p, folder_of(s)) for p in patterns)]
        found[section] = (
            len(scripts),
            sum(map(gpus_of, scripts)),
            round(sum(gpus_of(s) * hours_of(s) for s in scripts)),
        )
    found["All"] = tuple(map(sum, zip(*found.values(), strict=True)))
    assert {section: tuple(map(int, numbers)) for section, *numbers in rows} == found
    assert found["All"][0] == len(EXPERIMENT_SCRIPTS) - len(NO_EXPERIMENTS)


def gpus_of(script: Path) -> int:
    asked = directives_of(script)
    return int(asked["nodes"]) * int(asked["gpus-per-node"])


def hours_of(script: Path) -> float:
    hours, minutes, _ = map(int, directives_of(script)["time"].split(":"))
    return hours + minutes / 60


# Numbers that benchmarks have measured


def test_errors_of_the_predictions_are_those_that_were_measured():
    prediction = program("benchmarks/prediction.py")
    measured = prediction.read_results()
    assert prediction.summary(measured) in page("memory.md")
    assert prediction.page_table(measured) in page("results.md")


def test_numbers_about_communication_are_those_that_were_counted():
    communication = program("benchmarks/communication.py")
    assert communication.page_table(communication.read_results()) in page("collectives.md")


def test_numbers_at_scale_are_those_of_the_formulas():
    assert program("docs/figures/at_scale.py").page_table() in page("comparison.md")


def test_numbers_along_the_dimensions_are_those_of_the_formulas():
    numbers = program("docs/figures/dimensions.py")
    the_map, pipeline = page("dimensions.md"), page("pipeline.md")
    assert numbers.table_of_dimensions() in the_map
    shape = numbers.trace_shape(numbers.plan())
    megatron, plan = numbers.tensor_sends(shape), numbers.tensor_sends_by_plan()
    tokens = [f"{numbers.break_even(accumulation, sent):,.0f}" for sent in (megatron, plan) for accumulation in (1, 4)]
    assert "more than {} tokens, or {} with accumulation 4 (against transformers' plan {} and {})".format(*tokens) in (
        the_map
    )
    assert f"a GPT of this size sends {32 * plan / 1e9:.2f} GB" in the_map
    found = numbers.dimensions()
    assert f"{found['data'].held / GIB:.1f} GiB become {found['shard'].held / GIB:.1f}" in the_map
    assert f"{found['shard'].sent / 1e9:.2f} GB against {found['pipeline'].sent / 1e9:.2f}" in the_map
    assert numbers.table_of_messages() in pipeline
    assert numbers.table_of_lengths() in pipeline
    all_and_gradients = numbers.logits(32 * 512, 4) + numbers.logits(512, 8)
    for schedule, first, last in (("GPipe", 32, all_and_gradients), ("1F1B", 8, numbers.logits(512))):
        kept = f"{numbers.kept_by_first_stage(first) / GIB:.1f} | {last / GIB:.1f}: log-softmax"
        assert f"| {schedule} | {kept}" in pipeline
    at_once = 4 * numbers.shard_sends(shape) + 2 * shape.parameters * 7 / 8  # of four micro batches with one question
    assert at_once == pytest.approx(found["shard"].sent)
    at_once -= 3 * numbers.shard_sends(shape)  # all four questions in one
    assert f"it sends {at_once / 1e9:.2f} GB" in pipeline
    few, many = (sent / found["pipeline"].sent for sent in (at_once, found["shard"].sent))
    assert f"[a {few:.0f}nd to a {many:.0f}th]" in pipeline
    head = 250_880 * shape.hidden
    assert f"as much as {head / shape.block_sizes[0]:.1f} blocks of bloom-7b1" in pipeline
    assert f"add up its gradients, {4 * head / 1e9:.1f} GB in a step" in the_map
    assert f"131,072 tokens take [{numbers.checkpointed(131_072) / GIB:.1f} GiB]" in the_map
    assert f"full logits take {numbers.logits(131_072) / GIB:.1f} GiB" in the_map
    assert f"fp32: {numbers.checkpointed(131_072, 4) / GIB:.1f} GiB for 131,072 tokens" in pipeline


def test_bytes_along_the_dimensions_are_those_of_papers_and_counts():
    numbers = program("docs/figures/dimensions.py")
    shape = numbers.trace_shape(numbers.plan())
    layers, b, s, h, t = 30, 1, 512, 4096, 8  # bloom-7b1, in the letters of arXiv:2104.04473

    # Its section 3 counts numbers, here of 2 bytes. In a block tensor parallelism sends 8 b s h (t - 1) / t of them.
    # That is 4 all-reduces; embedding and head have one each. Stages send b s h in each direction.
    of_a_block = 8 * b * s * h * (t - 1) / t * 2
    assert numbers.tensor_sends(shape) == pytest.approx((layers + 2 / 4) * of_a_block)
    assert numbers.pipeline_sends(shape) == 2 * b * s * h * 2

    # Counted for transformers' plan: 8 blocks, 64 tokens, hidden size 256, 12,288 logits. Two of the fp32 all-reduces
    # are outside the blocks. Next to FSDP all fp32 all-reduces are of activations.
    rows = program("benchmarks/communication.py").read_results()["rows"]
    row = next(row for row in rows if (row["strategy"], row["accumulation"]) == ("TP 2 x FSDP 2", 1))
    counted = {(kind, dtype): (number, size) for kind, dtype, _, number, size in row["collectives"]}
    number, size = counted["all-reduce", "float32"]
    fp32 = size / number / (64 * 256) * ((number - 2) / 8 * layers + 2)
    number, size = counted["all-reduce", "bfloat16"]
    bf16 = size / number / (64 * 256) * number / 8 * layers
    logits = counted["all-gather", "bfloat16"][1] / (64 * 12_288) * 250_880
    assert numbers.tensor_sends_by_plan() == pytest.approx((2 * s * h * (fp32 + bf16) + s * logits) * (t - 1) / t)

    # FULL_SHARD's micro batch of T tokens: 2 bytes of 7.069 billion parameters forward, of 6.041 in the blocks
    # backward, and of all gradients. Tensor parallelism: 8 T tokens, and for each of them 4 x 30 + 2 all-reduces, in
    # which a ring sends 2 x 4,096 numbers of 2 bytes.
    tokens = 2 * (7.069e9 + 6.0414e9 + 7.069e9) / (8 * 122 * 2 * 2 * 4096)
    assert numbers.break_even(1, numbers.tensor_sends(shape)) == pytest.approx(tokens, rel=1e-4)

    # In a block 131,072 tokens have keys and values of 2.147 GB, and a rank passes on 7 of 8 pieces. They go round in
    # the forward pass, again in the recomputed one, and in the backward pass with as many bytes of gradients.
    assert numbers.context_sends(shape, 131_072, again=True) / 1e9 == pytest.approx(4 * 30 * 2.1475 * 7 / 8, rel=1e-4)
    assert numbers.context_sends(shape, 131_072) / 1e9 == pytest.approx(3 * 30 * 2.1475 * 7 / 8, rel=1e-4)


def test_bytes_of_full_logits_are_those_of_a_real_loss():
    tokens, vocabulary, hidden = 256, 4096, 8
    states = torch.randn(1, tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(vocabulary, hidden, dtype=torch.bfloat16, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        ForCausalLMLoss(states @ head.T, torch.zeros(1, tokens, dtype=torch.long), vocabulary).backward()
    memory = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(memory, key=lambda event: event.start_ns())]
    peak = max(itertools.accumulate(sizes))
    assert peak / (tokens * vocabulary) == pytest.approx(program("docs/figures/dimensions.py").LOGITS, rel=0.02)
