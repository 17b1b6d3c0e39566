//! The self-test finds nothing wrong with worlds of threads, and tells what a check finds wrong.

use super::{accelerator, on_ranks};
use sconce_core::self_test::{Check, SelfTest, checks};

#[test]
fn all_checks_pass_on_any_number_of_ranks() {
    for world in 1..=4 {
        let ranks = on_ranks(world, |communicator| {
            let acc = accelerator(communicator);
            let mut failures = Vec::new();
            let all = SelfTest::new(&*acc).run(checks(), |outcome| {
                failures.extend(
                    outcome
                        .failure
                        .as_ref()
                        .map(|failure| format!("{}: {failure}", outcome.name)),
                );
            });
            (all.unwrap(), failures)
        });
        assert_eq!(ranks, vec![(true, Vec::new()); world], "world {world}");
    }
}

#[test]
fn what_fails_on_one_rank_fails_on_all_and_the_next_check_runs() {
    fn fails_on_rank_1(test: &SelfTest<'_>) -> Result<String, Box<dyn std::error::Error + Send + Sync>> {
        match test.accelerator().world().rank {
            1 => Err("found 2, expected 3".into()),
            _ => Ok("fine here".into()),
        }
    }
    let mut list = vec![Check::new("spoilt", "3 is 3", fails_on_rank_1)];
    list.extend_from_slice(&checks()[..2]);
    let ranks = on_ranks(3, |communicator| {
        let acc = accelerator(communicator);
        let mut told = Vec::new();
        let all = SelfTest::new(&*acc).run(&list, |outcome| {
            told.push((outcome.name.clone(), outcome.failure.clone()));
        });
        (all.unwrap(), told)
    });
    for (all, told) in ranks {
        assert!(!all);
        assert_eq!(told[0], ("spoilt".into(), Some("rank 1: found 2, expected 3".into())));
        assert_eq!(
            told[1..].iter().map(|(_, failure)| failure).collect::<Vec<_>>(),
            [&None, &None]
        );
    }
}
