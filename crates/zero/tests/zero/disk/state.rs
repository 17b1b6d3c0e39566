//! Optimizer state on disk is the same as in memory.

use super::mount::Mount;
use super::{BLOCK_BYTES, files, folder, numbers, options};
use crate::{bits, gradient};
use sconce_zero::{Adam, DiskState, OptimizerRule, StateSlices, Update};
use std::collections::BTreeSet;

const GROUPS: &[&[usize]] = &[
    &[],
    &[0],
    &[1],
    &[1023, 1024, 1025],
    &[5000],
    &[0, 7, 0, 4097, 1, 2048, 0, 3, 999, 0],
    &[100; 40],
];

/// What `arrays` of `group` are after `pass`.
fn expected(group: usize, elements: usize, array: usize, pass: usize) -> Vec<f32> {
    numbers(elements, 100 * group + 10 * array + pass)
}

#[test]
fn every_value_outlasts_a_pass_whatever_the_sizes_and_numbers_of_groups_and_arrays() {
    for groups in GROUPS {
        for initial in [&[][..], &[0.25], &[0.0, -1.0], &[1.0, 2.0, 3.0]] {
            let folder = folder();
            let mut state = DiskState::create(&options(folder.path(), 5000), 0, groups, initial).unwrap();
            for pass in 0..4 {
                let mut seen = Vec::new();
                let work = |group: usize, arrays: &mut [&mut [f32]]| {
                    assert_eq!(arrays.len(), initial.len());
                    for (array, values) in arrays.iter_mut().enumerate() {
                        let before = match pass {
                            0 => vec![initial[array]; groups[group]],
                            _ => expected(group, groups[group], array, pass - 1),
                        };
                        assert_eq!(bits(values), bits(&before), "{groups:?}, pass {pass}, group {group}");
                        values.copy_from_slice(&expected(group, groups[group], array, pass));
                    }
                    seen.push(group);
                    Ok(())
                };
                state.for_each_group(work).unwrap();
                assert_eq!(seen, (0..groups.len()).collect::<Vec<_>>());
            }
        }
    }
}

#[test]
fn a_rule_over_state_on_disk_does_what_it_does_over_state_in_memory() {
    let groups = [1500, 1, 0, 1024, 33, 1500, 777];
    let rule = Adam {
        amsgrad: true,
        ..Adam::default()
    };
    let folder = folder();
    let mut on_disk = DiskState::create(&options(folder.path(), 1500), 0, &groups, &rule.initial_state()).unwrap();
    let mut in_memory: Vec<[Vec<f32>; 3]> = groups
        .iter()
        .map(|size| rule.initial_state().map(|v| vec![v; *size]))
        .collect();
    let mut parameters: Vec<[Vec<f32>; 2]> = groups.iter().map(|size| [(); 2].map(|()| numbers(*size, 1))).collect();
    for step in 1..=30 {
        let update = Update {
            learning_rate: 0.01,
            step,
            gradient_scale: 0.5,
        };
        let work = |group: usize, arrays: &mut [&mut [f32]]| {
            let [a, b, c] = arrays else { panic!("three arrays") };
            let gradient = gradient(groups[group], step as usize);
            rule.update(&update, &mut parameters[group][0], &gradient, StateSlices([a, b, c]));
            let slices = StateSlices(in_memory[group].each_mut().map(Vec::as_mut_slice));
            rule.update(&update, &mut parameters[group][1], &gradient, slices);
            Ok(())
        };
        on_disk.for_each_group(work).unwrap();
    }
    for (group, arrays) in in_memory.iter().enumerate() {
        assert_eq!(
            bits(&parameters[group][0]),
            bits(&parameters[group][1]),
            "group {group}"
        );
        let found = on_disk.read_group(group).unwrap();
        for (found, expected) in found.iter().zip(arrays) {
            assert_eq!(bits(found), bits(expected), "group {group}");
        }
    }
}

#[test]
fn groups_are_read_and_written_one_by_one_for_checkpoints() {
    let groups = [1025, 0, 3];
    let folder = folder();
    let mut state = DiskState::create(&options(folder.path(), 1025), 0, &groups, &[0.0, 0.0]).unwrap();
    for group in [2, 0, 1] {
        let arrays = [0, 1].map(|array| expected(group, groups[group], array, 0));
        state.write_group(group, &[&arrays[0], &arrays[1]]).unwrap();
    }
    for (group, elements) in groups.into_iter().enumerate() {
        let arrays = [0, 1].map(|array| expected(group, elements, array, 0));
        assert_eq!(state.read_group(group).unwrap(), arrays);
    }
}

#[test]
fn three_buffers_of_the_largest_group_serve_any_number_of_groups() {
    let folder = folder();
    let mut groups = vec![3000; 25];
    groups.push(10_000);
    let mut state = DiskState::create(&options(folder.path(), 10_000), 0, &groups, &[0.0, 0.0]).unwrap();
    let mut places = BTreeSet::new();
    for _ in 0..5 {
        let work = |_: usize, arrays: &mut [&mut [f32]]| {
            places.insert(arrays[0].as_ptr() as usize);
            Ok(())
        };
        state.for_each_group(work).unwrap();
    }
    assert!(places.len() <= 3, "{} buffers", places.len());
    // An array ends with a block, and a buffer begins with one.
    let most = 3 * (2 * (4 * 10_000 + BLOCK_BYTES) + BLOCK_BYTES);
    let found = state.bytes_in_memory();
    assert!((3 * 2 * 4 * 10_000..=most).contains(&found), "{found} of {most}");
    assert_eq!(state.bytes_on_disk(), (2 * (25 * 3 + 10) + 1) * BLOCK_BYTES);
}

#[test]
fn a_file_takes_all_its_room_at_creation() {
    use std::os::unix::fs::MetadataExt;
    let folder = folder();
    let state = DiskState::create(&options(folder.path(), 100_000), 0, &[100_000; 3], &[0.0]).unwrap();
    let metadata = files(folder.path())[0].metadata().unwrap();
    assert_eq!(metadata.len(), state.bytes_on_disk());
    assert!(metadata.blocks() * 512 >= metadata.len());
    assert_eq!(metadata.mode() & 0o777, 0o600, "others may not read it");
}

#[test]
fn files_bypass_the_page_cache_where_the_file_system_allows_that() {
    let folder = folder();
    let state = DiskState::create(&options(folder.path(), 1), 0, &[1], &[0.0]).unwrap();
    if let Some(reason) = state.buffered_because() {
        return println!("skipped: {reason}");
    }
    let path = files(folder.path()).remove(0);
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let is_ours = |entry: &std::fs::DirEntry| std::fs::read_link(entry.path()).is_ok_and(|target| target == path);
    let descriptor = descriptors.into_iter().find(is_ours).unwrap().file_name();
    let information = std::fs::read_to_string(std::path::Path::new("/proc/self/fdinfo").join(descriptor)).unwrap();
    let flags = information
        .lines()
        .find_map(|line| line.strip_prefix("flags:"))
        .unwrap();
    let flags = u32::from_str_radix(flags.trim(), 8).unwrap();
    assert_ne!(flags & rustix::fs::OFlags::DIRECT.bits(), 0, "{flags:o}");
}

#[test]
fn files_are_gone_after_drop_and_those_of_other_ranks_are_not() {
    let folder = folder();
    let fill = |state: &mut DiskState, value: f32| {
        let work = |_: usize, arrays: &mut [&mut [f32]]| {
            arrays[0].fill(value);
            Ok(())
        };
        state.for_each_group(work).unwrap();
    };
    // Two of one rank also: two engines of one process.
    let mut states: Vec<_> = [0, 1, 1]
        .map(|rank| DiskState::create(&options(folder.path(), 2000), rank, &[2000; 4], &[0.0]).unwrap())
        .into();
    assert_eq!(files(folder.path()).len(), 3);
    for (number, state) in states.iter_mut().enumerate() {
        fill(state, number as f32);
    }
    for (number, state) in states.iter_mut().enumerate() {
        assert_eq!(state.read_group(3).unwrap(), [vec![number as f32; 2000]]);
    }
    drop(states.remove(0));
    assert_eq!(files(folder.path()).len(), 2);
    fill(&mut states[0], 9.0);
    drop(states);
    assert!(files(folder.path()).is_empty());
}

#[test]
fn files_of_killed_processes_are_removed_and_others_stay() {
    let folder = folder();
    let mut state = DiskState::create(&options(folder.path(), 10), 0, &[10], &[1.0]).unwrap();
    let own = files(folder.path()).remove(0);
    // What a killed process leaves is a file of such a name that nobody has open.
    let name = own.file_name().unwrap().to_str().unwrap();
    std::fs::copy(&own, folder.path().join(name.replace("-rank0-", "-rank7-"))).unwrap();
    let kept = ["model.safetensors", "sconce-elsewhere.d-rank0-1.state"].map(|name| folder.path().join(name));
    kept.iter().for_each(|path| std::fs::write(path, "x").unwrap());
    let other = DiskState::create(&options(folder.path(), 10), 1, &[10], &[1.0]).unwrap();
    let left = files(folder.path());
    assert_eq!(left.len(), 4, "{left:?}");
    assert!(
        left.contains(&own) && kept.iter().all(|path| left.contains(path)),
        "{left:?}"
    );
    assert_eq!(state.read_group(0).unwrap(), [[1.0; 10]]);
    drop(other);
}

#[test]
fn a_file_system_without_direct_access_and_reservation_is_used_through_the_page_cache() {
    let Some(mount) = Mount::new("ramfs", "mode=700") else {
        return;
    };
    let mut state = DiskState::create(&options(mount.path(), 300_000), 0, &[300_000, 5], &[1.0, 2.0]).unwrap();
    let reason = state.buffered_because().unwrap_or_default().to_owned();
    assert!(reason.contains("O_DIRECT"), "{reason:?}");
    for _ in 0..3 {
        let work = |_: usize, arrays: &mut [&mut [f32]]| {
            arrays[1].iter_mut().for_each(|value| *value += 1.0);
            Ok(())
        };
        state.for_each_group(work).unwrap();
    }
    assert_eq!(state.read_group(0).unwrap(), [vec![1.0; 300_000], vec![5.0; 300_000]]);
    assert_eq!(state.read_group(1).unwrap(), [[1.0; 5], [5.0; 5]]);
}
