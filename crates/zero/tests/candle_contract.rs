//! What candle 0.11.1 does and this crate leans on, one test per fact.
//!
//! When a candle upgrade makes one of these fail, the fact in its name has changed; `docs/architecture.md` says what
//! depends on it.

use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CustomOp1, D, DType, Device, InplaceOp1, Layout, Result, Shape, Storage, Tensor, Var};
use candle_nn::{Init, Module, VarBuilder, var_builder::SimpleBackend};
use std::sync::{Arc, Mutex};

/// What a hook saw: its number and the gradient.
type Seen = Arc<Mutex<Vec<(usize, Tensor)>>>;

/// Hands its own data out and records the gradients that come back.
struct Hook {
    number: usize,
    data: Mutex<Option<Vec<f32>>>,
    seen: Seen,
    /// What `bwd` does before it returns `None`.
    then: fn(&Tensor) -> Result<()>,
}

impl CustomOp1 for Hook {
    fn name(&self) -> &'static str {
        "contract-hook"
    }

    fn cpu_fwd(&self, _anchor: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let data = self.data.lock().unwrap().take().unwrap();
        Ok((CpuStorage::F32(data), layout.shape().clone()))
    }

    fn bwd(&self, _anchor: &Tensor, _result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.seen.lock().unwrap().push((self.number, gradient.clone()));
        (self.then)(gradient)?;
        Ok(None)
    }
}

/// A leaf without data.
fn anchor(shape: impl Into<Shape>) -> Tensor {
    Tensor::from_storage(
        Storage::Cpu(CpuStorage::F32(Vec::new())),
        shape,
        BackpropOp::none(),
        true,
    )
}

fn hooked_then(values: &Tensor, number: usize, seen: &Seen, then: fn(&Tensor) -> Result<()>) -> Tensor {
    let data = Mutex::new(Some(flat(values)));
    let seen = Arc::clone(seen);
    anchor(values.shape())
        .apply_op1(Hook {
            number,
            data,
            seen,
            then,
        })
        .unwrap()
}

fn hooked(values: &Tensor, number: usize, seen: &Seen) -> Tensor {
    hooked_then(values, number, seen, |_| Ok(()))
}

fn flat(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

/// A ramp of `shape`, in steps of 0.25 from -1.
fn ramp(shape: impl Into<Shape>) -> Tensor {
    let shape = shape.into();
    let values: Vec<f32> = (0..shape.elem_count()).map(|i| i as f32 * 0.25 - 1.0).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

fn is_tracked(tensor: &Tensor) -> bool {
    !tensor.sorted_nodes().is_empty()
}

#[test]
fn bwd_is_called_once_per_backward_after_all_consumers() {
    let seen = Seen::default();
    let p = hooked(&ramp(4), 0, &seen);
    // Three consumers at different depths: d/dp (p + 3p + p²) = 4 + 2p.
    let deep = ((&p * 3.0).unwrap() + 1.0).unwrap();
    let loss = (((&p + deep).unwrap() + p.sqr().unwrap()).unwrap()).sum_all().unwrap();
    for backwards in 1..=2 {
        loss.backward().unwrap();
        assert_eq!(seen.lock().unwrap().len(), backwards);
    }
    let expected: Vec<f32> = flat(&p).iter().map(|p| 4.0 + 2.0 * p).collect();
    assert_eq!(flat(&seen.lock().unwrap()[1].1), expected);
}

#[test]
fn none_for_a_leaf_is_accepted_and_leaves_no_entry() {
    let seen = Seen::default();
    let anchor = anchor(4);
    let data = Mutex::new(Some(vec![1.0; 4]));
    let hook = Hook {
        number: 0,
        data,
        seen: Arc::clone(&seen),
        then: |_| Ok(()),
    };
    let p = anchor.apply_op1(hook).unwrap();
    let gradients = p.sum_all().unwrap().backward().unwrap();
    assert_eq!(seen.lock().unwrap().len(), 1);
    assert!(gradients.get(&anchor).is_none());
    assert!(gradients.get(&p).is_none());
}

#[test]
fn none_for_a_tracked_tensor_that_is_no_leaf_panics() {
    let inner = (Var::from_tensor(&ramp(4)).unwrap().as_tensor() * 2.0).unwrap();
    let data = Mutex::new(Some(vec![1.0; 4]));
    let hook = Hook {
        number: 0,
        data,
        seen: Seen::default(),
        then: |_| Ok(()),
    };
    let loss = inner.apply_op1(hook).unwrap().sum_all().unwrap();
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| loss.backward().map(drop)));
    assert!(outcome.is_err());
}

#[test]
fn an_error_of_bwd_comes_out_of_backward_with_its_text() {
    let p = hooked_then(&ramp(4), 0, &Seen::default(), |_| {
        candle_core::bail!("the bucket is away")
    });
    let error = p.sum_all().unwrap().backward().unwrap_err();
    assert!(error.to_string().contains("the bucket is away"), "{error}");
}

/// Three linear layers of hooked parameters: weight number 2i, bias 2i + 1.
fn three_layers(seen: &Seen) -> Tensor {
    let mut x = ramp((5, 3));
    for layer in 0..3 {
        let weight = hooked(&ramp((3, 3)), 2 * layer, seen);
        let bias = hooked(&ramp(3), 2 * layer + 1, seen);
        x = candle_nn::Linear::new(weight, Some(bias))
            .forward(&x)
            .unwrap()
            .gelu()
            .unwrap();
    }
    x.sum_all().unwrap()
}

#[test]
fn gradients_are_ready_in_the_order_of_sorted_nodes() {
    let seen = Seen::default();
    let mut numbers = std::collections::HashMap::new();
    let mut x = ramp((5, 3));
    for number in 0..4 {
        let weight = hooked(&ramp((3, 3)), number, &seen);
        numbers.insert(weight.id(), number);
        x = x.matmul(&weight).unwrap().sqr().unwrap();
    }
    let loss = x.mean_all().unwrap();
    let nodes = loss.sorted_nodes();
    let planned: Vec<usize> = nodes
        .iter()
        .filter_map(|node| numbers.get(&node.id()).copied())
        .collect();
    loss.backward().unwrap();
    let arrived: Vec<usize> = seen.lock().unwrap().iter().map(|(number, _)| *number).collect();
    assert_eq!(planned.len(), 4);
    assert_eq!(arrived, planned);
}

#[test]
fn a_layers_gradients_are_ready_before_the_layers_before_it() {
    let seen = Seen::default();
    three_layers(&seen).backward().unwrap();
    let arrived: Vec<usize> = seen.lock().unwrap().iter().map(|(number, _)| *number).collect();
    assert_eq!(arrived, [5, 4, 3, 2, 1, 0]);
}

#[test]
fn a_variable_without_storage_carries_shape_dtype_and_identity() {
    let leaf = anchor((3, 5));
    assert_eq!(
        (leaf.dims(), leaf.dtype(), leaf.is_variable()),
        (&[3, 5][..], DType::F32, true)
    );
    let var = Var::from_tensor(&leaf).unwrap();
    assert_eq!(var.as_tensor().id(), leaf.id());
}

#[test]
fn a_custom_op_may_ignore_its_input_and_hand_out_storage_without_a_copy() {
    let values = vec![1.5f32; 8];
    let address = values.as_ptr();
    let hook = Hook {
        number: 0,
        data: Mutex::new(Some(values)),
        seen: Seen::default(),
        then: |_| Ok(()),
    };
    let result = anchor((2, 4)).apply_op1(hook).unwrap();
    let (storage, _) = result.storage_and_layout();
    let Storage::Cpu(CpuStorage::F32(values)) = &*storage else {
        panic!("f32 on the CPU")
    };
    assert_eq!(values.as_ptr(), address);
}

#[test]
fn a_custom_op_is_recorded_only_for_tracked_inputs() {
    let op = || {
        let data = Mutex::new(Some(vec![1.0; 4]));
        Hook {
            number: 0,
            data,
            seen: Seen::default(),
            then: |_| Ok(()),
        }
    };
    assert!(!is_tracked(&ramp(4).apply_op1(op()).unwrap()));
    assert!(is_tracked(&anchor(4).apply_op1(op()).unwrap()));
}

/// Exchanges a storage as a whole.
struct Swap(Mutex<Vec<f32>>);

impl InplaceOp1 for Swap {
    fn name(&self) -> &'static str {
        "contract-swap"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _layout: &Layout) -> Result<()> {
        let CpuStorage::F32(values) = storage else {
            candle_core::bail!("f32")
        };
        std::mem::swap(values, &mut *self.0.lock().unwrap());
        Ok(())
    }
}

#[test]
fn an_inplace_op_may_replace_storage_and_clones_views_and_detached_tensors_see_it() {
    let tensor = ramp((2, 2));
    let (clone, view, detached) = (tensor.clone(), tensor.t().unwrap(), tensor.detach());
    let swap = Swap(Mutex::new(vec![1.0, 2.0, 3.0, 4.0]));
    tensor.inplace_op1(&swap).unwrap();
    assert_eq!(swap.0.into_inner().unwrap(), flat(&ramp((2, 2))));
    assert_eq!(flat(&clone), [1.0, 2.0, 3.0, 4.0]);
    assert_eq!(flat(&view.contiguous().unwrap()), [1.0, 3.0, 2.0, 4.0]);
    assert_eq!(flat(&detached), [1.0, 2.0, 3.0, 4.0]);
}

#[test]
fn backward_reads_the_storage_that_is_there_when_it_runs() {
    let w = hooked(&ramp(3), 0, &Seen::default());
    let x = Var::from_tensor(&ramp(3)).unwrap();
    let loss = (&w * x.as_tensor()).unwrap().sum_all().unwrap();
    w.inplace_op1(&Swap(Mutex::new(vec![7.0, 8.0, 9.0]))).unwrap();
    let gradients = loss.backward().unwrap();
    assert_eq!(flat(gradients.get(&x).unwrap()), [7.0, 8.0, 9.0]);
}

#[test]
fn bwd_may_run_a_backward_of_its_own() {
    let seen = Seen::default();
    let p = hooked_then(&ramp(4), 0, &seen, |gradient| {
        let inner = Var::from_tensor(gradient)?;
        let gradients = inner.as_tensor().sqr()?.sum_all()?.backward()?;
        match gradients.get(&inner) {
            Some(found) if flat(found) == [6.0; 4] => Ok(()),
            _ => candle_core::bail!("the inner backward went wrong"),
        }
    });
    let q = Var::from_tensor(&ramp(4)).unwrap();
    let loss = ((&p * 3.0).unwrap() + q.as_tensor()).unwrap().sum_all().unwrap();
    let gradients = loss.backward().unwrap();
    assert_eq!(flat(&seen.lock().unwrap()[0].1), [3.0; 4]);
    assert_eq!(flat(gradients.get(&q).unwrap()), [1.0; 4]);
}

#[test]
fn backward_accepts_a_loss_of_many_elements_silently() {
    let x = Var::from_tensor(&ramp(3)).unwrap();
    let gradients = (x.as_tensor() * 2.0).unwrap().backward().unwrap();
    assert_eq!(flat(gradients.get(&x).unwrap()), [2.0; 3]);
}

#[test]
fn a_gradient_has_no_history_of_its_own() {
    let seen = Seen::default();
    let p = hooked(&ramp(4), 0, &seen);
    p.sqr().unwrap().sum_all().unwrap().backward().unwrap();
    assert!(!is_tracked(&seen.lock().unwrap()[0].1));
}

/// A way to use a parameter.
type Use<'a> = &'a dyn Fn(&Tensor) -> Tensor;

#[test]
fn gradients_arrive_contiguous_whatever_the_use() {
    let x = ramp((2, 4));
    let uses: [(&str, Use<'_>); 5] = [
        ("transposed", &|w| w.t().unwrap().matmul(&ramp((3, 2))).unwrap()),
        ("narrowed", &|w| w.narrow(1, 1, 2).unwrap().sqr().unwrap()),
        ("permuted", &|w| w.permute((1, 0)).unwrap()),
        ("broadcast", &|w| w.broadcast_as((2, 3, 4)).unwrap()),
        ("right operand", &|w| x.matmul(&w.t().unwrap()).unwrap()),
    ];
    for (name, tensor_use) in uses {
        let seen = Seen::default();
        let w = hooked(&ramp((3, 4)), 0, &seen);
        tensor_use(&w).sum_all().unwrap().backward().unwrap();
        let gradient = seen.lock().unwrap()[0].1.clone();
        assert!(gradient.is_contiguous(), "{name}");
        assert_eq!(gradient.dims(), [3, 4], "{name}");
        // Central differences of the same function, in f64 by sums of f32 that are exact here.
        let at = |index: usize, change: f32| -> f64 {
            let mut values = flat(&ramp((3, 4)));
            values[index] += change;
            let moved = tensor_use(&Tensor::from_vec(values, (3, 4), &Device::Cpu).unwrap());
            moved
                .to_dtype(DType::F64)
                .unwrap()
                .sum_all()
                .unwrap()
                .to_scalar()
                .unwrap()
        };
        for (index, found) in flat(&gradient).iter().enumerate() {
            let expected = at(index, 0.5) - at(index, -0.5);
            assert!(
                (f64::from(*found) - expected).abs() < 1e-5,
                "{name}, {index}: {found} and {expected}"
            );
        }
    }
}

#[test]
fn a_gradient_has_the_dtype_of_its_tensor_not_that_of_the_loss() {
    for dtype in [DType::F64, DType::BF16, DType::F16] {
        let seen = Seen::default();
        let p = hooked(&ramp(4), 0, &seen);
        p.to_dtype(dtype).unwrap().sum_all().unwrap().backward().unwrap();
        assert_eq!(seen.lock().unwrap()[0].1.dtype(), DType::F32);
    }
    let half = Var::from_tensor(&ramp(4).to_dtype(DType::BF16).unwrap()).unwrap();
    let loss = half.to_dtype(DType::F32).unwrap().sum_all().unwrap();
    assert_eq!(loss.backward().unwrap().get(&half).unwrap().dtype(), DType::BF16);
}

#[test]
fn layers_without_backward_cut_the_graph_silently() {
    let x = Var::from_tensor(&ramp((1, 2, 3, 4))).unwrap();
    let x = (x.as_tensor() * 2.0).unwrap();
    let one = Tensor::ones(4, DType::F32, &Device::Cpu).unwrap();
    let one = Var::from_tensor(&one).unwrap();
    let (cos, sin) = (ramp((3, 2)), ramp((3, 2)));
    let rms = candle_nn::RmsNorm::new(one.as_tensor().clone(), 1e-5);
    assert!(!is_tracked(&rms.forward(&x).unwrap()), "RmsNorm");
    let norm = candle_nn::LayerNorm::new(one.as_tensor().clone(), one.as_tensor().clone(), 1e-5);
    assert!(!is_tracked(&norm.forward(&x).unwrap()), "LayerNorm");
    assert!(
        !is_tracked(&candle_nn::ops::softmax_last_dim(&x).unwrap()),
        "softmax_last_dim"
    );
    assert!(
        !is_tracked(&candle_nn::rotary_emb::rope(&x, &cos, &sin).unwrap()),
        "rope"
    );
    assert!(
        !is_tracked(&candle_nn::rotary_emb::rope_i(&x, &cos, &sin).unwrap()),
        "rope_i"
    );
}

#[test]
fn their_slow_forms_do_not_cut_the_graph() {
    let x = Var::from_tensor(&ramp((1, 2, 3, 4))).unwrap();
    let one = Tensor::ones(4, DType::F32, &Device::Cpu).unwrap();
    let (cos, sin) = (ramp((3, 2)), ramp((3, 2)));
    let rms = candle_nn::RmsNorm::new(one.clone(), 1e-5);
    assert!(is_tracked(&rms.forward_diff(&x).unwrap()));
    assert!(is_tracked(
        &candle_nn::LayerNorm::new_no_bias(one, 1e-5).forward(&x).unwrap()
    ));
    assert!(is_tracked(&candle_nn::ops::softmax(&x, D::Minus1).unwrap()));
    assert!(is_tracked(&candle_nn::rotary_emb::rope_slow(&x, &cos, &sin).unwrap()));
}

#[test]
fn rounding_and_a_factor_of_zero_cut_the_graph() {
    let x = Var::from_tensor(&ramp(4)).unwrap();
    for cut in [x.floor(), x.round(), x.ceil(), x.sign(), x.affine(0.0, 1.0)] {
        let loss = cut.unwrap().sum_all().unwrap();
        assert!(loss.backward().unwrap().get(&x).is_none());
    }
}

#[test]
fn gradients_of_untracked_operands_are_computed_and_kept() {
    let x = Var::from_tensor(&ramp((2, 3))).unwrap();
    let frozen = ramp((3, 2));
    let gradients = x.matmul(&frozen).unwrap().sum_all().unwrap().backward().unwrap();
    assert!(gradients.get(&frozen).is_some());
}

#[test]
fn nearest_upsampling_overwrites_the_gradient_of_other_consumers_in_one_order() {
    let x = Var::from_tensor(&ramp((1, 1, 2, 2))).unwrap();
    let threefold = (x.as_tensor() * 3.0).unwrap().sum_all().unwrap();
    let upsampled = x.upsample_nearest2d(4, 4).unwrap().sum_all().unwrap();
    let gradient = |loss: Tensor| flat(loss.backward().unwrap().get(&x).unwrap());
    // Each element goes into four pixels and a factor of 3: 7 in truth.
    let mut found = [
        gradient((&threefold + &upsampled).unwrap())[0],
        gradient((&upsampled + &threefold).unwrap())[0],
    ];
    found.sort_by(f32::total_cmp);
    assert_eq!(found, [4.0, 7.0]);
}

/// Hands out a tracked tensor that is no leaf, and remembers how often it was asked.
struct Backend(Arc<Mutex<Vec<(String, Tensor)>>>);

impl SimpleBackend for Backend {
    fn get(&self, shape: Shape, name: &str, _init: Init, _dtype: DType, _device: &Device) -> Result<Tensor> {
        let tensor = hooked(&ramp(shape), 0, &Seen::default());
        self.0.lock().unwrap().push((name.into(), tensor.clone()));
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, _dtype: DType, _device: &Device) -> Result<Tensor> {
        candle_core::bail!("{name} without a shape")
    }

    fn contains_tensor(&self, _name: &str) -> bool {
        true
    }
}

#[test]
fn a_layer_asks_its_var_builder_once_per_parameter_and_keeps_that_tensor() {
    let asked = Arc::default();
    let vb = VarBuilder::from_backend(Box::new(Backend(Arc::clone(&asked))), DType::F32, Device::Cpu);
    let linear = candle_nn::linear(3, 2, vb.pp("mlp.up")).unwrap();
    let asked = asked.lock().unwrap();
    let names: Vec<&str> = asked.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["mlp.up.weight", "mlp.up.bias"]);
    assert_eq!(linear.weight().id(), asked[0].1.id());
    assert_eq!(linear.bias().unwrap().id(), asked[1].1.id());
}
