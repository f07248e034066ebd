//! Engines that close at an awkward moment.

use std::time::{Duration, Instant};

use fabric_engine::{api::TransportKind, EngineError, Local, Op, Remote, Submit};

use super::{engine, TIMEOUT};

/// A peer that closes during a handshake is lost; the handshake itself is not at fault.
#[test]
fn rs_4_a_peer_that_closes_during_a_handshake_is_lost() {
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
                assert_eq!(sent.wait(TIMEOUT), Some(Ok(())));
                handshake = start.elapsed();
                continue;
            }
            let after = handshake * round / 150;
            std::thread::sleep(after);
            b.close();
            let end = sent.wait(TIMEOUT).expect("it ends");
            let lost = matches!(
                end,
                Ok(()) | Err(EngineError::PeerLost { .. } | EngineError::Unreachable { .. })
            );
            assert!(lost, "{transport}, closed after {after:?}: {end:?}");
        }
    }
}
