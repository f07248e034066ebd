//! Links over libfabric: reliable unconnected endpoints, one for each NIC. `efa` is what it is for;
//! its `tcp`, `shm` and layered providers are driven by the same code.
//!
//! Nothing here leans on the order in which anything arrives: every page carries its own immediate,
//! fragments and credits are counted, and a write is done when the provider says that it was
//! delivered (`FI_DELIVERY_COMPLETE`), not that it was sent.

mod addresses;
mod delivery;
mod discover;
mod doubt;
mod ending;
mod frames;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod gpu;
mod grave;
mod info;
mod library;
mod link;
mod ops;
mod place;
mod poll;
mod post;
mod raw;
mod retire;
mod setup;
mod shuffle;
mod slots;

pub use discover::{discover, version, Found};

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
        Caps, Completion, Domain, DomainError, LinkId, MessageRoom, NicKeys, Pinned, Post, Quiet,
        Token, WakeFds, WorkRequest,
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
use addresses::Addresses;
use info::{Offer, OwnedInfo};
use library::Api;
use link::Link;
use ops::Table;
use place::Place;
use poll::Event;
use post::Stalled;
use raw::Nic;
use retire::Regions;
use setup::Setup;
use shuffle::Shuffle;
use slots::Slots;

/// Receive slots of a domain, transmit slots, and pieces of operations under way, at most.
const RECEIVES: usize = 512;
const TRANSMITS: usize = 64;
const PIECES: usize = 1024;
/// Pages of one work request.
const PAGES: u32 = 16;
/// Bytes of one piece. Longer ones would keep signs of life waiting behind them.
const HANDSHAKE_FRAGMENT_HEADER: u64 = 32 << 20;
/// Counters, handshakes and heartbeats are looked after so often.
const TICK: Duration = Duration::from_millis(1);
/// Between polls of a provider that has nothing to sleep on: at first, and after a long silence.
const SHORT_NAP: Duration = Duration::from_micros(50);
const LONG_NAP: Duration = Duration::from_millis(1);

/// A link's place: taken as soon as a connect begins.
enum Slot {
    Reserved,
    Up(Box<Link>),
}

/// See the module.
pub struct LibfabricDomain {
    offer: Offer,
    credentials: Credentials,
    log: LogLimit,
    /// This endpoint's place in the engine's address.
    own_endpoint: usize,
    place: Place,
    nic: Option<Nic>,
    table: Table,
    rx: Slots,
    tx: Slots,
    scratch: Slots,
    regions: Regions,
    addresses: Addresses,
    links: Slab<Slot>,
    lives: u32,
    /// Handshakes by exchange and whether we began them.
    setups: HashMap<(Exchange, bool), Setup>,
    /// Hellos of which not all pieces are there.
    strangers: Vec<(Exchange, Reassembly, Time)>,
    /// Letters' pieces on their way to an address.
    outbox: VecDeque<(usize, Vec<u8>)>,
    /// Work requests of which the provider took a part.
    stalled: VecDeque<Stalled>,
    /// Work requests about which the peer is asked first.
    parked: HashMap<u32, Stalled>,
    asks_first: bool,
    /// A link has been up.
    warm: bool,
    /// No handshakes any more.
    closing: bool,
    /// Receive slots that the provider had no room for.
    unposted: Vec<u32>,
    events: Vec<Event>,
    /// The frame that is being read.
    frame: Vec<u8>,
    shuffle: Option<Shuffle<Event>>,
    news: Vec<Completion>,
    peer_timeout: Duration,
    now: Time,
    tick_at: Time,
    ticked_at: Time,
    nap: Duration,
    nap_until: Time,
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

/// The domains of this kind, one for each NIC.
pub(crate) fn open(
    id: EngineId,
    config: &EngineConfig,
) -> Result<Vec<Box<dyn Domain>>, DomainError> {
    let api = library::get()?;
    let secret = config.token.as_ref().is_some_and(|t| !t.is_empty());
    let chosen = discover::choose(&api, &config.nics, secret)?;
    // Queues are allocated where they are used from.
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
    // A machine without a random source can't open an engine in the first place.
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
        let pieces = offer.tx_size.saturating_sub(transmits).clamp(PAGES as usize, PIECES);
        let entries = receives + transmits + pieces + RECEIVES;
        let nic = Nic::open(api, info, entries)?;
        let key = || retire::wished_key(&offer);
        let rx = Slots::new(&nic, receives, key())?;
        let tx = Slots::new(&nic, transmits, key())?;
        let scratch = Slots::new(&nic, 1, key())?;
        let place = Place {
            provider: offer.provider.clone(),
            protocol: offer.protocol,
            addr_format: offer.addr_format,
            address: nic.name()?,
            nic: offer.domain.clone(),
            host: place::host(),
        };
        let own = EngineAddress { id, name: String::new(), endpoints: Vec::new() };
        let by_nic = offer.is_rdma() && !nic.emulates_writes();
        let asks_first = offer.hides_refusals();
        let seed = config.nics.shuffle.map(|seed| seed.wrapping_add(rail as u64));
        let mut this = Self {
            regions: Regions::new(by_nic, asks_first),
            offer,
            log: LogLimit::default(),
            credentials: Credentials::new(own, Secret::new(config.token.as_deref())?),
            own_endpoint: usize::MAX,
            nic: Some(nic),
            table: Table::new(receives as u32, transmits as u32, pieces as u32),
            rx,
            tx,
            scratch,
            addresses: Addresses::new(place.addr_format, place.address.len()),
            place,
            links: Slab::new(),
            lives: 0,
            setups: HashMap::new(),
            strangers: Vec::new(),
            outbox: VecDeque::new(),
            stalled: VecDeque::new(),
            parked: HashMap::new(),
            asks_first,
            warm: false,
            closing: false,
            unposted: (0..receives as u32).collect(),
            events: Vec::new(),
            frame: Vec::new(),
            shuffle: seed.map(Shuffle::new),
            news: Vec::new(),
            peer_timeout: config.peer_timeout,
            now: Time(0),
            tick_at: Time(0),
            ticked_at: Time(0),
            nap: SHORT_NAP,
            nap_until: Time(0),
        };
        this.nic.iter().for_each(grave::born);
        this.post_receives()?;
        Ok(this)
    }

    fn slot(id: LinkId) -> usize {
        (id & 0xFFFF) as usize
    }

    #[inline]
    fn link(&mut self, id: LinkId) -> Option<&mut Link> {
        match self.links.get_mut(Self::slot(id)) {
            Some(Slot::Up(link)) if link.id == id => Some(link),
            _ => None,
        }
    }

    /// A place for a link, and a name that is never used again.
    fn reserve(&mut self) -> Result<LinkId, DomainError> {
        let slot = self.links.insert(Slot::Reserved) as u32;
        if slot > 0xFFFF {
            self.links.remove(slot as usize);
            return Err(DomainError::Unavailable("65536 links are open already".into()));
        }
        self.lives = (self.lives + 1) & 0xFFFF;
        Ok(self.lives << 16 | slot)
    }

    /// Whether remote places are named by their addresses, not by offsets.
    fn virtual_addresses(&self) -> bool {
        self.offer.mr_mode & mr_mode::VIRT_ADDR != 0
    }

    /// Whether immediates use up receive slots.
    fn imms_take_slots(&self) -> bool {
        self.offer.mode & mode::RX_CQ_DATA != 0
    }

    fn link_ids(&self) -> Vec<LinkId> {
        let up = |(_, s): (usize, &Slot)| match s {
            Slot::Up(l) => Some(l.id),
            Slot::Reserved => None,
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
        // `require="rdma"` (RS-2) is kept by a NIC alone, not by what emulates one.
        self.regions.by_nic
    }

    fn caps(&self) -> Caps {
        let max_pages = PAGES.min(self.table.capacity() as u32);
        Caps {
            max_bytes: self.offer.max_bytes.min(HANDSHAKE_FRAGMENT_HEADER),
            max_pages,
            max_message: message_channel::MAX_MESSAGE,
        }
    }

    fn endpoint(&self) -> Endpoint {
        Endpoint { transport: TransportKind::Libfabric, data: self.place.encode() }
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

    fn deregister(&mut self, index: u32) -> Quiet {
        self.deregister_region(index)
    }

    fn waits_for(&self, index: u32) -> Option<String> {
        self.region_waits_for(index)
    }

    fn unfit(&self, peer: &EngineAddress) -> Option<String> {
        let mut reason = None;
        for i in peer.endpoints_of(TransportKind::Libfabric) {
            let why = match Place::of(peer, i) {
                Ok(place) => place.unfit(&self.offer, &self.place.host),
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
                    "the peer drives its NICs by verbs, which libfabric's protocols can't \
                            talk to; open both with the same transport"
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
        if let Some(why) = Place::of(peer, endpoint)?.unfit(&self.offer, &self.place.host) {
            return Err(DomainError::Unavailable(why));
        }
        self.begin(now, peer, endpoint)
    }

    fn disconnect(&mut self, link: LinkId, cause: &str) {
        let cause = DomainError::LinkDown(cause.to_owned());
        match self.link(link) {
            Some(_) => self.take_down(link, cause, true),
            None => self.give_up(link, cause),
        }
    }

    #[inline]
    fn post(&mut self, link: LinkId, token: Token, wr: &WorkRequest) -> Result<Post, DomainError> {
        self.post_request(link, token, wr)
    }

    fn poll(&mut self, now: Time, room: &dyn MessageRoom, out: &mut Vec<Completion>) -> bool {
        self.now = now;
        let before = out.len();
        out.append(&mut self.news);
        let mut moved = self.poll_queue();
        moved |= self.hand_up_messages(room, out);
        moved |= self.push_on();
        if now >= self.tick_at {
            self.tick_at = now.after(TICK);
            moved |= self.tick(now);
        }
        out.append(&mut self.news);
        moved |= out.len() > before;
        if moved {
            self.nap = SHORT_NAP;
        }
        moved
    }

    fn arm(&mut self) -> bool {
        self.tick_at = Time(0);
        let idle = self.news.is_empty() && self.shuffle.as_ref().is_none_or(Shuffle::is_empty);
        let Some(nic) = self.nic.as_ref().filter(|_| idle) else { return idle };
        if nic.wait_fd.is_some() {
            return nic.may_sleep();
        }
        self.nap_until = Time::now().after(self.nap);
        self.nap = (self.nap * 2).min(LONG_NAP);
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
        if !self.news.is_empty() {
            return self.now;
        }
        // What a provider had no room for is tried again soon, whether or not it signals.
        let mut pressed = !self.stalled.is_empty() || !self.outbox.is_empty();
        let links = self.links.iter().map(|(_, s)| match s {
            Slot::Up(l) => {
                pressed |= !l.pending.is_empty();
                l.next_timer(self.peer_timeout)
            }
            Slot::Reserved => Time::NEVER,
        });
        let links = links.fold(Time::NEVER, Time::min);
        let setups = self.setups.values().map(Setup::next_timer);
        let nap = if nic.wait_fd.is_none() { self.nap_until } else { Time::NEVER };
        let soon = if pressed { self.now.after(TICK) } else { Time::NEVER };
        setups.fold(nap.min(soon).min(links), Time::min)
    }

    fn describe(&self, id: LinkId) -> String {
        let Some(Slot::Up(l)) = self.links.get(Self::slot(id)).filter(|_| self.nic.is_some())
        else {
            return "connecting".into();
        };
        let o = &self.offer;
        let mut text = format!("{} ({}) to {}", o.domain, o.provider, l.place.label());
        if !self.regions.by_nic {
            text.push_str("; bytes are moved by processors, this is no RDMA");
            if !self.nic.as_ref().is_some_and(Nic::cuts_off) {
                text.push_str(
                    "; what is on its way when a peer is lost may land later: drop a buffer's \
                     region before its memory is used again",
                );
            }
        }
        if self.nic.as_ref().is_some_and(|n| n.wait_fd.is_none()) {
            text.push_str(
                "; the provider has nothing to sleep on: it is polled every millisecond when idle",
            );
        }
        if self.regions.leaves_gpus_out {
            text.push_str(
                "; the provider has no FI_HMEM: GPU memory is left to other transports, which stage it",
            );
        }
        if self.shuffle.is_some() {
            text.push_str("; deliveries are shuffled, and some messages lost");
        }
        text
    }

    fn close(&mut self) {
        self.shut_down();
    }
}

impl Drop for LibfabricDomain {
    fn drop(&mut self) {
        // Memory that the library still uses is freed only after its endpoint (MR-1).
        self.shut_down();
    }
}
