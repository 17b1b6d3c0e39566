//! Values on disk: what is read at a place is what was written there last.

use super::{files, folder, options};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sconce_zero::DiskValues;

/// Several windows of 4 MiB, and no whole number of blocks.
const BYTES: usize = (9 << 20) + 1234;

#[test]
fn ranges_at_any_place_read_as_in_memory() {
    let folder = folder();
    let on_disk = DiskValues::create(&options(folder.path(), 0), 0, BYTES as u64).unwrap();
    let mut in_memory = vec![0u8; BYTES];
    let mut random = ChaCha8Rng::seed_from_u64(5);
    let mut found = vec![0; BYTES];
    on_disk.read(0, &mut found).unwrap();
    assert!(found == in_memory, "zero at first");
    for round in 0..300 {
        let longest = [1, 2, 100, 4096, 4097, 20_000, 5 << 20][round % 7];
        // Every third place is at a block, where off-by-one errors live.
        let mut start = random.random_range(0..BYTES - longest);
        if round % 3 == 0 {
            start -= start % 4096;
        }
        let length = random.random_range(0..=longest);
        let values: Vec<u8> = (0..length).map(|i| (i * 31 + round) as u8).collect();
        on_disk.write(start as u64, &values).unwrap();
        in_memory[start..start + length].copy_from_slice(&values);
        let from = start.saturating_sub(5000);
        let found = &mut found[..(length + 9000).min(BYTES - from)];
        on_disk.read(from as u64, found).unwrap();
        assert!(*found == in_memory[from..from + found.len()], "round {round}");
    }
    on_disk.write(BYTES as u64 - 1, &[77]).unwrap();
    in_memory[BYTES - 1] = 77;
    on_disk.write(BYTES as u64, &[]).unwrap();
    on_disk.read(0, &mut found).unwrap();
    assert!(found == in_memory);
    assert!(on_disk.bytes_in_memory() < 5 << 20);
}

#[test]
fn threads_share_values_without_loss() {
    let folder = folder();
    let values = DiskValues::create(&options(folder.path(), 0), 0, 400).unwrap();
    // All in one block: each write has to keep what the others wrote.
    std::thread::scope(|scope| {
        for thread in 0..4u8 {
            let values = &values;
            scope.spawn(move || {
                for place in 0..100 {
                    values.write(place * 4 + u64::from(thread), &[thread + 1]).unwrap();
                }
            });
        }
    });
    let mut found = [0; 400];
    values.read(0, &mut found).unwrap();
    assert_eq!(found.to_vec(), [1, 2, 3, 4].repeat(100));
}

#[test]
fn no_values_are_values_too_and_files_are_gone_after_drop() {
    let folder = folder();
    let values = DiskValues::create(&options(folder.path(), 0), 3, 0).unwrap();
    values.write(0, &[]).unwrap();
    values.read(0, &mut []).unwrap();
    assert_eq!(files(folder.path()).len(), 1);
    drop(values);
    assert!(files(folder.path()).is_empty());
}

#[test]
#[should_panic(expected = "values end at 11, there are 10 bytes")]
fn values_end_where_they_were_made_to_end() {
    let folder = folder();
    let values = DiskValues::create(&options(folder.path(), 0), 0, 10).unwrap();
    let _ = values.read(3, &mut [0; 8]);
}
