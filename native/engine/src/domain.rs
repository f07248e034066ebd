//! The hardware seam: one NIC or link, driven by one thread at a time.
//!
//! A domain moves work requests and reports completions. It knows nothing of requests, retries or
//! counters, and promises nothing about order.

mod peer_mapping;
mod completed_numbers;

use std::{any::Any, fmt, sync::Arc};

pub use crate::error::DomainError;
pub(crate) use peer_mapping::KeepAlive;
pub use peer_mapping::{PeerMapping, StoreGuard};
pub use completed_numbers::CompletedNumbers;
use smallvec::SmallVec;

use crate::{
    api::{
        Endpoint, EngineAddress, EngineId, IndexList, RailKey, RailKeys, RegionKey, TransportKind,
    },
    memory::RegionMemory,
    time::Time,
};

/// Names a connection within one domain; never used again after its `LinkDown`.
pub type LinkId = u32;

/// What both ends of a connection call it: drawn anew for each, and part of its handshake.
pub type LinkName = u64;

/// Comes back with the completion of what was posted under it; means nothing to a domain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Token {
    pub slot: u32,
    pub serial: u32,
    pub part: u32,
}

/// What a domain can do with one work request.
#[derive(Clone, Copy, Debug)]
pub struct Caps {
    /// Bytes of one contiguous piece.
    pub max_bytes: u64,
    /// Pages of one work request.
    pub max_pages: u32,
    /// Bytes of one message.
    pub max_message: usize,
}

/// Where the pieces of a work request begin, as byte offsets from some base.
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

/// The start of a local region. A plain number: it is dereferenced only where a domain can show
/// that the region behind it is still registered.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct LocalAddr(pub usize);

impl fmt::Debug for LocalAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// `pages` pieces of `page_len` bytes each, between local memory and a peer's region.
///
/// Bounds were checked against both regions before this was made; software transports check the
/// remote side again where the bytes land (MR-3).
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

/// `n` logical writes arrived for counter `imm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count {
    pub imm: u32,
    pub n: u32,
}

#[derive(Clone, Debug)]
pub enum WorkRequest {
    /// The count, if any, is seen by the peer only after every byte is readable there (IC-2). A
    /// write without a count is done only when its bytes are readable at the peer: the count of a
    /// write that was cut may then go another way.
    Write {
        data: Data,
        count: Option<Count>,
    },
    Read {
        data: Data,
    },
    /// Everything that a write of `data` will need is made ready; no byte moves.
    Prepare {
        data: Data,
    },
    Count(Count),
    Send(Arc<[u8]>),
}

/// What became of a posted work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Post {
    /// It has been carried out; no completion will follow.
    Done,
    /// A `Completion::Done` with its token will follow.
    Queued,
    /// No room; nothing happened. Try again after the next poll that makes progress.
    Full,
}

/// What an end of a link that is down knows of the counts that came over it. Anything but `Unknown` is a
/// promise that nothing of the peer's can land by that link any more (MR-1).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Receipt {
    /// It can't be told: what was under way must not be sent again.
    #[default]
    Unknown,
    /// The peer's first so many writes with a count, in the order in which they were posted, and no
    /// others.
    InOrder(u64),
    /// These work requests, by the numbers that the link gave them, and no others in part or whole.
    Numbered(CompletedNumbers),
}

/// Which receipts a domain's links end with, if they can be lost while their peer lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Receipts {
    None,
    InOrder,
    Numbered,
}

/// Who is at the other end of a link, as its handshake proved.
#[derive(Clone, Debug)]
pub struct PeerIdentity {
    pub address: EngineAddress,
    /// The newest wire version that both sides speak; `None` where nothing goes over a wire.
    pub version: Option<u16>,
}

impl PeerIdentity {
    pub fn id(&self) -> EngineId {
        self.address.id
    }
}

/// What a poll of a domain reports.
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
    /// The handshake is over; `peer` is authentic. Also for links that the peer began.
    LinkUp {
        link: LinkId,
        peer: PeerIdentity,
        /// Which endpoint of the peer's address is at the other end.
        endpoint: usize,
        name: LinkName,
        description: String,
    },
    /// Every token of this link has been completed, and every count reported, before this.
    LinkDown {
        link: LinkId,
        cause: DomainError,
        receipt: Receipt,
        /// By which numbers the peer's receipt names what was under way; empty where it names none.
        unfinished: Vec<(Token, u64)>,
    },
    /// A link that this peer began was accepted, never was up here, and has ended: nothing can land by it any
    /// more.
    Unused {
        peer: PeerIdentity,
        name: LinkName,
        receipt: Receipt,
    },
    /// What the peer's group has to say to ours.
    GroupFrame {
        link: LinkId,
        frame: Vec<u8>,
    },
    /// No peer can reach this region through this domain any more (MR-1).
    RegionReleased {
        index: u32,
    },
}

/// Whether a region is unreachable at once, or a `RegionReleased` will say when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionRelease {
    Now,
    Later,
}

/// Whether an incoming message may be handed up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admit {
    Take,
    /// No place in the receive pool: keep it back, and let nothing else wait behind it.
    Wait,
    /// It will never fit: tell its sender.
    TooLong {
        limit: usize,
    },
}

/// The receive pool, as domains see it.
pub trait MessageRoom {
    fn admit(&self, len: usize) -> Admit;
}

/// Work that any thread which waits anyway may do, without the group's lock.
pub trait Assist: Send + Sync {
    /// Does one piece, bounded to some hundred microseconds; false if there was none.
    fn assist(&self) -> bool;
}

/// Makes memory known to a NIC, by any thread and without the group's lock: to pin tens of gigabytes
/// takes seconds, in which heartbeats must leave.
pub trait Pinner: Send + Sync {
    fn pin(&self, region: &Arc<RegionMemory>) -> Result<Pinned, DomainError>;
}

/// What a domain's own pinner has made. Unpins when it is dropped.
pub type Pinned = Box<dyn Any + Send>;

/// One NIC's keys of a registration.
pub type NicKeys = SmallVec<[RailKey; 1]>;

/// Bytes of a frame between groups.
pub const MAX_GROUP_FRAME: usize = 2048;

/// File descriptors whose readiness means that a poll will find something.
pub type WakeFds = SmallVec<[std::os::fd::RawFd; 2]>;

pub trait Domain: Send {
    fn kind(&self) -> TransportKind;

    /// The NIC's name; empty where there is none.
    fn device(&self) -> &str {
        ""
    }

    /// Whether bytes are placed by a NIC, without the peer's processor.
    fn is_rdma(&self) -> bool {
        false
    }

    fn caps(&self) -> Caps;

    /// Where peers connect; part of the engine's address.
    fn endpoint(&self) -> Endpoint;

    /// Called once, when all endpoints of the engine are known and before any link exists.
    fn announce(&mut self, own: &EngineAddress);

    /// The registering engine has this make the memory ready first, if there is one.
    fn pinner(&self) -> Option<Arc<dyn Pinner>> {
        None
    }

    /// Makes a region reachable for authenticated peers that hold its key, and returns what its NIC
    /// must be shown besides (`rail` is filled in by the caller). `pinned` is what this domain's
    /// pinner made of the region.
    fn register(
        &mut self,
        region: &Arc<RegionMemory>,
        pinned: Option<Pinned>,
    ) -> Result<NicKeys, DomainError>;

    fn deregister(&mut self, index: u32) -> RegionRelease;

    /// What a region that was deregistered and isn't quiet waits for, in words; `None` where nothing more is
    /// known than that it waits.
    fn waits_for(&self, _index: u32) -> Option<String> {
        None
    }

    /// Why this domain won't even try to reach that peer, if so; decided from the address alone.
    fn unfit(&self, peer: &EngineAddress) -> Option<String>;

    /// Begins a connection to one of the peer's endpoints; `LinkUp` or `LinkDown` follows.
    fn connect(
        &mut self,
        now: Time,
        peer: &EngineAddress,
        endpoint: usize,
    ) -> Result<LinkId, DomainError>;

    /// Drops a link. Its outstanding work is completed with an error; then `LinkDown` follows.
    fn disconnect(&mut self, link: LinkId, cause: &str);

    /// Ends a link of this name that was accepted and waits for its initiator to use it first; `Unused`
    /// follows. False if there is none.
    fn end_unused(&mut self, _name: LinkName, _cause: &str) -> bool {
        false
    }

    /// What its links end with. Without receipts, what a lost link had under way fails.
    fn receipts(&self) -> Receipts {
        Receipts::None
    }

    /// Sends a frame of at most [`MAX_GROUP_FRAME`] bytes beside the link's traffic, in order, not held up
    /// by messages that wait for room; forgotten if the link is going down.
    fn send_group_frame(&mut self, _link: LinkId, _frame: Vec<u8>) {}

    /// A new request begins: a domain that moves bytes itself may spend its time per call anew.
    /// `flush` follows when all of the request was posted.
    fn begin_request(&mut self) {}

    fn post(&mut self, link: LinkId, token: Token, wr: &WorkRequest) -> Result<Post, DomainError>;

    /// Moves things on and reports what happened; false if nothing did.
    fn poll(&mut self, now: Time, room: &dyn MessageRoom, out: &mut Vec<Completion>) -> bool;

    /// Pushes out what was held back to be sent in one go (acknowledgements, small frames), and wakes peers.
    fn flush(&mut self) {}

    /// Whether a link has work that waits for a disk or a copy engine: it is slow for no fault of its own.
    fn is_staging(&self, _link: LinkId) -> bool {
        false
    }

    /// Whether bytes of a region with this key take a detour through host memory.
    fn stages(&self, _key: RegionKey) -> bool {
        false
    }

    /// Where a device stores to a peer's region by itself: a GPU of this process, or its processors. Of a region that
    /// work has named before, on a link that is up.
    ///
    /// # Errors
    /// Why it can't, in words.
    fn map_peer_region(
        &mut self,
        _link: LinkId,
        _key: RegionKey,
        _by: Option<i32>,
    ) -> Result<Arc<PeerMapping>, String> {
        Err(format!("{} has no memory of the peer's within reach", self.kind()))
    }

    /// Whether it takes memory that has no address and lies in a file.
    fn takes_files(&self) -> bool {
        false
    }

    /// Gets ready to sleep: from now on `wake_fds` fire. False if there is something to do already.
    fn arm(&mut self) -> bool;

    /// The thread is awake again; peers need not signal.
    fn disarm(&mut self);

    fn wake_fds(&self) -> WakeFds {
        WakeFds::new()
    }

    /// When `poll` wants to be called next even if nothing happens.
    fn next_timer(&self) -> Time {
        Time::NEVER
    }

    fn assistant(&self) -> Option<Arc<dyn Assist>> {
        None
    }

    /// A sentence about a link, for `explain`.
    fn describe(&self, link: LinkId) -> String;

    /// Ends all links in good order, telling the peers.
    fn close(&mut self);
}
