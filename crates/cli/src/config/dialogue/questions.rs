//! The questions, in the order in which they are asked: where ranks run, where state lives, how they compute.
//!
//! A question without a setting of its key says which others follow; [`outcome`](super::outcome) makes settings of both.

use sconce_core::config::{ACCUMULATION_STEPS, DEEPSPEED_FILE};

use super::answers::Answers;
use super::question::{Choice, Question, choice};

/// Where ranks run: [`HERE`], [`MACHINES`] or [`MPI`].
pub(super) const PLACE: &str = "place";
pub(super) const HERE: &str = "here";
pub(super) const MACHINES: &str = "machines";
pub(super) const MPI: &str = "mpi";
/// What ranks compute on: [`CPU`] or [`CUDA`].
pub(super) const DEVICE: &str = "device";
pub(super) const CPU: &str = "cpu";
pub(super) const CUDA: &str = "cuda";
/// How state is kept: [`REPLICATED`], [`ZERO`] or [`FSDP`].
pub(super) const SHARDING: &str = "sharding";
pub(super) const REPLICATED: &str = "replicated";
pub(super) const ZERO: &str = "zero";
pub(super) const FSDP: &str = "fsdp";
/// Who says how ZeRO works: [`ANSWERS`] or [`FILE`].
pub(super) const SOURCE: &str = "source";
pub(super) const ANSWERS: &str = "answers";
pub(super) const FILE: &str = "file";
/// Whether what few need is asked, too.
pub(super) const MORE: &str = "more";

pub(super) const STAGE: &str = "deepspeed_config.zero_stage";
pub(super) const OPTIMIZER_DEVICE: &str = "deepspeed_config.offload_optimizer_device";
pub(super) const PARAMETER_DEVICE: &str = "deepspeed_config.offload_param_device";
pub(super) const OPTIMIZER_FOLDER: &str = "deepspeed_config.offload_optimizer_nvme_path";
pub(super) const REPLICAS: &str = "parallelism_config.parallelism_config_dp_replicate_size";
pub(super) const PRECISION: &str = "mixed_precision";
pub(super) const RESTARTS: &str = "sconce_config.max_restarts";
pub(super) const THREADS: &str = "sconce_config.num_cpu_threads_per_process";
const VERSION: &str = "fsdp_config.fsdp_version";
const POLICY: &str = "fsdp_config.fsdp_auto_wrap_policy";
const NVME: &str = "nvme";
const FP8: &str = "fp8";

const IN_MEMORY: &[Choice] = &[
    choice("none", "none: with the rank that computes"),
    choice(CPU, "cpu: in the host's memory"),
];
const ANYWHERE: &[Choice] = &[
    choice("none", "none: with the rank that computes"),
    choice(CPU, "cpu: in the host's memory"),
    choice(NVME, "nvme: in files"),
];

/// All of them.
pub(super) const QUESTIONS: &[Question] = &[
    Question::menu(
        PLACE,
        "Where do the ranks run?",
        &[
            choice(HERE, "on this machine"),
            choice(MACHINES, "on several machines, on each of which I start sconce launch"),
            choice(MPI, "on the hosts that mpirun reaches"),
        ],
    )
    .proposing(HERE),
    Question::typed(
        "num_machines",
        "How many machines? (MIN:MAX if some may leave and return)",
    )
    .when(|answers| answers.is(PLACE, MACHINES))
    .proposing("2"),
    Question::typed(
        "machine_rank",
        "Which of them is this, from 0? (--machine_rank says otherwise)",
    )
    .when(|answers| answers.is(PLACE, MACHINES))
    .proposing("0"),
    Question::typed("main_process_ip", "Which address has machine 0?").when(|answers| answers.is(PLACE, MACHINES)),
    Question::typed("main_process_port", "Which port is free there?")
        .when(|answers| answers.is(PLACE, MACHINES))
        .proposing("29500"),
    Question::yes_or_no("same_network", "Are the machines on one network?")
        .when(|answers| answers.is(PLACE, MACHINES))
        .proposing("true"),
    Question::menu(
        "rdzv_backend",
        "How do the machines get their numbers?",
        &[
            choice("static", "static: as said here, on each machine"),
            choice(
                "c10d",
                "c10d: in the order in which they come, again after each failure",
            ),
        ],
    )
    .when(|answers| answers.is(PLACE, MACHINES))
    .proposing_from(|answers| {
        let elastic = answers.text("num_machines").contains(':');
        Some(if elastic { "c10d" } else { "static" }.to_owned())
    }),
    Question::optional(
        "mpirun_config.mpirun_hostfile",
        "Which file has mpirun's hosts? (none: the batch system says)",
    )
    .when(|answers| answers.is(PLACE, MPI)),
    Question::menu(
        DEVICE,
        "What do the ranks compute on?",
        &[choice(CPU, "CPUs"), choice(CUDA, "NVIDIA GPUs, one for each rank")],
    )
    .proposing(CPU),
    Question::menu(
        "sconce_config.backend",
        "What carries data between the GPUs?",
        &[
            choice("nccl", "nccl: NVIDIA's library"),
            choice("shm", "shm: the memory of this machine"),
        ],
    )
    .when(|answers| answers.is(DEVICE, CUDA) && answers.is(PLACE, HERE))
    .proposing("nccl"),
    Question::typed("num_processes", "How many ranks, over all machines?").proposing_from(|answers| {
        let machines = answers.text("num_machines").rsplit(':').next();
        Some(
            machines
                .filter(|machines| !machines.is_empty())
                .unwrap_or("1")
                .to_owned(),
        )
    }),
    Question::typed("gpu_ids", "Which GPUs of this machine? (0,1 or the like, or all)")
        .when(|answers| answers.is(DEVICE, CUDA) && answers.is(PLACE, HERE))
        .proposing("all"),
    Question::menu(
        SHARDING,
        "How are parameters, gradients and optimizer state kept?",
        &[
            choice(REPLICATED, "data parallelism: all on every rank"),
            choice(ZERO, "ZeRO: sharded over the ranks, in DeepSpeed's terms"),
            choice(FSDP, "FSDP: sharded over the ranks, in PyTorch's terms"),
        ],
    )
    .proposing(REPLICATED),
    // ZeRO
    Question::menu(
        SOURCE,
        "Is there a DeepSpeed configuration?",
        &[choice(ANSWERS, "no, ask me"), choice(FILE, "yes, a file says how")],
    )
    .when(|answers| answers.is(SHARDING, ZERO))
    .proposing(ANSWERS),
    Question::typed(DEEPSPEED_FILE, "Which file?").when(|answers| answers.is(SOURCE, FILE)),
    Question::menu(
        STAGE,
        "What is sharded?",
        &[
            choice("0", "nothing (stage 0)"),
            choice("1", "optimizer state (stage 1)"),
            choice("2", "optimizer state and gradients (stage 2)"),
            choice("3", "optimizer state, gradients and parameters (stage 3)"),
        ],
    )
    .when(|answers| answers.is(SOURCE, ANSWERS))
    .proposing("2"),
    Question::menu(OPTIMIZER_DEVICE, "Where is optimizer state kept?", IN_MEMORY)
        .when(|answers| answers.is_one_of(STAGE, &["1", "2"]))
        .proposing("none"),
    Question::menu(OPTIMIZER_DEVICE, "Where is optimizer state kept?", ANYWHERE)
        .when(|answers| answers.is(STAGE, "3"))
        .proposing("none"),
    Question::typed(OPTIMIZER_FOLDER, "In which folder, which is there already?")
        .when(|answers| answers.is(OPTIMIZER_DEVICE, NVME)),
    Question::menu(
        PARAMETER_DEVICE,
        "Where are parameters kept while nobody needs them?",
        ANYWHERE,
    )
    .when(|answers| answers.is(STAGE, "3"))
    .proposing("none"),
    Question::typed(
        "deepspeed_config.offload_param_nvme_path",
        "In which folder, which is there already?",
    )
    .when(|answers| answers.is(PARAMETER_DEVICE, NVME))
    .proposing_from(|answers| {
        let folder = answers.text(OPTIMIZER_FOLDER);
        (!folder.is_empty()).then(|| folder.to_owned())
    }),
    Question::typed(
        "deepspeed_config.gradient_clipping",
        "To which norm are gradients clipped? (0: they are not)",
    )
    .when(|answers| answers.is(SOURCE, ANSWERS))
    .proposing("1.0"),
    Question::yes_or_no(
        "deepspeed_config.zero3_save_16bit_model",
        "Are whole weights gathered when the model is saved?",
    )
    .when(|answers| answers.is(STAGE, "3")),
    // FSDP
    Question::menu(
        VERSION,
        "Whose names and defaults hold?",
        &[
            choice("2", "FSDP2's (version 2)"),
            choice("1", "the first FSDP's (version 1)"),
        ],
    )
    .when(|answers| answers.is(SHARDING, FSDP))
    .proposing("2"),
    Question::menu(
        "fsdp_config.fsdp_sharding_strategy",
        "What is sharded?",
        &[
            choice("FULL_SHARD", "FULL_SHARD: optimizer state, gradients and parameters"),
            choice("SHARD_GRAD_OP", "SHARD_GRAD_OP: parameters only between steps"),
            choice(
                "HYBRID_SHARD",
                "HYBRID_SHARD: FULL_SHARD among a host's ranks; hosts are replicas",
            ),
            choice(
                "HYBRID_SHARD_ZERO2",
                "HYBRID_SHARD_ZERO2: SHARD_GRAD_OP among a host's ranks",
            ),
            choice("NO_SHARD", "NO_SHARD: nothing"),
        ],
    )
    .when(|answers| answers.is(VERSION, "1"))
    .proposing("FULL_SHARD"),
    Question::yes_or_no(
        "fsdp_config.fsdp_reshard_after_forward",
        "Are parameters freed between forward and backward?",
    )
    .when(|answers| answers.is(VERSION, "2"))
    .proposing("true"),
    Question::typed(REPLICAS, "How many groups of ranks are replicas of each other?")
        .when(|answers| answers.is(VERSION, "2"))
        .proposing("1"),
    Question::menu(
        POLICY,
        "Which parts of the model are gathered together?",
        &[
            choice(
                "TRANSFORMER_BASED_WRAP",
                "TRANSFORMER_BASED_WRAP: its blocks, or classes that I name",
            ),
            choice(
                "SIZE_BASED_WRAP",
                "SIZE_BASED_WRAP: parts from a number of parameters on",
            ),
            choice("NO_WRAP", "NO_WRAP: none, parameters stay whole"),
        ],
    )
    .when(|answers| answers.is(SHARDING, FSDP))
    .proposing("TRANSFORMER_BASED_WRAP"),
    Question::optional(
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
        "Which classes, with commas between? (none: all declared parts)",
    )
    .when(|answers| answers.is(POLICY, "TRANSFORMER_BASED_WRAP")),
    Question::typed("fsdp_config.fsdp_min_num_params", "From how many parameters on?")
        .when(|answers| answers.is(POLICY, "SIZE_BASED_WRAP"))
        .proposing("100000000"),
    Question::yes_or_no(
        "fsdp_config.fsdp_activation_checkpointing",
        "Do parts compute again in the backward, to save memory?",
    )
    .when(|answers| answers.is(SHARDING, FSDP)),
    Question::yes_or_no(
        "fsdp_config.fsdp_offload_params",
        "Are shares and optimizer state kept in the host's memory?",
    )
    .when(|answers| answers.is(SHARDING, FSDP)),
    Question::menu(
        "fsdp_config.fsdp_state_dict_type",
        "How is state saved?",
        &[
            choice("SHARDED_STATE_DICT", "SHARDED_STATE_DICT: each rank its share"),
            choice("FULL_STATE_DICT", "FULL_STATE_DICT: whole"),
        ],
    )
    .when(|answers| answers.is(SHARDING, FSDP))
    .proposing("SHARDED_STATE_DICT"),
    // How ranks compute
    Question::menu(
        PRECISION,
        "What does the model compute in?",
        &[
            choice("no", "no: f32"),
            choice("bf16", "bf16, with f32 masters"),
            choice("fp16", "fp16, with f32 masters and a scaled loss"),
            choice(FP8, "fp8, emulated on the CPU, with f32 masters"),
        ],
    )
    .when(|answers| !answers.is(SOURCE, FILE))
    .proposing("no"),
    Question::menu(
        "fp8_config.fp8_format",
        "In which formats of fp8?",
        &[
            choice("HYBRID", "HYBRID: gradients in E5M2, all else in E4M3"),
            choice("E4M3", "E4M3: everything"),
        ],
    )
    .when(|answers| answers.is(PRECISION, FP8))
    .proposing("HYBRID"),
    Question::typed(
        "fp8_config.amax_history_len",
        "How many greatest magnitudes do scales remember?",
    )
    .when(|answers| answers.is(PRECISION, FP8))
    .proposing("1024"),
    Question::menu(
        "fp8_config.amax_compute_algo",
        "Which of them scales?",
        &[
            choice("max", "max: the greatest"),
            choice("most_recent", "most_recent: the last"),
        ],
    )
    .when(|answers| answers.is(PRECISION, FP8))
    .proposing("max"),
    Question::typed(ACCUMULATION_STEPS, "How many micro-batches make an optimizer step?")
        .when(|answers| !answers.is(SOURCE, FILE))
        .proposing("1"),
    // What few need
    Question::yes_or_no(MORE, "Ask about restarts, cores, threads and checks, too?"),
    Question::typed(RESTARTS, "How often are failed ranks started again?")
        .when(|answers| answers.is(MORE, "true") || is_elastic(answers))
        .proposing_from(|answers| Some(if is_elastic(answers) { "3" } else { "0" }.to_owned())),
    Question::yes_or_no("enable_cpu_affinity", "Is each rank bound to its share of the cores?")
        .when(|answers| answers.is(MORE, "true")),
    Question::optional(
        THREADS,
        "How many threads has each rank? (none: its share of the cores)",
    )
    .when(|answers| answers.is(MORE, "true")),
    Question::yes_or_no(
        "debug",
        "Are shapes compared over all ranks before every collective on tensors?",
    )
    .when(|answers| answers.is(MORE, "true")),
];

fn is_elastic(answers: &Answers) -> bool {
    answers.is("rdzv_backend", "c10d")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use sconce_core::config::setting;

    use super::super::ask::Form;
    use super::*;

    const COLUMNS: usize = 80;

    #[test]
    fn questions_and_answers_fit_a_line() {
        for question in QUESTIONS {
            let text = question.text.chars().count();
            let Form::Menu(choices) = question.form() else {
                assert!(text + 16 <= COLUMNS, "{}: no room to type", question.text);
                continue;
            };
            for choice in choices {
                assert!(choice.label.chars().count() + 2 <= COLUMNS, "{}", choice.label);
                let answered = text + choice.short().chars().count() + 3;
                assert!(answered <= COLUMNS, "{} {}", question.text, choice.short());
            }
        }
    }

    #[test]
    fn what_is_typed_or_chosen_is_a_value_of_the_setting() {
        let mut names = BTreeSet::new();
        for question in QUESTIONS {
            match (question.form(), setting(question.key)) {
                (Form::Menu(choices), Some(setting)) => {
                    for choice in choices {
                        let mut configuration = sconce_core::config::Configuration::new();
                        let set = configuration.set(setting.path, choice.value);
                        assert!(set.is_ok(), "{}: {}", setting.path, choice.value);
                    }
                }
                (Form::Typed(_), Some(_)) => {}
                (Form::Menu(_), None) => drop(names.insert(question.key)),
                (Form::Typed(_), None) => panic!("{} is no setting", question.key),
            }
        }
        assert_eq!(Vec::from_iter(names), [DEVICE, MORE, PLACE, SHARDING, SOURCE]);
    }
}
