//! A model that tells when it computes: units of square matrices, one after the other.

use super::parity::{builder, mean_square, weight};
use super::watched::{Event, Watched};
use candle_core::{CpuStorage, CustomOp1, Device, Layout, Result, Shape, Tensor};
use sconce_zero::{Engine, Unit, unit};
use std::sync::Arc;

/// Rows and columns of every matrix.
const SIDE: usize = 8;
/// Bytes of a matrix.
pub(crate) const MATRIX: u64 = (SIDE * SIDE * size_of::<f32>()) as u64;

/// Units of as many matrices as each number says.
pub(crate) struct Stack {
    units: Vec<Unit<Vec<Tensor>>>,
    watched: Arc<Watched>,
}

impl Stack {
    pub(crate) fn new(engine: &Engine, watched: &Arc<Watched>, matrices: &[usize]) -> Self {
        let vb = builder(engine);
        let matrices = matrices.iter().enumerate().map(|(number, count)| {
            unit(vb.clone(), &number.to_string(), |vb| {
                let matrix = |number: usize| weight(&vb, (SIDE, SIDE), &number.to_string());
                (0..*count).map(matrix).collect()
            })
        });
        Self {
            units: matrices.collect::<Result<_>>().unwrap(),
            watched: Arc::clone(watched),
        }
    }

    /// Computes a loss from rows that depend on `seed`.
    pub(crate) fn loss(&self, seed: usize) -> Tensor {
        let value = |i: usize| (0.7 * (i + 31 * seed) as f32).sin();
        let rows = (0..3 * SIDE).map(value).collect();
        let mut hidden = Tensor::from_vec(rows, (3, SIDE), &Device::Cpu).unwrap();
        for (number, unit) in self.units.iter().enumerate() {
            let output = unit.run_once(hidden, |matrices, hidden| {
                let mut hidden = self.noted(hidden, Event::BackwardEnds(number))?;
                for matrix in matrices {
                    hidden = hidden.matmul(matrix)?.tanh()?;
                }
                self.watched.note(Event::Forward(number));
                self.noted(hidden, Event::BackwardBegins(number))
            });
            hidden = output.unwrap();
        }
        mean_square(&hidden).unwrap()
    }

    /// Computes forwards and backwards.
    pub(crate) fn train(&self, engine: &Engine, synchronise: bool) {
        engine.backward(&self.loss(0), synchronise).unwrap();
    }

    /// Computes `backwards` times, of which the last synchronises, and updates the parameters.
    pub(crate) fn step(&self, engine: &Engine, backwards: usize) {
        (1..=backwards).for_each(|number| self.train(engine, number == backwards));
        engine.step(0.1).unwrap();
        engine.zero_grad();
    }

    /// Hands a tensor on; notes `event` when its gradient is known.
    fn noted(&self, tensor: Tensor, event: Event) -> Result<Tensor> {
        let watched = Arc::clone(&self.watched);
        tensor.apply_op1(Note { watched, event })
    }
}

struct Note {
    watched: Arc<Watched>,
    event: Event,
}

impl CustomOp1 for Note {
    fn name(&self) -> &'static str {
        "note"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (start, end) = layout.contiguous_offsets().expect("the model's tensors are contiguous");
        let CpuStorage::F32(values) = storage else {
            candle_core::bail!("the model is f32")
        };
        Ok((CpuStorage::F32(values[start..end].to_vec()), layout.shape().clone()))
    }

    fn bwd(&self, _arg: &Tensor, _res: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.watched.note(self.event);
        Ok(Some(gradient.clone()))
    }
}
