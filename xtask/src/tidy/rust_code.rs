//! Rust source with everything blanked that is not code, so that rules do not stumble over prose.
//!
//! This is a lexer for comments and literals only: the rules look for words, and need no syntax tree.

use std::iter::Peekable;
use std::ops::Range;
use std::str::Chars;

/// Returns `source` with blanks instead of comments and the contents of literals; lines stay lines.
pub(super) fn code_only(source: &str) -> String {
    let mut scanner = Scanner {
        rest: source.chars().peekable(),
        code: String::with_capacity(source.len()),
    };
    while let Some(character) = scanner.rest.peek().copied() {
        match character {
            '/' if scanner.second() == Some('/') => scanner.line_comment(),
            '/' if scanner.second() == Some('*') => scanner.block_comment(),
            '"' => scanner.string(),
            '\'' => scanner.quote(),
            _ if character.is_alphanumeric() || character == '_' => scanner.word(),
            _ => scanner.keep(),
        }
    }
    scanner.code
}

/// Returns the lines (from 0) of items under `#[cfg(test)]`, given code without comments and literals.
pub(super) fn test_lines(code: &str) -> Vec<Range<usize>> {
    const ATTRIBUTE: &str = "#[cfg(test)]";
    let mut ranges = Vec::new();
    let mut from = 0;
    while let Some(start) = code[from..].find(ATTRIBUTE).map(|at| from + at) {
        let end = start + ATTRIBUTE.len() + item_length(&code[start + ATTRIBUTE.len()..]);
        let line_of = |at: usize| code[..at].matches('\n').count();
        ranges.push(line_of(start)..line_of(end) + 1);
        from = end;
    }
    ranges
}

/// The length of the item that `code` begins with: up to its closing brace or its semicolon.
fn item_length(code: &str) -> usize {
    let mut depth = 0usize;
    for (at, character) in code.char_indices() {
        match character {
            '{' | '(' | '[' => depth += 1,
            '}' | ')' | ']' => {
                depth = depth.saturating_sub(1);
                if depth == 0 && character == '}' {
                    return at;
                }
            }
            ';' if depth == 0 => return at,
            _ => {}
        }
    }
    code.len()
}

struct Scanner<'s> {
    rest: Peekable<Chars<'s>>,
    code: String,
}

impl Scanner<'_> {
    fn second(&self) -> Option<char> {
        self.rest.clone().nth(1)
    }

    fn keep(&mut self) {
        self.code.extend(self.rest.next());
    }

    fn blank(&mut self) -> Option<char> {
        let character = self.rest.next()?;
        self.code.push(if character == '\n' { '\n' } else { ' ' });
        Some(character)
    }

    fn line_comment(&mut self) {
        while self.rest.peek().is_some_and(|character| *character != '\n') {
            self.blank();
        }
    }

    /// Block comments nest.
    fn block_comment(&mut self) {
        let mut depth = 0usize;
        while let Some(first) = self.blank() {
            match (first, self.rest.peek()) {
                ('/', Some('*')) => {
                    self.blank();
                    depth += 1;
                }
                ('*', Some('/')) => {
                    self.blank();
                    depth -= 1;
                    if depth == 0 {
                        return;
                    }
                }
                _ => {}
            }
        }
    }

    /// A string with escapes, from its first quotation mark.
    fn string(&mut self) {
        self.keep();
        while let Some(character) = self.rest.peek() {
            match character {
                '"' => return self.keep(),
                '\\' => {
                    self.blank();
                    self.blank();
                }
                _ => {
                    self.blank();
                }
            }
        }
    }

    /// A character, or a lifetime or label, which has no closing quote.
    fn quote(&mut self) {
        let mut ahead = self.rest.clone().skip(1);
        let is_character = match ahead.next() {
            Some('\\') => true,
            Some(_) => ahead.next() == Some('\''),
            None => false,
        };
        self.keep();
        if !is_character {
            return;
        }
        if self.blank() == Some('\\') {
            self.blank();
        }
        // Escapes such as \u{1f} and \x1f are longer than one character.
        while self.rest.peek().is_some_and(|character| *character != '\'') {
            self.blank();
        }
        self.keep();
    }

    /// An identifier, a number, or the prefix of a literal.
    fn word(&mut self) {
        let start = self.code.len();
        while self.rest.peek().is_some_and(|c| c.is_alphanumeric() || *c == '_') {
            self.keep();
        }
        if matches!(&self.code[start..], "r" | "br" | "cr") {
            let hashes = self.rest.clone().take_while(|character| *character == '#').count();
            if self.rest.clone().nth(hashes) == Some('"') {
                self.raw_string(hashes);
            }
        }
    }

    fn raw_string(&mut self, hashes: usize) {
        for _ in 0..=hashes {
            self.keep();
        }
        while let Some(character) = self.blank() {
            if character == '"' && self.rest.clone().take(hashes).filter(|c| *c == '#').count() == hashes {
                for _ in 0..hashes {
                    self.blank();
                }
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(source: &str) -> Vec<String> {
        let code = code_only(source);
        assert_eq!(code.lines().count(), source.lines().count());
        code.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn comments_are_blanked_also_when_they_nest() {
        assert_eq!(words("a // b\n/// c\nd /* e /* f */ g\n */ h"), ["a", "d", "h"]);
    }

    #[test]
    fn literals_are_blanked_whatever_their_escapes() {
        assert_eq!(words(r#"a "b \" // c" d"#), ["a", "\"", "\"", "d"]);
        assert_eq!(words("a r#\"b \" c\"# d"), ["a", "r#\"", "d"]);
        assert_eq!(words(r"a br'"), ["a", "br'"]);
        assert_eq!(
            words(r"a '\'' b '\u{1f}' c '/' d"),
            ["a", "'", "'", "b", "'", "'", "c", "'", "'", "d"]
        );
        assert_eq!(words("a '\"' b"), ["a", "'", "'", "b"]);
    }

    #[test]
    fn lifetimes_are_no_characters() {
        assert_eq!(
            words("fn f<'a>(x: &'a str) {}"),
            ["fn", "f<'a>(x:", "&'a", "str)", "{}"]
        );
    }

    #[test]
    fn test_items_end_with_their_brace_or_semicolon() {
        let code = "a\n#[cfg(test)]\nmod tests {\n fn f() { [1; 2] }\n}\nb\n#[cfg(test)]\nuse c;\nd";
        assert_eq!(test_lines(code), [1..5, 6..8]);
    }
}
