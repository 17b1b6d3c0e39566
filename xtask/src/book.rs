//! `cargo xtask book`: makes the pages of `docs/` a book, `target/book/index.html`.
//!
//! On GitHub the pages are read where they lie, so their links are relative, also to source files. In the book those lead to
//! the repository; they are rewritten in a copy, from which mdbook builds.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use xshell::{Shell, cmd};

use crate::tidy::links::resolve;

/// Whether mdbook is there.
pub(crate) fn can_run(shell: &Shell) -> bool {
    cmd!(shell, "mdbook --version").quiet().ignore_stderr().read().is_ok()
}

/// Builds the book.
///
/// # Errors
/// When mdbook is missing or fails, or files cannot be read or written.
pub(crate) fn run(shell: &Shell, root: &Path) -> Result<()> {
    let (pages, copy) = (root.join("docs"), root.join("target/book-pages"));
    let manifest = fs::read_to_string(root.join("Cargo.toml")).context("cannot read Cargo.toml")?;
    let manifest: toml::Table = manifest.parse()?;
    let repository = manifest["workspace"]["package"]["repository"].as_str();
    let repository = repository.context("Cargo.toml has no workspace.package.repository")?;
    if copy.exists() {
        fs::remove_dir_all(&copy)?;
    }
    fs::create_dir_all(&copy)?;
    for entry in fs::read_dir(&pages).context("cannot read docs")? {
        let page = entry?.path();
        let name = page.file_name().expect("an entry of a folder has a name");
        if page.extension().is_some_and(|extension| extension == "md") {
            let text = fs::read_to_string(&page).with_context(|| format!("cannot read {}", page.display()))?;
            fs::write(copy.join(name), with_links_to(repository, &text))?;
        } else if page.is_file() {
            fs::copy(&page, copy.join(name))?;
        }
    }
    let book = root.join("target/book");
    let install = "cannot run mdbook; `cargo install mdbook --locked` installs it";
    cmd!(shell, "mdbook build --dest-dir {book} {copy}")
        .quiet()
        .run()
        .context(install)?;
    Ok(())
}

/// The text of a page with the links that leave `docs/` leading to files of the repository.
fn with_links_to(repository: &str, text: &str) -> String {
    let mut parts = text.split("](");
    let mut rewritten = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        rewritten.push_str("](");
        match part.split_once(')') {
            Some((target, rest)) if target.starts_with("../") => {
                // `tidy` finds links that leave the repository.
                let path = resolve("docs/page.md", target).unwrap_or_default();
                rewritten.push_str(&format!("{repository}/blob/main/{path})"));
                rewritten.push_str(rest);
            }
            _ => rewritten.push_str(part),
        }
    }
    rewritten
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_that_leave_the_pages_lead_to_the_repository() {
        let page =
            "[a](architecture.md), [b](../README.md#status) and [c](../crates/zero/src/lib.rs), [d](https://x.org)";
        assert_eq!(
            with_links_to("https://host/name", page),
            "[a](architecture.md), [b](https://host/name/blob/main/README.md#status) and \
             [c](https://host/name/blob/main/crates/zero/src/lib.rs), [d](https://x.org)"
        );
    }
}
