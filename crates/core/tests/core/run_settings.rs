//! What a run is: from code, environment and DeepSpeed configuration, in tables.

use sconce_collectives::single;
use sconce_core::deepspeed::{DeepSpeedConfig, GradientReduction, MixedPrecision, Validation};
use sconce_core::{
    AcceleratorBuilder, DataParallel, DiskOptions, Error, Gathering, LossScaling, Result, RunSettings, Sharding, Tier,
    ZeroStage,
};
use sconce_zero::{BackoffScaling, HysteresisScaling};
use std::io::Write as _;
use std::path::Path;
use tempfile::NamedTempFile;

/// Variables without `ACCELERATE_` in front.
fn settings(builder: &AcceleratorBuilder, ranks: usize, variables: &[(&str, &str)]) -> Result<RunSettings> {
    builder.settings(ranks, |name| {
        let found = variables.iter().find(|(key, _)| name == format!("ACCELERATE_{key}"));
        found.map(|(_, value)| (*value).to_owned())
    })
}

/// What the variables say, with DeepSpeed in use.
fn with_flags(variables: &[(&str, &str)]) -> Result<RunSettings> {
    let all = [&[("USE_DEEPSPEED", "true")], variables].concat();
    settings(&AcceleratorBuilder::default(), 2, &all)
}

/// What a file and variables say.
fn with_file(text: &str, variables: &[(&str, &str)]) -> Result<RunSettings> {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    let path = file.path().to_str().unwrap().to_owned();
    with_flags(&[&[("DEEPSPEED_CONFIG_FILE", path.as_str())], variables].concat())
}

/// What code says beside a file given in code.
fn with_code(builder: AcceleratorBuilder, text: &str) -> Result<RunSettings> {
    let config = DeepSpeedConfig::parse(text, "ds.json", Validation::Lenient).unwrap();
    settings(&builder.deepspeed(config), 2, &[])
}

#[track_caller]
fn assert_refused(outcome: Result<RunSettings>, parts: &[&str]) {
    let message = outcome.expect_err("refused").to_string();
    for part in parts {
        assert!(message.contains(part), "{part:?} in {message:?}");
    }
}

fn zero(stage: ZeroStage, parameters: Tier, optimizer_state: Tier) -> Sharding {
    Sharding::Zero {
        stage,
        parameters,
        optimizer_state,
    }
}

#[test]
fn nothing_said_is_data_parallelism_in_f32() {
    let run = settings(&AcceleratorBuilder::default(), 3, &[]).unwrap();
    assert_eq!(run.sharding, Sharding::DataParallel);
    assert_eq!((run.precision, run.loss_scaling), (MixedPrecision::No, None));
    assert_eq!((run.clipping.max_norm, run.clipping.decided_by), (None, None));
    assert_eq!(run.batch.accumulation_steps, 1);
    assert_eq!((run.bucket_bytes, run.disk), (None, None));
    assert_eq!(run.gathering, Gathering::default());
    assert!(run.deepspeed.is_none() && !run.find_unused_parameters);
}

#[test]
fn stages_and_offload_come_from_the_variables() {
    use Tier::{Device, Disk, Host};
    let optimizer = "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE";
    let parameters = "DEEPSPEED_OFFLOAD_PARAM_DEVICE";
    let (optimizer_folder, parameter_folder) = (
        "DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
        "DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
    );
    let stage = |stage| ("DEEPSPEED_ZERO_STAGE", stage);
    let three = ZeroStage::THREE;
    /// Variables, and the sharding and the folder that come of them.
    type Row<'a> = (&'a [(&'a str, &'a str)], Sharding, Option<&'a str>);
    let table: [Row<'_>; 9] = [
        (&[], zero(ZeroStage::Two, Device, Device), None),
        (&[stage("0")], Sharding::DataParallel, None),
        (&[stage("1")], zero(ZeroStage::One, Device, Device), None),
        (&[stage(" 2 ")], zero(ZeroStage::Two, Device, Device), None),
        (&[stage("3")], zero(three, Device, Device), None),
        (
            &[(optimizer, "cpu"), (parameters, "none")],
            zero(ZeroStage::Two, Device, Host),
            None,
        ),
        (&[stage("3"), (parameters, "CPU")], zero(three, Host, Device), None),
        (
            &[
                stage("3"),
                (optimizer, "nvme"),
                (optimizer_folder, "fast"),
                (parameter_folder, "none"),
            ],
            zero(three, Device, Disk),
            Some("fast"),
        ),
        (
            &[
                stage("3"),
                (optimizer, "nvme"),
                (optimizer_folder, "fast"),
                (parameters, "nvme"),
                (parameter_folder, "fast"),
            ],
            zero(three, Disk, Disk),
            Some("fast"),
        ),
    ];
    for (variables, sharding, folder) in table {
        let run = with_flags(variables).unwrap();
        assert_eq!(run.sharding, sharding, "{variables:?}");
        let disk = folder.map(|folder| DiskOptions {
            folder: folder.into(),
            sub_group_elements: 1_000_000_000,
        });
        assert_eq!(run.disk, disk, "{variables:?}");
    }
    let unasked = [("DEEPSPEED_ZERO_STAGE", "3"), ("GRADIENT_CLIPPING", "x")];
    let run = settings(&AcceleratorBuilder::default(), 2, &unasked).unwrap();
    assert_eq!(run.sharding, Sharding::DataParallel);
}

#[test]
fn variables_that_cannot_be_used_are_refused_with_their_name_and_value() {
    for (name, value, expected) in [
        ("USE_DEEPSPEED", "maybe", "true or false"),
        ("DEEPSPEED_ZERO_STAGE", "4", "0, 1, 2 or 3"),
        ("DEEPSPEED_ZERO_STAGE", "two", "0, 1, 2 or 3"),
        ("MIXED_PRECISION", "fp4", "no, bf16, fp16 or fp8"),
        ("GRADIENT_ACCUMULATION_STEPS", "0", "whole number above 0"),
        ("GRADIENT_CLIPPING", "-1", "a number from 0"),
        ("GRADIENT_CLIPPING", "inf", "a number from 0"),
        ("DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "disk", "none, cpu or nvme"),
        ("DEEPSPEED_OFFLOAD_PARAM_DEVICE", "gpu", "none, cpu or nvme"),
        ("DEEPSPEED_ZERO3_INIT", "2", "true or false"),
        ("DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "ja", "true or false"),
    ] {
        let variables = [(name, value), ("USE_DEEPSPEED", "true")];
        let outcome = settings(&AcceleratorBuilder::default(), 2, &variables);
        assert!(matches!(outcome, Err(Error::Setting { .. })), "{name}={value}");
        assert_refused(outcome, &[&format!("ACCELERATE_{name}={value:?}"), expected]);
    }
    let code = AcceleratorBuilder::default().gradient_clipping(f64::NAN);
    assert_refused(
        settings(&code, 1, &[]),
        &["gradient_clipping", "NaN", "a number from 0"],
    );
    assert_refused(
        with_flags(&[("DEEPSPEED_CONFIG_FILE", "nowhere/ds.json")]),
        &["nowhere/ds.json: cannot be read"],
    );
}

#[test]
fn combinations_that_mean_nothing_are_refused_with_the_name_of_who_asked() {
    let optimizer = "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE";
    let parameters = "DEEPSPEED_OFFLOAD_PARAM_DEVICE";
    let (folder, other) = (
        ("DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", "fast"),
        ("DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", "slow"),
    );
    let stage = |stage| ("DEEPSPEED_ZERO_STAGE", stage);
    /// Variables, and parts of the message.
    type Row<'a> = (&'a [(&'a str, &'a str)], &'a [&'a str]);
    let table: [Row<'_>; 8] = [
        (
            &[stage("0"), (optimizer, "cpu")],
            &[
                "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE=\"cpu\"",
                "the stage is 0",
                "stage 1, 2 or 3",
            ],
        ),
        (
            &[stage("2"), (optimizer, "nvme"), folder],
            &["=\"nvme\"", "the stage is 2", "use stage 3, or none"],
        ),
        (
            &[(parameters, "cpu")],
            &[
                "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE=\"cpu\"",
                "the stage is 2",
                "use stage 3, or none",
            ],
        ),
        (
            &[stage("3"), (optimizer, "nvme")],
            &[
                "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE=\"nvme\"",
                "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
            ],
        ),
        (
            &[stage("3"), (parameters, "nvme")],
            &["ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", "a folder too"],
        ),
        (
            &[folder],
            &[
                "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH=\"fast\"",
                "with device nvme only",
            ],
        ),
        (
            &[stage("3"), (optimizer, "cpu"), folder],
            &["with device nvme only, and the device is cpu"],
        ),
        (
            &[stage("3"), (optimizer, "nvme"), folder, (parameters, "nvme"), other],
            &[
                "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH=\"slow\"",
                "one folder for all files",
                "fast",
            ],
        ),
    ];
    for (variables, parts) in table {
        assert_refused(with_flags(variables), parts);
    }
    // A file whose stage is "auto" is checked once the stage is known.
    let text = r#"{"zero_optimization": {"stage": "auto", "offload_param": {"device": "cpu"}}}"#;
    assert_refused(
        with_file(text, &[stage("1")]),
        &["`zero_optimization.offload_param`", "expected stage 3"],
    );
    with_file(text, &[stage("3")]).unwrap();
    let text = r#"{"zero_optimization": {"stage": 3}, "gradient_allreduce_op": "sum"}"#;
    assert_refused(with_file(text, &[]), &["`gradient_allreduce_op`", "the stage is 3"]);
}

#[test]
fn the_sizes_of_a_file_reach_the_engine_as_it_counts_them() {
    let text = r#"{"zero_optimization": {"stage": 3, "reduce_bucket_size": 1000, "stage3_prefetch_bucket_size": 20,
        "stage3_max_live_parameters": 300, "stage3_param_persistence_threshold": 40, "sub_group_size": 5,
        "ignore_unused_parameters": true, "stage3_gather_16bit_weights_on_model_save": true,
        "offload_param": {"device": "nvme", "nvme_path": "fast"}}}"#;
    let run = with_file(text, &[]).unwrap();
    let stage = ZeroStage::Three {
        persistence_threshold: 40,
    };
    assert_eq!(run.sharding, zero(stage, Tier::Disk, Tier::Device));
    assert_eq!(run.bucket_bytes, Some(4000));
    assert_eq!(
        run.gathering,
        Gathering {
            prefetch_elements: 20,
            max_live_elements: 300,
            ..Gathering::default()
        }
    );
    let disk = DiskOptions {
        folder: "fast".into(),
        sub_group_elements: 5,
    };
    assert_eq!(run.disk, Some(disk));
    assert!(run.find_unused_parameters && run.gather_weights_on_save);

    // What the file does not name is the engine's choice; what it leaves "auto" follows from the model's width.
    let named = with_file(r#"{"zero_optimization": {"stage": 2}}"#, &[]).unwrap();
    assert_eq!((named.bucket_bytes, named.find_unused_parameters), (None, false));
    let auto = r#"{"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto"}}"#;
    let run = with_code(AcceleratorBuilder::default().hidden_size(100), auto).unwrap();
    let stage = ZeroStage::Three {
        persistence_threshold: 1000,
    };
    assert_eq!(run.sharding, zero(stage, Tier::Device, Tier::Device));
    assert_eq!(run.bucket_bytes, Some(40_000));
    let run = with_code(AcceleratorBuilder::default(), auto).unwrap();
    assert_eq!(
        (run.sharding, run.bucket_bytes),
        (zero(ZeroStage::THREE, Tier::Device, Tier::Device), Some(25 << 20))
    );
}

#[test]
fn precision_and_loss_scale_follow_deepspeed_where_it_is_in_use_and_pytorch_elsewhere() {
    use MixedPrecision::{Bf16, Fp16, No};
    let backoff = LossScaling::Backoff(BackoffScaling::default());
    let hysteresis = LossScaling::Hysteresis(HysteresisScaling::default());
    for (value, uses_deepspeed, precision, scaling) in [
        ("no", "false", No, None),
        ("bf16", "false", Bf16, None),
        ("FP16", "false", Fp16, Some(backoff)),
        ("bf16", "true", Bf16, Some(LossScaling::Static(1.0))),
        ("fp16", "true", Fp16, Some(hysteresis.clone())),
    ] {
        let variables = [("MIXED_PRECISION", value), ("USE_DEEPSPEED", uses_deepspeed)];
        let run = settings(&AcceleratorBuilder::default(), 2, &variables).unwrap();
        assert_eq!((run.precision, run.loss_scaling), (precision, scaling), "{variables:?}");
    }
    let own = LossScaling::Hysteresis(HysteresisScaling {
        initial_scale: 256.0,
        window: 7,
        hysteresis: 3,
        consecutive_hysteresis: true,
        minimum: 0.5,
        fail_at_minimum: true,
    });
    for (text, precision, scaling) in [
        (r#"{"fp16": {"enabled": true}}"#, Fp16, Some(hysteresis.clone())),
        (
            r#"{"fp16": {"enabled": true, "loss_scale": 128}}"#,
            Fp16,
            Some(LossScaling::Static(128.0)),
        ),
        (
            r#"{"fp16": {"enabled": true, "initial_scale_power": 8, "loss_scale_window": 7, "hysteresis": 3,
                "consecutive_hysteresis": true, "min_loss_scale": 0.5}}"#,
            Fp16,
            Some(own),
        ),
        (r#"{"bf16": {"enabled": true}}"#, Bf16, Some(LossScaling::Static(1.0))),
        (
            r#"{"bf16": {"enabled": true, "check_grad_overflow": false}}"#,
            Bf16,
            None,
        ),
        (
            r#"{"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}"#,
            No,
            None,
        ),
        ("{}", No, None),
    ] {
        // Accelerate's launcher says "no" where nobody has said anything.
        for variables in [&[][..], &[("MIXED_PRECISION", "no")]] {
            let run = with_file(text, variables).unwrap();
            assert_eq!((run.precision, &run.loss_scaling), (precision, &scaling), "{text}");
        }
    }
    let auto = r#"{"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "hysteresis": 2}}"#;
    let run = with_file(auto, &[("MIXED_PRECISION", "fp16")]).unwrap();
    assert_eq!((run.precision, run.loss_scaling), (Fp16, Some(hysteresis)));
    let code = AcceleratorBuilder::default()
        .mixed_precision(Bf16)
        .loss_scaling(LossScaling::Static(8.0));
    let run = with_code(code, "{}").unwrap();
    assert_eq!(
        (run.precision, run.loss_scaling),
        (Bf16, Some(LossScaling::Static(8.0)))
    );
    assert_eq!(run.precision.to_string(), "bf16");
}

#[test]
fn clipping_is_decided_by_code_flag_or_file_and_is_otherwise_free() {
    let flag = [("GRADIENT_CLIPPING", "0.5")];
    let of = |run: Result<RunSettings>| {
        let clipping = run.unwrap().clipping;
        (clipping.max_norm, clipping.decided_by.unwrap_or_default())
    };
    let free = |norm| (norm, String::new());
    assert_eq!(of(with_flags(&[])), free(None));
    assert_eq!(of(with_flags(&[("GRADIENT_CLIPPING", "none")])), free(None));
    let by_flag = (Some(0.5), "ACCELERATE_GRADIENT_CLIPPING".into());
    assert_eq!(of(with_flags(&flag)), by_flag);
    // DeepSpeed's default and Accelerate's for "auto", both 1.0, bind nobody.
    assert_eq!(of(with_file("{}", &[])), free(Some(1.0)));
    assert_eq!(of(with_file(r#"{"gradient_clipping": "auto"}"#, &[])), free(Some(1.0)));
    assert_eq!(of(with_file(r#"{"gradient_clipping": "auto"}"#, &flag)), by_flag);
    let (norm, by) = of(with_file(r#"{"gradient_clipping": 2}"#, &[]));
    assert!(
        norm == Some(2.0) && by.ends_with(": `gradient_clipping`"),
        "{norm:?} {by}"
    );
    let (norm, by) = of(with_file(r#"{"gradient_clipping": 0}"#, &[]));
    assert!(norm.is_none() && by.ends_with(": `gradient_clipping`"), "{norm:?} {by}");
    let code = AcceleratorBuilder::default().gradient_clipping(3.0);
    let by_code = (Some(3.0), "AcceleratorBuilder::gradient_clipping".into());
    assert_eq!(of(settings(&code, 1, &[])), by_code);
}

#[test]
fn code_comes_before_variables_and_variables_before_what_a_file_leaves_open() {
    let variables = [
        ("USE_DEEPSPEED", "true"),
        ("GRADIENT_ACCUMULATION_STEPS", "3"),
        ("MIXED_PRECISION", "fp16"),
        ("GRADIENT_CLIPPING", "0.5"),
        ("DEEPSPEED_ZERO_STAGE", "1"),
    ];
    let code = AcceleratorBuilder::default()
        .gradient_accumulation_steps(4)
        .mixed_precision(MixedPrecision::Bf16)
        .gradient_clipping(2.0);
    let run = settings(&code, 2, &variables).unwrap();
    assert_eq!((run.batch.accumulation_steps, run.precision), (4, MixedPrecision::Bf16));
    assert_eq!(run.clipping.max_norm, Some(2.0));
    let open = r#"{"gradient_accumulation_steps": "auto", "fp16": {"enabled": "auto"}, "gradient_clipping": "auto",
        "zero_optimization": {"stage": "auto"}}"#;
    for text in [open, "{}"] {
        let run = with_file(text, &variables).unwrap();
        assert_eq!(
            (run.batch.accumulation_steps, run.precision),
            (3, MixedPrecision::Fp16),
            "{text}"
        );
        assert_eq!(run.clipping.max_norm, Some(0.5));
        assert_eq!(run.sharding, zero(ZeroStage::One, Tier::Device, Tier::Device));
    }
    // A strategy of the program's takes the place of every stage; a configuration in code that of a file.
    let code = AcceleratorBuilder::default()
        .strategy(DataParallel)
        .communicator(single());
    let run = settings(&code, 1, &variables).unwrap();
    assert_eq!(run.sharding, Sharding::Custom("data_parallel".into()));
    let stage_three = DeepSpeedConfig::parse(r#"{"zero_optimization": {"stage": 3}}"#, "code", Validation::Strict);
    let code = AcceleratorBuilder::default().deepspeed(stage_three.unwrap());
    let file = [("USE_DEEPSPEED", "true"), ("DEEPSPEED_CONFIG_FILE", "nowhere.json")];
    let run = settings(&code, 1, &file).unwrap();
    assert_eq!(run.sharding, zero(ZeroStage::THREE, Tier::Device, Tier::Device));
}

#[test]
fn one_message_lists_all_that_a_file_decides_otherwise() {
    let text = r#"{"gradient_accumulation_steps": 2, "gradient_clipping": 1.0, "bf16": {"enabled": true},
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": false,
            "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme", "nvme_path": "fast"}}}"#;
    let outcome = with_file(
        text,
        &[
            ("GRADIENT_ACCUMULATION_STEPS", "4"),
            ("GRADIENT_CLIPPING", "0.5"),
            ("MIXED_PRECISION", "fp16"),
            ("DEEPSPEED_ZERO_STAGE", "2"),
            ("DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none"),
            ("DEEPSPEED_OFFLOAD_PARAM_DEVICE", "cpu"),
            ("DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", "slow"),
            ("DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "true"),
        ],
    );
    assert!(matches!(outcome, Err(Error::Contradictions { .. })), "{outcome:?}");
    assert_refused(
        outcome,
        &[
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS is 4, `gradient_accumulation_steps` is 2;",
            "ACCELERATE_GRADIENT_CLIPPING is 0.5, `gradient_clipping` is 1.0;",
            "ACCELERATE_MIXED_PRECISION is fp16, `bf16.enabled` is true",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE is 2, `zero_optimization.stage` is 3;",
            "_OPTIMIZER_DEVICE is none, `zero_optimization.offload_optimizer.device` is \"cpu\";",
            "_PARAM_DEVICE is cpu, `zero_optimization.offload_param.device` is \"nvme\";",
            "_PARAM_NVME_PATH is slow, `zero_optimization.offload_param.nvme_path` is \"fast\";",
            "_SAVE_16BIT_MODEL is true, `zero_optimization.stage3_gather_16bit_weights_on_model_save` is false;",
            "remove one of the two, or write \"auto\" in the file",
        ],
    );
    let same = [
        ("GRADIENT_ACCUMULATION_STEPS", "2"),
        ("GRADIENT_CLIPPING", "1"),
        ("MIXED_PRECISION", "bf16"),
    ];
    with_file(text, &same).unwrap();
    let code = AcceleratorBuilder::default()
        .gradient_accumulation_steps(3)
        .mixed_precision(MixedPrecision::No);
    assert_refused(
        with_code(code, text),
        &[
            "ds.json says otherwise: AcceleratorBuilder::gradient_accumulation_steps is 3",
            "AcceleratorBuilder::mixed_precision is no, `bf16.enabled` is true",
        ],
    );
}

#[test]
fn accumulation_steps_follow_from_the_batch_sizes_of_the_file_and_the_number_of_ranks() {
    /// The file, what the environment says, and steps, micro-batch and batch on two ranks.
    type Row<'a> = (&'a str, &'a str, (u64, Option<u64>, Option<u64>));
    let table: [Row<'_>; 7] = [
        ("{}", "", (1, None, None)),
        ("{}", "3", (3, None, None)),
        (r#"{"gradient_accumulation_steps": 5}"#, "", (5, None, None)),
        (
            r#"{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}"#,
            "",
            (4, Some(4), Some(32)),
        ),
        (
            r#"{"train_batch_size": 32, "train_micro_batch_size_per_gpu": "auto"}"#,
            "8",
            (8, Some(2), Some(32)),
        ),
        (r#"{"train_batch_size": 32}"#, "", (1, Some(16), Some(32))),
        (
            r#"{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto"}"#,
            "2",
            (2, Some(4), Some(16)),
        ),
    ];
    for (text, steps, expected) in table {
        let batch = with_file(text, &[("GRADIENT_ACCUMULATION_STEPS", steps)])
            .unwrap()
            .batch;
        let found = (batch.accumulation_steps, batch.micro_per_rank, batch.train);
        assert_eq!(found, expected, "{text}");
    }
    let odd = r#"{"train_batch_size": 33, "train_micro_batch_size_per_gpu": 4}"#;
    assert_refused(with_file(odd, &[]), &["`train_batch_size` 33", "2 ranks"]);
}

#[test]
fn settings_that_do_nothing_are_told() {
    let cpu = candle_core::Device::Cpu;
    let notices = |variables: &[(&str, &str)]| with_flags(variables).unwrap().notices(&cpu);
    assert!(notices(&[]).is_empty());
    let host = notices(&[
        ("DEEPSPEED_ZERO_STAGE", "3"),
        ("DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu"),
        ("DEEPSPEED_OFFLOAD_PARAM_DEVICE", "cpu"),
    ]);
    assert!(
        host.len() == 1 && host[0].starts_with("parameters and optimizer state offloaded"),
        "{host:?}"
    );
    let init = notices(&[("DEEPSPEED_ZERO3_INIT", "true")]);
    assert!(
        init.len() == 1 && init[0].starts_with("ACCELERATE_DEEPSPEED_ZERO3_INIT is true"),
        "{init:?}"
    );
    assert_eq!(notices(&[("DEEPSPEED_ZERO3_INIT", "false")]).len(), 0);
    let init = notices(&[("DEEPSPEED_ZERO3_INIT", "false"), ("DEEPSPEED_ZERO_STAGE", "3")]);
    assert!(init[0].contains("from their creation all the same"), "{init:?}");
}

#[test]
fn the_samples_load_without_warnings_and_are_what_their_names_say() {
    use Tier::{Device, Disk, Host};
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs");
    let path = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    let samples = [
        (
            "zero1_fp16_adamw_warmup.json",
            zero(ZeroStage::One, Device, Device),
            MixedPrecision::Fp16,
        ),
        ("zero2.json", zero(ZeroStage::Two, Device, Device), MixedPrecision::No),
        (
            "zero2_bf16_offload_cpu.json",
            zero(ZeroStage::Two, Device, Host),
            MixedPrecision::Bf16,
        ),
        ("zero3.json", zero(ZeroStage::THREE, Device, Device), MixedPrecision::No),
        (
            "zero3_offload_nvme.json",
            zero(ZeroStage::THREE, Disk, Disk),
            MixedPrecision::No,
        ),
    ];
    for (name, sharding, precision) in samples.clone() {
        let run = with_flags(&[("DEEPSPEED_CONFIG_FILE", &path(name))]).unwrap();
        assert_eq!((run.sharding, run.precision), (sharding, precision), "{name}");
        assert_eq!(run.reduction, GradientReduction::Mean);
        assert_eq!(run.deepspeed.unwrap().warnings(), [], "{name}");
    }
    let mut found: Vec<_> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".json"))
        .collect();
    found.sort();
    assert_eq!(found, samples.map(|(name, ..)| name));
    // One of them is the configuration that must load as it stands.
    let text =
        |path: &Path| -> serde_json::Value { serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap() };
    let appendix = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/deepspeed/valid/appendix.json");
    assert_eq!(text(&folder.join("zero2_bf16_offload_cpu.json")), text(&appendix));
    let run = with_flags(&[("DEEPSPEED_CONFIG_FILE", &path("zero2_bf16_offload_cpu.json"))]).unwrap();
    assert_eq!(run.bucket_bytes, Some(2_000_000_000));
}
