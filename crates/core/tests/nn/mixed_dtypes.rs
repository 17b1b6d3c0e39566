//! Layers whose parameters and inputs differ in dtype: kept in f32 beside 16 bits, or f32 within autocast.

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::VarBuilder;
use sconce_core::Autocast;
use sconce_core::nn::{Embedding, LayerNorm, Linear, RmsNorm, causal_attention, embedding};

use crate::oracle::values;

const NARROW: [DType; 2] = [DType::BF16, DType::F16];

fn parameter(shape: &[usize], seed: u64) -> Var {
    Var::from_tensor(&values(shape, seed).to_dtype(DType::F32).unwrap()).unwrap()
}

fn input(shape: &[usize], dtype: DType) -> Var {
    Var::from_tensor(&values(shape, 3).to_dtype(dtype).unwrap()).unwrap()
}

/// The gradients, as f32, of the sum of results each of which is multiplied by another number; and the result.
fn differentiated(result: &Tensor, leaves: &[&Var]) -> (Vec<(DType, Vec<f32>)>, Vec<f32>) {
    let outer = values(result.dims(), 9).to_dtype(result.dtype()).unwrap();
    let loss = (result * outer)
        .unwrap()
        .to_dtype(DType::F32)
        .unwrap()
        .sum_all()
        .unwrap();
    let gradients = loss.backward().unwrap();
    let flat = |tensor: &Tensor| {
        tensor
            .to_dtype(DType::F32)
            .unwrap()
            .flatten_all()
            .unwrap()
            .to_vec1::<f32>()
            .unwrap()
    };
    let of = |leaf: &&Var| {
        let gradient = gradients.get(leaf).expect("the leaf has a gradient");
        (gradient.dtype(), flat(gradient))
    };
    (leaves.iter().map(of).collect(), flat(result))
}

/// A layer's name, its parameters, and how it is made of them.
type Made = (&'static str, Vec<Var>, fn(&[Var]) -> Box<dyn Module>);

fn layers() -> Vec<Made> {
    vec![
        ("linear", vec![parameter(&[4, 6], 1), parameter(&[4], 2)], |p| {
            Box::new(Linear::new(p[0].as_tensor().clone(), Some(p[1].as_tensor().clone())))
        }),
        ("rms_norm", vec![parameter(&[6], 1)], |p| {
            Box::new(RmsNorm::new(p[0].as_tensor().clone(), 1e-3))
        }),
        ("layer_norm", vec![parameter(&[6], 1), parameter(&[6], 2)], |p| {
            Box::new(LayerNorm::new(
                p[0].as_tensor().clone(),
                Some(p[1].as_tensor().clone()),
                1e-3,
            ))
        }),
    ]
}

#[test]
fn a_layer_that_is_kept_in_f32_computes_in_f32_and_gives_the_dtype_of_its_input() {
    for dtype in NARROW {
        for (name, parameters, make) in layers() {
            let layer = make(&parameters);
            let xs = input(&[5, 6], dtype);
            let wide = Var::from_tensor(&xs.to_dtype(DType::F32).unwrap()).unwrap();
            let result = layer.forward(&xs).unwrap();
            assert_eq!(result.dtype(), dtype, "{name}");
            let leaves = |xs| -> Vec<&Var> { parameters.iter().chain([xs]).collect() };
            let found = differentiated(&result, &leaves(&xs));
            // The same in f32, rounded once at either end.
            let rounded = layer.forward(&wide).unwrap().to_dtype(dtype).unwrap();
            let (mut gradients, result) = differentiated(&rounded, &leaves(&wide));
            let of_input = gradients.last_mut().unwrap();
            let narrow = Tensor::from_slice(&of_input.1, of_input.1.len(), &Device::Cpu)
                .unwrap()
                .to_dtype(dtype)
                .unwrap();
            *of_input = (dtype, narrow.to_dtype(DType::F32).unwrap().to_vec1().unwrap());
            assert_eq!(found, (gradients, result), "{name} in {dtype:?}");
        }
    }
}

#[test]
fn an_embedding_that_is_kept_in_f32_gives_what_the_model_computes_in() {
    /// A source of f32, whatever is asked for.
    struct Kept(Var);
    impl candle_nn::var_builder::SimpleBackend for Kept {
        fn get(&self, _: candle_core::Shape, _: &str, _: candle_nn::Init, _: DType, _: &Device) -> Result<Tensor> {
            Ok(self.0.as_tensor().clone())
        }

        fn get_unchecked(&self, _: &str, _: DType, _: &Device) -> Result<Tensor> {
            candle_core::bail!("not asked for here")
        }

        fn contains_tensor(&self, _: &str) -> bool {
            true
        }
    }
    let table = parameter(&[7, 4], 1);
    let ids = Tensor::new(&[[3u32, 6], [3, 0]], &Device::Cpu).unwrap();
    let expected = Embedding::new(table.as_tensor().clone()).forward(&ids).unwrap();
    assert_eq!(expected.dtype(), DType::F32);
    for dtype in NARROW {
        let vb = VarBuilder::from_backend(Box::new(Kept(table.clone())), dtype, Device::Cpu);
        let result = embedding(7, 4, vb).unwrap().forward(&ids).unwrap();
        let (gradients, rows) = differentiated(&result, &[&table]);
        assert_eq!((result.dtype(), gradients[0].0), (dtype, DType::F32));
        let rounded = expected.to_dtype(dtype).unwrap();
        assert_eq!(rows, differentiated(&rounded, &[&table]).1);
    }
}

#[test]
fn within_autocast_products_of_f32_are_those_of_16_bits_and_results_are_f32() {
    for dtype in NARROW {
        let parameters = [parameter(&[4, 6], 1), parameter(&[4], 2)];
        let narrow = |tensor: &Tensor| tensor.to_dtype(dtype).unwrap();
        let xs = input(&[5, 6], DType::F32);
        let leaves = [&parameters[0], &parameters[1], &xs];
        let layer = Linear::new(
            parameters[0].as_tensor().clone(),
            Some(parameters[1].as_tensor().clone()),
        );
        let result = Autocast::to(dtype).during(|| layer.forward(&xs)).unwrap();
        let by_hand = Linear::new(narrow(&parameters[0]), Some(narrow(&parameters[1])));
        let expected = by_hand.forward(&narrow(&xs)).unwrap().to_dtype(DType::F32).unwrap();
        let found = differentiated(&result, &leaves);
        assert_eq!(found, differentiated(&expected, &leaves), "{dtype:?}");
        assert!(found.0.iter().all(|(dtype, _)| *dtype == DType::F32));
        assert_ne!(
            found.1,
            differentiated(&layer.forward(&xs).unwrap(), &leaves).1,
            "{dtype:?}"
        );

        let [q, k, v] = [1, 2, 3].map(|seed| parameter(&[1, 2, 5, 4], seed));
        let result = Autocast::to(dtype)
            .during(|| causal_attention(&q, &k, &v, 0.5))
            .unwrap();
        let by_hand = causal_attention(&narrow(&q), &narrow(&k), &narrow(&v), 0.5).unwrap();
        let expected = by_hand.to_dtype(DType::F32).unwrap();
        let leaves = [&q, &k, &v];
        assert_eq!(
            differentiated(&result, &leaves),
            differentiated(&expected, &leaves),
            "{dtype:?}"
        );
    }
}

#[test]
fn within_autocast_everything_but_products_stays_f32() {
    for (name, parameters, make) in layers() {
        let (layer, xs) = (make(&parameters), input(&[5, 6], DType::F32));
        let results =
            [Autocast::to(DType::BF16), Autocast::off()].map(|cast| cast.during(|| layer.forward(&xs)).unwrap());
        let [inside, outside] = results.map(|result| differentiated(&result, &[&xs]).1);
        assert_eq!(inside == outside, name != "linear", "{name}");
    }
    // What is narrow already stays so.
    let xs = input(&[5, 6], DType::BF16);
    let layer = Linear::new(values(&[4, 6], 1).to_dtype(DType::BF16).unwrap(), None);
    let result = Autocast::to(DType::F16).during(|| layer.forward(&xs)).unwrap();
    assert_eq!(result.dtype(), DType::BF16);
}
