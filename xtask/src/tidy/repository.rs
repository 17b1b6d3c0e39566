//! The files that the rules read, in memory, so that tests can make up their own.

use std::path::Path;

use anyhow::{Context as _, Result};
use xshell::{Shell, cmd};

/// The text files of the repository.
#[derive(Debug)]
pub(super) struct Repository {
    files: Vec<TextFile>,
    /// Paths of all files, also of those that are no text.
    paths: Vec<String>,
}

/// One text file.
#[derive(Debug)]
pub(super) struct TextFile {
    /// Relative to the root, with `/`.
    pub(super) path: String,
    pub(super) text: String,
}

impl Repository {
    /// Reads all files under `root` that git tracks or would track.
    ///
    /// # Errors
    /// When git cannot list them or one cannot be read.
    pub(super) fn read(shell: &Shell, root: &Path) -> Result<Self> {
        // The checkout may belong to another user than the one who checks it.
        let list = cmd!(
            shell,
            "git -c safe.directory=* ls-files -z --cached --others --exclude-standard"
        );
        let list = list.quiet().read().context("tidy needs git to list the files")?;
        let mut repository = Self {
            files: Vec::new(),
            paths: Vec::new(),
        };
        for path in list.split('\0').filter(|path| !path.is_empty()) {
            let file = root.join(path);
            if !file.is_file() {
                continue; // deleted but not yet committed, or a link to a folder
            }
            repository.paths.push(path.to_owned());
            let bytes = std::fs::read(&file).with_context(|| format!("cannot read {path}"))?;
            if let Ok(text) = String::from_utf8(bytes) {
                repository.files.push(TextFile {
                    path: path.to_owned(),
                    text,
                });
            }
        }
        Ok(repository)
    }

    /// Makes a repository of these files.
    #[cfg(test)]
    pub(super) fn of(files: &[(&str, &str)]) -> Self {
        let text_file = |&(path, text): &(&str, &str)| TextFile {
            path: path.to_owned(),
            text: text.to_owned(),
        };
        Self {
            files: files.iter().map(text_file).collect(),
            paths: files.iter().map(|(path, _)| (*path).to_owned()).collect(),
        }
    }

    /// All text files.
    pub(super) fn files(&self) -> impl Iterator<Item = &TextFile> {
        self.files.iter()
    }

    /// The Rust files.
    pub(super) fn rust_files(&self) -> impl Iterator<Item = &TextFile> {
        self.files().filter(|file| file.path.ends_with(".rs"))
    }

    /// The Rust files of crates whose users are other programs: all but automation, tests, benches and programs.
    pub(super) fn library_sources(&self) -> impl Iterator<Item = &TextFile> {
        self.rust_files().filter(|file| {
            let of_crate = file.path.starts_with("crates/") || file.path.starts_with("examples/src/");
            of_crate && file.path.contains("/src/")
        })
    }

    /// The manifests of the workspace's packages, without its own; the fuzz targets are a workspace apart.
    pub(super) fn package_manifests(&self) -> impl Iterator<Item = &TextFile> {
        let manifests = self.files().filter(|file| file.path.ends_with("/Cargo.toml"));
        manifests.filter(|file| !file.path.starts_with("fuzz/"))
    }

    /// The text file at this path.
    pub(super) fn file(&self, path: &str) -> Option<&TextFile> {
        self.files().find(|file| file.path == path)
    }

    /// Whether there is a file at this path, or a folder with files in it.
    pub(super) fn has(&self, path: &str) -> bool {
        let path = path.trim_end_matches('/');
        self.paths.iter().any(|of| {
            of.strip_prefix(path)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        })
    }
}

impl TextFile {
    /// The file's name without its folder.
    pub(super) fn name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or(&self.path)
    }

    /// Whether the file as a whole belongs to tests.
    pub(super) fn is_test(&self) -> bool {
        self.path.split('/').any(|part| part == "tests" || part == "tests.rs")
    }
}
