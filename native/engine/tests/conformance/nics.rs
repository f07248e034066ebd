//! Engines over NICs. `FABRIC_TEST_NICS_A` lists the NICs of the first engine of a test,
//! `FABRIC_TEST_NICS_B` those of all others, separated by commas; if unset, all NICs of the
//! machine.

use fabric_engine::{
    api::{EngineConfig, NicConfig, TransportKind},
    TransferEngine,
};

use crate::worlds::{Threads, World};

fn named(variable: &str) -> Vec<String> {
    let names = std::env::var(variable).unwrap_or_default();
    names.split(',').filter(|n| !n.is_empty()).map(str::to_owned).collect()
}

fn nics(provider: Option<&str>, shuffle: Option<u64>) -> [NicConfig; 2] {
    ["FABRIC_TEST_NICS_A", "FABRIC_TEST_NICS_B"].map(|variable| NicConfig {
        names: named(variable),
        provider: provider.map(str::to_owned),
        shuffle,
        ..Default::default()
    })
}

pub fn verbs() -> Threads {
    Threads::over(TransportKind::Verbs, nics(None, None))
}

/// Runs a test over a provider; prints `skipped` and passes where libfabric or the provider is
/// missing.
pub fn libfabric(provider: &str, shuffle: Option<u64>, test: fn(&mut dyn World)) {
    let nics = nics(Some(provider), shuffle);
    let config = EngineConfig {
        transports: vec![TransportKind::Libfabric],
        token: Some(b"t".to_vec()),
        nics: nics[0].clone(),
        ..Default::default()
    };
    match TransferEngine::open(config) {
        Ok(engine) => engine.close(),
        Err(e) if std::env::var_os("FABRIC_TEST_REQUIRE").is_some() => panic!("{e}"),
        Err(e) => return eprintln!("skipped: {e}"),
    }
    test(&mut Threads::over(TransportKind::Libfabric, nics));
}
