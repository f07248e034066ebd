use proptest::prelude::*;

use super::*;

const LIMITS: ReceiveLimits = ReceiveLimits { slot_bytes: 300, slots: 4, imms: 8 };

struct TestMessageRoom {
    limit: usize,
    open: bool,
}

impl MessageRoom for TestMessageRoom {
    fn admit(&self, len: usize) -> Admit {
        match (len > self.limit, self.open) {
            (true, _) => Admit::TooLong { limit: self.limit },
            (_, true) => Admit::Take,
            _ => Admit::Wait,
        }
    }
}

const OPEN: TestMessageRoom = TestMessageRoom { limit: 10_000, open: true };

/// Two ends, and the frames between them.
struct Pair {
    ends: [MessageChannel; 2],
    wires: [Vec<Vec<u8>>; 2],
    got: [Vec<Box<[u8]>>; 2],
    done: [Vec<(u32, bool)>; 2],
}

impl Pair {
    fn new() -> Self {
        let end = || MessageChannel::new(LIMITS, LIMITS, 0);
        let (wires, got, done) = Default::default();
        Self { ends: [end(), end()], wires, got, done }
    }

    fn send(&mut self, from: usize, slot: u32, message: &[u8]) -> bool {
        self.ends[from].submit(Token { slot, ..Token::default() }, &Arc::from(message))
    }

    fn flush(&mut self, from: usize) {
        let mut slot = [0; 300];
        while let Some(n) = self.ends[from].next_frame(&mut slot) {
            self.wires[from].push(slot[..n].to_vec());
            // The receiver is never not ready.
            let under_way = self.wires[from].len() as u32;
            assert!(under_way <= LIMITS.slots + SPARE);
        }
    }

    fn arrive(&mut self, from: usize, which: usize, room: &TestMessageRoom) {
        let to = 1 - from;
        let frame = self.wires[from].remove(which);
        assert_eq!(self.ends[to].on_frame(&frame), Ok(FrameEvent::Handled));
        self.ends[to].slot_freed();
        self.collect(to, room);
    }

    fn collect(&mut self, at: usize, room: &TestMessageRoom) {
        while let Some(m) = self.ends[at].take_message(room) {
            self.got[at].push(m);
        }
        let done = self.ends[at].finished().map(|(t, r)| (t.slot, r.is_ok()));
        self.done[at].extend(done);
    }

    fn settle(&mut self, room: &TestMessageRoom) {
        for _ in 0..10_000 {
            (0..2).for_each(|i| self.flush(i));
            match self.wires.iter().position(|w| !w.is_empty()) {
                Some(from) => self.arrive(from, 0, room),
                None => return,
            }
        }
        panic!("frames chase each other");
    }
}

#[test]
fn messages_of_any_length_arrive_whole_and_in_order() {
    let mut p = Pair::new();
    let lengths = [0, 1, 271, 272, 273, 9_999, 3, 5_000];
    let messages: Vec<Vec<u8>> = lengths.iter().map(|n| vec![*n as u8; *n]).collect();
    for (i, m) in messages.iter().enumerate() {
        assert!(p.send(0, i as u32, m));
    }
    p.settle(&OPEN);
    assert!(p.got[1].iter().map(|m| m.to_vec()).eq(messages));
    assert_eq!(p.done[0], (0..8).map(|i| (i, true)).collect::<Vec<_>>());
}

#[test]
fn a_message_waits_for_room_and_one_too_long_is_refused() {
    let mut p = Pair::new();
    for (i, n) in [10, 200, 20].into_iter().enumerate() {
        assert!(p.send(0, i as u32, &vec![7; n]));
    }
    let mut room = TestMessageRoom { limit: 100, open: false };
    p.settle(&room);
    assert!(p.got[1].is_empty() && p.done[0].is_empty() && p.ends[1].holds_messages());
    room.open = true;
    p.collect(1, &room);
    p.settle(&room);
    assert_eq!(p.done[0], [(0, true), (1, false), (2, true)]);
    assert_eq!(p.got[1].iter().map(|m| m.len()).collect::<Vec<_>>(), [10, 20]);
}

#[test]
fn the_window_bounds_unacknowledged_messages() {
    let mut p = Pair::new();
    let shut = TestMessageRoom { limit: 100, open: false };
    assert!((0..WINDOW).all(|i| p.send(0, i as u32, b"x")));
    assert!(!p.send(0, 99, b"x"));
    p.settle(&shut);
    assert!(!p.send(0, 99, b"x"));
    p.settle(&OPEN);
    p.collect(1, &OPEN);
    p.settle(&OPEN);
    assert!(p.send(0, 99, b"x"));
}

#[test]
fn immediates_come_back_as_credits() {
    let mut p = Pair::new();
    p.ends[0].imms_sent(8);
    assert_eq!(p.ends[0].imm_room(), 0);
    p.ends[1].imms_freed(1);
    p.settle(&OPEN);
    assert_eq!(p.ends[0].imm_room(), 0, "one alone is not worth a frame");
    p.ends[1].imms_freed(1);
    p.settle(&OPEN);
    assert_eq!(p.ends[0].imm_room(), 2);
    p.ends[1].imms_freed(1);
    p.ends[1].heartbeat();
    p.settle(&OPEN);
    assert_eq!(p.ends[0].imm_room(), 3, "a sign of life tells as well");
}

#[test]
fn queries_answers_and_closes_are_reported() {
    let mut p = Pair::new();
    let (key, mut slot) = (RegionKey { index: 3, rkey: 4 }, [0; 300]);
    p.ends[0].query_access(key, 5, 6);
    let n = p.ends[0].next_frame(&mut slot).unwrap();
    assert_eq!(
        p.ends[1].on_frame(&slot[..n]),
        Ok(FrameEvent::AccessQuery { key, offset: 5, len: 6 })
    );
    for why in [DomainError::Stale("gone".into()), DomainError::Refused("outside".into())] {
        p.ends[1].answer_access(&why);
        let n = p.ends[1].next_frame(&mut slot).unwrap();
        assert_eq!(p.ends[0].on_frame(&slot[..n]), Ok(FrameEvent::AccessAnswer(why)));
    }
    p.ends[1].close(true, &"x".repeat(1000));
    let n = p.ends[1].next_frame(&mut slot).unwrap();
    assert!(
        matches!(p.ends[0].on_frame(&slot[..n]), Ok(FrameEvent::Close { gone: true, reason: why }) if why.len() > 200)
    );
}

#[test]
fn a_flood_of_frames_uses_bounded_memory() {
    let mut end = MessageChannel::new(LIMITS, LIMITS, 0);
    (0..1000).for_each(|n| end.fenced(n));
    let mut slot = [0; 300];
    let n = end.next_frame(&mut slot).unwrap();
    assert_eq!(frame::decode(&slot[..n]).unwrap().1, Body::Fenced(999));
    assert!(!end.has_frame(), "the last answer holds for all questions before");
    // Messages that are taken and not answered yet: a peer can't have heard that there is room.
    let mut receive = |message| {
        let body = Body::Fragment { message, total: 1, offset: 0, bytes: b"x" };
        let n = frame::encode(&Header::default(), &body, &mut slot);
        end.on_frame(&slot[..n])?;
        end.slot_freed();
        assert!(end.take_message(&OPEN).is_some());
        Ok::<_, DomainError>(())
    };
    assert!((0..WINDOW as u32).all(|message| receive(message).is_ok()));
    assert!(matches!(receive(WINDOW as u32), Err(DomainError::LinkDown(_))));
}

#[test]
fn a_peer_that_breaks_the_rules_is_found_out() {
    let receive = |header: Header, body: Body<'_>| {
        let mut end = MessageChannel::new(LIMITS, LIMITS, 0);
        let mut slot = [0; 400];
        let n = frame::encode(&header, &body, &mut slot);
        end.on_frame(&slot[..n])
    };
    let plain = Header::default();
    let part = |message, total, offset, bytes| Body::Fragment { message, total, offset, bytes };
    let bad = [
        receive(Header { frame_credits: 1, ..plain }, Body::Heartbeat),
        receive(Header { imm_credits: 1, ..plain }, Body::Heartbeat),
        receive(plain, Body::Results(&result_entry(0, None))),
        receive(plain, part(WINDOW as u32, 1, 0, b"x")),
        receive(plain, part(0, MAX_MESSAGE as u32 + 1, 0, &[0; 272])),
        receive(plain, part(0, 3, 0, b"x")),
        receive(plain, part(0, 500, 271, &[0; 229])),
        receive(plain, part(0, 0, 272, b"")),
        receive(plain, part(u32::MAX, 1, 0, b"x")),
    ];
    for b in bad {
        assert!(matches!(b, Err(DomainError::LinkDown(_))), "{b:?}");
    }
}

proptest! {
    #[test]
    fn no_order_of_arrival_loses_a_message_or_a_credit(
        lengths in proptest::collection::vec((0usize..2, 0usize..2000), 0..60),
        picks in proptest::collection::vec(any::<(bool, u8)>(), 0..400),
    ) {
        let mut p = Pair::new();
        let mut waiting: VecDeque<_> = lengths.iter().enumerate().collect();
        let mut picks = picks.into_iter();
        let mut sent: [Vec<Vec<u8>>; 2] = Default::default();
        loop {
            while let Some((i, (from, n))) = waiting.front() {
                let message = vec![*i as u8; *n];
                if !p.send(*from, *i as u32, &message) {
                    break;
                }
                sent[*from].push(message);
                waiting.pop_front();
            }
            (0..2).for_each(|i| p.flush(i));
            let Some((side, pick)) = picks.next() else { break };
            let from = usize::from(side);
            if !p.wires[from].is_empty() {
                let which = usize::from(pick) % p.wires[from].len();
                p.arrive(from, which, &OPEN);
            }
        }
        while let Some((i, (from, n))) = waiting.pop_front() {
            let message = vec![i as u8; *n];
            while !p.send(*from, i as u32, &message) {
                p.settle(&OPEN);
            }
            sent[*from].push(message);
        }
        p.settle(&OPEN);
        for (from, sent) in sent.iter().enumerate() {
            prop_assert!(p.got[1 - from].iter().map(|m| m.to_vec()).eq(sent.iter().cloned()));
            prop_assert_eq!(p.done[from].len(), sent.len());
        }
    }
}
