//! From settings to answers and back: what a file says is proposed, and what was answered is what a file says.

use sconce_core::config::{DEEPSPEED_FILE, DISTRIBUTED_TYPE, SCONCE, setting};

use super::answers::Answers;
use super::question::NONE;
use super::questions::{
    ANSWERS, CPU, CUDA, DEVICE, FILE, FSDP, HERE, MACHINES, MORE, MPI, PLACE, QUESTIONS, REPLICAS, REPLICATED,
    RESTARTS, SHARDING, SOURCE, THREADS, ZERO,
};

const BACKEND: &str = "sconce_config.backend";
const COMPUTES_ON: &str = "sconce_config.device";
const SHARDS: &str = "parallelism_config.parallelism_config_dp_shard_size";

/// Returns the answer that settings give to a question, as far as they do; `given` has their values by path.
pub(super) fn answer_of(key: &str, given: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    let is = |path: &str, value: &str| given(path).is_some_and(|given| given == value);
    let answer = match key {
        PLACE if is(BACKEND, "mpi") || given("mpirun_config.mpirun_hostfile").is_some() => MPI,
        PLACE => match given("num_machines")?.as_str() {
            "1" => HERE,
            _ => MACHINES,
        },
        DEVICE if is(BACKEND, "nccl") || given(COMPUTES_ON).is_some_and(|device| device.starts_with(CUDA)) => CUDA,
        DEVICE if is("use_cpu", "true") => CPU,
        DEVICE => match given(DISTRIBUTED_TYPE)?.as_str() {
            "MULTI_GPU" => CUDA,
            _ => CPU,
        },
        SHARDING => match given(DISTRIBUTED_TYPE)?.as_str() {
            "DEEPSPEED" => ZERO,
            "FSDP" => FSDP,
            _ => REPLICATED,
        },
        SOURCE if given(DEEPSPEED_FILE).is_some() => FILE,
        SOURCE => ANSWERS,
        MORE => {
            let rare = [RESTARTS, "enable_cpu_affinity", THREADS, "debug"];
            let asks = |path: &&str| given(path).is_some_and(|value| value != "0" && value != "false");
            return Some(rare.iter().any(asks).to_string());
        }
        path => return given(path),
    };
    Some(answer.to_owned())
}

/// Returns every setting that the dialogue decides, with its value in text, or none where it must not be given.
pub(super) fn settings(answers: &Answers) -> Vec<(&'static str, Option<String>)> {
    let asked = QUESTIONS.iter().map(|question| question.key);
    let mut paths = Vec::from_iter(asked.filter(|key| setting(key).is_some()));
    paths.extend(["compute_environment", DISTRIBUTED_TYPE, "use_cpu", COMPUTES_ON, SHARDS]);
    paths.sort_unstable();
    paths.dedup();
    let valued = paths.into_iter().map(|path| (path, value_of(path, answers)));
    // Accelerate reads no file with our section: it is left out where nothing in it is needed.
    let is_needed = |path: &str, value: &str| {
        let default = setting(path).and_then(|setting| setting.default);
        !path.starts_with(SCONCE) || default != Some(value)
    };
    let needed = valued.map(|(path, value)| (path, value.filter(|value| is_needed(path, value))));
    needed.collect()
}

fn value_of(path: &str, answers: &Answers) -> Option<String> {
    let on_gpus = answers.is(DEVICE, CUDA);
    let replicas = answers.text(REPLICAS);
    let value = match path {
        "compute_environment" => "LOCAL_MACHINE",
        DISTRIBUTED_TYPE => match answers.text(SHARDING) {
            ZERO => "DEEPSPEED",
            FSDP => "FSDP",
            _ if answers.is("num_processes", "1") => "NO",
            _ if on_gpus => "MULTI_GPU",
            _ => "MULTI_CPU",
        },
        "use_cpu" => return Some((!on_gpus).to_string()),
        "num_machines" if answers.is(PLACE, HERE) => "1",
        BACKEND if answers.is(PLACE, MPI) => "mpi",
        BACKEND if answers.is(PLACE, MACHINES) && on_gpus => "nccl",
        BACKEND if answers.is(PLACE, HERE) && !on_gpus => "shm",
        COMPUTES_ON => return (on_gpus && value_of(BACKEND, answers)? != "nccl").then(|| CUDA.to_owned()),
        // One group is what holds without a mesh.
        REPLICAS | SHARDS if replicas == "1" => "",
        SHARDS => {
            let ranks = answers.text("num_processes").parse::<u64>().ok()?;
            let groups = replicas.parse::<u64>().ok()?;
            return Some((ranks / groups).max(1).to_string());
        }
        path => answers.text(path),
    };
    (!value.is_empty() && value != NONE || is_a_choice(path, value)).then(|| value.to_owned())
}

/// `none` is a device, too.
fn is_a_choice(path: &str, value: &str) -> bool {
    value == NONE && path.ends_with("_device")
}

/// Returns what fits no run among the answers, and what to do.
///
/// # Errors
/// The first such answer.
pub(super) fn check(answers: &Answers) -> Result<(), String> {
    let number = |key: &str| answers.text(key).parse::<u64>().ok();
    if let (Some(ranks), Some(groups)) = (number("num_processes"), number(REPLICAS))
        && ranks % groups != 0
    {
        return Err(format!("{ranks} ranks cannot be divided into {groups} equal groups"));
    }
    let ids = answers.text("gpu_ids");
    if let Some(ranks) = number("num_processes")
        && !["", "all"].contains(&ids)
    {
        let ids = Vec::from_iter(ids.split(',').map(|id| id.trim().parse::<u64>()));
        if ids.iter().any(Result::is_err) {
            return Err("expected numbers from 0 with commas between, or all".to_owned());
        }
        if (ids.len() as u64) < ranks {
            return Err(format!("{ranks} ranks need a GPU each, and these are {}", ids.len()));
        }
    }
    let machines = answers.text("num_machines").rsplit(':').next();
    if let Some(machines) = machines.and_then(|machines| machines.parse::<u64>().ok()) {
        if number("machine_rank").is_some_and(|machine| machine >= machines) {
            return Err(format!(
                "machines count from 0, so the last of {machines} is {}",
                machines - 1
            ));
        }
        if number("num_processes").is_some_and(|ranks| ranks < machines) {
            return Err(format!("{machines} machines need {machines} ranks or more"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(given: &[(&'static str, &str)]) -> Result<(), String> {
        let mut answers = Answers::default();
        given
            .iter()
            .for_each(|(key, answer)| answers.give(key, (*answer).to_owned()));
        check(&answers)
    }

    #[test]
    fn answers_that_no_launch_would_take_are_refused() {
        let ranks = ("num_processes", "4");
        for (given, reason) in [
            (&[ranks, (REPLICAS, "3")][..], "equal groups"),
            (&[ranks, ("gpu_ids", "0,1")], "these are 2"),
            (&[ranks, ("gpu_ids", "0,x,1,2")], "numbers from 0"),
            (&[ranks, ("num_machines", "1:8")], "need 8 ranks"),
            (&[("num_machines", "2"), ("machine_rank", "2")], "is 1"),
        ] {
            let error = checked(given).unwrap_err();
            assert!(error.contains(reason), "{given:?}: {error}");
        }
        let fitting = [
            ranks,
            (REPLICAS, "2"),
            ("gpu_ids", "0, 1,2,3"),
            ("num_machines", "2"),
            ("machine_rank", "1"),
        ];
        assert_eq!(checked(&fitting), Ok(()));
        assert_eq!(checked(&[ranks, ("gpu_ids", "all")]), Ok(()));
    }
}
