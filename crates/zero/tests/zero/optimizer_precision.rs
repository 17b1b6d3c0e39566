//! Update rules on values of every form, element by element against their formulas in f64.
//!
//! The f64 side starts each step from the rule's own state, so that a wrong element of one step cannot hide in what has
//! been summed up before.

use super::bits;
use half::{bf16, f16};
use sconce_zero::{Adagrad, Adam, AdamW, Gradient, HalfMut, Lion, OptimizerRule, Sgd, StateSlices, Update, Values};
use std::sync::Mutex;

/// One element in f64: update, value, gradient and state to value and state.
type Formula = Box<dyn Fn(&Update, f64, f64, [f64; 3]) -> (f64, [f64; 3])>;

/// Steps that a parameter takes; it need not begin with the first, as after loading a checkpoint.
const STEPS: [u64; 7] = [1, 2, 3, 17, 1_000, 1_000_000, 4_000_000_000];
/// Sizes around those of vectors and pieces.
const SIZES: [usize; 8] = [127, 255, 256, 257, 1023, 1024, 1025, 2307];

/// Algorithm 2 of Loshchilov and Hutter 2019, and algorithm 1 of Kingma and Ba 2015 with an L2 penalty; AMSGrad by Reddi
/// et al. 2018.
fn adam_formula(rule: &AdamW, decoupled: bool) -> Formula {
    let rule = rule.clone();
    Box::new(move |update, p, g, [m, v, largest]| {
        let (rate, t) = (update.learning_rate, update.step as f64);
        let g = if decoupled { g } else { g + rule.weight_decay * p };
        let p = if decoupled { p - rate * rule.weight_decay * p } else { p };
        let m = rule.beta1 * m + (1.0 - rule.beta1) * g;
        let v = rule.beta2 * v + (1.0 - rule.beta2) * g * g;
        let largest = if rule.amsgrad { largest.max(v) } else { 0.0 };
        let used = if rule.amsgrad { largest } else { v };
        let (m_hat, v_hat) = if rule.bias_correction {
            (m / (1.0 - rule.beta1.powf(t)), used / (1.0 - rule.beta2.powf(t)))
        } else {
            (m, used)
        };
        (p - rate * m_hat / (v_hat.sqrt() + rule.epsilon), [m, v, largest])
    })
}

/// PyTorch's page of `torch.optim.SGD`.
fn sgd_formula(rule: &Sgd) -> Formula {
    let rule = rule.clone();
    Box::new(move |update, p, g, [b, ..]| {
        let g = g + rule.weight_decay * p;
        if rule.momentum == 0.0 {
            return (p - update.learning_rate * g, [0.0; 3]);
        }
        let b = if update.step == 1 {
            g
        } else {
            rule.momentum * b + (1.0 - rule.dampening) * g
        };
        let direction = if rule.nesterov { g + rule.momentum * b } else { b };
        (p - update.learning_rate * direction, [b, 0.0, 0.0])
    })
}

/// Algorithm 2 of Chen et al. 2023.
fn lion_formula(rule: &Lion) -> Formula {
    let rule = rule.clone();
    Box::new(move |update, p, g, [m, ..]| {
        let direction = rule.beta1 * m + (1.0 - rule.beta1) * g;
        let sign = f64::from(direction > 0.0) - f64::from(direction < 0.0);
        let p = p * (1.0 - update.learning_rate * rule.weight_decay) - update.learning_rate * sign;
        (p, [rule.beta2 * m + (1.0 - rule.beta2) * g, 0.0, 0.0])
    })
}

/// PyTorch's page of `torch.optim.Adagrad`.
fn adagrad_formula(rule: &Adagrad) -> Formula {
    let rule = rule.clone();
    Box::new(move |update, p, g, [s, ..]| {
        let g = g + rule.weight_decay * p;
        let rate = update.learning_rate / (1.0 + (update.step - 1) as f64 * rule.learning_rate_decay);
        let s = s + g * g;
        (p - rate * g / (s.sqrt() + rule.epsilon), [s, 0.0, 0.0])
    })
}

fn cases() -> Vec<(Box<dyn OptimizerRule>, Formula)> {
    let mut cases: Vec<(Box<dyn OptimizerRule>, Formula)> = Vec::new();
    for (weight_decay, bias_correction, amsgrad) in [
        (0.1, true, false),
        (0.0, true, false),
        (0.1, false, false),
        (0.0, false, false),
        (0.1, true, true),
    ] {
        let decoupled = AdamW {
            weight_decay,
            bias_correction,
            amsgrad,
            ..AdamW::default()
        };
        let penalised = Adam {
            weight_decay,
            bias_correction,
            amsgrad,
            ..Adam::default()
        };
        let (first, second) = (adam_formula(&decoupled, true), adam_formula(&decoupled, false));
        cases.push((Box::new(decoupled), first));
        cases.push((Box::new(penalised), second));
    }
    for (momentum, dampening, weight_decay, nesterov) in [
        (0.0, 0.0, 0.0, false),
        (0.0, 0.0, 0.1, false),
        (0.9, 0.0, 0.0, false),
        (0.9, 0.5, 0.1, false),
        (0.9, 0.0, 0.1, true),
    ] {
        let rule = Sgd {
            learning_rate: 1e-3,
            momentum,
            dampening,
            weight_decay,
            nesterov,
        };
        let formula = sgd_formula(&rule);
        cases.push((Box::new(rule), formula));
    }
    for weight_decay in [0.0, 0.1] {
        let lion = Lion {
            weight_decay,
            ..Lion::default()
        };
        let adagrad = Adagrad {
            weight_decay,
            learning_rate_decay: 0.01,
            ..Adagrad::default()
        };
        let (first, second) = (lion_formula(&lion), adagrad_formula(&adagrad));
        cases.push((Box::new(lion), first));
        cases.push((Box::new(adagrad), second));
    }
    cases
}

/// Numbers of magnitudes from 1e-6 to 1; one in eight is zero or denormal.
fn numbers(size: usize, seed: usize) -> Vec<f32> {
    let number = |index: usize| {
        let wave = ((index * 37 + seed * 101 + 13) as f32).sin();
        match (index + seed) % 16 {
            5 => 0.0,
            11 => wave * 1e-40,
            exponent => wave * 10f32.powi(-(exponent as i32 % 7)),
        }
    };
    (0..size).map(number).collect()
}

/// The forms of values and gradients that a rule may meet.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Width {
    F32,
    Bf16,
    F16,
}

const WIDTHS: [Width; 3] = [Width::F32, Width::Bf16, Width::F16];

/// An array of one of the widths; unlike the crate's own code it is converted one by one, by the half crate.
#[derive(Clone)]
enum Array {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

impl Array {
    fn rounded(values: &[f32], width: Width) -> Self {
        let values = values.iter().copied();
        match width {
            Width::F32 => Self::F32(values.collect()),
            Width::Bf16 => Self::Bf16(values.map(bf16::from_f32).collect()),
            Width::F16 => Self::F16(values.map(f16::from_f32).collect()),
        }
    }

    fn wide(&self) -> Vec<f32> {
        match self {
            Self::F32(values) => values.clone(),
            Self::Bf16(values) => values.iter().map(|value| value.to_f32()).collect(),
            Self::F16(values) => values.iter().map(|value| value.to_f32()).collect(),
        }
    }

    fn gradient(&self, at: usize) -> Gradient<'_> {
        match self {
            Self::F32(values) => Gradient::F32(&values[at..]),
            Self::Bf16(values) => Gradient::Bf16(&values[at..]),
            Self::F16(values) => Gradient::F16(&values[at..]),
        }
    }

    fn half(&mut self, at: usize) -> HalfMut<'_> {
        match self {
            Self::F32(_) => unreachable!("f32 is not half"),
            Self::Bf16(values) => HalfMut::Bf16(&mut values[at..]),
            Self::F16(values) => HalfMut::F16(&mut values[at..]),
        }
    }

    fn values(&mut self, at: usize) -> Values<'_> {
        match self {
            Self::F32(values) => Values::F32(&mut values[at..]),
            half => Values::Half(half.half(at)),
        }
    }
}

/// The state arrays of a rule.
#[derive(Clone)]
struct State([Vec<f32>; StateSlices::MOST]);

impl State {
    fn new(rule: &dyn OptimizerRule, size: usize) -> Self {
        let (kept, start) = (rule.state_names().len(), rule.initial_state());
        Self(std::array::from_fn(|number| {
            vec![start[number]; if number < kept { size } else { 0 }]
        }))
    }

    fn slices(&mut self, at: usize) -> StateSlices<'_> {
        StateSlices(self.0.each_mut().map(|array| array.get_mut(at..).unwrap_or_default()))
    }

    fn of(&self, element: usize) -> [f64; 3] {
        std::array::from_fn(|number| self.0[number].get(element).copied().unwrap_or_default().into())
    }

    fn bits(&self) -> [Vec<u32>; StateSlices::MOST] {
        self.0.each_ref().map(|array| bits(array))
    }
}

fn update(rule: &dyn OptimizerRule, step: u64) -> Update {
    Update {
        learning_rate: rule.base_learning_rate(),
        step,
        gradient_scale: 0.5,
    }
}

/// Value and state in one array.
fn flattened((value, [first, second, third]): (f64, [f64; 3])) -> [f64; 4] {
    [value, first, second, third]
}

/// Returns how far f32 results may lie from `expected`: some roundings of the results, and what some roundings of the
/// terms that went in come to where terms cancel.
fn allowances(formula: &Formula, update: &Update, p: f64, g: f64, state: [f64; 3], expected: [f64; 4]) -> [f64; 4] {
    const ROUNDINGS: f64 = 2e-7;
    let smallest = 4.0 * f64::from(f32::from_bits(1));
    let mut allowed = expected.map(|value| 2.0 * ROUNDINGS * value.abs() + smallest);
    let mut allow = |g: f64, state: [f64; 3]| {
        let moved = flattened(formula(update, p, g, state));
        for ((allowed, moved), expected) in allowed.iter_mut().zip(moved).zip(expected) {
            *allowed += (moved - expected).abs();
        }
    };
    // The penalty is at most 0.1 times the value.
    let off = ROUNDINGS * (g.abs() + 0.1 * p.abs()) + smallest;
    allow(g + off, state);
    allow(g - off, state);
    for number in 0..state.len() {
        for factor in [1.0 - ROUNDINGS, 1.0 + ROUNDINGS] {
            let mut state = state;
            state[number] *= factor;
            allow(g, state);
        }
    }
    // What is taken off the value is rounded before.
    allowed[0] += 4.0 * ROUNDINGS * (expected[0] - p).abs();
    allowed
}

#[test]
fn every_element_follows_the_formula_in_f64_at_any_size_offset_and_step() {
    let mut worst = 0f64;
    for (rule, formula) in cases() {
        for (size, at) in (0..=65)
            .flat_map(|size| [(size, 0), (size, 1), (size, 5)])
            .chain(SIZES.map(|size| (size, 3)))
        {
            let mut values = numbers(at + size, 1);
            let mut state = State::new(&*rule, at + size);
            for (number, step) in STEPS.into_iter().enumerate() {
                let update = update(&*rule, step);
                let gradient = numbers(at + size, 2 + number);
                let (before, state_before) = (values.clone(), state.clone());
                let forms = (Values::F32(&mut values[at..]), Gradient::F32(&gradient[at..]));
                rule.update_values(&update, forms.0, forms.1, state.slices(at));
                assert_eq!(
                    bits(&values[..at]),
                    bits(&before[..at]),
                    "{rule:?} wrote before its piece"
                );
                for element in at..at + size {
                    let given = f64::from(gradient[element]) * f64::from(update.gradient_scale);
                    let (old, old_state) = (f64::from(before[element]), state_before.of(element));
                    let expected = flattened(formula(&update, old, given, old_state));
                    let allowed = allowances(&formula, &update, old, given, old_state, expected);
                    let found = flattened((values[element].into(), state.of(element)));
                    for ((found, expected), allowed) in found.into_iter().zip(expected).zip(allowed) {
                        let off = (found - expected).abs();
                        assert!(
                            off <= allowed,
                            "{rule:?}, {size} at {at}, step {step}, element {element}: {found} for {expected}"
                        );
                        worst = worst.max(off / allowed);
                    }
                }
            }
        }
    }
    println!("worst: {worst:.2} of what is allowed");
}

#[test]
fn sixteen_bit_values_and_gradients_are_widened_updated_and_rounded_once() {
    for (rule, _) in cases() {
        for (width, gradient_width) in WIDTHS
            .into_iter()
            .flat_map(|width| WIDTHS.map(|gradient| (width, gradient)))
        {
            for (size, at) in (0..=65).chain(SIZES).flat_map(|size| [(size, 0), (size, 3)]) {
                let mut values = Array::rounded(&numbers(at + size, 1), width);
                let mut state = State::new(&*rule, at + size);
                let mut state_expected = state.clone();
                for (number, step) in STEPS.into_iter().enumerate() {
                    let update = update(&*rule, step);
                    let gradient = Array::rounded(&numbers(at + size, 2 + number), gradient_width);
                    let mut expected = values.wide();
                    let wide = gradient.wide();
                    rule.update(&update, &mut expected[at..], &wide[at..], state_expected.slices(at));
                    let expected = Array::rounded(&expected, width).wide();

                    rule.update_values(&update, values.values(at), gradient.gradient(at), state.slices(at));
                    let place = || format!("{rule:?}, {width:?} and {gradient_width:?}, {size} at {at}, step {step}");
                    assert_eq!(bits(&values.wide()), bits(&expected), "{}", place());
                    assert_eq!(state.bits(), state_expected.bits(), "{}", place());
                }
            }
        }
    }
}

#[test]
fn masters_are_those_of_an_f32_run_and_their_copy_is_their_rounding_after_every_step() {
    for (rule, _) in cases() {
        for (width, gradient_width) in [Width::Bf16, Width::F16]
            .into_iter()
            .flat_map(|width| WIDTHS.map(|gradient| (width, gradient)))
        {
            for (size, at) in [0, 1, 15, 33, 1024, 3001]
                .into_iter()
                .flat_map(|size| [(size, 0), (size, 3)])
            {
                let mut masters = numbers(at + size, 1);
                let mut alone = masters.clone();
                // What the copy holds before must not matter.
                let mut copy = Array::rounded(&vec![f32::NAN; at + size], width);
                let mut state = State::new(&*rule, at + size);
                let mut state_alone = state.clone();
                for (number, step) in STEPS.into_iter().enumerate() {
                    let update = update(&*rule, step);
                    let gradient = Array::rounded(&numbers(at + size, 2 + number), gradient_width);
                    let wide = gradient.wide();
                    let values = Values::F32(&mut alone[at..]);
                    rule.update_values(&update, values, Gradient::F32(&wide[at..]), state_alone.slices(at));

                    let values = Values::Masters {
                        masters: &mut masters[at..],
                        copy: copy.half(at),
                    };
                    rule.update_values(&update, values, gradient.gradient(at), state.slices(at));
                    let place = || format!("{rule:?}, {width:?} and {gradient_width:?}, {size} at {at}, step {step}");
                    assert_eq!(bits(&masters), bits(&alone), "{}", place());
                    assert_eq!(state.bits(), state_alone.bits(), "{}", place());
                    let rounded = Array::rounded(&masters, width).wide();
                    assert_eq!(bits(&copy.wide()[at..]), bits(&rounded[at..]), "{}", place());
                    assert!(copy.wide()[..at].iter().all(|value| value.is_nan()), "{}", place());
                }
            }
        }
    }
}

#[test]
fn a_change_of_less_than_half_a_place_is_kept_by_masters_and_lost_without() {
    let rule = Sgd::default();
    // 256 steps of 2^-15 each; next to 1, bf16 numbers are 2^-7 apart above and 2^-8 below.
    let (mut half, mut masters) = ([bf16::ONE; 40], [1f32; 40]);
    let mut copy = half;
    let gradient = [bf16::from_f32(2f32.powi(-15)); 40];
    for step in 1..=256 {
        let update = Update {
            learning_rate: 1.0,
            step,
            gradient_scale: 1.0,
        };
        let none = || StateSlices([&mut [], &mut [], &mut []]);
        let gradient = Gradient::Bf16(&gradient);
        rule.update_values(&update, Values::Half(HalfMut::Bf16(&mut half)), gradient, none());
        let values = Values::Masters {
            masters: &mut masters,
            copy: HalfMut::Bf16(&mut copy),
        };
        rule.update_values(&update, values, gradient, none());
    }
    assert_eq!(half, [bf16::ONE; 40]);
    assert_eq!(masters, [1.0 - 2f32.powi(-7); 40]);
    assert_eq!(copy, [bf16::from_f32(1.0 - 2f32.powi(-7)); 40]);
}

/// A rule of a user's that knows f32 only: subtracts the gradient and counts how often it saw each element.
#[derive(Debug, Default)]
struct Counting {
    longest: Mutex<usize>,
}

impl OptimizerRule for Counting {
    fn name(&self) -> &'static str {
        "counting"
    }

    fn state_names(&self) -> &'static [&'static str] {
        &["count"]
    }

    fn base_learning_rate(&self) -> f64 {
        1.0
    }

    fn check(&self) -> sconce_zero::Result<()> {
        Ok(())
    }

    fn update(&self, _: &Update, parameter: &mut [f32], gradient: &[f32], state: StateSlices<'_>) {
        let [count, second, third] = state.0;
        assert_eq!((parameter.len(), second.len(), third.len()), (gradient.len(), 0, 0));
        assert_eq!(parameter.len(), count.len());
        let mut longest = self.longest.lock().unwrap();
        *longest = longest.max(parameter.len());
        for ((p, g), count) in parameter.iter_mut().zip(gradient).zip(count) {
            *p -= g;
            *count += 1.0;
        }
    }
}

#[test]
fn a_rule_that_knows_f32_only_sees_every_element_once_per_step_in_pieces_that_fit_the_cache() {
    let size = 40_007;
    let gradient: Vec<f32> = (0..size).map(|number| (number % 200) as f32).collect();
    let expected: Vec<f32> = gradient.iter().map(|gradient| 1.0 - gradient).collect();
    for width in [Width::Bf16, Width::F16] {
        let rule = Counting::default();
        let gradient = Array::rounded(&gradient, width);
        let mut values = Array::rounded(&vec![1.0; size], width);
        let mut masters = vec![1.0; size];
        let mut copy = values.clone();
        let mut state = State::new(&rule, size);
        rule.update_values(
            &update(&rule, 1),
            values.values(0),
            gradient.gradient(0),
            state.slices(0),
        );
        let with_masters = Values::Masters {
            masters: &mut masters,
            copy: copy.half(0),
        };
        rule.update_values(&update(&rule, 2), with_masters, gradient.gradient(0), state.slices(0));
        assert!(state.0[0].iter().all(|count| *count == 2.0), "{width:?}");
        // All of these are numbers of both types.
        assert_eq!(values.wide(), expected, "{width:?}");
        assert_eq!(masters, expected, "{width:?}");
        assert_eq!(copy.wide(), expected, "{width:?}");
        // Values, gradient and up to three state arrays, in a second-level cache of 256 KiB.
        assert!(*rule.longest.lock().unwrap() * 4 * 5 <= 256 << 10, "{width:?}");
    }
}

#[test]
fn chunks_of_values_gradient_and_state_come_to_the_bits_of_the_whole() {
    let rule = AdamW::default();
    let (size, width) = (1000, Width::Bf16);
    let gradient = Array::rounded(&numbers(size, 2), width);
    let run = |chunk: usize| {
        let mut masters = numbers(size, 1);
        let mut copy = Array::rounded(&masters, width);
        let mut state = State::new(&rule, size);
        let values = Values::Masters {
            masters: &mut masters,
            copy: copy.half(0),
        };
        let pieces = values.chunks(chunk).zip(gradient.gradient(0).chunks(chunk));
        let mut count = 0;
        for ((values, gradient), state) in pieces.zip(state.slices(0).chunks(chunk)) {
            count += 1;
            assert_eq!(values.len(), chunk.min(size - (count - 1) * chunk));
            rule.update_values(&update(&rule, 1), values, gradient, state);
        }
        assert_eq!(count, size.div_ceil(chunk));
        (bits(&masters), bits(&copy.wide()), state.bits())
    };
    let whole = run(size);
    for chunk in [1, 7, 64, 333, 999, 2000] {
        assert!(run(chunk) == whole, "{chunk}");
    }
}

#[test]
#[should_panic(expected = "a gradient is as long as its values")]
fn a_gradient_of_another_length_than_the_values_is_refused() {
    let rule = Sgd::default();
    let state = StateSlices([&mut [], &mut [], &mut []]);
    let mut values = [0f32; 4];
    rule.update_values(
        &update(&rule, 1),
        Values::F32(&mut values),
        Gradient::F32(&[0.0; 3]),
        state,
    );
}
