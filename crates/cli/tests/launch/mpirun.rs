//! `--backend mpi` and `--mpirun_hostfile`: what `mpirun` is told. A script stands in for it.

use super::*;
use std::process::Output;

/// Runs `sconce launch` with a `mpirun` that prints its arguments and environment and exits with 7.
fn launch(folder: &TempDir, flags: &[&str], variables: &[(&str, &str)]) -> Output {
    launch_with("echo \"arguments: $*\"; env; exit 7", folder, flags, variables)
}

/// The same with a `mpirun` that does what `work` says.
fn launch_with(work: &str, folder: &TempDir, flags: &[&str], variables: &[(&str, &str)]) -> Output {
    let script = "#!/bin/sh\n[ \"$1\" = --version ] && { echo 'mpirun (Open MPI) 4.1.4'; exit; }\n";
    let script = format!("{script}{work}\n");
    // Written by another process: while this one holds it open for writing, it cannot be executed.
    let mut writer = Command::new("/bin/sh");
    writer.args(["-c", "printf %s \"$0\" > mpirun; chmod +x mpirun", &script]);
    assert!(writer.current_dir(folder).status().unwrap().success());
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    let mut launcher = launcher();
    launcher.args(flags).env("PATH", path).envs(variables.iter().copied());
    launcher.current_dir(folder).output().unwrap()
}

#[test]
fn mpirun_gets_ranks_hosts_program_and_the_settings_but_no_place() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("hosts"), "node1 slots=2\nnode2 slots=2\n").unwrap();
    let flags = ["-n", "4", "--mpirun_hostfile", "hosts", "--mixed_precision", "bf16"];
    let flags = [
        &flags[..],
        &["--num_cpu_threads_per_process", "3", "/bin/echo", "a", "-n"],
    ]
    .concat();
    let foreign = [
        ("RANK", "3"),
        ("WORLD_SIZE", "5"),
        ("PMIX_RANK", "1"),
        ("SCONCE_STORE_ADDR", "host:1"),
    ];
    let variables = [&foreign[..], &[("SCONCE_TIMEOUT", "60")]].concat();
    let output = launch(&folder, &flags, &variables);
    assert_eq!(output.status.code(), Some(7), "the exit code is mpirun's: {output:?}");
    let printed = text(&output.stdout);
    let expected = "arguments: -n 4 --tag-output --bind-to none --hostfile hosts -x RAYON_NUM_THREADS -x OMP_NUM_THREADS \
                    -x ACCELERATE_MIXED_PRECISION -x MALLOC_MMAP_THRESHOLD_ -x MALLOC_TRIM_THRESHOLD_ ";
    assert!(printed.starts_with(expected), "{printed}");
    let (arguments, _) = printed.split_once('\n').unwrap();
    assert!(
        arguments.contains(" -x SCONCE_TIMEOUT ")
            && arguments.contains(" -x SCONCE_BACKEND ")
            && arguments.ends_with(" /bin/echo a -n"),
        "{printed}"
    );
    let lines: Vec<&str> = printed.lines().collect();
    for set in [
        "SCONCE_BACKEND=mpi",
        "ACCELERATE_MIXED_PRECISION=bf16",
        "RAYON_NUM_THREADS=3",
    ] {
        assert!(lines.contains(&set), "{set}: {printed}");
    }
    for (name, _) in foreign {
        let start = format!("{name}=");
        assert!(!lines.iter().any(|line| line.starts_with(&start)), "{name}: {printed}");
    }
}

#[test]
fn the_flag_and_the_variable_both_choose_mpi() {
    let folder = tempfile::tempdir().unwrap();
    let by_flag = launch(&folder, &["-n", "2", "--backend", "mpi", "/bin/true"], &[]);
    let by_variable = launch(&folder, &["-n", "2", "/bin/true"], &[("SCONCE_BACKEND", "mpi")]);
    for output in [by_flag, by_variable] {
        assert!(text(&output.stdout).contains("--oversubscribe"), "{output:?}");
    }
    let flags = ["-n", "1", "--backend", "shm", "/bin/sh", "-c", "echo $SCONCE_BACKEND"];
    let output = launch(&folder, &flags, &[("SCONCE_BACKEND", "mpi")]);
    assert_eq!(text(&output.stdout), "shm\n");
}

#[test]
fn mpirun_is_told_to_bind_ranks_to_their_share_of_the_cores() {
    let folder = tempfile::tempdir().unwrap();
    let online = fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
    let (first, cores) = (online.trim(), std::thread::available_parallelism().unwrap().get());
    if first != format!("0-{}", cores - 1) {
        println!("skipped: this process may not use all cores of the host ({first})");
        return;
    }
    let launch = |ranks: usize| {
        let ranks = ranks.to_string();
        let flags = ["-n", &ranks, "--backend", "mpi", "--enable_cpu_affinity", "/bin/true"];
        launch(&folder, &flags, &[])
    };
    let expected = format!(
        "arguments: -n 2 --tag-output --use-hwthread-cpus --bind-to hwthread --map-by slot:PE={} ",
        cores / 2
    );
    let output = launch(2);
    assert!(text(&output.stdout).starts_with(&expected), "{output:?}");
    let output = launch(cores + 1);
    let told = format!(
        "notice: ranks are not bound to cores: {} ranks have {cores} core(s) in common\n",
        cores + 1
    );
    assert!(text(&output.stderr).starts_with(&told), "{output:?}");
    assert!(text(&output.stdout).contains(" --bind-to none "), "{output:?}");
}

#[test]
fn lines_of_ranks_are_marked_and_the_rank_that_failed_first_is_told_last() {
    let folder = tempfile::tempdir().unwrap();
    let work = "printf '[1,0]<stdout>:half [1,1]<stdout>:whole\\n[1,0]<stdout>:and half\\n'
        printf '[1,1]<stderr>:error: no data\\n' >&2
        echo '  Process name: [[4711,1],1]' >&2
        exit 3";
    let flags = ["-n", "2", "--backend", "mpi", "/bin/true"];
    let output = launch_with(work, &folder, &flags, &[]);
    assert_eq!(text(&output.stdout), "[rank 1] whole\n[rank 0] half and half\n");
    let stderr = text(&output.stderr);
    let expected = "[rank 1] error: no data\n  Process name: [[4711,1],1]\nerror: mpirun exited with code 3 after ";
    assert!(stderr.starts_with(expected), "{stderr}");
    assert!(
        stderr
            .ends_with(" s; the first rank that it saw fail is rank 1\n  the end of its stderr:\n    error: no data\n"),
        "{stderr}"
    );
    assert_eq!(output.status.code(), Some(3));

    let output = launch_with(work, &folder, &[&["--no_prefix"], &flags[..]].concat(), &[]);
    assert_eq!(text(&output.stdout), "whole\nhalf and half\n");
}

#[test]
fn a_signal_to_stop_reaches_mpirun() {
    let folder = tempfile::tempdir().unwrap();
    // The launcher is the parent of what stands in for mpirun.
    let work = "trap 'echo told; exit 5' TERM; kill -TERM $PPID; while :; do :; done";
    let output = launch_with(work, &folder, &["-n", "2", "--backend", "mpi", "/bin/true"], &[]);
    assert_eq!(text(&output.stdout), "told\n");
    assert_eq!(
        (output.status.code(), text(&output.stderr)),
        (Some(143), "error: stopped by SIGTERM\n".into())
    );
}

#[test]
fn a_rank_that_a_killed_mpirun_leaves_behind_is_killed_too() {
    let folder = tempfile::tempdir().unwrap();
    // A rank in a group of its own, with a child, that heeds no signal; and an mpirun that does not end it.
    let work = "trap '' TERM
        setsid sh -c 'trap \"\" TERM; sleep 600 & echo $! > helper; echo $$ > new; mv new rank; wait; sleep 600' &
        while [ ! -e rank ]; do sleep 0.01; done
        kill -TERM $PPID; while :; do sleep 0.01; done";
    let flags = ["-n", "2", "--backend", "mpi", "--kill_grace", "0.2", "/bin/true"];
    let output = launch_with(work, &folder, &flags, &[]);
    let expected = "error: stopped by SIGTERM\n  mpirun did not end when asked, and was killed\n";
    assert_eq!(
        (output.status.code(), text(&output.stderr)),
        (Some(143), expected.into())
    );
    for file in ["rank", "helper"] {
        assert!(!is_running(number_in(&folder.path().join(file))), "{file}");
    }
}

#[test]
fn what_mpirun_cannot_do_is_one_error() {
    let folder = tempfile::tempdir().unwrap();
    for (flags, message) in [
        (vec!["--mpirun_hostfile", "none"], "there is no hostfile none\nhint: "),
        (
            vec!["--backend", "shm", "--mpirun_hostfile", "none"],
            "--mpirun_hostfile needs --backend mpi",
        ),
        (
            vec!["--backend", "mpi", "--main_process_port", "0"],
            "--main_process_port has no effect with --backend mpi\nhint: ",
        ),
        (vec!["--backend", "gloo"], "gloo"),
    ] {
        let output = launch(&folder, &[&flags[..], &["/bin/true"]].concat(), &[]);
        assert_eq!(output.status.code(), Some(2), "{flags:?}");
        let stderr = text(&output.stderr);
        assert!(
            stderr.starts_with("error: ") && stderr.contains(message),
            "{flags:?}: {stderr}"
        );
    }
    let mut without = launcher();
    without.args(["--backend", "mpi", "/bin/true"]).env("PATH", "/nowhere");
    let output = without.output().unwrap();
    let message = "error: no program mpirun in PATH\nhint: install the MPI";
    assert!(text(&output.stderr).starts_with(message), "{output:?}");
}
