//! Engines that close at an awkward moment.

use std::time::{Duration, Instant};

use fabric_engine::{
    api::{EngineConfig, TransportKind},
    EngineError, Local, Op, Remote, Submit, TransferEngine,
};

const PATIENCE: Duration = Duration::from_secs(20);

fn engine(transport: TransportKind) -> TransferEngine {
    let token = Some(b"t".to_vec());
    TransferEngine::open(EngineConfig { transports: vec![transport], token, ..Default::default() })
        .unwrap()
}

/// Both ends of a handshake are alive and of one mind until one of them leaves: that is a peer that
/// was lost, not one that talks nonsense.
#[test]
fn rs_4_who_closes_during_a_handshake_is_lost() {
    for transport in [TransportKind::Shm, TransportKind::Tcp] {
        let mut handshake = Duration::from_micros(300);
        for round in 0..300 {
            let (a, b) = (engine(transport), engine(transport));
            let (src, dst) = (a.alloc(64).unwrap(), b.alloc(64).unwrap());
            let there = a.import(&dst.descriptor()).unwrap();
            let op = Op::Write {
                src: Local { region: &src, offset: 0 },
                dst: Remote { region: &there, offset: 0 },
                len: 64,
                imm: None,
            };
            let start = Instant::now();
            let sent = a.submit(&[op], Submit::default()).unwrap();
            if round == 0 {
                // How long it takes on this machine.
                assert_eq!(sent.wait(PATIENCE), Some(Ok(())));
                handshake = start.elapsed();
                continue;
            }
            let after = handshake * round / 150;
            std::thread::sleep(after);
            b.close();
            let end = sent.wait(PATIENCE).expect("it ends");
            let lost = matches!(
                end,
                Ok(()) | Err(EngineError::PeerLost { .. } | EngineError::Unreachable { .. })
            );
            assert!(lost, "{transport}, closed after {after:?}: {end:?}");
        }
    }
}
