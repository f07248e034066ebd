//! Fuzz targets: all code that parses bytes of a peer. Each function must return for any input, and
//! asserts its invariants.

use crate::{
    api::{CounterRef, EngineAddress, EngineId, Envelope, RegionDescriptor, SegmentDescriptor},
    transport::handshake::{self, Acceptor, Credentials, Initiator, Secret},
};

pub use crate::{
    memory::fuzz::peer_names as regions,
    transport::{
        libfabric::fuzz::peer_input as libfabric, shm::fuzz::peer_input as shm,
        staged::fuzz::peer_requests as staging, tcp::fuzz::peer_input as tcp,
        verbs::fuzz::peer_input as verbs,
    },
};

/// A valid envelope around any body; without it the checksum would reject nearly every input.
pub(crate) fn sealed(magic: &[u8; 4], body: &[u8]) -> Vec<u8> {
    Envelope::new(*magic, "", 0).seal(body)
}

/// Splits the input into pieces, each preceded by its length in one byte.
pub(crate) fn pieces(mut bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let (n, rest) = bytes.split_first()?;
        let (piece, rest) = rest.split_at(rest.len().min(usize::from(*n)));
        bytes = rest;
        Some(piece)
    })
}

/// Credentials of an engine with a known id, so that seeds can name it.
pub(crate) fn known(id: u8) -> Credentials {
    let own = EngineAddress { id: EngineId([id; 16]), name: "e".into(), endpoints: Vec::new() };
    Credentials::new(own, Secret::new(Some(b"token")).expect("argon2 takes any token"))
}

/// Serialised values: what decodes encodes to something that decodes to the same.
pub fn values(bytes: &[u8]) {
    let _ = EngineAddress::from_bytes(bytes);
    let _ = RegionDescriptor::from_bytes(bytes);
    let _ = CounterRef::from_bytes(bytes);
    let _ = SegmentDescriptor::from_bytes(bytes);
    let Some((kind, body)) = bytes.split_first() else { return };
    match kind % 6 {
        0 => {
            let Ok(a) = EngineAddress::from_bytes(&sealed(b"FRad", body)) else { return };
            assert_eq!(EngineAddress::from_bytes(&a.to_bytes()), Ok(a));
        }
        1 => {
            let Ok(d) = RegionDescriptor::from_bytes(&sealed(b"FRmr", body)) else { return };
            assert!(d.slice(0, d.len).is_ok() && d.slice(d.len, 1).is_err());
            assert_eq!(RegionDescriptor::from_bytes(&d.to_bytes()), Ok(d));
        }
        2 => {
            let Ok(c) = CounterRef::from_bytes(&sealed(b"FRct", body)) else { return };
            assert_eq!(CounterRef::from_bytes(&c.to_bytes()), Ok(c));
        }
        3 => crate::group::fuzz_group_message(body),
        5 => {
            let Ok(d) = SegmentDescriptor::from_bytes(&sealed(b"FRsg", body)) else { return };
            assert!(d.parts.iter().all(|p| p.at + p.len <= d.len()));
            assert_eq!(SegmentDescriptor::from_bytes(&d.to_bytes()), Ok(d));
        }
        _ => crate::transport::tcp::fuzz::endpoint(&sealed(b"FRte", body)),
    }
}

/// Handshakes with a peer that doesn't know the token: neither side accepts it.
pub fn handshake(bytes: &[u8]) {
    let own = known(2);
    let (mut acceptor, mut pending) = (None, None);
    let Ok((initiator, _)) = Initiator::start(&known(1), own.own.id, Vec::new()) else { return };
    for body in pieces(bytes) {
        let message = handshake::sealed(body);
        match &pending {
            None => pending = initiator.on_welcome(&message).ok().map(|w| w.pending),
            Some(pending) => assert!(pending.on_accepted(&message).is_err()),
        }
        let _ = Acceptor::on_hello(&own, body);
        match &acceptor {
            None => acceptor = Acceptor::on_hello(&own, &message).ok().map(|(a, _)| a),
            Some(acceptor) => assert!(acceptor.on_proof(&message).is_err()),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::{fs, path::Path};

    use super::*;

    type Target = fn(&[u8]);

    /// Targets whose messages never change: incompatible builds detect each other by them.
    const FROZEN: [&str; 1] = ["handshake"];

    /// Fuzzing from random bytes finds little, and so do seeds of an older format.
    #[test]
    fn the_seeds_match_the_current_format() {
        let targets: [(&str, Target); 8] = [
            ("values", values),
            ("handshake", handshake),
            ("tcp", tcp),
            ("verbs", verbs),
            ("libfabric", libfabric),
            ("shm", shm),
            ("staging", staging),
            ("regions", regions),
        ];
        for (target, run) in targets {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds").join(target);
            for (name, seed) in seeds::of(target) {
                let path = folder.join(name);
                let frozen = FROZEN.contains(&target) && path.exists();
                if !frozen && std::env::var_os("FABRIC_RAY_SEEDS").is_some() {
                    fs::create_dir_all(&folder).unwrap();
                    fs::write(&path, &seed).unwrap();
                }
                let kept = fs::read(&path).unwrap_or_default();
                assert!(
                    kept == seed || !frozen,
                    "{}: handshake messages never change; append new fields, as docs/design/wire.md says",
                    path.display()
                );
                assert!(
                    kept == seed,
                    "{}: the wire format has changed; if that is intended, see docs/design/wire.md for the version, \
                     then rewrite the seeds as native/engine/fuzz/README.md says",
                    path.display()
                );
            }
            for file in fs::read_dir(folder).unwrap() {
                run(&fs::read(file.unwrap().path()).unwrap());
            }
        }
    }

    mod seeds {
        use super::super::*;
        use crate::{
            api::{Endpoint, Imm, PartLocation, RailKey, RegionKey, SegmentPart, TransportKind},
            transport::{libfabric, shm, staged, tcp, verbs},
        };

        type Seeds = Vec<(&'static str, Vec<u8>)>;

        pub fn of(target: &str) -> Seeds {
            match target {
                "values" => values(),
                "handshake" => handshake(),
                "tcp" => tcp::fuzz::seeds(),
                "verbs" => verbs::fuzz::seeds(),
                "libfabric" => libfabric::fuzz::seeds(),
                "staging" => staged::fuzz::seeds(),
                "regions" => crate::memory::fuzz::seeds(),
                _ => shm::fuzz::seeds(),
            }
        }

        /// The body of an envelope, preceded by the number of its kind.
        fn numbered(kind: u8, whole: &[u8]) -> Vec<u8> {
            [&[kind], &whole[10..]].concat()
        }

        fn values() -> Seeds {
            let data = tcp::fuzz::an_endpoint();
            let endpoints = vec![
                Endpoint { transport: TransportKind::Shm, data: Vec::new() },
                Endpoint { transport: TransportKind::Tcp, data: data.clone() },
            ];
            let owner = EngineAddress { id: EngineId([7; 16]), name: "rank 3".into(), endpoints };
            let counter = CounterRef::new(owner.id, Imm::allocated(1 << 19, 3));
            let region = RegionDescriptor {
                owner: owner.clone(),
                key: RegionKey { index: 5, rkey: u64::MAX },
                offset: 1 << 40,
                len: 4096,
                rail_keys: vec![RailKey { rail: 1, offset: 0, base: 1 << 47, key: 9 }].into(),
            };
            let part = SegmentPart {
                at: 64,
                len: 4096,
                key: region.key,
                offset: 1 << 20,
                rail_keys: region.rail_keys.clone(),
                location: PartLocation::Cuda { device: 1, pci: "0000:01:00.0".into() },
                transports: vec![TransportKind::Shm, TransportKind::Tcp],
            };
            let file = SegmentPart { at: 4160, location: PartLocation::File, ..part.clone() };
            let segment = SegmentDescriptor { owner: owner.clone(), parts: vec![part, file] };
            vec![
                ("segment", numbered(5, &segment.to_bytes())),
                ("address", numbered(0, &owner.to_bytes())),
                ("region", numbered(1, &region.to_bytes())),
                ("counter", numbered(2, &counter.to_bytes())),
                ("group-message", numbered(3, &crate::group::sample_group_message())),
                ("endpoint", numbered(4, &data)),
                ("whole", owner.to_bytes()),
            ]
        }

        fn handshake() -> Seeds {
            use crate::transport::handshake::samples;
            let piece = |m: &Vec<u8>| [&[m.len() as u8 - 10], &m[10..]].concat();
            let [hello, welcome, proof, accepted, refusal] = samples(known(1), known(2));
            vec![
                ("to_an_acceptor", [piece(&hello), piece(&proof)].concat()),
                ("to_an_initiator", [piece(&welcome), piece(&accepted)].concat()),
                ("refused", piece(&refusal)),
            ]
        }
    }
}
