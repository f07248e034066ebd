//! Fuzz target of a proven peer on this host, over its socket and in the memory that it shares.

use std::{os::fd::OwnedFd, sync::Arc};

use smallvec::smallvec;

use super::{
    control_socket::Fds,
    layout::INBOX,
    link::{Link, Stage},
    raw::Map,
    ShmDomain,
};
use crate::{
    api::{EngineAddress, EngineConfig, EngineId, RegionKey, TransportKind},
    domain::{
        Admit, Completion, Count, Data, Domain, LocalAddr, MessageRoom, Seq, Token, WorkRequest,
    },
    fuzzing::{pieces, sealed},
    memory::{Allocation, Backing, RegionMemory},
    time::Time,
    wake::Waker,
};

/// Plain memory (its lowest bits): posts copy inline, so no copy thread is involved.
const KEY: RegionKey = RegionKey { index: 0, rkey: 8 };
const SHARED: usize = 4096;

struct TestMessageRoom;

impl MessageRoom for TestMessageRoom {
    fn admit(&self, len: usize) -> Admit {
        match len {
            0..100 => Admit::Take,
            _ => Admit::TooLong { limit: 99 },
        }
    }
}

fn open() -> Option<ShmDomain> {
    let id = EngineId::random().ok()?;
    let mut domain =
        ShmDomain::open(TransportKind::Shm, id, &EngineConfig::default(), &Waker::default())
            .ok()?;
    let endpoints = vec![domain.endpoint()];
    domain.announce(&EngineAddress { id, name: "e".into(), endpoints });
    Some(domain)
}

fn poll(domain: &mut ShmDomain, out: &mut Vec<Completion>) {
    domain.poll_sockets_at = Time(0);
    domain.poll(Time(1), &TestMessageRoom, out);
}

/// The only link of a domain.
fn link(domain: &mut ShmDomain) -> Option<&mut Link> {
    domain.links.iter_mut().next().map(|(_, l)| l)
}

/// Two domains in one process, connected by a real handshake.
fn joined() -> Option<(ShmDomain, ShmDomain)> {
    let (mut us, mut peer) = (open()?, open()?);
    peer.connect(Time(0), &us.credentials.own.clone(), 0).ok()?;
    let mut out = Vec::new();
    for _ in 0..8 {
        poll(&mut us, &mut out);
        poll(&mut peer, &mut out);
    }
    // Both are this process: memory named by address would be the fuzzer's own.
    let Stage::Up(outbound) = &mut link(&mut us)?.stage else { return None };
    outbound.process = Err("it is this process".into());
    link(&mut peer)?.is_up().then_some((us, peer))
}

/// Executes the input step by step. Checks that the domain works until the link is down, that every
/// local operation completes at most once, and that none is left after that.
pub fn peer_input(bytes: &[u8]) {
    let (Some((mut us, mut peer)), Ok((_, shared))) = (joined(), Map::create(SHARED)) else {
        return;
    };
    let Ok(allocation) = Allocation::new(SHARED as u64).map(Arc::new) else { return };
    let base = allocation.base();
    let backing = Backing::Owned { allocation, offset: 0 };
    let _ =
        us.register(&Arc::new(RegionMemory::new(KEY, base, SHARED as u64, backing, None)), None);
    let (mut out, mut posted) = (Vec::new(), 0);
    for io_range in pieces(bytes).take(64) {
        let Some((what, body)) = io_range.split_first() else { continue };
        act(&mut us, &mut peer, (*what, body), &shared, &mut posted, &mut out);
        poll(&mut us, &mut out);
    }
    drop(peer);
    // The socket may stay open for a moment in a child of another thread, between fork and exec.
    for turn in 0..2000 {
        poll(&mut us, &mut out);
        if turn >= 4 && out.iter().any(|c| matches!(c, Completion::LinkDown { .. })) {
            break;
        }
        if turn >= 4 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
    check_completions(&out, posted);
}

fn act(
    us: &mut ShmDomain,
    peer: &mut ShmDomain,
    (what, body): (u8, &[u8]),
    shared: &OwnedFd,
    posted: &mut u32,
    out: &mut Vec<Completion>,
) {
    let Some(peer_link) = link(peer) else { return };
    let fds = || -> Fds { shared.try_clone().map_or(smallvec![], |fd| smallvec![fd]) };
    match what % 5 {
        0 => drop(peer_link.control.send(sealed(b"FRsc", body), smallvec![])),
        1 => drop(peer_link.control.send(sealed(b"FRsc", body), fds())),
        2 => drop(peer_link.control.send(body.to_vec(), fds())),
        3 => {
            // Into the rings that this side reads.
            let Stage::Up(outbound) = &mut peer_link.stage else { return };
            let Some((at, body)) = body.split_first_chunk::<4>() else { return };
            let at = u32::from_le_bytes(*at) as usize % (INBOX - body.len());
            outbound.outbox.write(at, body);
        }
        _ => {
            let Some(id) = link(us).map(|l| l.id).filter(|_| !body.is_empty()) else { return };
            let data = Data {
                local: LocalAddr(body.as_ptr() as usize),
                local_region: 0,
                local_seq: Seq::at(0),
                remote: KEY,
                remote_keys: Default::default(),
                remote_seq: Seq::at(0),
                page_len: body.len() as u64,
                pages: 1,
            };
            let count = Some(Count { imm: 1, n: 1 });
            let token = Token { slot: *posted, ..Token::default() };
            us.begin_request();
            let wr = WorkRequest::Write { data, count };
            if us.post(id, token, &wr) == Ok(crate::domain::Post::Queued) {
                *posted += 1;
            }
            poll(us, out);
        }
    }
}

fn check_completions(out: &[Completion], posted: u32) {
    let mut ended = vec![0; posted as usize];
    let mut down = false;
    for c in out {
        match c {
            Completion::Done { token, .. } => ended[token.slot as usize] += 1,
            Completion::LinkDown { .. } => down = true,
            Completion::Message { message, .. } => assert!(message.len() < 100),
            _ => {}
        }
    }
    assert!(down, "the link is not down");
    assert!(ended.iter().all(|n| *n == 1), "an operation was lost, or ended twice");
}

#[cfg(all(test, not(loom)))]
pub(crate) fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    use super::control_socket::Frame;
    let io_range = |what: u8, body: &[u8]| [&[body.len() as u8 + 1, what], body].concat();
    let frame = |what, f: Frame| io_range(what, &f.encode()[10..]);
    let write = io_range(4, &[1; 64]);
    let mapped = |offset, len| Frame::Mapped {
        key: KEY,
        len,
        allocation: 1,
        allocation_len: SHARED as u64,
        offset,
    };
    let word = |at: usize, n: u64| {
        io_range(3, &[&(at as u32).to_le_bytes()[..], &n.to_le_bytes()].concat())
    };
    let ring = super::layout::MESSAGE_RING;
    let message = [word(ring.bytes, 5), word(ring.bytes + 8, 0x6F_6C6C_6568), word(ring.head, 16)];
    let counts = super::layout::COUNTS;
    let count = [word(counts, 1 | 1 << 32), word(counts + 8, 1)].concat();
    vec![
        (
            "resolve",
            [frame(0, Frame::Resolve(KEY)), frame(0, Frame::Revoked { index: 0 })].concat(),
        ),
        (
            "mapped",
            [
                write.clone(),
                frame(1, mapped(64, 1024)),
                write.clone(),
                frame(0, Frame::Revoke { index: 0 }),
            ]
            .concat(),
        ),
        ("outside", [write.clone(), frame(1, mapped(4095, 2))].concat()),
        (
            "foreign",
            [write.clone(), frame(0, Frame::Foreign { key: KEY, len: 64, addr: 1 << 20 })].concat(),
        ),
        (
            "unknown",
            [write.clone(), frame(0, Frame::Unknown { key: KEY, reason: "it is gone".into() })]
                .concat(),
        ),
        ("denied", [write, frame(0, Frame::Denied { key: KEY, reason: "no".into() })].concat()),
        ("rings", [count, message.concat()].concat()),
        ("bye", frame(0, Frame::Close { reason: "over".into() })),
    ]
}
