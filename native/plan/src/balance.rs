//! Which replica sends: pure functions from loads to a choice.

/// Balancing ignores loads below this fraction of a sender's fair load.
const GRAINS_PER_SENDER: u64 = 64;

/// Most parts one box is cut into.
const MAX_PARTS: u64 = 256;

/// Bytes below which a box is not cut and loads count as equal.
pub(crate) fn grain(total_bytes: u64, senders: usize, min_split_bytes: u64) -> u64 {
    let fair = total_bytes / (senders.max(1) as u64);
    (fair / GRAINS_PER_SENDER).max(min_split_bytes).max(1)
}

/// Into how many parts to cut a box of `bytes` that is `rows` long.
pub(crate) fn parts(bytes: u64, grain: u64, rows: u64) -> u64 {
    bytes.div_ceil(grain).min(rows).clamp(1, MAX_PARTS)
}

/// One rank that could send a box.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub load: u64,
    /// The rank sends to the same target already.
    pub linked_pairs: bool,
}

/// The least loaded candidate; within a grain of it, one that already sends to the target.
///
/// Ties go round by `turn`, so that targets which ask for the same box ask different replicas.
pub(crate) fn choose(candidates: &[Candidate], grain: u64, turn: usize) -> usize {
    let least = candidates.iter().map(|c| c.load).min().unwrap_or(0);
    let n = candidates.len().max(1);
    (0..candidates.len())
        .filter(|&i| candidates[i].load <= least.saturating_add(grain))
        .min_by_key(|&i| {
            let c = candidates[i];
            (!c.linked_pairs, c.load, (i + n - turn % n) % n)
        })
        .unwrap_or(0)
}

/// Gives `parts` equal parts of `bytes` to candidates; returns `(candidate, parts)` in order.
pub(crate) fn share_out(
    candidates: &mut [Candidate],
    bytes: u64,
    parts: u64,
    grain: u64,
    turn: usize,
) -> Vec<(usize, u64)> {
    let mut shares: Vec<(usize, u64)> = Vec::new();
    for _ in 0..parts {
        let chosen = choose(candidates, grain, turn);
        candidates[chosen].load = candidates[chosen].load.saturating_add(bytes / parts);
        candidates[chosen].linked_pairs = true;
        match shares.iter_mut().find(|s| s.0 == chosen) {
            Some(share) => share.1 += 1,
            None => shares.push((chosen, 1)),
        }
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loads(loads: &[u64]) -> Vec<Candidate> {
        loads.iter().map(|&load| Candidate { load, linked_pairs: false }).collect()
    }

    #[test]
    fn the_least_loaded_replica_sends() {
        assert_eq!(choose(&loads(&[30, 10, 20]), 0, 0), 1);
    }

    #[test]
    fn a_known_peer_is_kept_within_a_grain() {
        let mut candidates = loads(&[10, 12, 40]);
        candidates[1].linked_pairs = true;
        candidates[2].linked_pairs = true;
        assert_eq!(choose(&candidates, 5, 0), 1);
        assert_eq!(choose(&candidates, 1, 0), 0);
    }

    #[test]
    fn equal_replicas_take_turns() {
        let chosen: Vec<usize> = (0..4).map(|t| choose(&loads(&[0, 0, 0]), 0, t)).collect();
        assert_eq!(chosen, vec![0, 1, 2, 0]);
    }

    #[test]
    fn a_large_box_levels_its_replicas() {
        let mut candidates = loads(&[0, 50, 0]);
        let shares = share_out(&mut candidates, 100, 10, 0, 0);
        let worst = candidates.iter().map(|c| c.load).max().unwrap();
        assert!(worst <= 60, "{shares:?}");
        assert_eq!(shares.iter().map(|s| s.1).sum::<u64>(), 10);
    }

    #[test]
    fn small_boxes_stay_whole() {
        assert_eq!(parts(1000, 1024, 10), 1);
        assert_eq!(parts(4096, 1024, 10), 4);
        assert_eq!(parts(4096, 1024, 3), 3);
    }
}
