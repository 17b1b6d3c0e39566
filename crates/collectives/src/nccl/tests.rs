//! The backend without a GPU: its protocol runs over a store as it does over NCCL, and shared memory stands for NCCL.

use super::board::Board;
use super::communicator::communicator;
use super::group::{Group, TakesInPlace};
use super::owner::{Carrier, Watch};
use super::plan::Plan;
use crate::collective::Counts;
use crate::parts::Part;
use crate::private::Private;
use crate::store::{Secret, StoreClient, StoreServer};
use crate::{Collective, Communicator, ElementsMut, Error, Options, ReduceOp, Result, shm, single};
use std::sync::Arc;
use std::time::Duration;

/// Carries plans out on memory of the host.
#[derive(Debug)]
struct OnHost {
    group: Arc<dyn Communicator>,
    /// Says whether it is given memory of callers, as far as it can be.
    takes_in_place: TakesInPlace,
}

impl OnHost {
    fn run(&mut self, plan: &Plan, input: &[u8], output: &mut [u8]) -> Result<()> {
        let (rank, size) = (self.group.rank(), self.group.size());
        assert!(plan.fits(rank, size, input.len(), output.len()), "{plan:?}");
        let lengths = |parts: &[Part], unit: usize| Vec::from_iter(parts.iter().map(|part| part.len() / unit));
        let mut whole = crate::Buffer::on_heap(input.len());
        whole.as_mut_slice::<u8>().copy_from_slice(input);
        match plan {
            Plan::AllReduce { element, op } => {
                let buffer = ElementsMut::of_bytes(*element, whole.as_mut_slice());
                self.group.execute(Collective::AllReduce { buffer, op: *op })?;
                output.copy_from_slice(whole.as_slice());
                Ok(())
            }
            Plan::Reduce { element, op, root } => {
                let buffer = ElementsMut::of_bytes(*element, whole.as_mut_slice());
                let (op, root) = (*op, *root);
                self.group.execute(Collective::Reduce { buffer, op, root })?;
                output.copy_from_slice(&whole.as_slice::<u8>()[..output.len()]);
                Ok(())
            }
            Plan::ReduceScatter { element, op, parts } => {
                let counts = lengths(parts, element.size());
                let buffer = ElementsMut::of_bytes(*element, whole.as_mut_slice());
                self.group.execute(Collective::ReduceScatterInPlace {
                    buffer,
                    op: *op,
                    counts: Counts::Each(&counts),
                })?;
                output.copy_from_slice(&whole.as_slice::<u8>()[parts[rank].clone()]);
                Ok(())
            }
            Plan::AllGather { parts } => self.group.all_gather_v(input, output, &lengths(parts, 1)),
            Plan::Broadcast { root } => {
                output.copy_from_slice(input);
                self.group.broadcast(output, *root)
            }
            // Only some ranks may take part: one message after the other, in an order that all ranks have.
            Plan::Exchange { send, receive } => {
                for (from, to) in (0..size).flat_map(|from| (0..size).map(move |to| (from, to))) {
                    if from == rank && to != rank && !send[to].is_empty() {
                        self.group.send(&input[send[to].clone()], to)?;
                    } else if to == rank && from != rank && !receive[from].is_empty() {
                        self.group.recv(&mut output[receive[from].clone()], from)?;
                    }
                }
                Ok(())
            }
        }
    }
}

impl Carrier for OnHost {
    fn carry(&mut self, plan: &Plan, input: &[u8], output: &mut [u8], _: Watch<'_>) -> Result<()> {
        let is_reduction = !matches!(plan, Plan::Exchange { .. } | Plan::AllGather { .. });
        assert!(!is_reduction || !(self.takes_in_place)(input), "{plan:?} is staged");
        self.run(plan, input, output)
    }

    fn carry_in_place(&mut self, plan: &Plan, input: Private, output: Private, _: Watch<'_>) -> Result<()> {
        assert!(
            (self.takes_in_place)(&[0]) && output.is_writable(),
            "{plan:?} is not staged"
        );
        let (mut source, mut target) = (vec![0; input.len()], vec![0; output.len()]);
        Private::of_mut(&mut source).copy_between(&input);
        Private::of_mut(&mut target).copy_between(&output);
        // What lies in the output already is what lies there in the input.
        self.run(plan, &source, &mut target)?;
        output.copy_between(&Private::of(&target));
        Ok(())
    }

    fn split(&mut self, color: Option<u32>, place: (usize, usize), _: Watch<'_>) -> Result<Option<Box<dyn Carrier>>> {
        let takes_in_place = self.takes_in_place;
        let group = self.group.split(color, place.0 as i64)?;
        Ok(group.map(|group| -> Box<dyn Carrier> { Box::new(Self { group, takes_in_place }) }))
    }
}

/// Runs `rule` on every rank of a group of `size` ranks that are threads.
fn on_ranks(size: usize, timeout: Duration, rule: impl Fn(&dyn Communicator) + Sync) {
    on_ranks_with(|_| false, size, timeout, rule);
}

/// Does so over a carrier that works where memory lies which `takes_in_place` allows.
fn on_ranks_with(
    takes_in_place: TakesInPlace,
    size: usize,
    timeout: Duration,
    rule: impl Fn(&dyn Communicator) + Sync,
) {
    let secret = Secret::random();
    let server = StoreServer::start("127.0.0.1:0", secret.clone()).unwrap();
    let address = server.address().to_string();
    let options = Options {
        timeout,
        ..Options::default()
    };
    let carriers = if size == 1 {
        vec![single()]
    } else {
        shm::threads(size, &options).unwrap()
    };
    std::thread::scope(|scope| {
        for (rank, carrier) in carriers.into_iter().enumerate() {
            let (address, secret, options, rule) = (&address, &secret, &options, &rule);
            scope.spawn(move || {
                let store = StoreClient::connect(address, secret, timeout).unwrap();
                let board = Board::new(store, "test".into(), "world".into(), (rank, size), timeout);
                let group = Group::new(board, options.clone(), takes_in_place, move |_| {
                    Ok(Box::new(OnHost {
                        group: carrier,
                        takes_in_place,
                    }))
                });
                let group = group.unwrap();
                rule(&*communicator(group));
            });
        }
    });
}

const LONG: Duration = Duration::from_secs(60);

#[test]
fn every_operation_brings_its_data_to_the_right_places_staged_and_in_place() {
    let takes: [TakesInPlace; 2] = [|_| false, |_| true];
    for (size, takes_in_place) in (1..=4).flat_map(|size| takes.map(|takes| (size, takes))) {
        on_ranks_with(takes_in_place, size, LONG, |group| {
            let rank = group.rank();
            let ranks = 0..size;
            let mut sum = [rank as f32, 1.0];
            group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert_eq!(sum, [(size * (size - 1) / 2) as f32, size as f32]);
            let mut largest = [rank as i64];
            group.reduce(&mut largest, ReduceOp::Max, size - 1).unwrap();
            assert_eq!(largest, [if rank == size - 1 { size - 1 } else { rank } as i64]);
            // Rank r has r + 1 elements.
            let counts: Vec<usize> = ranks.clone().map(|rank| rank + 1).collect();
            let all: Vec<u32> = ranks.clone().flat_map(|rank| vec![rank as u32; rank + 1]).collect();
            let mut gathered = vec![9; all.len()];
            group
                .all_gather_v(&vec![rank as u32; rank + 1], &mut gathered, &counts)
                .unwrap();
            assert_eq!(gathered, all);
            let mut in_place = vec![9; all.len()];
            let start: usize = counts[..rank].iter().sum();
            in_place[start..][..=rank].fill(rank as u32);
            group.all_gather_in_place(&mut in_place, Counts::Each(&counts)).unwrap();
            assert_eq!(in_place, all);
            let mut part = vec![0u32; rank + 1];
            group.reduce_scatter_v(&all, &mut part, &counts, ReduceOp::Sum).unwrap();
            assert_eq!(part, vec![(rank * size) as u32; rank + 1]);
            group
                .reduce_scatter_in_place(&mut in_place, Counts::Each(&counts), ReduceOp::Sum)
                .unwrap();
            let mut kept = all.clone();
            kept[start..][..=rank].fill((rank * size) as u32);
            assert_eq!(in_place, kept);
            let mut seen = vec![0; size];
            group
                .all_gather_each(&[rank as u8], 3, |rank, bytes| seen[rank] = bytes[0] + 1)
                .unwrap();
            assert_eq!(seen, Vec::from_iter(ranks.clone().map(|rank| rank as u8 + 1)));
            let mut told = [rank as u32];
            group.broadcast(&mut told, size - 1).unwrap();
            assert_eq!(told, [size as u32 - 1]);
            let mut output = (rank == 0).then(|| vec![9; all.len()]);
            let own = vec![rank as u32; rank + 1];
            group.gather_v(&own, output.as_deref_mut(), &counts, 0).unwrap();
            assert_eq!(output, (rank == 0).then(|| all.clone()));
            let mut part = vec![9; rank + 1];
            let input = (rank == 0).then_some(&all[..]);
            group.scatter_v(input, &mut part, &counts, 0).unwrap();
            assert_eq!(part, own);
            let input: Vec<u32> = ranks.clone().map(|to| (rank * 10 + to) as u32).collect();
            let mut output = vec![9; size];
            group.all_to_all(&input, &mut output).unwrap();
            assert_eq!(
                output,
                Vec::from_iter(ranks.clone().map(|from| (from * 10 + rank) as u32))
            );
            let ones = vec![1; size];
            group.all_to_all_v(&input, &mut output, &ones, &ones).unwrap();
            assert_eq!(output, Vec::from_iter(ranks.map(|from| (from * 10 + rank) as u32)));
            group.barrier().unwrap();
        });
    }
}

#[test]
fn messages_arrive_in_order_beside_collectives() {
    on_ranks(3, LONG, |group| {
        for round in 0..3u32 {
            match group.rank() {
                0 => (0..2).for_each(|n| group.send(&[round, n], 2).unwrap()),
                2 => (0..2).for_each(|n| {
                    let mut came = [9; 2];
                    group.recv(&mut came, 0).unwrap();
                    assert_eq!(came, [round, n]);
                }),
                _ => {}
            }
            group.barrier().unwrap();
        }
    });
}

#[test]
fn sub_groups_are_ordered_by_key_and_can_be_alone() {
    on_ranks(3, LONG, |group| {
        let rank = group.rank();
        let part = group.split(Some((rank % 2) as u32), -(rank as i64)).unwrap().unwrap();
        let expected = if rank == 1 { (0, 1) } else { (1 - rank / 2, 2) };
        assert_eq!((part.rank(), part.size()), expected);
        let mut sum = [rank as u32];
        part.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert_eq!(sum, [if rank == 1 { 1 } else { 2 }]);
        assert!(group.split((rank != 0).then_some(0), 0).unwrap().is_some() == (rank != 0));
    });
}

/// Runs two ranks that call differently; both must fail with both names.
fn differ(
    first: impl Fn(&dyn Communicator) -> Result<()> + Sync,
    second: impl Fn(&dyn Communicator) -> Result<()> + Sync,
    names: [&str; 2],
) {
    on_ranks(2, LONG, |group| {
        let result = if group.rank() == 0 { first(group) } else { second(group) };
        let message = result.unwrap_err().to_string();
        assert!(names.iter().all(|name| message.contains(name)), "{message}");
        assert!(matches!(group.barrier(), Err(Error::Aborted { .. })));
    });
}

#[test]
fn ranks_that_call_differently_all_learn_both_calls() {
    differ(
        |group| group.all_reduce(&mut [0f32; 4], ReduceOp::Sum),
        |group| group.barrier(),
        ["rank 0: all_reduce(sum) of 4 f32", "rank 1: barrier"],
    );
    differ(
        |group| group.recv(&mut [0u8; 1], 1),
        |group| group.barrier(),
        ["rank 0: receive of 1 u8", "rank 1: barrier"],
    );
    differ(
        |group| group.send(&[1f32; 4], 1),
        |group| group.recv(&mut [0u32; 4], 0),
        ["rank 0: send of 4 f32", "rank 1: receive of 4 u32"],
    );
    differ(
        |group| group.all_to_all_v(&[0u8; 3], &mut [0; 4], &[1, 2], &[1, 3]),
        |group| group.all_to_all_v(&[0u8; 3], &mut [0; 3], &[2, 1], &[2, 1]),
        ["rank 1: sends 2 bytes to 0", "rank 0: expects 3 from 1"],
    );
}

#[test]
fn late_left_and_failed_ranks_are_named() {
    let others_have_failed = std::sync::Barrier::new(3);
    on_ranks(3, Duration::from_millis(300), |group| {
        if group.rank() < 2 {
            match group.barrier().unwrap_err() {
                Error::Timeout { missing, .. } => assert_eq!(missing, [2]),
                Error::Aborted { reason, .. } => assert!(reason.contains("[2]"), "{reason}"),
                other => panic!("{other}"),
            }
        }
        others_have_failed.wait();
        assert!(matches!(group.barrier(), Err(Error::Aborted { .. })));
    });
    on_ranks(2, LONG, |group| {
        if group.rank() == 0 {
            let message = group.all_reduce(&mut [0f32], ReduceOp::Sum).unwrap_err().to_string();
            assert!(message.contains("rank 1 left the group"), "{message}");
        }
    });
    on_ranks(3, LONG, |group| {
        if group.rank() == 0 {
            group.abort("the disk is full");
        } else {
            let message = group.barrier().unwrap_err().to_string();
            assert!(message.contains("aborted by rank 0: the disk is full"), "{message}");
        }
    });
}

#[test]
fn a_build_for_gpus_says_what_this_machine_lacks() {
    if std::path::Path::new("/dev/nvidiactl").exists() {
        println!("skipped: this machine has a driver");
        return;
    }
    let message = crate::cuda::device_count().unwrap_err().to_string();
    assert!(
        message.starts_with("libcuda.so.1 (the NVIDIA driver) is not present: "),
        "{message}"
    );
}
