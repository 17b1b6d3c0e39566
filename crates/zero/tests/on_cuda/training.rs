//! One training, and all that shows of it.

use super::probe::{Probe, layer, random};
use candle_core::{DType, Device, Tensor};
use sconce_collectives::Communicator;
use sconce_zero::{AdamW, Elements, Engine, EngineOptions, Norm, OptimizerRule, ParameterSet, Stepped, Weights};
use std::sync::Arc;

/// What is trained, and how.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Course {
    pub(crate) dtype: DType,
    pub(crate) rule: fn() -> Box<dyn OptimizerRule>,
    /// Rows of the weights.
    pub(crate) rows: usize,
    pub(crate) norm: Norm,
    /// Whether gradients are clipped by their norm.
    pub(crate) has_norm: bool,
    /// The largest magnitude of a gradient's element.
    pub(crate) limit: Option<f64>,
    /// Whether gradients come to those that have been clipped.
    pub(crate) goes_on_after_clipping: bool,
    /// The step in which a gradient is not finite.
    pub(crate) overflow_in: Option<u64>,
    /// The step in which a unit is left out, whose parameters then have no gradient.
    pub(crate) left_out_in: Option<u64>,
}

impl Default for Course {
    fn default() -> Self {
        Self {
            dtype: DType::F32,
            rule: || Box::new(AdamW::default()),
            rows: 13,
            norm: Norm::L2,
            has_norm: true,
            limit: None,
            goes_on_after_clipping: false,
            overflow_in: None,
            left_out_in: None,
        }
    }
}

/// What came of it.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// Losses, norms, values and state as bits.
    pub(crate) trace: Vec<u32>,
    /// How often the host looked at state on the GPU while steps that are not the first were done.
    pub(crate) accesses_in_training: u64,
    /// How often it did so after the training, to make the trace.
    pub(crate) accesses: u64,
    pub(crate) skipped: u64,
}

/// Trains units and a parameter outside of any.
pub(crate) fn train(
    communicator: &Arc<dyn Communicator>,
    options: EngineOptions,
    course: &Course,
    device: &Device,
) -> Outcome {
    let options = EngineOptions {
        skip_nonfinite: course.overflow_in.is_some(),
        find_unused_parameters: course.left_out_in.is_some(),
        ..options
    };
    let engine = Engine::new(Arc::clone(communicator), options).unwrap();
    let vb = engine
        .var_builder(Weights::Random { seed: 5 }, course.dtype, device)
        .unwrap();
    let layers = ["a", "b", "a"].map(|name| layer(vb.clone(), name, course.rows).unwrap());
    let outside = random(&vb, 11, "outside").unwrap();
    engine.set_optimizer((course.rule)()).unwrap();
    let edit = engine.edit(&ParameterSet::all(), 0, |scope| {
        let values = scope.get("b.weight")?.to_device(&Device::Cpu)?;
        scope.set("b.weight", &(values.to_dtype(DType::F32)? * 0.5)?)
    });
    edit.unwrap();
    let mut trace = Vec::new();
    let (mut before_second, mut skipped) = (0, 0);
    for step in 0..3 {
        if step == 1 {
            before_second = engine.host_accesses();
        }
        let probe = Probe {
            overflows: course.overflow_in == Some(step),
        };
        let backward = |synchronise: bool| {
            let mut loss = outside.apply_op1(probe).unwrap();
            let is_left_out = course.left_out_in == Some(step);
            for layer in layers.iter().skip(usize::from(is_left_out) * 2) {
                let run = move |[weight, bias]: &[Tensor; 2], loss: Tensor| {
                    loss + (weight.apply_op1(probe)? + bias.apply_op1(probe)?)?
                };
                loss = layer.run(loss, run).unwrap();
            }
            engine.backward(&loss, synchronise).unwrap();
            loss.to_scalar::<f32>().unwrap().to_bits()
        };
        trace.extend([backward(false), backward(true)]);
        let clip = || {
            if let Some(limit) = course.limit {
                engine.clip_grad_value(limit).unwrap();
            }
            match course.has_norm {
                true => engine.clip_grad_norm_of(course.norm, 1.0).unwrap(),
                false => 0.0,
            }
        };
        let first = clip();
        if course.goes_on_after_clipping {
            trace.push(backward(true));
        }
        for norm in [first, clip()] {
            trace.extend([norm.to_bits() as u32, (norm.to_bits() >> 32) as u32]);
        }
        skipped += u64::from(engine.step(0.01).unwrap() == Stepped::Skipped);
        engine.zero_grad();
    }
    let before_reading = engine.host_accesses();
    for (_, tensor) in engine.tensors(true).unwrap() {
        let tensor = tensor.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
        let values = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert!(values.iter().all(|value| value.is_finite()));
        trace.extend(values.iter().map(|value| value.to_bits()));
    }
    for tensor in engine.local_tensors().unwrap() {
        let values = tensor.values.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
        trace.extend(values.iter().map(|value| value.to_bits()));
    }
    let visited = engine.visit_state(&mut |piece| {
        let Elements::F32(values) = piece.values else {
            panic!("what is trained has f32 state")
        };
        trace.extend(values.iter().map(|value| value.to_bits()));
        Ok(())
    });
    visited.unwrap();
    Outcome {
        trace,
        accesses_in_training: before_reading - before_second,
        accesses: engine.host_accesses() - before_reading,
        skipped,
    }
}
