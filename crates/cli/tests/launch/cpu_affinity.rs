//! `--enable_cpu_affinity`: on which cores the ranks run.

use super::*;

const SCRIPT: &str = "grep Cpus_allowed_list: /proc/self/status";

/// The cores in a line such as `Cpus_allowed_list: 0-2,5`.
fn cores(line: &str) -> Vec<usize> {
    let list = line.rsplit(['\t', ' ']).next().unwrap();
    let number = |text: &str| text.parse::<usize>().unwrap();
    let ranges = list.trim().split(',');
    let ranges = ranges.flat_map(|range| match range.split_once('-') {
        Some((first, last)) => number(first)..=number(last),
        None => number(range)..=number(range),
    });
    ranges.collect()
}

fn own_cores() -> Vec<usize> {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    cores(
        status
            .lines()
            .find(|line| line.starts_with("Cpus_allowed_list:"))
            .unwrap(),
    )
}

/// The cores of each of two ranks.
fn cores_of_ranks(launch: &mut Launch) -> [Vec<usize>; 2] {
    let output = launch.output();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let lines = sorted(&output.stdout);
    assert_eq!(lines.len(), 2, "{lines:?}");
    [0, 1].map(|rank| cores(lines[rank].strip_prefix(&format!("[rank {rank}] ")).unwrap()))
}

#[test]
fn each_rank_has_an_equal_share_of_the_launchers_cores() {
    let allowed = own_cores();
    if allowed.len() < 2 {
        println!("skipped: this process has one core, which cannot be split");
        return;
    }
    let by_flags = ["--enable_cpu_affinity", "--enable-cpu-affinity"]
        .map(|flag| cores_of_ranks(&mut Launch::new(&["-n", "2", flag], SCRIPT)));
    let mut by_variable = Launch::new(&["-n", "2"], SCRIPT);
    by_variable.command.env("ACCELERATE_CPU_AFFINITY", "true");
    for [first, second] in by_flags.into_iter().chain([cores_of_ranks(&mut by_variable)]) {
        assert_eq!(first.len(), allowed.len() / 2);
        let mut both = [first, second].concat();
        both.sort_unstable();
        assert_eq!(both, allowed, "every core belongs to one rank");
    }
}

#[test]
fn without_the_flag_ranks_have_all_cores() {
    let [first, second] = cores_of_ranks(&mut Launch::new(&["-n", "2"], SCRIPT));
    assert_eq!((first, second), (own_cores(), own_cores()));
}

#[test]
fn what_the_launcher_may_not_use_no_rank_gets() {
    let core = own_cores()[0].to_string();
    let mut launch = Launch::new(&["-n", "2", "--enable_cpu_affinity"], SCRIPT);
    let mut within = Command::new("taskset");
    within.args(["--cpu-list", &core]).arg(launch.command.get_program());
    within.args(launch.command.get_args()).current_dir(&launch.folder);
    launch.command = within;
    let output = launch.output();
    let told = "notice: ranks are not bound to cores: 2 ranks have 1 core(s) in common\n";
    assert_eq!(text(&output.stderr), told);
    let lines = sorted(&output.stdout);
    assert!(
        lines.iter().all(|line| line.ends_with(&format!("\t{core}"))),
        "{lines:?}"
    );
}

#[test]
fn a_single_rank_is_told_that_there_is_nothing_to_split() {
    let output = Launch::new(&["--enable_cpu_affinity"], SCRIPT).output();
    let stderr = text(&output.stderr);
    assert!(
        stderr.starts_with("notice: ranks are not bound to cores: one rank has all "),
        "{stderr}"
    );
    assert_eq!(cores(text(&output.stdout).trim_end()), own_cores());
}

#[test]
fn threads_are_as_many_as_a_rank_has_cores() {
    let script = "echo $RAYON_NUM_THREADS $ACCELERATE_CPU_AFFINITY";
    let output = Launch::new(&["--no_prefix", "-n", "2", "--enable_cpu_affinity"], script).output();
    let threads = (std::thread::available_parallelism().unwrap().get() / 2).max(1);
    assert_eq!(text(&output.stdout), format!("{threads} 1\n").repeat(2));
}

#[test]
fn a_variable_that_says_neither_is_an_error() {
    let mut launch = Launch::new(&["-n", "2"], "echo started");
    launch.command.env("ACCELERATE_CPU_AFFINITY", "numa");
    let output = launch.output();
    assert_eq!(output.status.code(), Some(2));
    let message = "error: ACCELERATE_CPU_AFFINITY=\"numa\": expected true or false\nhint: ";
    assert!(text(&output.stderr).starts_with(message), "{output:?}");
}
