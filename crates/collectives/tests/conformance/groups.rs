//! Sub-groups.

use crate::{on_every_backend, on_ranks};
use sconce_collectives::ReduceOp;

#[test]
fn split_makes_groups_by_color_ordered_by_key() {
    on_every_backend(|group| {
        let (rank, size) = (group.rank(), group.size());
        // Keys run against the ranks, so members are reversed.
        let part = group
            .split(Some((rank % 2) as u32), -(rank as i64))
            .unwrap()
            .expect("every rank has a color");
        let members: Vec<usize> = (0..size).rev().filter(|other| other % 2 == rank % 2).collect();
        assert_eq!(part.size(), members.len());
        assert_eq!(members[part.rank()], rank);
        let mut sum = [rank as u32];
        part.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert_eq!(sum[0] as usize, members.iter().sum::<usize>());
        // Regions work in sub-groups too, and the parent stays usable.
        let mut buffer = part.allocate_elements::<f32>(10_000).unwrap();
        buffer.as_mut_slice::<f32>().fill(1.0);
        part.all_reduce(buffer.as_mut_slice::<f32>(), ReduceOp::Sum).unwrap();
        assert!(
            buffer
                .as_slice::<f32>()
                .iter()
                .all(|value| *value == members.len() as f32)
        );
        group.barrier().unwrap();
    });
}

#[test]
fn ranks_without_color_get_no_group() {
    on_ranks(3, |group| {
        let part = group.split((group.rank() != 1).then_some(0), 0).unwrap();
        assert_eq!(part.as_ref().map(|part| part.size()), (group.rank() != 1).then_some(2));
        if let Some(part) = part {
            part.barrier().unwrap();
        }
    });
}

#[test]
fn a_sub_group_can_be_split_again() {
    on_ranks(4, |group| {
        let half = group.split(Some((group.rank() / 2) as u32), 0).unwrap().unwrap();
        let quarter = half.split(Some(half.rank() as u32), 0).unwrap().unwrap();
        assert_eq!((half.size(), quarter.size()), (2, 1));
        quarter.barrier().unwrap();
        half.barrier().unwrap();
    });
}
