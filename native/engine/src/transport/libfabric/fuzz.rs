//! Whatever strangers and peers say to this transport before it becomes a write.

use super::{
    delivery::Seen,
    link::SEAL,
    place::Place,
    setup::{unpack, Terms},
};
use crate::{
    fuzzing::{pieces, sealed},
    transport::nic::{
        frame::{self, Body},
        handshake_fragments::{Reassembly, MAX_EXCHANGE_MESSAGE},
    },
};

/// Endpoints, terms, the parts of letters, and frames with what goes before them. Holds that what decodes is bounded
/// and encodes to the same, and that a frame comes once, however often it is said.
pub fn peer_says(bytes: &[u8]) {
    let Some((kind, said)) = bytes.split_first() else { return };
    match kind % 4 {
        0 => place(&sealed(b"FRlf", said)),
        1 => {
            let Ok(terms) = Terms::decode(&sealed(b"FRlt", said)) else { return };
            assert!(terms.receive_limits.check().is_ok());
            assert_eq!(Terms::decode(&terms.encode()), Ok(terms));
        }
        2 => letters(said),
        _ => frames(said),
    }
}

fn place(bytes: &[u8]) {
    let Ok(p) = Place::decode(bytes) else { return };
    assert!((1..=512).contains(&p.address.len()) && p.label().len() < 400);
    assert_eq!(Place::decode(&p.encode()), Ok(p));
}

/// What is whole of them comes apart into what makes it up, and no letter is longer than any may be.
fn letters(said: &[u8]) {
    let mut message = Reassembly::default();
    for f in pieces(said) {
        let Some((_, bytes)) = f.split_first_chunk::<SEAL>() else { continue };
        let Ok((_, Body::HandshakeFragment(p))) = frame::decode(bytes) else { continue };
        let Ok(Some(whole)) = message.take(&p) else { continue };
        assert!(whole.len() <= MAX_EXCHANGE_MESSAGE);
        if let Ok((first, second)) = unpack(&whole) {
            assert_eq!(2 + first.len() + second.len(), whole.len());
            place(first);
            let _ = Terms::decode(first);
        }
    }
}

/// Numbers and confirmations of frames.
fn frames(said: &[u8]) {
    let (mut seen, mut taken) = (Seen::default(), Vec::new());
    for f in pieces(said) {
        let Some((seal, bytes)) = f.split_first_chunk::<SEAL>() else { continue };
        let [_, _, _, _, _, _, _, _, n0, n1, n2, n3, confirms @ ..] = *seal;
        let confirmed = Seen::decode(confirms);
        assert_eq!(Seen::decode(confirmed.encode()), confirmed);
        let number = u32::from_le_bytes([n0, n1, n2, n3]);
        match seen.take(number) {
            Some(true) => {
                assert!(!taken.contains(&number), "a frame came twice");
                taken.push(number);
            }
            Some(false) => {}
            None => assert!(!taken.contains(&number)),
        }
        assert_eq!(Seen::decode(seen.encode()), seen);
        let _ = frame::decode(bytes);
    }
}

#[cfg(all(test, not(loom)))]
pub(crate) fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    use super::{link, setup::pack};
    use crate::transport::nic::{frame::Header, handshake_fragments::HandshakeMessage};
    let place = Place {
        provider: "efa".into(),
        protocol: 19,
        addr_format: 12,
        address: vec![7; 32],
        nic: "rdmap0s6-rdm".into(),
        host: [1; 16],
    };
    let terms = Terms {
        endpoint: 3,
        link: 1 << 16,
        seal: 1 << 40,
        receive_limits: link::receive_limits(),
        scratch: 1 << 47,
        scratch_key: 9,
    };
    let body = |kind: u8, sealed: Vec<u8>| [&[kind], &sealed[10..]].concat();
    let piece = |f: &[u8]| [&[f.len() as u8], f].concat();
    let before = |number: u32, seen: &Seen| {
        [&terms.seal.to_le_bytes()[..], &number.to_le_bytes(), &seen.encode()].concat()
    };
    let letter = HandshakeMessage {
        exchange: [7; 16],
        to_initiator: false,
        step: 1,
        bytes: pack(&place.encode(), &[5; 200]),
    };
    let none = before(0, &Seen::default());
    let letters: Vec<u8> =
        letter.frames(200).flat_map(|f| piece(&[none.as_slice(), &f].concat())).collect();
    let mut seen = Seen::default();
    let mut said = vec![3];
    for (number, frame) in
        [(0, Body::Heartbeat), (2, Body::Fence(7)), (1, Body::Fenced(7)), (2, Body::Heartbeat)]
    {
        let mut out = [0; 64];
        let n = frame::encode(&Header::default(), &frame, &mut out);
        said.extend(piece(&[before(number, &seen).as_slice(), &out[..n]].concat()));
        seen.take(number);
    }
    vec![
        ("place", body(0, place.encode())),
        ("terms", body(1, terms.encode())),
        ("fragments", [&[2][..], &letters].concat()),
        ("frames", said),
    ]
}
