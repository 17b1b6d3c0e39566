//! Loss scales, against traces of DeepSpeed and PyTorch (see `fixtures/schedules/README.md`) and the rules' edges.

use sconce_zero::{BackoffScaling, Error, HysteresisScaling, LossScaleState, LossScaler, LossScaling};
use serde_json::Value;
use std::path::Path;

pub(super) fn cases(peer: &str) -> Vec<Value> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/schedules/loss_scale.json");
    let cases: Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    cases[peer].as_array().unwrap().clone()
}

pub(super) fn overflows(case: &Value) -> Vec<bool> {
    let flags = case["overflow"].as_array().unwrap().iter();
    flags.map(|flag| flag.as_u64() == Some(1)).collect()
}

pub(super) fn numbers(case: &Value, name: &str) -> Vec<f64> {
    let values = case[name].as_array().unwrap().iter();
    values.map(|value| value.as_f64().unwrap()).collect()
}

pub(super) fn deepspeed(case: &Value) -> LossScaling {
    let arguments = &case["args"];
    LossScaling::Hysteresis(HysteresisScaling {
        initial_scale: arguments["init_scale"].as_f64().unwrap(),
        window: arguments["scale_window"].as_u64().unwrap(),
        hysteresis: arguments["delayed_shift"].as_u64().unwrap() as u32,
        consecutive_hysteresis: arguments["consecutive_hysteresis"].as_bool().unwrap(),
        minimum: arguments["min_scale"].as_f64().unwrap(),
        fail_at_minimum: arguments["raise_error_at_min_scale"].as_bool().unwrap_or(true),
    })
}

pub(super) fn torch(case: &Value) -> LossScaling {
    let arguments = &case["args"];
    let default = BackoffScaling::default();
    let number = |name: &str, default| arguments[name].as_f64().unwrap_or(default);
    LossScaling::Backoff(BackoffScaling {
        initial_scale: number("init_scale", default.initial_scale),
        growth_factor: number("growth_factor", default.growth_factor),
        backoff_factor: number("backoff_factor", default.backoff_factor),
        growth_interval: arguments["growth_interval"].as_u64().unwrap_or(default.growth_interval),
    })
}

#[test]
fn deepspeeds_scales_are_followed_exactly_to_its_error_at_the_minimum() {
    let cases = cases("deepspeed");
    assert_eq!(cases.len(), 6);
    for (number, case) in cases.iter().enumerate() {
        let mut scaler = LossScaler::new(deepspeed(case)).unwrap();
        let (overflows, expected) = (overflows(case), numbers(case, "scale_after"));
        for (step, (overflow, expected)) in overflows.iter().zip(&expected).enumerate() {
            scaler.update(*overflow).unwrap();
            assert_eq!(scaler.scale(), *expected, "case {number}, update {step}");
        }
        let fails = case["fails"].as_bool().unwrap();
        assert_eq!(overflows.len(), expected.len() + usize::from(fails));
        if fails {
            let before = scaler.clone();
            let error = scaler.update(overflows[expected.len()]).unwrap_err();
            assert!(matches!(error, Error::LossScaleAtMinimum { minimum: 1.0 }), "{error}");
            assert_eq!(scaler, before, "case {number}");
        }
    }
}

#[test]
fn pytorchs_scales_and_growth_trackers_are_followed_exactly() {
    let cases = cases("torch");
    assert_eq!(cases.len(), 4);
    for (number, case) in cases.iter().enumerate() {
        let mut scaler = LossScaler::new(torch(case)).unwrap();
        let (scales, trackers) = (numbers(case, "scale_after"), numbers(case, "growth_tracker_after"));
        let overflows = overflows(case);
        assert_eq!((overflows.len(), trackers.len()), (scales.len(), scales.len()));
        for (step, overflow) in overflows.into_iter().enumerate() {
            scaler.update(overflow).unwrap();
            // The peer's scales are f32; the JSON reader is exact to an f64's last bit but one.
            let expected = f64::from(scales[step] as f32);
            assert_eq!(scaler.scale(), expected, "case {number}, update {step}");
            let tracker = scaler.state().since_change as f64;
            assert_eq!(tracker, trackers[step], "case {number}, update {step}");
        }
    }
}

#[test]
fn a_static_scale_never_changes() {
    let mut scaler = LossScaler::new(LossScaling::Static(128.0)).unwrap();
    for step in 0..3000 {
        scaler.update(step % 3 == 0).unwrap();
        assert_eq!(scaler.scale(), 128.0);
    }
}

#[test]
fn a_restored_scaler_goes_on_as_if_never_interrupted() {
    let all = cases("deepspeed")
        .into_iter()
        .map(|case| (deepspeed(&case), case))
        .chain(cases("torch").into_iter().map(|case| (torch(&case), case)));
    for (scaling, case) in all {
        let mut scaler = LossScaler::new(scaling.clone()).unwrap();
        let steps = numbers(&case, "scale_after").len();
        for overflow in &overflows(&case)[..steps] {
            let mut restored = LossScaler::new(scaling.clone()).unwrap();
            restored.restore(scaler.state()).unwrap();
            scaler.update(*overflow).unwrap();
            restored.update(*overflow).unwrap();
            assert_eq!(restored, scaler);
            scaler = restored;
        }
    }
}

#[test]
fn no_scale_grows_beyond_f32() {
    let largest_power = 2f64.powi(127);
    let hysteresis = LossScaling::Hysteresis(HysteresisScaling {
        initial_scale: largest_power,
        window: 1,
        ..HysteresisScaling::default()
    });
    let backoff = LossScaling::Backoff(BackoffScaling {
        initial_scale: largest_power,
        growth_interval: 1,
        ..BackoffScaling::default()
    });
    for scaling in [hysteresis, backoff] {
        let mut scaler = LossScaler::new(scaling).unwrap();
        (0..5).for_each(|_| scaler.update(false).unwrap());
        assert_eq!(scaler.scale(), largest_power);
    }
}

#[test]
fn bad_settings_are_named_with_value_and_range() {
    let hysteresis = |change: fn(&mut HysteresisScaling)| {
        let mut rule = HysteresisScaling::default();
        change(&mut rule);
        LossScaling::Hysteresis(rule)
    };
    let backoff = |change: fn(&mut BackoffScaling)| {
        let mut rule = BackoffScaling::default();
        change(&mut rule);
        LossScaling::Backoff(rule)
    };
    let cases = [
        (LossScaling::Static(0.0), "loss_scale is 0;"),
        (LossScaling::Static(1e39), "finite as f32"),
        (LossScaling::Static(f64::NAN), "loss_scale is NaN;"),
        (hysteresis(|rule| rule.minimum = 0.0), "minimum loss scale is 0;"),
        (hysteresis(|rule| rule.initial_scale = 0.5), "at least the minimum"),
        (hysteresis(|rule| rule.window = 0), "window is 0;"),
        (hysteresis(|rule| rule.hysteresis = 0), "hysteresis is 0;"),
        (backoff(|rule| rule.initial_scale = -1.0), "initial loss scale is -1;"),
        (backoff(|rule| rule.growth_factor = 1.0), "growth_factor is 1;"),
        (backoff(|rule| rule.backoff_factor = 1.0), "backoff_factor is 1;"),
        (backoff(|rule| rule.growth_interval = 0), "growth_interval is 0;"),
    ];
    for (scaling, part) in cases {
        let text = LossScaler::new(scaling).unwrap_err().to_string();
        assert!(text.contains(part), "{part:?} in {text:?}");
    }
    let mut scaler = LossScaler::new(LossScaling::Static(2.0)).unwrap();
    let broken = LossScaleState {
        scale: f64::INFINITY,
        ..scaler.state()
    };
    let text = scaler.restore(broken).unwrap_err().to_string();
    assert!(text.contains("checkpoint") && text.contains("inf"), "{text}");
}
