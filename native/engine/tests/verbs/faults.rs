use std::time::{Duration, Instant};

use fabric_engine::{api::RailKey, EngineError};

use crate::world::{
    config, ends, engine, filled, import, interface, nic, pattern, run, wait, write, Side, Undo,
};

/// The default peer timeout, and some slack for emulated processors.
const SOON: Duration = Duration::from_secs(4);

#[test]
#[ignore = "needs RDMA devices"]
fn mr_2_a_forged_key_fails_alone_and_the_link_is_made_anew() {
    let (a, b) = (engine(Side::A), engine(Side::B));
    let src = filled(&a, 4096, 1);
    let dst = b.alloc(4096).unwrap();
    let imported = import(&a, &dst.descriptor().to_bytes());
    assert_eq!(wait(&write(&a, &src, &imported, 4096, None)), Ok(()));
    let mut forged = dst.descriptor();
    let keys: Vec<RailKey> = forged.rail_keys.into();
    let bad: Vec<RailKey> = keys.iter().map(|k| RailKey { key: k.key ^ 0x5A00, ..*k }).collect();
    forged.rail_keys = bad.into();
    let forged = import(&a, &forged.to_bytes());
    let counter = b.counter().unwrap();
    let (error, after) = ends(&write(&a, &src, &forged, 64, Some(counter.imm())));
    assert!(matches!(error, EngineError::Stale { .. } | EngineError::Refused { .. }), "{error}");
    assert!(error.to_string().contains("b#") && after < SOON, "{error} after {after:?}");
    for _ in 0..3 {
        assert_eq!(wait(&write(&a, &src, &imported, 4096, Some(counter.imm()))), Ok(()));
    }
    assert_eq!(wait(&counter.expect(3, &[], SOON).unwrap()), Ok(()));
    assert_eq!(counter.arrived(), 3);
    assert_eq!(dst.get(0, 4096).unwrap(), pattern(4096, 1));
}

#[test]
#[ignore = "needs RDMA devices"]
fn rs_4_both_ends_learn_of_a_link_that_is_down_and_use_it_when_it_is_up() {
    for down in [Side::A, Side::B] {
        let (a, b) = (engine(Side::A), engine(Side::B));
        let src = filled(&a, 8 << 20, 2);
        let dst = b.alloc(8 << 20).unwrap();
        let imported = import(&a, &dst.descriptor().to_bytes());
        assert_eq!(wait(&write(&a, &src, &imported, 64, None)), Ok(()));
        let back = b.peer(a.address()).unwrap();
        let awaited = b.counter().unwrap().expect(1, &[back], Duration::from_secs(30)).unwrap();
        let up = Undo::with(&format!("ip link set {} up", interface(down)));
        let under_way = write(&a, &src, &imported, 8 << 20, None);
        run(&format!("ip link set {} down", interface(down)));
        let start = Instant::now();
        // Operations under way may have completed just before.
        let error = wait(&under_way).and_then(|()| wait(&write(&a, &src, &imported, 64, None)));
        let (error, after) = (error.unwrap_err(), start.elapsed());
        // Or the link was already lost, and no new one could be made.
        let reported =
            matches!(error, EngineError::PeerLost { .. } | EngineError::Unreachable { .. });
        assert!(reported, "{error}");
        assert!(error.to_string().contains(&nic(Side::A)), "the NIC is named: {error}");
        assert!(after < SOON, "{error} after {after:?}");
        let (error, after) = ends(&awaited);
        assert!(matches!(error, EngineError::PeerLost { .. }), "{error}");
        assert!(after < SOON, "{error} after {after:?}");
        drop(up);
        // The port and the route to it take a moment to come up.
        let again = (0..20).find_map(|_| {
            std::thread::sleep(Duration::from_millis(500));
            wait(&write(&a, &src, &imported, 8 << 20, None)).ok()
        });
        assert!(again.is_some(), "the link is up and not used");
        assert!(dst.get(0, 8 << 20).unwrap() == pattern(8 << 20, 2));
    }
}

#[test]
#[ignore = "needs RDMA devices"]
fn handshakes_survive_lost_datagrams() {
    let ends = [interface(Side::A), interface(Side::B)];
    let undo: Vec<Undo> =
        ends.iter().map(|i| Undo::with(&format!("tc qdisc del dev {i} root"))).collect();
    for i in &ends {
        run(&format!("tc qdisc add dev {i} root netem loss 20%"));
    }
    for _ in 0..4 {
        let (a, b) = (engine(Side::A), engine(Side::B));
        let src = filled(&a, 64, 3);
        let dst = b.alloc(64).unwrap();
        let imported = import(&a, &dst.descriptor().to_bytes());
        assert_eq!(wait(&write(&a, &src, &imported, 64, None)), Ok(()));
        assert_eq!(dst.get(0, 64).unwrap(), pattern(64, 3));
    }
    drop(undo);
}

#[test]
#[ignore = "needs RDMA devices"]
fn handshakes_go_by_tcp_where_datagrams_do_not_get_through() {
    let mut undo = Vec::new();
    for i in [interface(Side::A), interface(Side::B)] {
        undo.push(Undo::with(&format!("tc qdisc del dev {i} root")));
        run(&format!("tc qdisc add dev {i} root handle 1: prio"));
        // Datagrams of queue pairs alone: opcode 0x64 behind 20 bytes of IP and 8 of UDP.
        run(&format!(
            "tc filter add dev {i} parent 1: protocol ip u32 match u8 0x64 0xff at 28 action drop"
        ));
    }
    let (a, b) = (engine(Side::A), engine(Side::B));
    let src = filled(&a, 64, 4);
    let dst = b.alloc(64).unwrap();
    let imported = import(&a, &dst.descriptor().to_bytes());
    assert_eq!(wait(&write(&a, &src, &imported, 64, None)), Ok(()));
    let why = a.explain(imported.peer()).unwrap().verdicts[0].reason.clone();
    assert!(why.contains("by TCP"), "{why}");
    assert!(why.contains("RoCE v2") && why.contains("mtu"), "{why}");
}

#[test]
#[ignore = "needs RDMA devices"]
fn mr_2_a_peer_that_restarted_is_not_taken_for_the_old_one() {
    let a = engine(Side::A);
    let src = filled(&a, 64, 5);
    let b = engine(Side::B);
    let dst = b.alloc(64).unwrap();
    let old = import(&a, &dst.descriptor().to_bytes());
    assert_eq!(wait(&write(&a, &src, &old, 64, None)), Ok(()));
    b.close();
    let b = engine(Side::B);
    let dst = b.alloc(64).unwrap();
    let (error, _) = ends(&write(&a, &src, &old, 64, None));
    let reported = matches!(
        error,
        EngineError::PeerLost { .. } | EngineError::Unreachable { .. } | EngineError::Stale { .. }
    );
    assert!(reported, "{error}");
    let new = import(&a, &dst.descriptor().to_bytes());
    assert_eq!(wait(&write(&a, &src, &new, 64, None)), Ok(()));
    assert_eq!(dst.get(0, 64).unwrap(), pattern(64, 5));
}

#[test]
#[ignore = "needs RDMA devices"]
fn the_same_token_is_needed() {
    let a = engine(Side::A);
    let other = fabric_engine::api::EngineConfig { token: Some(b"u".to_vec()), ..config(Side::B) };
    let b = fabric_engine::TransferEngine::open(other).unwrap();
    let src = filled(&a, 64, 6);
    let dst = b.alloc(64).unwrap();
    let imported = import(&a, &dst.descriptor().to_bytes());
    let (error, _) = ends(&write(&a, &src, &imported, 64, None));
    assert!(error.to_string().contains("token"), "{error}");
    assert_eq!(dst.get(0, 64).unwrap(), [0; 64]);
}
