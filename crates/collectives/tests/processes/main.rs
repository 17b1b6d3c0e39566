//! Ranks as processes: they meet through the store, share memory, and notice each other's death.
//!
//! Each test starts copies of this program as ranks: a copy runs one test, `rank_main`, with its part in the environment.

use sconce_collectives::store::{Secret, StoreServer};
use sconce_collectives::{Communicator, Counts, Options, ReduceOp, World, connect};
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// Names what a rank is to do.
const PART: &str = "SCONCE_TEST_PART";

/// The ranks' side; does nothing unless started by one of the tests below.
#[test]
fn rank_main() {
    let Ok(part) = std::env::var(PART) else { return };
    let world = World::from_env().expect("the test sets the world");
    let options = Options {
        timeout: Duration::from_secs(60),
        ..Options::default()
    };
    let connection = connect(&world, &options).expect("all ranks come");
    let group = &*connection.communicator;
    match part.as_str() {
        "all_paths" => all_paths(group),
        "wait_for_ever" => wait_for_ever(group),
        "differ" => differ(group),
        "meet_again" => {
            drop(connection);
            for _ in 0..3 {
                let again = connect(&world, &options).expect("all ranks come again");
                again.communicator.barrier().unwrap();
            }
        }
        other => panic!("unknown part {other}"),
    }
}

fn all_paths(group: &dyn Communicator) {
    let (rank, size) = (group.rank(), group.size());
    for count in [1, 1000, 300_000] {
        let mut private = vec![rank as f32 + 1.0; count];
        group.all_reduce(&mut private, ReduceOp::Sum).unwrap();
        let mut shared = group.allocate_elements::<f32>(count).unwrap();
        assert!(shared.is_shared());
        shared.as_mut_slice::<f32>().fill(rank as f32 + 1.0);
        group.all_reduce(shared.as_mut_slice::<f32>(), ReduceOp::Sum).unwrap();
        let sum = (size * (size + 1) / 2) as f32;
        assert!(private.iter().chain(shared.as_slice()).all(|value| *value == sum));
        let mut gathered = vec![0u32; count * size];
        gathered[rank * count..][..count].fill(rank as u32);
        group.all_gather_in_place(&mut gathered, Counts::Equal(count)).unwrap();
        assert!(
            gathered
                .iter()
                .enumerate()
                .all(|(index, value)| *value as usize == index / count)
        );
    }
    let half = group.split(Some((rank % 2) as u32), 0).unwrap().unwrap();
    let mut members = [1u32];
    half.all_reduce(&mut members, ReduceOp::Sum).unwrap();
    assert_eq!(members[0] as usize, half.size());
    let mut received = [0i64];
    group
        .send_receive(
            &[rank as i64],
            (rank + 1) % size,
            &mut received,
            (rank + size - 1) % size,
        )
        .unwrap();
    assert_eq!(received[0] as usize, (rank + size - 1) % size);
}

/// Rank 2 says that it is there and then only sleeps in a collective with the others until something happens.
fn wait_for_ever(group: &dyn Communicator) {
    group.barrier().unwrap();
    println!("ready {}", group.rank());
    if group.rank() == 2 {
        // Never enters the next operation; ends by the signal that the test sends.
        std::thread::park_timeout(Duration::from_secs(60));
        return;
    }
    let error = group.all_reduce(&mut vec![0f32; 1 << 20], ReduceOp::Sum).unwrap_err();
    println!("failed {error}");
}

fn differ(group: &dyn Communicator) {
    let result = if group.rank() == 1 {
        group.barrier()
    } else {
        group.broadcast(&mut [0u8; 3], 0)
    };
    println!("failed {}", result.unwrap_err());
}

struct Ranks {
    children: Vec<Child>,
    output: Vec<std::io::Lines<BufReader<ChildStdout>>>,
    _store: StoreServer,
}

fn start(size: usize, part: &str) -> Ranks {
    let secret = Secret::random();
    let store = StoreServer::start("127.0.0.1:0", secret.clone()).unwrap();
    let rank = |rank: usize| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "rank_main", "--nocapture"])
            .env(PART, part)
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", size.to_string())
            .env("LOCAL_WORLD_SIZE", size.to_string())
            .env("SCONCE_STORE_ADDR", store.address().to_string())
            .env("SCONCE_STORE_SECRET", secret.to_text())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let mut children: Vec<Child> = (0..size).map(rank).collect();
    let output = children
        .iter_mut()
        .map(|child| BufReader::new(child.stdout.take().unwrap()).lines())
        .collect();
    Ranks {
        children,
        output,
        _store: store,
    }
}

impl Ranks {
    /// Returns the rest of the first line of `rank`'s output that begins with `word`; the runner may print before it.
    fn line(&mut self, rank: usize, word: &str) -> String {
        let line = self.output[rank]
            .by_ref()
            .map_while(Result::ok)
            .find(|line| line.contains(word));
        let line = line.unwrap_or_else(|| panic!("rank {rank} printed no {word:?}"));
        line.split_once(word).expect("contains it").1.to_owned()
    }

    fn wait(&mut self) -> Vec<bool> {
        self.output.iter_mut().for_each(|output| output.by_ref().for_each(drop));
        self.children
            .iter_mut()
            .map(|child| child.wait().unwrap().success())
            .collect()
    }
}

#[test]
fn processes_form_a_group_in_which_every_path_works() {
    for size in [2, 3] {
        assert_eq!(start(size, "all_paths").wait(), vec![true; size]);
    }
}

#[test]
fn processes_can_meet_again_after_leaving_a_group() {
    assert_eq!(start(3, "meet_again").wait(), [true; 3]);
}

#[test]
fn a_killed_process_is_named_by_all_others_within_a_second() {
    let mut ranks = start(3, "wait_for_ever");
    (0..3).for_each(|rank| drop(ranks.line(rank, "ready")));
    let start = Instant::now();
    ranks.children[2].kill().unwrap();
    for rank in 0..2 {
        let message = ranks.line(rank, "failed");
        assert!(message.contains("rank 2 died"), "rank {rank}: {message}");
    }
    let took = start.elapsed();
    // One second is the promise on an idle machine; a busy one gets more.
    assert!(took < Duration::from_secs(10), "{took:?}");
    println!("noticed after {took:?}");
    ranks.wait();
}

#[test]
fn processes_that_call_different_operations_all_name_both() {
    let mut ranks = start(3, "differ");
    for rank in 0..3 {
        let message = ranks.line(rank, "failed");
        assert!(
            message.contains("rank 1: barrier") && message.contains("rank 0: broadcast of 3 u8"),
            "{message}"
        );
    }
    assert_eq!(ranks.wait(), [true; 3]);
}
