"""Variables of the environment that one program sets and another reads. Each row: name, who sets it -> who reads it.

A .py file is in scripts/, a .sh file in experiments/. `user` is the command line or the site's file, and `site` the
site's file. All other names are programs and libraries of others. Knobs are in config.py.

tests/text_checks/variables.py compares these tables with the code.
"""

# Facts about one job. A program that starts another training removes them from its environment
OF_A_JOB = {
    "ALLOCATED_NODES": "run_job.py -> job/on_node.py",
    "ALL_NODES": "run_job.py -> distributed/rendezvous.py distributed/watchdog.py",
    "ATTEMPT": "run_job.py -> records/writer.py",
    "BANDWIDTH_FILE": "run_job.py -> run_job.py records/run_environment.py",
    "CHECK_BANDWIDTH": "job.sh -> run_job.py",
    "CHILD": "job.sh -> job.sh",
    "EARLIER_SIGNALS": "job.sh -> job.sh",
    "EXPERIMENT": "job.sh -> run_job.py records/git_state.py records/run_environment.py site",
    "EXPERIMENTS_FOLDER": "job.sh load_site.sh submit.sh -> load_site.sh site",
    "JOB_ID": "user job.sh demo.py checks/jobs.py -> run_job.py measure_bandwidth.py job/on_node.py"
    " distributed/watchdog.py records/run_environment.py",
    "JOB_PYTHON": "load_site.sh -> job.sh submit.sh",
    "JOB_SCRIPT": "job.sh -> run_job.py",
    "JOB_SHELL": "job.sh -> run_job.py",
    "KNOB_ORIGINS": "job.sh -> run_job.py settings/command_line.py",
    "NODES": "run_job.py -> job/on_node.py",
    "NOTED_SIGNALS": "job.sh -> run_job.py",
    "RANKS_PER_NODE": "run_job.py -> job/on_node.py",
    "ROOT": "job.sh load_site.sh submit.sh -> site",
    "RUN_DIR": "run_job.py -> launch.py job/on_node.py distributed/rendezvous.py distributed/watchdog.py"
    " records/git_state.py shared/errors.py",
    "SITE_FILE": "load_site.sh -> submit.sh",
    "SNAPSHOT": "submit.sh -> job.sh",
}

# Facts about one rank, which its launcher sets. A program that starts another training removes them, too
OF_A_RANK = {
    "LOCAL_RANK": "torchrun distributed/process_group.py -> distributed/process_group.py accelerate DeepSpeed",
    "LOCAL_WORLD_SIZE": "torchrun distributed/process_group.py -> distributed/collectives.py distributed/watchdog.py",
    "MASTER_ADDR": "user run_job.py torchrun distributed/process_group.py -> run_job.py job/on_node.py"
    " distributed/process_group.py distributed/rendezvous.py",
    "MASTER_PORT": "run_job.py torchrun distributed/process_group.py -> run_job.py distributed/process_group.py"
    " distributed/rendezvous.py",
    "PET_NODE_RANK": "job/on_node.py -> torchrun",
    "RANK": "torchrun distributed/process_group.py -> distributed/collectives.py distributed/process_group.py"
    " distributed/rendezvous.py distributed/strategy.py distributed/watchdog.py shared/errors.py",
    "TORCHELASTIC_RUN_ID": "torchrun -> distributed/process_group.py distributed/watchdog.py guard/stopping.py",
    "TORCHELASTIC_USE_AGENT_STORE": "torchrun -> distributed/rendezvous.py",
    "WORLD_SIZE": "torchrun distributed/process_group.py -> distributed/collectives.py distributed/process_group.py"
    " distributed/watchdog.py",
}

VARIABLES = {
    **OF_A_JOB,
    **OF_A_RANK,
    # What a user or a site chooses for all jobs
    "CONTAINER": "user -> preflight.py run_job.py job/end_of_job.py job/on_node.py records/writer.py",
    "CUDA_DEVICE_ORDER": "user job.sh -> CUDA",
    "CUDA_VISIBLE_DEVICES": "user Slurm demo.py gpu_check.py distributed/process_group.py settings/command_line.py"
    " -> gpu_check.py run_job.py job/on_node.py shared/before_imports.py CUDA",
    "DRY_RUN": "user submit.sh checks/jobs.py -> run_job.py",
    "GLOO_SOCKET_IFNAME": "user launch.py job/on_node.py -> measure_bandwidth.py job/on_node.py gloo",
    "GPUS_PER_NODE": "user submit.sh -> submit.sh run_job.py job/directives.py",
    "GPU_MEMORY": "user -> run_job.py",
    "HF_DATASETS_CACHE": "user checks/jobs.py -> datasets",
    "HF_ENDPOINT": "user -> shared/hub.py huggingface_hub",
    "HF_HUB_OFFLINE": "user checks/machine.py shared/hub.py -> shared/hub.py huggingface_hub",
    "JOIN_TIMEOUT": "user job.sh -> distributed/rendezvous.py",
    "LOGGERS": "user job.sh run_job.py -> job/on_node.py",
    "LOG_INTERVAL": "user job.sh -> job/on_node.py",
    "MAX_RESTARTS": "user job.sh -> run_job.py",
    "MIN_BANDWIDTH": "user -> measure_bandwidth.py",
    "NCCL_ALGO": "user -> measure_bandwidth.py NCCL",
    "OMP_NUM_THREADS": "user demo.py launch.py run_job.py -> run_job.py OpenMP",
    "OMP_WAIT_POLICY": "user -> shared/before_imports.py OpenMP",
    "RANKS_PER_GPU": "user gpu_check.py run_job.py distributed/process_group.py -> run_job.py"
    " distributed/collectives.py",
    "REQUEUE": "user -> run_job.py",
    "REQUIRE_GPU": "user job.sh gpu_check.py settings/command_line.py -> checks/jobs.py checks/machine.py"
    " distributed/process_group.py estimate/command_line.py",
    "SITE": "user load_site.sh cluster.py demo.py -> run_job.py checks/machine.py",
    "TENSORBOARD_LOGGING_DIR": "user shared/tracker_setup.py -> transformers",
    "TORCH_CPP_LOG_LEVEL": "user job.sh -> PyTorch",
    "WANDB_DIR": "shared/tracker_setup.py -> wandb",
    "WANDB_MODE": "user shared/tracker_setup.py -> shared/tracker_setup.py wandb",
    "WANDB_ONLINE": "user -> run_job.py",
    "WANDB_PROJECT": "user shared/tracker_setup.py -> wandb",
    # What Slurm sets or reads
    "SBATCH_MEM_PER_NODE": "user -> run_job.py sbatch",
    "SBATCH_PARTITION": "user -> checks/machine.py sbatch",
    "SBATCH_RESERVATION": "user -> checks/machine.py sbatch",
    "SBATCH_TIMELIMIT": "user checks/jobs.py -> reporting/classroom_plan.py sbatch",
    "SLURMD_NODENAME": "Slurm -> job/on_node.py distributed/rendezvous.py",
    "SLURM_CONF": "cluster.py -> Slurm",
    "SLURM_CPUS_ON_NODE": "Slurm -> run_job.py",
    "SLURM_CPUS_PER_TASK": "Slurm -> run_job.py",
    "SLURM_EXPORT_ENV": "run_job.py -> srun",
    "SLURM_GPUS": "Slurm -> run_job.py",
    "SLURM_GPUS_ON_NODE": "Slurm -> run_job.py distributed/process_group.py",
    "SLURM_GPUS_PER_NODE": "Slurm -> run_job.py",
    "SLURM_JOB_ID": "Slurm -> job.sh run_job.py checks/machine.py distributed/process_group.py"
    " distributed/watchdog.py records/run_environment.py",
    "SLURM_JOB_NODELIST": "Slurm -> run_job.py job/end_of_job.py",
    "SLURM_JOB_NUM_NODES": "Slurm -> run_job.py",
    "SLURM_LOCALID": "Slurm -> job/on_node.py distributed/process_group.py",
    "SLURM_NODEID": "Slurm -> job/on_node.py",
    "SLURM_OVERCOMMIT": "run_job.py -> srun",
    "SLURM_PROCID": "Slurm -> job/on_node.py distributed/process_group.py shared/errors.py",
    "SLURM_RESTART_COUNT": "Slurm -> run_job.py records/writer.py guard/checkpoints.py",
    "SLURM_STEP_NODELIST": "Slurm -> distributed/process_group.py",
    "SLURM_STEP_NUM_TASKS": "Slurm -> job/on_node.py distributed/process_group.py distributed/watchdog.py",
    "SLURM_STEP_TASKS_PER_NODE": "Slurm -> distributed/process_group.py",
    "SLURM_SUBMIT_DIR": "Slurm -> run_job.py",
    "SRUN_CPUS_PER_TASK": "run_job.py -> srun",
    # What one program takes from the shell or gives to a library
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "guard/preconditions.py -> accelerate",
    "CLUSTER": "cluster.py -> cluster.py",
    "CLUSTER_PID": "cluster.py -> cluster.py",
    "DS_ACCELERATOR": "distributed/process_group.py -> DeepSpeed",
    "GOMP_SPINCOUNT": "shared/before_imports.py -> OpenMP",
    "HOME": "cluster.py -> shells",
    "LANG": "cluster.py -> shells",
    "LOGNAME": "cluster.py -> shells",
    "NCCL_DEBUG": "measure_bandwidth.py -> NCCL",
    "NCCL_DEBUG_FILE": "measure_bandwidth.py -> NCCL",
    "NCCL_HOSTID": "distributed/process_group.py -> NCCL",
    "NCCL_MNNVL_ENABLE": "distributed/process_group.py -> NCCL",
    "NCCL_NET": "distributed/process_group.py -> NCCL",
    "NCCL_NVLS_ENABLE": "distributed/process_group.py -> NCCL",
    "NCCL_SOCKET_IFNAME": "distributed/process_group.py -> NCCL",
    "PATH": "user cluster.py distributed/process_group.py -> cluster.py distributed/process_group.py shells",
    "SUDO_UID": "sudo -> cluster.py",
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "user guard/checkpoints.py -> PyTorch",
    "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "guard/checkpoints.py -> PyTorch",
    "USER": "cluster.py -> shells",
    "WANDB_API_KEY": "tracking.py -> wandb",
}
