use serde::{Deserialize, Serialize};

use super::{
    check_range, envelope::Envelope, EngineAddress, RailKeys, RegionDescriptor, RegionKey,
    TransportKind,
};
use crate::{EngineError, Result};

const SEGMENT: Envelope = Envelope::new(*b"FRsg", "a segment descriptor", 1 << 20);

/// Most parts of a segment.
pub const MAX_PARTS: usize = 4096;
/// Longest name of a device on the PCI bus, bytes.
const LONGEST_NAME: usize = 64;

/// The location of a part of a segment, as its owner describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PartLocation {
    /// Host memory, on this NUMA node if that is known.
    Host {
        node: Option<u16>,
    },
    /// A GPU: its number in the owner's process, and its address on the PCI bus.
    Cuda {
        device: u32,
        pci: String,
    },
    File,
}

impl std::fmt::Display for PartLocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Host { node: None } => f.write_str("host"),
            Self::Host { node: Some(node) } => write!(f, "host:{node}"),
            Self::Cuda { device, .. } => write!(f, "cuda:{device}"),
            Self::File => f.write_str("file"),
        }
    }
}

/// A region, or a slice of one, and where it lies in its segment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SegmentPart {
    /// Offset of the first byte in the segment.
    pub at: u64,
    /// Bytes.
    pub len: u64,
    pub key: RegionKey,
    /// Offset in the registration, bytes.
    pub offset: u64,
    pub rail_keys: RailKeys,
    pub location: PartLocation,
    /// By which peers reach it.
    pub transports: Vec<TransportKind>,
}

/// A segment as peers see it: one address space over many regions of one engine. Serialisable;
/// holds no pointer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SegmentDescriptor {
    pub owner: EngineAddress,
    /// In the order of their offsets; they don't overlap.
    pub parts: Vec<SegmentPart>,
}

impl SegmentDescriptor {
    /// # Errors
    /// A peer would not accept it: it has too many parts, or takes too many bytes.
    pub(crate) fn new(owner: EngineAddress, parts: Vec<SegmentPart>) -> Result<Self, String> {
        let descriptor = Self { owner, parts };
        descriptor.check()?;
        descriptor.check_nbytes()?;
        Ok(descriptor)
    }

    fn check_nbytes(&self) -> Result<(), String> {
        SEGMENT.check_size(self).map_err(|e| format!("{e}; use several segments"))
    }

    /// Checks before the encoding is sent that a peer accepts it.
    ///
    /// # Errors
    /// [`EngineError::Invalid`]: it is too long.
    pub fn check_size(&self) -> Result<()> {
        self.check_nbytes().map_err(EngineError::Invalid)
    }

    /// Bytes from offset 0 to the end of the last part.
    pub fn len(&self) -> u64 {
        self.parts.last().map_or(0, |p| p.at + p.len)
    }

    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        SEGMENT.encode(self)
    }

    /// Bounded and checked; see [`EngineError::Decode`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let d: Self = SEGMENT.decode(bytes)?;
        d.check().map_err(|cause| EngineError::Decode { what: SEGMENT.what, cause })?;
        Ok(d)
    }

    fn check(&self) -> Result<(), String> {
        if self.parts.len() > MAX_PARTS {
            return Err(format!("{} parts, at most {MAX_PARTS} are allowed", self.parts.len()));
        }
        check_parts(self.parts.iter().map(|p| (p.at, p.len)))?;
        for (i, part) in self.parts.iter().enumerate() {
            let named = match &part.location {
                PartLocation::Cuda { pci, .. } => pci.len(),
                PartLocation::Host { .. } | PartLocation::File => 0,
            };
            if part.offset.checked_add(part.len).is_none()
                || named > LONGEST_NAME
                || part.transports.len() > LONGEST_NAME
            {
                return Err(format!("part {i} can't be"));
            }
        }
        Ok(())
    }

    /// The region behind a part.
    pub fn region(&self, part: usize) -> Option<RegionDescriptor> {
        let SegmentPart { key, offset, len, rail_keys, .. } = self.parts.get(part)?.clone();
        Some(RegionDescriptor { owner: self.owner.clone(), key, offset, len, rail_keys })
    }
}

/// Whether parts, by first byte and length, are in order, not empty, and don't overlap.
pub(crate) fn check_parts(parts: impl Iterator<Item = (u64, u64)>) -> Result<(), String> {
    let mut end = 0;
    for (i, (at, len)) in parts.enumerate() {
        if len == 0 {
            return Err(format!("part {i} is empty"));
        }
        if i > 0 && at < end {
            return Err(format!(
                "part {i} begins at {at}, before the one before it ends at {end}: give parts in \
                 order and without overlap"
            ));
        }
        end = at.checked_add(len).ok_or_else(|| format!("part {i} passes 2^64"))?;
    }
    match end {
        0 => Err("a segment needs at least one part".into()),
        _ => Ok(()),
    }
}

/// A range of a request within one part of either segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PartRange {
    pub local_part: usize,
    /// From the part's first byte.
    pub local_offset: u64,
    pub remote_part: usize,
    pub remote_offset: u64,
    pub len: u64,
}

/// Cuts `len` bytes from `local_offset` of one segment and `remote_offset` of another into ranges
/// that lie in one part on either side. Parts are given as first byte and length, checked by
/// [`check_parts`]. A pure function: the whole of what a segment means.
///
/// # Errors
/// Ranges that pass the segment's end or touch a gap between parts.
pub(crate) fn cut(
    (local, local_offset): (&[(u64, u64)], u64),
    (remote, remote_offset): (&[(u64, u64)], u64),
    len: u64,
) -> Result<Vec<PartRange>> {
    if len == 0 {
        return Err(EngineError::Invalid(
            "a request for zero bytes of a segment does nothing".into(),
        ));
    }
    let limit = |parts: &[(u64, u64)]| parts.last().map_or(0, |(at, len)| at + len);
    check_range("local segment", local_offset, len, limit(local))?;
    check_range("remote segment", remote_offset, len, limit(remote))?;
    let (mut cuts, mut done) = (Vec::new(), 0);
    while done < len {
        let (i, a, a_left) = part_at("local segment", local, local_offset + done)?;
        let (j, b, b_left) = part_at("remote segment", remote, remote_offset + done)?;
        let n = a_left.min(b_left).min(len - done);
        cuts.push(PartRange {
            local_part: i,
            local_offset: a,
            remote_part: j,
            remote_offset: b,
            len: n,
        });
        done += n;
    }
    Ok(cuts)
}

/// The part of a byte, the offset in it, and the number of bytes that follow in it.
fn part_at(what: &str, parts: &[(u64, u64)], byte: u64) -> Result<(usize, u64, u64)> {
    let after = parts.partition_point(|(at, _)| *at <= byte);
    let found = after.checked_sub(1).and_then(|i| {
        let (at, len) = parts[i];
        (byte - at < len).then(|| (i, byte - at, len - (byte - at)))
    });
    found.ok_or_else(|| {
        let next = parts.get(after).map_or(String::new(), |(at, _)| format!(" until {at}"));
        EngineError::Invalid(format!("{what}: from byte {byte}{next} there is no part"))
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::api::RailKey;

    /// Parts with gaps between some of them.
    fn parts() -> impl Strategy<Value = Vec<(u64, u64)>> {
        proptest::collection::vec((prop_oneof![3 => Just(0u64), 1 => 1u64..20], 1u64..30), 1..9)
            .prop_map(|steps| {
                let mut end = 0;
                let part = |(gap, len): (u64, u64)| {
                    let at = end + gap;
                    end = at + len;
                    (at, len)
                };
                steps.into_iter().map(part).collect()
            })
    }

    /// Finds the part of a byte by a linear search.
    fn holder(parts: &[(u64, u64)], byte: u64) -> Option<(usize, u64)> {
        let at = parts.iter().position(|(at, len)| (*at..at + len).contains(&byte))?;
        Some((at, byte - parts[at].0))
    }

    proptest! {
        #[test]
        fn every_byte_goes_where_its_offset_says(
            local in parts(), remote in parts(), from in 0u64..40, to in 0u64..40, len in 1u64..200,
        ) {
            let whole = |parts: &[(u64, u64)], from| {
                (from..from + len).map(|b| holder(parts, b)).collect::<Option<Vec<_>>>()
            };
            let expected = whole(&local, from).zip(whole(&remote, to));
            match cut((&local, from), (&remote, to), len) {
                Err(_) => prop_assert!(expected.is_none()),
                Ok(cuts) => {
                    let (mut a, mut b) = (Vec::new(), Vec::new());
                    for c in &cuts {
                        prop_assert!(c.len > 0);
                        a.extend((0..c.len).map(|i| (c.local_part, c.local_offset + i)));
                        b.extend((0..c.len).map(|i| (c.remote_part, c.remote_offset + i)));
                    }
                    prop_assert_eq!(Some((a, b)), expected);
                    // As few pieces as there are borders.
                    prop_assert!(cuts.len() < local.len() + remote.len());
                }
            }
        }

        #[test]
        fn parts_that_pass_the_check_are_in_order(raw in proptest::collection::vec(
            (prop_oneof![0u64..50, any::<u64>()], prop_oneof![0u64..20, any::<u64>()]), 0..5,
        )) {
            if check_parts(raw.iter().copied()).is_ok() {
                let ends = raw.iter().map(|(at, len)| at.checked_add(*len).unwrap());
                let ends: Vec<_> = ends.collect();
                prop_assert!(raw.iter().skip(1).zip(&ends).all(|((at, _), end)| at >= end));
            }
        }
    }

    #[test]
    fn gaps_and_ends_are_named() {
        let parts = [(0, 10), (30, 10)];
        let e = cut((&parts, 5), (&parts, 0), 8).unwrap_err().to_string();
        assert!(e.contains("from byte 10 until 30"), "{e}");
        let e = cut((&parts, 35), (&parts, 0), 8).unwrap_err();
        assert!(matches!(e, EngineError::OutOfBounds { .. }), "{e}");
        assert!(cut((&parts, 0), (&parts, u64::MAX), 8).is_err());
        assert!(cut((&parts, 0), (&parts, 0), 0).is_err());
    }

    fn part(at: u64, len: u64) -> SegmentPart {
        SegmentPart {
            at,
            len,
            key: RegionKey { index: 1, rkey: 2 },
            offset: 0,
            rail_keys: RailKeys::default(),
            location: PartLocation::Cuda { device: 1, pci: "0000:01:00.0".into() },
            transports: vec![TransportKind::Tcp],
        }
    }

    fn owner() -> EngineAddress {
        EngineAddress { id: crate::api::EngineId([1; 16]), name: "e".into(), endpoints: vec![] }
    }

    /// Each part has the keys of 16 NICs.
    #[test]
    fn what_a_peer_would_not_accept_is_not_made() {
        let key = |rail| RailKey { rail, offset: 0, base: 1 << 46, key: u64::MAX };
        let keys = RailKeys::from((0..16).map(key).collect::<Vec<_>>());
        let made = |n: u64| {
            let parts = (0..n).map(|at| SegmentPart { rail_keys: keys.clone(), ..part(at, 1) });
            SegmentDescriptor::new(owner(), parts.collect())
        };
        let fits = made(2000).unwrap();
        assert_eq!(SegmentDescriptor::from_bytes(&fits.to_bytes()), Ok(fits));
        let e = made(MAX_PARTS as u64).unwrap_err();
        assert!(e.contains("at most 1048576 are allowed; use several segments"), "{e}");
        let e = made(MAX_PARTS as u64 + 1).unwrap_err();
        assert!(e.contains("4097 parts"), "{e}");
        // The bound is exact.
        let (mut fits, mut refused) = (2000, MAX_PARTS as u64);
        while refused - fits > 1 {
            let n = fits.midpoint(refused);
            *(if made(n).is_ok() { &mut fits } else { &mut refused }) = n;
        }
        assert!(SegmentDescriptor::from_bytes(&made(fits).unwrap().to_bytes()).is_ok());
        let parts = (0..refused).map(|at| SegmentPart { rail_keys: keys.clone(), ..part(at, 1) });
        let larger = SegmentDescriptor { owner: owner(), parts: parts.collect() };
        assert!(SegmentDescriptor::from_bytes(&larger.to_bytes()).is_err());
    }

    #[test]
    fn descriptors_are_checked() {
        let owner = owner();
        let of = |parts| SegmentDescriptor { owner: owner.clone(), parts };
        let good = of(vec![part(0, 5), part(5, 1 << 50)]);
        assert_eq!(SegmentDescriptor::from_bytes(&good.to_bytes()), Ok(good));
        for bad in [
            of(vec![]),
            of(vec![part(0, 0)]),
            of(vec![part(5, 5), part(0, 5)]),
            of(vec![part(0, 5), part(4, 5)]),
            of(vec![part(u64::MAX, 2)]),
            of(vec![SegmentPart { offset: u64::MAX, ..part(0, 5) }]),
            of(vec![SegmentPart {
                location: PartLocation::Cuda { device: 0, pci: "x".repeat(99) },
                ..part(0, 5)
            }]),
            of((0..=MAX_PARTS as u64).map(|i| part(i, 1)).collect()),
        ] {
            assert!(
                SegmentDescriptor::from_bytes(&bad.to_bytes()).is_err(),
                "{:?}",
                bad.parts.len()
            );
        }
    }
}
