//! A folder that serves build scripts as a CUDA toolkit.
//!
//! candle's kernels want `nvcc`; cudarc's build script tells the linker of libraries. The crates are built so that CUDA is
//! looked for when it is first used, not when the program starts: nothing refers to these libraries then, and empty ones
//! satisfy the linker. That is a compiler flag for the program's own crates; cudarc's build script would refuse it, and
//! cargo keeps it from build scripts only if a target is named, even the host's own.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use xshell::{Cmd, Shell, cmd};

/// The only platform that this is for.
pub(super) const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Makes cudarc load CUDA when it is first used.
const LOAD_AT_RUN_TIME: &str = "--cfg feature=\"dynamic-loading\"";

/// What cudarc and candle's kernels link to, each with the number in its file's name: of CUDA 13, and of NCCL 2.
const LIBRARIES: [(&str, u32); 7] = [
    ("cuda", 1),
    ("nccl", 2),
    ("nvrtc", 13),
    ("curand", 10),
    ("cublas", 13),
    ("cublasLt", 13),
    ("cudart", 13),
];

/// The version of CUDA that cudarc's bindings are chosen for, as it writes it.
const VERSION: &str = "13000";

/// Compute capability 9.0: H100 and H200.
const COMPUTE_CAPABILITY: &str = "90";

/// `nvcc` and what it needs. PTX of a newer one would be refused by drivers of CUDA 13.0.
const WHEELS: [&str; 5] = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-cuda-runtime==13.0.96",
];

/// The name of the real compiler beside the stand-in.
pub(super) const COMPILER: &str = "nvcc.real";

/// A toolkit that was laid into a folder.
#[derive(Debug)]
pub(super) struct Toolkit {
    home: PathBuf,
}

impl Toolkit {
    /// Checks that this machine has what the stand-in needs.
    ///
    /// # Errors
    /// On another platform, or without gcc.
    pub(super) fn can_be_laid(shell: &Shell) -> Result<()> {
        if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
            bail!("the features cuda and nccl can be checked on x86-64 Linux only");
        }
        if cmd!(shell, "gcc --version")
            .quiet()
            .ignore_stdout()
            .ignore_stderr()
            .run()
            .is_err()
        {
            bail!("there is no gcc in PATH, which makes the libraries that the linker asks for; install gcc");
        }
        Ok(())
    }

    /// Lays the stand-in: an `nvcc` that writes empty kernels, and empty libraries.
    ///
    /// # Errors
    /// On another platform, or without gcc.
    pub(super) fn lay_stand_in(shell: &Shell, home: &Path) -> Result<Self> {
        Self::can_be_laid(shell)?;
        Self::complete(shell, home)
    }

    /// Lays a compiler from Python wheels, which the stand-in calls for kernels that models of floating-point numbers need.
    ///
    /// # Errors
    /// As [`Toolkit::lay_stand_in`]; without python3 and pip, or when pip cannot get the wheels.
    pub(super) fn lay_compiler(shell: &Shell, home: &Path) -> Result<Self> {
        Self::can_be_laid(shell)?;
        let compiler = home.join("bin").join(COMPILER);
        if !compiler.exists() {
            let wheels = home.with_extension("wheels");
            let options = "--quiet --disable-pip-version-check --no-deps --no-compile --only-binary=:all:".split(' ');
            let install = cmd!(
                shell,
                "python3 -m pip install {options...} --target {wheels} {WHEELS...}"
            );
            let installed = install.quiet().run();
            installed.context("getting NVIDIA's wheels; python3 with pip and a package index are needed")?;
            shell.remove_path(home)?;
            let unpacked = wheels.join("nvidia/cu13");
            std::fs::rename(&unpacked, home).with_context(|| format!("moving {}", unpacked.display()))?;
            std::fs::rename(home.join("bin/nvcc"), &compiler).context("setting nvcc aside")?;
            shell.remove_path(wheels)?;
        }
        Self::complete(shell, home)
    }

    /// Adds the stand-in for `nvcc`, and empty libraries.
    fn complete(shell: &Shell, home: &Path) -> Result<Self> {
        let (programs, libraries) = (home.join("bin"), home.join("lib/stubs"));
        for folder in [&programs, &libraries, &home.join("include")] {
            shell.create_dir(folder)?;
        }
        let nvcc = programs.join("nvcc");
        // Never written in place: an older one may be running.
        shell.remove_path(&nvcc)?;
        // Not by its name: cargo may have replaced the file since this program was started.
        shell.copy_file("/proc/self/exe", &nvcc)?;
        for (name, number) in LIBRARIES {
            let (file, soname) = (
                libraries.join(format!("lib{name}.so")),
                format!("-Wl,-soname,lib{name}.so.{number}"),
            );
            let source = format!("void {name}_is_not_here(void) {{}}\n");
            cmd!(shell, "gcc -x c - -shared -fPIC {soname} -o {file}")
                .stdin(source)
                .quiet()
                .run()?;
        }
        Ok(Self { home: home.to_owned() })
    }

    /// Makes a cargo command, which must name [`TARGET`], build with this toolkit.
    pub(super) fn serve<'s>(&self, command: Cmd<'s>) -> Cmd<'s> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        command
            .env("CUDA_HOME", &self.home)
            .env("CUDA_PATH", &self.home)
            .env("NVCC", self.home.join("bin/nvcc"))
            .env("CUDA_COMPUTE_CAP", COMPUTE_CAPABILITY)
            .env("CUDARC_CUDA_VERSION", VERSION)
            .env("CUDAFORGE_THREADS", threads.to_string())
            // Would take the place of the next, and reach build scripts.
            .env_remove("RUSTFLAGS")
            .env("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUSTFLAGS", LOAD_AT_RUN_TIME)
    }
}
