//! The same suite over NCCL: this program again, as processes with a GPU, one test after the other on every rank.
//!
//! The ranks may have one GPU in common. NCCL refuses that to ranks of one host, so each is told that it is a host of its own;
//! all data then goes over sockets.

#[cfg(feature = "nccl")]
use sconce_collectives::store::StoreClient;
use sconce_collectives::store::{Secret, StoreServer};
use sconce_collectives::{Communicator, Options, World};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

/// Set in processes that are ranks of a job.
const IS_RANK: &str = "SCONCE_TEST_OVER_NCCL";

/// Says whether this process is a rank of a job, started by one of the tests below.
pub(crate) fn is_rank() -> bool {
    std::env::var_os(IS_RANK).is_some()
}

/// Makes the group of the only rank of a job.
#[cfg(feature = "nccl")]
pub(crate) fn alone(world: &World, options: &Options) -> Arc<dyn Communicator> {
    let address = std::env::var("SCONCE_STORE_ADDR").expect("the job has a store");
    let secret = std::env::var("SCONCE_STORE_SECRET").expect("the job has a secret");
    let secret = Secret::from_text(&secret).expect("the secret is long enough");
    let store = StoreClient::connect(&address, &secret, options.timeout).expect("the store is up");
    let options = Options {
        gpu: Some(0),
        ..options.clone()
    };
    sconce_collectives::nccl::connect(world, &store, &options).expect("a GPU is here")
}

/// Jobs of one rank are NCCL's only.
#[cfg(not(feature = "nccl"))]
pub(crate) fn alone(_: &World, _: &Options) -> Arc<dyn Communicator> {
    unreachable!("a job of one rank in a build without NCCL")
}

/// Says whether a group reduces in an order and type of its own, so that results are right within rounding only.
pub(crate) fn rounds_otherwise(group: &dyn Communicator) -> bool {
    group.backend() == "nccl"
}

#[test]
#[cfg_attr(not(feature = "nccl"), ignore = "needs the feature nccl")]
fn over_nccl_on_1_rank() {
    run_suite(1);
}

#[test]
#[cfg_attr(not(feature = "nccl"), ignore = "needs the feature nccl")]
fn over_nccl_on_2_ranks() {
    run_suite(2);
}

#[test]
#[cfg_attr(not(feature = "nccl"), ignore = "needs the feature nccl")]
fn over_nccl_on_4_ranks() {
    run_suite(4);
}

fn run_suite(ranks: usize) {
    let secret = "the suite's ranks meet here";
    let server = StoreServer::start("127.0.0.1:0", Secret::from_text(secret).unwrap()).unwrap();
    let rank = |rank: usize| -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            // In one order on all ranks.
            .args(["--test-threads=1", "--color=never", "--skip", "over_"])
            .envs([
                (IS_RANK, "1"),
                ("SCONCE_BACKEND", "nccl"),
                ("SCONCE_STORE_SECRET", secret),
            ])
            .env("SCONCE_STORE_ADDR", server.address().to_string())
            .envs([("RANK", rank), ("LOCAL_RANK", rank)].map(|(name, value)| (name, value.to_string())))
            .envs([("WORLD_SIZE", ranks), ("LOCAL_WORLD_SIZE", ranks)].map(|(name, value)| (name, value.to_string())))
            .env("NCCL_HOSTID", format!("sconce-test-host-{rank}"))
            .envs([
                ("NCCL_P2P_DISABLE", "1"),
                ("NCCL_SHM_DISABLE", "1"),
                ("NCCL_IB_DISABLE", "1"),
            ])
            .envs([
                ("NCCL_NET", "Socket"),
                ("NCCL_SOCKET_IFNAME", "lo"),
                ("NCCL_MNNVL_ENABLE", "0"),
            ])
            // The official switch of newer versions.
            .env("NCCL_MULTI_RANK_GPU_ENABLE", "1")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let started: Vec<Child> = (0..ranks).map(rank).collect();
    let outputs: Vec<_> = started
        .into_iter()
        .map(|child| child.wait_with_output().unwrap())
        .collect();
    for (rank, output) in outputs.iter().enumerate() {
        let [stdout, stderr] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
        assert!(
            output.status.success() && stdout.contains("0 failed"),
            "rank {rank} of {ranks}:\n{stdout}\n{stderr}"
        );
    }
}
