//! Which counts of a lost link are missing: arithmetic, and nothing else.

use std::collections::HashMap;

use super::{ledger::Slice, notes::MAX_IMMS, route::Acked};
use crate::domain::{Count, Receipts};

/// Slices, and the immediates that the peer is asked about for their sake, each with what it has
/// acknowledged before. No immediates where one number says all.
pub(super) type Question = (Vec<(u32, u64)>, Vec<Slice>);

/// Slices that share a count that is missing: none, if `n` is 0.
pub(super) type Missing = Vec<(Count, Vec<Slice>)>;

/// How many of the counts, in the order in which they were posted, have not come.
pub(super) fn in_order(counted: Vec<Slice>, came: Option<u64>) -> Result<Missing, Vec<Slice>> {
    let posted: u64 = counted.iter().filter_map(Slice::count).map(|c| u64::from(c.n)).sum();
    let Some(mut came) = came.filter(|came| *came <= posted) else { return Err(counted) };
    let missing = counted.into_iter().filter_map(|slice| {
        let count = slice.count()?;
        let there = came.min(u64::from(count.n)) as u32;
        came -= u64::from(there);
        Some((Count { imm: count.imm, n: count.n - there }, vec![slice]))
    });
    Ok(missing.collect())
}

/// How many of each immediate's counts have not come.
pub(super) fn by_imm(
    counted: Vec<Slice>,
    imms: &[(u32, u64)],
    tallies: &[u64],
) -> Result<Missing, Vec<Slice>> {
    let posted = |imm| -> u64 {
        let of_imm = counted.iter().filter_map(Slice::count).filter(|c| c.imm == imm);
        of_imm.map(|c| u64::from(c.n)).sum()
    };
    let left = imms.iter().zip(tallies).map(|((imm, acked), all)| {
        let came = all.checked_sub(*acked)?;
        let left = posted(*imm).checked_sub(came)?;
        Some((*imm, u32::try_from(left).ok()?))
    });
    let asked = |s: &Slice| imms.iter().any(|(imm, _)| s.count().is_some_and(|c| c.imm == *imm));
    if !counted.iter().all(asked) {
        return Err(counted);
    }
    let left: Option<Vec<_>> = left.collect();
    let Some(left) = left.filter(|l| l.len() == imms.len()) else { return Err(counted) };
    let mut missing: Missing =
        left.into_iter().map(|(imm, n)| (Count { imm, n }, Vec::new())).collect();
    for slice in counted {
        let imm = slice.count().map(|c| c.imm);
        if let Some((_, slices)) = missing.iter_mut().find(|(c, _)| Some(c.imm) == imm) {
            slices.push(slice);
        }
    }
    Ok(missing)
}

/// Slices with the immediates that are asked about them: so many of these that a question holds them.
pub(super) fn questions(slices: Vec<Slice>, kind: Receipts, acked: &Acked) -> Vec<Question> {
    if kind != Receipts::ByImm {
        return vec![(Vec::new(), slices)];
    }
    let mut parts: Vec<Question> = Vec::new();
    let mut place: HashMap<u32, usize> = HashMap::new();
    for slice in slices {
        let Some(Count { imm, .. }) = slice.count() else {
            match parts.first_mut() {
                Some((_, first)) => first.push(slice),
                None => parts.push((Vec::new(), vec![slice])),
            }
            continue;
        };
        let at = *place.entry(imm).or_insert_with(|| {
            if parts.last().is_none_or(|(imms, _)| imms.len() >= MAX_IMMS) {
                parts.push((Vec::new(), Vec::new()));
            }
            let at = parts.len() - 1;
            parts[at].0.push((imm, acked.by_imm.get(&imm).copied().unwrap_or(0)));
            at
        });
        parts[at].1.push(slice);
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{domain::WorkRequest, group::TransferKey, time::Time};

    fn slice(imm: u32, n: u32) -> Slice {
        Slice {
            owner: TransferKey { slot: 0, serial: 0 },
            peer: 0,
            link: (0, 0),
            wr: WorkRequest::Count(Count { imm, n }),
            confirm: None,
            tries: 0,
            posted: Time(0),
            bytes: 0,
            queued: 0,
            order: 0,
        }
    }

    fn left(missing: Result<Missing, Vec<Slice>>) -> Option<Vec<(u32, u32, usize)>> {
        let missing = missing.ok()?;
        Some(missing.iter().map(|(c, slices)| (c.imm, c.n, slices.len())).collect())
    }

    #[test]
    fn an_ordered_link_lost_its_last_counts() {
        let posted = || vec![slice(1, 4), slice(2, 1), slice(1, 3)];
        for (came, expected) in [
            (0, [4, 1, 3]),
            (3, [1, 1, 3]),
            (4, [0, 1, 3]),
            (5, [0, 0, 3]),
            (7, [0, 0, 1]),
            (8, [0, 0, 0]),
        ] {
            let left = left(in_order(posted(), Some(came))).unwrap();
            assert_eq!(left.iter().map(|l| l.1).collect::<Vec<_>>(), expected, "{came} came");
        }
        // More than was posted, or less than was acknowledged: the peer is not to be believed.
        assert!(in_order(posted(), Some(9)).is_err() && in_order(posted(), None).is_err());
    }

    #[test]
    fn counts_without_order_are_missing_by_immediate() {
        let posted = || vec![slice(1, 4), slice(2, 1), slice(1, 3)];
        let asked = [(1, 10), (2, 0)];
        assert_eq!(left(by_imm(posted(), &asked, &[12, 0])), Some(vec![(1, 5, 2), (2, 1, 1)]));
        assert_eq!(left(by_imm(posted(), &asked, &[17, 1])), Some(vec![(1, 0, 2), (2, 0, 1)]));
        for lie in [&[9, 0][..], &[18, 0], &[12, 2], &[12], &[]] {
            assert!(by_imm(posted(), &asked, lie).is_err(), "{lie:?}");
        }
        // Nobody was asked about some of them.
        assert!(
            by_imm(posted(), &asked[..1], &[12]).is_err() && by_imm(posted(), &[], &[]).is_err()
        );
    }

    #[test]
    fn questions_hold_all_slices_and_few_immediates() {
        let mut acked = Acked::default();
        acked.by_imm.insert(7, 9);
        let slices = || (0..500).map(|i| slice(i % 300, 1)).collect::<Vec<_>>();
        let asked = questions(slices(), Receipts::ByImm, &acked);
        assert_eq!(asked.iter().map(|(_, s)| s.len()).sum::<usize>(), 500);
        assert!(asked.iter().all(|(imms, _)| imms.len() <= MAX_IMMS));
        assert_eq!(asked[0].0[7], (7, 9));
        // All slices of one immediate are in one question.
        for (imms, slices) in &asked {
            assert!(slices
                .iter()
                .all(|s| imms.iter().any(|(i, _)| Some(*i) == s.count().map(|c| c.imm))));
        }
        assert_eq!(questions(slices(), Receipts::InOrder, &acked).len(), 1);
    }
}
