"""Reads what a run has logged with the trackers' own programs, and compares it with the run's JSON lines.

    cargo run -p sconce-cli -- launch --num_processes 2 --example finetune_llama -- --steps 20 \
        --report_to jsonl,tensorboard,mlflow,wandb --logging_dir target/tracked
    python xtask/peers/check_trackers.py target/tracked

It needs the packages tensorboard, mlflow and wandb, and trackio where the run has a store of Trackio's (a build with the feature
sconce-core/trackio). `wandb sync` uploads to a server that this program is itself: no account, and nothing leaves the machine.
"""

import argparse
import gzip
import http.server
import json
import math
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile
import threading


def jsonl(folder):
    """Returns the project, and values by name: a list of (step, value)."""
    [path] = folder.glob("*/metrics.jsonl")
    values = {}
    for line in path.read_text().splitlines():
        line = json.loads(line)
        if "step" in line:
            for name in line.keys() - {"step", "wall_time", "text"}:
                values.setdefault(name, []).append((line["step"], float(line[name])))
    return path.parent.name, values


def single(value):
    """Returns a value as event files have it, in 32 bits."""
    return struct.unpack("f", struct.pack("f", value))[0]


def compare(tracker, version, found, expected):
    if found.keys() != expected.keys():
        raise SystemExit(f"{tracker}: has {sorted(found)}, and not {sorted(expected)}")
    for name, values in expected.items():
        if found[name] != values:
            raise SystemExit(f"{tracker}: {name} is {found[name]}, and not {values}")
    print(f"{tracker} {version}: {len(found)} values of {max(map(len, found.values()))} steps, all as they were logged")


def check_tensorboard(folder, project, expected):
    import tensorboard
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / project), size_guidance={"scalars": 0})
    events.Reload()
    found = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    expected = {name: [(step, single(value)) for step, value in values] for name, values in expected.items()}
    if events.Tags()["tensors"] != ["hparams/text_summary"]:
        raise SystemExit(f"tensorboard: no table of hyper-parameters among {events.Tags()}")
    compare("tensorboard", tensorboard.__version__, found, expected)


def check_mlflow(folder, project, expected):
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=str(folder / "mlruns"))
    experiment = client.get_experiment_by_name(project)
    [run] = client.search_runs([experiment.experiment_id])
    if run.info.status != "FINISHED" or not run.data.params:
        raise SystemExit(f"mlflow: the run is {run.info.status} and has {len(run.data.params)} hyper-parameters")
    found = {}
    for name in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, name)
        found[name] = sorted((metric.step, metric.value) for metric in history)
    compare("mlflow", mlflow.__version__, found, expected)


class WandbServer(http.server.BaseHTTPRequestHandler):
    """As much of the service of Weights & Biases as an upload needs. `server.seen` takes down what is uploaded."""

    def log_message(self, *arguments):
        pass

    def answer(self, body):
        body = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def do_GET(self):
        self.answer({})

    def do_PUT(self):
        self.body()
        self.answer({})

    def do_POST(self):
        body, seen = self.body(), self.server.seen
        if self.path.endswith("/file_stream"):
            body = json.loads(body)
            for name, part in body.get("files", {}).items():
                for number, line in enumerate(part["content"]):
                    seen.setdefault(name, {})[part["offset"] + number] = json.loads(line)
            seen["exit"] = body.get("exitcode", seen.get("exit"))
            self.answer({})
        elif self.path.endswith("/graphql"):
            self.answer({"data": self.answer_to(json.loads(body))})
        else:
            self.answer({})

    def answer_to(self, request):
        query, variables = request["query"].lower(), request.get("variables") or {}
        if "upsertbucket" in query:
            self.server.seen["config"] = json.loads(variables["config"])
            project = {"id": "p", "name": variables["project"], "entity": {"id": "e", "name": "me"}}
            run = {"id": "r", "name": variables["name"], "displayName": "run", "config": "{}", "project": project}
            return {"upsertBucket": {"bucket": run, "inserted": True}}
        if "createrunfiles" in query:
            address = f"http://127.0.0.1:{self.server.server_port}/upload/"
            files = [{"name": name, "uploadUrl": address + name} for name in variables["files"]]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        return {"serverInfo": {"features": []}}


def check_wandb(folder, project, expected):
    import wandb

    [run] = (folder / "wandb").glob("offline-run-*")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), WandbServer)
    server.seen = {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = os.environ | {
        "WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}",
        "WANDB_API_KEY": "0" * 40,
        "WANDB_ERROR_REPORTING": "false",
    }
    with tempfile.TemporaryDirectory() as place:
        # It marks what it has uploaded.
        copy = shutil.copytree(run, pathlib.Path(place) / run.name)
        command = [sys.executable, "-m", "wandb", "sync", str(copy)]
        sync = subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True, timeout=120)
    seen = server.seen
    server.shutdown()
    if sync.returncode != 0 or seen.get("exit") != 0:
        raise SystemExit(f"wandb sync ended with {sync.returncode}, the run with {seen.get('exit')}:\n{sync.stderr}")
    if not seen["config"].keys() - {"_wandb"}:
        raise SystemExit("wandb: the run has no configuration")
    found = {}
    for _, row in sorted(seen["wandb-history.jsonl"].items()):
        for name in row.keys() - {"_step", "_timestamp", "_runtime"}:
            found.setdefault(name, []).append((row["_step"], float(row[name])))
    compare("wandb", wandb.__version__, found, expected)


def check_trackio(folder, project, expected):
    os.environ["TRACKIO_DIR"] = str(folder / "trackio")
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    [run] = trackio.Api().runs(project)
    if not run.config:
        raise SystemExit("trackio: the run has no configuration")
    found = {}
    for row in SQLiteStorage.get_logs(project, run.name, run_id=run.id):
        for name in row.keys() & expected.keys():
            found.setdefault(name, []).append((row["step"], float(row[name])))
    compare("trackio", trackio.__version__, found, expected)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    folder = parser.parse_args().folder.resolve()
    project, expected = jsonl(folder)
    if not expected or not all(math.isfinite(value) for values in expected.values() for _, value in values):
        raise SystemExit(f"{folder}: no finite values to compare with")
    checks = {
        folder / project: check_tensorboard,
        folder / "mlruns": check_mlflow,
        folder / "wandb": check_wandb,
        folder / "trackio": check_trackio,
    }
    for place, check in checks.items():
        if place.exists():
            check(folder, project, expected)
        else:
            print(f"{place.name}: not there, not checked")


if __name__ == "__main__":
    main()
