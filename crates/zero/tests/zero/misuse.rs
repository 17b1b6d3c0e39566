//! What a user can do wrong is an error that says what to do; never a panic.

use super::oracle::model_of_dtype;
use super::zero_stages::{EVERYTHING, options};
use super::{add, engine, flat, linear_loss, on_ranks, parameters, sgd};
use candle_core::{DType, Device, Tensor};
use candle_nn::Init;
use sconce_collectives::single;
use sconce_zero::{
    Adagrad, Adam, AdamW, DataParallel, DiskOptions, Engine, EngineOptions, Error, Lion, Offloaded, OptimizerRule,
    ParameterInfo, Placement, Residence, Sgd, ShardingStrategy, Tier, Weights, ZeroStage,
};

fn one() -> (Engine, Tensor) {
    let engine = engine(&single(), EngineOptions::default());
    let [p] = parameters(&engine, [("p", 2)]);
    (engine, p)
}

#[track_caller]
pub(crate) fn assert_says<T>(outcome: Result<T, impl std::fmt::Display>, parts: &[&str]) {
    let Err(error) = outcome else {
        panic!("an error was expected")
    };
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{part:?} in {text:?}");
    }
}

#[test]
fn a_loss_of_many_elements_is_refused_and_the_engine_still_works() {
    let (engine, p) = one();
    assert_says(engine.backward(&p.sqr().unwrap(), true), &["[2]", "mean_all"]);
    engine.backward(&p.sqr().unwrap().sum_all().unwrap(), true).unwrap();
}

#[test]
fn a_loss_of_one_element_may_have_any_shape() {
    let (engine, p) = one();
    let loss = linear_loss(&p, &[3.0, 4.0]).reshape((1, 1)).unwrap();
    engine.backward(&loss, true).unwrap();
    assert_eq!(engine.grad_norm().unwrap(), 5.0);
}

#[test]
fn an_optimizer_needs_a_model_and_a_step_needs_an_optimizer() {
    let empty = engine(&single(), EngineOptions::default());
    assert_says(empty.set_optimizer(sgd()), &["var_builder"]);
    let (engine, p) = one();
    engine.backward(&linear_loss(&p, &[1.0, 1.0]), true).unwrap();
    assert_says(engine.step(1.0), &["set an optimizer"]);
}

#[test]
fn bad_settings_are_named_with_value_and_range() {
    let adamw = AdamW::default;
    let sgd = Sgd::default;
    let cases: [(Box<dyn OptimizerRule>, &str, &str); 18] = [
        (
            Box::new(AdamW {
                learning_rate: -1.0,
                ..adamw()
            }),
            "learning_rate",
            "-1",
        ),
        (
            Box::new(AdamW {
                learning_rate: f64::NAN,
                ..adamw()
            }),
            "learning_rate",
            "NaN",
        ),
        (Box::new(AdamW { beta1: 1.0, ..adamw() }), "beta1", "1"),
        (Box::new(AdamW { beta1: -0.1, ..adamw() }), "beta1", "-0.1"),
        (Box::new(AdamW { beta2: 1.5, ..adamw() }), "beta2", "1.5"),
        (
            Box::new(AdamW {
                epsilon: -1e-8,
                ..adamw()
            }),
            "epsilon",
            "-0.00000001",
        ),
        (
            Box::new(AdamW {
                weight_decay: -0.5,
                ..adamw()
            }),
            "weight_decay",
            "-0.5",
        ),
        (
            Box::new(Sgd {
                learning_rate: -1.0,
                ..sgd()
            }),
            "learning_rate",
            "-1",
        ),
        (
            Box::new(Sgd {
                momentum: -0.9,
                ..sgd()
            }),
            "momentum",
            "-0.9",
        ),
        (
            Box::new(Sgd {
                weight_decay: f64::NAN,
                ..sgd()
            }),
            "weight_decay",
            "NaN",
        ),
        (
            Box::new(Sgd {
                dampening: f64::NAN,
                ..sgd()
            }),
            "dampening",
            "NaN",
        ),
        (
            Box::new(Sgd {
                nesterov: true,
                ..sgd()
            }),
            "momentum",
            "nesterov",
        ),
        (
            Box::new(Sgd {
                nesterov: true,
                momentum: 0.9,
                dampening: 0.1,
                ..sgd()
            }),
            "dampening",
            "nesterov",
        ),
        (
            Box::new(Adam {
                beta2: 1.0,
                ..Adam::default()
            }),
            "beta2",
            "1",
        ),
        (
            Box::new(Adagrad {
                learning_rate_decay: -0.1,
                ..Adagrad::default()
            }),
            "learning_rate_decay",
            "-0.1",
        ),
        (
            Box::new(Adagrad {
                initial_accumulator_value: -1.0,
                ..Adagrad::default()
            }),
            "initial_accumulator_value",
            "-1",
        ),
        (
            Box::new(Lion {
                beta1: 1.0,
                ..Lion::default()
            }),
            "beta1",
            "1",
        ),
        (
            Box::new(Lion {
                weight_decay: f64::NAN,
                ..Lion::default()
            }),
            "weight_decay",
            "NaN",
        ),
    ];
    for (rule, setting, part) in cases {
        let (engine, _) = one();
        assert_says(engine.set_optimizer(rule), &[setting, part]);
    }
    let (engine, p) = one();
    engine.backward(&linear_loss(&p, &[1.0, 1.0]), true).unwrap();
    for max_norm in [0.0, -1.0, f64::NAN] {
        assert_says(engine.clip_grad_norm(max_norm), &["max_norm", &max_norm.to_string()]);
    }
}

/// Picks a kind of state.
type Kind = fn(&mut Placement) -> &mut Residence;

/// Shards one kind of state of one parameter.
#[derive(Debug)]
struct Partly(Kind);

impl ShardingStrategy for Partly {
    fn name(&self) -> &str {
        "partly"
    }

    fn place(&self, parameter: &ParameterInfo) -> Placement {
        let mut placement = Placement::REPLICATED;
        if parameter.name == "b" {
            *self.0(&mut placement) = Residence::Sharded;
        }
        placement
    }
}

#[test]
fn a_placement_that_cannot_be_done_is_refused_with_parameter_and_reason() {
    let kinds: [(Kind, &str); 2] = [
        (|placement| &mut placement.parameter, "shard its optimizer state too"),
        (|placement| &mut placement.gradient, "needs the whole gradient"),
    ];
    for (kind, text) in kinds {
        let options = EngineOptions {
            strategy: Box::new(Partly(kind)),
            ..EngineOptions::default()
        };
        let engine = engine(&single(), options);
        parameters(&engine, [("a", 2), ("b", 2)]);
        let outcome = engine.set_optimizer(sgd());
        assert!(matches!(outcome, Err(Error::UnsupportedPlacement { .. })));
        assert_says(outcome, &["partly", text, "\"b\""]);
    }
}

#[test]
fn a_parameter_of_another_dtype_is_refused_by_name() {
    for dtype in [DType::U8, DType::I64, DType::F64] {
        let engine = engine(&single(), EngineOptions::default());
        let vb = engine
            .var_builder(Weights::Random { seed: 1 }, dtype, &Device::Cpu)
            .unwrap();
        assert_says(
            vb.pp("layer").get((2, 3), "weight"),
            &["layer.weight", dtype.as_str(), "f32"],
        );
        assert!(engine.parameters().is_empty());
    }
}

#[test]
fn one_name_with_two_shapes_is_refused() {
    let engine = engine(&single(), EngineOptions::default());
    let vb = engine
        .var_builder(Weights::Random { seed: 1 }, DType::F32, &Device::Cpu)
        .unwrap();
    vb.get((2, 3), "w").unwrap();
    assert_says(vb.get((3, 2), "w"), &["\"w\"", "[2, 3]", "[3, 2]"]);
}

#[test]
fn a_parameter_created_after_the_optimizer_or_after_a_backward_is_refused_and_known_ones_are_not() {
    let (engine, p) = one();
    let vb = engine
        .var_builder(Weights::Random { seed: 1 }, DType::F32, &Device::Cpu)
        .unwrap();
    engine.set_optimizer(sgd()).unwrap();
    assert_says(
        vb.get_with_hints(2, "late", Init::Const(0.0)),
        &["\"late\"", "build the whole model"],
    );
    assert_eq!(vb.get(2, "p").unwrap().id(), p.id());

    let (engine, p) = one();
    engine.backward(&linear_loss(&p, &[1.0, 1.0]), true).unwrap();
    let vb = engine
        .var_builder(Weights::Random { seed: 1 }, DType::F32, &Device::Cpu)
        .unwrap();
    assert_says(
        vb.get_with_hints(2, "late", Init::Const(0.0)),
        &["\"late\"", "build the whole model"],
    );
}

#[test]
fn candles_own_backward_on_a_managed_model_is_refused_before_and_after_the_engines() {
    let (engine, p) = one();
    let loss = linear_loss(&p, &[3.0, 4.0]);
    assert_says(loss.backward(), &["loss.backward()"]);
    engine.backward(&loss, true).unwrap();
    assert_says(loss.backward(), &["loss.backward()"]);
    assert_eq!(engine.grad_norm().unwrap(), 5.0);
}

#[test]
fn an_op_without_backward_is_an_error_of_candle_and_leaves_the_values_alone() {
    let engine = engine(&single(), EngineOptions::default());
    let vb = engine
        .var_builder(Weights::Random { seed: 1 }, DType::F32, &Device::Cpu)
        .unwrap();
    let image = vb.get_with_hints((1, 1, 4, 4), "image", Init::Const(1.0)).unwrap();
    let other = vb.get_with_hints(2, "other", Init::Const(1.0)).unwrap();
    engine.set_optimizer(sgd()).unwrap();
    // Pooling whose stride is not its size has no backward.
    let pooled = image.avg_pool2d_with_stride((3, 3), (1, 1)).unwrap().sum_all().unwrap();
    let outcome = engine.backward(&add(pooled, &linear_loss(&other, &[1.0, 1.0])), true);
    assert!(matches!(outcome, Err(Error::Candle(_))), "{outcome:?}");
    assert!(matches!(engine.step(1.0), Err(Error::Order { .. })));
    assert_eq!(flat(&other), [1.0, 1.0]);
}

#[test]
fn random_weights_need_a_shape() {
    let engine = engine(&single(), EngineOptions::default());
    let vb = engine
        .var_builder(Weights::Random { seed: 1 }, DType::F32, &Device::Cpu)
        .unwrap();
    assert_says(vb.get_unchecked("w"), &["shape"]);
}

#[test]
fn values_can_be_read_on_another_thread_while_the_engine_steps() {
    let engine = engine(&single(), EngineOptions::default());
    let [p] = parameters(&engine, [("p", 100_000)]);
    engine.set_optimizer(sgd()).unwrap();
    engine.backward(&linear_loss(&p, &[1.0; 100_000]), true).unwrap();
    std::thread::scope(|scope| {
        let steps = scope.spawn(|| (0..200).for_each(|_| assert!(engine.step(0.0).is_ok())));
        let expected = flat(&p);
        while !steps.is_finished() {
            assert_eq!(flat(&p), expected);
        }
    });
}

#[test]
fn parameters_are_averaged_only_where_every_rank_has_all_it_updates_in_memory() {
    let folder = tempfile::tempdir().unwrap();
    let on_disk = || EngineOptions {
        disk: Some(DiskOptions {
            folder: folder.path().into(),
            sub_group_elements: 100,
        }),
        ..options(Offloaded {
            strategy: Box::new(DataParallel),
            parameters: Tier::Device,
            optimizer_state: Tier::Disk,
        })
    };
    let cases: [(&(dyn Fn() -> EngineOptions + Sync), &str); 3] = [
        (&|| options(ZeroStage::One), "use data parallelism"),
        (&|| options(EVERYTHING), "use data parallelism"),
        (&on_disk, "keep optimizer state in memory"),
    ];
    for (options, hint) in cases {
        on_ranks(2, |communicator| {
            let engine = engine(&communicator, options());
            let _model = model_of_dtype(&engine, DType::BF16);
            engine.set_optimizer(sgd()).unwrap();
            assert_says(engine.step_locally(true), &["local SGD", hint]);
            assert_says(engine.average_parameters(), &["local SGD", hint]);
        });
    }
}
