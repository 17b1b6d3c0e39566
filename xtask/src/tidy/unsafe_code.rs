//! `unsafe` in few, named modules, each with its proof.
//!
//! That every block has a proof is clippy's matter (`undocumented_unsafe_blocks`); where blocks may be is this list's.

use super::finding::Finding;
use super::repository::{Repository, TextFile};
use super::rust_code::code_only;

/// The modules with unsafe code, and why it has to be there.
const MODULES: &[(&str, &str)] = &[
    ("crates/cli/src/launch/parent_death.rs", "code between fork and exec"),
    (
        "crates/collectives/benches/mpi.rs",
        "MPI's own all-reduce, to compare with",
    ),
    (
        "crates/collectives/src/buffer.rs",
        "memory in a shared mapping or on a GPU, as slices",
    ),
    ("crates/collectives/src/copy.rs", "stores that bypass the cache"),
    (
        "crates/collectives/src/cuda.rs",
        "CUDA's libraries are loaded to see whether they are there",
    ),
    (
        "crates/collectives/src/cuda/gpu.rs",
        "the driver's calls that take a device's handle",
    ),
    (
        "crates/collectives/src/cuda/unified.rs",
        "memory that host and GPU reach at the same addresses",
    ),
    (
        "crates/collectives/tests/unified_memory.rs",
        "work on lent memory, put into streams",
    ),
    (
        "crates/collectives/src/mpi/library.rs",
        "the calls of MPI's C interface",
    ),
    (
        "crates/collectives/src/mpi/reducing.rs",
        "reductions of what came over MPI",
    ),
    (
        "crates/collectives/src/nccl/library.rs",
        "the calls of NCCL's C interface",
    ),
    (
        "crates/collectives/src/private.rs",
        "a caller's memory as an address range",
    ),
    (
        "crates/collectives/src/reduction.rs",
        "values of a type that is known only at run time",
    ),
    (
        "crates/collectives/src/shm/in_place.rs",
        "operations on buffers in shared memory",
    ),
    (
        "crates/collectives/src/shm/private.rs",
        "copies between a caller's memory and the segment",
    ),
    ("crates/collectives/src/shm/region.rs", "buffers in a shared mapping"),
    (
        "crates/collectives/src/shm/segment.rs",
        "the mapping, and the protocol's words in it",
    ),
    (
        "crates/collectives/src/shm/small.rs",
        "slots for small operations in shared memory",
    ),
    (
        "crates/collectives/src/shm/staged.rs",
        "stages for large operations in shared memory",
    ),
    ("crates/core/src/nn/matrix_product.rs", "gemm takes pointers"),
    (
        "crates/zero/src/device/cuda.rs",
        "memory comes unset from CUDA's driver, and is lent to its copies",
    ),
    ("crates/zero/src/device/gpu.rs", "kernels work with addresses"),
    ("crates/zero/src/device/launch.rs", "kernels and copies take addresses"),
    ("crates/zero/src/optimizer/prefetch.rs", "prefetches take pointers"),
    ("crates/zero/src/release.rs", "pages are given back by address"),
    ("crates/zero/src/weights/mapped_file.rs", "mapping of weight files"),
];

/// Checks that unsafe code is in the listed modules, and that each of these still has some.
pub(super) fn check(repository: &Repository) -> Vec<Finding> {
    check_against(MODULES, repository)
}

fn check_against(modules: &[(&str, &str)], repository: &Repository) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in repository.rust_files() {
        let is_listed = modules.iter().any(|(path, _)| *path == file.path);
        match first_unsafe_line(file) {
            Some(line) if !is_listed => {
                let message = "`unsafe` outside the modules listed in xtask/src/tidy/unsafe_code.rs: \
                               do it in one of them, or list this one with its reason";
                findings.push(Finding::of_line(&file.path, line, message));
            }
            None if is_listed => {
                let message = "listed in xtask/src/tidy/unsafe_code.rs but has no unsafe code: take it off the list";
                findings.push(Finding::of_file(&file.path, message));
            }
            _ => {}
        }
    }
    for (path, _) in modules.iter().filter(|(path, _)| repository.file(path).is_none()) {
        findings.push(Finding::of_file(
            path,
            "listed in xtask/src/tidy/unsafe_code.rs but is not there",
        ));
    }
    findings
}

fn first_unsafe_line(file: &TextFile) -> Option<usize> {
    let is_unsafe = |line: &str| {
        let mut words = line.split(|character: char| !character.is_alphanumeric() && character != '_');
        words.any(|word| word == "unsafe")
    };
    code_only(&file.text).lines().position(is_unsafe)
}

#[cfg(test)]
mod tests {
    use super::super::finding::texts;
    use super::*;

    const LISTED: &[(&str, &str)] = &[("a.rs", "a reason")];

    fn findings(files: &[(&str, &str)]) -> Vec<String> {
        texts(&check_against(LISTED, &Repository::of(files)))
    }

    #[test]
    fn unsafe_code_is_found_outside_the_list() {
        let code = "fn f() {\n    unsafe { g() }\n}\n";
        assert_eq!(findings(&[("a.rs", code)]), [""; 0]);
        let found = findings(&[("a.rs", code), ("b.rs", code)]);
        assert!(found.len() == 1 && found[0].starts_with("b.rs:2: "), "{found:?}");
    }

    #[test]
    fn the_word_in_prose_lints_and_texts_is_no_unsafe_code() {
        let prose = "#![forbid(unsafe_code)]\n// unsafe\nconst A: &str = \"unsafe\";\n";
        assert_eq!(findings(&[("a.rs", "unsafe fn f() {}"), ("b.rs", prose)]), [""; 0]);
    }

    #[test]
    fn the_list_names_no_module_without_unsafe_code() {
        assert!(findings(&[("a.rs", "fn f() {}")])[0].contains("take it off the list"));
        assert!(findings(&[])[0].contains("is not there"));
    }
}
