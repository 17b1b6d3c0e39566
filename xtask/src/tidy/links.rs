//! Links in Markdown that lead to files of the repository must find them.

use super::finding::Finding;
use super::repository::{Repository, TextFile};

/// Checks the targets of relative links.
pub(super) fn check(repository: &Repository) -> Vec<Finding> {
    let pages = repository.files().filter(|file| file.path.ends_with(".md"));
    pages.flat_map(|page| check_page(repository, page)).collect()
}

fn check_page(repository: &Repository, page: &TextFile) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (index, line) in page.text.lines().enumerate() {
        for target in targets(line).filter(|target| !target.contains(':') && !target.starts_with('#')) {
            let file = target.split('#').next().unwrap_or(target);
            if !resolve(&page.path, file).is_some_and(|path| path.is_empty() || repository.has(&path)) {
                findings.push(Finding::of_line(
                    &page.path,
                    index,
                    format!("the link leads nowhere: {target}"),
                ));
            }
        }
    }
    findings
}

/// The targets of the links in a line: what stands in parentheses after a bracket.
fn targets(line: &str) -> impl Iterator<Item = &str> {
    line.split("](")
        .skip(1)
        .filter_map(|rest| rest.split_once(')'))
        .map(|(target, _)| target)
}

/// The path from the root that `target` means on `page`; `None` outside the repository.
fn resolve(page: &str, target: &str) -> Option<String> {
    let mut parts: Vec<_> = page.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop()?;
            }
            name => parts.push(name),
        }
    }
    Some(parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::super::finding::texts;
    use super::*;

    #[test]
    fn relative_links_lead_to_files_or_folders() {
        let page = "[a](../README.md), [b](architecture.md#layers), [c](../crates/zero)\n\
                    [d](https://example.org/x), [e](#here), [f](missing.md), [g](../../outside.md)\n";
        let files = [
            ("README.md", ""),
            ("docs/architecture.md", page),
            ("crates/zero/Cargo.toml", ""),
        ];
        assert_eq!(
            texts(&check(&Repository::of(&files))),
            [
                "docs/architecture.md:2: error: the link leads nowhere: missing.md",
                "docs/architecture.md:2: error: the link leads nowhere: ../../outside.md",
            ]
        );
    }
}
