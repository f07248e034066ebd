//! Whether two tensors of a group, or two layers of one, lie in the same bytes.

use super::{CacheGroup, CacheTensor};

/// Two (tensor, layer) pairs that share bytes, by their numbers in the group.
///
/// Found among those that have the same strides in the same buffer, as layers and keys and values
/// do that interleave, and among those whose strides differ if they begin at the same byte.
pub(super) fn shared(group: &CacheGroup) -> Option<[(usize, usize); 2]> {
    let mut all: Vec<(usize, usize)> = (0..group.tensors.len())
        .flat_map(|t| (0..group.layers.len()).map(move |l| (t, l)))
        .collect();
    let place = |&(t, l): &(usize, usize)| {
        let place = group.tensors[t].places[l];
        (place.buffer, place.offset)
    };
    all.sort_unstable_by_key(place);
    for (i, one) in all.iter().enumerate() {
        let a = &group.tensors[one.0];
        let (buffer, from) = place(one);
        // Sorted by place: what begins after the end can't share anything, nor can what comes after
        // it.
        let end = from + span(a, group);
        let near = all[i + 1..].iter().take_while(|other| place(other) < (buffer, end));
        for other in near {
            let apart = place(other).1 - from;
            if rows_overlap(group, a, &group.tensors[other.0], apart) {
                return Some([*one, *other]);
            }
        }
    }
    None
}

/// Strides and numbers of rows along pages, heads and tokens.
fn steps(tensor: &CacheTensor, group: &CacheGroup) -> [(u64, u32); 3] {
    [
        (tensor.page_stride, group.pages),
        (tensor.head_stride, tensor.held_heads),
        (tensor.token_stride, group.page_tokens),
    ]
}

/// Bytes from the begin of the first row to the end of the last.
fn span(tensor: &CacheTensor, group: &CacheGroup) -> u64 {
    let steps = steps(tensor, group).into_iter().filter(|&(_, count)| count > 1);
    steps.map(|(stride, count)| stride * u64::from(count - 1)).sum::<u64>() + row(tensor)
}

/// Whether rows of two tensors meet, the second of which begins `apart` bytes after the first.
fn rows_overlap(group: &CacheGroup, a: &CacheTensor, b: &CacheTensor, apart: u64) -> bool {
    let (mut both, mut len) = ([(0, 0, 0); 3], 0);
    for ((stride, count), (other, others)) in steps(a, group).into_iter().zip(steps(b, group)) {
        match (count, others) {
            (1, 1) => {}
            (2.., 2..) if stride == other => {
                both[len] = (stride as i64, count.into(), others.into());
                len += 1;
            }
            _ => return apart == 0,
        }
    }
    both[..len].sort_unstable_by_key(|&(stride, _, _)| std::cmp::Reverse(stride));
    within(apart as i64, &both[..len], (row(a) as i64, row(b) as i64))
}

/// Whether two rows of those lengths meet, of all that steps of a stride lead to from two that
/// begin `apart` bytes apart. A step is a stride and how many rows there are along it, of the one
/// and of the other.
///
/// A stride steps over all that smaller ones span, so only the two nearest differences can.
fn within(apart: i64, steps: &[(i64, i64, i64)], rows: (i64, i64)) -> bool {
    let Some((&(stride, ones, others), inner)) = steps.split_first() else {
        return -rows.1 < apart && apart < rows.0;
    };
    let nearest = apart.div_euclid(stride);
    [nearest, nearest + 1]
        .into_iter()
        .filter(|&steps| -others < steps && steps < ones)
        .any(|steps| within(apart - steps * stride, inner, rows))
}

fn row(tensor: &CacheTensor) -> u64 {
    tensor.row_bytes().expect("its dtype was checked")
}
