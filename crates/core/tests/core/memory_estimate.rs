//! What training takes in memory: sizes of published models, ZeRO's formulas, Accelerate's table, and what cannot be read.

use super::{accelerator, fixture, on_ranks};
use candle_core::{DType, Device, Tensor};
use sconce_core::deepspeed::MixedPrecision;
use sconce_core::memory_estimate::{
    AdamTable, ComputeDevice, EstimateError, Limits, MemoryEstimate, ModelShape, RunChoice, RunStrategy, TableDtype,
    Workload, candidates,
};
use sconce_core::{AcceleratorBuilder, FsdpStrategy, Sgd, Tier, Weights};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::Path;

fn model(config: &Value) -> ModelShape {
    ModelShape::from_config(&config.to_string(), Path::new("config.json")).unwrap()
}

fn llama_2_7b() -> ModelShape {
    model(&json!({
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096,
    }))
}

#[test]
fn models_have_as_many_parameters_as_their_authors_say() {
    let llama_3 = json!({
        "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    });
    let mistral = json!({
        "model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": 4096,
    });
    let qwen_2 = json!({
        "model_type": "qwen2", "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": false,
    });
    let qwen_2_tied = json!({
        "model_type": "qwen2", "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": true,
    });
    let qwen_3 = json!({
        "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": false,
    });
    assert_eq!(llama_2_7b().elements(), 6_738_415_616);
    assert_eq!(model(&llama_3).elements(), 8_030_261_248);
    assert_eq!(model(&mistral).elements(), 7_241_732_096);
    assert_eq!(model(&qwen_2).elements(), 7_615_616_512);
    assert_eq!(model(&qwen_2_tied).elements(), 494_032_768);
    assert_eq!(model(&qwen_3).elements(), 8_190_735_360);
}

#[test]
fn cogvideox_has_the_parameters_that_diffusers_saves() {
    for (variant, expected) in fixture("cogvideox_shapes.json").as_object().unwrap() {
        let mut found = Vec::from_iter(
            model(&expected["config"])
                .parameters
                .into_iter()
                .map(|parameter| (parameter.name, json!(parameter.shape))),
        );
        found.sort_by(|a, b| a.0.cmp(&b.0));
        let mut expected = Vec::from_iter(expected["shapes"].as_object().unwrap().clone());
        // A buffer that is saved, and not trained.
        expected.retain(|(name, _)| !name.ends_with("pos_embedding") || variant == "i2v_learned");
        assert_eq!(found, expected, "{variant}");
    }
}

/// Bytes of an element, from the number of ranks.
type Formula = fn(f64) -> f64;

#[test]
fn zero_holds_what_its_formulas_say() {
    let model = llama_2_7b();
    let elements = model.elements() as f64;
    // 16 bits of values, 32 of gradients, masters and two moments: whole, or a share.
    let formulas: [(RunStrategy, Formula); 5] = [
        (RunStrategy::DataParallel, |_| 18.0),
        (RunStrategy::Zero1, |ranks| 6.0 + 12.0 / ranks),
        (RunStrategy::Zero2, |ranks| 2.0 + 16.0 / ranks),
        (RunStrategy::Zero3, |ranks| 18.0 / ranks),
        (RunStrategy::Fsdp(FsdpStrategy::FullShard), |ranks| 18.0 / ranks),
    ];
    for (strategy, bytes) in formulas {
        for ranks in [1, 2, 8, 64] {
            let workload = Workload {
                ranks,
                ranks_per_host: 8,
                precision: MixedPrecision::Bf16,
                ..Workload::default()
            };
            let estimate = MemoryEstimate::new(&model, &workload, RunChoice::new(strategy)).unwrap();
            let held = estimate.parameters + estimate.masters + estimate.gradients + estimate.optimizer;
            let expected = bytes(ranks as f64) * elements;
            let ratio = held as f64 / expected;
            assert!(
                (ratio - 1.0).abs() < 0.001,
                "{strategy:?} on {ranks} ranks: {held}, expected {expected}"
            );
        }
    }
}

#[test]
fn what_is_offloaded_leaves_the_device() {
    let model = llama_2_7b();
    let workload = Workload {
        ranks: 4,
        ranks_per_host: 4,
        precision: MixedPrecision::Bf16,
        computes_on: ComputeDevice::Cuda,
        ..Workload::default()
    };
    let estimate = |parameters, optimizer| {
        let choice = RunChoice {
            parameters,
            optimizer,
            ..RunChoice::new(RunStrategy::Zero3)
        };
        MemoryEstimate::new(&model, &workload, choice).unwrap()
    };
    let state = 12 * model.elements() / 4;
    let (none, host) = (estimate(Tier::Device, Tier::Device), estimate(Tier::Device, Tier::Host));
    assert_eq!(none.host, 0);
    assert!(
        host.host > state && none.device_peak - host.device_peak > state,
        "{host:?}"
    );
    let disk = estimate(Tier::Disk, Tier::Disk);
    assert!(disk.disk > state, "{disk:?}");
    assert!(disk.device_peak < host.device_peak, "{disk:?}");
}

#[test]
fn the_first_that_fits_is_the_cheapest() {
    let model = llama_2_7b();
    let workload = Workload {
        ranks: 8,
        ranks_per_host: 8,
        precision: MixedPrecision::Bf16,
        sequence: Some(512),
        ..Workload::default()
    };
    let estimates = candidates(&workload)
        .into_iter()
        .map(|choice| MemoryEstimate::new(&model, &workload, choice).unwrap());
    let estimates = Vec::from_iter(estimates);
    let first = |gib: u64| {
        let limits = Limits {
            device: gib << 30,
            host: None,
        };
        let found = estimates
            .iter()
            .find(|estimate| limits.fit(estimate, workload.computes_on));
        found.map(|estimate| estimate.choice)
    };
    assert_eq!(first(1000), Some(RunChoice::new(RunStrategy::DataParallel)));
    assert_eq!(first(3), None);
    let of_32 = first(32).unwrap();
    assert_ne!(of_32.strategy, RunStrategy::DataParallel);
    let limits = Limits {
        device: u64::MAX,
        host: Some(300 << 30),
    };
    let on_one_host = estimates
        .iter()
        .find(|estimate| limits.fit(estimate, workload.computes_on))
        .unwrap();
    assert!(on_one_host.device_peak * 8 <= 300 << 30, "{on_one_host:?}");
}

#[test]
fn accelerates_table_follows_its_rules() {
    // bert-base-cased, in Accelerate's own test.
    let table = AdamTable {
        largest_layer: 90_669_056,
        total: 433_249_280,
    };
    let rows = TableDtype::ALL.map(|dtype| table.row(dtype));
    let sizes = rows.map(|row| (row.largest_layer, row.total, row.training));
    assert_eq!(
        sizes,
        [
            (90_669_056, 433_249_280, Some(1_732_997_120)),
            (45_334_528, 216_624_640, Some(866_498_560)),
            (22_667_264, 108_312_320, None),
            (11_333_632, 54_156_160, None),
        ]
    );
    // A decoder's layer is never divided, and is larger than the table of embeddings.
    assert_eq!(llama_2_7b().largest_layer(), 202_383_360);
    let weights = [
        ("a.weight", vec![10, 10]),
        ("a.bias", vec![10]),
        ("b.0.weight", vec![100]),
    ];
    let weights = weights.map(|(name, shape)| (name.to_owned(), shape));
    assert_eq!(ModelShape::from_weights(weights).largest_layer(), 110);
}

#[test]
fn weights_alone_tell_all_but_activations() {
    let folder = tempfile::tempdir().unwrap();
    let zeros = |rows| Tensor::zeros((rows, 4), DType::F32, &Device::Cpu).unwrap();
    let named = |names: &[(&str, usize)]| {
        let tensors = names.iter().map(|(name, rows)| ((*name).to_owned(), zeros(*rows)));
        tensors.collect::<HashMap<_, _>>()
    };
    let save = |file: &str, names: &[(&str, usize)]| {
        let path = folder.path().join(file);
        candle_core::safetensors::save(&named(names), &path).unwrap();
        path
    };
    let first = save("a.safetensors", &[("h.10.w", 3), ("h.9.w", 2), ("h.9.v", 2)]);
    assert_eq!(ModelShape::open(&first).unwrap().elements(), 28);
    save("b.safetensors", &[("head", 1)]);
    let both = ModelShape::open(folder.path()).unwrap();
    assert_eq!((both.elements(), both.kind.as_str()), (32, "unknown"));
    let units = Vec::from_iter(
        both.parameters
            .iter()
            .map(|parameter| (parameter.name.as_str(), parameter.units[0])),
    );
    assert_eq!(units, [("h.9.v", 0), ("h.9.w", 0), ("h.10.w", 1), ("head", 2)]);
    let choice = RunChoice::new(RunStrategy::DataParallel);
    let estimate = MemoryEstimate::new(&both, &Workload::default(), choice).unwrap();
    assert_eq!(estimate.activations, None);
    assert!(estimate.device_peak >= 4 * 4 * 32, "{estimate:?}");
}

#[test]
fn a_checkpoint_tells_its_models_shapes() {
    let folder = tempfile::tempdir().unwrap();
    let saved = folder.path().join("saved");
    on_ranks(2, |communicator| {
        let acc = accelerator(communicator);
        candle_nn::linear(5, 3, acc.var_builder(Weights::Random { seed: 1 }).unwrap()).unwrap();
        acc.prepare_optimizer(Box::new(Sgd::default())).unwrap();
        acc.save_state(&saved).unwrap();
    });
    let model = ModelShape::open(&saved).unwrap();
    assert_eq!((model.elements(), model.parameters.len()), (18, 2));
}

#[test]
fn what_is_no_model_is_refused_in_words() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |name: &str, text: Option<&[u8]>| -> String {
        let path = folder.path().join(name);
        if let Some(text) = text {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, text).unwrap();
        }
        let error: EstimateError = ModelShape::open(&path).unwrap_err();
        let error = error.to_string();
        assert!(error.contains(name), "{error}");
        error
    };
    let has = |error: String, words: &str| assert!(error.contains(words), "{error}");
    has(refused("nothing", None), "there is no such file or folder");
    has(
        refused("bert/config.json", Some(br#"{"model_type": "bert"}"#)),
        "\"bert\"; supported are",
    );
    has(refused("list.json", Some(b"[1, 2]")), "is not a JSON object");
    has(
        refused("empty.json", Some(b"{}")),
        "has neither `model_type` nor `_class_name`",
    );
    let no_sizes = br#"{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}"#;
    has(refused("sizes.json", Some(no_sizes)), "`vocab_size` is missing");
    let huge = br#"{"model_type": "llama", "hidden_size": 1e30, "num_attention_heads": 4}"#;
    has(refused("huge.json", Some(huge)), "expected a whole number from 1 to");
    let odd = br#"{"model_type": "llama", "hidden_size": 65, "num_attention_heads": 4}"#;
    has(refused("odd.json", Some(odd)), "a multiple of the second");
    has(refused("model.bin", Some(b"pickle")), "model.bin");
    has(
        refused("notes.txt", Some(b"text")),
        "expected a config.json or a .safetensors file",
    );
    refused("cut.safetensors", Some(&[255, 0, 0, 0, 0, 0, 0, 0, b'{']));
    refused("short.safetensors", Some(b"abc"));
    std::fs::create_dir(folder.path().join("bare")).unwrap();
    has(
        refused("bare", None),
        "has no config.json, no safetensors files and no checkpoint",
    );
}

#[test]
fn a_run_is_estimated_as_its_configuration_sets_it() {
    let folder = tempfile::tempdir().unwrap();
    let estimate = |sub_group_size: u64| {
        let file = folder.path().join("deepspeed.json");
        let nvme = json!({ "device": "nvme", "nvme_path": folder.path() });
        let zero = json!({ "stage": 3, "offload_optimizer": nvme, "sub_group_size": sub_group_size });
        let config =
            json!({ "zero_optimization": zero, "bf16": { "enabled": true }, "train_micro_batch_size_per_gpu": 1 });
        std::fs::write(&file, config.to_string()).unwrap();
        let workload = Workload {
            ranks: 2,
            ranks_per_host: 2,
            precision: MixedPrecision::Bf16,
            ..Workload::default()
        };
        let settings = AcceleratorBuilder::default().settings(2, |name| match name {
            "ACCELERATE_USE_DEEPSPEED" => Some("true".into()),
            "ACCELERATE_DEEPSPEED_CONFIG_FILE" => Some(file.display().to_string()),
            _ => None,
        });
        MemoryEstimate::of_run(&llama_2_7b(), &workload, &settings.unwrap())
            .unwrap()
            .unwrap()
    };
    let (few, many) = (estimate(1_000_000_000), estimate(100_000_000));
    assert_eq!(
        (few.choice.strategy, few.choice.optimizer),
        (RunStrategy::Zero3, Tier::Disk)
    );
    // Three groups of moments and masters are in memory.
    let buffers = |elements: u64| 3 * 3 * 4 * elements;
    assert!(few.optimizer.abs_diff(buffers(1_000_000_000)) < 1 << 20, "{few:?}");
    assert!(many.optimizer.abs_diff(buffers(100_000_000)) < 1 << 20, "{many:?}");
}

#[test]
fn combinations_that_no_run_can_have_are_refused() {
    let choice = RunChoice {
        parameters: Tier::Host,
        ..RunChoice::new(RunStrategy::Zero2)
    };
    let error = MemoryEstimate::new(&llama_2_7b(), &Workload::default(), choice)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("parameters are offloaded only where they are sharded"),
        "{error}"
    );
}
