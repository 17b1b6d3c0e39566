//! What the ranks find in their environment beside what Accelerate's get, for the same command lines and files: recorded
//! from its launcher (`fixtures/env.json`). Differences that are meant are listed here and in docs/launch.md.

use std::collections::BTreeSet;
use std::thread::available_parallelism;

use serde_json::Value as Json;

use super::*;

fn fixture(name: &str) -> Json {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/launch/fixtures");
    serde_json::from_str(&fs::read_to_string(folder.join(name)).unwrap()).unwrap()
}

/// Cases that need several machines, or launch Python: what is started there has tests of its own.
const ELSEWHERE: [&str; 10] = [
    "two_machines",
    "two_machines_same_network",
    "two_machines_c10d",
    "deepspeed_pdsh_2_nodes",
    "deepspeed_standard_2_nodes",
    "yaml_two_machines",
    "error_two_machines_no_ip",
    "module",
    "no_python",
    "error_module_no_python",
];

/// Cases that Accelerate's launcher refuses or not, and ours does, with a part of its message.
const REFUSED: [(&str, &str); 11] = [
    // Accelerate refuses these too.
    ("error_cpu_and_multi", "--multi_gpu"),
    ("error_multi_1", "--multi_gpu needs at least two ranks"),
    ("error_precision", "invalid value 'int3' for '--mixed_precision"),
    (
        "error_parallelism_without_fsdp2",
        "--use_parallelism_config needs --use_fsdp and --fsdp_version 2",
    ),
    ("yaml_unknown_key", "config.yaml:16: `not_a_key`: unknown key"),
    // Its own check passes over a false in quotes.
    (
        "fsdp_ram_efficient_sync_false_string",
        "--fsdp_sync_module_states false",
    ),
    // What is not here.
    ("dynamo", "--dynamo_backend is not supported: candle compiles no graphs"),
    ("deepspeed_moe", "--deepspeed_moe_layer_cls_names is not supported"),
    ("fsdp2_parallelism", "--parallelism_config_tp_size 2: expected 1"),
    (
        "fsdp2_context_parallel",
        "--parallelism_config_cp_comm_strategy is not supported",
    ),
    // Its ranks learn of no folder and find out later.
    (
        "deepspeed_zero3_offload",
        "a folder too: set ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
    ),
];

/// A case of the fixture, in a folder of its own.
struct Case<'f> {
    name: &'f str,
    case: &'f Json,
    launch: Launch,
    ranks: usize,
    /// The port that the case names, and a free one in its place.
    port: Option<(String, String)>,
    uses_mpi: bool,
}

impl<'f> Case<'f> {
    fn new(case: &'f Json, fixture: &Json) -> Self {
        let words = case["argv"]
            .as_array()
            .unwrap()
            .iter()
            .map(|word| word.as_str().unwrap());
        let words = Vec::from_iter(words.map(str::to_owned));
        let config = case["config"].as_str().map(str::to_owned);
        // Rank 0 tells of itself; with mpirun, whoever is started.
        let launch = Launch::new(&[], "env > env.${RANK:-0}");
        let program = launch.path("program").display().to_string();
        let named = |start: &str, text: &str| {
            let digits = text.split(start).nth(1)?.trim_start();
            Some(digits.split(|letter: char| !letter.is_ascii_digit()).next()?.to_owned())
        };
        let port = named("--main_process_port", &words.join(" "));
        let port = port.or_else(|| named("main_process_port:", config.as_deref()?));
        let port = port.map(|port| {
            let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            (port, free.to_string())
        });
        let filled = |text: &str| {
            let path = |name: &str| launch.path(name).display().to_string();
            let text = text
                .replace("{ds_config}", &path("ds.json"))
                .replace("{hostfile}", &path("hosts"));
            let text = text.replace("{config}", &path("config.yaml"));
            match &port {
                Some((named, free)) => text.replace(named, free),
                None => text,
            }
        };
        fs::write(launch.path("ds.json"), fixture["ds_config"].to_string()).unwrap();
        fs::write(launch.path("hosts"), fixture["hostfile"].as_str().unwrap()).unwrap();
        if let Some(config) = &config {
            fs::write(launch.path("config.yaml"), filled(config)).unwrap();
        }
        let uses_mpi = words.iter().any(|word| word == "--mpirun_hostfile")
            || config
                .as_deref()
                .is_some_and(|config| config.contains("mpirun_hostfile"));
        let words_of = |word: &String| match word.as_str() {
            "{script}" => vec!["/bin/sh".to_owned(), program.clone()],
            word => vec![filled(word)],
        };
        let command_line = Vec::from_iter(words.iter().flat_map(words_of));
        let (folder, mut command) = (launch.folder, launcher());
        command.current_dir(&folder).args(command_line);
        if uses_mpi {
            let path = std::env::var("PATH").unwrap();
            fake_mpirun(folder.path());
            command.env("PATH", format!("{}:{path}", folder.path().display()));
        }
        let of_flag = named("--num_processes", &words.join(" "));
        let ranks = of_flag.or_else(|| named("num_processes:", config.as_deref()?));
        Self {
            name: case["name"].as_str().unwrap(),
            case,
            launch: Launch { folder, command },
            ranks: ranks.map_or(1, |ranks| ranks.parse().unwrap()),
            port,
            uses_mpi,
        }
    }

    /// What Accelerate's first rank finds, with what is meant to be otherwise.
    fn expected(&self) -> BTreeMap<String, String> {
        let of_rank = &self.case["ranks"][0]["env"];
        let recorded = if of_rank.is_object() {
            of_rank
        } else {
            &self.case["env"]
        };
        let recorded = recorded.as_object().unwrap().iter();
        let mut expected: BTreeMap<String, String> = recorded
            .map(|(name, value)| (name.clone(), value.as_str().unwrap().to_owned()))
            .map(|(name, value)| match &self.port {
                Some((port, free)) if value == *port => (name, free.clone()),
                _ => (name, value),
            })
            .collect();
        let file = self.launch.path("ds.json").display().to_string();
        expected
            .values_mut()
            .for_each(|value| *value = value.replace("{ds_config}", &file));
        // 1. Cores are shared out, not piled up on the first ones.
        expected.remove("KMP_AFFINITY");
        expected.remove("KMP_BLOCKTIME");
        // 2. Ranks share this host's cores, where torchrun gives each one thread; on the hosts of a file, those of one.
        let cores = available_parallelism().map_or(1, usize::from);
        let is_given = self.case["argv"].to_string().contains("num_cpu_threads_per_process");
        if !is_given {
            expected.insert("OMP_NUM_THREADS".into(), (cores / self.ranks).max(1).to_string());
        }
        // 3. A port that nobody names is a free one.
        if self.port.is_none() {
            expected.remove("MASTER_PORT");
        }
        // 4. Over MPI ranks meet by MPI.
        if self.uses_mpi {
            expected.remove("MASTER_ADDR");
        }
        // 5. What other launchers' agents tell of themselves.
        expected.retain(|name, _| !name.starts_with("TORCHELASTIC_") && !name.starts_with("OMPI_"));
        // 6. `--cpu --num_processes 2` starts two ranks, each with its place.
        if self.name == "cpu_2_single_child" {
            let place = [
                ("RANK", "0"),
                ("WORLD_SIZE", "2"),
                ("LOCAL_RANK", "0"),
                ("LOCAL_WORLD_SIZE", "2"),
            ];
            expected.extend(place.map(|(name, value)| (name.into(), value.into())));
        }
        expected
    }
}

fn fake_mpirun(folder: &Path) {
    let script = "#!/bin/sh\n[ \"$1\" = --version ] && { echo 'mpirun (Open MPI) 4.1.4'; exit; }\nenv > env.0\n";
    let mut writer = Command::new("/bin/sh");
    writer.args(["-c", "printf %s \"$0\" > mpirun; chmod +x mpirun", script]);
    assert!(writer.current_dir(folder).status().unwrap().success());
}

#[test]
fn ranks_find_what_accelerates_find_but_for_the_differences_that_are_meant() {
    let fixture = fixture("env.json");
    let cases = fixture["cases"].as_array().unwrap();
    let mut compared = 0;
    for case in cases {
        let name = case["name"].as_str().unwrap();
        if ELSEWHERE.contains(&name) {
            continue;
        }
        let mut case = Case::new(case, &fixture);
        let output = case.launch.output();
        let stderr = text(&output.stderr);
        if let Some((_, part)) = REFUSED.iter().find(|(refused, _)| *refused == name) {
            assert_eq!(output.status.code(), Some(2), "{name}: {stderr}");
            assert!(stderr.contains(part), "{name}: {part:?} in {stderr:?}");
            continue;
        }
        assert!(output.status.success(), "{name}: {output:?}");
        let found = fs::read_to_string(case.launch.path("env.0")).unwrap_or_else(|_| panic!("{name}: {output:?}"));
        let found: BTreeMap<_, _> = found.lines().filter_map(|line| line.split_once('=')).collect();
        let expected = case.expected();
        for (variable, value) in &expected {
            assert_eq!(
                found.get(variable.as_str()),
                Some(&value.as_str()),
                "{variable} of {name}: {stderr}"
            );
        }
        let of_accelerate = |variable: &&&str| {
            ["ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_"]
                .iter()
                .any(|start| variable.starts_with(start))
        };
        let more = found
            .keys()
            .filter(of_accelerate)
            .filter(|variable| !expected.contains_key(**variable));
        assert_eq!(Vec::from_iter(more), Vec::<&&str>::new(), "{name}");
        compared += 1;
    }
    assert_eq!(
        compared + ELSEWHERE.len() + REFUSED.len(),
        cases.len(),
        "every case is one of the three"
    );
}

#[test]
fn every_flag_of_accelerates_is_known_or_refused_with_a_reason() {
    let fixture = fixture("flags.json");
    let flags = fixture.as_object().unwrap().values().find_map(Json::as_array).unwrap();
    let help = launcher().args(["--help"]).output().unwrap();
    let help = text(&help.stdout);
    let names = flags.iter().flat_map(|flag| flag["names"].as_array().unwrap());
    let long = names
        .map(|name| name.as_str().unwrap())
        .filter(|name| name.starts_with("--"));
    let mut unknown = BTreeSet::new();
    for name in long {
        let in_help = name.replace('-', "_").replacen("__", "--", 1);
        if help.contains(&format!("{in_help} ")) || help.contains(&format!("{in_help}\n")) {
            continue;
        }
        let output = launcher().args([name, "x", "true"]).output().unwrap();
        let stderr = text(&output.stderr);
        if !stderr.contains(&format!("error: {name} is not supported: ")) {
            unknown.insert(name.to_owned());
        }
    }
    // Of several machines, and of programs in Python.
    let others = [
        "num_machines",
        "same_network",
        "machine_rank",
        "tee",
        "log_dir",
        "role",
        "rdzv_backend",
        "rdzv_conf",
        "max_restarts",
        "monitor_interval",
        "module",
        "no_python",
    ];
    unknown.retain(|name| !others.contains(&name.trim_start_matches("--").replace('-', "_").as_str()));
    assert_eq!(unknown, BTreeSet::new());
}
