"""The experiment folders and their scripts, as text; what bash and git say of them: tests/commands."""

import json
import re
from pathlib import Path

import pytest

from helpers import EXPERIMENT_SCRIPTS, EXPERIMENTS
from knobs import KNOBS

FOLDERS = {
    "baseline": ["baseline.slurm"],
    "deepspeed-single-gpu": [
        *(f"zero_{stage}/deepspeed_zero{stage}.slurm" for stage in range(4)),
        *(f"cpu_offloading/zero_{stage}/deepspeed_zero{stage}_offload.slurm" for stage in (1, 2, 3)),
        "cpu_offloading/pinned_memory/deepspeed_zero2_offload_pinned_memory.slurm",
    ],
    "deepspeed-multi-gpu": [
        *(f"{gpus}_gpus/deepspeed_{gpus}_gpus.slurm" for gpus in (2, 4, 6, 8)),
        *(f"2_gpus_stages_comparison/zero_{stage}/deepspeed_2_gpus_zero{stage}.slurm" for stage in (1, 2, 3)),
        *(
            f"2_gpus_stages_comparison/cpu_offloading/zero_{stage}/deepspeed_2_gpus_zero{stage}_offload.slurm"
            for stage in (1, 2, 3)
        ),
    ],
    "deepspeed-multi-node": [f"{nodes}_nodes/deepspeed_{nodes}_nodes.slurm" for nodes in (2, 3, 4, 5, 6)],
    "deepspeed-native-launch": ["zero3_offload/run.slurm"],
    "efficiency": [
        f"{name}/efficiency_{name}.slurm"
        for name in (
            *("recipe", "dynamic_padding", "group_by_length", "bf16", "chunked_loss"),
            *("activation_checkpointing", "compile", "all"),
        )
    ],
    "fsdp-baseline": ["baseline.slurm"],
    "fsdp-single-gpu": [
        f"{name}/single_gpu.slurm" for name in ("full_shard", "cpu_offload", "activation_checkpointing")
    ],
    "fsdp-strategies": [
        f"{name}/strategies.slurm" for name in ("full_shard", "shard_grad_op", "hybrid_shard", "cpu_offload")
    ],
    "fsdp-multi-gpu": [f"{gpus}_gpus/multi_gpu.slurm" for gpus in (2, 4, 8)],
    "fsdp-multi-node": [f"{nodes}_nodes/multi_node.slurm" for nodes in (2, 4, 8)],
    "custom-model": [
        "single_node/single_node.slurm",
        *(f"multi_gpu/{gpus}_gpus/multi_gpu.slurm" for gpus in (2, 4, 8)),
        *(f"multi_node/{nodes}_nodes/multi_node.slurm" for nodes in (2, 4, 8)),
        *(f"weak_scaling/{gpus}_gpus/weak_scaling.slurm" for gpus in (2, 4, 8, 16)),
    ],
    "gpu-check": ["gpu_check.slurm"],
    "methods-comparison": [
        f"{name}/comparison.slurm" for name in ("ddp", "fsdp1", "fsdp2", "zero3", "zero3_offload")
    ],
}  # fmt: skip
CONFIG_FLAGS = {"deepspeed", "fsdp", "fsdp_config"}


def relative(path: Path) -> str:
    return str(path.relative_to(EXPERIMENTS))


each_script = pytest.mark.parametrize("script", EXPERIMENT_SCRIPTS, ids=relative)


@pytest.mark.parametrize("family", FOLDERS)
def test_families_hold_the_experiments_of_the_documents(family):
    found = {str(path.relative_to(EXPERIMENTS / family)) for path in (EXPERIMENTS / family).rglob("*.slurm")}
    assert found == set(FOLDERS[family])


def test_there_is_no_other_experiment():
    assert {path.relative_to(EXPERIMENTS).parts[0] for path in EXPERIMENT_SCRIPTS} == set(FOLDERS)


@each_script
def test_a_script_sources_the_library_beside_it(script):
    """Relative to the folder: Slurm runs a copy in its spool, started in the submit directory. From another one the
    script ends there."""
    sourced = re.findall(r"^set -e\nsource (\S*job\.sh)$", script.read_text(), re.MULTILINE)
    assert [(script.parent / path).resolve() for path in sourced] == [EXPERIMENTS / "job.sh"]


@each_script
def test_a_script_ends_in_its_training_with_the_users_arguments_last(script):
    """A knob as a flag would win over the variable that a user gives at submission."""
    training = script.read_text().rstrip().splitlines()[-1]
    assert re.match(r'run_(python|torchrun|srun) "\$ROOT/scripts/\w+\.py" ', training)
    assert training.endswith(' "$@"')
    flags = set(re.findall(r"--([\w-]+)", training))
    assert flags <= CONFIG_FLAGS, "knobs belong into variables"
    knobs = {variable for variable, _, _ in KNOBS}
    for line in script.read_text().splitlines():
        assigned = re.match(r"(?:export )?([A-Z][A-Z_0-9]+)=", line)
        assert not assigned or assigned[1] not in knobs, f'write : "${{{assigned[1]}:=...}}"'


@each_script
def test_names_directives_and_configs_agree(script):
    text = script.read_text()
    nodes, gpus = (int(re.search(rf"^#SBATCH --{name}=(\d+)", text, re.M)[1]) for name in ("nodes", "gpus-per-node"))
    stated = {"gpus": nodes * gpus, "nodes": nodes}
    for name in script.relative_to(EXPERIMENTS).parts:
        for number, unit in re.findall(r"(?:^|_)(\d+)_(gpus|nodes)(?=[_.]|$)", name):
            assert stated[unit] == int(number), name
    for config in re.findall(r'"\$ROOT/(fsdp_configs/[^"]+)"', text):
        content = json.loads((EXPERIMENTS.parent / config).read_text())
        sizes = content.get("dp_shard_size", "auto"), content.get("dp_replicate_size", "auto")
        assert "auto" in sizes or sizes[0] * sizes[1] == nodes * gpus, config
    assert f"sbatch {script.name}" in text, "the purpose names the command"
    assert "#SBATCH --output=log/%x_%j.out" in text
    assert re.search(r"^#SBATCH --time=\S+", text, re.MULTILINE)
    assert not re.search(r"^#SBATCH --(account|partition|reservation|constraint|chdir)", text, re.MULTILINE)


@each_script
def test_there_is_a_log_folder_that_git_keeps(script):
    assert (script.parent / "log" / ".gitignore").exists(), "Slurm fails a job whose log it cannot open"


@each_script
def test_several_nodes_begin_with_the_bandwidth_test(script):
    several = int(re.search(r"^#SBATCH --nodes=(\d+)", script.read_text(), re.MULTILINE)[1]) > 1
    assert bool(re.search(r"^check_bandwidth$", script.read_text(), re.MULTILINE)) == several


def test_documented_network_settings_are_in_the_site_template():
    text = (EXPERIMENTS / "sites" / "example.sh").read_text()
    names = "NCCL_SOCKET_IFNAME NCCL_IB_HCA NCCL_ALGO NCCL_NET_GDR_LEVEL"
    names += " TORCH_NCCL_BLOCKING_WAIT MIN_BANDWIDTH"
    for name in names.split():
        assert re.search(rf'^(# )?: "\$\{{{name}:=\S+\}}"', text, re.MULTILINE), name
