"""The #SBATCH lines of a .slurm file."""

import pytest

from job.directives import gpus_per_node, limit_hours, parse_count, read_directives


@pytest.mark.parametrize(
    ("lines", "nodes", "gpus"),
    [
        ("#SBATCH --nodes=2\n\n# text\n#SBATCH --gpus-per-node=a100:2  # not -N 3", 2, 2),
        ("#SBATCH -N 1-4 --exclusive -G8\n#SBATCH --job-name x", 4, 2),
        ('#SBATCH -N2\n#SBATCH --gres="nvme:100,gpu:a100:3"', 2, 3),
        ("#SBATCH --gpus-per-node 2\n#SBATCH --gpus-per-node 4", 1, 4),
        ("# --nodes=3\n#SBATCH --gpus-per-node=a100", 1, 1),
        ("##SBATCH --nodes=2\n#SBATCH --gres=gpu --gpus-per-task=2", 1, 1),
    ],
)
def test_directives_are_read_as_sbatch_reads_them(tmp_path, lines, nodes, gpus):
    script = tmp_path / "x.slurm"
    script.write_text(f"#!/bin/bash\n{lines}\n")
    asked = read_directives(script)
    assert (parse_count(asked.get("nodes", "")), gpus_per_node(asked)) == (nodes, gpus)


@pytest.mark.parametrize(
    ("limit", "hours"),
    [("90", 1.5), ("30:36", 0.51), ("01:00:00", 1), ("1-12", 36), ("1-00:30", 24.5), ("0-02:00:36", 2.01)],
)
def test_time_limits_are_read_as_slurm_reads_them(refusal, limit, hours):
    assert limit_hours(limit) == pytest.approx(hours)
    assert refusal(limit_hours, f"{limit}h").startswith(f"error: SBATCH_TIMELIMIT: '{limit}h' is not a time; ")
