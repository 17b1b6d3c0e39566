//! What differs between two checkpoints.

use super::error::CheckpointError;
use super::index::{BLOCK, ParameterEntry};
use super::opened::Checkpoint;
use serde::Serialize;
use std::collections::BTreeSet;

/// Elements that are compared at a time.
const PIECE: usize = BLOCK;

/// One difference between the arrays of two checkpoints.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Difference {
    /// The model's number.
    pub model: usize,
    /// The parameter.
    pub name: String,
    /// The array; `None` where the parameter as a whole differs.
    pub array: Option<String>,
    /// How they differ.
    #[serde(flatten)]
    pub kind: DifferenceKind,
}

/// How two arrays differ.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum DifferenceKind {
    /// Only the first checkpoint has it.
    OnlyInFirst,
    /// Only the second checkpoint has it.
    OnlyInSecond,
    /// Its shapes differ.
    Shape {
        /// In the first.
        first: Vec<usize>,
        /// In the second.
        second: Vec<usize>,
    },
    /// Its values differ.
    Values {
        /// How many do: those that are not the same bits, as f32.
        changed: usize,
        /// Of how many.
        elements: usize,
        /// The largest absolute difference; `None` where it is not a finite number.
        max_abs_difference: Option<f64>,
    },
}

impl Checkpoint {
    /// Compares the arrays of all models with those of another checkpoint; hands each difference to `take`. Holds a few
    /// mebibytes at a time.
    ///
    /// # Errors
    /// [`CheckpointError`] where values that are compared are damaged.
    pub fn compare(&mut self, other: &mut Self, mut take: impl FnMut(Difference)) -> Result<(), CheckpointError> {
        for model in 0..self.index.models.len().max(other.index.models.len()) {
            let names = [&self.index, &other.index]
                .into_iter()
                .filter_map(|index| Some(index.models.get(model)?.parameters.keys().cloned()))
                .flatten();
            for name in BTreeSet::from_iter(names) {
                let mut tell = |array, kind| {
                    take(Difference {
                        model,
                        name: name.clone(),
                        array,
                        kind,
                    });
                };
                let sides = [&self.index, &other.index].map(|index| index.models.get(model)?.parameters.get(&name));
                let (first, second) = match sides {
                    [Some(first), Some(second)] => (first, second),
                    [first, _] => {
                        tell(None, only_in(first.is_some()));
                        continue;
                    }
                };
                if first.shape != second.shape {
                    let (first, second) = (first.shape.clone(), second.shape.clone());
                    tell(None, DifferenceKind::Shape { first, second });
                    continue;
                }
                for array in BTreeSet::from_iter(first.arrays.keys().chain(second.arrays.keys())) {
                    let shapes = [first, second].map(|entry| entry.shape_of(array));
                    let boxes = |entry: &ParameterEntry| entry.arrays.get(array).cloned();
                    let (Some(first), Some(second)) = (boxes(first), boxes(second)) else {
                        tell(Some(array.clone()), only_in(first.arrays.contains_key(array)));
                        continue;
                    };
                    if shapes[0] != shapes[1] {
                        let [first, second] = shapes.map(<[usize]>::to_vec);
                        tell(Some(array.clone()), DifferenceKind::Shape { first, second });
                        continue;
                    }
                    let elements = shapes[0].iter().product();
                    let mut found = Found::default();
                    let (mut a, mut b) = (vec![0.0; PIECE.min(elements)], vec![0.0; PIECE.min(elements)]);
                    for start in (0..elements).step_by(PIECE) {
                        let piece = start..(start + PIECE).min(elements);
                        let (a, b) = (&mut a[..piece.len()], &mut b[..piece.len()]);
                        self.files.read(&first, piece.clone(), a)?;
                        other.files.read(&second, piece, b)?;
                        a.iter().zip(b.iter()).for_each(|(a, b)| found.compare(*a, *b));
                    }
                    if found.changed > 0 {
                        let kind = DifferenceKind::Values {
                            changed: found.changed,
                            elements,
                            max_abs_difference: Some(found.furthest).filter(|furthest| furthest.is_finite()),
                        };
                        tell(Some(array.clone()), kind);
                    }
                }
            }
        }
        Ok(())
    }
}

fn only_in(first: bool) -> DifferenceKind {
    if first {
        DifferenceKind::OnlyInFirst
    } else {
        DifferenceKind::OnlyInSecond
    }
}

#[derive(Debug, Default)]
struct Found {
    changed: usize,
    furthest: f64,
}

impl Found {
    fn compare(&mut self, a: f32, b: f32) {
        if a.to_bits() != b.to_bits() {
            self.changed += 1;
            let distance = if a == b {
                0.0
            } else {
                (f64::from(a) - f64::from(b)).abs()
            };
            // `max` alone would lose what is not a number.
            self.furthest = if distance.is_nan() {
                f64::INFINITY
            } else {
                self.furthest.max(distance)
            };
        }
    }
}
