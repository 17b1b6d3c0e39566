//! One loop, compiled for several instruction sets; the best that the processor has is chosen at the first call.
//!
//! Products and sums are never fused (Rust contracts nothing by itself), divisions and roots are exact to the last bit
//! everywhere: all versions of a loop give the same bits. The tests of this crate can choose the version to see that.

/// Defines a function that is compiled for each instruction set.
macro_rules! for_each_instruction_set {
    ($(#[$attribute:meta])* $visibility:vis fn $name:ident($($argument:ident: $type:ty),* $(,)?) { $($body:tt)* }) => {
        $(#[$attribute])*
        $visibility fn $name($($argument: $type),*) {
            #[multiversion::multiversion(targets(
                "x86_64+avx512f+avx512bw+avx512vl",
                "x86_64+avx2+fma",
                "aarch64+neon",
            ))]
            fn best($($argument: $type),*) {
                $($body)*
            }
            #[cfg(test)]
            {
                #[multiversion::multiversion(targets("x86_64+avx2+fma"))]
                fn avx2($($argument: $type),*) {
                    $($body)*
                }
                fn portable($($argument: $type),*) {
                    $($body)*
                }
                match $crate::optimizer::instruction_sets::chosen() {
                    $crate::optimizer::instruction_sets::InstructionSet::Best => {}
                    $crate::optimizer::instruction_sets::InstructionSet::Avx2 => return avx2($($argument),*),
                    $crate::optimizer::instruction_sets::InstructionSet::Portable => return portable($($argument),*),
                }
            }
            best($($argument),*);
        }
    };
}
pub(super) use for_each_instruction_set;

/// A version of every loop.
#[cfg(test)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum InstructionSet {
    /// What runs outside of tests.
    Best,
    /// At most AVX2.
    Avx2,
    /// What every processor of the architecture has.
    Portable,
}

#[cfg(test)]
std::thread_local! {
    static CHOSEN: std::cell::Cell<InstructionSet> = const { std::cell::Cell::new(InstructionSet::Best) };
}

#[cfg(test)]
pub(super) fn chosen() -> InstructionSet {
    CHOSEN.get()
}

#[cfg(all(test, target_arch = "x86_64"))]
static SAID: std::sync::Once = std::sync::Once::new();

/// Runs `work` with each version of the loops that differs on this processor; says which could not be run.
#[cfg(test)]
pub(super) fn on_each(mut work: impl FnMut(InstructionSet)) {
    #[cfg(target_arch = "x86_64")]
    SAID.call_once(|| {
        for (set, present) in [
            ("AVX-512", std::arch::is_x86_feature_detected!("avx512vl")),
            ("AVX2", std::arch::is_x86_feature_detected!("avx2")),
        ] {
            if !present {
                println!("skipped: the loops for {set}, which this processor does not have");
            }
        }
    });
    for set in [InstructionSet::Best, InstructionSet::Avx2, InstructionSet::Portable] {
        CHOSEN.set(set);
        work(set);
        CHOSEN.set(InstructionSet::Best);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Adagrad, Adam, AdamW, Gradient, HalfMut, Lion, OptimizerRule, Sgd, StateSlices, Update, Values};
    use half::bf16;

    /// Every rule with every option that changes its loop.
    fn every_loop() -> Vec<Box<dyn OptimizerRule>> {
        let amsgrad = true;
        let momentum = 0.9;
        vec![
            Box::new(AdamW::default()),
            Box::new(AdamW {
                amsgrad,
                ..AdamW::default()
            }),
            Box::new(Adam {
                weight_decay: 0.1,
                ..Adam::default()
            }),
            Box::new(Adagrad::default()),
            Box::new(Lion::default()),
            Box::new(Sgd::default()),
            Box::new(Sgd {
                momentum,
                nesterov: true,
                ..Sgd::default()
            }),
        ]
    }

    /// Numbers of all magnitudes, among them zeros, denormals and, rarely, what is not finite.
    fn number(index: usize, seed: usize) -> f32 {
        let hash = (index * 7919 + seed * 104_729 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        match hash >> 40 & 63 {
            0 => 0.0,
            1 => -0.0,
            2 => f32::from_bits((hash >> 20) as u32 & 0x007f_ffff),
            3 if hash >> 50 & 7 == 0 => [f32::INFINITY, f32::NEG_INFINITY, f32::NAN][hash >> 55 & 1],
            // Both signs and exponents from 2^-96 to 2^31, so that squares of some leave the range.
            _ => f32::from_bits((hash >> 8) as u32 & 0x8fff_ffff | 0x0f00_0000 | ((hash >> 33) as u32 & 0x4000_0000)),
        }
    }

    fn array(size: usize, seed: usize) -> Vec<f32> {
        (0..size).map(|index| number(index, seed)).collect()
    }

    /// The sign and payload of a NaN are nobody's promise: they depend on the order in which a sum names its terms.
    fn bits(values: &[f32]) -> Vec<u32> {
        let of = |value: &f32| if value.is_nan() { f32::NAN } else { *value };
        values.iter().map(|value| of(value).to_bits()).collect()
    }

    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Form {
        F32,
        Masters,
        Half,
    }

    /// Runs three steps; returns the bits of values, copy and state, all arrays beginning at `at`.
    fn run(rule: &dyn OptimizerRule, form: Form, size: usize, at: usize) -> [Vec<u32>; 5] {
        let mut values = array(size + at, 1);
        let mut half: Vec<_> = values.iter().map(|value| bf16::from_f32(*value)).collect();
        let kept = rule.state_names().len();
        let mut state: [Vec<f32>; StateSlices::MOST] = std::array::from_fn(|number| {
            let of = |seed| array(size + at, seed).iter().map(|value| value.abs()).collect();
            if number < kept { of(2 + number) } else { Vec::new() }
        });
        for step in 1..=3 {
            let update = Update {
                learning_rate: 1e-3,
                step,
                gradient_scale: 0.7,
            };
            let gradient = array(size + at, 10 + step as usize);
            let half_gradient: Vec<_> = gradient.iter().map(|value| bf16::from_f32(*value)).collect();
            let slices = state.each_mut().map(|state| state.get_mut(at..).unwrap_or_default());
            let (copy, state) = (HalfMut::Bf16(&mut half[at..]), StateSlices(slices));
            let (wide, narrow) = (Gradient::F32(&gradient[at..]), Gradient::Bf16(&half_gradient[at..]));
            let (masters, gradient) = (&mut values[at..], if form == Form::Half { narrow } else { wide });
            let values = match form {
                Form::F32 => Values::F32(masters),
                Form::Masters => Values::Masters { masters, copy },
                Form::Half => Values::Half(copy),
            };
            rule.update_values(&update, values, gradient, state);
        }
        let half: Vec<f32> = half.iter().map(|value| value.to_f32_const()).collect();
        let [first, second, third] = state;
        [values, half, first, second, third].map(|array| bits(&array))
    }

    #[test]
    fn all_versions_of_every_loop_give_the_same_bits() {
        let sizes: Vec<usize> = (0..=65).chain([127, 1023, 1025, 2079]).collect();
        for rule in every_loop() {
            let places = sizes.iter().flat_map(|size| [0, 1, 3].map(|at| (*size, at)));
            for ((size, at), form) in
                places.flat_map(|place| [Form::F32, Form::Masters, Form::Half].map(|form| (place, form)))
            {
                let mut expected = None;
                on_each(|set| {
                    let found = run(&*rule, form, size, at);
                    let expected = expected.get_or_insert_with(|| found.clone());
                    assert_eq!(&found, expected, "{rule:?} on {set:?}, {size} at {at}, {form:?}");
                });
            }
        }
    }
}
