//! The order in which units run, learnt from one forward and backward, so that the next units can be gathered ahead.
//!
//! A trace is *recorded* from the end of one backward to the end of the next, then *followed*: every event must be the one
//! expected. Another one (an evaluation, another branch of the model) ends that until the next backward has ended, and
//! nothing is gathered ahead meanwhile. What a rank gathers depends on the events alone, never on time, so all ranks whose
//! models run alike gather alike.

/// Events after which recording ends: so many without a backward are a long evaluation, not a step to come again.
const LONGEST: usize = 1 << 20;

/// Which way data goes through a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pass {
    Forward,
    Backward,
}

/// A unit begins to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Event {
    pub(crate) unit: usize,
    pub(crate) pass: Pass,
}

/// The events of one forward and backward.
#[derive(Debug, Default)]
pub(crate) struct Trace {
    events: Vec<Event>,
    mode: Mode,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Mode {
    #[default]
    Recording,
    /// The next event is this one.
    Following(usize),
    /// Nothing is known until the next backward has ended.
    Lost,
}

impl Trace {
    /// Takes an event; says whether it was not the one expected.
    pub(crate) fn advance(&mut self, event: Event) -> bool {
        match &mut self.mode {
            Mode::Recording => {
                self.events.push(event);
                if self.events.len() > LONGEST {
                    self.lose();
                }
                false
            }
            Mode::Following(next) if self.events.get(*next) == Some(&event) => {
                *next += 1;
                false
            }
            Mode::Following(_) => {
                self.lose();
                true
            }
            Mode::Lost => false,
        }
    }

    /// Returns the events expected next, as far as they are known.
    pub(crate) fn ahead(&self) -> &[Event] {
        match self.mode {
            Mode::Following(next) => &self.events[next..],
            Mode::Recording | Mode::Lost => &[],
        }
    }

    /// A backward has ended.
    pub(crate) fn end_of_backward(&mut self) {
        self.mode = match self.mode {
            Mode::Recording => Mode::Following(0),
            Mode::Following(next) if next == self.events.len() => Mode::Following(0),
            Mode::Following(_) | Mode::Lost => {
                self.events.clear();
                Mode::Recording
            }
        };
    }

    /// Forgets what is expected until the next backward has ended, if something was under way.
    pub(crate) fn interrupt(&mut self) {
        match self.mode {
            Mode::Following(0) => {}
            Mode::Recording if self.events.is_empty() => {}
            _ => self.lose(),
        }
    }

    fn lose(&mut self) {
        self.events = Vec::new();
        self.mode = Mode::Lost;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forward(unit: usize) -> Event {
        let pass = Pass::Forward;
        Event { unit, pass }
    }

    fn backward(unit: usize) -> Event {
        let pass = Pass::Backward;
        Event { unit, pass }
    }

    #[test]
    fn a_trace_is_recorded_followed_lost_and_recorded_again() {
        let mut trace = Trace::default();
        let events = [forward(0), forward(1), backward(1), backward(0)];
        for event in events {
            assert!(!trace.advance(event));
            assert!(trace.ahead().is_empty());
        }
        trace.end_of_backward();
        for _ in 0..2 {
            assert_eq!(trace.ahead(), events);
            for (number, event) in events.into_iter().enumerate() {
                assert!(!trace.advance(event));
                assert_eq!(trace.ahead(), &events[number + 1..]);
            }
            trace.end_of_backward();
        }
        // An evaluation: the second forward of unit 0 is not expected.
        assert!(!trace.advance(forward(0)));
        assert!(!trace.advance(forward(1)));
        assert!(trace.advance(forward(0)));
        assert!(trace.ahead().is_empty());
        trace.end_of_backward();
        trace.advance(forward(2));
        trace.advance(backward(2));
        trace.end_of_backward();
        assert_eq!(trace.ahead(), [forward(2), backward(2)]);
    }

    #[test]
    fn forwards_without_end_are_not_recorded() {
        let mut trace = Trace::default();
        (0..2 * LONGEST).for_each(|_| assert!(!trace.advance(forward(0))));
        assert!(trace.events.is_empty());
        trace.end_of_backward();
        trace.advance(forward(0));
        trace.advance(backward(0));
        trace.end_of_backward();
        assert_eq!(trace.ahead(), [forward(0), backward(0)]);
    }

    #[test]
    fn a_step_between_backwards_interrupts_only_what_is_under_way() {
        let mut trace = Trace::default();
        trace.advance(forward(0));
        trace.end_of_backward();
        trace.interrupt();
        assert_eq!(trace.ahead(), [forward(0)]);
        trace.advance(forward(0));
        trace.interrupt();
        assert!(trace.ahead().is_empty());
    }
}
