//! Batches and metrics side by side, for the cases of Accelerate's own tests and what it was seen to do beside them.

use super::loading::{NumberStream, numbers};
use super::{accelerator, on_ranks};
use sconce_core::data::Source;
use sconce_core::{Accelerator, DataLoader};

/// How a loader is set.
#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Default,
    DropLast,
    Uneven,
    Dispatch,
    DispatchDropLast,
    Split,
    DispatchSplit,
    StreamDispatch,
    Stream,
}

/// What a rank sees: its batches, and what it gathers for metrics in the last step (nothing where some rank has none).
type Seen = (Vec<Vec<usize>>, Option<Vec<usize>>);

fn run<D: Source<Batch = Vec<usize>>>(acc: &dyn Accelerator, loader: DataLoader<D>) -> Seen {
    let mut loader = acc.prepare_loader(loader).unwrap();
    let mut gathered = None;
    let batches = (&mut loader).into_iter().map(|batch| {
        let batch = batch.unwrap();
        gathered = acc.gather_objects_for_metrics(&batch).ok();
        batch
    });
    (batches.collect(), gathered)
}

fn of_mode(acc: &dyn Accelerator, samples: usize, mode: Mode) -> Seen {
    let map = |size| DataLoader::new(numbers(samples), size);
    let stream = || DataLoader::stream_with(NumberStream(samples), 3, |samples, _| Ok(samples));
    match mode {
        Mode::Default => run(acc, map(3)),
        Mode::DropLast => run(acc, map(3).drop_last(true)),
        Mode::Uneven => run(acc, map(3).even_batches(false)),
        Mode::Dispatch => run(acc, map(3).dispatch_batches(true)),
        Mode::DispatchDropLast => run(acc, map(3).dispatch_batches(true).drop_last(true)),
        Mode::Split => run(acc, map(4).split_batches(true)),
        Mode::DispatchSplit => run(acc, map(4).dispatch_batches(true).split_batches(true)),
        Mode::StreamDispatch => run(acc, stream().dispatch_batches(true)),
        Mode::Stream => run(acc, stream()),
    }
}

fn lists(text: &str) -> Vec<Vec<usize>> {
    serde_json::from_str(&format!("[{text}]")).unwrap()
}

#[test]
fn two_ranks_see_accelerates_batches_and_gather_every_sample_once() {
    // 8 and more samples in batches of 3 begin with [0,1,2] and [3,4,5].
    let table: [(usize, Mode, &str, &str, &str); 21] = [
        (5, Mode::Default, "[0,1,2]", "[3,4,0]", "[0,1,2,3,4]"),
        (8, Mode::Default, "[0,1,2],[6,7,0]", "[3,4,5],[1,2,3]", "[6,7]"),
        (10, Mode::Default, "[0,1,2],[6,7,8]", "[3,4,5],[9,0,1]", "[6,7,8,9]"),
        (11, Mode::Default, "[0,1,2],[6,7,8]", "[3,4,5],[9,10,0]", "[6,7,8,9,10]"),
        (8, Mode::DropLast, "[0,1,2]", "[3,4,5]", "[0,1,2,3,4,5]"),
        (8, Mode::Uneven, "[0,1,2],[6,7]", "[3,4,5]", ""),
        (5, Mode::Dispatch, "[0,1,2]", "[3,4,0]", "[0,1,2,3,4]"),
        (8, Mode::Dispatch, "[0,1,2],[6]", "[3,4,5],[7]", "[6,7]"),
        (10, Mode::Dispatch, "[0,1,2],[6,7]", "[3,4,5],[8,9]", "[6,7,8,9]"),
        (
            11,
            Mode::Dispatch,
            "[0,1,2],[6,7,8]",
            "[3,4,5],[9,10,0]",
            "[6,7,8,9,10]",
        ),
        (8, Mode::DispatchDropLast, "[0,1,2]", "[3,4,5]", "[0,1,2,3,4,5]"),
        (5, Mode::Split, "[0,1],[4,0]", "[2,3],[1,2]", "[4]"),
        (10, Mode::Split, "[0,1],[4,5],[8,9]", "[2,3],[6,7],[0,1]", "[8,9]"),
        (8, Mode::Split, "[0,1],[4,5]", "[2,3],[6,7]", "[4,5,6,7]"),
        (5, Mode::DispatchSplit, "[0,1],[4]", "[2,3],[0]", "[4]"),
        (10, Mode::DispatchSplit, "[0,1],[4,5],[8]", "[2,3],[6,7],[9]", "[8,9]"),
        (5, Mode::StreamDispatch, "[0,1,2]", "[3,4,0]", "[0,1,2,3,4]"),
        (8, Mode::StreamDispatch, "[0,1,2],[6]", "[3,4,5],[7]", "[6,7]"),
        // Differs: they do not know a stream's length, and gather [0,1,2,3,4,0] and [6,7,0,1,2,3].
        (5, Mode::Stream, "[0,1,2]", "[3,4,0]", "[0,1,2,3,4]"),
        (8, Mode::Stream, "[0,1,2],[6,7,0]", "[3,4,5],[1,2,3]", "[6,7]"),
        (6, Mode::Stream, "[0,1,2]", "[3,4,5]", "[0,1,2,3,4,5]"),
    ];
    on_ranks(2, |communicator| {
        let rank = communicator.rank();
        let acc = accelerator(communicator);
        for (row, (samples, mode, first, second, metrics)) in table.into_iter().enumerate() {
            let (batches, gathered) = of_mode(&*acc, samples, mode);
            assert_eq!(batches, lists([first, second][rank]), "row {row}, rank {rank}");
            // Without even batches only rank 0 is in the last step.
            if mode != Mode::Uneven || rank == 0 {
                assert_eq!(gathered, lists(metrics).pop(), "row {row}, rank {rank}");
            }
        }
    });
}

#[test]
fn three_and_four_ranks_fill_up_as_accelerate_does() {
    type Case = (usize, usize, bool, &'static [&'static str]);
    let table: [Case; 11] = [
        (7, 2, true, &["[0,1],[6,0]", "[2,3],[1,2]", "[4,5],[3,4]"]),
        (10, 3, true, &["[0,1,2],[9,0,1]", "[3,4,5],[2,3,4]", "[6,7,8],[5,6,7]"]),
        (
            13,
            2,
            true,
            &["[0,1],[6,7],[12,0]", "[2,3],[8,9],[1,2]", "[4,5],[10,11],[3,4]"],
        ),
        (5, 4, true, &["[0,1,2,3]", "[4,0,1,2]", "[3,4,0,1]"]),
        (5, 2, true, &["[0,1]", "[2,3]", "[4,0]", "[1,2]"]),
        (
            10,
            2,
            true,
            &["[0,1],[8,9]", "[2,3],[0,1]", "[4,5],[2,3]", "[6,7],[4,5]"],
        ),
        (5, 3, true, &["[0,1,2]", "[3,4,0]", "[1,2,3]", "[4,0,1]"]),
        (
            13,
            3,
            true,
            &[
                "[0,1,2],[12,0,1]",
                "[3,4,5],[2,3,4]",
                "[6,7,8],[5,6,7]",
                "[9,10,11],[8,9,10]",
            ],
        ),
        (10, 3, false, &["[0,1,2],[9]", "[3,4,5]", "[6,7,8]"]),
        (5, 3, false, &["[0,1,2]", "[3,4]", "", ""]),
        (5, 4, false, &["[0,1,2,3]", "[4]", ""]),
    ];
    for (samples, size, even, ranks) in table {
        let found = on_ranks(ranks.len(), |communicator| {
            let loader = DataLoader::new(numbers(samples), size).even_batches(even);
            let mut loader = accelerator(communicator).prepare_loader(loader).unwrap();
            (&mut loader).into_iter().map(Result::unwrap).collect::<Vec<_>>()
        });
        let expected: Vec<_> = ranks.iter().map(|batches| lists(batches)).collect();
        assert_eq!(found, expected, "{samples} samples in batches of {size}");
    }
}
