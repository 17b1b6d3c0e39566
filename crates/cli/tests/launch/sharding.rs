//! Accelerate's flags for DeepSpeed: what reaches the ranks, and what is refused before any starts.

use super::*;

/// Prints the variables that begin with `ACCELERATE_`, in order, but for those of the compiler.
const SHOW: &str = "env | grep ^ACCELERATE_ | grep -v _DYNAMO_ | sort";

fn samples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs")
}

/// Launches with flags and a file `ds.json`; expects one message with all `parts`, exit code 2 and no rank started.
#[track_caller]
fn assert_refused(flags: &[&str], config: &str, parts: &[&str]) {
    assert_refused_with(flags, config, &[], parts);
}

#[track_caller]
fn assert_refused_with(flags: &[&str], config: &str, variables: &[(&str, &str)], parts: &[&str]) {
    let mut launch = Launch::new(&[&["-n", "2"], flags].concat(), ": > started.$RANK");
    fs::write(launch.path("ds.json"), config).unwrap();
    launch.command.envs(variables.iter().copied());
    let output = launch.output();
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{flags:?}: {stderr}");
    assert!(
        stderr.starts_with("error: ") && stderr.matches("error: ").count() == 1,
        "{stderr}"
    );
    for part in parts {
        assert!(stderr.contains(part), "{flags:?}: {part:?} in {stderr:?}");
    }
    assert!(!launch.path("started.0").exists() && !launch.path("started.1").exists());
}

#[test]
fn every_flag_of_sharding_reaches_the_ranks_as_accelerates_variable() {
    let flags = [
        "--use_deepspeed",
        "--zero_stage=3",
        "--offload_optimizer_device",
        "nvme",
        "--offload-param-device",
        "nvme",
        "--offload_optimizer_nvme_path",
        ".",
        "--offload_param_nvme_path",
        ".",
        "--gradient_clipping",
        "0.5",
        "--zero3_init_flag",
        "true",
        "--zero3-save-16bit-model",
        "false",
        "--mixed_precision",
        "bf16",
        "--gradient_accumulation_steps",
        "4",
    ];
    let output = Launch::new(&flags, SHOW).output();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let expected = "\
        ACCELERATE_CONFIG_DS_FIELDS=\n\
        ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE=nvme\n\
        ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH=.\n\
        ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE=nvme\n\
        ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH=.\n\
        ACCELERATE_DEEPSPEED_ZERO3_INIT=true\n\
        ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL=false\n\
        ACCELERATE_DEEPSPEED_ZERO_STAGE=3\n\
        ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4\n\
        ACCELERATE_GRADIENT_CLIPPING=0.5\n\
        ACCELERATE_MIXED_PRECISION=bf16\n\
        ACCELERATE_USE_DEEPSPEED=true\n";
    assert_eq!(text(&output.stdout), expected);
}

#[test]
fn flags_that_are_not_given_set_what_accelerate_sets_and_what_is_inherited_stays() {
    let (first, rest) = ("ACCELERATE_CONFIG_DS_FIELDS=\n", "ACCELERATE_MIXED_PRECISION=no\n");
    assert_eq!(text(&Launch::new(&[], SHOW).output().stdout), rest);
    let output = Launch::new(&["--use_deepspeed"], SHOW).output();
    assert_eq!(
        text(&output.stdout),
        format!("{first}{rest}ACCELERATE_USE_DEEPSPEED=true\n")
    );
    let mut launch = Launch::new(&["--use_deepspeed"], SHOW);
    launch.command.env("ACCELERATE_DEEPSPEED_ZERO_STAGE", "1");
    let expected = format!("{first}ACCELERATE_DEEPSPEED_ZERO_STAGE=1\n{rest}ACCELERATE_USE_DEEPSPEED=true\n");
    assert_eq!(text(&launch.output().stdout), expected);
}

#[test]
fn flags_of_sharding_need_use_deepspeed_and_known_values() {
    let needs = |flags: &[&str], message: &str| assert_refused(flags, "{}", &[message]);
    needs(&["--zero_stage", "3"], "error: --zero_stage needs --use_deepspeed\n");
    needs(
        &[
            "--deepspeed_config_file",
            "ds.json",
            "--offload_param_device",
            "cpu",
            "--gradient_clipping",
            "1",
        ],
        "error: --deepspeed_config_file, --offload_param_device, --gradient_clipping need --use_deepspeed\n",
    );
    for (flag, value) in [
        ("--zero_stage", "4"),
        ("--offload_optimizer_device", "disk"),
        ("--offload_param_device", "gpu"),
        ("--gradient_clipping", "much"),
        ("--zero3_init_flag", "maybe"),
        ("--zero3_save_16bit_model", "2"),
        ("--mixed_precision", "fp4"),
        ("--gradient_accumulation_steps", "0"),
    ] {
        assert_refused(&["--use_deepspeed", flag, value], "{}", &[flag, value]);
    }
}

#[test]
fn combinations_that_cannot_be_are_told_in_the_words_of_the_flags() {
    let refused = |flags: &[&str], parts: &[&str]| {
        assert_refused(&[&["--use_deepspeed"], flags].concat(), "{}", parts);
    };
    let cpu = ["--offload_optimizer_device", "cpu"];
    refused(
        &[&cpu[..], &["--zero_stage", "0"]].concat(),
        &[
            "--offload_optimizer_device cpu: ",
            "the stage is 0",
            "use stage 1, 2 or 3, or none",
        ],
    );
    let nvme = ["--offload_optimizer_device", "nvme"];
    refused(
        &nvme,
        &[
            "--offload_optimizer_device nvme: ",
            "the stage is 2",
            "use stage 3, or none",
        ],
    );
    refused(
        &[&nvme[..], &["--zero_stage", "3"]].concat(),
        &[
            "--offload_optimizer_device nvme: a folder too: set ",
            "--offload_optimizer_nvme_path",
        ],
    );
    refused(
        &["--offload_param_device", "cpu"],
        &["--offload_param_device cpu: ", "in ZeRO stage 3, and the stage is 2"],
    );
    refused(
        &["--zero_stage", "3", "--offload_param_device", "nvme"],
        &[
            "--offload_param_device nvme: a folder too: set ",
            "--offload_param_nvme_path",
        ],
    );
    refused(
        &["--offload_param_nvme_path", "fast"],
        &["--offload_param_nvme_path fast: ", "with device nvme only"],
    );
    refused(
        &["--gradient_clipping=-1"],
        &["--gradient_clipping -1.0: expected a number from 0"],
    );
    let folder = ["--zero_stage", "3", "--offload_optimizer_nvme_path", "nowhere"];
    refused(
        &[&nvme[..], &folder].concat(),
        &["there is no folder nowhere for state on nvme\nhint: "],
    );
    // What is inherited counts too, under its own name.
    assert_refused_with(
        &["--use_deepspeed", "--offload_param_device", "cpu"],
        "{}",
        &[("ACCELERATE_DEEPSPEED_ZERO_STAGE", "1")],
        &["--offload_param_device cpu: ", "the stage is 1"],
    );
    assert_refused_with(
        &["--use_deepspeed"],
        "{}",
        &[("ACCELERATE_DEEPSPEED_ZERO_STAGE", "5")],
        &["ACCELERATE_DEEPSPEED_ZERO_STAGE=\"5\": expected 0, 1, 2 or 3"],
    );
}

#[test]
fn flags_that_the_file_decides_are_refused_in_one_message_even_where_they_agree() {
    let config = r#"{"gradient_accumulation_steps": 4, "gradient_clipping": 0.5, "bf16": {"enabled": true},
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": true,
            "offload_optimizer": {"device": "nvme", "nvme_path": "fast"},
            "offload_param": {"device": "nvme", "nvme_path": "fast"}}}"#;
    let flags = [
        "--use_deepspeed",
        "--deepspeed_config_file",
        "ds.json",
        "--gradient_accumulation_steps",
        "4",
        "--gradient_clipping",
        "1.0",
        "--zero_stage",
        "3",
        "--offload_optimizer_device",
        "cpu",
        "--offload_param_device",
        "nvme",
        "--offload_optimizer_nvme_path",
        "fast",
        "--offload_param_nvme_path",
        "fast",
        "--zero3_save_16bit_model",
        "true",
        "--mixed_precision",
        "fp16",
    ];
    assert_refused(
        &flags,
        config,
        &[
            "error: ds.json decides already: --zero_stage (`zero_optimization.stage`), ",
            "--offload_optimizer_device (`zero_optimization.offload_optimizer.device`), ",
            "--offload_param_device (`zero_optimization.offload_param.device`), ",
            "--offload_optimizer_nvme_path (`zero_optimization.offload_optimizer.nvme_path`), ",
            "--offload_param_nvme_path (`zero_optimization.offload_param.nvme_path`), ",
            "--gradient_clipping (`gradient_clipping`), ",
            "--zero3_save_16bit_model (`zero_optimization.stage3_gather_16bit_weights_on_model_save`), ",
            "--mixed_precision (`bf16.enabled`), ",
            "--gradient_accumulation_steps (`gradient_accumulation_steps`)\nhint: leave these flags out",
        ],
    );
    // Inherited variables only have to agree.
    assert_refused_with(
        &flags[..3],
        config,
        &[
            ("ACCELERATE_MIXED_PRECISION", "fp16"),
            ("ACCELERATE_GRADIENT_CLIPPING", "0.5"),
        ],
        &["ds.json says otherwise: ACCELERATE_MIXED_PRECISION is fp16, `bf16.enabled` is true;"],
    );
}

#[test]
fn flags_fill_what_the_file_leaves_open() {
    let config =
        r#"{"bf16": {"enabled": "auto"}, "gradient_clipping": "auto", "zero_optimization": {"stage": "auto"}}"#;
    let flags = [
        "--use_deepspeed",
        "--deepspeed_config_file",
        "ds.json",
        "--zero_stage",
        "1",
        "--mixed_precision",
        "bf16",
        "--gradient_accumulation_steps",
        "2",
    ];
    let mut launch = Launch::new(&flags, SHOW);
    fs::write(launch.path("ds.json"), config).unwrap();
    let output = launch.output();
    let expected = "\
        ACCELERATE_CONFIG_DS_FIELDS=\n\
        ACCELERATE_DEEPSPEED_CONFIG_FILE=ds.json\n\
        ACCELERATE_DEEPSPEED_ZERO_STAGE=1\n\
        ACCELERATE_GRADIENT_ACCUMULATION_STEPS=2\n\
        ACCELERATE_MIXED_PRECISION=bf16\n\
        ACCELERATE_USE_DEEPSPEED=true\n";
    assert_eq!(text(&output.stdout), expected, "{output:?}");
}

#[test]
fn a_bad_file_is_one_message_and_nothing_starts() {
    let flags = ["--use_deepspeed", "--deepspeed_config_file", "ds.json"];
    for (config, message) in [
        (
            r#"{"zero_optimisation": {"stage": 2}}"#,
            "error: ds.json: `zero_optimisation`: unknown key, the nearest known is `zero_optimization`",
        ),
        (
            r#"{"zero_optimization": {"stage": 7}}"#,
            "error: ds.json: `zero_optimization.stage`: found 7, expected",
        ),
        ("{\n  \"fp16\": }", "error: ds.json:2:"),
        (
            r#"{"fp16": {"enabled": true}, "bf16": {"enabled": true}}"#,
            "error: ds.json: `fp16.enabled`: excludes",
        ),
        (
            r#"{"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2}"#,
            "error: ds.json: `train_batch_size` 9 is not",
        ),
    ] {
        assert_refused(&flags, config, &[message]);
    }
    assert_refused(
        &["--use_deepspeed", "--deepspeed_config_file", "nowhere.json"],
        "{}",
        &["error: nowhere.json: cannot be read"],
    );
}

#[test]
fn warnings_of_the_file_are_printed_once_as_one_message() {
    let flags = ["-n", "3", "--use_deepspeed", "--deepspeed_config_file", "ds.json"];
    let mut launch = Launch::new(&flags, "true");
    let config =
        r#"{"steps_per_print": 10, "zero_optimization": {"stage": 1, "contiguous_gradients": true, "stage": 2}}"#;
    fs::write(launch.path("ds.json"), config).unwrap();
    let output = launch.output();
    assert!(output.status.success(), "{output:?}");
    let expected = "warning: ds.json\n  \
        `zero_optimization.stage` is given twice, as 1 and as 2: 2 is used\n  \
        `zero_optimization.contiguous_gradients` has no effect here\n  \
        `steps_per_print` has no effect here\n";
    assert_eq!(text(&output.stderr), expected);
}

#[test]
fn the_samples_load_in_silence() {
    let mut launched = 0;
    for entry in fs::read_dir(samples()).unwrap() {
        let sample = entry.unwrap().path();
        if sample.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let mut launch = Launch::new(
            &["-n", "2", "--use_deepspeed", "--deepspeed_config_file", "ds.json"],
            "echo $ACCELERATE_DEEPSPEED_CONFIG_FILE",
        );
        // The one with a folder gets a folder that there is.
        let config = fs::read_to_string(&sample).unwrap().replace("/local_nvme", ".");
        fs::write(launch.path("ds.json"), config).unwrap();
        let output = launch.output();
        assert!(
            output.status.success() && output.stderr.is_empty(),
            "{}: {output:?}",
            sample.display()
        );
        assert_eq!(sorted(&output.stdout), ["[rank 0] ds.json", "[rank 1] ds.json"]);
        launched += 1;
    }
    assert_eq!(launched, 5);
}
