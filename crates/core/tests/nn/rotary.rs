//! Rotation in the convention of Hugging Face's Llama, for whole sequences and single steps.

use candle_core::{DType, Device, Tensor};
use sconce_core::nn::RotaryEmbedding;

use crate::oracle::{check, check_large, error, numbers, values};

const THETA: f64 = 10_000.0;

fn rotary(head_dim: usize, max_positions: usize, dtype: DType) -> RotaryEmbedding {
    RotaryEmbedding::new(head_dim, max_positions, THETA, dtype, &Device::Cpu).unwrap()
}

/// The definition of transformers' Llama on rows of `size` elements, `sequence` to a head.
fn closed_form(xs: &[f64], size: usize, sequence: usize, start: usize) -> Vec<f64> {
    let row = |(row, xs): (usize, &[f64])| -> Vec<f64> {
        let position = (start + row % sequence) as f64;
        (0..size)
            .map(|i| {
                let half = size / 2;
                let pair = i % half;
                let angle = position * THETA.powf(-2.0 * pair as f64 / size as f64);
                let other = if i < half { -xs[i + half] } else { xs[i - half] };
                xs[i] * angle.cos() + other * angle.sin()
            })
            .collect()
    };
    xs.chunks(size).enumerate().flat_map(row).collect()
}

#[test]
fn rotation_agrees_with_its_definition_and_its_differences() {
    for (shape, start) in [
        ([1, 1, 1, 2], 0),
        ([1, 1, 1, 2], 5),
        ([2, 3, 5, 6], 0),
        ([1, 2, 3, 34], 4),
    ] {
        let inputs = [values(&shape, 1)];
        let layer = |x: &[Tensor]| rotary(shape[3], 9, x[0].dtype()).apply(&x[0], start);
        let definition = |x: &[Vec<f64>]| closed_form(&x[0], shape[3], shape[2], start);
        check(&format!("rotary {shape:?} from {start}"), &inputs, layer, definition);
    }
}

#[test]
fn rotation_reads_transposed_heads_and_broken_rows() {
    let inputs = [values(&[2, 3, 4, 6], 2)];
    let heads_last = |x: &[Tensor]| rotary(6, 9, x[0].dtype()).apply(&x[0].transpose(1, 2)?, 1);
    check("rotary of transposed heads", &inputs, heads_last, |x| {
        closed_form(&permuted(&x[0], [2, 3, 4, 6], [0, 2, 1, 3]), 6, 3, 1)
    });
    let broken_rows = |x: &[Tensor]| rotary(4, 9, x[0].dtype()).apply(&x[0].transpose(2, 3)?, 1);
    check("rotary of broken rows", &inputs, broken_rows, |x| {
        closed_form(&permuted(&x[0], [2, 3, 4, 6], [0, 1, 3, 2]), 4, 6, 1)
    });
}

pub(crate) fn permuted(xs: &[f64], dims: [usize; 4], order: [usize; 4]) -> Vec<f64> {
    let strides = [dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1];
    let (dims, strides) = (order.map(|axis| dims[axis]), order.map(|axis| strides[axis]));
    (0..xs.len())
        .map(|i| {
            let [_, b, c, d] = dims;
            let place = [i / (b * c * d), i / (c * d) % b, i / d % c, i % d];
            xs[place
                .iter()
                .zip(strides)
                .map(|(place, stride)| place * stride)
                .sum::<usize>()]
        })
        .collect()
}

#[test]
fn rotation_agrees_with_candle_and_on_any_number_of_threads() {
    let inputs = [values(&[2, 3, 129, 64], 3)];
    let tables = |xs: &Tensor| -> candle_core::Result<(Tensor, Tensor)> {
        let positions = Tensor::arange(0f32, 129.0, &Device::Cpu)?.unsqueeze(1)?;
        let rates: Vec<f32> = (0..32).map(|i| THETA.powf(-i as f64 / 32.0) as f32).collect();
        let angles = positions.broadcast_mul(&Tensor::new(rates, &Device::Cpu)?.unsqueeze(0)?)?;
        Ok((angles.cos()?.to_dtype(xs.dtype())?, angles.sin()?.to_dtype(xs.dtype())?))
    };
    // The angles are in the hundreds: both sides take the same tables, or their rounding would show.
    let (cos, sin) = tables(&Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap()).unwrap();
    let layer = RotaryEmbedding::from_tables(cos, sin).unwrap();
    check_large(
        "rotary",
        &inputs,
        |x| layer.apply(&x[0], 0),
        |x| {
            let (cos, sin) = tables(&x[0])?;
            candle_nn::rotary_emb::rope_slow(&x[0], &cos, &sin)
        },
    );
}

#[test]
fn neighbours_turn_by_the_same_angles_as_halves() {
    for (shape, start) in [([1, 1, 1, 2], 5), ([2, 3, 5, 6], 0), ([1, 2, 3, 34], 4)] {
        let inputs = [values(&shape, 1)];
        let layer = |x: &[Tensor]| rotary(shape[3], 9, x[0].dtype()).of_neighbours().apply(&x[0], start);
        check(&format!("rotary of neighbours {shape:?}"), &inputs, layer, |x| {
            neighbours(&x[0], shape[3], shape[2], start)
        });
    }
    let inputs = [values(&[2, 3, 4, 6], 2)];
    let heads_last = |x: &[Tensor]| {
        rotary(6, 9, x[0].dtype())
            .of_neighbours()
            .apply(&x[0].transpose(1, 2)?, 1)
    };
    check("rotary of transposed neighbours", &inputs, heads_last, |x| {
        neighbours(&permuted(&x[0], [2, 3, 4, 6], [0, 2, 1, 3]), 6, 3, 1)
    });
}

/// The paper's rotation, of elements `2 i` and `2 i + 1`, by complex numbers.
fn neighbours(xs: &[f64], size: usize, sequence: usize, start: usize) -> Vec<f64> {
    let row = |(row, xs): (usize, &[f64])| -> Vec<f64> {
        let position = (start + row % sequence) as f64;
        let turn = |(pair, xs): (usize, &[f64])| {
            let (length, phase) = (xs[0].hypot(xs[1]), xs[1].atan2(xs[0]));
            let phase = phase + position * THETA.powf(-2.0 * pair as f64 / size as f64);
            [length * phase.cos(), length * phase.sin()]
        };
        xs.chunks(2).enumerate().flat_map(turn).collect()
    };
    xs.chunks(size).enumerate().flat_map(row).collect()
}

#[test]
fn decoding_step_by_step_agrees_with_the_whole_sequence() {
    let layer = rotary(8, 16, DType::F32);
    let xs = values(&[1, 2, 6, 8], 4).to_dtype(DType::F32).unwrap();
    let whole = layer.apply(&xs, 3).unwrap();
    for step in 0..6 {
        let one = layer.apply(&xs.narrow(2, step, 1).unwrap(), 3 + step).unwrap();
        assert_eq!(numbers(&one), numbers(&whole.narrow(2, step, 1).unwrap()));
    }
    assert_eq!(layer.max_positions(), 16);
}

#[test]
fn rotary_names_what_does_not_fit() {
    let layer = rotary(8, 16, DType::F32);
    let xs = |shape: &[usize]| values(shape, 5).to_dtype(DType::F32).unwrap();
    let message = error(layer.apply(&xs(&[1, 2, 6, 8]), 11));
    assert!(message.contains("expected positions below 16, got 11..17"), "{message}");
    assert!(error(layer.apply(&xs(&[1, 2, 6, 8]), usize::MAX)).contains("expected positions below 16"));
    let message = error(layer.apply(&xs(&[1, 2, 6, 10]), 0));
    assert!(
        message.contains("expected xs with head_dim 8, got [1, 2, 6, 10]"),
        "{message}"
    );
    assert!(error(layer.apply(&xs(&[2, 6, 8]), 0)).contains("[batch, heads, sequence, head_dim], got [2, 6, 8]"));
    let odd = RotaryEmbedding::new(7, 4, THETA, DType::F32, &Device::Cpu);
    assert!(error(odd).contains("expected an even head_dim, got 7"));
    let tables = RotaryEmbedding::from_tables(xs(&[4, 3]), xs(&[4, 2]));
    assert!(error(tables).contains("expected sin of shape [4, 3], got [4, 2]"));
}
