"""The optimizers that the workshop knows, and the facts in which they differ.

`choose_optimizer` returns the requested optimizer. guard/audit.py compares it with the optimizer that runs.
"""

from dataclasses import dataclass, replace

from settings.settings import Settings


@dataclass(frozen=True)
class Optimizer:
    """An optimizer.

    algorithm: runs with the same algorithm are comparable. state: what it keeps for each trained parameter in fp32,
    empty if that is unknown. state_bytes: the bytes of this state; an unknown state counts as AdamW's. To
    measure them, divide optimizer_state by the parameters in the record of a run. shown: the classes that may run, as
    the audit shows them. shardable: False if it cannot update shards of parameters.
    """

    algorithm: str
    state: str = ""
    state_bytes: int = 8
    shown: tuple[str, ...] = ()
    shardable: bool = True


ADAMW = Optimizer("AdamW", "two moments", 8, ("AdamW (torch)",))
ADAMW_FUSED = replace(ADAMW, shown=("AdamW (torch, fused)",))
ADAMW_OF_DEEPSPEED = replace(  # on a GPU, on the CPU, and on the CPU with ZenFlow
    ADAMW, shown=("FusedAdam (deepspeed)", "DeepSpeedCPUAdam (deepspeed)", "ZenFlowCPUAdam (deepspeed)")
)
BY_FLAG = {  # values of --optim that need no further package
    "adamw_torch_fused": ADAMW_FUSED,
    "adamw_torch": ADAMW,
    # Its state has a row and a column for each matrix, but not for a shard, which is not a matrix
    "adafactor": Optimizer("Adafactor", shown=("Adafactor (transformers)",), shardable=False),
    # It creates its state before FSDP and DeepSpeed shard the parameters
    "adagrad": Optimizer("Adagrad", "sum of squares", 4, ("Adagrad (torch)",), shardable=False),
    "rmsprop": Optimizer("RMSprop", "mean of squares", 4, ("RMSprop (torch)",)),
    "sgd": Optimizer("SGD", "none", 0, ("SGD (torch)",)),
}
SHARDABLE = ", ".join(name for name, each in BY_FLAG.items() if each.shardable)


def choose_optimizer(settings: Settings) -> Optimizer:
    """Return the optimizer of the DeepSpeed file, otherwise that of --optim."""
    section = (settings.deepspeed_config or {}).get("optimizer")
    if section is None:
        chosen = BY_FLAG.get(settings.trainer.optim, Optimizer(settings.trainer.optim))
        return replace(chosen, state="") if settings.flat().get("optim_args") else chosen  # such as a momentum
    params = section["params"]
    if not params.get("adam_w_mode", True):
        return Optimizer("Adam", ADAMW.state)
    if params.get("torch_adam"):
        return ADAMW_FUSED if params.get("fused") else ADAMW
    return ADAMW_OF_DEEPSPEED


def algorithm(name: str) -> str:
    """Return the algorithm of an optimizer. name: a value of --optim, or as the audit shows it: ``SGD (torch)``."""
    known = BY_FLAG | dict.fromkeys(ADAMW_OF_DEEPSPEED.shown, ADAMW)
    return known[name].algorithm if name in known else name.partition(" (")[0]
