//! Frozen parameters: sharded as others, gathered as others, and never touched.

use super::parity::{Case, SHARDED, WIDTH, builder, mean_square, rows, weight};
use super::{bits, engine, flat, on_ranks};
use candle_core::{Module, Tensor};
use candle_nn::{Linear, VarBuilder, linear};
use sconce_zero::{AdamW, DataParallel, EngineOptions, ParameterSet, ShardingStrategy, Unit, ZeroStage, unit};

fn is_base(name: &str) -> bool {
    name.contains("base")
}

/// A frozen matrix with trained factors beside it, as in LoRA.
struct Adapted {
    base: Tensor,
    down: Tensor,
    up: Tensor,
}

impl Adapted {
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Self> {
        Ok(Self {
            base: weight(&vb, (WIDTH, WIDTH), "base")?,
            down: weight(&vb, (WIDTH, 2), "down")?,
            up: weight(&vb, (2, WIDTH), "up")?,
        })
    }

    /// Uses the frozen matrix before, beside and after the adapters.
    fn forward(&self, rows: &Tensor) -> candle_core::Result<Tensor> {
        let hidden = rows.matmul(&self.base)?.tanh()?;
        let adapted = (hidden.matmul(&self.base)? + hidden.matmul(&self.down)?.matmul(&self.up)?)?;
        adapted.gelu()?.matmul(&self.base)
    }
}

fn frozen_layer(vb: &VarBuilder<'_>, name: &str) -> candle_core::Result<Unit<Linear>> {
    unit(vb.pp("base"), name, |vb| linear(WIDTH, WIDTH, vb))
}

fn layer(vb: &VarBuilder<'_>, name: &str) -> candle_core::Result<Unit<Linear>> {
    unit(vb.clone(), name, |vb| linear(WIDTH, WIDTH, vb))
}

#[test]
fn adapters_beside_a_frozen_matrix_in_one_unit() {
    Case::new(
        |vb| {
            let block = |name: &str| unit(vb.clone(), name, Adapted::new);
            Ok([block("first")?, block("second")?, block("third")?])
        },
        |blocks, rows| {
            let mut hidden = rows.clone();
            for block in blocks {
                hidden = (block.run(hidden.clone(), |block, hidden| block.forward(&hidden))? + hidden)?;
            }
            mean_square(&hidden)
        },
    )
    .frozen(is_base)
    .check();
}

#[test]
fn a_block_with_frozen_and_trained_parameters_that_runs_twice() {
    Case::new(
        |vb| unit(vb, "block", Adapted::new),
        |block, rows| {
            let run = |rows| block.run(rows, |block, rows| block.forward(&rows));
            mean_square(&run(run(rows.clone())?)?)
        },
    )
    .frozen(is_base)
    .check();
}

#[test]
fn frozen_units_below_between_and_above_trained_ones() {
    Case::new(
        |vb| {
            Ok([
                frozen_layer(&vb, "bottom")?,
                layer(&vb, "lower")?,
                frozen_layer(&vb, "middle")?,
                frozen_layer(&vb, "middle_again")?,
                layer(&vb, "upper")?,
                frozen_layer(&vb, "top")?,
            ])
        },
        |layers, rows| {
            let mut hidden = rows.clone();
            for layer in layers {
                hidden = layer.forward(&hidden)?.tanh()?;
            }
            mean_square(&hidden)
        },
    )
    .frozen(is_base)
    .check();
}

#[test]
fn a_frozen_unit_that_runs_twice() {
    Case::new(
        |vb| Ok((layer(&vb, "layer")?, frozen_layer(&vb, "twice")?)),
        |(layer, twice), rows| mean_square(&twice.forward(&twice.forward(&layer.forward(rows)?)?.tanh()?)?),
    )
    .frozen(is_base)
    .check();
}

#[test]
fn a_gradient_that_enters_a_frozen_unit_as_its_second_input() {
    Case::new(
        |vb| Ok((layer(&vb, "condition")?, unit(vb.pp("base"), "mixer", Adapted::new)?)),
        |(condition, mixer), rows| {
            let condition = condition.forward(rows)?;
            let output = mixer.run((rows.clone(), condition), |mixer, (rows, condition)| {
                mixer.forward(&(mixer.forward(&rows)? * condition.matmul(&mixer.base)?)?)
            });
            mean_square(&output?)
        },
    )
    .frozen(is_base)
    .check();
}

/// A frozen matrix above a trained unit that lies within, and a trained offset whose gradient comes before all else.
struct Around {
    inner: Unit<Linear>,
    base: Tensor,
    offset: Tensor,
}

#[test]
fn a_frozen_matrix_stays_for_the_gradient_of_a_unit_within_even_when_its_own_units_gradients_have_come() {
    Case::new(
        |vb| {
            unit(vb, "around", |vb| {
                Ok(Around {
                    inner: layer(&vb, "inner")?,
                    base: weight(&vb, (WIDTH, WIDTH), "base")?,
                    offset: weight(&vb, WIDTH, "offset")?,
                })
            })
        },
        |around, rows| {
            // The rows have no gradient: there is no input to wait for.
            let output = around.run(rows.clone(), |around, rows| {
                let hidden = around.inner.forward(&rows)?;
                hidden.matmul(&around.base)?.broadcast_add(&around.offset)
            });
            mean_square(&output?)
        },
    )
    .frozen(is_base)
    .check();
}

#[test]
fn a_frozen_table_that_a_unit_hands_out_is_a_copy() {
    Case::new(
        |vb| {
            Ok((
                unit(vb.pp("base"), "table", |vb| weight(&vb, (WIDTH, WIDTH), "weight"))?,
                layer(&vb, "layer")?,
            ))
        },
        |(table, layer), rows| {
            let [whole, turned, row] = table.run(Vec::new(), |weight, _: Vec<Tensor>| {
                Ok([weight.clone(), weight.t()?, weight.get(3)?])
            })?;
            // By elements: a product of matrices sums in an order that depends on how they lie.
            let hidden = (layer.forward(rows)?.matmul(&whole)?.tanh()? * turned.narrow(0, 0, 5)?)?;
            mean_square(&hidden.broadcast_add(&row)?)
        },
    )
    .frozen(is_base)
    .check();
}

#[test]
fn what_lies_below_all_trained_parameters_is_not_recorded() {
    on_ranks(2, |communicator| {
        let engine = engine(&communicator, options(SHARDED));
        let vb = builder(&engine);
        let (bottom, top) = (frozen_layer(&vb, "bottom").unwrap(), layer(&vb, "top").unwrap());
        let hidden = bottom.forward(&rows(0, 0)).unwrap();
        assert!(!hidden.track_op());
        assert!(top.forward(&hidden).unwrap().track_op());
    });
}

fn options(strategy: impl ShardingStrategy + 'static) -> EngineOptions {
    EngineOptions {
        strategy: Box::new(strategy),
        frozen: ParameterSet::matching(|parameter| is_base(&parameter.name)),
        ..EngineOptions::default()
    }
}

#[test]
fn frozen_parameters_have_no_gradient_and_no_state_never_change_and_are_among_the_tensors() {
    /// Elements of one trained and one frozen layer, with their biases.
    const LAYER: u64 = (WIDTH * WIDTH + WIDTH) as u64;
    let strategies: [fn() -> EngineOptions; 3] = [
        || options(DataParallel),
        || options(ZeroStage::Two),
        || options(SHARDED),
    ];
    for strategy in strategies {
        for world in 1..=3 {
            let (least, padding) = (LAYER.div_ceil(world as u64), 64);
            on_ranks(world, |communicator| {
                let engine = engine(&communicator, strategy());
                let vb = builder(&engine);
                let (lower, upper) = (layer(&vb, "lower").unwrap(), frozen_layer(&vb, "upper").unwrap());
                let tensors = || {
                    let tensors = engine.tensors(true).unwrap();
                    tensors
                        .into_iter()
                        .map(|(name, tensor)| (name, bits(&flat(&tensor))))
                        .collect::<Vec<_>>()
                };
                let before = tensors();
                assert_eq!(before.len(), 4);
                engine.set_optimizer(Box::new(AdamW::default())).unwrap();
                let loss = mean_square(&upper.forward(&lower.forward(&rows(0, 0)).unwrap()).unwrap());
                engine.backward(&loss.unwrap(), true).unwrap();
                engine.step(0.1).unwrap();
                for (before, after) in before.iter().zip(tensors()) {
                    assert_eq!(before.0, after.0);
                    assert_eq!(before.1 == after.1, is_base(&before.0), "{}", before.0);
                }
                let memory = engine.memory();
                assert!(memory.gradients / 4 <= LAYER + padding * world as u64, "{memory:?}");
                assert!(
                    memory.optimizer_state / 8 <= LAYER + padding * world as u64,
                    "{memory:?}"
                );
                assert!(memory.optimizer_state / 8 >= least, "{memory:?}");
            });
        }
    }
}
