//! Where a loader stands: skipping, saving and going on within an epoch.

use super::loading::{NumberStream, epoch, numbers};
use super::{accelerator, build, on_ranks};
use sconce_collectives::single;
use sconce_core::data::{LoaderState, Source};
use sconce_core::{Accelerator, AcceleratorBuilder, DataLoader};

/// Runs `check` with every kind of loader, of 22 samples in batches of 2, on worlds of 1 to 3.
fn with_all_kinds(check: impl Check) {
    for world in 1..=3 {
        on_ranks(world, |communicator| {
            let acc = accelerator(communicator);
            let map = || DataLoader::new(numbers(22), 2);
            let stream = || DataLoader::stream_with(NumberStream(22), 2, |samples, _| Ok(samples));
            check.check(&*acc, map);
            check.check(&*acc, || map().shuffle(true));
            check.check(&*acc, || map().shuffle(true).prefetch(0));
            check.check(&*acc, || map().shuffle(true).dispatch_batches(true));
            check.check(&*acc, || {
                map().batch_sampler(Vec::from_iter((0..11).map(|at| vec![at, 2 * at])))
            });
            check.check(&*acc, stream);
            check.check(&*acc, || stream().dispatch_batches(true));
        });
    }
}

/// What is checked; generic over the loader, as a closure cannot be.
trait Check: Sync {
    fn check<D: Source<Batch = Vec<usize>>>(&self, acc: &dyn Accelerator, loader: impl Fn() -> DataLoader<D>);
}

struct Resuming;

impl Check for Resuming {
    fn check<D: Source<Batch = Vec<usize>>>(&self, acc: &dyn Accelerator, make: impl Fn() -> DataLoader<D>) {
        let loader = acc.prepare_loader(make()).unwrap();
        let mut states = Vec::new();
        let mut batches = Vec::new();
        for _ in 0..2 {
            states.push(loader.state());
            for batch in &loader {
                batches.push(batch.unwrap());
                states.push(loader.state());
            }
            // Once more, before the next epoch begins: the place is the same, said otherwise.
            batches.push(Vec::new());
        }
        assert_eq!(loader.state().epoch, 2);
        for (at, state) in states.into_iter().enumerate() {
            let saved = serde_json::to_string(&state).unwrap();
            let state: LoaderState = serde_json::from_str(&saved).unwrap();
            let mut resumed = acc.prepare_loader(make()).unwrap();
            resumed.restore(state).unwrap();
            assert_eq!(resumed.state(), state);
            let mut found = Vec::new();
            while resumed.epoch() < 2 {
                found.extend(epoch(&mut resumed));
                found.push(Vec::new());
            }
            assert_eq!(found, batches[at..], "state {saved}");
        }
    }
}

#[test]
fn a_loader_goes_on_exactly_where_its_state_was_taken_and_with_the_epochs_after_it() {
    with_all_kinds(Resuming);
}

struct Skipping;

impl Check for Skipping {
    fn check<D: Source<Batch = Vec<usize>>>(&self, acc: &dyn Accelerator, make: impl Fn() -> DataLoader<D>) {
        let mut loader = acc.prepare_loader(make()).unwrap();
        let epochs = [epoch(&mut loader), epoch(&mut loader)];
        for skipped in 0..epochs[0].len() + 2 {
            loader.set_epoch(0);
            loader.skip_first_batches(skipped);
            assert_eq!(
                epoch(&mut loader),
                epochs[0][skipped.min(epochs[0].len())..],
                "{skipped}"
            );
            assert_eq!(epoch(&mut loader), epochs[1]);
        }
    }
}

#[test]
fn batches_are_skipped_in_the_next_epoch_and_not_in_later_ones() {
    with_all_kinds(Skipping);
}

#[test]
fn a_loop_that_was_left_early_is_resumed_where_it_was_left_while_the_next_loop_is_the_next_epoch() {
    let acc = accelerator(single());
    let mut loader = acc
        .prepare_loader(DataLoader::new(numbers(8), 2).shuffle(true))
        .unwrap();
    let epochs = [epoch(&mut loader), epoch(&mut loader)];
    loader.set_epoch(0);
    let taken: Vec<_> = (&loader).into_iter().take(3).map(Result::unwrap).collect();
    assert_eq!(taken, epochs[0][..3]);
    let state = loader.state();
    assert_eq!((state.epoch, state.batches), (0, 3));
    assert_eq!((loader.epoch(), epoch(&mut loader)), (1, epochs[1].clone()));
    loader.restore(state).unwrap();
    assert_eq!(epoch(&mut loader), epochs[0][3..]);
    assert_eq!(epoch(&mut loader), epochs[1]);
}

#[test]
fn a_state_brings_its_seed_and_is_refused_where_the_samples_seen_are_no_whole_number_of_steps() {
    let acc = |seed| build(AcceleratorBuilder::default().communicator(single()).seed(seed));
    let loader = |acc: &dyn Accelerator, size| {
        let loader = DataLoader::new(numbers(20), size).shuffle(true);
        acc.prepare_loader(loader).unwrap()
    };
    let first = loader(&*acc(1), 5);
    let mut batches = (&first).into_iter().map(Result::unwrap);
    batches.next().unwrap();
    let mut other = loader(&*acc(2), 5);
    let state = first.state();
    other.restore(state).unwrap();
    assert_eq!(epoch(&mut other), batches.collect::<Vec<_>>());
    let text = loader(&*acc(1), 4).restore(state).unwrap_err().to_string();
    assert!(
        text.contains("after 1 steps of 5 samples") && text.contains("steps of 4"),
        "{text}"
    );
    // Two steps of ten samples are four of five: the same samples have been seen.
    let second = loader(&*acc(1), 10);
    let rest = Vec::from_iter((&second).into_iter().map(Result::unwrap).take(1));
    let mut smaller = loader(&*acc(7), 5);
    smaller.restore(second.state()).unwrap();
    let mut whole = loader(&*acc(1), 5);
    assert_eq!(epoch(&mut whole)[..2].concat(), rest.concat());
    whole.set_epoch(0);
    assert_eq!(epoch(&mut smaller), epoch(&mut whole)[2..]);
}

#[test]
fn a_state_within_an_epoch_of_ready_made_batches_goes_on_with_every_sample_not_yet_seen_once_on_any_number_of_ranks() {
    // Twelve batches of one to three samples.
    let mut next = 0;
    let batches = Vec::from_iter((0..12).map(|at| {
        next += at % 3 + 1;
        Vec::from_iter(next - at % 3 - 1..next)
    }));
    let loader = |acc: &dyn Accelerator| {
        let loader = DataLoader::new(numbers(next), 0).batch_sampler(batches.clone());
        acc.prepare_loader(loader).unwrap()
    };
    let on_two = on_ranks(2, |communicator| {
        let loader = loader(&*accelerator(communicator));
        let mut batches = (&loader).into_iter().map(Result::unwrap);
        let mut seen = Vec::new();
        let mut states = Vec::new();
        for _ in 0..3 {
            seen.extend(batches.next().unwrap());
            states.push(loader.state());
        }
        (seen, states)
    });
    let (seen, states): (Vec<_>, Vec<_>) = on_two.into_iter().unzip();
    assert_eq!(states[0], states[1]);
    for world in 1..=3 {
        let rest = on_ranks(world, |communicator| {
            let acc = accelerator(communicator);
            let mut loader = loader(&*acc);
            if world == 3 {
                let text = loader.restore(states[0][0]).unwrap_err().to_string();
                assert!(
                    text.contains("after 1 steps of 2") && text.contains("steps of 3"),
                    "{text}"
                );
            }
            loader.restore(states[0][2]).unwrap();
            epoch(&mut loader).concat()
        });
        let mut all = [seen.concat(), rest.concat()].concat();
        all.sort_unstable();
        assert_eq!(all, Vec::from_iter(0..next), "{world} ranks");
    }
}

#[test]
fn the_number_of_batches_left_is_known() {
    let acc = accelerator(single());
    let mut loader = acc.prepare_loader(DataLoader::new(numbers(9), 2)).unwrap();
    loader.skip_first_batches(1);
    let mut batches = (&loader).into_iter();
    for left in (0..4).rev() {
        batches.next().unwrap().unwrap();
        assert_eq!(batches.len(), left);
    }
    assert!(batches.next().is_none());
}
