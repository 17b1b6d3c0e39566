//! Between f32 and the 16-bit types, in loops that vectorise.
//!
//! bf16 is done here because the half crate goes one by one; f16 is the half crate's, which uses the processor's
//! instructions and is not slower than integer arithmetic that vectorises.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

#[inline(always)]
pub(super) fn widen_bf16(values: &[bf16], wide: &mut [f32]) {
    for (wide, value) in wide.iter_mut().zip(values) {
        *wide = f32::from_bits(u32::from(value.to_bits()) << 16);
    }
}

#[inline(always)]
pub(super) fn round_to_bf16(values: &[f32], rounded: &mut [bf16]) {
    for (rounded, value) in rounded.iter_mut().zip(values) {
        *rounded = nearest_bf16(*value);
    }
}

/// Rounds to nearest, ties to even: what is above the range becomes infinite, what is not a number stays so.
#[inline(always)]
fn nearest_bf16(value: f32) -> bf16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    let quiet = bits | 0x0040_0000;
    // Chosen in 32 bits, so that vectors are packed once.
    bf16::from_bits((if value.is_nan() { quiet } else { rounded } >> 16) as u16)
}

#[inline(always)]
pub(super) fn widen_f16(values: &[f16], wide: &mut [f32]) {
    values.convert_to_f32_slice(wide);
}

#[inline(always)]
pub(super) fn round_to_f16(values: &[f32], rounded: &mut [f16]) {
    rounded.convert_from_f32_slice(values);
}

#[cfg(test)]
mod tests {
    use super::super::instruction_sets::{InstructionSet, for_each_instruction_set, on_each};
    use super::*;

    for_each_instruction_set! {
        fn widen(values: &[bf16], wide: &mut [f32]) {
            widen_bf16(values, wide);
        }
    }

    for_each_instruction_set! {
        fn round(values: &[f32], rounded: &mut [bf16]) {
            round_to_bf16(values, rounded);
        }
    }

    /// A 16-bit type as its bits, with the exponents that its front page says.
    struct Format {
        bits_of_infinity: u16,
        /// What infinity would be if the exponents went on.
        beyond: f64,
        value: fn(u16) -> f64,
    }

    const BF16: Format = Format {
        bits_of_infinity: 0x7f80,
        beyond: 2.0 * (1u128 << 127) as f64,
        value: |bits| value_of(bits, 8, 7),
    };
    const F16: Format = Format {
        bits_of_infinity: 0x7c00,
        beyond: 65536.0,
        value: |bits| value_of(bits, 5, 10),
    };

    /// Returns a number by the definition of IEEE 754, section 3.4: sign, biased exponent, fraction.
    fn value_of(bits: u16, exponent_bits: u32, fraction_bits: u32) -> f64 {
        let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
        let exponent = i32::from(bits & 0x7fff) >> fraction_bits;
        let fraction = f64::from(bits & ((1 << fraction_bits) - 1)) / f64::from(1 << fraction_bits);
        let bias = (1 << (exponent_bits - 1)) - 1;
        if exponent == (1 << exponent_bits) - 1 {
            return if fraction == 0.0 {
                sign * f64::INFINITY
            } else {
                f64::NAN
            };
        }
        if exponent == 0 {
            sign * fraction * 2f64.powi(1 - bias)
        } else {
            sign * (1.0 + fraction) * 2f64.powi(exponent - bias)
        }
    }

    impl Format {
        /// Returns the nearest number's bits by comparing distances to both neighbours; of two, the even one.
        fn nearest(&self, value: f32) -> u16 {
            let magnitude = f64::from(value.abs());
            let of = |bits: u16| {
                if bits == self.bits_of_infinity {
                    self.beyond
                } else {
                    (self.value)(bits)
                }
            };
            let all = 0..=self.bits_of_infinity;
            let (mut low, mut high) = (*all.start(), *all.end());
            while high - low > 1 {
                let middle = low + (high - low) / 2;
                if of(middle) <= magnitude {
                    low = middle;
                } else {
                    high = middle;
                }
            }
            let (below, above) = (magnitude - of(low), of(high) - magnitude);
            let to_high = above < below || (above == below && high % 2 == 0);
            u16::from(value.is_sign_negative()) << 15 | if to_high { high } else { low }
        }
    }

    /// f32 numbers on, between and next to the ties between all 16-bit numbers of both types; every exponent, both signs.
    fn telling_values() -> Vec<f32> {
        let every_high_half = (0..=u16::MAX).flat_map(|high| {
            [
                0x0000, 0x0001, 0x0fff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x3001, 0x7fff, 0x8000, 0x8001, 0xffff,
            ]
            .map(|low: u32| f32::from_bits(u32::from(high) << 16 | low))
        });
        // Denormal f16 are farther apart than any two of the above.
        let f16_denormals = (0..2 << 10).flat_map(|halves| {
            let tie = halves as f32 / 2.0 * 2f32.powi(-24);
            [tie.next_down(), tie, tie.next_up(), -tie]
        });
        every_high_half.chain(f16_denormals).collect()
    }

    fn check_rounding(format: &Format, values: &[f32], rounded: &[u16], set: InstructionSet) {
        for (value, found) in values.iter().zip(rounded) {
            if value.is_nan() {
                assert!((format.value)(*found).is_nan(), "{:#x} on {set:?}", value.to_bits());
            } else {
                let expected = format.nearest(*value);
                assert_eq!(*found, expected, "{value:e} ({:#x}) on {set:?}", value.to_bits());
            }
        }
    }

    #[test]
    fn f32_is_rounded_to_the_nearest_of_all_16_bit_numbers_and_ties_to_even() {
        let values = telling_values();
        on_each(|set| {
            let mut rounded = vec![bf16::ZERO; values.len()];
            round(&values, &mut rounded);
            let rounded: Vec<_> = rounded.iter().map(|value| value.to_bits()).collect();
            check_rounding(&BF16, &values, &rounded, set);
        });
        let mut rounded = vec![f16::ZERO; values.len()];
        round_to_f16(&values, &mut rounded);
        let rounded: Vec<_> = rounded.iter().map(|value| value.to_bits()).collect();
        check_rounding(&F16, &values, &rounded, InstructionSet::Best);
        // The half crate's loop is one by one where the processor has no instructions: that must come to the same.
        let singly: Vec<_> = values
            .iter()
            .map(|value| f16::from_f32_const(*value).to_bits())
            .collect();
        check_rounding(&F16, &values, &singly, InstructionSet::Portable);
    }

    #[test]
    fn every_16_bit_number_is_widened_exactly() {
        let all: Vec<u16> = (0..=u16::MAX).collect();
        let check = |format: &Format, wide: &[f32]| {
            for (bits, wide) in all.iter().zip(wide) {
                let expected = (format.value)(*bits);
                let same = f64::from(*wide) == expected && wide.is_sign_negative() == (bits >> 15 == 1);
                assert!(same || (wide.is_nan() && expected.is_nan()), "{bits:#x}: {wide:e}");
            }
        };
        let mut wide = vec![0f32; all.len()];
        on_each(|_| {
            let values: Vec<_> = all.iter().map(|bits| bf16::from_bits(*bits)).collect();
            widen(&values, &mut wide);
            check(&BF16, &wide);
        });
        let values: Vec<_> = all.iter().map(|bits| f16::from_bits(*bits)).collect();
        widen_f16(&values, &mut wide);
        check(&F16, &wide);
        let singly: Vec<_> = values.iter().map(|value| value.to_f32_const()).collect();
        check(&F16, &singly);
    }

    #[test]
    fn pieces_of_every_length_and_offset_are_rounded_and_widened_and_nothing_beside_them() {
        let values: Vec<f32> = (0..80).map(|number| (number as f32 * 0.7).sin()).collect();
        on_each(|set| {
            for size in 0..=65 {
                for at in [0, 1, 3, 7] {
                    let mut rounded = vec![bf16::MAX; values.len()];
                    round(&values[at..at + size], &mut rounded[at..at + size]);
                    let mut wide = vec![f32::MAX; values.len()];
                    widen(&rounded[at..at + size], &mut wide[at..at + size]);
                    for number in 0..values.len() {
                        let inside = (at..at + size).contains(&number);
                        let expected = if inside {
                            BF16.nearest(values[number])
                        } else {
                            bf16::MAX.to_bits()
                        };
                        assert_eq!(rounded[number].to_bits(), expected, "{size} at {at} on {set:?}");
                        let expected = if inside {
                            rounded[number].to_f32_const()
                        } else {
                            f32::MAX
                        };
                        assert_eq!(wide[number], expected, "{size} at {at} on {set:?}");
                    }
                }
            }
        });
    }
}
