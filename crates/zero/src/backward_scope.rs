//! Whose backward is under way on this thread, where several models train in one loop.
//!
//! A loss may pass through the parameters of another engine's model: a generator's through the discriminator. Their hooks
//! are called too, and what they get is not theirs to learn from. So an engine says when its backward begins, and hooks of
//! others drop their gradients until it ends. Units of theirs that were gathered for it are given up afterwards.

use crate::gradients::Gradients;
use crate::units::Units;
use std::cell::RefCell;
use std::sync::{Arc, Weak};

thread_local! {
    static RUNNING: RefCell<Option<Running>> = const { RefCell::new(None) };
}

struct Running {
    /// The engine's gradients, by address.
    gradients: *const Gradients,
    /// Units of other engines whose parameters were reached, each once.
    others: Vec<Weak<Units>>,
}

/// An engine's backward, as long as it is under way on this thread.
#[derive(Debug)]
pub(crate) struct BackwardScope {
    _not_send: std::marker::PhantomData<*const ()>,
}

impl BackwardScope {
    pub(crate) fn enter(gradients: &Arc<Gradients>) -> Self {
        let running = Running {
            gradients: Arc::as_ptr(gradients),
            others: Vec::new(),
        };
        RUNNING.set(Some(running));
        Self {
            _not_send: std::marker::PhantomData,
        }
    }

    /// Returns the units of other engines whose parameters the pass has reached.
    pub(crate) fn others(&self) -> Vec<Arc<Units>> {
        RUNNING.with_borrow(|running| {
            let others = running.iter().flat_map(|running| &running.others);
            others.filter_map(Weak::upgrade).collect()
        })
    }
}

impl Drop for BackwardScope {
    fn drop(&mut self) {
        RUNNING.set(None);
    }
}

/// Says whether the pass under way is another engine's than that of these gradients.
pub(crate) fn is_of_another(gradients: &Arc<Gradients>) -> bool {
    RUNNING.with_borrow(|running| {
        running
            .as_ref()
            .is_some_and(|running| running.gradients != Arc::as_ptr(gradients))
    })
}

/// Notes that the pass under way reached these units of another engine.
pub(crate) fn note_reached(units: &Weak<Units>) {
    RUNNING.with_borrow_mut(|running| {
        if let Some(running) = running
            && !running.others.iter().any(|other| other.ptr_eq(units))
        {
            running.others.push(Weak::clone(units));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_gradients_of_the_pass_under_way_are_taken() {
        let (own, other) = (Arc::<Gradients>::default(), Arc::<Gradients>::default());
        assert!(!is_of_another(&own) && !is_of_another(&other));
        let scope = BackwardScope::enter(&own);
        assert!(!is_of_another(&own) && is_of_another(&other));
        drop(scope);
        assert!(!is_of_another(&other));
    }
}
