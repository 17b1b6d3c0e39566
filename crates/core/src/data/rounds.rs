//! How what is read is dealt to the ranks.
//!
//! A round is what all ranks together get in one step: `per_rank * world` items, of which rank r takes the r-th part.
//! Items are samples, numbers of samples, or whole batches (of which `per_rank` is 1). Only the last round may be short,
//! and [`Tail`] says what becomes of it. The next round is read before one is given, so that the last is known as such
//! also where nobody knows the length.

use super::DataError;
use std::ops::Range;

/// What becomes of a last round that is short.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tail {
    /// It is filled up with the first items of the epoch.
    Repeat,
    /// It is dealt as far as it goes: some ranks get less, or no batch.
    Uneven,
    /// It is left out.
    Drop,
    /// It is spread evenly, and filled up with the first items of the epoch until all ranks have as many.
    Spread,
}

/// How rounds are dealt.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deal {
    pub(crate) per_rank: usize,
    pub(crate) world: usize,
    pub(crate) tail: Tail,
}

impl Deal {
    /// Returns the number of items of a full round.
    pub(crate) fn together(&self) -> usize {
        self.per_rank * self.world
    }

    /// Returns how many batches `rank` gets of `items` items.
    pub(crate) fn batches(&self, items: usize, rank: usize) -> usize {
        let (full, rest) = (items / self.together(), items % self.together());
        full + usize::from(rest > 0 && self.tail != Tail::Drop && self.has_part(rest, rank))
    }

    /// Says whether `rank` gets something of a round of `items` items.
    fn has_part(&self, items: usize, rank: usize) -> bool {
        !self.part(items, rank).is_empty()
    }

    /// Returns the places of `rank` in a round of `items` items; those from `items` on are to be filled up.
    fn part(&self, items: usize, rank: usize) -> Range<usize> {
        let per_rank = match self.tail {
            Tail::Spread => items.div_ceil(self.world),
            _ => self.per_rank,
        };
        let part = rank * per_rank..(rank + 1) * per_rank;
        match self.tail {
            Tail::Uneven => part.start.min(items)..part.end.min(items),
            _ => part,
        }
    }
}

/// What one rank gets of a round.
#[derive(Debug)]
pub(super) struct Part<T> {
    /// At first what is new, then what fills up.
    pub(super) items: Vec<T>,
    /// How many items are new.
    pub(super) fresh: usize,
}

/// One round, as far as it was asked for.
#[derive(Debug)]
pub(super) struct Round<T> {
    /// The parts of the ranks asked for, or why the round could not be read.
    pub(super) parts: Result<Vec<Part<T>>, DataError>,
    /// Weight of the new items over all ranks.
    pub(super) fresh: usize,
    /// Whether the ranks asked for get nothing more.
    pub(super) last: bool,
    /// Whether every rank gets something.
    pub(super) complete: bool,
}

/// Deals items to the ranks, round after round.
#[derive(Debug)]
pub(super) struct Rounds<I: Iterator<Item = Result<T, DataError>>, T> {
    items: std::iter::Fuse<I>,
    deal: Deal,
    ranks: Range<usize>,
    /// How many rows an item makes.
    rows: fn(&T) -> usize,
    /// The items of the first round, with which the last is filled up.
    first: Option<Vec<T>>,
    /// The round after the one that was given last.
    ahead: Option<Result<Vec<T>, DataError>>,
}

impl<T: Clone, I: Iterator<Item = Result<T, DataError>>> Rounds<I, T> {
    /// Deals `items`; `ranks` are those whose parts are asked for.
    pub(super) fn new(items: I, deal: Deal, ranks: Range<usize>, rows: fn(&T) -> usize) -> Self {
        Self {
            items: items.fuse(),
            deal,
            ranks,
            rows,
            first: None,
            ahead: None,
        }
    }

    /// Reads a round; a failure takes the whole round, and reading goes on behind it.
    fn read(&mut self) -> Option<Result<Vec<T>, DataError>> {
        let together = self.deal.together();
        let mut items = Vec::new();
        let mut failure = None;
        let mut taken = 0;
        while taken < together
            && let Some(item) = self.items.next()
        {
            taken += 1;
            match item {
                Ok(item) => items.push(item),
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        if taken == 0 || (taken < together && self.deal.tail == Tail::Drop) {
            return None;
        }
        if self.first.is_none() {
            let fills_up = matches!(self.deal.tail, Tail::Repeat | Tail::Spread);
            self.first = Some(if fills_up { items.clone() } else { Vec::new() });
        }
        Some(match failure {
            Some(error) => Err(error),
            None => Ok(items),
        })
    }

    /// Deals a round to the ranks asked for; only what fills up is cloned.
    fn parts(&self, items: Vec<T>) -> Result<Vec<Part<T>>, DataError> {
        let count = items.len();
        let first = self.first.as_deref().unwrap_or_default();
        let begin = self.deal.part(count, self.ranks.start).start;
        // Parts lie one behind the other.
        let mut items = items.into_iter().skip(begin);
        let part = |rank| {
            let places = self.deal.part(count, rank);
            let mut part = Vec::from_iter(items.by_ref().take(places.len()));
            let fresh = part.len();
            for place in places.skip(fresh) {
                let fill = (place - count).checked_rem(first.len()).map(|at| first[at].clone());
                part.push(fill.ok_or("the first samples, which fill up the last batch, could not be read")?);
            }
            Ok(Part { items: part, fresh })
        };
        self.ranks.clone().map(part).collect()
    }
}

impl<T: Clone, I: Iterator<Item = Result<T, DataError>>> Iterator for Rounds<I, T> {
    type Item = Round<T>;

    fn next(&mut self) -> Option<Round<T>> {
        let read = match self.ahead.take() {
            Some(read) => read,
            None => self.read()?,
        };
        self.ahead = self.read();
        let gets_something = |items: usize| self.ranks.clone().any(|rank| self.deal.has_part(items, rank));
        if let Ok(items) = &read
            && !gets_something(items.len())
        {
            return None;
        }
        let last = match &self.ahead {
            None => true,
            Some(Err(_)) => false,
            Some(Ok(items)) => !gets_something(items.len()),
        };
        let everyone = self.deal.world - 1;
        Some(match read {
            Err(error) => Round {
                parts: Err(error),
                fresh: 0,
                last,
                complete: true,
            },
            Ok(items) => Round {
                fresh: items.iter().map(self.rows).sum(),
                last,
                complete: self.deal.has_part(items.len(), everyone),
                parts: self.parts(items),
            },
        })
    }
}
