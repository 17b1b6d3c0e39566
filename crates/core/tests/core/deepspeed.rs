//! DeepSpeed configurations: sample files, `"auto"`, batch sizes, optimizers and schedules.

use sconce_core::Schedule;
use sconce_core::deepspeed::*;
use std::path::{Path, PathBuf};

fn samples(folder: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/deepspeed")
        .join(folder);
    let mut files: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    files
}

fn valid(name: &str) -> DeepSpeedConfig {
    let file = samples("valid").into_iter().find(|file| file.ends_with(name)).unwrap();
    DeepSpeedConfig::read(&file, Validation::Lenient).unwrap()
}

fn parse(text: &str) -> Result<DeepSpeedConfig, ConfigError> {
    DeepSpeedConfig::parse(text, "ds_config.json", Validation::Lenient)
}

#[test]
fn valid_samples_load_with_the_warnings_of_their_first_line_and_no_others() {
    let files = samples("valid");
    assert_eq!(files.len(), 12);
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let expected: Vec<_> = match text.lines().next().unwrap().strip_prefix("// warnings: ") {
            Some(list) => list.split(" | ").collect(),
            None => Vec::new(),
        };
        let config = DeepSpeedConfig::read(&file, Validation::Lenient).unwrap_or_else(|error| panic!("{error}"));
        let found: Vec<_> = config.warnings().iter().map(ToString::to_string).collect();
        assert_eq!(found.len(), expected.len(), "{}: {found:#?}", file.display());
        for part in expected {
            let said = found.iter().any(|warning| warning.starts_with(part));
            assert!(said, "{}: {part:?} is not in {found:#?}", file.display());
        }
    }
}

#[test]
fn invalid_samples_are_refused_with_file_path_and_the_message_of_their_first_line() {
    let files = samples("invalid");
    assert!(files.len() >= 47, "{}", files.len());
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let expected = text.lines().next().unwrap().strip_prefix("// error: ").unwrap();
        let error = DeepSpeedConfig::read(&file, Validation::Lenient).expect_err(&file.display().to_string());
        let message = error.to_string();
        assert!(message.starts_with(&file.display().to_string()), "{message}");
        assert!(message.contains(expected), "{message}\nexpected {expected}");
    }
}

#[test]
fn the_appendix_configuration_loads_as_it_stands() {
    let config = valid("appendix.json");
    assert_eq!(config.warnings(), []);
    assert_eq!(config.fp16.enabled, Setting::Given(false));
    assert_eq!(config.bf16.enabled, Setting::Given(true));
    let zero = &config.zero_optimization;
    assert_eq!(zero.stage, Setting::Given(2));
    assert_eq!(zero.offload_optimizer.device, Setting::Given(OffloadDevice::Cpu));
    assert_eq!(zero.offload_param.device, Setting::Given(OffloadDevice::None));
    assert_eq!(zero.reduce_bucket_size, Setting::Given(500_000_000));
    assert_eq!(zero.allgather_bucket_size, 500_000_000);
}

#[test]
fn an_empty_configuration_has_deepspeeds_defaults() {
    let config = valid("empty.json");
    let zero = &config.zero_optimization;
    assert_eq!(zero.stage, Setting::Given(0));
    assert!(zero.reduce_scatter && zero.ignore_unused_parameters && zero.load_from_fp32_weights);
    assert_eq!(zero.overlap_comm, None);
    assert_eq!(zero.reduce_bucket_size, Setting::Given(500_000_000));
    assert_eq!(zero.sub_group_size, 1_000_000_000);
    assert_eq!(zero.prefetch_bucket_size, Setting::Given(50_000_000));
    assert_eq!(zero.param_persistence_threshold, Setting::Given(100_000));
    assert_eq!(zero.model_persistence_threshold, i64::MAX as u64);
    assert_eq!(zero.max_live_parameters, 1_000_000_000);
    assert_eq!(zero.offload_optimizer.buffer_count, 4);
    assert_eq!(zero.offload_param.buffer_count, 5);
    assert_eq!(config.gradient_clipping, Setting::Given(1.0));
    assert_eq!(config.fp16.initial_scale_power, 16);
    assert_eq!((config.fp16.loss_scale_window, config.fp16.hysteresis), (1000, 2));
    assert_eq!((config.aio.block_size, config.aio.queue_depth), (1_048_576, 8));
    assert!(config.optimizer.is_none() && config.scheduler.is_none());
    assert!(matches!(config.batch_sizes(2), Err(ConfigError::BatchSizes { .. })));
}

#[test]
fn the_last_of_a_repeated_key_is_in_force_and_strict_validation_refuses_it() {
    let config = valid("cogvideox_zero3.yaml");
    let zero = &config.zero_optimization;
    assert_eq!(zero.prefetch_bucket_size, Setting::Given(50_000_000));
    assert_eq!(zero.param_persistence_threshold, Setting::Given(100_000));
    let error = DeepSpeedConfig::parse(
        r#"{"flops_profiler": {"a": [{"b": 1, "b": "two"}]}}"#,
        "ds_config.json",
        Validation::Strict,
    )
    .unwrap_err();
    assert_eq!(
        error.to_string(),
        r#"ds_config.json: `flops_profiler.a.0.b`: given twice, as 1 and as "two"; keep one"#
    );
}

#[test]
fn old_names_set_what_the_new_ones_set() {
    let config = valid("deprecated.json");
    let zero = &config.zero_optimization;
    assert_eq!(config.bf16.enabled, Setting::Given(true));
    assert_eq!(config.aio.intra_op_parallelism, 2);
    assert_eq!(zero.offload_optimizer.device, Setting::Given(OffloadDevice::Cpu));
    assert_eq!(zero.offload_param.device, Setting::Given(OffloadDevice::Cpu));
    assert_eq!(zero.max_live_parameters, 7);
    assert_eq!(zero.gather_16bit_weights_on_model_save, Setting::Given(true));
    let zero = valid("zero_as_flag.json").zero_optimization;
    assert_eq!((zero.stage, zero.allgather_bucket_size), (Setting::Given(1), 1000));
}

#[test]
fn texts_keep_what_looks_like_a_comment() {
    let config = valid("comments.json");
    assert_eq!(
        config.monitors.wandb.project,
        r#"a // text # with /* marks */ and "quotes\"#
    );
    assert_eq!(config.train_batch_size, Some(Setting::Given(16)));
}

#[test]
fn a_file_without_end_and_one_that_is_not_there_are_refused() {
    let large = tempfile::NamedTempFile::new().unwrap();
    large.as_file().set_len((1 << 20) + 1).unwrap();
    let error = DeepSpeedConfig::read(large.path(), Validation::Lenient).unwrap_err();
    assert!(
        matches!(error, ConfigError::TooLarge { limit: 1_048_576, .. }),
        "{error}"
    );
    let error = DeepSpeedConfig::read(Path::new("/nowhere/ds.json"), Validation::Lenient).unwrap_err();
    assert!(
        error.to_string().starts_with("/nowhere/ds.json: cannot be read"),
        "{error}"
    );
}

#[test]
fn the_program_fills_what_the_file_leaves_auto() {
    let filled = valid("cogvideox_zero3.yaml")
        .fill(&AutoValues {
            data_parallel_size: Some(4),
            mixed_precision: Some(MixedPrecision::Bf16),
            learning_rate: Some(2e-5),
            weight_decay: Some(1e-4),
            warmup_steps: Some(10),
            total_steps: Some(100),
            ..AutoValues::default()
        })
        .unwrap();
    assert_eq!(filled.warnings(), valid("cogvideox_zero3.yaml").warnings());
    assert_eq!(filled.bf16.enabled, Setting::Given(true));
    assert_eq!(filled.fp16.enabled, Setting::Given(false));
    assert_eq!(filled.gradient_clipping, Setting::Given(1.0));
    assert_eq!(filled.batch_sizes(4).unwrap().train, 4);
    assert_eq!(
        filled.zero_optimization.gather_16bit_weights_on_model_save,
        Setting::Given(false)
    );
    let optimizer = filled.optimizer.unwrap();
    assert_eq!(optimizer.kind, OptimizerKind::AdamW);
    assert_eq!(optimizer.learning_rate, Setting::Given(2e-5));
    assert_eq!(optimizer.weight_decay, Setting::Given(1e-4));
    assert_eq!(optimizer.betas, Setting::Given((0.9, 0.95)));
    let schedule = filled.scheduler.unwrap().schedule().unwrap();
    // As of the 12th step DeepSpeed's counter is past the 10 steps of the warm-up.
    let rates = [0, 1, 11, 56].map(|step| schedule.learning_rate(9.0, step));
    assert_eq!(rates, [0.0, 0.0, 2e-5, 1e-5]);
}

#[test]
fn bucket_sizes_follow_from_the_models_width() {
    let config = parse(
        r#"{"zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto", "offload_optimizer": {"device": "auto"}}}"#,
    );
    let filled = config
        .unwrap()
        .fill(&AutoValues {
            hidden_size: Some(4097),
            ..AutoValues::default()
        })
        .unwrap();
    let zero = filled.zero_optimization;
    assert_eq!(zero.stage, Setting::Given(2));
    assert_eq!(zero.reduce_bucket_size, Setting::Given(16_785_409));
    assert_eq!(zero.prefetch_bucket_size, Setting::Given(15_106_868));
    assert_eq!(zero.param_persistence_threshold, Setting::Given(40_970));
    assert_eq!(zero.offload_optimizer.device, Setting::Given(OffloadDevice::None));
}

#[test]
fn sizes_that_are_auto_have_defaults_where_the_width_is_not_known() {
    let text = r#"{"zero_optimization": {"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto"}}"#;
    let zero = parse(text)
        .unwrap()
        .fill(&AutoValues::default())
        .unwrap()
        .zero_optimization;
    assert_eq!(zero.reduce_bucket_size, Setting::Given(25 * 1024 * 1024 / 4));
    assert_eq!(zero.prefetch_bucket_size, Setting::Given(50_000_000));
    assert_eq!(zero.param_persistence_threshold, Setting::Given(100_000));
}

#[test]
fn values_that_nobody_knows_yet_stay_auto_where_that_is_allowed() {
    let text = r#"{"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"},
        "optimizer": {"type": "Lion", "params": {"lr": "auto"}}}"#;
    let values = AutoValues {
        mixed_precision: Some(MixedPrecision::Bf16),
        ..AutoValues::default()
    };
    let filled = parse(text).unwrap().fill_known(&values).unwrap();
    assert_eq!(filled.bf16.enabled, Setting::Given(true));
    assert_eq!(filled.train_micro_batch_size_per_gpu, Some(Setting::Auto));
    let rule = filled.optimizer.unwrap().rule().unwrap_err().to_string();
    assert!(rule.contains("`optimizer.params.lr`"), "{rule}");
}

#[test]
fn every_place_where_auto_is_kept_can_be_filled() {
    let text = r#"{
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto", "stage3_gather_16bit_weights_on_model_save": "auto",
            "offload_optimizer": {"device": "auto"}, "offload_param": {"device": "auto"}},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
            "warmup_num_steps": "auto", "total_num_steps": "auto"}}}"#;
    let config = parse(text).unwrap();
    assert_eq!(config.warnings(), []);
    let unfilled = config.fill(&AutoValues::default()).unwrap_err().to_string();
    for path in [
        "train_micro_batch_size_per_gpu",
        "train_batch_size",
        "optimizer.params.lr",
        "optimizer.params.betas",
        "optimizer.params.eps",
        "optimizer.params.weight_decay",
        "scheduler.params.warmup_max_lr",
        "scheduler.params.warmup_num_steps",
        "scheduler.params.total_num_steps",
    ] {
        assert!(unfilled.contains(&format!("`{path}`")), "{path}: {unfilled}");
    }
    let filled = config
        .fill(&AutoValues {
            data_parallel_size: Some(2),
            micro_batch_size_per_rank: Some(3),
            gradient_accumulation_steps: Some(4),
            learning_rate: Some(1e-3),
            betas: Some((0.9, 0.99)),
            epsilon: Some(1e-6),
            weight_decay: Some(0.0),
            warmup_steps: Some(1),
            total_steps: Some(2),
            hidden_size: Some(8),
            zero_stage: Some(3),
            offload_param_device: Some(OffloadDevice::Cpu),
            ..AutoValues::default()
        })
        .unwrap();
    assert!(!format!("{filled:?}").contains("Auto"), "{filled:?}");
    let sizes = filled.batch_sizes(2).unwrap();
    assert_eq!(
        (sizes.train, sizes.micro_per_rank, sizes.accumulation_steps),
        (24, 3, 4)
    );
}

#[test]
fn one_message_lists_all_that_file_and_program_say_differently() {
    let config = parse(
        r#"{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "bf16": {"enabled": false},
            "optimizer": {"type": "AdamW", "params": {"lr": 1, "betas": [0.9, 0.999]}}}"#,
    );
    let error = config
        .unwrap()
        .fill(&AutoValues {
            micro_batch_size_per_rank: Some(4),
            gradient_accumulation_steps: Some(1),
            mixed_precision: Some(MixedPrecision::Bf16),
            learning_rate: Some(1.0),
            betas: Some((0.9, 0.95)),
            ..AutoValues::default()
        })
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "ds_config.json and the program disagree: `train_micro_batch_size_per_gpu` is 2 in the file and 4 in the program; \
         `bf16.enabled` is false in the file and true in the program; `optimizer.params.betas` is [0.9,0.999] in the file \
         and [0.9,0.95] in the program; make them equal, or write \"auto\" in the file"
    );
}

#[test]
fn the_batch_triple_is_solved_as_deepspeed_solves_it() {
    /// What the file says (0: nothing), the number of ranks, and what comes of it.
    type Row = ([u64; 3], u64, Result<[u64; 3], &'static str>);
    let table: [Row; 18] = [
        ([32, 16, 1], 2, Ok([32, 16, 1])),
        ([32, 8, 2], 2, Ok([32, 8, 2])),
        (
            [33, 17, 2],
            2,
            Err(
                "`train_batch_size` 33 is not `train_micro_batch_size_per_gpu` 17 x `gradient_accumulation_steps` 2 x 2 ranks; set `train_batch_size` to 68",
            ),
        ),
        ([32, 18, 1], 2, Err("set `train_batch_size` to 36")),
        ([32, 16, 0], 2, Ok([32, 16, 1])),
        ([32, 4, 0], 2, Ok([32, 4, 4])),
        (
            [32, 5, 0],
            2,
            Err("set `train_batch_size` to a multiple of 10, such as 30"),
        ),
        ([4, 16, 0], 2, Err("a multiple of 32, such as 32")),
        ([32, 0, 4], 2, Ok([32, 4, 4])),
        (
            [32, 0, 5],
            2,
            Err("`train_micro_batch_size_per_gpu` (not given) x `gradient_accumulation_steps` 5"),
        ),
        ([2, 0, 4], 1, Err("a multiple of 4, such as 4")),
        ([0, 4, 8], 2, Ok([64, 4, 8])),
        ([32, 0, 0], 2, Ok([32, 16, 1])),
        ([33, 0, 0], 2, Err("a multiple of 2, such as 32")),
        ([0, 4, 0], 2, Ok([8, 4, 1])),
        (
            [0, 0, 0],
            2,
            Err("neither `train_batch_size` nor `train_micro_batch_size_per_gpu` is given"),
        ),
        (
            [0, 0, 4],
            2,
            Err("neither `train_batch_size` nor `train_micro_batch_size_per_gpu` is given"),
        ),
        ([0, 1 << 40, 1 << 40], 2, Err("is beyond 2^64")),
    ];
    for (given, ranks, expected) in table {
        let keys = [
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
        ];
        let entries: Vec<_> = keys.iter().zip(given).filter(|(_, size)| *size > 0).collect();
        let entries: Vec<_> = entries.iter().map(|(key, size)| format!("\"{key}\": {size}")).collect();
        let config = parse(&format!("{{{}}}", entries.join(", "))).unwrap();
        match (config.batch_sizes(ranks), expected) {
            (Ok(found), Ok(expected)) => {
                assert_eq!(
                    [found.train, found.micro_per_rank, found.accumulation_steps],
                    expected,
                    "{given:?}"
                );
            }
            (Err(error), Err(expected)) => {
                let message = error.to_string();
                assert!(
                    message.starts_with("ds_config.json: ") && message.contains(expected),
                    "{given:?}: {message}"
                );
            }
            (found, expected) => panic!("{given:?}: {found:?}, expected {expected:?}"),
        }
    }
    assert!(parse(r#"{"train_batch_size": 1}"#).unwrap().batch_sizes(0).is_err());
    let auto = parse(r#"{"train_batch_size": "auto"}"#)
        .unwrap()
        .batch_sizes(1)
        .unwrap_err();
    assert_eq!(
        auto.to_string(),
        "ds_config.json: nothing fills \"auto\" at `train_batch_size`; write the values"
    );
}

#[test]
fn optimizers_have_the_rule_and_the_numbers_of_the_file() {
    let read = |text: &str| {
        parse(&format!(r#"{{"optimizer": {text}}}"#))
            .unwrap()
            .optimizer
            .unwrap()
    };
    let kinds = [
        (r#"{"type": "Adam"}"#, OptimizerKind::AdamW),
        (
            r#"{"type": "adam", "params": {"adam_w_mode": false}}"#,
            OptimizerKind::Adam,
        ),
        (
            r#"{"type": "AdamW", "params": {"adam_w_mode": false}}"#,
            OptimizerKind::AdamW,
        ),
        (r#"{"type": "Lion"}"#, OptimizerKind::Lion),
        (r#"{"type": "Adagrad"}"#, OptimizerKind::Adagrad),
        (
            r#"{"type": "SGD", "params": {"momentum": 0.9, "nesterov": true}}"#,
            OptimizerKind::Sgd,
        ),
    ];
    for (text, kind) in kinds {
        assert_eq!(read(text).kind, kind, "{text}");
    }
    let sgd = read(kinds[5].0);
    assert!(sgd.nesterov && sgd.momentum == 0.9 && sgd.dampening == 0.0);
    let adam =
        read(r#"{"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 1}}"#);
    assert_eq!(adam.learning_rate, Setting::Given(3e-5));
    assert_eq!(adam.betas, Setting::Given((0.8, 0.9)));
    assert_eq!(adam.epsilon, Setting::Given(1e-6));
    assert_eq!(adam.weight_decay, Setting::Given(1.0));
}

#[test]
fn schedules_of_the_file_follow_deepspeeds_traces() {
    let table = super::fixture("learning_rates.json");
    let cases = table["cases"].as_array().unwrap().iter();
    let cases: Vec<_> = cases.filter(|case| case["source"] == "deepspeed").collect();
    assert_eq!(cases.len(), 12);
    for case in cases {
        let section = serde_json::json!({"scheduler": {"type": case["name"], "params": case["args"]}});
        let config = parse(&section.to_string()).unwrap();
        assert_eq!(config.warnings(), []);
        let schedule = config.scheduler.unwrap().schedule().unwrap();
        let base = case["base_lr"].as_f64().unwrap();
        for (step, expected) in case["lr"].as_array().unwrap().iter().enumerate() {
            let (found, expected) = (schedule.learning_rate(base, step as u64), expected.as_f64().unwrap());
            assert!(
                (found - expected).abs() <= 1e-12 * expected,
                "{section}, step {step}: {found}"
            );
        }
    }
}

#[test]
fn a_schedule_with_auto_is_refused_until_it_is_filled() {
    let text = r#"{"optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 4}}}"#;
    let config = parse(text).unwrap();
    let error = config.scheduler.as_ref().unwrap().schedule().unwrap_err();
    assert!(
        error.to_string().contains("`scheduler.params.warmup_max_lr`"),
        "{error}"
    );
    let filled = config.fill(&AutoValues::default()).unwrap();
    let schedule = filled.scheduler.unwrap().schedule().unwrap();
    assert_eq!(schedule.learning_rate(9.0, 100), 0.5);
}
