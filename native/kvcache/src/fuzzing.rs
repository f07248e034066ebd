//! Entry points of fuzzers: everything that reads a peer's bytes. Each returns for any input and
//! asserts its properties.

use crate::{
    table::MAX_ENTRIES,
    wire::{sealed, Message, Offer},
};

/// Messages and offers: refused, or safe to use; what decodes encodes to something that decodes to
/// the same.
pub fn messages(bytes: &[u8]) {
    for bytes in [bytes.to_vec(), sealed(bytes)] {
        if let Ok(offer) = Offer::from_bytes(&bytes) {
            offer.layouts.iter().for_each(|layout| drop(layout.check()));
            assert_eq!(Offer::from_bytes(&offer.to_bytes()), Ok(offer));
        }
        let Ok(message) = Message::from_bytes(&bytes) else { continue };
        match &message {
            Message::Hello(hello) => hello.layouts.iter().for_each(|layout| drop(layout.check())),
            Message::Request { request, .. } => {
                let should = request.tokens.min(MAX_ENTRIES);
                for table in &request.tables {
                    let pages = table.pages(should);
                    assert!(pages.is_err() || pages.is_ok_and(|p| p.len() as u64 == should));
                }
            }
            _ => {}
        }
        assert_eq!(Message::from_bytes(&message.to_bytes()), Ok(message));
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::{fs, path::Path};

    use fabric_engine::{api::EngineConfig, simulation::SimNet, transport::sim::SimConfig};
    use proptest::prelude::*;

    use super::*;
    use crate::{
        layout::{BufferOffset, CacheGroup, CacheLayout, CacheTensor},
        wire::{Grant, Hello, OfferEnd, PageTable, RefusalReason, Request, RequestState},
    };

    pub(crate) fn layout() -> CacheLayout {
        let tensor = CacheTensor {
            name: "k".into(),
            heads: 2,
            first_head: 0,
            held_heads: 2,
            width: 4,
            dtype: "uint8".into(),
            page_stride: 32,
            head_stride: 16,
            token_stride: 4,
            places: vec![BufferOffset { buffer: 0, offset: 0 }],
        };
        let group = CacheGroup {
            name: "all".into(),
            layers: vec![0],
            page_tokens: 4,
            is_state: false,
            block_tokens: None,
            pages: 8,
            window: Some(6),
            tensors: vec![tensor],
        };
        CacheLayout { model: "m".into(), groups: vec![group], buffers: vec![256], is_stage: false }
    }

    /// One of each kind, as ends say them, without the mark and the version.
    fn sample_messages() -> Vec<(&'static str, Vec<u8>)> {
        let mut net = SimNet::new(SimConfig::default());
        let engine = net.engine(EngineConfig::default()).unwrap();
        let region = engine.alloc(256).unwrap();
        let (address, session, incarnation) = (engine.address().clone(), 1 << 32, 1 << 33);
        let hello = Hello {
            session,
            name: "decoder".into(),
            address: address.clone(),
            layouts: vec![layout()],
            grants: vec![Grant { rank: 0, buffers: vec![region.descriptor()], tail: None }],
            tail_nbytes: 0,
            beat_ms: 500,
        };
        let request = Request {
            seq: 3,
            tokens: 13,
            have: 4,
            salt: 7,
            tables: vec![PageTable::of(&[3, 4, 5, 1])],
            counters: vec![engine.counter().unwrap().reference()],
            tail_slot: 0,
            payload: b"a prompt".to_vec(),
        };
        let refused = RequestState::Refused {
            why: "full".into(),
            elsewhere: true,
            reason: RefusalReason::Busy,
        };
        let failed = RequestState::Failed("why".into());
        let states =
            vec![(1, RequestState::Open), (2, failed), (3, RequestState::Unknown), (4, refused)];
        let offer = Offer {
            name: "prefiller".into(),
            layouts: vec![layout()],
            ends: vec![OfferEnd { address: address.clone(), ranks: vec![(0, address)] }],
            tail_nbytes: 0,
            max_message: 1 << 20,
        };
        let why = "because".to_owned();
        let beat = |leases| Message::Beat { session, floor: 1, open: vec![1, 3], leases };
        [
            ("hello", Message::Hello(Box::new(hello)).to_bytes()),
            ("welcome", Message::Welcome { session, incarnation }.to_bytes()),
            ("declined", Message::Declined { session, why: why.clone() }.to_bytes()),
            (
                "request",
                Message::Request { session, incarnation, request: Box::new(request) }.to_bytes(),
            ),
            ("cancel", Message::Cancel { session, seq: 3 }.to_bytes()),
            ("beat", beat(Vec::new()).to_bytes()),
            ("beat_leases", beat(vec![u64::MAX, 5]).to_bytes()),
            ("status", Message::Status { session, incarnation, states }.to_bytes()),
            ("goodbye", Message::Goodbye { session, why }.to_bytes()),
            ("offer", offer.to_bytes()),
        ]
        .map(|(name, bytes)| (name, bytes[4..].to_vec()))
        .into()
    }

    #[test]
    fn what_ends_say_decodes() {
        for (name, body) in sample_messages() {
            let bytes = sealed(&body);
            let known = Message::from_bytes(&bytes).is_ok() || Offer::from_bytes(&bytes).is_ok();
            assert!(known, "{name}");
            messages(&body);
        }
    }

    /// Kept inputs of the fuzzer. `FABRIC_RAY_SEEDS=1` writes those anew that honest ends say.
    #[test]
    fn seeds_have_the_current_format_and_hold() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds/messages");
        if std::env::var_os("FABRIC_RAY_SEEDS").is_some() {
            fs::create_dir_all(&folder).unwrap();
            for (name, body) in sample_messages() {
                fs::write(folder.join(name), body).unwrap();
            }
        }
        // A fuzzer that begins with messages of an earlier format gets no further than their names.
        for (name, _) in sample_messages() {
            let bytes = sealed(&fs::read(folder.join(name)).unwrap());
            let known = Message::from_bytes(&bytes).is_ok() || Offer::from_bytes(&bytes).is_ok();
            assert!(known, "seed {name} is of another format; write them with FABRIC_RAY_SEEDS=1");
        }
        let seeds: Vec<_> = fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
        assert!(seeds.len() >= sample_messages().len());
        seeds.iter().for_each(|path| messages(&fs::read(path).unwrap()));
    }

    #[test]
    fn a_few_bytes_that_claim_many_pages_are_refused_before_any_is_listed() {
        let groups = layout().groups;
        assert_eq!(crate::table::entries(&groups, 13), Ok(4));
        assert!(crate::table::entries(&groups, u64::MAX).is_err());
        assert!(crate::table::entries(&[groups.clone(), groups].concat(), u64::MAX).is_err());
        let lie = rmp_serde::to_vec(&vec![(0u32, u32::MAX); 9]).unwrap();
        let table: PageTable = rmp_serde::from_slice(&lie).unwrap();
        assert!(table.pages(4).unwrap_err().contains("where the tokens fill 4"));
    }

    #[test]
    fn states_and_reasons_fit_the_smallest_message() {
        let why = crate::wire::reason(&"ä".repeat(4000));
        assert!(why.len() <= 512 && why.chars().all(|c| c == 'ä'));
        let refused = || RequestState::Refused {
            why: why.clone(),
            elsewhere: false,
            reason: RefusalReason::TooLong,
        };
        let states: Vec<_> = (0..1000)
            .map(|i| {
                (u64::MAX - i, if i < 500 { RequestState::Failed(why.clone()) } else { refused() })
            })
            .collect();
        let parts = Message::statuses(u64::MAX, u64::MAX, states.clone());
        let mut all = Vec::new();
        for part in parts {
            assert!(part.to_bytes().len() <= 4096);
            let Message::Status { states, .. } = part else { panic!("{part:?}") };
            all.extend(states);
        }
        assert_eq!(all, states);
        let numbers = |count| (0..count).map(|i| u64::MAX - i).collect::<Vec<u64>>();
        for (open, leases) in [(0, 0), (300, 0), (5, 700), (128, 128)] {
            let (open, leases) = (numbers(open), numbers(leases));
            let (mut all_open, mut all_leases) = (Vec::new(), Vec::new());
            for beat in Message::beats(u64::MAX, u64::MAX, &open, &leases) {
                assert!(beat.to_bytes().len() <= 4096);
                let Message::Beat { open, leases, .. } = beat else { panic!("{beat:?}") };
                all_open.extend(open);
                all_leases.extend(leases);
            }
            assert_eq!((all_open, all_leases), (open, leases));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn any_bytes_are_refused_or_safe(bytes in prop::collection::vec(any::<u8>(), 0..512)) {
            messages(&bytes);
        }

        #[test]
        fn changed_messages_are_refused_or_safe(
            which in 0usize..10,
            edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0u8..4), 1..6),
        ) {
            thread_local!(static SAID: Vec<(&'static str, Vec<u8>)> = sample_messages());
            let mut bytes = SAID.with(|said| said[which].1.clone());
            for (at, byte, how) in edits {
                let at = at.index(bytes.len());
                match how {
                    0 => bytes.truncate(at + 1),
                    1 => bytes.insert(at, byte),
                    2 => bytes[at] = bytes[at].wrapping_add(byte % 3).wrapping_sub(1),
                    _ => bytes[at] = byte,
                }
            }
            messages(&bytes);
        }
    }
}
