//! Computes which slices of a lost link were delivered. Delivered counts must not be sent again
//! (IC-3), and missing ones must not pass for delivered (IC-4).

use super::ledger::Slice;
use crate::domain::Count;

/// Slices, and how much of each was delivered.
pub(super) type DeliveredSlices = Vec<(Slice, Delivered)>;

/// The delivered part of a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Delivered {
    All,
    /// The first counted writes, by their number; the others are unknown.
    Counts(u32),
}

/// Resolves slices of an ordered link, whose peer counted `came` writes beyond the acknowledged
/// ones. Slices without a count may have arrived or not. Fails if `came` is impossible.
pub(super) fn in_order(
    mut slices: Vec<Slice>,
    came: Option<u64>,
) -> Result<DeliveredSlices, Vec<Slice>> {
    let counts = |s: &Slice| s.count().map_or(0, |c| u64::from(c.n));
    let posted: u64 = slices.iter().map(counts).sum();
    let Some(mut came) = came.filter(|came| *came <= posted) else { return Err(slices) };
    slices.sort_by_key(|s| s.order);
    let delivered = |slice: Slice| {
        let Some(Count { n, .. }) = slice.count() else { return (slice, Delivered::Counts(0)) };
        let there = came.min(u64::from(n)) as u32;
        came -= u64::from(there);
        (slice, if there == n { Delivered::All } else { Delivered::Counts(there) })
    };
    Ok(slices.into_iter().map(delivered).collect())
}

/// Resolves slices of a link that numbers work: the peer reports for each whether it arrived.
pub(super) fn numbered(slices: Vec<Slice>, came: &[bool]) -> Result<DeliveredSlices, Vec<Slice>> {
    if slices.len() != came.len() {
        return Err(slices);
    }
    let delivered = |came: &bool| if *came { Delivered::All } else { Delivered::Counts(0) };
    Ok(slices.into_iter().zip(came.iter().map(delivered)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{api::Priority, domain::WorkRequest, group::TransferKey, time::Time};

    fn slice(order: u64, n: u32) -> Slice {
        Slice {
            owner: TransferKey { slot: 0, serial: 0 },
            peer: 0,
            link: (0, 0),
            wr: match n {
                0 => WorkRequest::Send(Vec::new().into()),
                n => WorkRequest::Count(Count { imm: 1, n }),
            },
            confirm: None,
            tries: 0,
            posted: Time(0),
            priority: Priority::Bulk,
            bytes: 0,
            queued: 0,
            number: None,
            order,
        }
    }

    #[test]
    fn an_ordered_link_lost_its_last_counts() {
        // In another order than they were posted, with one in between that counts nothing.
        let posted = || vec![slice(4, 3), slice(1, 4), slice(2, 0), slice(3, 1)];
        let counts = Delivered::Counts;
        for (came, expected) in [
            (0, [counts(0), counts(0), counts(0), counts(0)]),
            (3, [counts(3), counts(0), counts(0), counts(0)]),
            (4, [Delivered::All, counts(0), counts(0), counts(0)]),
            (5, [Delivered::All, counts(0), Delivered::All, counts(0)]),
            (7, [Delivered::All, counts(0), Delivered::All, counts(2)]),
            (8, [Delivered::All, counts(0), Delivered::All, Delivered::All]),
        ] {
            let found = in_order(posted(), Some(came)).unwrap();
            let found: Vec<_> = found.into_iter().map(|(_, delivered)| delivered).collect();
            assert_eq!(found, expected, "{came} came");
        }
        // More than was posted, or less than was acknowledged: the peer is not to be believed.
        assert!(in_order(posted(), Some(9)).is_err() && in_order(posted(), None).is_err());
    }

    #[test]
    fn numbered_work_came_or_not() {
        let posted = || vec![slice(1, 4), slice(2, 0)];
        let came = numbered(posted(), &[false, true]).unwrap();
        let found: Vec<_> = came.into_iter().map(|(_, delivered)| delivered).collect();
        assert_eq!(found, [Delivered::Counts(0), Delivered::All]);
        assert!(numbered(posted(), &[true]).is_err() && numbered(posted(), &[]).is_err());
    }
}
