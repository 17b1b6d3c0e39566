//! Links in Markdown that lead to files of the repository, or to headings in them, must find them.

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
        for target in targets(line).filter(|target| !target.contains(':')) {
            if !leads_somewhere(repository, page, target) {
                let message = format!("the link leads nowhere: {target}");
                findings.push(Finding::of_line(&page.path, index, message));
            }
        }
    }
    findings
}

fn leads_somewhere(repository: &Repository, page: &TextFile, target: &str) -> bool {
    let (file, heading) = target.split_once('#').unwrap_or((target, ""));
    let path = match file {
        "" => Some(page.path.clone()),
        file => resolve(&page.path, file),
    };
    let Some(path) = path.filter(|path| path.is_empty() || repository.has(path)) else {
        return false;
    };
    heading.is_empty() || repository.file(&path).is_some_and(|file| has_heading(file, heading))
}

/// Whether a page has a heading of that anchor, by GitHub's rule: lower case, hyphens for blanks, nothing for most signs.
fn has_heading(page: &TextFile, anchor: &str) -> bool {
    let mut headings = page.text.lines().filter_map(|line| line.strip_prefix('#'));
    headings.any(|heading| {
        let kept = heading
            .trim_start_matches('#')
            .trim()
            .chars()
            .filter_map(|sign| match sign {
                ' ' => Some('-'),
                '-' | '_' => Some(sign),
                sign => sign.is_alphanumeric().then_some(sign),
            });
        kept.collect::<String>().to_lowercase() == anchor
    })
}

/// The targets of the links in a line: what stands in parentheses after a bracket.
fn targets(line: &str) -> impl Iterator<Item = &str> {
    line.split("](")
        .skip(1)
        .filter_map(|rest| rest.split_once(')'))
        .map(|(target, _)| target)
}

/// The path from the root that `target` means on `page`; `None` outside the repository.
pub(crate) fn resolve(page: &str, target: &str) -> Option<String> {
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
        let page = "[a](../README.md), [b](../README.md#three-layers), [c](../crates/zero)\n\
                    [d](https://example.org/x), [f](missing.md), [g](../../outside.md)\n\
                    ## Who, if not `you`?\n[h](#who-if-not-you), [i](#here), [j](../README.md#status)\n";
        let files = [
            ("README.md", "# Three layers\n"),
            ("docs/architecture.md", page),
            ("crates/zero/Cargo.toml", ""),
        ];
        assert_eq!(
            texts(&check(&Repository::of(&files))),
            [
                "docs/architecture.md:2: error: the link leads nowhere: missing.md",
                "docs/architecture.md:2: error: the link leads nowhere: ../../outside.md",
                "docs/architecture.md:4: error: the link leads nowhere: #here",
                "docs/architecture.md:4: error: the link leads nowhere: ../README.md#status",
            ]
        );
    }
}
