//! A model that is sharded never lies in memory as a whole: measured on the process, hence a program of its own.

#![cfg(target_os = "linux")]

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

/// Returns the memory of this process that is its own, in bytes: without what ranks share, which would count once for
/// every rank that maps it.
fn own_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    let kibibytes: u64 = line.trim_matches([' ', '\t', 'k', 'B']).parse().unwrap();
    kibibytes << 10
}

#[test]
fn four_ranks_hold_one_model_together_from_its_making_to_its_step() {
    let (before, everyone) = (own_memory(), Barrier::new(RANKS));
    let check = |phase: &str, limit: u64| {
        let grown = own_memory().saturating_sub(before);
        assert!(grown < limit + MARGIN, "{phase}: {} MiB of own memory", grown >> 20);
        grown
    };
    std::thread::scope(|scope| {
        for communicator in shm::threads(RANKS, &Options::default()).unwrap() {
            let (everyone, check) = (&everyone, &check);
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
                    let weight = unit(vb.clone(), &number.to_string(), |vb| {
                        vb.get_with_hints((SIDE, SIDE), "weight", Init::Const(0.001))
                    });
                    // All ranks' shares of all units there are, and what is being loaded.
                    check("building", MODEL + RANKS as u64 * UNIT);
                    weight.unwrap()
                };
                let units: Vec<Unit<Tensor>> = (0..UNITS).map(matrix).collect();
                engine.set_optimizer(Box::new(Sgd::default())).unwrap();
                assert_eq!(engine.memory().total(), MODEL / RANKS as u64);
                everyone.wait();
                // The shares are in memory that ranks share.
                check("built", 0);
                everyone.wait();
                let mut hidden = Tensor::ones((1, SIDE), DType::F32, &Device::Cpu).unwrap();
                for unit in &units {
                    hidden = unit.run(hidden, |weight, hidden| hidden.matmul(weight)).unwrap();
                    check("forward", RANKS as u64 * 2 * UNIT);
                }
                everyone.wait();
                let grown = check("after the forward", RANKS as u64 * UNIT);
                println!("{} KiB of own memory after the forward", grown >> 10);
                assert_eq!(engine.memory().gathered_peak, UNIT);
            });
        }
    });
}
