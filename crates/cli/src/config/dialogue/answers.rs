//! What has been answered so far.

use std::collections::BTreeMap;

/// The answers, by the questions' keys.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Answers(BTreeMap<&'static str, String>);

impl Answers {
    /// The answer, or an empty text where the question was not asked.
    pub(super) fn text(&self, key: &str) -> &str {
        self.0.get(key).map_or("", String::as_str)
    }

    /// Whether a question was answered so.
    pub(super) fn is(&self, key: &str, answer: &str) -> bool {
        self.text(key) == answer
    }

    /// Whether a question was answered in one of these ways.
    pub(super) fn is_one_of(&self, key: &str, answers: &[&str]) -> bool {
        answers.contains(&self.text(key))
    }

    pub(super) fn give(&mut self, key: &'static str, answer: String) {
        self.0.insert(key, answer);
    }

    /// Takes an answer back.
    pub(super) fn take(&mut self, key: &str) -> Option<String> {
        self.0.remove(key)
    }

    /// All, in the order of their keys.
    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.0.iter().map(|(key, answer)| (*key, answer.as_str()))
    }
}
