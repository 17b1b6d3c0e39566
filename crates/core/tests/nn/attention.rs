//! Attention, causal and of all to all, against the textbook formula, for whole, grouped and strided heads.

use std::ops::Range;

use candle_core::{D, DType, Device, Result, Tensor, Var};
use sconce_core::nn::{CausalMask, attention, causal_attention, masked_attention};

use crate::oracle::{check, check_large, error, numbers, run, values};
use crate::rotary::permuted;

const SCALE: f64 = 0.4;

struct Sizes {
    batch: usize,
    heads: usize,
    kv_heads: usize,
    sequence: usize,
    size: usize,
}

impl Sizes {
    fn inputs(&self) -> [Tensor; 3] {
        let &Self {
            batch,
            heads,
            kv_heads,
            sequence,
            size,
        } = self;
        [
            values(&[batch, heads, sequence, size], 1),
            values(&[batch, kv_heads, sequence, size], 2),
            values(&[batch, kv_heads, sequence, size], 3),
        ]
    }

    fn closed_form(&self, inputs: &[Vec<f64>]) -> Vec<f64> {
        self.definition(inputs, |_, query| 0..query + 1)
    }

    /// Query `i` of a batch entry sees the keys `seen(entry, i)`.
    fn definition(&self, inputs: &[Vec<f64>], seen: impl Fn(usize, usize) -> Range<usize>) -> Vec<f64> {
        let &Self {
            batch,
            heads,
            kv_heads,
            sequence,
            size,
        } = self;
        let mut out = Vec::new();
        for plane in 0..batch * heads {
            let (entry, head) = (plane / heads, plane % heads);
            let shared = entry * kv_heads + head / (heads / kv_heads);
            let row =
                |tensor: usize, plane: usize, row: usize| &inputs[tensor][(plane * sequence + row) * size..][..size];
            for i in 0..sequence {
                let weights: Vec<f64> = seen(entry, i)
                    .map(|j| {
                        let dot: f64 = row(0, plane, i).iter().zip(row(1, shared, j)).map(|(q, k)| q * k).sum();
                        (SCALE * dot).exp()
                    })
                    .collect();
                let sum: f64 = weights.iter().sum();
                for column in 0..size {
                    let seen = seen(entry, i).zip(&weights);
                    let attended = seen.map(|(j, weight)| weight / sum * row(2, shared, j)[column]);
                    out.push(attended.sum());
                }
            }
        }
        out
    }
}

fn attend_to_all(x: &[Tensor]) -> Result<Tensor> {
    attention(&x[0], &x[1], &x[2], SCALE)
}

fn attend(x: &[Tensor]) -> Result<Tensor> {
    causal_attention(&x[0], &x[1], &x[2], SCALE)
}

/// Attention as it is commonly written with candle.
fn composition(x: &[Tensor]) -> Result<Tensor> {
    let (batch, heads, sequence, size) = x[0].dims4()?;
    let kv_heads = x[1].dim(1)?;
    let repeat = |tensor: &Tensor| {
        Tensor::cat(&vec![tensor.unsqueeze(2)?; heads / kv_heads], 2)?.reshape((batch, heads, sequence, size))
    };
    let scores = (x[0].matmul(&repeat(&x[1])?.transpose(2, 3)?)? * SCALE)?;
    let mask: Vec<f32> = (0..sequence * sequence)
        .map(|i| {
            if i % sequence > i / sequence {
                f32::NEG_INFINITY
            } else {
                0.0
            }
        })
        .collect();
    let mask = Tensor::from_vec(mask, (sequence, sequence), &Device::Cpu)?;
    candle_nn::ops::softmax(&scores.broadcast_add(&mask)?, D::Minus1)?.matmul(&repeat(&x[2])?)
}

#[test]
fn attention_agrees_with_its_definition_and_its_differences() {
    for (batch, heads, kv_heads, sequence, size) in [
        (1, 1, 1, 1, 1),
        (1, 1, 1, 3, 1),
        (2, 1, 1, 1, 5),
        (2, 3, 3, 7, 4),
        (2, 4, 2, 5, 3),
        (2, 4, 1, 6, 2),
        (1, 2, 1, 67, 2),
    ] {
        let sizes = Sizes {
            batch,
            heads,
            kv_heads,
            sequence,
            size,
        };
        let case = format!("attention {batch} {heads}/{kv_heads} {sequence} {size}");
        check(&case, &sizes.inputs(), attend, |x| sizes.closed_form(x));
        check(&format!("{case}, to all"), &sizes.inputs(), attend_to_all, |x| {
            sizes.definition(x, |_, _| 0..sequence)
        });
    }
}

#[test]
fn a_position_sees_its_window_and_its_document_alone() {
    // The last are longer than a block of queries, and the window ends in it.
    for (window, sequence) in [(None, 9), (Some(1), 5), (Some(3), 9), (None, 67), (Some(20), 67)] {
        let sizes = Sizes {
            batch: 2,
            heads: 2,
            kv_heads: 1,
            sequence,
            size: 1,
        };
        // The second row has a document more than the first.
        let start = |entry: usize, query: usize| match (entry, query) {
            (1, 2..4) => 2,
            (_, 4..) => 4,
            _ => 0,
        };
        let starts = Vec::from_iter((0..2 * sequence).map(|i| start(i / sequence, i % sequence) as u32));
        for (documents, mask) in [(true, CausalMask::documents(starts)), (false, CausalMask::default())] {
            let mask = mask.within(window);
            let seen = |entry, query: usize| {
                let of_window = window.map_or(0, |window| (query + 1).saturating_sub(window));
                let of_document = if documents { start(entry, query) } else { 0 };
                of_window.max(of_document)..query + 1
            };
            let masked = |x: &[Tensor]| masked_attention(&x[0], &x[1], &x[2], SCALE, &mask);
            let case = format!("window {window:?}, documents {documents}, {sequence} positions");
            check(&case, &sizes.inputs(), masked, |x| sizes.definition(x, seen));
        }
    }
}

#[test]
fn a_mask_for_other_positions_is_refused() {
    let q = values(&[1, 1, 3, 2], 1);
    let refused = |mask: CausalMask| error(masked_attention(&q, &q, &q, SCALE, &mask));
    assert!(refused(CausalMask::documents(vec![0; 4])).contains("1 rows of 3 positions: it has starts for 4"));
    let later = refused(CausalMask::documents(vec![0, 2, 2]));
    assert!(
        later.contains("position 1 of row 0 is said to be in a document that begins at 2"),
        "{later}"
    );
    assert!(refused(CausalMask::default().within(Some(0))).contains("a window of 0 sees nothing"));
}

#[test]
fn attention_reads_transposed_heads_and_broken_rows() {
    let sizes = Sizes {
        batch: 2,
        heads: 4,
        kv_heads: 2,
        sequence: 5,
        size: 3,
    };
    let (dims, kv_dims) = ([2, 5, 4, 3], [2, 5, 2, 3]);
    let inputs = [values(&dims, 1), values(&kv_dims, 2), values(&kv_dims, 3)];
    let heads_last = |x: &[Tensor]| attend(&[x[0].transpose(1, 2)?, x[1].transpose(1, 2)?, x[2].transpose(1, 2)?]);
    check("attention of transposed heads", &inputs, heads_last, |x| {
        let order = [0, 2, 1, 3];
        let inputs = [
            permuted(&x[0], dims, order),
            permuted(&x[1], kv_dims, order),
            permuted(&x[2], kv_dims, order),
        ];
        sizes.closed_form(&inputs)
    });

    let dims = [2, 2, 3, 5];
    let inputs = [values(&[2, 4, 5, 3], 1), values(&dims, 2), values(&dims, 3)];
    let broken_rows = |x: &[Tensor]| attend(&[x[0].clone(), x[1].transpose(2, 3)?, x[2].transpose(2, 3)?]);
    check("attention of broken rows", &inputs, broken_rows, |x| {
        let order = [0, 1, 3, 2];
        let inputs = [x[0].clone(), permuted(&x[1], dims, order), permuted(&x[2], dims, order)];
        sizes.closed_form(&inputs)
    });
}

#[test]
fn attention_agrees_with_candle_and_on_any_number_of_threads() {
    for (heads, kv_heads) in [(4, 4), (4, 2), (4, 1)] {
        let sizes = Sizes {
            batch: 2,
            heads,
            kv_heads,
            sequence: 150,
            size: 16,
        };
        check_large(
            &format!("attention {heads}/{kv_heads}"),
            &sizes.inputs(),
            attend,
            composition,
        );
    }
}

#[test]
fn attention_to_all_agrees_with_candle_and_on_any_number_of_threads() {
    for (heads, kv_heads) in [(4, 4), (4, 2)] {
        let sizes = Sizes {
            batch: 2,
            heads,
            kv_heads,
            sequence: 150,
            size: 16,
        };
        let case = format!("attention to all {heads}/{kv_heads}");
        check_large(&case, &sizes.inputs(), attend_to_all, |x| {
            let shape = (2, heads, 150, 16);
            let repeat =
                |tensor: &Tensor| Tensor::cat(&vec![tensor.unsqueeze(2)?; heads / kv_heads], 2)?.reshape(shape);
            let scores = (x[0].matmul(&repeat(&x[1])?.transpose(2, 3)?)? * SCALE)?;
            candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&repeat(&x[2])?)
        });
    }
}

#[test]
fn what_comes_later_has_no_influence() {
    let sizes = Sizes {
        batch: 1,
        heads: 2,
        kv_heads: 1,
        sequence: 70,
        size: 4,
    };
    let inputs = sizes.inputs().map(|x| x.to_dtype(DType::F32).unwrap());
    let clean = attend(&inputs).unwrap();
    for position in [1, 63, 64, 69] {
        let changed = |x: &Tensor| {
            let after = (x.narrow(2, position, 70 - position).unwrap() * 10.0).unwrap();
            Tensor::cat(&[&x.narrow(2, 0, position).unwrap(), &after], 2).unwrap()
        };
        let dirty = attend(&[inputs[0].clone(), changed(&inputs[1]), changed(&inputs[2])]).unwrap();
        let before = |x: &Tensor| numbers(&x.narrow(2, 0, position).unwrap());
        assert_eq!(before(&dirty), before(&clean), "{position}");
        assert_ne!(numbers(&dirty), numbers(&clean));
    }
}

#[test]
fn frozen_keys_get_no_gradient() {
    let sizes = Sizes {
        batch: 1,
        heads: 2,
        kv_heads: 1,
        sequence: 3,
        size: 2,
    };
    let [q, k, v] = sizes.inputs();
    let (q, v) = (Var::from_tensor(&q).unwrap(), Var::from_tensor(&v).unwrap());
    for dtype in [DType::F32, DType::BF16] {
        let cast = |tensor: &Tensor| tensor.to_dtype(dtype).unwrap();
        let (q32, k32, v32) = (cast(&q), cast(&k), cast(&v));
        let result = attend(&[q32, k32.clone(), v32]).unwrap();
        let gradients = result.sum_all().unwrap().backward().unwrap();
        assert!(gradients.get(&q).is_some() && gradients.get(&v).is_some());
        assert!(gradients.get(&k32).is_none());
    }
}

#[test]
fn empty_attention_stays_empty() {
    for (batch, sequence, size) in [(0, 2, 2), (2, 0, 2), (2, 2, 0)] {
        let sizes = Sizes {
            batch,
            heads: 2,
            kv_heads: 1,
            sequence,
            size,
        };
        for dtype in [DType::F32, DType::F64] {
            let outcome = run(attend, &sizes.inputs(), dtype);
            assert_eq!(outcome.result.dims(), [batch, 2, sequence, size]);
        }
    }
}

#[test]
fn attention_names_the_shapes_that_do_not_fit() {
    let (q, kv) = (values(&[1, 4, 5, 2], 1), values(&[1, 3, 5, 2], 1));
    let message = error(causal_attention(&q, &kv, &kv, 1.0));
    assert!(
        message.contains("multiple of those of k, got q [1, 4, 5, 2] and k [1, 3, 5, 2]"),
        "{message}"
    );
    let long = values(&[1, 4, 6, 2], 1);
    let message = error(causal_attention(&q, &long, &long, 1.0));
    assert!(message.contains("expected k of shape [1, 4, 5, 2]"), "{message}");
    let message = error(causal_attention(&q, &q, &long, 1.0));
    assert!(message.contains("expected v of shape [1, 4, 5, 2]"), "{message}");
    let message = error(causal_attention(&q, &q, &q.to_dtype(DType::F32).unwrap(), 1.0));
    assert!(
        message.contains("expected v to have the dtype of q, F64, got F32"),
        "{message}"
    );
    let integers = Tensor::zeros((1, 1, 2, 2), DType::U32, &Device::Cpu).unwrap();
    let message = error(causal_attention(&integers, &integers, &integers, 1.0));
    assert!(
        message.contains("expected q to hold floating-point numbers, got U32"),
        "{message}"
    );
    let flat = values(&[4, 5, 2], 1);
    assert!(error(causal_attention(&flat, &flat, &flat, 1.0)).contains("expected q of shape"));
}
