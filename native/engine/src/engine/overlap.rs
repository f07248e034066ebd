//! Requests to the engine's own memory. Their parts are copied in no order, by several threads, so
//! the bytes that one reads must not be bytes that it writes.

use std::sync::Weak;

use super::{bind::seq, Op, Region, RemoteRegion};
use crate::{api::Pages, memory::device::Location, EngineError, Result};

/// What offsets count in: the addresses of this process, or one file.
type Space = Option<(u64, u64)>;

/// Bytes `start..end` of a space.
type Range = (Space, u64, u64);

/// One copy: from the first range to the second, which is as long.
type Move = (Range, Range);

/// # Errors
/// [`EngineError::Invalid`] if bytes that the operation reads are bytes that it writes. A range may
/// be copied onto itself, which changes nothing.
pub(super) fn check(op: &Op<'_>) -> Result<()> {
    match op {
        Op::Write { src, dst, len, .. } => {
            one((src.region, src.offset), (dst.region, dst.offset), *len)
        }
        // What overlaps in one direction does so in the other.
        Op::Read { src, dst, len } => one((dst.region, dst.offset), (src.region, src.offset), *len),
        Op::WritePages { page_len, src, src_pages, dst, dst_pages, .. } => {
            paged(*page_len, (src, src_pages), (dst, dst_pages), false)
        }
        Op::ReadPages { page_len, src, src_pages, dst, dst_pages } => {
            paged(*page_len, (dst, dst_pages), (src, src_pages), true)
        }
        Op::WritePieces { pieces, .. } | Op::ReadPieces { pieces } => {
            let reads = matches!(op, Op::ReadPieces { .. });
            all(pieces.iter().filter_map(|p| {
                let ends = ends(&p.local, &p.remote)?;
                Some(ends.copy(p.local_offset, p.remote_offset, p.len, reads))
            }))
        }
        Op::Scatter { src, parts, .. } => all(parts.iter().filter_map(|p| {
            let ends = ends(src, &p.dst)?;
            Some(ends.copy(p.src_offset, p.dst_offset, p.len, false))
        })),
        Op::Barrier { .. } | Op::Send { .. } => Ok(()),
    }
}

/// Both ends of a copy within this engine.
#[derive(Clone, Copy)]
struct Ends {
    local: (Space, u64),
    remote: (Space, u64),
}

/// `None` if the region is not this engine's, or is gone: its use is stale then.
fn ends(local: &Region, remote: &RemoteRegion) -> Option<Ends> {
    let own = remote.own.as_ref().and_then(Weak::upgrade)?;
    let space = |location: &Location| location.file().map(|file| file.id());
    let base = (own.base as u64).saturating_add(remote.offset);
    let local = (space(local.location()), local.addr() as u64);
    Some(Ends { local, remote: (space(&own.location), base) })
}

impl Ends {
    fn copy(&self, local_offset: u64, remote_offset: u64, len: u64, reads: bool) -> Move {
        let range = |(space, base): (Space, u64), offset: u64| {
            let start = base.saturating_add(offset);
            (space, start, start.saturating_add(len))
        };
        let (local, remote) = (range(self.local, local_offset), range(self.remote, remote_offset));
        match reads {
            true => (remote, local),
            false => (local, remote),
        }
    }
}

fn one((l, l_off): (&Region, u64), (r, r_off): (&RemoteRegion, u64), len: u64) -> Result<()> {
    ends(l, r).map_or(Ok(()), |ends| all(std::iter::once(ends.copy(l_off, r_off, len, false))))
}

fn paged(
    page_len: u64,
    (l, l_pages): (&Region, &Pages),
    (r, r_pages): (&RemoteRegion, &Pages),
    reads: bool,
) -> Result<()> {
    let Some(ends) = ends(l, r) else { return Ok(()) };
    let (l_seq, r_seq) = (seq(l_pages, 0), seq(r_pages, 0));
    let copy = |i| ends.copy(l_seq.nth(i), r_seq.nth(i), page_len, reads);
    all((0..l_pages.indices.len()).map(copy))
}

/// Checks copies that are made in no order.
fn all(moves: impl Iterator<Item = Move> + Clone) -> Result<()> {
    // What is copied onto itself is read, but does not change.
    let sources = moves.clone().map(|(from, _)| from);
    let targets = moves.filter(|(from, to)| from != to).map(|(_, to)| to);
    let bounds = |ranges: &mut dyn Iterator<Item = Range>| {
        ranges.reduce(|a, b| (a.0.min(b.0), a.1.min(b.1), a.2.max(b.2)))
    };
    let spaces = |ranges: &mut dyn Iterator<Item = Range>| {
        let mut spaces = ranges.map(|(space, ..)| space);
        let first = spaces.next()?;
        spaces.all(|space| space == first).then_some(first)
    };
    let (Some(a), Some(b)) = (bounds(&mut sources.clone()), bounds(&mut targets.clone())) else {
        return Ok(());
    };
    let alone = (spaces(&mut sources.clone()), spaces(&mut targets.clone()));
    let apart = match alone {
        (Some(a), Some(b)) if a != b => true,
        _ => a.2 <= b.1 || b.2 <= a.1,
    };
    if apart {
        return Ok(());
    }
    let mut both: Vec<(Range, bool)> = sources.map(|range| (range, false)).collect();
    both.extend(targets.map(|range| (range, true)));
    both.retain(|((_, start, end), _)| start < end);
    both.sort_unstable();
    // The furthest end of each kind so far, in the current space.
    let mut furthest: [Option<Range>; 2] = [None; 2];
    for (range, is_target) in both {
        let other = furthest[usize::from(!is_target)];
        if let Some(other) = other.filter(|o| o.0 == range.0 && range.1 < o.2) {
            let (source, target) = if is_target { (other, range) } else { (range, other) };
            return Err(overlap(source, target));
        }
        let own = &mut furthest[usize::from(is_target)];
        if own.is_none_or(|o| o.0 != range.0 || o.2 < range.2) {
            *own = Some(range);
        }
    }
    Ok(())
}

fn overlap((space, from, from_end): Range, (_, to, to_end): Range) -> EngineError {
    let place = if space.is_some() { "file" } else { "memory" };
    EngineError::Invalid(format!(
        "source and target of a copy within this engine overlap: it reads {} bytes at {from:#x} of \
         a {place} and writes {} bytes at {to:#x} of the same {place}, in no order; copy them \
         through other memory",
        from_end - from,
        to_end - to,
    ))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn space() -> impl Strategy<Value = Space> {
        prop_oneof![3 => Just(None), 1 => Just(Some((1, 2)))]
    }

    proptest! {
        #[test]
        fn copies_are_accepted_if_and_only_if_their_order_does_not_matter(
            given in proptest::collection::vec((space(), 0u64..60, space(), 0u64..60, 0u64..9), 0..6),
        ) {
            let moves = given.iter().map(|&(a, from, b, to, len)| {
                ((a, from, from + len), (b, to, to + len))
            });
            let touches = |a: Range, b: Range| a.0 == b.0 && a.1.max(b.1) < a.2.min(b.2);
            let clash = moves.clone().filter(|(from, to)| from != to).any(|(_, to)| {
                moves.clone().any(|(from, _)| touches(from, to))
            });
            prop_assert_eq!(all(moves).is_err(), clash);
        }
    }
}
