//! Fuzz target of a proven peer.

use std::{io::Write, os::unix::net::UnixStream, sync::Arc};

use super::{link::Link, net::TcpEndpoint, stream::Stream, Role, Socket, TcpDomain};
use crate::{
    api::{EngineConfig, EngineId, RegionKey},
    domain::{
        Admit, Completion, Count, Data, Domain, LocalAddr, MessageRoom, Seq, Token, WorkRequest,
    },
    memory::{Backing, RegionMemory},
    time::Time,
};

const KEY: RegionKey = RegionKey { index: 0, rkey: 7 };
const GUARD: usize = 256;
const REGION: usize = 1024;
/// The range of local bytes that a read fetches.
const FETCHED: std::ops::Range<usize> = 64..192;

/// Checks that a decoded endpoint encodes to the same bytes.
pub(crate) fn endpoint(bytes: &[u8]) {
    let Ok(own_endpoint) = TcpEndpoint::decode(bytes) else { return };
    assert!(own_endpoint.candidates(&own_endpoint.host).len() <= 1 + super::net::MAX_ADDRESSES);
    assert_eq!(TcpEndpoint::decode(&own_endpoint.encode()).as_ref(), Ok(&own_endpoint));
}

struct TestMessageRoom;

impl MessageRoom for TestMessageRoom {
    fn admit(&self, len: usize) -> Admit {
        match len {
            0..100 => Admit::Take,
            100..200 => Admit::Wait,
            _ => Admit::TooLong { limit: 99 },
        }
    }
}

/// Frames on the two streams of a link with a local write, read and message under way. Checks that
/// no byte lands outside the region and the read's memory (MR-3), none of the read after it ended
/// (MR-1), and that every operation ends once.
pub fn peer_input(bytes: &[u8]) {
    let Ok(mut domain) = TcpDomain::open(EngineId([2; 16]), &EngineConfig::default()) else {
        return;
    };
    let mut memory = vec![0xA5u8; GUARD + REGION + GUARD];
    let mut local = vec![0x5Au8; 256];
    let base = memory.as_mut_ptr() as usize + GUARD;
    let region = RegionMemory::new(KEY, base, REGION as u64, Backing::Foreign, None);
    let _ = domain.register(&Arc::new(region), None);

    let id = 1 << 16;
    let mut link = Link::new(id, [1; 16], 2, true, Time(0));
    let mut peer = Vec::new();
    for stream_id in &mut link.streams {
        let Ok((ours, peer_region)) = UnixStream::pair() else { return };
        let _ = ours.set_nonblocking(true);
        let _ = peer_region.set_nonblocking(true);
        let mut stream = Stream::new(ours.into());
        stream.hot_until = Time::NEVER;
        *stream_id = Some(domain.sockets.insert(Socket { stream, role: Role::Link(id) }));
        peer.push(peer_region);
    }
    domain.links.insert(link);
    for (slot, wr) in our_work(local.as_mut_ptr() as usize).iter().enumerate() {
        let token = Token { slot: slot as u32, ..Token::default() };
        let _ = domain.post(id, token, wr);
    }
    domain.flush();

    // The first byte is the number of bytes for the first stream.
    let Some((cut, input)) = bytes.split_first() else { return };
    let (urgent_stream, bulk_streams) = input.split_at(input.len() * usize::from(*cut) / 255);
    let _ = peer[0].write_all(urgent_stream);
    let _ = peer[1].write_all(bulk_streams);
    if cut % 2 == 1 {
        peer.pop();
    }
    let mut out = Vec::new();
    listen(&mut domain, &mut out);
    let over = out.iter().any(|c| matches!(c, Completion::Done { token, .. } if token.slot == 1));
    let fetched = local.clone();
    for stream in &mut peer {
        let _ = stream.write_all(&[0xEE; 256]);
    }
    listen(&mut domain, &mut out);
    check_completions(&out);
    assert!(!over || local == fetched, "bytes of a read that was over");
    let (before, after) = (&memory[..GUARD], &memory[GUARD + REGION..]);
    assert!(before.iter().chain(after).all(|b| *b == 0xA5), "bytes outside the region");
    let kept = local.iter().enumerate().filter(|(i, _)| !FETCHED.contains(i));
    assert!(kept.into_iter().all(|(_, b)| *b == 0x5A), "bytes outside the read's place");
}

fn listen(domain: &mut TcpDomain, out: &mut Vec<Completion>) {
    for now in 1..64 {
        if !domain.poll(Time(now), &TestMessageRoom, out) && now > 4 {
            break;
        }
    }
}

fn our_work(local: usize) -> [WorkRequest; 3] {
    let data = |offset: u64, page_len: u64| Data {
        local: LocalAddr(local),
        local_region: 0,
        local_seq: Seq::at(offset),
        remote: KEY,
        remote_keys: Default::default(),
        remote_seq: Seq::at(0),
        page_len,
        pages: 1,
    };
    [
        WorkRequest::Write { data: data(0, 64), count: Some(Count { imm: 1, n: 1 }) },
        WorkRequest::Read { data: data(FETCHED.start as u64, FETCHED.len() as u64) },
        WorkRequest::Send(Arc::from(*b"hello")),
    ]
}

fn check_completions(out: &[Completion]) {
    let mut ended = [0; 3];
    let mut down = false;
    for c in out {
        match c {
            Completion::Done { token, .. } => ended[token.slot as usize] += 1,
            Completion::LinkDown { .. } => down = true,
            Completion::Message { message, .. } => assert!(message.len() < 100),
            _ => {}
        }
    }
    assert!(ended.iter().all(|n| *n <= 1), "an operation ended twice");
    assert!(!down || ended == [1; 3], "a link went down and left work behind");
}

#[cfg(all(test, not(loom)))]
pub(crate) use seeds::{an_endpoint, seeds};

#[cfg(all(test, not(loom)))]
mod seeds {
    use super::{
        super::frame::{Header, Kind},
        *,
    };

    pub fn an_endpoint() -> Vec<u8> {
        let addrs = vec!["10.0.0.1:7000".parse().unwrap(), "[fd00::1]:7000".parse().unwrap()];
        TcpEndpoint { addrs, loopback_port: Some(7001), host: [3; 16] }.encode()
    }

    fn frame(header: Header, body: &[u8]) -> Vec<u8> {
        [&header.encode()[..], body].concat()
    }

    /// Frames of an honest peer, all on the first stream.
    pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
        let first = |kind| Header { op: 1, ..Header::new(kind) };
        // Operation numbers carry the serial in their upper half: see `Link::open`.
        let ours = |serial: u64, slot: u64| serial << 32 | slot;
        let write = Header { key: KEY, parts: 1, pages: 1, code: 1, ..first(Kind::Write) };
        let written = frame(Header { len: 100, offset: 924, ..write }, &[1; 100]);
        let pending = |offset| Header { len: 50, offset, parts: 2, ..write };
        let parts = [frame(pending(0), &[2; 50]), frame(pending(50), &[3; 50])].concat();
        let listed = Header { pages: 3, indices: 3, len: 8, stride: 64, ..write };
        let indices: Vec<u8> = [5u32, 0, 9].iter().flat_map(|i| i.to_le_bytes()).collect();
        let pages = frame(listed, &[&indices[..], &[4; 24]].concat());
        let outside = frame(Header { len: 100, offset: 925, ..write }, &[5; 100]);
        let read = Header { key: KEY, pages: 2, len: 10, stride: 20, ..first(Kind::Read) };
        let answer = Header { op: 2, len: FETCHED.len() as u64, ..Header::new(Kind::ReadData) };
        let answer = frame(answer, &[6; FETCHED.end - FETCHED.start]);
        // Half of an answer on the first stream, a whole one on the other.
        let twice = [&[102], &answer[..128], &answer].concat();
        let message = frame(Header { len: 5, ..first(Kind::Message) }, b"hello");
        let refusal = |op| frame(Header { op, len: 2, code: 1, ..Header::new(Kind::Nak) }, b"no");
        let taken = Header { op: ours(3, 2), ..Header::new(Kind::MessageResult) };
        let acks = [first(Kind::Ack), first(Kind::Count), taken, first(Kind::Ping)];
        let acks: Vec<u8> = acks.iter().flat_map(|h| h.encode()).collect();
        let bye = frame(Header { len: 4, ..Header::new(Kind::Close) }, b"gone");
        let input = [
            ("writes", [written, parts, outside].concat()),
            ("pages", pages),
            ("reads", [frame(read, &[]), answer].concat()),
            ("refusals", [refusal(ours(1, 0)), refusal(2)].concat()),
            ("messages", [message, acks].concat()),
            ("bye", bye),
        ];
        let whole = input.into_iter().map(|(name, s)| (name, [&[254u8][..], &s].concat()));
        whole.chain([("twice", twice)]).collect()
    }
}
