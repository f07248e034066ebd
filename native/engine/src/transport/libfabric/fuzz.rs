//! Fuzz target of bytes from strangers and peers.

use super::{
    address::EndpointAddress,
    delivery::ReceivedFrames,
    handshake::{split_parts, LinkTerms},
    link::SEAL,
};
use crate::{
    fuzzing::{pieces, sealed},
    transport::nic::{
        frame::{self, Body},
        handshake_fragments::{Reassembly, MAX_EXCHANGE_MESSAGE},
    },
};

/// Endpoints, terms, handshake messages and frames. Checks that decoded values are bounded and
/// encode to the same bytes, and that a frame is new once, however often it arrives.
pub fn peer_input(bytes: &[u8]) {
    let Some((kind, input)) = bytes.split_first() else { return };
    match kind % 4 {
        0 => address(&sealed(b"FRlf", input)),
        1 => {
            let Ok(terms) = LinkTerms::decode(&sealed(b"FRlt", input)) else { return };
            assert!(terms.receive_limits.check().is_ok());
            assert_eq!(LinkTerms::decode(&terms.encode()), Ok(terms));
        }
        2 => messages(input),
        _ => frames(input),
    }
}

fn address(bytes: &[u8]) {
    let Ok(p) = EndpointAddress::decode(bytes) else { return };
    assert!((1..=512).contains(&p.address.len()) && p.label().len() < 400);
    assert_eq!(EndpointAddress::decode(&p.encode()), Ok(p));
}

/// Checks that reassembled messages split into their parts and are bounded.
fn messages(input: &[u8]) {
    let mut message = Reassembly::default();
    for f in pieces(input) {
        let Some((_, bytes)) = f.split_first_chunk::<SEAL>() else { continue };
        let Ok((_, Body::HandshakeFragment(p))) = frame::decode(bytes) else { continue };
        let Ok(Some(whole)) = message.take(&p) else { continue };
        assert!(whole.len() <= MAX_EXCHANGE_MESSAGE);
        if let Ok((first, second)) = split_parts(&whole) {
            assert_eq!(2 + first.len() + second.len(), whole.len());
            address(first);
            let _ = LinkTerms::decode(first);
        }
    }
}

/// Numbers and confirmations of frames.
fn frames(input: &[u8]) {
    let (mut seen, mut taken) = (ReceivedFrames::default(), Vec::new());
    for f in pieces(input) {
        let Some((seal, bytes)) = f.split_first_chunk::<SEAL>() else { continue };
        let [_, _, _, _, _, _, _, _, n0, n1, n2, n3, confirms @ ..] = *seal;
        let confirmed = ReceivedFrames::decode(confirms);
        assert_eq!(ReceivedFrames::decode(confirmed.encode()), confirmed);
        let number = u32::from_le_bytes([n0, n1, n2, n3]);
        match seen.insert(number) {
            Some(true) => {
                assert!(!taken.contains(&number), "a frame came twice");
                taken.push(number);
            }
            Some(false) => {}
            None => assert!(!taken.contains(&number)),
        }
        assert_eq!(ReceivedFrames::decode(seen.encode()), seen);
        let _ = frame::decode(bytes);
    }
}

#[cfg(all(test, not(loom)))]
pub(crate) fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    use super::{handshake::join_parts, link};
    use crate::transport::nic::{frame::Header, handshake_fragments::HandshakeMessage};
    let remote = EndpointAddress {
        provider: "efa".into(),
        protocol: 19,
        addr_format: 12,
        address: vec![7; 32],
        nic: "rdmap0s6-rdm".into(),
        host: [1; 16],
    };
    let terms = LinkTerms {
        endpoint: 3,
        link: 1 << 16,
        seal: 1 << 40,
        receive_limits: link::receive_limits(),
        scratch: 1 << 47,
        scratch_key: 9,
    };
    let body = |kind: u8, sealed: Vec<u8>| [&[kind], &sealed[10..]].concat();
    let piece = |f: &[u8]| [&[f.len() as u8], f].concat();
    let before = |number: u32, seen: &ReceivedFrames| {
        [&terms.seal.to_le_bytes()[..], &number.to_le_bytes(), &seen.encode()].concat()
    };
    let message = HandshakeMessage {
        exchange: [7; 16],
        to_initiator: false,
        step: 1,
        bytes: join_parts(&remote.encode(), &[5; 200]),
    };
    let none = before(0, &ReceivedFrames::default());
    let messages: Vec<u8> =
        message.frames(200).flat_map(|f| piece(&[none.as_slice(), &f].concat())).collect();
    let mut seen = ReceivedFrames::default();
    let mut input = vec![3];
    for (number, frame) in
        [(0, Body::Heartbeat), (2, Body::Fence(7)), (1, Body::Fenced(7)), (2, Body::Heartbeat)]
    {
        let mut out = [0; 64];
        let n = frame::encode(&Header::default(), &frame, &mut out);
        input.extend(piece(&[before(number, &seen).as_slice(), &out[..n]].concat()));
        seen.insert(number);
    }
    vec![
        ("place", body(0, remote.encode())),
        ("terms", body(1, terms.encode())),
        ("fragments", [&[2][..], &messages].concat()),
        ("frames", input),
    ]
}
