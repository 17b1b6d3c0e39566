//! What lies between parameters and behind them, and what memory held before, has no part in anything.

use super::parity::{SHARDED, WIDTH, builder, mean_square, rows};
use super::{bits, flat, on_ranks, values};
use candle_core::Module;
use candle_nn::linear;
use sconce_collectives::{Buffer, Collective, Communicator, Job, Result, Traffic};
use sconce_zero::{AdamW, DataParallel, Engine, EngineOptions, Norm, ShardingStrategy, ZeroStage, unit};
use std::sync::Arc;

/// A group whose fresh memory is full of what is no number.
#[derive(Debug)]
struct Dirty(Arc<dyn Communicator>);

impl Communicator for Dirty {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn size(&self) -> usize {
        self.0.size()
    }

    fn backend(&self) -> &'static str {
        self.0.backend()
    }

    fn execute(&self, collective: Collective<'_>) -> Result<()> {
        self.0.execute(collective)
    }

    fn start(&self, job: Job) {
        self.0.start(job);
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        let mut buffer = self.0.allocate(bytes)?;
        buffer.as_mut_slice::<u8>().fill(0xff);
        Ok(buffer)
    }

    fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Arc<dyn Communicator>>> {
        self.0.split(color, key)
    }

    fn traffic(&self) -> Vec<Traffic> {
        self.0.traffic()
    }

    fn abort(&self, reason: &str) {
        self.0.abort(reason);
    }
}

#[test]
fn what_is_no_number_in_fresh_memory_reaches_nothing() {
    let strategies: [fn() -> Box<dyn ShardingStrategy>; 4] = [
        || Box::new(DataParallel),
        || Box::new(ZeroStage::One),
        || Box::new(ZeroStage::Two),
        || Box::new(SHARDED),
    ];
    for world in 1..=4 {
        for strategy in strategies {
            let run = |is_dirty: bool| {
                on_ranks(world, |communicator| {
                    let group: Arc<dyn Communicator> = if is_dirty {
                        Arc::new(Dirty(communicator))
                    } else {
                        communicator
                    };
                    let strategy = strategy();
                    let options = EngineOptions {
                        strategy,
                        ..super::buckets(600, 1000)
                    };
                    let engine = Engine::new(Arc::clone(&group), options).unwrap();
                    let vb = builder(&engine);
                    let layer = |name: &str, to| unit(vb.clone(), name, |vb| linear(WIDTH, to, vb)).unwrap();
                    let (first, last) = (layer("first", WIDTH), layer("last", 1));
                    engine.set_optimizer(Box::new(AdamW::default())).unwrap();
                    let mut found = Vec::new();
                    for step in 0..3 {
                        let hidden = first.forward(&rows(step, group.rank())).unwrap().tanh().unwrap();
                        let loss = mean_square(&last.forward(&hidden).unwrap()).unwrap();
                        engine.backward(&loss, true).unwrap();
                        for norm in [Norm::L1, Norm::L2, Norm::L3, Norm::Infinity] {
                            found.push(engine.grad_norm_of(norm).unwrap() as f32);
                        }
                        engine.clip_grad_norm(0.1).unwrap();
                        engine.step(0.1).unwrap();
                        engine.zero_grad();
                        found.extend(flat(&loss));
                    }
                    found.extend(values(&engine));
                    assert!(found.iter().all(|value| value.is_finite()));
                    bits(&found)
                })
            };
            assert_eq!(run(true), run(false), "world {world}");
        }
    }
}
