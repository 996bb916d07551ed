"""Was the work done? The stock in the service's memory, the report, the summary and the history must fit the orders."""

import csv
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

wanted: Counter[str] = Counter()
turnover: Counter[str] = Counter()
for row in csv.DictReader(Path("orders.csv").read_text().splitlines()):
    wanted[row["item"]] += int(row["count"])
    turnover[row["item"]] += int(row["count"]) * float(row["price"])
wanted -= Counter(apples=5, pears=4)

wrong: list[str] = []
try:
    with socket.create_connection(("127.0.0.1", 7070), 5) as line:
        line.sendall(b"list\n")
        found = dict(pair.split("=") for pair in line.makefile().readline().split() if "=" in pair)
    if {name: int(count) for name, count in found.items()} != dict(wanted):
        wrong.append(f"stock is {found}, should be {dict(wanted)}")
except OSError as error:
    wrong.append(f"the stock book does not answer: {error.strerror}")

for name, must in (
    ("report.txt", [f"{item} {value * 1.19:.2f}" for item, value in turnover.items()]),
    ("summary.txt", ["best: apples", "119.00", "agent asked"]),
    (".git/logs/HEAD", ["As it was found", "Report gross prices by item"]),
):
    try:
        text = Path(name).read_text()
    except OSError:
        text = ""
    wrong += [f"{name} lacks {line!r}" for line in must if line not in text]
if subprocess.run(["git", "diff", "--quiet", "HEAD"], stderr=subprocess.DEVNULL).returncode:
    wrong.append("not all changes are committed")

print("\n".join(wrong) or "all is well")
sys.exit(bool(wrong))
