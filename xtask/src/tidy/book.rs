//! Every page of `docs/` is a chapter of the book, and its Rust blocks are tests.

use super::finding::Finding;
use super::repository::Repository;

const SUMMARY: &str = "docs/SUMMARY.md";
const TESTED: &str = "examples/src/pages.rs";

/// Checks that no page is forgotten in either list.
pub(super) fn check(repository: &Repository) -> Vec<Finding> {
    let text = |path| repository.file(path).map_or("", |file| file.text.as_str());
    let (summary, tested) = (text(SUMMARY), text(TESTED));
    let mut findings = Vec::new();
    for page in repository.files().filter(|file| file.path != SUMMARY) {
        let Some(name) = page
            .path
            .strip_prefix("docs/")
            .and_then(|name| name.strip_suffix(".md"))
        else {
            continue;
        };
        if !summary.contains(&format!("]({name}.md)")) {
            findings.push(Finding::of_file(&page.path, format!("is no chapter of {SUMMARY}")));
        }
        if !tested.lines().any(|line| line.trim() == name) {
            findings.push(Finding::of_file(
                &page.path,
                format!("its code is not tested: list it in {TESTED}"),
            ));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::finding::texts;
    use super::*;

    #[test]
    fn a_page_is_a_chapter_and_its_code_is_tested() {
        let files = [
            (SUMMARY, "- [A](a.md)\n"),
            (TESTED, "pages! {\n    a\n}\n"),
            ("docs/a.md", ""),
            ("docs/b.md", ""),
            ("README.md", ""),
        ];
        assert_eq!(
            texts(&check(&Repository::of(&files))),
            [
                "docs/b.md: error: is no chapter of docs/SUMMARY.md",
                "docs/b.md: error: its code is not tested: list it in examples/src/pages.rs",
            ]
        );
    }
}
