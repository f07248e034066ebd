//! Peers that request data and do not read it: the memory kept for them is bounded.

use std::sync::Arc;

use rustix::io::Errno;

use super::{
    frame::{Header, Kind, HEADER, MAX_PAGES},
    link::READ_WINDOW,
    stream::MAX_REPLY_BYTES,
    Role, StreamKey, TcpDomain,
};
use crate::{
    api::{EngineAddress, EngineConfig, EngineId, PageIndices, RegionKey},
    domain::{
        Admit, Completion, Data, Domain, LinkId, LocalAddr, MessageRoom, Post, Seq, Token,
        WorkRequest,
    },
    memory::{Backing, RegionMemory},
    time::Time,
};

pub(super) const KEY: RegionKey = RegionKey { index: 0, rkey: 7 };
/// Bytes of a page: small, so that a request's list is as long as its reply.
const PAGE: u64 = 4;
pub(super) const BYTES: u64 = PAGE * MAX_PAGES as u64;

pub(super) struct TestMessageRoom;

impl MessageRoom for TestMessageRoom {
    fn admit(&self, _: usize) -> Admit {
        Admit::Take
    }
}

/// One of two connected domains.
pub(super) struct End {
    pub domain: TcpDomain,
    pub memory: Vec<u8>,
    pub link: LinkId,
    pub out: Vec<Completion>,
}

impl End {
    pub fn new(id: u8) -> (Self, EngineAddress) {
        Self::with(id, EngineConfig::default().tcp_streams, BYTES)
    }

    fn with(id: u8, tcp_streams: usize, bytes: u64) -> (Self, EngineAddress) {
        let id = EngineId([id; 16]);
        let config = EngineConfig { tcp_streams, ..EngineConfig::default() };
        let mut domain = TcpDomain::open(id, &config).unwrap();
        let address = EngineAddress { id, name: String::new(), endpoints: vec![domain.endpoint()] };
        domain.announce(&address);
        let mut memory = vec![id.0[0]; bytes as usize];
        let region =
            RegionMemory::new(KEY, memory.as_mut_ptr() as usize, bytes, Backing::Foreign, None);
        domain.register(&Arc::new(region), None).unwrap();
        (Self { domain, memory, link: 0, out: Vec::new() }, address)
    }

    pub fn poll(&mut self, now: &mut Time) {
        now.0 += 50_000;
        self.domain.poll(*now, &TestMessageRoom, &mut self.out);
        for c in &self.out {
            if let Completion::LinkUp { link, .. } = c {
                self.link = *link;
            }
        }
    }

    /// Memory that the peer's requests take, and whether reading from it is suspended.
    fn reply_memory(&self) -> (u64, bool) {
        let streams = || self.domain.sockets.iter().map(|(_, s)| &s.stream);
        (streams().map(|s| s.reply_bytes).sum(), streams().any(|s| s.is_throttled()))
    }

    pub fn done(&self) -> usize {
        let ends = self.out.iter().filter(|c| matches!(c, Completion::Done { result: Ok(()), .. }));
        ends.count()
    }

    /// Posts reads of as many single pages as a frame may name, until there is no room.
    pub fn read_all(&mut self) -> usize {
        let all = PageIndices::list((0..MAX_PAGES).collect::<Vec<u32>>()).unwrap();
        let PageIndices::List(list) = all else { unreachable!("it is a list") };
        for n in 0.. {
            let seq =
                |offset| Seq::Indexed { list: Arc::clone(&list), from: 0, offset, stride: PAGE };
            let data = Data {
                local: LocalAddr(self.memory.as_mut_ptr() as usize),
                local_region: 0,
                local_seq: seq(0),
                remote: KEY,
                remote_keys: Default::default(),
                remote_seq: seq(0),
                page_len: PAGE,
                pages: MAX_PAGES,
            };
            let token = Token { slot: n as u32, ..Token::default() };
            match self.domain.post(self.link, token, &WorkRequest::Read { data }).unwrap() {
                Post::Full => return n,
                _ => self.domain.flush(),
            }
        }
        unreachable!("it takes no end of reads")
    }
}

pub(super) fn joined() -> (End, End, Time) {
    join(End::new(1), End::new(2))
}

/// With so many bulk streams, and memory of so many bytes.
pub(super) fn joined_with(tcp_streams: usize, bytes: u64) -> (End, End, Time) {
    let [a, b] = [1, 2].map(|id| End::with(id, tcp_streams, bytes));
    join(a, b)
}

fn join(
    (mut a, _): (End, EngineAddress),
    (mut b, b_address): (End, EngineAddress),
) -> (End, End, Time) {
    let mut now = Time(1);
    a.domain.connect(now, &b_address, 0).unwrap();
    while a.link == 0 || b.link == 0 {
        a.poll(&mut now);
        b.poll(&mut now);
    }
    (a, b, now)
}

/// A client that uses its socket directly and reads nothing: the last stream of a link of `a`.
fn bulk_streams(a: &End) -> StreamKey {
    let of_link = a.domain.sockets.iter().filter(|(_, s)| matches!(s.role, Role::Link(_)));
    of_link.map(|(key, _)| key).next_back().unwrap()
}

fn request() -> Vec<u8> {
    let header = Header {
        key: KEY,
        stride: PAGE,
        len: PAGE,
        pages: MAX_PAGES,
        indices: MAX_PAGES,
        op: 1,
        ..Header::new(Kind::Read)
    };
    let indices = (0..MAX_PAGES).flat_map(u32::to_le_bytes);
    header.encode().into_iter().chain(indices).collect()
}

/// Sends requests until neither the kernel nor `b` accepts more; returns the bytes sent.
fn flood(a: &End, b: &mut End, now: &mut Time) -> usize {
    let (request, key) = (request(), bulk_streams(a));
    let (mut sent, mut refused) = (0, 0);
    while refused < 200 {
        let at = sent % request.len();
        match rustix::io::write(a.domain.sockets[key].stream.fd(), &request[at..]) {
            Ok(n) => (sent, refused) = (sent + n, 0),
            Err(Errno::AGAIN) => refused += 1,
            Err(e) => panic!("{e}"),
        }
        b.poll(now);
        assert!(
            b.reply_memory().0 <= MAX_REPLY_BYTES + (128 << 10),
            "{} bytes are kept for it",
            b.reply_memory().0
        );
        assert!(sent < 256 << 20, "its requests are read forever");
    }
    sent
}

#[test]
fn the_memory_of_unread_replies_is_bounded() {
    let (a, mut b, mut now) = joined();
    let sent = flood(&a, &mut b, &mut now);
    assert!(b.reply_memory().1 && b.domain.arm(), "it must neither read nor poll");
    // Once the peer reads, it receives everything that it requested.
    let (mut got, mut buffer) = (0, vec![0; 1 << 20]);
    let whole = (sent / request().len()) * (HEADER + BYTES as usize);
    while got < whole {
        match rustix::io::read(a.domain.sockets[bulk_streams(&a)].stream.fd(), &mut buffer) {
            Ok(0) => panic!("the connection has ended after {got} of {whole} bytes"),
            Ok(n) => got += n,
            Err(Errno::AGAIN) => {}
            Err(e) => panic!("{e}"),
        }
        b.poll(&mut now);
    }
    assert_eq!((got, b.reply_memory()), (whole, (0, false)));
}

#[test]
fn rs_4_a_peer_that_reads_and_sends_nothing_is_lost() {
    let (a, mut b, mut now) = joined();
    flood(&a, &mut b, &mut now);
    for _ in 0..4 {
        now = now.after(EngineConfig::default().peer_timeout / 4);
        b.poll(&mut now);
    }
    b.poll(&mut now);
    let down = b.out.iter().find_map(|c| match c {
        Completion::LinkDown { cause, .. } => Some(cause.to_string()),
        _ => None,
    });
    assert!(down.is_some_and(|cause| cause.contains("read none of its replies")));
    assert_eq!(b.reply_memory(), (0, false));
}

#[test]
fn two_peers_that_read_from_each_other_are_never_throttled() {
    let (mut a, mut b, mut now) = joined();
    let posted = (a.read_all(), b.read_all());
    assert!(posted.0 > 1 && posted.0 as u64 * BYTES <= 2 * READ_WINDOW, "{posted:?}");
    assert_eq!(posted.0, posted.1);
    while a.done() < posted.0 || b.done() < posted.1 {
        a.poll(&mut now);
        b.poll(&mut now);
        assert!(!a.reply_memory().1 && !b.reply_memory().1, "honest peers are not throttled");
    }
    assert!(a.read_all() > 1, "there is room again");
}
