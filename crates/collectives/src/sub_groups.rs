//! Who belongs to which sub-group.

/// Returns the sub-groups by color, each with its members ordered by key and then by rank.
pub(crate) fn sub_groups(wishes: &[[i64; 2]]) -> Vec<(i64, Vec<usize>)> {
    let mut order: Vec<_> = wishes
        .iter()
        .enumerate()
        .map(|(rank, [color, key])| (*color, *key, rank))
        .collect();
    order.retain(|(color, ..)| *color >= 0);
    order.sort_unstable();
    let mut groups: Vec<(i64, Vec<usize>)> = Vec::new();
    for (color, _, rank) in order {
        match groups.last_mut() {
            Some((last, members)) if *last == color => members.push(rank),
            _ => groups.push((color, vec![rank])),
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::sub_groups;

    #[test]
    fn members_are_ordered_by_key_then_rank_and_negative_colors_are_left_out() {
        let wishes = [[1, 5], [0, 0], [1, -3], [-1, 0], [1, 5]];
        assert_eq!(sub_groups(&wishes), [(0, vec![1]), (1, vec![2, 0, 4])]);
    }
}
