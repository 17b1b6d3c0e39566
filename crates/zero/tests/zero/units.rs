//! Models cut into units in every way: sharded parameters come to the bits of whole ones.

use super::parity::{Case, SHARDED, WIDTH, builder, mean_square, rows, weight};
use super::{engine, flat, on_ranks, sgd};
use candle_core::{Module, Tensor};
use candle_nn::{Linear, linear};
use sconce_zero::{EngineOptions, Unit, unit};

struct Outer {
    before: Tensor,
    inner: Unit<Linear>,
    after: Tensor,
    /// Smaller than the world.
    tiny: Tensor,
}

impl Outer {
    fn new(vb: candle_nn::VarBuilder<'_>) -> candle_core::Result<Self> {
        Ok(Self {
            before: weight(&vb, (WIDTH, 5), "before")?,
            inner: unit(vb.clone(), "inner", |vb| linear(5, 9, vb))?,
            after: weight(&vb, (9, WIDTH), "after")?,
            tiny: weight(&vb, 1, "tiny")?,
        })
    }
}

impl Module for Outer {
    fn forward(&self, rows: &Tensor) -> candle_core::Result<Tensor> {
        let hidden = self.inner.forward(&rows.matmul(&self.before)?.gelu()?)?.tanh()?;
        hidden.matmul(&self.after)?.broadcast_mul(&self.tiny)
    }
}

#[test]
fn units_within_units() {
    Case::new(
        |vb| {
            unit(vb, "model", |vb| {
                Ok((unit(vb.clone(), "outer", Outer::new)?, weight(&vb, (WIDTH, 2), "head")?))
            })
        },
        |model, rows| {
            let output = model.run(rows.clone(), |(outer, head), rows| outer.forward(&rows)?.matmul(head));
            mean_square(&output?)
        },
    )
    .check();
}

#[test]
fn a_unit_that_runs_three_times_in_one_forward() {
    Case::new(
        |vb| {
            Ok((
                unit(vb.clone(), "layer", |vb| linear(WIDTH, WIDTH, vb))?,
                unit(vb, "head", |vb| linear(WIDTH, 2, vb))?,
            ))
        },
        |(layer, head), rows| {
            let hidden = layer.forward(rows)?.tanh()?;
            let hidden = layer.forward(&layer.forward(&hidden)?.gelu()?)?;
            mean_square(&head.forward(&hidden)?)
        },
    )
    .check();
}

#[test]
fn units_in_branches_that_join() {
    Case::new(
        |vb| {
            let layer = |name: &str| unit(vb.clone(), name, |vb| linear(WIDTH, WIDTH, vb));
            Ok([layer("stem")?, layer("left")?, layer("right")?, layer("head")?])
        },
        |[stem, left, right, head], rows| {
            let hidden = stem.forward(rows)?.tanh()?;
            let joined = (left.forward(&hidden)?.gelu()? * right.forward(&hidden)?)?;
            mean_square(&head.forward(&(joined + hidden)?)?)
        },
    )
    .check();
}

#[test]
fn a_parameter_tied_over_three_units_one_within_another() {
    type Tied = Unit<(Tensor, Tensor)>;
    Case::new(
        |vb| -> candle_core::Result<[Tied; 3]> {
            let tied = |name: &str| {
                unit(vb.clone(), name, |own| {
                    Ok((weight(&vb, (WIDTH, WIDTH), "tied")?, weight(&own, WIDTH, "own")?))
                })
            };
            let outer = unit(vb.clone(), "outer", |own| {
                // Asked for again in the unit around it.
                let inner = tied("inner")?;
                Ok((inner, weight(&vb, (WIDTH, WIDTH), "tied")?, weight(&own, 2, "own")?))
            })?;
            drop(outer);
            Ok([tied("first")?, tied("second")?, tied("third")?])
        },
        |units, rows| {
            let mut hidden = rows.clone();
            for unit in units {
                hidden = unit.run(hidden, |(tied, own), hidden| {
                    hidden.matmul(tied)?.broadcast_mul(own)?.tanh()
                })?;
            }
            mean_square(&hidden)
        },
    )
    .unused()
    .check();
}

#[test]
fn units_with_several_inputs_and_results() {
    type Pair = (Tensor, Tensor);
    Case::new(
        |vb| {
            let pair = |vb: candle_nn::VarBuilder<'_>| -> candle_core::Result<Pair> {
                Ok((weight(&vb, (WIDTH, WIDTH), "a")?, weight(&vb, (WIDTH, WIDTH), "b")?))
            };
            Ok((unit(vb.clone(), "split", pair)?, unit(vb, "join", pair)?))
        },
        |(split, join): &(Unit<Pair>, Unit<Pair>), rows| {
            let results = split.run(rows.clone(), |(a, b), rows| {
                let (left, right) = (rows.matmul(a)?, rows.matmul(b)?);
                let product = (&left * &right)?;
                Ok((vec![left, right], Some(product)))
            });
            let (halves, product) = results?;
            let inputs = ([halves[0].clone(), halves[1].clone()], product);
            let output = join.run(inputs, |(a, b), ([left, right], product)| {
                let sum = (left.matmul(a)? + right.matmul(b)?)?;
                match product {
                    Some(product) => sum + product,
                    None => Ok(sum),
                }
            });
            mean_square(&output?)
        },
    )
    .check();
}

#[test]
fn of_two_results_one_may_be_unused() {
    Case::new(
        |vb| {
            let pair = |vb: candle_nn::VarBuilder<'_>| Ok((weight(&vb, (WIDTH, 3), "a")?, weight(&vb, 3, "b")?));
            unit(vb, "pair", pair)
        },
        |pair: &Unit<(Tensor, Tensor)>, rows| {
            let results = pair.run(rows.clone(), |(a, b), rows| {
                let left = rows.matmul(a)?;
                Ok((left.broadcast_add(b)?, left.exp()?))
            });
            mean_square(&results?.0)
        },
    )
    .check();
}

#[test]
fn a_unit_may_hand_out_its_parameters_and_views_of_them() {
    Case::new(
        |vb| unit(vb, "table", |vb| weight(&vb, (WIDTH, WIDTH), "weight")),
        |table, rows| {
            let [whole, turned] = table.run(Vec::new(), |weight, _: Vec<Tensor>| Ok([weight.clone(), weight.t()?]))?;
            // By elements: a product of matrices sums in an order that depends on how they lie.
            mean_square(&(rows.matmul(&whole)?.tanh()? * turned.narrow(0, 0, 5)?)?)
        },
    )
    .check();
}

#[test]
fn results_of_other_types_pass_a_units_border() {
    Case::new(
        |vb| {
            Ok((
                unit(vb.clone(), "layer", |vb| linear(WIDTH, 3, vb))?,
                unit(vb, "next", |vb| linear(3, 2, vb))?,
            ))
        },
        |(layer, next), rows| {
            let results = layer.run(rows.clone(), |layer, rows| {
                let output = layer.forward(&rows)?;
                let (mask, ids) = (output.ge(0.1)?, output.detach().argmax(1)?);
                Ok((output, (mask, ids)))
            });
            let (output, (mask, ids)) = results?;
            assert_eq!(ids.dims(), [5]);
            let kept = mask.where_cond(&output, &output.affine(0.5, 0.0)?)?;
            mean_square(&next.forward(&kept)?)
        },
    )
    .check();
}

#[test]
fn a_unit_that_is_never_run_keeps_its_values() {
    Case::new(
        |vb| {
            let layer = |name: &str| unit(vb.clone(), name, |vb| linear(WIDTH, WIDTH, vb));
            Ok([layer("first")?, layer("idle")?, layer("last")?])
        },
        |[first, _, last], rows| mean_square(&last.forward(&first.forward(rows)?.tanh()?)?),
    )
    .unused()
    .check();
}

#[test]
fn weights_on_the_left_of_a_product_are_there_until_their_gradient_has_come() {
    Case::new(
        |vb| {
            let matrix = |name: &str| unit(vb.clone(), name, |vb| weight(&vb, (WIDTH, WIDTH), "weight"));
            Ok([matrix("first")?, matrix("second")?, matrix("third")?])
        },
        |units, rows| {
            let mut hidden = rows.t()?.contiguous()?;
            for unit in units {
                // The square of the weight is differentiated after all that comes before it.
                hidden = unit.run(hidden, |weight, hidden| weight.sqr()?.matmul(&hidden)?.tanh())?;
            }
            mean_square(&hidden)
        },
    )
    .check();
}

#[test]
fn a_unit_of_known_parameters_may_be_built_when_the_model_is_in_use() {
    let outputs = on_ranks(2, |communicator| {
        let options = EngineOptions {
            strategy: Box::new(SHARDED),
            ..EngineOptions::default()
        };
        let engine = engine(&communicator, options);
        let vb = builder(&engine);
        let build = || unit(vb.clone(), "layer", |vb| linear(WIDTH, 3, vb)).unwrap();
        let first = build();
        engine.set_optimizer(sgd()).unwrap();
        let input = rows(0, 0);
        let expected = flat(&first.forward(&input).unwrap());
        let (late, empty) = (
            build(),
            unit(vb.clone(), "empty", |_| Ok(candle_nn::Activation::Gelu)).unwrap(),
        );
        empty.forward(&input).unwrap();
        assert_eq!(flat(&late.forward(&input).unwrap()), expected);
        let loss = mean_square(&late.forward(&input).unwrap()).unwrap();
        engine.backward(&loss, true).unwrap();
        assert_eq!(engine.memory().gathered, 0);
        engine.step(0.1).unwrap();
        flat(&first.forward(&input).unwrap()) != expected
    });
    assert_eq!(outputs, [true, true]);
}

#[test]
fn without_sharded_parameters_a_unit_adds_nothing_to_the_graph() {
    let engine = engine(&sconce_collectives::single(), EngineOptions::default());
    let layer = unit(builder(&engine), "layer", |vb| linear(WIDTH, 3, vb)).unwrap();
    let nodes = |output: &Tensor| output.sorted_nodes().len();
    let (input, bare) = (rows(0, 0), layer.module());
    assert_eq!(
        nodes(&layer.forward(&input).unwrap()),
        nodes(&bare.forward(&input).unwrap())
    );
    // Nor does it close the model.
    unit(builder(&engine), "next", |vb| linear(3, 3, vb)).unwrap();
}
