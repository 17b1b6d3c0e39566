//! Rounding to the numbers of fp8.

use float8::{F8E4M3, F8E5M2};
use rayon::prelude::*;
use std::sync::LazyLock;

/// Values rounded by one task.
const BLOCK: usize = 1 << 14;

/// The numbers of a format of eight bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Grid {
    /// Four bits of exponent, three of mantissa; no infinity.
    E4m3,
    /// Five and two.
    E5m2,
}

/// What each code stands for.
static E4M3_VALUES: LazyLock<[f32; 256]> =
    LazyLock::new(|| std::array::from_fn(|code| F8E4M3::from_bits(code as u8).to_f32()));
static E5M2_VALUES: LazyLock<[f32; 256]> =
    LazyLock::new(|| std::array::from_fn(|code| F8E5M2::from_bits(code as u8).to_f32()));

impl Grid {
    /// Returns the largest number.
    pub(super) fn largest(self) -> f32 {
        match self {
            Self::E4m3 => 448.0,
            Self::E5m2 => 57344.0,
        }
    }

    /// Multiplies every value by `scale` and rounds it to the nearest number of the grid, ties to even; what is beyond the
    /// largest becomes that, and what is not finite NaN.
    pub(super) fn round_all(self, values: &mut [f32], scale: f32) {
        match self {
            Self::E4m3 => round_all(values, scale, &E4M3_VALUES, |value| F8E4M3::from_f32(value).to_bits()),
            Self::E5m2 => round_all(values, scale, &E5M2_VALUES, |value| F8E5M2::from_f32(value).to_bits()),
        }
    }
}

fn round_all(values: &mut [f32], scale: f32, numbers: &[f32; 256], code: impl Fn(f32) -> u8 + Sync) {
    let round = |value: &mut f32| {
        *value = if value.is_finite() {
            numbers[usize::from(code(*value * scale))]
        } else {
            f32::NAN
        }
    };
    values
        .par_chunks_mut(BLOCK)
        .for_each(|block| block.iter_mut().for_each(round));
}

/// Returns the greatest magnitude; NaN where there is one.
pub(super) fn amax(values: &[f32]) -> f32 {
    let of_block = |block: &[f32]| block.iter().fold(0, |most, value| most.max(value.abs().to_bits()));
    // As bits: a NaN is above all numbers, and the order of blocks does not matter.
    let bits = values.par_chunks(BLOCK).map(of_block).reduce(|| 0, u32::max);
    f32::from_bits(bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of a code, by the definition of the OCP specification: sign, exponent, mantissa.
    fn defined(grid: Grid, code: u8) -> f64 {
        let (mantissa_bits, bias) = match grid {
            Grid::E4m3 => (3, 7),
            Grid::E5m2 => (2, 15),
        };
        let sign = if code & 0x80 != 0 { -1.0 } else { 1.0 };
        let mantissa = f64::from(code & ((1 << mantissa_bits) - 1)) / f64::from(1 << mantissa_bits);
        let exponent = i32::from((code & 0x7f) >> mantissa_bits);
        match (grid, code & 0x7f) {
            (Grid::E4m3, 0x7f) => f64::NAN,
            (Grid::E5m2, 0x7c) => sign * f64::INFINITY,
            (Grid::E5m2, 0x7d..) => f64::NAN,
            _ if exponent == 0 => sign * mantissa * 2f64.powi(1 - bias),
            _ => sign * (1.0 + mantissa) * 2f64.powi(exponent - bias),
        }
    }

    fn rounded(grid: Grid, value: f32) -> f32 {
        let mut values = [value];
        grid.round_all(&mut values, 1.0);
        values[0]
    }

    /// All finite numbers from 0, in order, by the parity of their code.
    fn numbers(grid: Grid) -> Vec<f64> {
        let all = (0..0x80).map(|code| defined(grid, code));
        all.filter(|number| number.is_finite()).collect()
    }

    #[test]
    fn all_codes_stand_for_the_numbers_of_the_definition_and_stay_what_they_are() {
        for grid in [Grid::E4m3, Grid::E5m2] {
            let table = match grid {
                Grid::E4m3 => &E4M3_VALUES,
                Grid::E5m2 => &E5M2_VALUES,
            };
            for code in 0..=255u8 {
                let (found, expected) = (table[usize::from(code)], defined(grid, code));
                if expected.is_nan() {
                    assert!(found.is_nan(), "{grid:?} {code:#x}");
                    continue;
                }
                assert_eq!(f64::from(found).to_bits(), expected.to_bits(), "{grid:?} {code:#x}");
                if expected.is_finite() {
                    assert_eq!(rounded(grid, found).to_bits(), found.to_bits(), "{grid:?} {code:#x}");
                }
            }
            let numbers = numbers(grid);
            assert_eq!(numbers.last(), Some(&f64::from(grid.largest())));
            assert_eq!(numbers.len(), if grid == Grid::E4m3 { 127 } else { 124 });
        }
    }

    #[test]
    fn values_between_two_numbers_go_to_the_nearer_and_ties_to_the_even_code() {
        for grid in [Grid::E4m3, Grid::E5m2] {
            let numbers = numbers(grid);
            for (code, pair) in numbers.windows(2).enumerate() {
                let (low, high) = (pair[0] as f32, pair[1] as f32);
                let middle = (low + high) / 2.0;
                let even = if code % 2 == 0 { low } else { high };
                for sign in [1.0, -1.0] {
                    for (value, expected) in [
                        (middle, even),
                        (middle.next_down(), low),
                        (middle.next_up(), high),
                        (low.next_up(), low),
                        (high.next_down(), high),
                    ] {
                        assert_eq!(rounded(grid, sign * value), sign * expected, "{grid:?}, {value:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn every_seventh_thousand_f32_goes_to_the_nearest_number_found_by_search() {
        for grid in [Grid::E4m3, Grid::E5m2] {
            let numbers = numbers(grid);
            for bits in (0..0x7f80_0000u32).step_by(6997) {
                let value = f32::from_bits(bits);
                let distance = |number: f64| (number - f64::from(value)).abs();
                let found = f64::from(rounded(grid, value));
                let next = numbers.partition_point(|number| *number < f64::from(value));
                let nearest = [next.saturating_sub(1), next.min(numbers.len() - 1)].map(|i| distance(numbers[i]));
                assert_eq!(
                    distance(found),
                    nearest[0].min(nearest[1]),
                    "{grid:?}, {value:?} became {found}"
                );
            }
        }
    }

    #[test]
    fn what_is_too_large_saturates_and_what_is_not_finite_becomes_nan() {
        for grid in [Grid::E4m3, Grid::E5m2] {
            for value in [grid.largest() * 1.5, f32::MAX] {
                assert_eq!(rounded(grid, value), grid.largest());
                assert_eq!(rounded(grid, -value), -grid.largest());
            }
            for value in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
                assert!(rounded(grid, value).is_nan());
            }
        }
    }

    #[test]
    fn the_amax_is_the_greatest_magnitude_and_sees_nan() {
        let mut values: Vec<f32> = (0..40_000).map(|i| (i as f32 * 0.37).sin()).collect();
        values[39_000] = -7.5;
        assert_eq!(amax(&values), 7.5);
        values[3] = f32::NEG_INFINITY;
        assert_eq!(amax(&values), f32::INFINITY);
        values[35_000] = -f32::NAN;
        assert!(amax(&values).is_nan());
        assert_eq!(amax(&[]), 0.0);
    }
}
