//! Every schedule, against the traces of transformers, DeepSpeed and torch.

use super::fixture;
use sconce_core::Schedule;
use sconce_core::schedule::*;
use serde_json::Value;

const TOLERANCE: f64 = 1e-12;

#[test]
fn every_schedule_follows_its_peers_trace_to_twelve_digits() {
    let table = fixture("learning_rates.json");
    let cases = table["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 37);
    for case in cases {
        let schedule = schedule(case);
        let base = case["base_lr"].as_f64().unwrap();
        let rates = case["lr"].as_array().unwrap();
        assert_eq!(rates.len(), 201);
        for (step, expected) in rates.iter().enumerate() {
            let found = schedule.learning_rate(base, step as u64);
            let expected = expected.as_f64().unwrap();
            assert!(
                (found - expected).abs() <= TOLERANCE * expected.abs(),
                "{} {}, step {step}: {found:?}, expected {expected:?}",
                case["name"],
                case["args"]
            );
        }
    }
}

#[test]
fn one_cycle_schedules_move_the_first_beta_as_their_peers_do() {
    let table = fixture("learning_rates.json");
    let cases = table["cases"].as_array().unwrap();
    let mut compared = 0;
    for case in cases.iter().filter(|case| case.get("betas0").is_some()) {
        let args = Arguments(&case["args"]);
        let moves = case["name"] == "OneCycleLR" || args.0["cycle_momentum"] == true;
        for (step, expected) in case["betas0"].as_array().unwrap().iter().enumerate() {
            let found = match case["name"].as_str().unwrap() {
                "OneCycle" => one_cycle(args).beta1(step as u64),
                _ => one_cycle_lr(args).beta1(step as u64),
            };
            assert_eq!(found.is_some(), moves, "{}", case["args"]);
            if let Some(found) = found {
                let expected = expected.as_f64().unwrap();
                assert!(
                    (found - expected).abs() <= TOLERANCE,
                    "{} step {step}: {found}, expected {expected}",
                    case["name"]
                );
                compared += 1;
            }
        }
    }
    assert_eq!(compared, 2 * 201);
}

#[test]
fn schedules_of_no_steps_give_finite_rates() {
    let schedules: [Box<dyn Schedule>; 12] = [
        Box::new(ConstantWithWarmup { warmup_steps: 0 }),
        Box::new(CosineSchedule {
            warmup_steps: 0,
            total_steps: 0,
            cycles: 0.5,
        }),
        Box::new(CosineWithRestartsSchedule {
            warmup_steps: 3,
            total_steps: 1,
            cycles: 0,
        }),
        Box::new(CosineWithMinimumSchedule {
            warmup_steps: 0,
            total_steps: 0,
            cycles: 0.5,
            minimum: MinimumRate::Absolute(0.1),
        }),
        Box::new(PolynomialSchedule {
            warmup_steps: 4,
            total_steps: 2,
            power: 2.0,
            end: 0.1,
        }),
        Box::new(InverseSquareRootSchedule {
            warmup_steps: 0,
            timescale: Some(0),
        }),
        Box::new(StepLr {
            step_size: 0,
            factor: 0.5,
        }),
        Box::new(OneCycle {
            rising_steps: 0,
            ..OneCycle::new(0.1, 1.0)
        }),
        Box::new(OneCycleLr::new(1.0, 0)),
        Box::new(LrRangeTest {
            step_size: 0,
            ..LrRangeTest::default()
        }),
        Box::new(WarmupDecayLr {
            warmup: WarmupLr {
                warmup_steps: 0,
                ..WarmupLr::default()
            },
            total_steps: 0,
        }),
        Box::new(WarmupCosineLr {
            warmup_steps: 0,
            ..WarmupCosineLr::new(0)
        }),
    ];
    for schedule in schedules {
        for base in [0.0, 1.0] {
            for step in (0..10).chain([u64::MAX]) {
                let rate = schedule.learning_rate(base, step);
                assert!(rate.is_finite() && rate >= 0.0, "{schedule:?}, step {step}: {rate}");
            }
        }
    }
}

#[derive(Clone, Copy)]
struct Arguments<'a>(&'a Value);

impl Arguments<'_> {
    fn steps(self, name: &str) -> u64 {
        self.0[name].as_u64().unwrap_or_else(|| panic!("{name} in {}", self.0))
    }

    fn optional_steps(self, name: &str) -> Option<u64> {
        self.0[name].as_u64()
    }

    fn number(self, name: &str) -> f64 {
        self.0[name].as_f64().unwrap_or_else(|| panic!("{name} in {}", self.0))
    }

    fn number_or(self, name: &str, default: f64) -> f64 {
        self.0[name].as_f64().unwrap_or(default)
    }

    fn text(self, name: &str) -> Option<&'static str> {
        ["log", "linear", "cosine", "1-sqrt"]
            .into_iter()
            .find(|known| self.0[name] == **known)
    }
}

fn schedule(case: &Value) -> Box<dyn Schedule> {
    let args = Arguments(&case["args"]);
    let warmup_steps = args.optional_steps("num_warmup_steps").unwrap_or(0);
    let total_steps = args.optional_steps("num_training_steps").unwrap_or(0);
    let cycles = args.number_or("num_cycles", 0.5);
    let minimum = match args.0["min_lr"].as_f64() {
        Some(rate) => MinimumRate::Absolute(rate),
        None => MinimumRate::Relative(args.number_or("min_lr_rate", 0.0)),
    };
    match case["name"].as_str().unwrap() {
        "linear" => Box::new(LinearSchedule {
            warmup_steps,
            total_steps,
        }),
        "cosine" => Box::new(CosineSchedule {
            warmup_steps,
            total_steps,
            cycles,
        }),
        "cosine_with_restarts" => Box::new(CosineWithRestartsSchedule {
            warmup_steps,
            total_steps,
            cycles: args.optional_steps("num_cycles").unwrap_or(1),
        }),
        "cosine_with_min_lr" => Box::new(CosineWithMinimumSchedule {
            warmup_steps,
            total_steps,
            cycles,
            minimum,
        }),
        "cosine_warmup_with_min_lr" => Box::new(CosineWarmupWithMinimumSchedule {
            warmup_steps,
            total_steps,
            cycles,
            minimum,
            warmup_rate: args.0["warmup_lr_rate"].as_f64(),
        }),
        "polynomial" => Box::new(PolynomialSchedule {
            warmup_steps,
            total_steps,
            power: args.number_or("power", 1.0),
            end: args.number_or("lr_end", 1e-7),
        }),
        "constant" => Box::new(ConstantSchedule),
        "constant_with_warmup" => Box::new(ConstantWithWarmup { warmup_steps }),
        "inverse_sqrt" => Box::new(InverseSquareRootSchedule {
            warmup_steps,
            timescale: args.optional_steps("timescale"),
        }),
        "warmup_stable_decay" => Box::new(WarmupStableDecaySchedule {
            warmup_steps,
            stable_steps: args.steps("num_stable_steps"),
            decay_steps: args.steps("num_decay_steps"),
            warmup: curve(args.text("warmup_type").unwrap_or("linear")),
            decay: curve(args.text("decay_type").unwrap_or("cosine")),
            minimum: args.number_or("min_lr_ratio", 0.0),
            cycles,
        }),
        "WarmupLR" => Box::new(warmup(args)),
        "WarmupDecayLR" => Box::new(WarmupDecayLr {
            warmup: warmup(args),
            total_steps: args.steps("total_num_steps"),
        }),
        "WarmupCosineLR" => Box::new(WarmupCosineLr {
            total_steps: args.steps("total_num_steps"),
            warmup_minimum: args.number("warmup_min_ratio"),
            warmup_steps: args.steps("warmup_num_steps"),
            cosine_minimum: args.number("cos_min_ratio"),
            warmup_type: warmup_type(args),
        }),
        "OneCycle" => Box::new(one_cycle(args)),
        "LRRangeTest" => Box::new(LrRangeTest {
            minimum: args.number("lr_range_test_min_lr"),
            step_size: args.steps("lr_range_test_step_size"),
            step_rate: args.number("lr_range_test_step_rate"),
            staircase: args.0["lr_range_test_staircase"] == true,
        }),
        "StepLR" => Box::new(StepLr {
            step_size: args.steps("step_size"),
            factor: args.number("gamma"),
        }),
        "MultiStepLR" => Box::new(MultiStepLr {
            milestones: args.0["milestones"]
                .as_array()
                .unwrap()
                .iter()
                .map(|step| step.as_u64().unwrap())
                .collect(),
            factor: args.number("gamma"),
        }),
        "ExponentialLR" => Box::new(ExponentialLr {
            factor: args.number("gamma"),
        }),
        "CosineAnnealingLR" => Box::new(CosineAnnealingLr {
            half_period: args.steps("T_max"),
            minimum: args.number("eta_min"),
        }),
        "LinearLR" => Box::new(LinearLr {
            start_factor: args.number("start_factor"),
            end_factor: args.number("end_factor"),
            total_steps: args.steps("total_iters"),
        }),
        "OneCycleLR" => Box::new(one_cycle_lr(args)),
        other => panic!("the fixture has a schedule {other}"),
    }
}

fn curve(name: &str) -> Curve {
    match name {
        "linear" => Curve::Linear,
        "cosine" => Curve::Cosine,
        _ => Curve::OneMinusSquareRoot,
    }
}

fn warmup_type(args: Arguments<'_>) -> WarmupType {
    match args.text("warmup_type") {
        Some("linear") => WarmupType::Linear,
        _ => WarmupType::Log,
    }
}

fn warmup(args: Arguments<'_>) -> WarmupLr {
    WarmupLr {
        minimum: args.number("warmup_min_lr"),
        maximum: Some(args.number("warmup_max_lr")),
        warmup_steps: args.steps("warmup_num_steps"),
        warmup_type: warmup_type(args),
    }
}

fn one_cycle(args: Arguments<'_>) -> OneCycle {
    let default = OneCycle::new(args.number("cycle_min_lr"), args.number("cycle_max_lr"));
    OneCycle {
        decay_rate: args.number_or("decay_lr_rate", 0.0),
        rising_steps: args.steps("cycle_first_step_size"),
        falling_steps: args.optional_steps("cycle_second_step_size"),
        rising_stairs: args.optional_steps("cycle_first_stair_count").unwrap_or(0),
        falling_stairs: args.optional_steps("cycle_second_stair_count"),
        decay_steps: args.optional_steps("decay_step_size").unwrap_or(0),
        beta1: (args.0["cycle_momentum"] == true).then(|| Beta1Cycle {
            minimum: args.number("cycle_min_mom"),
            maximum: args.number("cycle_max_mom"),
            decay_rate: args.number("decay_mom_rate"),
        }),
        ..default
    }
}

fn one_cycle_lr(args: Arguments<'_>) -> OneCycleLr {
    OneCycleLr {
        rising_share: args.number("pct_start"),
        ..OneCycleLr::new(args.number("max_lr"), args.steps("total_steps"))
    }
}
