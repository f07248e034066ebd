//! The paths that the bytes of a request take, so that users can see why it is slow.

use super::{driver::Core, Region, RemoteRegion, Shared, TransferEngine};
use crate::{
    api::TransportKind,
    engine::Op,
    memory::device::{Location, MemoryKind},
    Result,
};

/// The path of one piece of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Path {
    /// Index of the operation within the request.
    pub op: usize,
    /// Whether bytes leave this engine's memory; otherwise they arrive in it.
    pub write: bool,
    pub bytes: u64,
    /// The kind of the local memory.
    pub local: String,
    pub peer: String,
    /// The kind of the remote memory.
    pub remote: String,
    /// The transport in use towards the peer; `None` before the first connection.
    pub transport: Option<TransportKind>,
    /// The path, in words.
    pub description: String,
}

impl TransferEngine {
    /// The path of each piece that a request of these operations is cut into at the ends of
    /// regions. Operations that move no bytes have none.
    pub fn paths(&self, ops: &[Op<'_>]) -> Result<Vec<Path>> {
        for op in ops {
            self.shared.check(op)?;
        }
        let core = self.shared.lock()?;
        let mut paths = Vec::new();
        for (i, op) in ops.iter().enumerate() {
            let mut add = |write, (local, remote): (&Region, &RemoteRegion), bytes| {
                paths.push(path(&core, &self.shared, (i, write, bytes), local, remote));
            };
            match op {
                Op::Write { src, dst, len, .. } => add(true, (src.region, dst.region), *len),
                Op::Read { src, dst, len } => add(false, (dst.region, src.region), *len),
                Op::WritePages { page_len, src, src_pages, dst, .. } => {
                    let bytes = page_len * u64::from(src_pages.indices.len());
                    add(true, (src, dst), bytes);
                }
                Op::ReadPages { page_len, src, src_pages, dst, .. } => {
                    let bytes = page_len * u64::from(src_pages.indices.len());
                    add(false, (dst, src), bytes);
                }
                Op::WritePieces { pieces, .. } => {
                    pieces.iter().for_each(|p| add(true, (&p.local, &p.remote), p.len));
                }
                Op::ReadPieces { pieces } => {
                    pieces.iter().for_each(|p| add(false, (&p.local, &p.remote), p.len));
                }
                Op::Scatter { src, parts, .. } => {
                    parts.iter().for_each(|p| add(true, (src, &p.dst), p.len));
                }
                Op::Barrier { .. } | Op::Send { .. } => {}
            }
        }
        Ok(paths)
    }
}

fn path(
    core: &Core,
    shared: &Shared,
    (op, write, bytes): (usize, bool, u64),
    local: &Region,
    remote: &RemoteRegion,
) -> Path {
    let transport = core.group.kind(remote.peer.key, &core.domains);
    let memory_kind = remote.key.memory_kind();
    let itself = remote.peer.id() == shared.address.id;
    let description = match transport {
        None => "not connected yet".to_owned(),
        Some(kind) if kind.is_loopback() => {
            match local.location().is_host() || is_host(memory_kind) {
                true => "inside this engine, without staging".to_owned(),
                false => "inside this engine, through host memory".to_owned(),
            }
        }
        Some(kind) => {
            let domain = core.domains.iter().find(|d| d.kind() == kind);
            let stages = |key| domain.is_some_and(|d| d.stages(key));
            let here = !local.location().is_host() && stages(local.inner.memory.key);
            let files = local.location().file().is_some() || memory_kind == MemoryKind::File;
            match (here, stages(remote.key)) {
                (false, false) if files && domain.is_some_and(|d| !d.takes_files()) => {
                    format!("none: {kind} takes no files")
                }
                (false, false) => format!("direct over {kind}"),
                (true, false) => format!("over {kind}, staged through host memory here"),
                (false, true) => format!("over {kind}, staged through host memory at the peer"),
                (true, true) => format!("over {kind}, staged through host memory at both ends"),
            }
        }
    };
    let remote_is = match memory_kind {
        MemoryKind::Host | MemoryKind::OwnerOnly => "host",
        MemoryKind::Device | MemoryKind::Exportable => "cuda",
        MemoryKind::File => "file",
    };
    let peer = match itself {
        true => "this engine".to_owned(),
        false => remote.peer.address.label(),
    };
    let (local, remote) = (named(local), remote_is.to_owned());
    Path { op, write, bytes, local, peer, remote, transport, description }
}

fn is_host(memory_kind: MemoryKind) -> bool {
    matches!(memory_kind, MemoryKind::Host | MemoryKind::OwnerOnly)
}

fn named(region: &Region) -> String {
    match region.location() {
        Location::Host | Location::Managed => "host".into(),
        Location::Cuda(range) => format!("cuda:{}", range.device),
        Location::File(file) => format!("file {}", file.name()),
    }
}
