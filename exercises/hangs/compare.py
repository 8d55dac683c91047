"""Compare the collectives of all ranks. The watchdog names the folder in the line about a hang.

    python exercises/hangs/compare.py results/4711_flight_record

For each process group, the table shows the first collective in which the ranks differ, and its neighbours. Without a
difference it shows the last collectives. A rank still waits in a collective that has no end.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

groups: dict = defaultdict(lambda: defaultdict(dict))  # group -> rank -> number of the collective -> the collective
waiting = set()
for file in sorted(Path(sys.argv[1]).glob("rank_*.json"), key=lambda file: (len(file.name), file.name)):
    for entry in json.loads(file.read_text()).get("entries", []):
        # Each backend counts its own collectives. A name is for example gloo:all_reduce
        group = entry["process_group"][0], entry["profiling_name"].split(":")[0]
        number = entry["collective_seq_id"]
        if not entry["is_p2p"]:
            groups[group][file.stem][number] = f"{entry['profiling_name']} {entry['input_sizes']}"
            if not entry["retired"]:
                waiting.add((group, file.stem, number))

if not groups:
    sys.exit(f"error: {sys.argv[1]}: has no rank_*.json with collectives; give the folder that the watchdog names")
for group, ranks in groups.items():
    print(f"{'group ' + group[0]:9}" + "".join(f"{rank:34}" for rank in ranks))
    oldest = max(min(calls) for calls in ranks.values())  # each rank keeps only its last 2000
    newest = max(max(calls) for calls in ranks.values())
    numbers = range(oldest, newest + 1)
    differ = [number for number in numbers if len({calls.get(number) for calls in ranks.values()}) > 1]
    middle = differ[0] if differ else newest
    for number in range(max(oldest, middle - 2), min(newest, middle + 2) + 1):
        row = f"{number:7}  "
        for rank, calls in ranks.items():
            row += f"{calls.get(number, '-') + ' WAITS' * ((group, rank, number) in waiting):34}"
        print(row + "<- differ" * (number in differ))
