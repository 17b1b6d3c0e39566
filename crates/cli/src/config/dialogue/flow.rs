//! The way through the questions: forward by answers, back one question at a time, out at any.

use super::answers::Answers;
use super::ask::{Ask, Prompt, Reply};
use super::question::Question;
use crate::command_error::CommandError;

/// What leads through a dialogue.
pub(super) struct Course<'a> {
    /// In their order; only those are put that the answers lead to.
    pub(super) questions: &'a [Question],
    /// What is said already of a question's key: proposed, unless something else was answered before going back.
    pub(super) known: &'a dyn Fn(&str) -> Option<String>,
    /// Says what is wrong with answers that do not fit together, the last of which is to be given again.
    pub(super) check: &'a dyn Fn(&Answers) -> Result<(), String>,
    /// What is shown before the question of this key is put.
    pub(super) shown_before: &'a dyn Fn(&str, &Answers) -> Option<String>,
}

impl Course<'_> {
    /// Puts the questions; `None` if whoever answers goes away.
    ///
    /// # Errors
    /// When nobody can answer any more.
    pub(super) fn walk(&self, ask: &mut dyn Ask) -> Result<Option<Answers>, CommandError> {
        let mut answers = Answers::default();
        let mut taken_back = Answers::default();
        let mut asked: Vec<usize> = Vec::new();
        let mut next = 0;
        while let Some(question) = self.questions.get(next) {
            if !question.is_asked(&answers) {
                next += 1;
                continue;
            }
            if let Some(text) = (self.shown_before)(question.key, &answers) {
                ask.tell(&text);
            }
            match self.put(question, &answers, &taken_back, ask)? {
                Reply::Answer(answer) => {
                    answers.give(question.key, answer);
                    match (self.check)(&answers) {
                        Ok(()) => {
                            asked.push(next);
                            next += 1;
                        }
                        Err(reason) => {
                            answers.take(question.key);
                            ask.tell(&format!("{reason}\n"));
                        }
                    }
                }
                Reply::Back => match asked.pop() {
                    Some(last) => {
                        let key = self.questions[last].key;
                        if let Some(answer) = answers.take(key) {
                            taken_back.give(key, answer);
                        }
                        next = last;
                    }
                    None => ask.tell("There is no question before this one.\n"),
                },
                Reply::Quit => return Ok(None),
            }
        }
        Ok(Some(answers))
    }

    fn put(
        &self,
        question: &Question,
        answers: &Answers,
        taken_back: &Answers,
        ask: &mut dyn Ask,
    ) -> Result<Reply, CommandError> {
        let before = taken_back.text(question.key);
        let before = (!before.is_empty()).then(|| before.to_owned());
        let default = question.proposal(answers, [before, (self.known)(question.key)]);
        ask.ask(&Prompt {
            text: question.text,
            form: question.form(),
            default: default.as_deref(),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::super::question::choice;
    use super::*;

    /// Replies as planned, and notes each question with what it proposed.
    struct Planned {
        replies: VecDeque<Reply>,
        seen: Vec<String>,
    }

    impl Ask for Planned {
        fn ask(&mut self, prompt: &Prompt<'_>) -> Result<Reply, CommandError> {
            self.seen
                .push(format!("{} {}", prompt.text, prompt.default.unwrap_or("-")));
            Ok(self.replies.pop_front().unwrap())
        }

        fn tell(&mut self, text: &str) {
            self.seen.push(text.to_owned());
        }
    }

    const QUESTIONS: &[Question] = &[
        Question::menu("a", "A?", &[choice("x", "the x"), choice("y", "the y")]),
        Question::yes_or_no("b", "B?").when(|answers| answers.is("a", "x")),
        Question::yes_or_no("c", "C?").proposing_from(|answers| Some(answers.is("a", "x").to_string())),
    ];

    fn walked(known: &[(&str, &str)], replies: &[&str]) -> (Option<Answers>, Vec<String>) {
        let reply = |text: &&str| match *text {
            "<" => Reply::Back,
            "!" => Reply::Quit,
            answer => Reply::Answer(answer.to_owned()),
        };
        let mut ask = Planned {
            replies: replies.iter().map(reply).collect(),
            seen: Vec::new(),
        };
        let known = |key: &str| {
            known
                .iter()
                .find(|(of, _)| *of == key)
                .map(|(_, value)| (*value).to_owned())
        };
        let course = Course {
            questions: QUESTIONS,
            known: &known,
            check: &|answers| match answers.is("b", "false") && answers.is("c", "true") {
                true => Err("no c without b".to_owned()),
                false => Ok(()),
            },
            shown_before: &|key, answers| (key == "c" && answers.is("a", "y")).then(|| "after y".to_owned()),
        };
        let answers = course.walk(&mut ask).unwrap();
        assert_eq!(ask.replies, []);
        (answers, ask.seen)
    }

    fn pairs(answers: &Answers) -> Vec<(&str, &str)> {
        answers.iter().collect()
    }

    #[test]
    fn only_questions_that_answers_lead_to_are_asked() {
        let (answers, seen) = walked(&[], &["y", "true"]);
        assert_eq!(seen, ["A? -", "after y", "C? false"]);
        assert_eq!(pairs(&answers.unwrap()), [("a", "y"), ("c", "true")]);
    }

    #[test]
    fn what_is_known_is_proposed_where_it_fits_the_question() {
        let (_, seen) = walked(&[("a", "x"), ("b", "true"), ("c", "perhaps")], &["x", "true", "true"]);
        assert_eq!(seen, ["A? x", "B? true", "C? true"]);
    }

    #[test]
    fn going_back_forgets_what_no_longer_follows_and_proposes_what_was_answered() {
        let replies = ["x", "true", "<", "<", "y", "<", "x", "true", "false"];
        let (answers, seen) = walked(&[], &replies);
        let expected = "A? -|B? false|C? true|B? true|A? x|after y|C? false|A? y|B? true|C? true";
        let expected = Vec::from_iter(expected.split('|'));
        assert_eq!(seen, expected);
        assert_eq!(pairs(&answers.unwrap()), [("a", "x"), ("b", "true"), ("c", "false")]);
        let (answers, _) = walked(&[], &["x", "true", "<", "<", "y", "false"]);
        assert_eq!(pairs(&answers.unwrap()), [("a", "y"), ("c", "false")]);
    }

    #[test]
    fn an_answer_that_does_not_fit_the_others_is_asked_for_again() {
        let (answers, seen) = walked(&[], &["x", "false", "true", "false"]);
        assert_eq!(seen[2..], ["C? true", "no c without b\n", "C? true"]);
        assert_eq!(pairs(&answers.unwrap())[2], ("c", "false"));
    }

    #[test]
    fn nobody_goes_back_beyond_the_first_question_and_quitting_leaves_nothing() {
        let (answers, seen) = walked(&[], &["<", "x", "!"]);
        assert_eq!(
            seen,
            ["A? -", "There is no question before this one.\n", "A? -", "B? false"]
        );
        assert_eq!(answers, None);
    }
}
