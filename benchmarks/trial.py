"""The one command, as a new user gives it: where its time goes, and how much memory it takes.

python -m benchmarks.trial --weights resnet50.safetensors --photographs cats_dogs [--threads 2]

`--photographs` is a folder with `train/cat`, `train/dog`, `test/cat` and `test/dog`. The command is the one of
docs/results/product.md. `python -m benchmarks.trial --start` measures how long `import secateur` and `secateur --help`
take.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

NETWORK = """
from reproduction.networks import network


def early_strides():
    return network("resnet50", early_strides=True)[0]
"""
# Which line on standard error begins which part.
PARTS = {
    "building the model": "model, photographs",
    "pruning by": "analysis",
    "measuring accuracy": "accuracy and reasons",
    "scoring units": "scores, plan, removal",
    "repair: recording": "repair",
    "writing": "model and ONNX",
    "timing": "timing",
    "explaining": "report",
}


#: Seconds on the wall and of CPU time.
Moment = tuple[float, float]


def watched(command: Sequence[str | Path], threads: int) -> tuple[list[tuple[Moment, str]], Moment]:
    """Run a command: when it said what on standard error, and how long it took. Its output is passed on.

    Each line is printed with the seconds, the CPU time and the peak of memory until then."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    begin, lines = time.perf_counter(), list[tuple[Moment, str]]()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)

    def now() -> Moment:
        spent = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[11:13]
        return time.perf_counter() - begin, sum(map(int, spent)) / os.sysconf("SC_CLK_TCK")

    def peak() -> float:
        """The most memory so far, in GiB."""
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
        return next((int(row.split()[1]) / 2**20 for row in status.splitlines() if row.startswith("VmHWM")), 0.0)

    def listen() -> None:
        for line in process.stderr or ():
            lines.append((now(), line.rstrip()))
            print("{:7.1f} {:7.1f} {:6.2f}  {}".format(*lines[-1][0], peak(), lines[-1][1]), flush=True)

    listener = threading.Thread(target=listen)
    listener.start()
    output = process.stdout.read() if process.stdout else ""
    listener.join()
    if process.wait():
        raise SystemExit(process.returncode)
    print(output)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return lines, (time.perf_counter() - begin, used.ru_utime + used.ru_stime)


def parts(lines: Sequence[tuple[Moment, str]], end: Moment) -> dict[str, Moment]:
    """What each part took, from the lines that begin them."""
    begins = [((0.0, 0.0), "start of Python")]
    begins += [(at, name) for at, line in lines for mark, name in PARTS.items() if line.startswith(mark)]
    # Accuracy is measured after the last layer, and says so only when it has gone on for a while.
    ends = [(at, PARTS["measuring accuracy"]) for at, line in lines if re.search(r"^repair: .* layer (\d+)/\1\b", line)]
    begins = sorted(begins + ends)
    found: dict[str, Moment] = {}
    for (at, name), (until, _) in zip(begins, [*begins[1:], (end, "")], strict=True):
        wall, cpu = found.get(name, (0.0, 0.0))
        found[name] = wall + until[0] - at[0], cpu + until[1] - at[1]
    return found


def trial(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        network = Path(folder, "resnet.py")
        network.write_text(NETWORK, encoding="utf-8")
        photographs = options.photographs
        lines, end = watched(
            [
                sys.executable, "-m", "secateur", "prune", f"{network}:early_strides", "--weights", options.weights,
                "--images", photographs / "train", "--test", photographs / "test",
                "--outputs", "cat=281-285", "--outputs", "dog=151-268",
                "--keep-macs", str(options.keep_macs), "--device", options.device, "--onnx",
                "--out", Path(folder, "small"), *options.more,
            ],
            options.threads,
        )  # fmt: skip
    print("| part | seconds | CPU time |\n|---|---|---|")
    for name, (wall, cpu) in {**parts(lines, end), f"all, {options.threads} threads": end}.items():
        print(f"| {name} | {wall:.1f} | {cpu:.1f} |")
    # A child's peak is at least its parent's, but this process is small.
    print(f"\npeak {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20:.2f} GiB")


def start(repeat: int) -> None:
    """Seconds of `import torch`, `import secateur` and `secateur --help`, in turn, medians."""
    commands = {
        "import torch": ["-c", "import torch"],
        "import secateur": ["-c", "import secateur"],
        "import secateur, and its first use": ["-c", "import secateur; secateur.prune"],
        "secateur --help": ["-m", "secateur", "--help"],
    }
    found: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(repeat + 1):
        for name, rest in commands.items():
            begin = time.perf_counter()
            subprocess.run([sys.executable, *rest], check=True, stdout=subprocess.DEVNULL)
            if turn:  # the first reads files from the disk
                found[name].append(time.perf_counter() - begin)
    middle = {name: statistics.median(times) for name, times in found.items()}
    for name, seconds in middle.items():
        print(f"{name}: {seconds:.2f} s, {seconds / middle['import torch']:.2f}x import torch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--photographs", type=Path)
    parser.add_argument("--keep-macs", type=float, default=0.5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--start", action="store_true", help="time the imports instead")
    parser.add_argument("--repeat", type=int, default=9, help="of --start")
    parser.add_argument("more", nargs="*", help="further options of the command, after --")
    options = parser.parse_args()
    if options.start:
        start(options.repeat)
    elif options.weights is None or options.photographs is None:
        parser.error("--weights and --photographs, or --start")
    else:
        trial(options)


if __name__ == "__main__":
    main()
