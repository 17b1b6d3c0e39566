//! LoRA against its formula, written out.

use candle_core::{DType, Device, Module, ModuleT, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use sconce_core::nn::{LoraLinear, LoraOptions, lora_linear};

use crate::oracle::{error, numbers, values};

const IN: usize = 7;
const OUT: usize = 5;
const OPTIONS: LoraOptions = LoraOptions {
    rank: 3,
    alpha: 5.0,
    dropout: 0.0,
    rank_stabilized: false,
};

/// A layer whose base is frozen, and its adapter as variables.
fn layer(options: &LoraOptions, b: &Tensor) -> (LoraLinear, Var, Var) {
    let variable = |tensor: Tensor| Var::from_tensor(&tensor.to_dtype(DType::F32).unwrap()).unwrap();
    let (a, b) = (variable(values(&[options.rank, IN], 1)), variable(b.clone()));
    let frozen = |tensor: Tensor| tensor.to_dtype(DType::F32).unwrap();
    let tensors = [
        ("layer.weight", frozen(values(&[OUT, IN], 3))),
        ("layer.bias", frozen(values(&[OUT], 4))),
        ("layer.lora_A.weight", a.as_tensor().clone()),
        ("layer.lora_B.weight", b.as_tensor().clone()),
    ];
    let tensors = tensors.map(|(name, tensor)| (name.to_owned(), tensor));
    let vb = VarBuilder::from_tensors(tensors.into_iter().collect(), DType::F32, &Device::Cpu);
    (lora_linear(IN, OUT, true, options, vb.pp("layer")).unwrap(), a, b)
}

/// Computes the formula in f64 with all parts as variables; returns the result, and the gradients of input, A and B of
/// `sum(upstream * result)`.
fn expected(xs: &Tensor, a: &Var, b: &Var) -> Result<[Vec<f64>; 4]> {
    let wide = |tensor: &Tensor| Var::from_tensor(&tensor.to_dtype(DType::F64)?);
    let (xs, a, b) = (wide(xs)?, wide(a)?, wide(b)?);
    let (weight, bias) = (values(&[OUT, IN], 3), values(&[OUT], 4));
    let base = xs.matmul(&weight.t()?)?.broadcast_add(&bias)?;
    let adapted = xs.matmul(&a.t()?)?.matmul(&b.t()?)?;
    let result = (base + (adapted * (OPTIONS.alpha / OPTIONS.rank as f64))?)?;
    let gradients = (&result * values(result.dims(), 99))?.sum_all()?.backward()?;
    let gradient = |var: &Var| numbers(gradients.get(var).unwrap());
    Ok([numbers(&result), gradient(&xs), gradient(&a), gradient(&b)])
}

fn assert_near(what: &str, found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let far = found
        .iter()
        .zip(expected)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f64::max);
    assert!(far < 1e-4, "{what}: {far}");
}

#[test]
fn results_and_gradients_are_those_of_the_formula_and_the_base_gets_none() {
    let (layer, a, b) = layer(&OPTIONS, &values(&[OUT, 3], 2));
    let xs = Var::from_tensor(&values(&[4, IN], 5).to_dtype(DType::F32).unwrap()).unwrap();
    let [result, of_xs, of_a, of_b] = expected(&xs, &a, &b).unwrap();
    let found = layer.forward_t(&xs, false).unwrap();
    assert_near("result", &numbers(&found), &result);
    let upstream = values(&[4, OUT], 99).to_dtype(DType::F32).unwrap();
    let gradients = (found * upstream).unwrap().sum_all().unwrap().backward().unwrap();
    for (what, var, expected) in [("xs", &xs, of_xs), ("A", &a, of_a), ("B", &b, of_b)] {
        assert_near(what, &numbers(gradients.get(var).unwrap()), &expected);
    }
    assert!(gradients.get(layer.base().weight()).is_none());
    // The same as one linear layer, for inference.
    let merged = candle_nn::Linear::new(layer.merged_weight().unwrap(), layer.base().bias().cloned());
    assert_near("merged", &numbers(&merged.forward(&xs).unwrap()), &result);
    // Of more dimensions.
    let blocks = xs.reshape((2, 2, IN)).unwrap();
    assert_near("blocks", &numbers(&layer.forward_t(&blocks, false).unwrap()), &result);
}

#[test]
fn an_adapter_begins_with_what_the_base_computes_and_with_the_values_of_peft() {
    let map = VarMap::new();
    let vb = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
    let options = LoraOptions {
        rank: 64,
        ..LoraOptions::default()
    };
    let layer = lora_linear(100, 20, false, &options, vb).unwrap();
    let xs = values(&[3, 100], 6).to_dtype(DType::F32).unwrap();
    let base = layer.base().forward(&xs).unwrap();
    assert_eq!(numbers(&layer.forward_t(&xs, false).unwrap()), numbers(&base));
    let data = map.data().lock().unwrap();
    let mut names = Vec::from_iter(data.keys().cloned());
    names.sort();
    assert_eq!(names, ["lora_A.weight", "lora_B.weight", "weight"]);
    // kaiming_uniform_(a=sqrt(5)) of [64, 100] is uniform within 1 / sqrt(100): of standard deviation 0.1 / sqrt(3).
    let a = numbers(data["lora_A.weight"].as_tensor());
    let square = a.iter().map(|value| value * value).sum::<f64>() / a.len() as f64;
    assert!(a.iter().all(|value| value.abs() <= 0.1));
    assert!((square.sqrt() - 0.1 / 3f64.sqrt()).abs() < 2e-3, "{square}");
}

#[test]
fn dropout_is_of_the_adapter_alone_and_in_training_alone() {
    let options = LoraOptions {
        dropout: 0.5,
        ..OPTIONS
    };
    let (layer, _, _) = layer(&options, &values(&[OUT, 3], 2));
    let xs = values(&[4, IN], 5).to_dtype(DType::F32).unwrap();
    let forward = |train| numbers(&layer.forward_t(&xs, train).unwrap());
    assert_eq!(forward(false), forward(false));
    assert_ne!(forward(true), forward(false));
    let (without, _, _) = self::layer(&options, &Tensor::zeros((OUT, 3), DType::F32, &Device::Cpu).unwrap());
    let base = numbers(&without.base().forward(&xs).unwrap());
    assert_eq!(
        numbers(&without.forward_t(&xs, true).unwrap()),
        base,
        "the base sees all of its input"
    );
}

#[test]
fn a_rank_stabilized_adapter_is_scaled_by_the_root_of_its_rank() {
    let options = LoraOptions {
        rank: 4,
        alpha: 6.0,
        ..OPTIONS
    };
    let stabilized = LoraOptions {
        rank_stabilized: true,
        ..options
    };
    assert_eq!((options.scale(), stabilized.scale()), (1.5, 3.0));
    let xs = values(&[3, IN], 5).to_dtype(DType::F32).unwrap();
    let b = values(&[OUT, 4], 2);
    let of_adapter = |options: &LoraOptions| {
        let (layer, _, _) = layer(options, &b);
        let base = layer.base().forward(&xs).unwrap();
        numbers(&(layer.forward_t(&xs, false).unwrap() - base).unwrap())
    };
    let twice = Vec::from_iter(of_adapter(&options).iter().map(|value| 2.0 * value));
    assert_near("adapter", &of_adapter(&stabilized), &twice);
}

#[test]
fn a_rank_of_zero_is_refused() {
    let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
    let options = LoraOptions {
        rank: 0,
        ..LoraOptions::default()
    };
    let refused = error(lora_linear(IN, OUT, true, &options, vb));
    assert!(refused.contains("a rank of at least 1"), "{refused}");
}
