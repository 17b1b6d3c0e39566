//! Parts that compute again keep their inputs only: measured by the allocator, hence a program of its own.

use candle_core::{DType, Device, Tensor};
use candle_nn::Init;
use peak_alloc::PeakAlloc;
use sconce_zero::{Engine, EngineOptions, Sgd, Unit, UnitPolicy, Weights, unit};

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

const PARTS: usize = 32;
/// Ops in each part, each of which keeps a tensor for its backward.
const OPS: usize = 8;
const ROWS: usize = 4096;
const WIDTH: usize = 16;
/// Bytes of one activation.
const ACTIVATION: usize = ROWS * WIDTH * size_of::<f32>();

/// Trains for some steps; returns the most bytes, in activations, that were there at once beyond what was before the step:
/// at the end of the forward, and during forward and backward.
fn measure(recompute: UnitPolicy) -> (f64, f64) {
    let options = EngineOptions {
        recompute,
        ..EngineOptions::default()
    };
    let engine = Engine::new(sconce_collectives::single(), options).unwrap();
    let vb = engine.var_builder(Weights::Random { seed: 1 }, DType::F32, &Device::Cpu);
    let vb = vb.unwrap();
    let part = |number: usize| {
        let init = Init::Randn { mean: 0.0, stdev: 0.2 };
        let build = |vb: candle_nn::VarBuilder<'_>| vb.get_with_hints((WIDTH, WIDTH), "weight", init);
        unit(vb.clone(), &number.to_string(), build).unwrap()
    };
    let parts: Vec<Unit<Tensor>> = (0..PARTS).map(part).collect();
    engine.set_optimizer(Box::new(Sgd::default())).unwrap();
    let rows = Tensor::ones((ROWS, WIDTH), DType::F32, &Device::Cpu).unwrap();
    let mut found = (0.0, 0.0);
    for _ in 0..2 {
        let before = MEMORY.current_usage();
        MEMORY.reset_peak_usage();
        let in_activations = |bytes: usize| (bytes - before) as f64 / ACTIVATION as f64;
        let mut hidden = rows.clone();
        for part in &parts {
            let forward = |weight: &Tensor, rows: Tensor| {
                let mut hidden = rows.matmul(weight)?;
                for _ in 1..OPS {
                    hidden = hidden.tanh()?;
                }
                Ok(hidden)
            };
            hidden = part.run(hidden, forward).unwrap();
        }
        let loss = hidden.sqr().unwrap().mean_all().unwrap();
        found.0 = in_activations(MEMORY.current_usage());
        engine.backward(&loss, true).unwrap();
        found.1 = in_activations(MEMORY.peak_usage());
        engine.step(0.1).unwrap();
        engine.zero_grad();
    }
    found
}

#[test]
fn activations_shrink_to_the_inputs_of_parts_and_one_part() {
    let (forward, peak) = measure(UnitPolicy::none());
    let of_backward = peak - forward;
    println!("kept: {forward:.1} activations after the forward, {peak:.1} at most");
    assert!(forward > (PARTS * OPS) as f64);
    let (forward, peak) = measure(UnitPolicy::all());
    println!("computed again: {forward:.1} activations after the forward, {peak:.1} at most");
    // The inputs, and the last result with its square.
    assert!(forward < (PARTS + 3) as f64, "{forward}");
    // One part's graph, the copy of its input, and what a backward takes beside the graph.
    assert!(peak < forward + (OPS + 3) as f64 + of_backward, "{peak}");
}
