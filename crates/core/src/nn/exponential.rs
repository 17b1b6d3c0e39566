//! An exponential that vectorises.
//!
//! `f32::exp` calls the C library once per element, which is most of the time of a softmax. This one
//! is straight-line arithmetic without calls, branches or fused multiply-adds, so the loops that use
//! it vectorise and give the same bits on every instruction set.

/// Below this the result is smaller than the smallest normal number, and becomes 0.
const LOWEST: f32 = -87.336_54;
/// Above this the result is infinite.
const HIGHEST: f32 = 88.722_83;

/// 1.5 · 2^23: adding it rounds to an integer, which is then found in the low bits.
const ROUNDING: f32 = 12_582_912.0;

/// ln 2 in two parts; the first has so few bits that its product with any exponent is exact.
const LN_2_HIGH: f32 = 355.0 / 512.0;
const LN_2_LOW: f32 = -2.121_944_4e-4;

/// Returns e^x within 2 units in the last place.
///
/// Results below the smallest normal number are 0; NaN gives NaN. With `x = n ln 2 + r` and
/// `|r| <= ln 2 / 2`, e^x is `2^n e^r`; the polynomial for e^r is that of Cephes' `expf`
/// (S. L. Moshier, <https://www.netlib.org/cephes/>).
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    let shifted = x * std::f32::consts::LOG2_E + ROUNDING;
    let n = shifted - ROUNDING;
    let r = x - n * LN_2_HIGH - n * LN_2_LOW;

    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_2e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let e_to_r = p * (r * r) + r + 1.0;

    // Adds n to the exponent field. It cannot overflow into the sign for x within the limits.
    let scaled = f32::from_bits(e_to_r.to_bits().wrapping_add(shifted.to_bits() << 23));
    let scaled = if x < LOWEST { 0.0 } else { scaled };
    let scaled = if x > HIGHEST { f32::INFINITY } else { scaled };
    if x.is_nan() { x } else { scaled }
}

/// Returns 1 / (1 + e^-x), the logistic function.
#[inline(always)]
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Distance from the true value in units of the last place of a normal `f32`.
    fn error_in_ulps(x: f32) -> f64 {
        let exact = f64::from(x).exp();
        let nearest = exact as f32;
        let ulp = f64::from(f32::from_bits(nearest.to_bits() + 1)) - f64::from(nearest);
        ((f64::from(exp(x)) - exact) / ulp).abs()
    }

    #[test]
    fn exp_is_within_two_ulps_over_the_whole_normal_range() {
        let mut worst = (0.0, 0.0);
        let mut check = |x: f32| {
            let error = error_in_ulps(x);
            if error > worst.0 {
                worst = (error, x);
            }
        };
        // Every 97th pattern of both signs, from the tiniest to the ends of the range.
        for magnitude in (0..HIGHEST.to_bits()).step_by(97) {
            check(f32::from_bits(magnitude));
        }
        for magnitude in (0..(-LOWEST).to_bits()).step_by(97) {
            check(-f32::from_bits(magnitude));
        }
        assert!(worst.0 <= 2.0, "{} ulp at {}", worst.0, worst.1);
    }

    #[test]
    fn exp_of_the_limits_and_beyond() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert!(exp(LOWEST) >= f32::MIN_POSITIVE * 0.999_999);
        assert!(exp(HIGHEST).is_finite());
        for x in [f32::NEG_INFINITY, -1e30, -1000.0, -104.0, -87.4] {
            assert_eq!(exp(x), 0.0, "{x}");
        }
        for x in [88.722_84, 1000.0, 1e30, f32::INFINITY] {
            assert_eq!(exp(x), f32::INFINITY, "{x}");
        }
        for nan in [
            f32::NAN,
            -f32::NAN,
            f32::from_bits(0x7fc0_0123),
            f32::from_bits(0x7f80_0001),
        ] {
            assert!(exp(nan).is_nan());
        }
    }

    #[test]
    fn sigmoid_saturates_without_nan() {
        assert_eq!(sigmoid(f32::NEG_INFINITY), 0.0);
        assert_eq!(sigmoid(-200.0), 0.0);
        assert_eq!(sigmoid(0.0), 0.5);
        assert_eq!(sigmoid(200.0), 1.0);
        assert_eq!(sigmoid(f32::INFINITY), 1.0);
    }
}
