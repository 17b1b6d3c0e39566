//! Which tensor goes to which file: the rule of transformers, so that a model has the files it would have there.

/// The most bytes of tensors in a file, unless another number is asked for: 5 GB, as in Accelerate.
pub const MAX_SHARD_SIZE: u64 = 5_000_000_000;

/// Deals tensors of `sizes` bytes to files; returns their numbers, file by file.
///
/// Greedily, in order, as `split_torch_state_dict_into_shards` of huggingface_hub does: a tensor larger than `max_shard_size`
/// is a file of its own and does not end the one being filled; of the others each that would make it larger begins another.
pub(super) fn deal(sizes: &[u64], max_shard_size: u64) -> Vec<Vec<usize>> {
    let mut shards = Vec::new();
    let (mut current, mut filled) = (Vec::new(), 0);
    for (number, size) in sizes.iter().enumerate() {
        if *size > max_shard_size {
            shards.push(vec![number]);
            continue;
        }
        if filled + size > max_shard_size {
            shards.push(std::mem::take(&mut current));
            filled = 0;
        }
        current.push(number);
        filled += size;
    }
    if !current.is_empty() {
        shards.push(current);
    }
    shards
}

#[cfg(test)]
mod tests {
    use super::deal;

    /// What `huggingface_hub.split_torch_state_dict_into_shards` makes of tensors of these sizes.
    #[test]
    fn tensors_are_dealt_as_huggingface_hub_does() {
        assert_eq!(deal(&[10, 10, 10], 30), [vec![0, 1, 2]]);
        assert_eq!(deal(&[10, 10, 11], 30), [vec![0, 1], vec![2]]);
        assert_eq!(deal(&[10, 40, 10], 30), [vec![1], vec![0, 2]], "larger than a shard");
        assert_eq!(deal(&[30, 1, 29, 1], 30), [vec![0], vec![1, 2], vec![3]]);
        assert_eq!(deal(&[5, 5], 1), [vec![0], vec![1]]);
        assert_eq!(deal(&[0, 0], 0), [vec![0, 1]]);
    }
}
