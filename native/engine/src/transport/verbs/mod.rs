//! Links between RDMA NICs through libibverbs. Works with any NIC that has reliable connections.
//!
//! One domain drives one port of one NIC. A link is two queue pairs: one for frames, one for writes
//! and reads. Credits count receive requests, so a peer never finds the receiver not ready.
//! Handshakes go by datagram, or by TCP where datagrams do not get through.

mod accept;
mod address;
mod chain;
mod connect;
mod cq_pool;
mod datagrams;
mod device;
mod discover;
mod events;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod helper_threads;
mod ledger;
mod link;
mod memory;
mod open;
mod post;
mod progress;
mod raw;
mod regions;
mod side_channel;
mod status_text;

use std::{
    collections::HashMap,
    os::fd::{AsRawFd, OwnedFd},
    sync::Arc,
    time::Duration,
};

pub use discover::{discover, version, DeviceReport, GidReport};
pub(crate) use open::open;
use slab::Slab;
use smallvec::smallvec;

use self::{
    accept::AcceptAttempt,
    address::NicAddress,
    connect::{ConnectAttempt, HelperResult},
    cq_pool::CqPool,
    datagrams::Datagrams,
    device::Device,
    helper_threads::{HelperThreads, JobOrigin},
    link::Link,
    progress::ClosingLink,
    regions::{Deregistration, Regions, VerbsPinner},
    side_channel::SideChannel,
};
use crate::{
    api::{Endpoint, EngineAddress, TransportKind},
    domain::{
        Attendance, Caps, Completion, Domain, DomainError, LinkId, LinkName, MessageRoom, NicKeys,
        Pinned, Pinner, Post, Receipts, RegionRelease, Token, WakeFds, WorkRequest,
    },
    memory::RegionMemory,
    time::Time,
    transport::{
        handshake::Credentials,
        log_limit::LogLimit,
        nic::{frame::Exchange, message_channel::MAX_MESSAGE},
    },
};

/// Pages of one work request.
const MAX_PAGES: u32 = 32;

/// The owner of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CompletionKind {
    /// A write or a read.
    Data,
    /// An immediate of the peer.
    Imm,
    /// A local frame, sent.
    FrameSent,
    /// A frame of the peer.
    FrameReceived,
}

const SEQ_MASK: u32 = (1 << 30) - 1;

/// The work id of a request: kind, number, link.
#[inline]
fn work_id(kind: CompletionKind, number: u32, link: LinkId) -> u64 {
    (kind as u64) << 62 | u64::from(number & SEQ_MASK) << 32 | u64::from(link)
}

#[inline]
fn read_work_id(id: u64) -> (CompletionKind, u32, LinkId) {
    let kind = [
        CompletionKind::Data,
        CompletionKind::Imm,
        CompletionKind::FrameSent,
        CompletionKind::FrameReceived,
    ][(id >> 62) as usize];
    (kind, (id >> 32) as u32 & SEQ_MASK, id as u32)
}

/// A link's entry in the table, in any state.
struct LinkEntry {
    id: LinkId,
    state: LinkState,
}

enum LinkState {
    Opening(Box<ConnectAttempt>),
    Accepting(Exchange),
    Up(Box<Link>),
}

/// One port of one NIC; see the module.
pub struct VerbsDomain {
    credentials: Credentials,
    log: LogLimit,
    own_endpoint: u8,
    address: NicAddress,
    /// GIDs of this machine. Peers with one of them run on this host.
    own_gids: Vec<[u8; 16]>,
    peer_timeout: Duration,
    attendance: Attendance,
    slots: Slab<LinkEntry>,
    generation: u32,
    attempts: HashMap<Exchange, LinkId>,
    accepts: HashMap<Exchange, AcceptAttempt>,
    closing: Vec<ClosingLink>,
    failing: Vec<(LinkId, DomainError)>,
    /// Links with something to do in the next poll.
    dirty: Vec<LinkId>,
    /// Links with messages that wait for room.
    awaiting_room: Vec<LinkId>,
    completions: Vec<Completion>,
    helper: HelperThreads<HelperResult>,
    side_channel: SideChannel,
    epoll: OwnedFd,
    // Dropped last, because the fields above depend on them.
    regions: Regions,
    cqs: CqPool,
    datagrams: Datagrams,
    device: Arc<Device>,
    /// Why the device is unusable.
    dead: Option<DomainError>,
    /// Since when this thread has been posting to a software driver.
    posting_since: Option<Time>,
    poll_fds_at: Time,
    tick_at: Time,
    /// Time of the last poll, for posts between polls.
    now: Time,
}

impl std::fmt::Debug for VerbsDomain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "VerbsDomain({}, {} links)", self.device.label(), self.slots.len())
    }
}

/// Time that one call may post to a software driver, which carries out requests within the call.
const MAX_POST_TIME: Duration = Duration::from_millis(20);

const HELPER_DONE: u64 = 1 << 60;
const EVENTS: u64 = HELPER_DONE + 1;
const COMPLETIONS: u64 = HELPER_DONE + 2;
const LISTENER: u64 = 1 << 61;

impl VerbsDomain {
    fn index(id: LinkId) -> usize {
        (id & 0xFFFF) as usize
    }

    fn slot(&mut self, id: LinkId) -> Option<&mut LinkEntry> {
        self.slots.get_mut(Self::index(id)).filter(|s| s.id == id)
    }

    #[inline]
    fn link(&mut self, id: LinkId) -> Option<&mut Link> {
        match self.slots.get_mut(Self::index(id)) {
            Some(LinkEntry { id: known, state: LinkState::Up(link) }) if *known == id => Some(link),
            _ => None,
        }
    }

    fn add_slot(&mut self, state: LinkState) -> Result<LinkId, DomainError> {
        let entry = self.slots.vacant_entry();
        let index = entry.key() as u32;
        if index > 0xFFFF {
            return Err(DomainError::Unavailable("65536 links are open already".into()));
        }
        self.generation = (self.generation + 1) & 0xFFFF;
        let id = self.generation << 16 | index;
        entry.insert(LinkEntry { id, state });
        Ok(id)
    }

    /// Stores a link whose queue pairs are connected.
    fn install_link(&mut self, id: LinkId, link: Link) {
        if let Some(slot) = self.slot(id) {
            slot.state = LinkState::Up(Box::new(link));
            self.mark_dirty(id);
        }
    }

    /// Has the next poll advance a link.
    #[inline]
    fn mark_dirty(&mut self, id: LinkId) {
        if let Some(link) = self.link(id) {
            if !std::mem::replace(&mut link.dirty, true) {
                self.dirty.push(id);
            }
        }
    }

    /// Why a peer's NIC can't be reached, or must not be.
    fn unreachable_reason(&self, remote: &NicAddress) -> Option<String> {
        if !self.credentials.secret.is_token() && !self.own_gids.contains(&remote.gid) {
            return Some(
                "without a token only peers on this host may connect; give all engines the same \
                 token"
                    .into(),
            );
        }
        self.address.unfit(remote)
    }

    /// Posts a work request on a link that is up.
    #[inline]
    fn post_on_link(
        &mut self,
        id: LinkId,
        token: Token,
        wr: &WorkRequest,
    ) -> Result<Post, DomainError> {
        let longest = self.device.limits.max_message;
        let (now, regions) = (self.now, &self.regions);
        let link = match self.slots.get_mut(Self::index(id)) {
            Some(LinkEntry { id: known, state: LinkState::Up(link) }) if *known == id => link,
            _ => return Err(DomainError::LinkDown("the link is down".into())),
        };
        if link.is_failing() {
            return Ok(Post::Full);
        }
        match wr {
            WorkRequest::Write { data, count } => {
                link.write(token, data, *count, (regions, longest))
            }
            WorkRequest::Read { data } => link.read(token, data, (regions, longest)),
            WorkRequest::Prepare { .. } => Ok(Post::Done),
            WorkRequest::Count(count) => link.count(token, *count),
            WorkRequest::Send(message) if message.len() > MAX_MESSAGE => {
                Err(DomainError::Refused(format!("a message is {MAX_MESSAGE} bytes at most")))
            }
            WorkRequest::Send(message) => match link.channel.submit(token, message) {
                true => {
                    // The message stays in the channel, and ends with the link.
                    let sent = link.send_frames(now);
                    self.failing.extend(sent.err().map(|e| (id, e)));
                    Ok(Post::Queued)
                }
                false => Ok(Post::Full),
            },
        }
    }
}

impl Domain for VerbsDomain {
    fn kind(&self) -> TransportKind {
        TransportKind::Verbs
    }

    fn device(&self) -> &str {
        &self.device.chosen.device
    }

    fn is_rdma(&self) -> bool {
        true
    }

    fn caps(&self) -> Caps {
        let limits = &self.device.limits;
        let max_bytes = limits.max_message.min(limits.max_mr);
        Caps { max_bytes, max_pages: MAX_PAGES, max_message: MAX_MESSAGE }
    }

    fn endpoint(&self) -> Endpoint {
        Endpoint { transport: TransportKind::Verbs, data: self.address.encode() }
    }

    fn announce(&mut self, own: &EngineAddress) {
        let mine = self.address.encode();
        let at = own.endpoints_of(TransportKind::Verbs).find(|i| own.endpoints[*i].data == mine);
        self.own_endpoint = at.unwrap_or_default() as u8;
        self.credentials.own = own.clone();
    }

    fn pinner(&self) -> Option<Arc<dyn Pinner>> {
        Some(Arc::new(VerbsPinner(Arc::clone(&self.device))))
    }

    fn register(
        &mut self,
        region: &Arc<RegionMemory>,
        pinned: Option<Pinned>,
    ) -> Result<NicKeys, DomainError> {
        self.regions.add(&self.device, region, pinned)
    }

    fn deregister(&mut self, index: u32) -> RegionRelease {
        match self.regions.remove(index) {
            Deregistration::Done => RegionRelease::Now,
            Deregistration::Deferred(region) => {
                self.helper.run(JobOrigin::Local, move || {
                    HelperResult::RegionReleased(index, region.release())
                });
                RegionRelease::Later
            }
            Deregistration::Failed => RegionRelease::Later,
        }
    }

    fn unfit(&self, peer: &EngineAddress) -> Option<String> {
        if let Some(cause) = &self.dead {
            return Some(cause.to_string());
        }
        let mut why = None;
        for endpoint in peer.endpoints_of(TransportKind::Verbs) {
            let unfit = match NicAddress::of(peer, endpoint) {
                Ok(remote) => self.unreachable_reason(&remote),
                Err(e) => Some(e.to_string()),
            };
            match unfit {
                None => return None,
                Some(reason) => why = Some(reason),
            }
        }
        Some(why.unwrap_or_else(|| "the peer does not offer verbs".into()))
    }

    fn connect(
        &mut self,
        now: Time,
        peer: &EngineAddress,
        endpoint: usize,
    ) -> Result<LinkId, DomainError> {
        if let Some(cause) = &self.dead {
            return Err(cause.clone());
        }
        self.now = now;
        self.tick_at = Time(0);
        self.start_connect(now, peer, endpoint)
    }

    fn end_unused(&mut self, name: LinkName, cause: &str) -> bool {
        let unused =
            |s: &LinkEntry| matches!(&s.state, LinkState::Up(l) if l.name == name && !l.announced);
        let found = self.slots.iter().find(|(_, s)| unused(s)).map(|(_, s)| s.id);
        found.into_iter().for_each(|id| self.disconnect(id, cause));
        found.is_some()
    }

    fn receipts(&self) -> Receipts {
        Receipts::InOrder
    }

    fn send_group_frame(&mut self, link: LinkId, frame: Vec<u8>) {
        if let Some(l) = self.link(link) {
            l.channel.send_group_frame(frame);
            self.mark_dirty(link);
        }
    }

    fn disconnect(&mut self, link: LinkId, cause: &str) {
        self.failing.push((link, DomainError::LinkDown(cause.to_owned())));
    }

    fn begin_request(&mut self) {
        self.posting_since = None;
    }

    #[inline]
    fn post(&mut self, id: LinkId, token: Token, wr: &WorkRequest) -> Result<Post, DomainError> {
        if self.device.limits.software {
            let now = Time::now();
            if now.since(*self.posting_since.get_or_insert(now)) > MAX_POST_TIME {
                // The next poll sends heartbeats; the rest is posted after it.
                return Ok(Post::Full);
            }
        }
        let first = self.link(id).map(|l| l.ledger.next());
        let mut posted = self.post_on_link(id, token, wr);
        if let Err(e @ (DomainError::Io { .. } | DomainError::LinkDown(_))) = &posted {
            self.failing.push((id, e.clone()));
            // The NIC may have taken a part. The token then ends with this link, before another
            // link carries it.
            let link = self.link(id);
            if link.zip(first).is_some_and(|(l, first)| l.ledger.enter_partial(token, first)) {
                posted = Ok(Post::Queued);
            }
        }
        // `flush`, or the next poll, posts the read that flushes uncounted writes.
        if matches!(wr, WorkRequest::Write { count: None, .. }) {
            self.mark_dirty(id);
        }
        posted
    }

    fn poll(&mut self, now: Time, room: &dyn MessageRoom, out: &mut Vec<Completion>) -> bool {
        self.posting_since = None;
        self.progress(now, room, out)
    }

    fn flush(&mut self) {
        for i in 0..self.dirty.len() {
            let id = self.dirty[i];
            if let Some(Err(e)) = self.link(id).map(Link::post_flush_read) {
                self.failing.push((id, e));
            }
        }
    }

    fn arm(&mut self) -> bool {
        self.arm_events()
    }

    fn disarm(&mut self) {
        self.poll_fds_at = Time(0);
    }

    fn wake_fds(&self) -> WakeFds {
        smallvec![self.epoll.as_raw_fd()]
    }

    fn next_timer(&self) -> Time {
        self.next_deadline()
    }

    fn describe(&self, id: LinkId) -> String {
        let here = self.address.label();
        let gid = self.device.chosen.gid_index;
        match self.slots.get(Self::index(id)).filter(|s| s.id == id).map(|s| &s.state) {
            Some(LinkState::Up(l)) => format!(
                "{here}, gid {gid}, to {}; mtu {}, retries end within {:?}",
                l.remote.label(),
                address::mtu_bytes(l.mtu),
                self.peer_timeout
            ),
            _ => format!("{here}: connecting"),
        }
    }

    fn close(&mut self) {
        self.close_all();
    }
}
