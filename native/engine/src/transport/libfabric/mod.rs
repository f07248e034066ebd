//! Links over libfabric: reliable unconnected endpoints, one for each NIC. Meant for `efa`; the
//! same code drives the `tcp`, `shm` and layered providers.
//!
//! Nothing relies on the order of arrival: every page carries its own immediate, fragments and
//! credits are counted, and a write is done once the provider reports delivery
//! (`FI_DELIVERY_COMPLETE`).

mod access_check;
mod address;
mod address_vector;
mod deferred_close;
mod delivery;
mod discover;
mod frames;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod gpu;
mod handshake;
mod info;
mod library;
mod link;
mod ops;
mod poll;
mod post;
mod raw;
mod read_buffers;
mod regions;
mod shuffle;
mod slots;
mod teardown;

pub use discover::{discover, version, NicReport};

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use fabric_sys::libfabric::{mode, mr_mode};
use slab::Slab;

use crate::{
    api::{Endpoint, EngineAddress, EngineConfig, EngineId, TransportKind},
    domain::{
        Attendance, Caps, Completion, Domain, DomainError, LinkId, MessageRoom, NicKeys, Pinned,
        Post, RegionRelease, Token, WakeFds, WorkRequest,
    },
    memory::RegionMemory,
    time::Time,
    transport::{
        handshake::{Credentials, Secret},
        log_limit::LogLimit,
        nic::{frame::Exchange, handshake_fragments::Reassembly, message_channel},
        nics::AffinityGuard,
    },
};
use address::EndpointAddress;
use address_vector::AddressVector;
use handshake::HandshakeState;
use info::{Offer, OwnedInfo};
use library::Api;
use link::Link;
use ops::ContextTable;
use poll::Event;
use post::PartialPost;
use raw::Nic;
use regions::Regions;
use shuffle::Shuffle;
use slots::Slots;

/// Upper bounds of a domain's receive slots, transmit slots, and chunks under way.
const RECEIVES: usize = 512;
const TRANSMITS: usize = 64;
const CHUNKS: usize = 1024;
/// Pages of one work request.
const PAGES: u32 = 16;
/// Bytes of one chunk. Longer ones would delay heartbeats.
const CHUNK_BYTES: u64 = 32 << 20;
/// Interval of the timer that handles counters, handshakes and heartbeats.
const TICK: Duration = Duration::from_millis(1);
/// Interval between polls of a provider without a wait descriptor: at first, and when idle.
const MIN_IDLE_POLL: Duration = Duration::from_micros(50);
const MAX_IDLE_POLL: Duration = Duration::from_millis(1);

/// A link's entry, reserved as soon as a connect begins.
enum LinkEntry {
    Reserved,
    Up(Box<Link>),
}

/// One endpoint of one NIC; see the module.
pub struct LibfabricDomain {
    offer: Offer,
    credentials: Credentials,
    log: LogLimit,
    /// This endpoint's index in the engine's address.
    own_endpoint: usize,
    own_address: EndpointAddress,
    nic: Option<Nic>,
    table: ContextTable,
    rx: Slots,
    tx: Slots,
    scratch: Slots,
    regions: Regions,
    addresses: AddressVector,
    links: Slab<LinkEntry>,
    generation: u32,
    /// Handshakes by exchange, and whether this side is the initiator.
    handshakes: HashMap<(Exchange, bool), HandshakeState>,
    /// Hellos of which fragments are missing, with their deadline.
    strangers: Vec<(Exchange, Reassembly, Time)>,
    /// Handshake fragments that wait for the provider, with their destination.
    outbox: VecDeque<(usize, Vec<u8>)>,
    /// Work requests that are posted in part.
    partial_posts: VecDeque<PartialPost>,
    /// Work requests that wait for the peer's answer to an access query.
    parked: HashMap<u32, PartialPost>,
    queries_first: bool,
    /// Whether a link has been up.
    warm: bool,
    /// Whether new handshakes are refused.
    closing: bool,
    /// Receive slots that the provider had no room for.
    unposted: Vec<u32>,
    events: Vec<Event>,
    /// Buffer of the frame that is being read.
    frame: Vec<u8>,
    shuffle: Option<Shuffle<Event>>,
    completions: Vec<Completion>,
    peer_timeout: Duration,
    now: Time,
    tick_at: Time,
    attendance: Attendance,
    idle_poll: Duration,
    next_idle_poll: Time,
}

impl std::fmt::Debug for LibfabricDomain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let links = self.links.len();
        write!(
            f,
            "LibfabricDomain({} of {}, {links} links)",
            self.offer.domain, self.offer.provider
        )
    }
}

/// Opens one domain for each chosen NIC.
pub(crate) fn open(
    id: EngineId,
    config: &EngineConfig,
) -> Result<Vec<Box<dyn Domain>>, DomainError> {
    let api = library::get()?;
    let secret = config.token.as_ref().is_some_and(|t| !t.is_empty());
    let chosen = discover::choose(&api, &config.nics, secret)?;
    // Allocates queues on the NICs' NUMA node.
    let devices: Vec<String> = chosen.iter().map(|i| i.offer.domain.clone()).collect();
    let _near = AffinityGuard::near(&devices);
    let mut domains: Vec<Box<dyn Domain>> = Vec::new();
    for (rail, info) in chosen.into_iter().enumerate() {
        let name = format!("{} ({})", info.offer.domain, info.offer.provider);
        let domain = LibfabricDomain::open(api, info, id, config, rail)
            .map_err(|e| DomainError::Unavailable(format!("{name}: {e}")))?;
        domains.push(Box::new(domain));
    }
    Ok(domains)
}

fn closed() -> DomainError {
    DomainError::LinkDown("its engine was closed".into())
}

fn random() -> u64 {
    let mut bytes = [0; 8];
    // An engine can't open on a machine without a random source.
    let _ = getrandom::fill(&mut bytes);
    u64::from_le_bytes(bytes)
}

impl LibfabricDomain {
    fn open(
        api: Api,
        info: OwnedInfo,
        id: EngineId,
        config: &EngineConfig,
        rail: usize,
    ) -> Result<Self, DomainError> {
        let offer = info.offer.clone();
        let receives = offer.rx_size.clamp(2 * link::LINK_SLOTS, RECEIVES);
        let transmits = TRANSMITS.min(offer.tx_size / 4).max(4);
        let chunks = offer.tx_size.saturating_sub(transmits).clamp(PAGES as usize, CHUNKS);
        let entries = receives + transmits + chunks + RECEIVES;
        let nic = Nic::open(api, info, entries)?;
        let key = || regions::requested_key(&offer);
        let rx = Slots::new(&nic, receives, key())?;
        let tx = Slots::new(&nic, transmits, key())?;
        let scratch = Slots::new(&nic, 1, key())?;
        let own_address = EndpointAddress {
            provider: offer.provider.clone(),
            protocol: offer.protocol,
            addr_format: offer.addr_format,
            address: nic.name()?,
            nic: offer.domain.clone(),
            host: address::host(),
        };
        let own = EngineAddress { id, name: String::new(), endpoints: Vec::new() };
        let by_nic = offer.is_rdma() && !nic.emulates_writes();
        let queries_first = offer.hides_refusals();
        let seed = config.nics.shuffle.map(|seed| seed.wrapping_add(rail as u64));
        let mut this = Self {
            regions: Regions::new(by_nic, queries_first),
            offer,
            log: LogLimit::default(),
            credentials: Credentials::new(own, Secret::new(config.token.as_deref())?),
            own_endpoint: usize::MAX,
            nic: Some(nic),
            table: ContextTable::new(receives as u32, transmits as u32, chunks as u32),
            rx,
            tx,
            scratch,
            addresses: AddressVector::new(own_address.addr_format, own_address.address.len()),
            own_address,
            links: Slab::new(),
            generation: 0,
            handshakes: HashMap::new(),
            strangers: Vec::new(),
            outbox: VecDeque::new(),
            partial_posts: VecDeque::new(),
            parked: HashMap::new(),
            queries_first,
            warm: false,
            closing: false,
            unposted: (0..receives as u32).collect(),
            events: Vec::new(),
            frame: Vec::new(),
            shuffle: seed.map(Shuffle::new),
            completions: Vec::new(),
            peer_timeout: config.peer_timeout,
            now: Time(0),
            tick_at: Time(0),
            attendance: Attendance::default(),
            idle_poll: MIN_IDLE_POLL,
            next_idle_poll: Time(0),
        };
        this.nic.iter().for_each(deferred_close::opened);
        this.post_receives()?;
        Ok(this)
    }

    fn slot(id: LinkId) -> usize {
        (id & 0xFFFF) as usize
    }

    #[inline]
    fn link(&mut self, id: LinkId) -> Option<&mut Link> {
        match self.links.get_mut(Self::slot(id)) {
            Some(LinkEntry::Up(link)) if link.id == id => Some(link),
            _ => None,
        }
    }

    /// Reserves an entry for a link, and an id that is never used again.
    fn reserve(&mut self) -> Result<LinkId, DomainError> {
        let slot = self.links.insert(LinkEntry::Reserved) as u32;
        if slot > 0xFFFF {
            self.links.remove(slot as usize);
            return Err(DomainError::Unavailable("65536 links are open already".into()));
        }
        self.generation = (self.generation + 1) & 0xFFFF;
        Ok(self.generation << 16 | slot)
    }

    /// Whether remote bytes are addressed by virtual address rather than by offset.
    fn virtual_addresses(&self) -> bool {
        self.offer.mr_mode & mr_mode::VIRT_ADDR != 0
    }

    /// Whether immediates consume receive slots.
    fn imms_take_slots(&self) -> bool {
        self.offer.mode & mode::RX_CQ_DATA != 0
    }

    fn link_ids(&self) -> Vec<LinkId> {
        let up = |(_, s): (usize, &LinkEntry)| match s {
            LinkEntry::Up(l) => Some(l.id),
            LinkEntry::Reserved => None,
        };
        self.links.iter().filter_map(up).collect()
    }
}

impl Domain for LibfabricDomain {
    fn kind(&self) -> TransportKind {
        TransportKind::Libfabric
    }

    fn device(&self) -> &str {
        &self.offer.domain
    }

    fn is_rdma(&self) -> bool {
        // `require="rdma"` (RS-2) demands a NIC that places bytes, not one that emulates it.
        self.regions.by_nic
    }

    fn caps(&self) -> Caps {
        let max_pages = PAGES.min(self.table.capacity() as u32);
        Caps {
            max_bytes: self.offer.max_bytes.min(CHUNK_BYTES),
            max_pages,
            max_message: message_channel::MAX_MESSAGE,
        }
    }

    fn endpoint(&self) -> Endpoint {
        Endpoint { transport: TransportKind::Libfabric, data: self.own_address.encode() }
    }

    fn announce(&mut self, own: &EngineAddress) {
        self.credentials.own = own.clone();
        let mine = self.endpoint();
        self.own_endpoint =
            own.endpoints.iter().position(|e| *e == mine).unwrap_or(self.own_endpoint);
    }

    fn register(
        &mut self,
        region: &Arc<RegionMemory>,
        _pinned: Option<Pinned>,
    ) -> Result<NicKeys, DomainError> {
        self.register_region(region)
    }

    fn deregister(&mut self, index: u32) -> RegionRelease {
        self.deregister_region(index)
    }

    fn waits_for(&self, index: u32) -> Option<String> {
        self.region_waits_for(index)
    }

    fn unfit(&self, peer: &EngineAddress) -> Option<String> {
        let mut reason = None;
        for i in peer.endpoints_of(TransportKind::Libfabric) {
            let why = match EndpointAddress::of(peer, i) {
                Ok(remote) => remote.unfit(&self.offer, &self.own_address.host),
                Err(e) => Some(e.to_string()),
            };
            match why {
                None => return None,
                Some(why) => reason = Some(why),
            }
        }
        Some(reason.unwrap_or_else(|| {
            match peer.endpoint(TransportKind::Verbs) {
                Some(_) => {
                    "the peer drives its NICs by verbs, whose protocol libfabric does not speak; open \
                    both with the same transport"
                }
                None => "the peer does not offer libfabric",
            }
            .into()
        }))
    }

    fn connect(
        &mut self,
        now: Time,
        peer: &EngineAddress,
        endpoint: usize,
    ) -> Result<LinkId, DomainError> {
        self.now = now;
        if let Some(why) =
            EndpointAddress::of(peer, endpoint)?.unfit(&self.offer, &self.own_address.host)
        {
            return Err(DomainError::Unavailable(why));
        }
        self.start_connect(now, peer, endpoint)
    }

    fn disconnect(&mut self, link: LinkId, cause: &str) {
        let cause = DomainError::LinkDown(cause.to_owned());
        match self.link(link) {
            Some(_) => self.close_link(link, cause, true),
            None => self.drop_connect(link, cause),
        }
    }

    #[inline]
    fn post(&mut self, link: LinkId, token: Token, wr: &WorkRequest) -> Result<Post, DomainError> {
        self.post_request(link, token, wr)
    }

    fn poll(&mut self, now: Time, room: &dyn MessageRoom, out: &mut Vec<Completion>) -> bool {
        self.now = now;
        let before = out.len();
        out.append(&mut self.completions);
        let mut progressed = self.poll_queue();
        progressed |= self.deliver_messages(room, out);
        progressed |= self.send_pending();
        if now >= self.tick_at {
            self.tick_at = now.after(TICK);
            progressed |= self.tick(now);
        }
        out.append(&mut self.completions);
        progressed |= out.len() > before;
        if progressed {
            self.idle_poll = MIN_IDLE_POLL;
        }
        progressed
    }

    fn arm(&mut self) -> bool {
        self.tick_at = Time(0);
        let idle =
            self.completions.is_empty() && self.shuffle.as_ref().is_none_or(Shuffle::is_empty);
        let Some(nic) = self.nic.as_ref().filter(|_| idle) else { return idle };
        if nic.wait_fd.is_some() {
            return nic.may_sleep();
        }
        self.next_idle_poll = Time::now().after(self.idle_poll);
        self.idle_poll = (self.idle_poll * 2).min(MAX_IDLE_POLL);
        true
    }

    fn disarm(&mut self) {
        self.tick_at = Time(0);
    }

    fn wake_fds(&self) -> WakeFds {
        self.nic.iter().filter_map(|n| n.wait_fd).collect()
    }

    fn next_timer(&self) -> Time {
        let Some(nic) = &self.nic else { return Time::NEVER };
        if !self.completions.is_empty() {
            return self.now;
        }
        // Retries work that the provider had no room for, whether or not it signals.
        let mut has_backlog = !self.partial_posts.is_empty() || !self.outbox.is_empty();
        let links = self.links.iter().map(|(_, s)| match s {
            LinkEntry::Up(l) => {
                has_backlog |= !l.pending.is_empty();
                l.next_timer(self.peer_timeout)
            }
            LinkEntry::Reserved => Time::NEVER,
        });
        let links = links.fold(Time::NEVER, Time::min);
        let handshakes = self.handshakes.values().map(HandshakeState::next_timer);
        let idle_poll = if nic.wait_fd.is_none() { self.next_idle_poll } else { Time::NEVER };
        let soon = if has_backlog { self.now.after(TICK) } else { Time::NEVER };
        handshakes.fold(idle_poll.min(soon).min(links), Time::min)
    }

    fn describe(&self, id: LinkId) -> String {
        let Some(LinkEntry::Up(l)) = self.links.get(Self::slot(id)).filter(|_| self.nic.is_some())
        else {
            return "connecting".into();
        };
        let o = &self.offer;
        let mut text = format!("{} ({}) to {}", o.domain, o.provider, l.remote.label());
        if !self.regions.by_nic {
            text.push_str("; CPUs move the bytes, this is not RDMA");
            if !self.nic.as_ref().is_some_and(Nic::cuts_off) {
                text.push_str(
                    "; writes under way when a peer is lost may land later: drop a buffer's \
                    region before you reuse its memory",
                );
            }
        }
        if self.nic.as_ref().is_some_and(|n| n.wait_fd.is_none()) {
            text.push_str(
                "; the provider has no wait descriptor and is polled every millisecond when idle",
            );
        }
        if self.regions.skips_gpu_memory {
            text.push_str("; the provider has no FI_HMEM: other transports stage GPU memory");
        }
        if self.shuffle.is_some() {
            text.push_str(
                "; nics.shuffle is set: deliveries are shuffled and some messages dropped",
            );
        }
        text
    }

    fn close(&mut self) {
        self.close_endpoint();
    }
}

impl Drop for LibfabricDomain {
    fn drop(&mut self) {
        // Memory that the library still uses is freed only after its endpoint (MR-1).
        self.close_endpoint();
    }
}
