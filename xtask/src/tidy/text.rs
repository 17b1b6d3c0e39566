//! Rules for text of any kind: blanks, and words that do not belong into finished work.

use super::finding::Finding;
use super::repository::{Repository, TextFile};

/// Ends of the names of files whose blanks are checked.
const CHECKED_FOR_BLANKS: [&str; 5] = [".rs", ".md", ".toml", ".yml", ".ci/run"];

/// Marks of work that is not done. Open ends belong into the tracker or the README's status, where users find them.
const MARKS: [&str; 6] = ["TODO", "FIXME", "XXX", "HACK", "TBD", "WIP"];
/// Macros that panic where a feature is missing.
const MACROS: [&str; 2] = ["todo!(", "unimplemented!("];
/// What a merge writes around versions that conflict.
const CONFLICTS: [&str; 2] = ["<<<<<<< ", ">>>>>>> "];
/// Praise, in lower case: it says nothing that can be checked.
const PRAISE: [&str; 7] = [
    "blazing",
    "blazingly",
    "seamless",
    "seamlessly",
    "cutting-edge",
    "state-of-the-art",
    "effortlessly",
];

/// This file, which has to name the words.
const OWN_PATH: &str = "xtask/src/tidy/text.rs";

/// Checks that lines end with their last word, blanks are no tabs, and files end with one line end.
pub(super) fn check_blanks(repository: &Repository) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in repository.files() {
        if !CHECKED_FOR_BLANKS.iter().any(|end| file.path.ends_with(end)) {
            continue;
        }
        for (index, line) in file.text.split('\n').enumerate() {
            if line.ends_with([' ', '\t', '\r']) {
                findings.push(Finding::of_line(
                    &file.path,
                    index,
                    "white space at the end of the line",
                ));
            } else if line.contains('\t') {
                findings.push(Finding::of_line(&file.path, index, "a tab: indent with blanks"));
            }
        }
        if !file.text.is_empty() && (!file.text.ends_with('\n') || file.text.ends_with("\n\n")) {
            findings.push(Finding::of_file(&file.path, "does not end with exactly one line end"));
        }
    }
    findings
}

/// Checks for marks of unfinished work, praise and pictographs in sources, prose and settings.
pub(super) fn check_words(repository: &Repository) -> Vec<Finding> {
    let checked = |file: &&TextFile| {
        let is_written_here = CHECKED_FOR_BLANKS.iter().any(|end| file.path.ends_with(end));
        is_written_here && file.path != OWN_PATH
    };
    let check = |file: &TextFile| -> Vec<Finding> {
        let lines = file.text.lines().enumerate();
        lines
            .filter_map(|(index, line)| Some(Finding::of_line(&file.path, index, unfit_word(line)?)))
            .collect()
    };
    repository.files().filter(checked).flat_map(check).collect()
}

fn unfit_word(line: &str) -> Option<String> {
    let mut words = line.split(|character: char| !character.is_alphanumeric() && character != '-' && character != '_');
    let mut macros = MACROS.iter();
    if CONFLICTS.iter().any(|mark| line.starts_with(mark)) {
        Some("two versions were merged here and none was chosen".into())
    } else if let Some(mark) = words.clone().find(|word| MARKS.contains(word)) {
        Some(format!(
            "{mark}: finish it, or say what is missing where users look for it"
        ))
    } else if let Some(name) = macros.find(|name| line.contains(*name)) {
        Some(format!("`{name}...)`: return an error that says what is missing"))
    } else if let Some(word) = words.find(|word| PRAISE.contains(&word.to_lowercase().as_str())) {
        Some(format!("`{word}` is praise: say what can be checked"))
    } else {
        let pictograph = line.chars().find(|character| is_pictograph(*character))?;
        Some(format!("{pictograph:?}: write words"))
    }
}

fn is_pictograph(character: char) -> bool {
    matches!(character, '\u{2600}'..='\u{27bf}' | '\u{2b00}'..='\u{2bff}' | '\u{1f000}'..='\u{1faff}')
}

#[cfg(test)]
mod tests {
    use super::super::finding::texts;
    use super::*;

    #[test]
    fn blanks_that_nobody_sees_are_found() {
        let findings = |text| texts(&check_blanks(&Repository::of(&[("a.md", text)])));
        assert_eq!(findings("a\n\nb\n"), [""; 0]);
        assert_eq!(
            findings("a \nb\n"),
            ["a.md:1: error: white space at the end of the line"]
        );
        assert_eq!(findings("a\r\n"), ["a.md:1: error: white space at the end of the line"]);
        assert_eq!(findings("a\n\tb\n"), ["a.md:2: error: a tab: indent with blanks"]);
        for text in ["a", "a\n\n"] {
            assert_eq!(findings(text), ["a.md: error: does not end with exactly one line end"]);
        }
    }

    #[test]
    fn unfinished_work_praise_and_pictographs_are_found() {
        for line in [
            "// TODO: more",
            "x = 1 # FIXME",
            "todo!()",
            "unimplemented!(\"later\")",
            "Blazingly fast",
            "a state-of-the-art library",
            "\u{1f680} start",
            "<<<<<<< ours",
            ">>>>>>> theirs",
        ] {
            assert!(unfit_word(line).is_some(), "{line}");
        }
        for line in ["to do", "hacksaw", "x² · Σ → y", "SWIPE", "a seam"] {
            assert_eq!(unfit_word(line), None, "{line}");
        }
    }
}
