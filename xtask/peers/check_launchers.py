"""Checks that launchers and programs of both worlds go together, and says what each run came to.

    python xtask/peers/check_launchers.py target/debug

1. A Python script for `accelerate launch` (train_gloo.py) trains under `sconce launch` on two ranks, to the losses that it
   has under torchrun; its errors reach the launcher's report; it restarts.
2. The same over two launchers of one host.
3. A Sconce program trains under torchrun on two ranks, and under mpirun (where there is one), to the losses that it has
   under `sconce launch`.

Needs torch (with torchrun beside this interpreter) and a folder with `sconce` and `examples/finetune_llama`. Open MPI too
for the last part; a program without the feature `mpi` meets over shared memory under mpirun.
"""

import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
SCRIPT = str(HERE / "train_gloo.py")


def run(words: list[str], expected: int = 0, **variables: str) -> str:
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == expected, f"{' '.join(words)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def losses(text: str) -> list[str]:
    found = re.findall(r" loss (\S+)", text)
    assert len(found) > 1, text
    return found


def main() -> None:
    target = pathlib.Path(sys.argv[1]).resolve()
    sconce = str(target / "sconce")
    torchrun = str(pathlib.Path(sys.executable).parent / "torchrun")
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = f"{folder}/ours", f"{folder}/theirs"
        launch = [sconce, "launch", "--cpu", "-n", "2"]
        print(run([*launch, SCRIPT, "--losses", ours]).strip())
        run([torchrun, "--nproc_per_node", "2", SCRIPT, "--losses", theirs])
        assert pathlib.Path(ours).read_text() == pathlib.Path(theirs).read_text()
        print("a Python script under sconce launch: the losses of torchrun, to the last bit")

        text = run([*launch, SCRIPT, "--fail", "1"], expected=1)
        assert "ValueError: no data for this rank" in text.split("error: rank 1 (pid ")[1], text
        text = run([*launch, "--max_restarts", "1", SCRIPT, "--fail", "1"])
        assert "restart 1 of 1" in text and "trained on 2 ranks" in text, text
        print("its error is told by the launcher, and it restarts")

        pathlib.Path(ours).unlink()
        port = free_port()
        words = [*launch, "--num_machines", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", port]
        other = subprocess.Popen(
            [*words, "--machine_rank", "1", SCRIPT, "--losses", ours],
            env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        )
        run([*words, "--machine_rank", "0", SCRIPT, "--losses", ours])
        assert other.wait(60) == 0
        assert pathlib.Path(ours).read_text() == pathlib.Path(theirs).read_text()
        print("the same over two launchers")

    program = [str(target / "examples" / "finetune_llama"), "--steps", "6", "--lr", "1e-2"]
    expected = losses(run([*launch, *program]))
    found = losses(run([torchrun, "--nproc_per_node", "2", "--no_python", *program], ACCELERATE_USE_CPU="1"))
    assert found == expected, (found, expected)
    print("a Sconce program under torchrun: the losses of sconce launch")
    if shutil.which("mpirun"):
        as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        found = losses(run(["mpirun", "-n", "2", "--oversubscribe", *program], **as_root))
        assert found == expected, (found, expected)
        print("a Sconce program under mpirun: the losses of sconce launch")
    else:
        print("no mpirun in PATH: that part is skipped")


if __name__ == "__main__":
    main()
