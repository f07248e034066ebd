use std::sync::{atomic::AtomicU64, Arc};

use super::{
    driver::{GroupDriver, Worker},
    register::Segments,
    shared::{Clock, Shared},
    TransferEngine,
};
use crate::{
    api::{EngineAddress, EngineConfig, EngineId, Requirement, Spin, TransportKind},
    domain::{Domain, DomainError},
    group::Policy,
    locks::Mutex,
    memory::file::{FileBackend, FileQueue},
    transport,
    wake::Waker,
    EngineError, Result,
};

/// Domains for an engine without threads, as the simulator makes them.
pub struct Transports {
    pub id: EngineId,
    pub domains: Vec<Box<dyn Domain>>,
    /// Virtual nanoseconds.
    pub clock: Arc<AtomicU64>,
}

impl std::fmt::Debug for Transports {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Transports({} domains)", self.domains.len())
    }
}

impl TransferEngine {
    /// Opens an engine: its transports listen, and its worker thread runs.
    ///
    /// # Errors
    /// [`EngineError::TransportUnavailable`] if `require` can't be met, with each candidate and its
    /// reason (RS-2); [`EngineError::Resource`] if a system call fails.
    pub fn open(config: EngineConfig) -> Result<Self> {
        let id = EngineId::random()?;
        let kinds = chosen_kinds(&config)?;
        let mut domains: Vec<Box<dyn Domain>> = Vec::new();
        let mut failures: Vec<(TransportKind, String)> = Vec::new();
        let waker = Waker::default();
        let files = FileQueue::new(&waker, FileBackend::Best);
        for kind in kinds {
            match transport::open(kind, id, &config, (&waker, &files)) {
                Ok(opened) => domains.extend(opened),
                // Out of descriptors: fail now, instead of opening without this transport.
                Err(DomainError::Io { call, errno }) if EngineError::is_limit(errno) => {
                    return Err(EngineError::resource(call, errno));
                }
                // The user names ports because a firewall blocks all others, so this must fail.
                Err(DomainError::Ports(cause)) => {
                    let hint = "name other `ports`, or more of them: an engine takes one, and one for each verbs NIC; \
                                `ss -ltnp` shows the listener";
                    return Err(EngineError::Resource { call: "bind", cause, hint: hint.into() });
                }
                Err(e) => failures.push((kind, e.to_string())),
            }
        }
        check_required(&config, &domains, &failures)?;
        if config.require == Some(Requirement::Rdma) {
            domains.retain(|d| d.is_rdma() || !d.kind().has_nics());
        }
        for (kind, why) in &failures {
            // Most machines have neither NICs nor GPUs, but a missing shm or tcp needs a warning.
            match config.transports.contains(kind) || !kind.is_optional() {
                true => tracing::warn!(transport = %kind, %why, "transport left out"),
                false => tracing::debug!(transport = %kind, %why, "transport left out"),
            }
        }
        if domains.len() > usize::from(u8::MAX) {
            return Err(EngineError::Invalid("too many NICs for one engine".into()));
        }
        let (spin, always) = match config.spin {
            Spin::For(t) => (t, false),
            Spin::Always => (std::time::Duration::from_micros(50), true),
        };
        let nics = domains.iter().filter(|d| d.kind().has_nics());
        let cpus = transport::nics::cpus(&nics.map(|d| d.device().to_owned()).collect::<Vec<_>>());
        let devices: Vec<_> = domains.iter().map(|d| d.device().to_owned()).collect();
        let tiers = transport::nics::tiers(&devices, &config.nics);
        let address = address(id, &config.name, &mut domains);
        let max_message = max_message(&domains);
        let policy = policy(&config);
        let driver = GroupDriver::new(domains, (policy, &tiers), (spin, always), true)?;
        let limits = (config.op_timeout, max_message, config.records);
        let shared = Shared::new(address, driver, Clock::Machine, limits, waker)?;
        let worker = Worker::start(&shared, cpus, config.peer_timeout)?;
        let stage_foreign = config.stage_foreign;
        let (segments, worker) = (Segments::default(), Mutex::new(Some(worker)));
        let closed = Default::default();
        Ok(Self { shared, stage_foreign, takes_files: true, segments, worker, closed })
    }

    /// Opens an engine without threads over the given domains. The caller drives it with
    /// [`TransferEngine::drive`].
    pub fn open_manual(config: EngineConfig, transports: Transports) -> Result<Self> {
        let Transports { id, mut domains, clock } = transports;
        let address = address(id, &config.name, &mut domains);
        let max_message = max_message(&domains);
        let spin = (std::time::Duration::ZERO, false);
        let driver = GroupDriver::new(domains, (policy(&config), &[]), spin, false)?;
        let limits = (config.op_timeout, max_message, config.records);
        let waker = Waker::default();
        let shared = Shared::new(address, driver, Clock::Manual(clock), limits, waker)?;
        let (segments, worker) = (Segments::default(), Mutex::new(None));
        let (stage_foreign, takes_files) = (false, false);
        Ok(Self {
            shared,
            stage_foreign,
            takes_files,
            segments,
            worker,
            closed: Default::default(),
        })
    }
}

fn address(id: EngineId, name: &str, domains: &mut [Box<dyn Domain>]) -> EngineAddress {
    let endpoints = domains.iter().map(|d| d.endpoint()).collect();
    // The name is informative: cut it to the wire limit.
    let name = name.chars().take(128).collect();
    let address = EngineAddress { id, name, endpoints };
    domains.iter_mut().for_each(|d| d.announce(&address));
    address
}

fn max_message(domains: &[Box<dyn Domain>]) -> usize {
    domains.iter().map(|d| d.caps().max_message).min().unwrap_or(0)
}

fn policy(config: &EngineConfig) -> Policy {
    let names_fallback = config.transports.iter().any(|kind| kind.is_fallback());
    let EngineConfig { peer_timeout, heal, rail_window, receive_window, records, .. } = *config;
    let spray = config.nics.spray;
    Policy { names_fallback, peer_timeout, spray, heal, rail_window, receive_window, records }
}

/// Fails unless the required transport is open (RS-2).
fn check_required(
    config: &EngineConfig,
    domains: &[Box<dyn Domain>],
    failures: &[(TransportKind, String)],
) -> Result<()> {
    let met = match config.require {
        None => domains.iter().any(|d| !d.kind().is_loopback() || config.transports == [d.kind()]),
        Some(Requirement::Transport(kind)) => domains.iter().any(|d| d.kind() == kind),
        Some(Requirement::Rdma) => domains.iter().any(|d| d.is_rdma()),
    };
    if met {
        return Ok(());
    }
    let wanted = match config.require {
        Some(Requirement::Rdma) => "rdma".to_owned(),
        Some(Requirement::Transport(kind)) => kind.to_string(),
        None => failures.first().map_or("usable".to_owned(), |(kind, _)| kind.to_string()),
    };
    // List only failures of transports that `require` allows.
    let asked = |kind: TransportKind| match config.require {
        None => true,
        Some(Requirement::Transport(one)) => kind == one,
        Some(Requirement::Rdma) => kind.has_nics(),
    };
    let soft = domains.iter().filter(|d| d.kind().has_nics() && asked(d.kind()) && !d.is_rdma());
    let soft = soft.map(|d| format!("{} {} is no RDMA device", d.kind(), d.device()));
    let failures = failures.iter().filter(|(kind, _)| asked(*kind));
    let reasons: Vec<_> = failures.map(|(k, why)| format!("{k}: {why}")).chain(soft).collect();
    Err(EngineError::TransportUnavailable { wanted, reasons: reasons.join("; ") })
}

fn chosen_kinds(config: &EngineConfig) -> Result<Vec<TransportKind>> {
    let mut kinds = config.transports.clone();
    if kinds.is_empty() {
        kinds = TransportKind::defaults();
    }
    match config.require {
        None => {}
        Some(Requirement::Transport(kind)) if kinds.contains(&kind) => {}
        Some(Requirement::Transport(kind)) => {
            return Err(EngineError::TransportUnavailable {
                wanted: kind.to_string(),
                reasons: format!("{kind} is required but not among the allowed transports"),
            });
        }
        Some(Requirement::Rdma) if !kinds.iter().any(|k| k.has_nics()) => {
            return Err(EngineError::TransportUnavailable {
                wanted: "rdma".into(),
                reasons: "neither verbs nor libfabric is among the allowed transports".into(),
            });
        }
        // Sockets are the slow path that `require` excludes.
        Some(Requirement::Rdma) => kinds.retain(|k| !k.is_fallback()),
    }
    // They lead to no peer, so the configuration need not allow them.
    let missing: Vec<_> = TransportKind::loopbacks().filter(|k| !kinds.contains(k)).collect();
    kinds.extend(missing);
    let secret = config.token.as_ref().is_some_and(|t| !t.is_empty());
    let public = config.bind.iter().find(|ip| !ip.is_loopback());
    let listens = kinds.iter().any(|k| k.listens());
    if let Some(ip) = public.filter(|_| !secret && listens) {
        return Err(EngineError::Invalid(format!(
            "without a token any process that reaches {ip} could write to this engine's memory; give all \
             engines the same token, or bind a loopback address"
        )));
    }
    if config.token.as_ref().is_some_and(|t| t.is_empty()) {
        return Err(EngineError::Invalid(
            "the token is empty, which disables authentication; omit it or set a non-empty token"
                .into(),
        ));
    }
    Ok(kinds)
}
