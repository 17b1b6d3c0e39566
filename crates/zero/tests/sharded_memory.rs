//! A model that is sharded never lies in memory as a whole: measured on the process, hence a program of its own.

use candle_core::{DType, Device, Tensor};
use candle_nn::Init;
use sconce_collectives::{Options, shm};
use sconce_zero::{Engine, EngineOptions, Gathering, Sgd, Unit, Weights, ZeroStage, unit};
use std::sync::Barrier;

const RANKS: usize = 4;
const UNITS: usize = 64;
const SIDE: usize = 512;
/// Bytes of one unit, 1 MiB, and of the whole model.
const UNIT: u64 = (4 * SIDE * SIDE) as u64;
const MODEL: u64 = UNITS as u64 * UNIT;
/// Threads, graphs and the allocator.
const MARGIN: u64 = 16 << 20;

/// Returns a line of this process's status, in bytes.
fn status(key: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(key)).unwrap();
    let kibibytes: u64 = line.trim_matches([':', ' ', '\t', 'k', 'B']).parse().unwrap();
    kibibytes << 10
}

#[cfg(target_os = "linux")]
#[test]
fn four_ranks_hold_one_model_together_from_its_making_to_its_step() {
    let (before, everyone) = (status("VmRSS"), Barrier::new(RANKS));
    let grown = |key: &str, from: u64| status(key).saturating_sub(from);
    std::thread::scope(|scope| {
        for communicator in shm::threads(RANKS, &Options::default()).unwrap() {
            let (everyone, grown) = (&everyone, &grown);
            scope.spawn(move || {
                let options = EngineOptions {
                    strategy: Box::new(ZeroStage::Three {
                        persistence_threshold: 0,
                    }),
                    gathering: Gathering {
                        prefetch_elements: 0,
                        ..Gathering::default()
                    },
                    ..EngineOptions::default()
                };
                let engine = Engine::new(communicator, options).unwrap();
                let vb = engine
                    .var_builder(Weights::Random { seed: 1 }, DType::F32, &Device::Cpu)
                    .unwrap();
                let matrix = |number: usize| {
                    unit(vb.clone(), &number.to_string(), |vb| {
                        vb.get_with_hints((SIDE, SIDE), "weight", Init::Const(0.001))
                    })
                };
                let units: Vec<Unit<Tensor>> = (0..UNITS).map(|number| matrix(number).unwrap()).collect();
                engine.set_optimizer(Box::new(Sgd::default())).unwrap();
                everyone.wait();
                assert_eq!(engine.memory().total(), MODEL / RANKS as u64);
                let peak = grown("VmHWM", before);
                println!("built: {} MiB at most for a model of {} MiB", peak >> 20, MODEL >> 20);
                assert!(peak < MODEL + MARGIN, "{} MiB", peak >> 20);
                everyone.wait();

                let anonymous = status("RssAnon");
                everyone.wait();
                let mut hidden = Tensor::ones((1, SIDE), DType::F32, &Device::Cpu).unwrap();
                for unit in &units {
                    hidden = unit.run(hidden, |weight, hidden| hidden.matmul(weight)).unwrap();
                }
                everyone.wait();
                let after = grown("RssAnon", anonymous);
                println!("forward: {} MiB more on {RANKS} ranks", after >> 20);
                // Each rank may still hold the last unit.
                assert!(after < RANKS as u64 * UNIT + MARGIN, "{} MiB", after >> 20);
                assert_eq!(engine.memory().gathered_peak, UNIT);
                everyone.wait();
            });
        }
    });
}
