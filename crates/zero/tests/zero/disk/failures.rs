//! Every way in which disks fail is one error that names the file, and the end of nothing else.

use super::mount::Mount;
use super::{files, folder, options};
use sconce_zero::{DiskState, DiskValues, Error, Result};
use std::fs::OpenOptions;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// Shortens a file as another program might.
fn truncate(path: &Path, bytes: u64) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(bytes).unwrap();
}

fn nothing(_: usize, _: &mut [&mut [f32]]) -> Result<()> {
    Ok(())
}

fn create(folder: &Path) -> Result<DiskState> {
    DiskState::create(&options(folder, 2000), 0, &[2000; 8], &[0.5, 0.5])
}

#[test]
fn a_folder_that_is_missing_or_a_file_is_an_error_that_names_it() {
    let folder = folder();
    let file = folder.path().join("file");
    std::fs::write(&file, "x").unwrap();
    for path in [folder.path().join("missing"), file] {
        let error = create(&path).unwrap_err();
        assert!(matches!(error, Error::DiskFolder { .. }), "{error:?}");
        let text = error.to_string();
        assert!(
            text.contains(path.to_str().unwrap()) && text.contains("existing folder"),
            "{text}"
        );
        assert!(DiskValues::create(&options(&path, 1), 0, 10).is_err());
    }
}

#[test]
fn a_folder_that_may_not_be_written_is_an_error_that_names_it() {
    // Root may write everywhere but here.
    let Some(mount) = Mount::new("tmpfs", "ro,size=1m") else {
        return;
    };
    let text = create(mount.path()).unwrap_err().to_string();
    assert!(text.contains(mount.path().to_str().unwrap()), "{text}");
    assert!(text.contains("may write to"), "{text}");
}

#[test]
fn a_disk_that_is_too_small_is_an_error_at_creation_and_nothing_is_left_on_it() {
    for (kind, mount_options) in [("tmpfs", "size=1m"), ("tmpfs", "size=512k")] {
        let Some(mount) = Mount::new(kind, mount_options) else {
            return;
        };
        let error = DiskState::create(&options(mount.path(), 1 << 18), 0, &[1 << 18; 2], &[0.0]).unwrap_err();
        assert!(matches!(error, Error::DiskSpace { bytes: 2_101_248, .. }), "{error:?}");
        let text = error.to_string();
        assert!(
            text.contains("No space left") && text.contains("2101248 bytes"),
            "{text}"
        );
        assert!(text.contains(mount.path().to_str().unwrap()), "{text}");
        assert!(matches!(
            DiskValues::create(&options(mount.path(), 0), 0, 2 << 20),
            Err(Error::DiskSpace { .. })
        ));
        assert!(files(mount.path()).is_empty());
        // What fits is still welcome.
        let mut small = DiskState::create(&options(mount.path(), 1000), 0, &[1000], &[0.0]).unwrap();
        small.for_each_group(nothing).unwrap();
    }
}

#[test]
fn a_group_larger_than_allowed_is_an_error_before_anything_is_made() {
    let folder = folder();
    let error = DiskState::create(&options(folder.path(), 99), 0, &[99, 100], &[0.0]).unwrap_err();
    assert!(error.to_string().starts_with("sub_group_elements is 99"), "{error}");
    assert!(files(folder.path()).is_empty());
}

#[test]
fn a_file_truncated_between_passes_is_an_error_that_names_it_and_all_later_calls_fail() {
    // And the one at the end.
    let blocks = 2 * 2 * 8 + 1;
    // The last but one is what a late write to the last group leaves of a file that was truncated before it.
    for left in [0, 1, 4096, 5000, (blocks - 1) * 4096, blocks * 4096 - 1] {
        let folder = folder();
        let mut state = create(folder.path()).unwrap();
        state.for_each_group(nothing).unwrap();
        let file = files(folder.path()).remove(0);
        truncate(&file, left);
        let error = state.for_each_group(nothing).unwrap_err();
        let Error::DiskTruncated {
            path, found, expected, ..
        } = &error
        else {
            panic!("{error:?}")
        };
        assert_eq!((path, *found, *expected), (&file, left, blocks * 4096));
        let text = error.to_string();
        assert!(
            text.contains(file.to_str().unwrap()) && text.contains("last checkpoint"),
            "{text}"
        );
        let lost = [
            state.for_each_group(nothing).unwrap_err(),
            state.read_group(0).map(drop).unwrap_err(),
            state.write_group(0, &[&[0.0; 2000][..]; 2]).unwrap_err(),
        ];
        for error in lost {
            assert!(
                matches!(&error, Error::DiskStateLost { path } if *path == file),
                "{error:?}"
            );
        }
        drop(state);
        assert!(files(folder.path()).is_empty());
    }
}

#[test]
fn a_file_truncated_in_the_middle_of_a_pass_is_an_error_wherever_that_is() {
    // In the work for the last group everything has been read, and only a write is to come.
    for group in 0..8 {
        let folder = folder();
        let mut state = create(folder.path()).unwrap();
        let file = files(folder.path()).remove(0);
        let work = |number: usize, _: &mut [&mut [f32]]| {
            if number == group {
                truncate(&file, 100);
            }
            Ok(())
        };
        let error = state.for_each_group(work).unwrap_err();
        // A write that was under way may have made it longer again, by zeros.
        assert!(matches!(error, Error::DiskTruncated { .. }), "{error:?}");
        let error = state.for_each_group(nothing).unwrap_err();
        assert!(matches!(error, Error::DiskStateLost { .. }), "{error:?}");
        assert_eq!(state.bytes_in_memory(), 0);
    }
}

#[test]
fn truncated_values_are_an_error_that_names_the_file() {
    let folder = folder();
    let values = DiskValues::create(&options(folder.path(), 0), 0, 100_000).unwrap();
    let file = files(folder.path()).remove(0);
    truncate(&file, 50_000);
    let errors = [values.read(10, &mut [0; 9]), values.write(0, &[1; 4096])];
    for error in errors.map(Result::unwrap_err) {
        assert!(
            matches!(&error, Error::DiskTruncated { path, .. } if *path == file),
            "{error:?}"
        );
    }
    assert_eq!(file.metadata().unwrap().len(), 50_000);
}

#[test]
fn an_error_or_panic_of_the_work_ends_the_pass_and_the_state() {
    for group in [0, 3, 7] {
        for panics in [false, true] {
            let folder = folder();
            let mut state = create(folder.path()).unwrap();
            let mut last = 0;
            let work = |number: usize, _: &mut [&mut [f32]]| {
                last = number;
                match number == group {
                    true if panics => std::panic::resume_unwind(Box::new("on purpose")),
                    true => Err(Error::LossShape { shape: vec![group] }),
                    false => Ok(()),
                }
            };
            let outcome = catch_unwind(AssertUnwindSafe(|| state.for_each_group(work)));
            assert_eq!(outcome.is_err(), panics);
            if let Ok(outcome) = outcome {
                let error = outcome.unwrap_err();
                assert!(
                    matches!(&error, Error::LossShape { shape } if *shape == [group]),
                    "{error:?}"
                );
            }
            assert_eq!(last, group, "nothing follows the first error");
            let error = state.for_each_group(nothing).unwrap_err();
            assert!(matches!(error, Error::DiskStateLost { .. }), "{error:?}");
            drop(state);
            assert!(files(folder.path()).is_empty());
        }
    }
}
