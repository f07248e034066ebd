//! The hardware seam: one NIC or link, driven by one thread at a time.
//!
//! A domain moves work requests and reports completions. It knows nothing of requests, retries or
//! counters, and promises nothing about order.

mod attendance;
mod completed_numbers;
mod peer_mapping;

use std::{any::Any, fmt, sync::Arc};

pub use crate::error::DomainError;
pub(crate) use attendance::{excuse, Attendance};
pub use completed_numbers::CompletedNumbers;
pub(crate) use peer_mapping::KeepAlive;
pub use peer_mapping::{PeerMapping, StoreGuard};
use smallvec::SmallVec;

use crate::{
    api::{
        Endpoint, EngineAddress, EngineId, IndexList, RailKey, RailKeys, RegionKey, TransportKind,
    },
    memory::RegionMemory,
    time::Time,
};

/// Identifies a connection within one domain. It is never reused after its `LinkDown`.
pub type LinkId = u32;

/// The name of a connection at both ends: random, and part of its handshake.
pub type LinkName = u64;

/// Identifies posted work in its completion. A domain does not interpret it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Token {
    pub slot: u32,
    pub serial: u32,
    pub part: u32,
}

/// Limits of one work request of a domain.
#[derive(Clone, Copy, Debug)]
pub struct Caps {
    /// Longest contiguous range, bytes.
    pub max_bytes: u64,
    /// Most pages of one work request.
    pub max_pages: u32,
    /// Longest message, bytes.
    pub max_message: usize,
}

/// Start offsets of the pages of a work request, in bytes from a base.
#[derive(Clone, Debug)]
pub enum Seq {
    Strided { offset: u64, stride: u64 },
    Indexed { list: Arc<IndexList>, from: u32, offset: u64, stride: u64 },
}

impl Seq {
    pub fn at(offset: u64) -> Self {
        Self::Strided { offset, stride: 0 }
    }

    #[inline]
    pub fn nth(&self, i: u32) -> u64 {
        match self {
            Self::Strided { offset, stride } => offset + u64::from(i) * stride,
            Self::Indexed { list, from, offset, stride } => {
                offset + u64::from(list.indices[(from + i) as usize]) * stride
            }
        }
    }

    /// The same sequence, `pages` pages and `bytes` bytes further on.
    pub fn advanced(&self, pages: u32, bytes: u64) -> Self {
        match self {
            Self::Strided { offset, stride } => Self::Strided {
                offset: offset + u64::from(pages) * stride + bytes,
                stride: *stride,
            },
            Self::Indexed { list, from, offset, stride } => Self::Indexed {
                list: Arc::clone(list),
                from: from + pages,
                offset: offset + bytes,
                stride: *stride,
            },
        }
    }
}

/// The start of a local region, as a plain number. Only a domain that can show that the region is
/// still registered dereferences it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct LocalAddr(pub usize);

impl fmt::Debug for LocalAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// `pages` pages of `page_len` bytes each, between local memory and a peer's region.
///
/// The engine has checked the bounds of both regions. Software transports check the remote bounds
/// again where the bytes land (MR-3).
#[derive(Clone, Debug)]
pub struct Data {
    pub local: LocalAddr,
    /// The registration that `local` lies in.
    pub local_region: u32,
    pub local_seq: Seq,
    pub remote: RegionKey,
    pub remote_keys: RailKeys,
    pub remote_seq: Seq,
    pub page_len: u64,
    pub pages: u32,
}

impl Data {
    pub fn bytes(&self) -> u64 {
        self.page_len * u64::from(self.pages)
    }
}

/// A small contiguous write within checked bounds, as plain values.
#[derive(Clone, Copy, Debug)]
pub struct SmallWrite {
    /// The first byte.
    pub local: LocalAddr,
    /// The registration that `local` lies in.
    pub local_region: u32,
    pub remote: RegionKey,
    /// Offset in the peer's registration, bytes.
    pub remote_offset: u64,
    /// Bytes; at least 1.
    pub len: u64,
}

/// `n` logical writes arrived for counter `imm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count {
    pub imm: u32,
    pub n: u32,
}

/// Work that a domain carries out on one link.
#[derive(Clone, Debug)]
pub enum WorkRequest {
    /// A write. The peer sees its count only after every byte is readable there (IC-2). A write
    /// without a count is done only when its bytes are readable at the peer, because the count of a
    /// cut write may then take another link.
    Write {
        data: Data,
        count: Option<Count>,
    },
    Read {
        data: Data,
    },
    /// Prepares everything that a write of `data` needs. No byte moves.
    Prepare {
        data: Data,
    },
    Count(Count),
    Send(Arc<[u8]>),
}

impl WorkRequest {
    /// Bytes that move between the memories of both sides.
    #[inline]
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Write { data, .. } | Self::Read { data } => data.bytes(),
            Self::Prepare { .. } | Self::Count(_) | Self::Send(_) => 0,
        }
    }

    /// The count that it adds at the peer.
    #[inline]
    pub fn count(&self) -> Option<Count> {
        match self {
            Self::Write { count, .. } => *count,
            Self::Count(count) => Some(*count),
            Self::Read { .. } | Self::Prepare { .. } | Self::Send(_) => None,
        }
    }
}

/// The result of posting a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Post {
    /// The work is done. No completion follows.
    Done,
    /// A `Completion::Done` with its token follows.
    Queued,
    /// The link has no room, and nothing happened. Try again after the next poll that progresses.
    Full,
}

/// The counts that arrived over a lost link, as one end knows them. Every variant but `Unknown`
/// promises that nothing of the peer can land over the link any more (MR-1).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Receipt {
    /// Unknown: work that was under way must not be sent again.
    #[default]
    Unknown,
    /// The number of writes with a count that arrived: the first ones in posting order, no others.
    InOrder(u64),
    /// The work requests that arrived, by their numbers on the link. No others arrived in part.
    Numbered(CompletedNumbers),
}

/// The kind of receipt with which a domain's links end, if they can be lost while the peer lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Receipts {
    None,
    InOrder,
    Numbered,
}

/// The peer at the other end of a link, as the handshake proved.
#[derive(Clone, Debug)]
pub struct PeerIdentity {
    pub address: EngineAddress,
    /// The newest wire version of both sides; `None` for links within a process.
    pub version: Option<u16>,
}

impl PeerIdentity {
    pub fn id(&self) -> EngineId {
        self.address.id
    }
}

/// An event that a poll of a domain reports.
#[derive(Debug)]
pub enum Completion {
    Done {
        link: LinkId,
        token: Token,
        result: Result<(), DomainError>,
    },
    Count(Count),
    Message {
        link: LinkId,
        message: Box<[u8]>,
    },
    /// A link is up and its `peer` is authentic. Also reported for links that the peer began.
    LinkUp {
        link: LinkId,
        peer: PeerIdentity,
        /// Index of the peer's endpoint at the other end.
        endpoint: usize,
        name: LinkName,
        description: String,
    },
    /// A link is down. Every token of it has completed and every count was reported before this.
    LinkDown {
        link: LinkId,
        cause: DomainError,
        receipt: Receipt,
        /// The numbers by which the peer's receipt names work under way; empty if it has no
        /// numbers.
        unfinished: Vec<(Token, u64)>,
    },
    /// An accepted link has ended before it was up here. Nothing can land over it any more.
    Unused {
        peer: PeerIdentity,
        name: LinkName,
        receipt: Receipt,
    },
    /// A frame of the peer's group for the local group.
    GroupFrame {
        link: LinkId,
        frame: Vec<u8>,
    },
    /// No peer can reach this region through this domain any more (MR-1).
    RegionReleased {
        index: u32,
    },
}

/// When no peer can reach a deregistered region any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionRelease {
    Now,
    /// A `RegionReleased` reports it.
    Later,
}

/// Whether an incoming message is accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admit {
    Take,
    /// The receive pool is full: keep the message, and let nothing else wait behind it.
    Wait,
    /// The message never fits: the domain refuses it to its sender.
    TooLong {
        limit: usize,
    },
}

/// The receive pool, as domains see it: admits messages.
pub trait MessageRoom {
    fn admit(&self, len: usize) -> Admit;
}

/// Work that a waiting thread may do without the group's lock.
pub trait Assist: Send + Sync {
    /// Does some work, for some hundred microseconds at most; false if there was none.
    fn assist(&self) -> bool;
}

/// Pins memory for a NIC, on any thread and without the group's lock. Pinning tens of gigabytes
/// takes seconds, during which heartbeats must be sent.
pub trait Pinner: Send + Sync {
    fn pin(&self, region: &Arc<RegionMemory>) -> Result<Pinned, DomainError>;
}

/// Memory that a domain's pinner has pinned. Dropping it unpins the memory.
pub type Pinned = Box<dyn Any + Send>;

/// One NIC's keys of a registration.
pub type NicKeys = SmallVec<[RailKey; 1]>;

/// Longest frame between groups, bytes.
pub const MAX_GROUP_FRAME: usize = 2048;

/// File descriptors that become readable when a poll will find something.
pub type WakeFds = SmallVec<[std::os::fd::RawFd; 2]>;

/// One NIC or one kind of link. See the module.
pub trait Domain: Send {
    fn kind(&self) -> TransportKind;

    /// The NIC's name; empty where there is none.
    fn device(&self) -> &str {
        ""
    }

    /// Whether a NIC places the bytes, without the peer's CPU.
    fn is_rdma(&self) -> bool {
        false
    }

    fn caps(&self) -> Caps;

    /// The endpoint to which peers connect; part of the engine's address.
    fn endpoint(&self) -> Endpoint;

    /// Tells the engine's own address. Called once, before any link exists.
    fn announce(&mut self, own: &EngineAddress);

    /// The pinner that the engine calls before `register`, if there is one.
    fn pinner(&self) -> Option<Arc<dyn Pinner>> {
        None
    }

    /// Makes a region reachable for authenticated peers that hold its key. Returns the NIC's own
    /// keys; the caller fills in their `rail`. `pinned` is the result of this domain's pinner.
    fn register(
        &mut self,
        region: &Arc<RegionMemory>,
        pinned: Option<Pinned>,
    ) -> Result<NicKeys, DomainError>;

    fn deregister(&mut self, index: u32) -> RegionRelease;

    /// The reason why a deregistered region is not released, as text; `None` if unknown.
    fn waits_for(&self, _index: u32) -> Option<String> {
        None
    }

    /// Why this domain can't reach a peer, by its address alone; `None` if it may try.
    fn unfit(&self, peer: &EngineAddress) -> Option<String>;

    /// Connects to one of the peer's endpoints. `LinkUp` or `LinkDown` follows.
    fn connect(
        &mut self,
        now: Time,
        peer: &EngineAddress,
        endpoint: usize,
    ) -> Result<LinkId, DomainError>;

    /// Drops a link. Its outstanding work completes with an error, then `LinkDown` follows.
    fn disconnect(&mut self, link: LinkId, cause: &str);

    /// Ends an accepted link of this name that its initiator has not used yet. `Unused` follows.
    /// False if there is no such link.
    fn end_unused(&mut self, _name: LinkName, _cause: &str) -> bool {
        false
    }

    /// The receipts with which its links end. Without receipts, work under way on a lost link
    /// fails.
    fn receipts(&self) -> Receipts {
        Receipts::None
    }

    /// Sends a frame of at most [`MAX_GROUP_FRAME`] bytes beside the link's traffic, in order.
    /// Messages that wait for room don't delay it. The frame is lost if the link goes down.
    fn send_group_frame(&mut self, _link: LinkId, _frame: Vec<u8>) {}

    /// A request begins. A domain that moves bytes itself gets a new time budget. `flush` follows
    /// once all of the request is posted.
    fn begin_request(&mut self) {}

    fn post(&mut self, link: LinkId, token: Token, wr: &WorkRequest) -> Result<Post, DomainError>;

    /// Carries out small writes and then their count within the call, and wakes the peer unless a
    /// request has begun: done, or queued if the peer may have left before it took the count.
    /// `None` if it can't: nothing is counted, and the caller posts each write, some of whose bytes
    /// may have been copied.
    #[inline]
    fn write_small(
        &mut self,
        _link: LinkId,
        _token: Token,
        _writes: &[SmallWrite],
        _count: Option<Count>,
    ) -> Option<Post> {
        None
    }

    /// Advances all links and reports events; false if nothing happened.
    fn poll(&mut self, now: Time, room: &dyn MessageRoom, out: &mut Vec<Completion>) -> bool;

    /// Sends frames that were collected (acknowledgements, small frames), and wakes peers.
    fn flush(&mut self) {}

    /// Whether a link has work that waits for a disk or a copy engine, which does not count as a
    /// stall.
    fn is_staging(&self, _link: LinkId) -> bool {
        false
    }

    /// Whether bytes of a region with this key pass through host memory.
    fn stages(&self, _key: RegionKey) -> bool {
        false
    }

    /// Maps a peer's region for direct stores by GPU `by` of this process, or by its CPUs. Earlier
    /// work must have named the region, and the link must be up.
    ///
    /// # Errors
    /// The reason, as text.
    fn map_peer_region(
        &mut self,
        _link: LinkId,
        _key: RegionKey,
        _by: Option<i32>,
    ) -> Result<Arc<PeerMapping>, String> {
        Err(format!("{} has no memory of the peer's within reach", self.kind()))
    }

    /// Whether it accepts regions that lie in files and have no address.
    fn takes_files(&self) -> bool {
        false
    }

    /// Prepares to sleep: from now on `wake_fds` fire. False if there is something to do already.
    fn arm(&mut self) -> bool;

    /// The thread is awake again, and peers need not signal.
    fn disarm(&mut self);

    fn wake_fds(&self) -> WakeFds {
        WakeFds::new()
    }

    /// When `poll` must be called next even if nothing happens.
    fn next_timer(&self) -> Time {
        Time::NEVER
    }

    fn assistant(&self) -> Option<Arc<dyn Assist>> {
        None
    }

    /// Describes a link, for `explain`.
    fn describe(&self, link: LinkId) -> String;

    /// Ends all links, and tells the peers.
    fn close(&mut self);

    /// After `close`: whether a peer may still reach a region, so that its memory is never freed
    /// (MR-1).
    fn keeps(&self, _index: u32) -> bool {
        false
    }
}
