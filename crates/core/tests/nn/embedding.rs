//! Lookup and scatter-add, and ids that are out of range.

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use sconce_core::nn::{Embedding, as_compositions, embedding};

use crate::oracle::{check, check_large, error, numbers, run, values};

fn ids(count: usize, vocab: u32, seed: u64) -> Vec<u32> {
    numbers(&values(&[count], seed))
        .iter()
        .map(|x| ((x + 2.0) * 1000.0) as u32 % vocab)
        .collect()
}

#[test]
fn embedding_agrees_with_its_definition_and_its_differences() {
    for (vocab, hidden, shape) in [
        (1, 1, vec![1]),
        (5, 1, vec![7]),
        (3, 19, vec![2, 4]),
        (6, 4, vec![]),
        (4, 3, vec![0]),
    ] {
        let ids = ids(shape.iter().product(), vocab as u32, 1);
        let tensor = Tensor::from_vec(ids.clone(), shape.clone(), &Device::Cpu).unwrap();
        for dtype in [DType::U8, DType::U32, DType::I64] {
            let tensor = tensor.to_dtype(dtype).unwrap();
            let layer = |x: &[Tensor]| Embedding::new(x[0].clone()).forward(&tensor);
            check(
                &format!("embedding {vocab} {hidden}"),
                &[values(&[vocab, hidden], 2)],
                layer,
                |x| {
                    ids.iter()
                        .flat_map(|&id| x[0][id as usize * hidden..][..hidden].to_vec())
                        .collect()
                },
            );
        }
    }
}

#[test]
fn the_lookup_of_other_devices_adds_up_in_f32_as_that_of_the_cpu() {
    // So many small terms that a sum in bf16 would stand still.
    let ids = Tensor::zeros(3000, DType::U32, &Device::Cpu).unwrap();
    let layer = |x: &[Tensor]| Embedding::new(x[0].clone()).forward(&ids);
    let inputs = [values(&[2, 3], 5)];
    for dtype in [DType::F32, DType::BF16] {
        let fused = run(layer, &inputs, dtype);
        let composed = as_compositions(|| run(layer, &inputs, dtype));
        assert_eq!(numbers(&composed.result), numbers(&fused.result));
        assert_eq!(
            numbers(&composed.gradients[0]),
            numbers(&fused.gradients[0]),
            "{dtype:?}"
        );
    }
}

#[test]
fn embedding_keeps_the_shape_of_transposed_ids() {
    let table = values(&[6, 2], 3).to_dtype(DType::F32).unwrap();
    let ids = Tensor::new(&[[0u32, 1, 2], [3, 4, 5]], &Device::Cpu)
        .unwrap()
        .t()
        .unwrap();
    let got = Embedding::new(table.clone()).forward(&ids).unwrap();
    assert_eq!(got.dims(), [3, 2, 2]);
    assert_eq!(
        numbers(&got.get(1).unwrap().get(0).unwrap()),
        numbers(&table.get(1).unwrap())
    );
    assert_eq!(
        numbers(&got.get(1).unwrap().get(1).unwrap()),
        numbers(&table.get(4).unwrap())
    );
}

#[test]
fn embedding_agrees_with_candle_and_on_any_number_of_threads() {
    let ids = Tensor::from_vec(ids(600, 301, 4), (3, 200), &Device::Cpu).unwrap();
    check_large(
        "embedding",
        &[values(&[301, 130], 5)],
        |x| Embedding::new(x[0].clone()).forward(&ids),
        |x| candle_nn::Embedding::new(x[0].clone(), 130).forward(&ids),
    );
}

#[test]
fn an_id_out_of_range_is_named_with_its_place() {
    for dtype in [DType::F32, DType::F64] {
        let layer = Embedding::new(values(&[4, 2], 6).to_dtype(dtype).unwrap());
        let ids = Tensor::new(&[[0u32, 1], [4, 2]], &Device::Cpu).unwrap();
        let message = error(layer.forward(&ids));
        assert!(
            message.contains("below the vocabulary size 4, got 4 at element 2"),
            "{message}"
        );
        let message = error(layer.forward(&Tensor::new(&[1i64, -1], &Device::Cpu).unwrap()));
        assert!(message.contains("got -1 at element 1"), "{message}");
        let message = error(layer.forward(&Tensor::new(&[1f32], &Device::Cpu).unwrap()));
        assert!(
            message.contains("expected ids of dtype U8, U32 or I64, got F32"),
            "{message}"
        );
    }
}

#[test]
fn embedding_registers_a_table() {
    let vars = VarMap::new();
    let builder = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let layer = embedding(5, 3, builder.pp("tokens")).unwrap();
    assert_eq!(layer.weight().dims(), [5, 3]);
    assert!(vars.data().lock().unwrap().contains_key("tokens.weight"));
}
