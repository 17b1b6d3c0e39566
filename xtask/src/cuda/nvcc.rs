//! A stand-in for `nvcc`: this very program, when it is called by that name.
//!
//! It answers what the build script of candle's kernels asks, in that crate's folder. PTX files come out empty, unless the
//! real compiler lies beside it. The library of kernels that are linked in, not loaded (of quantised models and mixtures of
//! experts), gets functions that end the program with their name.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use xshell::{Shell, cmd};

use super::toolkit::COMPILER;

/// Where candle's kernels declare the functions that they link.
const DECLARATIONS: &str = "src/ffi.rs";

/// Says whether a program's own name, its first word, is `nvcc`.
pub(crate) fn is_called(name: Option<&OsString>) -> bool {
    name.is_some_and(|name| Path::new(name).file_name().is_some_and(|name| name == "nvcc"))
}

/// Does what `nvcc` is asked to do; compiles only what the real one compiles.
///
/// # Errors
/// When asked for something that no build script is known to ask for, or a file cannot be written.
pub(crate) fn run(words: &[OsString]) -> Result<()> {
    let this = std::env::current_exe().context("finding this program's own file")?;
    let compiler = this.with_file_name(COMPILER);
    match Request::of(words)? {
        Request::Version | Request::Ptx(_) if compiler.exists() => {
            let shell = Shell::new()?;
            cmd!(shell, "{compiler} {words...}").quiet().run()?;
        }
        Request::Version => {
            println!("Cuda compilation tools, release 13.0, V13.0.88 (a stand-in that compiles nothing)");
        }
        Request::Ptx(file) => fs::write(&file, "// no kernels: written by a stand-in for nvcc\n")
            .with_context(|| format!("writing {}", file.display()))?,
        Request::Object(file) => fs::write(&file, "").with_context(|| format!("writing {}", file.display()))?,
        Request::Library(file) => write_library(&file)?,
    }
    Ok(())
}

/// What `nvcc` is asked to make, and the file to put it in.
#[derive(Debug, PartialEq, Eq)]
enum Request {
    Version,
    Ptx(PathBuf),
    Object(PathBuf),
    Library(PathBuf),
}

impl Request {
    fn of(words: &[OsString]) -> Result<Self> {
        let has = |flag: &str| words.iter().any(|word| word == flag);
        let after = |flag: &str| {
            let at = words.iter().position(|word| word == flag)?;
            words.get(at + 1).map(PathBuf::from)
        };
        if has("--version") {
            return Ok(Self::Version);
        }
        if has("--ptx") {
            let mut sources = words.iter().map(Path::new);
            let source = sources.find(|word| word.extension().is_some_and(|extension| extension == "cu"));
            let name = source
                .and_then(Path::file_stem)
                .context("--ptx without a source file")?;
            let folder = after("--output-directory").unwrap_or_default();
            return Ok(Self::Ptx(folder.join(name).with_extension("ptx")));
        }
        match after("-o") {
            Some(file) if has("--lib") => Ok(Self::Library(file)),
            Some(file) if has("-c") => Ok(Self::Object(file)),
            _ => bail!("a stand-in for nvcc cannot do this: {words:?}"),
        }
    }
}

fn write_library(file: &Path) -> Result<()> {
    let declarations = fs::read_to_string(DECLARATIONS).with_context(|| format!("reading {DECLARATIONS}"))?;
    let names = functions(&declarations);
    ensure!(!names.is_empty(), "{DECLARATIONS} declares no functions");
    let mut source = String::from("#include <stdio.h>\n#include <stdlib.h>\n");
    for name in names {
        source += &format!(
            "void {name}(void) {{ fputs(\"the kernel {name} was left out of this build\\n\", stderr); abort(); }}\n"
        );
    }
    let (shell, object) = (Shell::new()?, file.with_extension("o"));
    cmd!(shell, "gcc -x c - -O1 -fPIC -c -o {object}")
        .stdin(source)
        .quiet()
        .run()?;
    shell.remove_path(file)?;
    Ok(cmd!(shell, "ar crs {file} {object}").quiet().run()?)
}

/// The names after `pub fn`, each once.
fn functions(declarations: &str) -> Vec<&str> {
    let after = declarations.split("pub fn ").skip(1);
    let mut names: Vec<_> = after.filter_map(|text| text.split('(').next()).map(str::trim).collect();
    names.sort_unstable();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(words: &str) -> Result<Request> {
        Request::of(&Vec::from_iter(words.split(' ').map(OsString::from)))
    }

    #[test]
    fn what_build_scripts_ask_is_understood() {
        assert_eq!(request("--version").unwrap(), Request::Version);
        let ptx = "-gencode=x --ptx --default-stream per-thread --output-directory out -O3 src/cast.cu";
        assert_eq!(request(ptx).unwrap(), Request::Ptx("out/cast.ptx".into()));
        let object = "-gencode=x -c -o out/a.o --default-stream per-thread src/moe/a.cu";
        assert_eq!(request(object).unwrap(), Request::Object("out/a.o".into()));
        assert_eq!(
            request("--lib -o libmoe.a a.o b.o").unwrap(),
            Request::Library("libmoe.a".into())
        );
    }

    #[test]
    fn what_nobody_asks_is_refused() {
        let message = request("--cubin a.cu").unwrap_err().to_string();
        assert!(message.contains("--cubin"), "{message}");
    }

    #[test]
    fn linked_functions_are_found_once() {
        let declarations = "extern \"C\" {\n pub fn b(x: i32);\n pub fn a(\n x: i32,\n );\n pub fn b(x: i32);\n}";
        assert_eq!(functions(declarations), ["a", "b"]);
    }

    #[test]
    fn only_a_program_called_nvcc_is_one() {
        assert!(is_called(Some(&"some/bin/nvcc".into())));
        assert!(!is_called(Some(&"target/debug/xtask".into())) && !is_called(None));
    }
}
