//! What the ranks find in their environment.

use super::*;

#[test]
fn every_rank_gets_its_whole_place_in_the_world() {
    let mut launch = Launch::new(&["-n", "3", "--cpu"], "env > env.$RANK");
    // What another launcher around this one would have left, and what a rank must not see.
    launch.command.envs([
        ("RANK", "9"),
        ("OMPI_COMM_WORLD_RANK", "9"),
        ("PMI_SIZE", "9"),
        ("PMIX_RANK", "9"),
    ]);
    let output = launch.output();
    assert!(output.status.success(), "{output:?}");

    let mut ports = Vec::new();
    for rank in 0..3 {
        let content = fs::read_to_string(launch.path(&format!("env.{rank}"))).unwrap();
        let variables: BTreeMap<_, _> = content.lines().filter_map(|line| line.split_once('=')).collect();
        let own = rank.to_string();
        // The variables of torchrun on one host (torch/distributed/elastic) and of `accelerate launch --cpu`.
        let expected = [
            ("RANK", own.as_str()),
            ("LOCAL_RANK", &own),
            ("ROLE_RANK", &own),
            ("WORLD_SIZE", "3"),
            ("LOCAL_WORLD_SIZE", "3"),
            ("ROLE_WORLD_SIZE", "3"),
            ("ROLE_NAME", "default"),
            ("GROUP_RANK", "0"),
            ("GROUP_WORLD_SIZE", "1"),
            ("NODE_RANK", "0"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("ACCELERATE_USE_CPU", "True"),
            ("ACCELERATE_MIXED_PRECISION", "no"),
        ];
        for (name, value) in expected {
            assert_eq!(variables.get(name), Some(&value), "{name} of rank {rank}");
        }
        for name in ["OMPI_COMM_WORLD_RANK", "PMI_SIZE", "PMIX_RANK"] {
            assert_eq!(variables.get(name), None, "{name} of rank {rank}");
        }
        ports.push(variables["MASTER_PORT"].parse::<u16>().unwrap());
    }
    assert!(ports[0] != 0 && ports.iter().all(|port| *port == ports[0]), "{ports:?}");
}

#[test]
fn flags_reach_the_ranks_as_accelerates_variables() {
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
        .to_string();
    let flags = [
        "--num_processes=1",
        "--mixed-precision",
        "bf16",
        "--gradient_accumulation_steps",
        "4",
        "--debug",
        "--num_cpu_threads_per_process",
        "3",
        "--main_process_port",
        &port,
        "--main_process_ip",
        "127.0.0.1",
    ];
    let names = "$ACCELERATE_MIXED_PRECISION $ACCELERATE_GRADIENT_ACCUMULATION_STEPS $ACCELERATE_DEBUG_MODE \
                 $RAYON_NUM_THREADS $OMP_NUM_THREADS $MASTER_PORT ${ACCELERATE_USE_CPU-unset}";
    let output = Launch::new(&flags, &format!("echo {names}")).output();
    assert_eq!(text(&output.stdout), format!("bf16 4 true 3 3 {port} unset\n"));
}

#[test]
fn cores_are_divided_among_ranks_unless_the_user_has_set_the_threads() {
    let script = "echo $RAYON_NUM_THREADS $OMP_NUM_THREADS";
    let cores = std::thread::available_parallelism().unwrap().get();
    for ranks in [1, 2, cores + 1] {
        let output = Launch::new(&["--no_prefix", "-n", &ranks.to_string()], script).output();
        let threads = if ranks > cores { 1 } else { cores / ranks };
        assert_eq!(text(&output.stdout), format!("{threads} {threads}\n").repeat(ranks));
    }

    let mut launch = Launch::new(&["-n", "2"], script);
    launch.command.env("RAYON_NUM_THREADS", "7");
    let others = (cores / 2).max(1);
    let expected = [format!("[rank 0] 7 {others}"), format!("[rank 1] 7 {others}")];
    assert_eq!(sorted(&launch.output().stdout), expected);
}

#[test]
fn the_ranks_are_led_to_a_store_that_lets_them_in() {
    let script = "echo $SCONCE_STORE_ADDR $SCONCE_STORE_SECRET > new; mv new store; exec sleep 600";
    let mut launch = Launch::new(&[], script);
    let child = launch.spawn();
    let mut store = String::new();
    wait_until("the rank has told of the store", || {
        store = fs::read_to_string(launch.path("store")).unwrap_or_default();
        !store.is_empty()
    });
    let (address, secret) = store.trim().split_once(' ').unwrap();
    let client = StoreClient::connect(address, &Secret::from_text(secret).unwrap(), DEADLINE).unwrap();
    client.set("key", b"value").unwrap();
    assert_eq!(client.get("key").unwrap().as_deref(), Some(&b"value"[..]));
    assert!(StoreClient::connect(address, &Secret::random(), DEADLINE).is_err());
    send(Signal::TERM, child.id());
    assert_eq!(wait_with_output(child).status.code(), Some(143));
}

#[test]
fn a_rank_reads_the_world_that_the_launcher_wrote() {
    let mut launch = Launch::new(&["-n", "2", "--cpu"], "env > env.$RANK");
    launch
        .command
        .envs([("OMPI_COMM_WORLD_RANK", "5"), ("OMPI_COMM_WORLD_SIZE", "8")]);
    assert!(launch.output().status.success());
    for rank in 0..2 {
        let content = fs::read_to_string(launch.path(&format!("env.{rank}"))).unwrap();
        let variables: BTreeMap<_, _> = content.lines().filter_map(|line| line.split_once('=')).collect();
        let world = World::from_lookup(|name| variables.get(name).map(|value| (*value).to_owned())).unwrap();
        assert_eq!(
            (world.rank, world.size, world.local_rank, world.local_size),
            (rank, 2, rank, 2)
        );
        assert_eq!((world.node_rank, world.master_addr.as_str()), (0, "127.0.0.1"));
    }
}
