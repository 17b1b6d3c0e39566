//! `cargo xtask gpu-check`: a folder to carry to a machine with a GPU, where there is neither cargo nor a network.
//!
//! Kernels are compiled by the real `nvcc`, from NVIDIA's Python wheels; those of quantised models and of mixtures of
//! experts, most of the work, are left out. Programs look CUDA up when they first use it, so they also start here.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use xshell::{Shell, cmd};

use super::toolkit::{TARGET, Toolkit};

/// The folder that all of this is built in, in the workspace's target folder.
const FOLDER: &str = "target/gpu-check";

/// The programs that are carried: tests, and one that measures.
const PROGRAMS: [(&str, &str); 6] = [
    ("--test", "conformance"),
    ("--test", "device"),
    ("--test", "unified_memory"),
    ("--test", "on_cuda"),
    ("--test", "gpu_parity"),
    ("--bench", "gpu_throughput"),
];

/// What the last is compared with, where there is PyTorch.
const PEER: &str = include_str!("../../peers/gpu_throughput.py");

/// As for tests, but dependencies need not be fast, and what is carried should be small.
const PROFILE: [&str; 4] = [
    "--config",
    "profile.dev.package.\"*\".opt-level=1",
    "--config",
    "profile.dev.strip=true",
];

/// What is run there. NCCL's wheel lacks the name by which the bindings look for it.
const SCRIPT: &str = r#"#!/usr/bin/env bash
# Runs on a machine with a GPU; made by `cargo xtask gpu-check`. Writes a log of each check into the folder $OUT, or here.
# Arguments: which checks to run, of device, memory, parity, 1_rank, 2_ranks and 4_ranks; without any: all of these.
# Besides, throughput measures training, beside PyTorch's where python3 has it.
# CUDA's libraries and NCCL are those of PyTorch's wheels where python3 has them, else those in LD_LIBRARY_PATH.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
logs=${OUT:-$PWD}
programs=$(mktemp -d)
trap 'rm -rf "$programs"' EXIT
for packed in *.gz; do
    program=$programs/${packed%.gz}
    gunzip --stdout "$packed" >"$program" && chmod +x "$program" || exit
done
if wheels=$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])' 2>/dev/null); then
    ln -s "$wheels/nccl/lib/libnccl.so.2" "$programs/libnccl.so"
    for folder in "$programs" "$wheels"/*/lib; do
        LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder
    done
    export LD_LIBRARY_PATH
fi
export RUST_BACKTRACE=1 NCCL_DEBUG=${NCCL_DEBUG:-WARN}
nvidia-smi --query-gpu=name,driver_version,memory.total,compute_cap --format=csv
failed=0
check() {
    local name=$1 seconds=$2 before=$SECONDS
    shift 2
    if timeout --kill-after=10 "$seconds" "$@" >"$logs/$name.log" 2>&1; then
        echo "passed $name ($((SECONDS - before)) s): $(grep '^test result' "$logs/$name.log" | tail -n 1)"
    else
        failed=1
        echo "FAILED $name ($((SECONDS - before)) s), the end of its log:"
        tail -n 40 "$logs/$name.log"
    fi
}
for what in "${@:-device memory parity 1_rank 2_ranks 4_ranks}"; do
    for name in $what; do
        case $name in
        device) check device 60 "$programs/device" --nocapture ;;
        # The engine's state on the device, its kernels and its copies, bit for bit.
        memory)
            check unified_memory 60 "$programs/unified_memory" --nocapture
            check memory 180 "$programs/on_cuda" --nocapture
            ;;
        # A small Llama under every strategy, against what PyTorch recorded.
        parity) check parity 240 "$programs/gpu_parity" --nocapture ;;
        throughput)
            check throughput 200 "$programs/gpu_throughput"
            check throughput_sharded 200 "$programs/gpu_throughput" --shard
            if python3 -c 'import torch' 2>/dev/null; then
                check throughput_pytorch 200 python3 gpu_throughput.py
                check throughput_pytorch_offload 200 python3 gpu_throughput.py --offload
            fi
            tail -n 1 "$logs"/throughput*.log
            ;;
        # All of the suite, on so many ranks that have one GPU in common.
        *) check "$name" 280 "$programs/conformance" --exact "over_nccl::over_nccl_on_$name" --nocapture ;;
        esac
    done
done
exit $failed
"#;

/// Builds the programs and puts them, with a script that runs them, into one folder.
///
/// # Errors
/// Without gcc, python3 and pip, or NVIDIA's wheels; when something does not build.
pub(crate) fn run(shell: &Shell, root: &Path) -> Result<()> {
    let folder = root.join(FOLDER);
    let toolkit = Toolkit::lay_compiler(shell, &folder.join("toolkit"))?;
    try_without_gpu(shell, &toolkit, &folder)?;
    let programs = PROGRAMS.iter().flat_map(|(kind, program)| [kind, program]);
    let build = cmd!(
        shell,
        "cargo test {PROFILE...} --workspace --features cuda,nccl --target {TARGET} --target-dir {folder} {programs...}
         --no-run --message-format json-render-diagnostics"
    );
    let messages = toolkit.serve(build).quiet().read()?;
    let carried = folder.join("carry");
    shell.remove_path(&carried)?;
    shell.create_dir(&carried)?;
    for (_, program) in PROGRAMS {
        let built = executable(&messages, program).with_context(|| format!("cargo built no program {program}"))?;
        let copy = carried.join(program);
        shell.copy_file(built, &copy)?;
        if program == "device" {
            let started = cmd!(shell, "{copy}").quiet().ignore_stdout().run();
            ensure!(
                started.is_ok(),
                "the program for GPUs does not pass its tests on this machine"
            );
        }
        // Kernels are text, to a fifth of it.
        cmd!(shell, "gzip --force {copy}").quiet().run()?;
    }
    shell.write_file(carried.join("gpu_throughput.py"), PEER)?;
    let script = carried.join("run.sh");
    shell.write_file(&script, SCRIPT)?;
    cmd!(shell, "chmod +x {script}").quiet().run()?;
    println!("gpu-check: run {FOLDER}/carry/run.sh on the machine with the GPU");
    Ok(())
}

/// Builds what users start, with the features on and real kernels, and sees that it works on a machine without a GPU: it
/// starts, says what is missing, trains on the CPU, and refuses a GPU with a message. With a GPU it only builds.
fn try_without_gpu(shell: &Shell, toolkit: &Toolkit, folder: &Path) -> Result<()> {
    let build = cmd!(
        shell,
        "cargo build {PROFILE...} --workspace --features cuda,nccl --target {TARGET} --target-dir {folder}
         --bin sconce --example finetune_llama"
    );
    toolkit.serve(build).quiet().run()?;
    let built = folder.join(TARGET).join("debug");
    let (sconce, train) = (built.join("sconce"), built.join("examples/finetune_llama"));
    let env = cmd!(shell, "{sconce} env").quiet().read()?;
    println!("{env}");
    if !env.contains("libcuda") {
        return Ok(());
    }
    let launch = || cmd!(shell, "{sconce} launch --num_processes 2 {train} --steps 2");
    launch().quiet().run().context("training on the CPU")?;
    let asked = launch().env("SCONCE_DEVICE", "cuda").quiet().ignore_status().output()?;
    let told = String::from_utf8_lossy(&asked.stderr);
    println!("{told}");
    ensure!(
        !asked.status.success() && told.contains("libcuda"),
        "a GPU was asked for where there is none, and the message does not say what is missing"
    );
    Ok(())
}

/// Finds the executable of a test in cargo's messages.
fn executable<'m>(messages: &'m str, test: &str) -> Option<&'m str> {
    let name = format!("\"name\":\"{test}\"");
    let mut of_test = messages.lines().filter(|line| line.contains(&name));
    of_test.find_map(|line| line.split_once("\"executable\":\"")?.1.split('"').next())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tests_executable_is_found_among_messages() {
        let messages = "{\"target\":{\"name\":\"other\"},\"executable\":\"a\"}\n\
                        {\"target\":{\"name\":\"device\"},\"executable\":null}\n\
                        {\"target\":{\"name\":\"device\"},\"executable\":\"b/device-1\"}\n";
        assert_eq!(executable(messages, "device"), Some("b/device-1"));
        assert_eq!(executable(messages, "conformance"), None);
    }
}
