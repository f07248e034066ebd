//! Fuzz target of bytes from strangers and peers.

use super::address::{LinkRequest, NicAddress, QpSetup};
use crate::{
    fuzzing::{pieces, sealed},
    transport::nic::{
        frame::{self, Body},
        handshake_fragments::{Reassembly, MAX_EXCHANGE_MESSAGE},
        message_channel::{MessageChannel, ReceiveLimits, WINDOW},
    },
};

struct TestMessageRoom;

impl crate::domain::MessageRoom for TestMessageRoom {
    fn admit(&self, len: usize) -> crate::domain::Admit {
        match len {
            0..100 => crate::domain::Admit::Take,
            100..200 => crate::domain::Admit::Wait,
            _ => crate::domain::Admit::TooLong { limit: 99 },
        }
    }
}

/// Frames of a proven peer, handshake fragments of strangers, endpoints and queue pairs. Checks
/// that decoded values are bounded and encode to the same bytes.
pub fn peer_input(bytes: &[u8]) {
    let Some((kind, input)) = bytes.split_first() else { return };
    match kind % 5 {
        0 => address(&sealed(b"FRve", input)),
        1 => {
            let Ok(s) = QpSetup::decode(&sealed(b"FRvs", input)) else { return };
            assert_eq!(QpSetup::decode(&s.encode()), Ok(s));
        }
        2 => {
            let Ok(i) = LinkRequest::decode(&sealed(b"FRvi", input)) else { return };
            assert_eq!(LinkRequest::decode(&i.encode()), Ok(i));
        }
        3 => handshake(input),
        _ => frames(input),
    }
}

fn address(bytes: &[u8]) {
    let Ok(p) = NicAddress::decode(bytes) else { return };
    assert!(p.side_candidates(true).len() <= 4 && !p.label().is_empty());
    assert_eq!(NicAddress::decode(&p.encode()), Ok(p));
}

fn handshake(input: &[u8]) {
    let mut message = Reassembly::default();
    for f in pieces(input) {
        let Ok((_, Body::HandshakeFragment(p))) = frame::decode(f) else { continue };
        if let Ok(Some(whole)) = message.take(&p) {
            assert!(whole.len() <= MAX_EXCHANGE_MESSAGE);
        }
    }
}

fn frames(input: &[u8]) {
    let receive_limits = ReceiveLimits { slot_bytes: 300, slots: 4, imms: 8 };
    let mut end = MessageChannel::new(receive_limits, receive_limits, 0);
    for slot in 0..4u32 {
        let token = crate::domain::Token { slot, ..Default::default() };
        end.submit(token, &std::sync::Arc::from(vec![1; 400 * slot as usize]));
    }
    end.imms_sent(3);
    let (mut ended, mut sent) = (Vec::new(), [0; 300]);
    for f in pieces(input) {
        while end.next_frame(&mut sent).is_some() {}
        let event = end.on_frame(f);
        end.slot_freed();
        let mut taken = 0;
        while let Some(m) = end.take_message(&TestMessageRoom) {
            assert!(m.len() < 100);
            taken += 1;
        }
        assert!(taken <= WINDOW && end.imm_room() <= 8);
        ended.extend(end.finished().map(|(t, _)| t.slot));
        if event.is_err() {
            break;
        }
    }
    ended.extend(end.abandon().iter().map(|t| t.slot));
    ended.sort_unstable();
    assert_eq!(ended, [0, 1, 2, 3], "a message ended twice, or never");
}

#[cfg(all(test, not(loom)))]
pub(crate) fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    use super::address::tests::sample_address;
    use crate::transport::nic::{
        frame::{result_entry, Header},
        handshake_fragments::HandshakeMessage,
    };
    let receive_limits = ReceiveLimits { slot_bytes: 4096, slots: 24, imms: 512 };
    let setup = QpSetup {
        data_qpn: 18,
        message_qpn: 19,
        data_psn: 1,
        message_psn: 2,
        mtu: 3,
        reads: 16,
        receive_limits,
    };
    let link_request = LinkRequest { exchange: [7; 16], from_endpoint: 1 };
    let body = |kind: u8, sealed: Vec<u8>| [&[kind], &sealed[10..]].concat();
    let piece = |f: &[u8]| [&[f.len() as u8], f].concat();
    let frame = |header: Header, body: Body<'_>| {
        let mut out = [0; 300];
        let n = frame::encode(&header, &body, &mut out);
        piece(&out[..n])
    };
    let message =
        HandshakeMessage { exchange: [7; 16], to_initiator: false, step: 1, bytes: vec![5; 300] };
    let messages: Vec<u8> = message.frames(200).flat_map(|f| piece(&f)).collect();
    let plain = Header::default();
    let credits = Header { frame_credits: 2, imm_credits: 3, ..plain };
    let fragment = |message, total: u32, offset: u32, bytes| {
        frame(plain, Body::Fragment { message, total, offset, bytes })
    };
    let frames = [
        frame(credits, Body::Heartbeat),
        fragment(0, 5, 0, b"hello"),
        fragment(1, 150, 0, &[1; 150]),
        frame(plain, Body::Results(&[result_entry(0, None), result_entry(1, Some(9))].concat())),
        frame(plain, Body::Close { gone: true, reason: b"gone" }),
    ];
    vec![
        ("place", body(0, sample_address("::ffff:10.0.0.1").encode())),
        ("setup", body(1, setup.encode())),
        ("intro", body(2, link_request.encode())),
        ("fragments", [&[3][..], &messages].concat()),
        ("frames", [&[4][..], &frames.concat()].concat()),
    ]
}
