//! Errors of an engine whose required transports are missing, and fallbacks that must be allowed.

use fabric_engine::{
    api::{Endpoint, EngineAddress, EngineConfig, EngineId, NicConfig, Requirement, TransportKind},
    EngineError, Op, Submit, TransferEngine,
};

/// The error of an engine that doesn't open: its transport and reasons.
fn refusal(config: EngineConfig) -> (String, String) {
    match TransferEngine::open(config) {
        Err(EngineError::TransportUnavailable { wanted, reasons }) => (wanted, reasons),
        other => panic!("{other:?}"),
    }
}

fn over_libfabric_tcp(config: EngineConfig) -> EngineConfig {
    let nics = NicConfig { provider: Some("tcp".into()), ..Default::default() };
    EngineConfig { token: Some(b"t".to_vec()), nics, ..config }
}

/// Whether libfabric's tcp provider is available; prints `skipped` if not.
fn has_libfabric_tcp() -> bool {
    let transports = vec![TransportKind::Libfabric];
    let opened =
        TransferEngine::open(over_libfabric_tcp(EngineConfig { transports, ..Default::default() }));
    if let Err(e) = &opened {
        eprintln!("skipped: {e}");
    }
    opened.map(|engine| engine.close()).is_ok()
}

#[test]
fn rs_2_a_missing_required_transport_is_named_with_its_reason() {
    // No machine has such a NIC.
    let nics = NicConfig { names: vec!["no-such-nic".into()], ..Default::default() };
    let require = Some(Requirement::Rdma);
    let (wanted, reasons) = refusal(EngineConfig { require, nics, ..Default::default() });
    assert_eq!(wanted, "rdma");
    for kind in ["verbs", "libfabric"] {
        let why = reasons.split_once(&format!("{kind}: ")).map(|(_, why)| why.len());
        assert!(why.is_some_and(|len| len > 10), "{kind} is not among the reasons: {reasons}");
    }
}

#[test]
fn rs_2_a_required_transport_must_be_allowed() {
    for (require, allowed, word) in [
        (Requirement::Transport(TransportKind::Tcp), TransportKind::Shm, "tcp"),
        (Requirement::Rdma, TransportKind::Tcp, "rdma"),
    ] {
        let (require, transports) = (Some(require), vec![allowed]);
        let (wanted, reasons) = refusal(EngineConfig { require, transports, ..Default::default() });
        assert_eq!(wanted, word);
        assert!(reasons.contains("among the allowed transports"), "{reasons}");
    }
}

#[test]
fn rs_2_a_socket_based_nic_is_not_rdma_and_is_named() {
    if has_libfabric_tcp() {
        let require = Some(Requirement::Rdma);
        let (_, reasons) =
            refusal(over_libfabric_tcp(EngineConfig { require, ..Default::default() }));
        assert!(reasons.contains("verbs: "), "{reasons}");
        assert!(reasons.contains("is no RDMA device"), "{reasons}");
    }
}

#[test]
fn rs_2_incompatible_nics_fall_back_to_sockets_only_if_requested() {
    if !has_libfabric_tcp() {
        return;
    }
    let unreachable = [TransportKind::Verbs, TransportKind::Tcp]
        .map(|transport| Endpoint { transport, data: vec![127, 0, 0, 1, 0, 1] });
    let address = EngineAddress {
        id: EngineId([7; 16]),
        name: "with other NICs".into(),
        endpoints: unreachable.to_vec(),
    };
    let reasons = |transports| {
        let config = EngineConfig { transports, ..Default::default() };
        let engine = TransferEngine::open(over_libfabric_tcp(config)).unwrap();
        let peer = engine.peer(&address).unwrap();
        let send = Op::Send { peer: &peer, message: b"?" };
        let sent = engine.submit(&[send], Submit::default()).unwrap();
        sent.wait(std::time::Duration::from_secs(20)).expect("it ends").unwrap_err().to_string()
    };
    let error = reasons(Vec::new());
    assert!(error.contains("tcp is used only when asked for"), "{error}");
    let error = reasons(vec![TransportKind::Libfabric, TransportKind::Tcp]);
    assert!(!error.contains("only when asked for"), "{error}");
}
