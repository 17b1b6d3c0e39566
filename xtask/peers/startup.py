"""Measures how long `sconce` takes until it does something, and its memory, beside `accelerate` where that is named.

    cargo xtask bench startup [--accelerate PATH] [--pairs N]

Prints a JSON object a line. Times are medians in milliseconds, `wall_ms` of the clock and `cpu_ms` of all processes together;
what is compared runs in turn, so that both meet the same noise. A launch is of two processes that end at once, and `added_ms` is
the median of its differences to the same two started by hand. `peak_rss_mib` is the greatest of the command's processes; it
cannot be seen below that of this interpreter, which is in the line `interpreter`.
"""

import argparse
import json
import os
import resource
import statistics
import time


def run(commands, **environment):
    """Starts commands together and waits for all: wall and CPU time in ms, the greatest resident memory in MiB."""
    to_nowhere = [(os.POSIX_SPAWN_OPEN, descriptor, os.devnull, os.O_RDWR, 0) for descriptor in (0, 1, 2)]
    start = time.perf_counter()
    pids = [os.posix_spawnp(words[0], words, os.environ | environment, file_actions=to_nowhere) for words in commands]
    cpu, peak = 0.0, 0
    for words, pid in zip(commands, pids):
        _, status, used = os.wait4(pid, 0)
        if status != 0:
            raise SystemExit(f"{' '.join(words)}: ended with status {status}")
        cpu += used.ru_utime + used.ru_stime
        peak = max(peak, used.ru_maxrss)
    return (time.perf_counter() - start) * 1e3, cpu * 1e3, peak / 1024


def tell(what, runs, **more):
    wall, cpu, peak = (statistics.median(values) for values in zip(*runs))
    line = {"what": what, "wall_ms": wall, "least_wall_ms": min(run[0] for run in runs), "cpu_ms": cpu, "peak_rss_mib": peak}
    line |= {"runs": len(runs), **more}
    print(json.dumps({key: round(value, 2) if isinstance(value, float) else value for key, value in line.items()}), flush=True)


def pairs(what, launched, by_hand, count):
    """Measures a launcher beside the processes that it starts."""
    launches, direct = [], []
    for _ in range(count):
        launches.append(run([launched]))
        direct.append(run([by_hand, by_hand]))
    added = [one[0] - other[0] for one, other in zip(launches, direct)]
    tell(f"{what}, by hand", direct)
    tell(what, launches, added_ms=statistics.median(added))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sconce", help="the program to measure, built in release mode")
    parser.add_argument("--accelerate", help="Accelerate's program, to compare with")
    parser.add_argument("--pairs", type=int, default=31, help="runs of each command of Sconce; a tenth of Accelerate's")
    arguments = parser.parse_args()
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"what": "interpreter", "peak_rss_mib": round(own, 2)}), flush=True)
    few = max(3, arguments.pairs // 10)
    sconce, trivial = arguments.sconce, "true"
    tell("sconce --help", [run([[sconce, "--help"]]) for _ in range(arguments.pairs)])
    pairs("sconce launch", [sconce, "launch", "--num_processes", "2", trivial], [trivial], arguments.pairs)
    if accelerate := arguments.accelerate:
        tell("accelerate --help", [run([[accelerate, "--help"]]) for _ in range(few)])
        launched = [accelerate, "launch", "--cpu", "--num_processes", "2", "--no_python", trivial]
        pairs("accelerate launch", launched, [trivial], few)


if __name__ == "__main__":
    main()
