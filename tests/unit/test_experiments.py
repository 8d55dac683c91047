"""The scripts of the experiments, as text: each one; which there are: test_docs.py; what they run: tests/commands."""

import re

import pytest

from config import KNOBS
from helpers import EXPERIMENT_SCRIPTS, EXPERIMENTS, directives_of

CONFIG_FLAGS = {"deepspeed", "fsdp", "fsdp_config"}


each_script = pytest.mark.parametrize("script", EXPERIMENT_SCRIPTS, ids=lambda path: str(path.relative_to(EXPERIMENTS)))


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
    asked = directives_of(script)
    nodes = int(asked["nodes"])
    gpus = nodes * int(asked["gpus-per-node"])
    stated = {"gpus": gpus, "nodes": nodes}
    for name in script.relative_to(EXPERIMENTS).parts:
        for number, unit in re.findall(r"(?:^|_)(\d+)_(gpus|nodes)(?=[_.]|$)", name):
            assert stated[unit] == int(number), name
    assert f"sbatch {script.name}" in text, "the purpose names the command"
    assert asked["output"] == "log/%x_%j.out"
    assert "time" in asked
    assert not asked.keys() & {"account", "partition", "reservation", "constraint", "chdir"}, "those are the site's"


@pytest.mark.parametrize("script", sorted(EXPERIMENTS.glob("ddp/*/*.slurm")), ids=lambda path: path.parent.name)
def test_ddp_has_the_same_global_batch_on_any_number_of_gpus(script):
    asked = directives_of(script)
    gpus = int(asked["nodes"]) * int(asked["gpus-per-node"])
    knobs = dict(re.findall(r': "\${(\w+):=(\w+)}"', script.with_name("env_vars.sh").read_text()))
    batch = int(knobs["BATCH_SIZE"]) * int(knobs["GRAD_ACC"]) * gpus
    assert batch == 16
    assert int(knobs["TRAIN_SIZE"]) % batch == 0, "else accelerate fills the last step up"


@each_script
def test_several_nodes_begin_with_the_bandwidth_test(script):
    several = directives_of(script)["nodes"] != "1"
    assert ("\ncheck_bandwidth\n" in script.read_text()) == several


def test_documented_network_settings_are_in_the_site_template():
    text = (EXPERIMENTS / "sites" / "example.sh").read_text()
    names = "NCCL_SOCKET_IFNAME NCCL_IB_HCA NCCL_ALGO NCCL_NET_GDR_LEVEL"
    names += " TORCH_NCCL_BLOCKING_WAIT MIN_BANDWIDTH"
    for name in names.split():
        assert re.search(rf'^(# )?: "\$\{{{name}:=\S+\}}"', text, re.MULTILINE), name
