//! Segments: one logical address space over many regions (TENT, section 3.2.2).

use std::sync::Arc;

use super::{Region, RemoteRegion, TransferEngine};
use crate::{
    api::{check_parts, cut, PartLocation, SegmentDescriptor, SegmentPart},
    domain::Domain,
    engine::SegmentPiece,
    memory::{device::Location, node_of},
    EngineError, Result,
};

/// Regions of this engine, in host memory, GPU memory or files, laid out as one range of offsets.
/// A clone shares the regions.
#[derive(Clone, Debug)]
pub struct Segment {
    parts: Arc<Parts<Region>>,
    descriptor: Arc<SegmentDescriptor>,
}

/// A peer's segment, for use in requests.
#[derive(Clone, Debug)]
pub struct RemoteSegment {
    parts: Arc<Parts<RemoteRegion>>,
    descriptor: Arc<SegmentDescriptor>,
}

#[derive(Debug)]
struct Parts<R> {
    /// First byte and length of each part.
    spans: Vec<(u64, u64)>,
    regions: Vec<R>,
}

impl TransferEngine {
    /// Makes a segment of regions, each at its offset, in order and without overlap. Gaps are
    /// allowed, but no transfer may touch them.
    pub fn segment(&self, parts: &[(u64, Region)]) -> Result<Segment> {
        let spans: Vec<_> = parts.iter().map(|(at, region)| (*at, region.len())).collect();
        let invalid = |why: String| EngineError::Invalid(format!("segment: {why}"));
        check_parts(spans.iter().copied()).map_err(invalid)?;
        for (_, region) in parts {
            self.shared.check_own(region)?;
        }
        let core = self.shared.lock()?;
        let described = parts.iter().map(|(at, region)| describe(*at, region, &core.domains));
        let owner = self.address().clone();
        let described = described.collect();
        drop(core);
        let descriptor = SegmentDescriptor::new(owner, described).map_err(invalid)?;
        let regions = parts.iter().map(|(_, region)| region.clone()).collect();
        let parts = Arc::new(Parts { spans, regions });
        Ok(Segment { parts, descriptor: Arc::new(descriptor) })
    }

    /// Opens a segment of a peer, or of this engine, for use in requests.
    pub fn open_segment(&self, descriptor: &SegmentDescriptor) -> Result<RemoteSegment> {
        let spans = descriptor.parts.iter().map(|p| (p.at, p.len)).collect::<Vec<_>>();
        check_parts(spans.iter().copied()).map_err(EngineError::Invalid)?;
        let regions = (0..spans.len()).filter_map(|i| descriptor.region(i));
        let regions = regions.map(|d| self.import(&d)).collect::<Result<_>>()?;
        let parts = Arc::new(Parts { spans, regions });
        Ok(RemoteSegment { parts, descriptor: Arc::new(descriptor.clone()) })
    }
}

fn describe(at: u64, region: &Region, domains: &[Box<dyn Domain>]) -> SegmentPart {
    let location = match region.location() {
        Location::Host | Location::Managed => PartLocation::Host { node: node_of(region.addr()) },
        Location::Cuda(range) => {
            PartLocation::Cuda { device: range.device as u32, pci: range.pci.clone() }
        }
        Location::File(_) => PartLocation::File,
    };
    let described = region.descriptor();
    let has_key = |rail| described.rail_keys.find(rail, u64::MAX).is_some();
    let rails = domains.iter().enumerate().filter(|(rail, d)| match d.kind().has_nics() {
        true => has_key(*rail as u8),
        false => !d.kind().is_loopback() && (location != PartLocation::File || d.takes_files()),
    });
    let mut transports: Vec<_> = rails.map(|(_, d)| d.kind()).collect();
    transports.dedup();
    SegmentPart {
        at,
        len: described.len,
        key: described.key,
        offset: described.offset,
        rail_keys: described.rail_keys,
        location,
        transports,
    }
}

impl Segment {
    /// The descriptor with which a peer opens the segment.
    pub fn descriptor(&self) -> &SegmentDescriptor {
        &self.descriptor
    }

    /// The parts' regions, in order.
    pub fn regions(&self) -> &[Region] {
        &self.parts.regions
    }

    /// Cuts `len` bytes between `offset` of this segment and `remote_offset` of a peer's into
    /// pieces, for [`Op::WritePieces`] and [`Op::ReadPieces`].
    ///
    /// [`Op::WritePieces`]: crate::engine::Op::WritePieces
    /// [`Op::ReadPieces`]: crate::engine::Op::ReadPieces
    pub fn pieces(
        &self,
        offset: u64,
        (remote, remote_offset): (&RemoteSegment, u64),
        len: u64,
    ) -> Result<Vec<SegmentPiece>> {
        let (here, there) = (&self.parts, &remote.parts);
        let cuts = cut((&here.spans, offset), (&there.spans, remote_offset), len)?;
        let piece = |c: crate::api::PartRange| SegmentPiece {
            local: here.regions[c.local_part].clone(),
            local_offset: c.local_offset,
            remote: there.regions[c.remote_part].clone(),
            remote_offset: c.remote_offset,
            len: c.len,
        };
        Ok(cuts.into_iter().map(piece).collect())
    }
}

impl RemoteSegment {
    pub fn descriptor(&self) -> &SegmentDescriptor {
        &self.descriptor
    }

    /// The engine that owns the segment.
    pub fn peer(&self) -> &super::Peer {
        // `check_parts` refuses a segment without parts.
        self.parts.regions[0].peer()
    }
}
