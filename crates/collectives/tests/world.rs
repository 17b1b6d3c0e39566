//! `World` from what launchers put into the environment.

use sconce_collectives::{Error, Result, World};

/// Reads a world from `NAME=value` pairs separated by blanks; `_` stands for a blank inside a value.
fn read(pairs: &str) -> Result<World> {
    World::from_lookup(|name| {
        let value = pairs
            .split_whitespace()
            .find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))?;
        Some(value.replace('_', " "))
    })
}

/// rank/size, local rank/local size, host, address:port.
fn show(world: &World) -> String {
    let World {
        rank,
        size,
        local_rank,
        local_size,
        node_rank,
        master_addr,
        master_port,
    } = world;
    format!("{rank}/{size} {local_rank}/{local_size} {node_rank} {master_addr}:{master_port}")
}

const TORCHRUN_SECOND_HOST: &str = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 GROUP_WORLD_SIZE=2 \
    ROLE_RANK=5 ROLE_WORLD_SIZE=8 MASTER_ADDR=node1 MASTER_PORT=29655 TORCHELASTIC_USE_AGENT_STORE=True";
const SRUN_THIRD_HOST: &str = "SLURM_PROCID=9 SLURM_NTASKS=11 SLURM_STEP_NUM_TASKS=11 SLURM_STEP_ID=0 SLURM_LOCALID=1 \
    SLURM_NODEID=2 SLURM_STEP_TASKS_PER_NODE=4(x2),3 SLURM_STEP_NODELIST=gpu[003-005] SLURM_JOB_NODELIST=gpu[001-005] \
    SLURM_TASKS_PER_NODE=4(x5)";

#[test]
fn each_launcher_is_understood() {
    let cases = [
        // Nothing, and `accelerate launch --cpu --num_processes 2`, which starts one process.
        ("", "0/1 0/1 0 127.0.0.1:29500"),
        ("MASTER_ADDR=127.0.0.1 MASTER_PORT=29500", "0/1 0/1 0 127.0.0.1:29500"),
        ("MASTER_ADDR=node1 MASTER_PORT=65535", "0/1 0/1 0 node1:65535"),
        ("RANK= WORLD_SIZE=_", "0/1 0/1 0 127.0.0.1:29500"),
        // torchrun.
        (TORCHRUN_SECOND_HOST, "5/8 1/4 1 node1:29655"),
        ("RANK=_1_ WORLD_SIZE=2", "1/2 1/2 0 127.0.0.1:29500"),
        ("RANK=1 WORLD_SIZE=2 MASTER_ADDR=localhost", "1/2 1/2 0 localhost:29500"),
        ("RANK=1 WORLD_SIZE=2 MASTER_ADDR=::1", "1/2 1/2 0 ::1:29500"),
        ("RANK=0 WORLD_SIZE=1 MASTER_ADDR=node1", "0/1 0/1 0 node1:29500"),
        (
            "RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=node1",
            "1/2 1/2 0 node1:29500",
        ),
        (
            "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1",
            "3/4 1/2 1 127.0.0.1:29500",
        ),
        (
            "RANK=4 WORLD_SIZE=6 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 NODE_RANK=1 MASTER_ADDR=a",
            "4/6 0/2 1 a:29500",
        ),
        (
            "RANK=4 WORLD_SIZE=6 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 NODE_RANK=1 GROUP_RANK=2",
            "4/6 0/2 2 127.0.0.1:29500",
        ),
        // Open MPI as `accelerate launch` uses it, and over two hosts.
        (
            "MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 \
             OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2",
            "1/2 1/2 0 127.0.0.1:29500",
        ),
        (
            "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2",
            "3/4 1/2 1 127.0.0.1:29500",
        ),
        // MPICH and Intel MPI.
        (
            "PMI_RANK=2 PMI_SIZE=4 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2 MASTER_ADDR=a",
            "2/4 0/2 1 a:29500",
        ),
        (
            "PMI_RANK=2 PMI_SIZE=4 MASTER_ADDR=127.0.0.1",
            "2/4 2/4 0 127.0.0.1:29500",
        ),
        // Slurm.
        (SRUN_THIRD_HOST, "9/11 1/3 2 gpu003:29500"),
        (
            "SLURM_PROCID=3 SLURM_NTASKS=4 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_TASKS_PER_NODE=2(x2)",
            "3/4 1/2 1 127.0.0.1:29500",
        ),
        (
            "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1 SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=2 \
             SLURM_STEP_NODELIST=gpu1",
            "1/2 1/2 0 127.0.0.1:29500",
        ),
        // An interactive step, and a batch script of one task.
        (
            "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_NTASKS=8 SLURM_STEP_ID=4294967290",
            "0/1 0/1 0 127.0.0.1:29500",
        ),
        (
            "SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_JOB_NODELIST=gpu1",
            "0/1 0/1 0 127.0.0.1:29500",
        ),
    ];
    for (environment, expected) in cases {
        match read(environment) {
            Ok(world) => assert_eq!(show(&world), expected, "{environment}"),
            Err(error) => panic!("{environment}: {error}"),
        }
    }
}

#[test]
fn slurm_gives_the_local_numbers_that_a_family_of_the_same_rank_and_size_lacks() {
    let by_hand = format!("RANK=9 WORLD_SIZE=11 MASTER_ADDR=gpu003 {SRUN_THIRD_HOST}");
    assert_eq!(show(&read(&by_hand).unwrap()), "9/11 1/3 2 gpu003:29500");
    let pmi2 = format!("PMI_RANK=9 PMI_SIZE=11 {SRUN_THIRD_HOST}");
    assert_eq!(show(&read(&pmi2).unwrap()), "9/11 1/3 2 gpu003:29500");
}

#[test]
fn a_launcher_inside_a_slurm_step_wins_over_slurm() {
    let torchrun = format!(
        "{TORCHRUN_SECOND_HOST} SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_LOCALID=0 \
        SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=1(x2)"
    );
    assert_eq!(show(&read(&torchrun).unwrap()), "5/8 1/4 1 node1:29655");
    // Not even a broken Slurm environment matters then.
    let broken = format!("{TORCHRUN_SECOND_HOST} SLURM_PROCID=x SLURM_NTASKS=2");
    assert_eq!(show(&read(&broken).unwrap()), "5/8 1/4 1 node1:29655");
}

#[test]
fn families_that_agree_live_together() {
    let both = "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 \
        PMI_RANK=1 PMI_SIZE=2";
    assert_eq!(show(&read(both).unwrap()), "1/2 1/2 0 127.0.0.1:29500");
    // An incomplete family says nothing.
    assert_eq!(
        show(&read("RANK=1 WORLD_SIZE=2 PMI_RANK=0").unwrap()),
        "1/2 1/2 0 127.0.0.1:29500"
    );
}

#[test]
fn errors_name_the_variable() {
    let local = "RANK=0 WORLD_SIZE=4";
    let cases = [
        ("RANK=x WORLD_SIZE=2".to_owned(), "RANK", "not a number"),
        ("RANK=-1 WORLD_SIZE=2".to_owned(), "RANK", "not a number"),
        ("RANK=0 WORLD_SIZE=1.5".to_owned(), "WORLD_SIZE", "not a number"),
        ("RANK=0 WORLD_SIZE=0".to_owned(), "WORLD_SIZE", "at least one"),
        ("RANK=2 WORLD_SIZE=2".to_owned(), "RANK", "below WORLD_SIZE=2"),
        (
            "OMPI_COMM_WORLD_RANK=9 OMPI_COMM_WORLD_SIZE=2".to_owned(),
            "OMPI_COMM_WORLD_RANK",
            "below OMPI_COMM_WORLD_SIZE=2",
        ),
        ("PMI_RANK=0 PMI_SIZE=many".to_owned(), "PMI_SIZE", "not a number"),
        (
            format!("{local} LOCAL_RANK=2 LOCAL_WORLD_SIZE=2"),
            "LOCAL_RANK",
            "below LOCAL_WORLD_SIZE=2",
        ),
        (
            format!("{local} LOCAL_RANK=0 LOCAL_WORLD_SIZE=0"),
            "LOCAL_WORLD_SIZE",
            "at least one",
        ),
        (
            format!("{local} LOCAL_RANK=0 LOCAL_WORLD_SIZE=5"),
            "LOCAL_WORLD_SIZE",
            "WORLD_SIZE=4",
        ),
        (
            format!("{local} LOCAL_RANK=a LOCAL_WORLD_SIZE=2"),
            "LOCAL_RANK",
            "not a number",
        ),
        (
            format!("{local} LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 GROUP_RANK=3"),
            "GROUP_RANK",
            "at most 3 hosts",
        ),
        ("MASTER_PORT=0".to_owned(), "MASTER_PORT", "1 to 65535"),
        ("MASTER_PORT=65536".to_owned(), "MASTER_PORT", "1 to 65535"),
        ("MASTER_PORT=http".to_owned(), "MASTER_PORT", "1 to 65535"),
        (
            "SLURM_PROCID=x SLURM_NTASKS=2".to_owned(),
            "SLURM_PROCID",
            "not a number",
        ),
        (
            "SLURM_PROCID=2 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_TASKS_PER_NODE=2".to_owned(),
            "SLURM_PROCID",
            "below SLURM_NTASKS=2",
        ),
        (
            "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1 SLURM_NODEID=0 SLURM_TASKS_PER_NODE=two".to_owned(),
            "SLURM_TASKS_PER_NODE",
            "4(x2),3",
        ),
    ];
    for (environment, name, expected) in cases {
        match read(&environment) {
            Err(Error::Environment { variable, reason, .. }) => {
                assert_eq!(variable, name, "{environment}");
                assert!(reason.contains(expected), "{environment}: {reason}");
            }
            other => panic!("{environment}: {other:?}"),
        }
    }
}

#[test]
fn what_is_needed_and_missing_is_named() {
    let cases = [
        ("RANK=0", "WORLD_SIZE"),
        ("WORLD_SIZE=2", "RANK"),
        ("OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_SIZE=2", "PMI_RANK"),
        // An incomplete family in front is not passed over.
        ("RANK=0 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1", "WORLD_SIZE"),
        // Several hosts are possible.
        ("RANK=1 WORLD_SIZE=2 MASTER_ADDR=node1", "LOCAL_RANK"),
        ("RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=node1", "LOCAL_WORLD_SIZE"),
        ("RANK=1 WORLD_SIZE=2 LOCAL_RANK=0", "LOCAL_WORLD_SIZE"),
        ("RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1", "LOCAL_RANK"),
        (
            "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2",
            "OMPI_COMM_WORLD_LOCAL_RANK",
        ),
        ("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=0", "MPI_LOCALNRANKS"),
        // The step is not of these ranks: somebody started eight in a step of two.
        (
            "RANK=5 WORLD_SIZE=8 MASTER_ADDR=node1 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_NODEID=1 \
             SLURM_STEP_TASKS_PER_NODE=1(x2)",
            "LOCAL_RANK",
        ),
        // `mpirun --map-by node`: ranks 0 and 2 on one host, 1 and 3 on the other.
        (
            "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2",
            "NODE_RANK",
        ),
        // Slurm: a job's shell, a batch script, and a step without local numbers.
        ("SLURM_NTASKS=8", "SLURM_PROCID"),
        ("SLURM_PROCID=1", "SLURM_NTASKS"),
        (
            "SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_TASKS_PER_NODE=4(x2)",
            "SLURM_STEP_ID",
        ),
        (
            "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_NODEID=0 SLURM_TASKS_PER_NODE=2",
            "SLURM_LOCALID",
        ),
        (
            "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1 SLURM_TASKS_PER_NODE=2",
            "SLURM_NODEID",
        ),
        (
            "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1 SLURM_NODEID=0",
            "SLURM_STEP_TASKS_PER_NODE",
        ),
    ];
    for (environment, name) in cases {
        match read(environment) {
            Err(Error::Unset { variable, .. }) => assert_eq!(variable, name, "{environment}"),
            other => panic!("{environment}: {other:?}"),
        }
    }
}

#[test]
fn contradictions_name_both_sides() {
    let step = "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_NODEID=";
    let cases = [
        (
            "RANK=1 WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2".to_owned(),
            "RANK=1",
            "OMPI_COMM_WORLD_RANK=0",
        ),
        (
            "RANK=1 WORLD_SIZE=4 PMI_RANK=1 PMI_SIZE=2".to_owned(),
            "WORLD_SIZE=4",
            "PMI_SIZE=2",
        ),
        (
            "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 PMI_RANK=0 PMI_SIZE=1".to_owned(),
            "OMPI_COMM_WORLD_SIZE=2",
            "PMI_SIZE=1",
        ),
        (
            format!("{step}1 SLURM_TASKS_PER_NODE=4(x2)"),
            "SLURM_TASKS_PER_NODE=4(x2)",
            "SLURM_NTASKS=2",
        ),
        (
            format!("{step}2 SLURM_TASKS_PER_NODE=1(x2)"),
            "SLURM_TASKS_PER_NODE=1(x2)",
            "SLURM_NODEID=2",
        ),
    ];
    for (environment, one, two) in cases {
        match read(&environment) {
            Err(Error::Contradiction { first, second, .. }) => {
                assert_eq!((first.as_str(), second.as_str()), (one, two), "{environment}");
            }
            other => panic!("{environment}: {other:?}"),
        }
    }
}

#[test]
fn main_ranks_are_told() {
    let main = World::single();
    assert!(main.is_main() && main.is_local_main() && main.is_single_host());
    let first_of_second_host = World {
        rank: 4,
        size: 8,
        local_rank: 0,
        local_size: 4,
        node_rank: 1,
        ..main
    };
    assert!(!first_of_second_host.is_main() && first_of_second_host.is_local_main());
    assert!(!first_of_second_host.is_single_host());
}
