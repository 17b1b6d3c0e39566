//! Dropout: its statistics, the stream that its masks come from, and that they come again.

use candle_core::{DType, Device, ModuleT, Tensor, Var};
use half::{bf16, f16};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use sconce_core::RandomState;
use sconce_core::nn::Dropout;

use crate::oracle::{error, numbers, values};

fn ones(count: usize) -> Tensor {
    Tensor::ones(count, DType::F32, &Device::Cpu).unwrap()
}

/// Which of the next call's elements are kept.
fn kept(p: f32, count: usize) -> Vec<bool> {
    let result = Dropout::new(p).forward(&ones(count), true).unwrap();
    numbers(&result).into_iter().map(|x| x != 0.).collect()
}

/// Fails if a count of independent events of this probability is further off than five deviations.
fn assert_likely(what: &str, events: impl Iterator<Item = bool>, probability: f64) {
    let (count, happened) = events.fold((0f64, 0f64), |(count, happened), event| {
        (count + 1., happened + f64::from(u8::from(event)))
    });
    let deviation = (count * probability * (1. - probability)).sqrt();
    let expected = count * probability;
    assert!(
        (happened - expected).abs() <= 5. * deviation,
        "{what}: {happened} of {count}, expected {expected} within five times {deviation}"
    );
}

#[test]
fn elements_are_dropped_with_their_probability_and_the_mean_stays() {
    let count = 1 << 20;
    for p in [0.01f32, 0.1, 0.5, 0.9, 0.999] {
        RandomState::seed(1);
        let probability = f64::from(p);
        let result = numbers(&Dropout::new(p).forward(&ones(count), true).unwrap());
        assert_likely(&format!("dropped by {p}"), result.iter().map(|&x| x == 0.), probability);
        let scale = f64::from((1. / (1. - probability)) as f32);
        assert!(result.iter().all(|&x| x == 0. || x == scale), "{p}");
        let mean = result.iter().sum::<f64>() / count as f64;
        let deviation = (probability / (1. - probability) / count as f64).sqrt();
        assert!((mean - 1.).abs() <= 5. * deviation, "{p}: mean {mean}");
    }
}

#[test]
fn elements_and_calls_are_independent() {
    RandomState::seed(2);
    let (p, count) = (0.3, 1 << 20);
    let [first, second] = [kept(p, count), kept(p, count)];
    let both = f64::from(1. - p).powi(2);
    for distance in [1, 2, 16, 64, 1024, 16 * 1024] {
        let pairs = first.iter().zip(&first[distance..]);
        assert_likely(&format!("both kept at {distance}"), pairs.map(|(a, b)| *a && *b), both);
    }
    let pairs = first.iter().zip(&second);
    assert_likely("kept by both calls", pairs.map(|(a, b)| *a && *b), both);
}

#[test]
fn an_element_is_kept_by_its_word_of_the_stream_of_the_calls_key() {
    // Sizes around the pieces and blocks in which masks are made.
    for count in [1, 5, 1023, 1024, 1025, 16 * 1024 + 3, 100_000] {
        RandomState::seed(3);
        let mut stream = ChaCha8Rng::seed_from_u64(RandomState::draw_key());
        RandomState::seed(3);
        let expected: Vec<bool> = (0..count).map(|_| stream.next_u32() >= 1 << 30).collect();
        assert!(kept(0.25, count) == expected, "{count}");
    }
}

#[test]
fn a_restored_state_gives_the_same_masks_and_every_call_another() {
    RandomState::seed(4);
    kept(0.5, 100);
    let before = RandomState::current();
    let masks = [kept(0.5, 100), kept(0.5, 100), kept(0.5, 100)];
    assert!(masks[0] != masks[1] && masks[1] != masks[2] && masks[0] != masks[2]);
    before.restore();
    assert_eq!([kept(0.5, 100), kept(0.5, 100), kept(0.5, 100)], masks);
    RandomState::seed(5);
    assert_ne!(kept(0.5, 100), masks[0]);
}

#[test]
fn masks_do_not_depend_on_the_number_of_threads() {
    let masks: Vec<Vec<bool>> = [1, 2, 5]
        .map(|threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                RandomState::seed(6);
                kept(0.5, 300_000)
            })
        })
        .into();
    assert!(masks[0] == masks[1] && masks[0] == masks[2]);
}

#[test]
fn forward_and_backward_multiply_by_the_same_mask_in_every_dtype() {
    let (p, shape) = (0.3f32, [7, 300, 11]);
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        // What one rounding makes of a product; f32 and narrower are scaled by a factor in f32.
        let scale = 1. / (1. - f64::from(p));
        let scaled = |x: f64| match dtype {
            DType::F64 => x * scale,
            DType::F32 => f64::from((x * f64::from(scale as f32)) as f32),
            DType::BF16 => bf16::from_f64(x * f64::from(scale as f32)).to_f64(),
            _ => f16::from_f64(x * f64::from(scale as f32)).to_f64(),
        };
        RandomState::seed(7);
        let kept = kept(p, shape.iter().product());
        let by_mask = |xs: &Tensor| -> Vec<u64> {
            let products = numbers(xs).into_iter().zip(&kept);
            // A dropped element is a zero of its own sign.
            let products = products.map(|(x, kept)| if *kept { scaled(x) } else { 0.0 * x });
            products.map(f64::to_bits).collect()
        };
        let bits = |xs: &Tensor| numbers(xs).into_iter().map(f64::to_bits).collect::<Vec<_>>();

        let xs = Var::from_tensor(&values(&[7, 11, 300], 1).to_dtype(dtype).unwrap()).unwrap();
        let view = xs.transpose(1, 2).unwrap();
        RandomState::seed(7);
        let result = Dropout::new(p).forward(&view, true).unwrap();
        assert_eq!((result.dims(), result.dtype()), (&shape[..], dtype));
        assert!(bits(&result) == by_mask(&view), "{dtype:?}");

        // Keys that are drawn in between change nothing.
        RandomState::draw_key();
        let upstream = values(&shape, 2).to_dtype(dtype).unwrap();
        let gradients = (&result * &upstream).unwrap().sum_all().unwrap().backward().unwrap();
        let gradient = gradients.get(&xs).expect("a gradient").transpose(1, 2).unwrap();
        // Candle adds gradients to zeros, which takes their signs from zeros.
        let expected = by_mask(&upstream)
            .into_iter()
            .map(|bits| (f64::from_bits(bits) + 0.).to_bits());
        assert!(bits(&gradient) == expected.collect::<Vec<_>>(), "{dtype:?}");
    }
}

#[test]
fn evaluation_and_a_probability_of_zero_change_and_draw_nothing() {
    RandomState::seed(8);
    let xs = Var::from_tensor(&values(&[3, 4], 1)).unwrap();
    for result in [
        Dropout::new(0.5).forward(&xs, false),
        Dropout::new(0.5).forward_t(&xs, false),
        Dropout::new(0.).forward(&xs, true),
    ] {
        let result = result.unwrap();
        assert_eq!(numbers(&result), numbers(&xs));
        let gradients = result.sum_all().unwrap().backward().unwrap();
        assert_eq!(numbers(gradients.get(&xs).unwrap()), [1.; 12]);
    }
    assert_eq!(RandomState::current(), RandomState { seed: 8, draws: 0 });
    Dropout::new(0.5).forward_t(&xs, true).unwrap();
    assert_eq!(RandomState::current(), RandomState { seed: 8, draws: 1 });
}

#[test]
fn a_probability_that_is_none_and_integers_are_errors() {
    for p in [1., -0.1, 2., f32::NAN] {
        let message = error(Dropout::new(p).forward(&ones(3), true));
        let expected = error(candle_nn::Dropout::new(p).forward(&ones(3), true));
        // Behind the message a backtrace may follow.
        let expected = expected.lines().next().unwrap();
        assert!(message.contains(expected), "{message}, candle's: {expected}");
    }
    let integers = Tensor::ones(3, DType::U32, &Device::Cpu).unwrap();
    let message = error(Dropout::new(0.5).forward(&integers, true));
    assert!(
        message.contains("dropout: expected xs to hold floating-point numbers, got U32"),
        "{message}"
    );
}
