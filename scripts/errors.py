"""Exit codes, and the one way in which every script here reports a user's mistake."""

import argparse
import os
import re
import sys
import time

BAD_INPUT = 2
ENVIRONMENT = 3
NO_CHECKPOINT = 4


def fail(source: object, what: str, way_out: str, code: int = BAD_INPUT) -> None:
    """Print ``error: <source>: <what>; <way_out>`` on stderr, once per job, and exit with `code`.

    source: the file, flag or variable at fault. Raises SystemExit(code), never returns.
    """
    rank = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)
    if rank > 0:
        # Usually every rank finds the same mistake and rank 0 reports it: its launcher then ends this
        # process. A mistake that only this rank sees (a file missing on one node) is reported late.
        time.sleep(10)
    print(f"error: {source}: {what}; {way_out}".replace("\n", " "), file=sys.stderr, flush=True)
    raise SystemExit(code)


class OneLineErrors(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, whose help opens with the purpose, and without abbreviations."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, usage=argparse.SUPPRESS, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> None:
        """Turn argparse's ``argument --x/--y: reason`` into an error line."""
        match = re.match(r"argument ([^\s/:]+)\S*: (.*)", message, re.DOTALL)
        source, what = match.groups() if match else ("command line", message)
        fail(source, what, "see --help")
