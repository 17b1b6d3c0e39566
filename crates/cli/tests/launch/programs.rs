//! What is started: executables, Python scripts and modules; and what would be.

use super::*;

/// Launches `words` beside a script train.py, with a Python that prints how it was called.
fn run(words: &[&str]) -> Output {
    let launch = Launch::new(&[], "");
    fs::write(launch.path("train.py"), "").unwrap();
    let mut command = launcher();
    command
        .env("PYTHON", "/bin/echo")
        .args(words)
        .current_dir(&launch.folder);
    command.output().unwrap()
}

#[test]
fn a_python_script_is_given_to_the_interpreter_unbuffered() {
    assert_eq!(text(&run(&["train.py", "--lr", "1"]).stdout), "-u train.py --lr 1\n");
}

#[test]
fn a_module_is_started_by_the_interpreter() {
    assert_eq!(
        text(&run(&["-m", "pkg.train", "--lr", "1"]).stdout),
        "-u -m pkg.train --lr 1\n"
    );
    assert_eq!(text(&run(&["--module", "pkg.train"]).stdout), "-u -m pkg.train\n");
}

#[test]
fn without_python_a_script_is_a_program_like_any_other() {
    let output = run(&["--no_python", "./train.py"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        text(&output.stderr).contains("./train.py may not be executed"),
        "{output:?}"
    );
}

#[test]
fn what_cannot_be_started_is_told_before_anything_is() {
    let output = run(&["missing.py"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        text(&output.stderr).contains("there is no script at missing.py"),
        "{output:?}"
    );
    let output = run(&["--module", "--no_python", "train"]);
    assert_eq!(output.status.code(), Some(2));
    let output = run(&["--module", "--example", "train"]);
    assert!(
        text(&output.stderr).contains("--module does not go with --example"),
        "{output:?}"
    );
}

#[test]
fn a_dry_run_starts_nothing_and_prints_commands_that_a_shell_runs() {
    let mut launch = Launch::new(
        &["-n", "2", "--cpu", "--dry_run", "--rdzv_conf", "id=a b"],
        "env > env.$RANK; touch ran",
    );
    launch.command.env("OMPI_COMM_WORLD_RANK", "9").arg("it's");
    let output = launch.output();
    assert!(output.status.success(), "{output:?}");
    assert!(!launch.path("ran").exists());
    let printed = text(&output.stdout);
    let commands = Vec::from_iter(printed.split("# rank ").skip(1));
    assert_eq!(commands.len(), 2, "{printed}");
    for (rank, command) in commands.iter().enumerate() {
        let (title, command) = command.split_once('\n').unwrap();
        assert_eq!(title, format!("{rank} of 2"));
        assert!(command.contains("-u OMPI_COMM_WORLD_RANK"), "{command}");
        assert!(!command.contains("PATH="), "only what changes: {command}");
        let status = Command::new("/bin/sh")
            .args(["-c", command])
            .env("OMPI_COMM_WORLD_RANK", "9")
            .current_dir(&launch.folder)
            .status()
            .unwrap();
        assert!(status.success());
        let content = fs::read_to_string(launch.path(&format!("env.{rank}"))).unwrap();
        let variables: BTreeMap<_, _> = content.lines().filter_map(|line| line.split_once('=')).collect();
        let world = World::from_lookup(|name| variables.get(name).map(|value| (*value).to_owned())).unwrap();
        assert_eq!((world.rank, world.size), (rank, 2));
        assert_eq!(variables["TORCHELASTIC_RUN_ID"], "a b");
        assert_eq!(variables["ACCELERATE_USE_CPU"], "True");
        assert_eq!(variables.get("OMPI_COMM_WORLD_RANK"), None);
    }
}

#[test]
fn a_dry_run_of_one_of_several_machines_prints_its_own_ranks() {
    let flags = [
        "--dry-run",
        "-n",
        "4",
        "--num_machines",
        "2",
        "--machine_rank",
        "1",
        "--main_process_ip",
        "node1",
        "--rdzv_conf",
        "id=job",
    ];
    let output = Launch::new(&flags, "").output();
    let printed = text(&output.stdout);
    for part in [
        "# rank 2 of 4\n",
        "# rank 3 of 4\n",
        "MASTER_ADDR=node1",
        "GROUP_RANK=1",
        "LOCAL_RANK=1",
    ] {
        assert!(printed.contains(part), "{part}: {printed}");
    }
    assert!(!printed.contains("# rank 0"), "{printed}");
}
