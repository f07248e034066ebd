//! Errors: [`EngineError`] for users, [`DomainError`] between the layers.
//!
//! Each variant of [`EngineError`] maps one to one onto a Python exception under `FabricError`.

use std::time::Duration;

/// The error of a call or a transfer: what failed, with which peer, and what to do next.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum EngineError {
    #[error("{0}")]
    Invalid(String),

    #[error("{what}: bytes {offset}..{end} lie outside its {limit} bytes; give a range within them", end = .offset.saturating_add(*.len))]
    OutOfBounds { what: String, offset: u64, len: u64, limit: u64 },

    #[error(
        "peer {peer} was lost over {transport}: {on}{cause}; reconnect to its new address or drop it",
        on = on(.nic)
    )]
    PeerLost {
        peer: String,
        transport: String,
        /// Empty if the transport has none.
        nic: String,
        cause: String,
        link: Box<LostLink>,
    },

    /// One NIC of several was lost; others reach the peer.
    #[error(
        "a rail of {transport} to peer {peer} was lost: {on}{cause}; others still reach it: send again, with a fresh counter if it was counted, for its count may have arrived",
        on = on(.nic)
    )]
    RailLost { peer: String, transport: String, nic: String, cause: String, link: Box<LostLink> },

    #[error("no transport reaches peer {peer}: {}", advised(.reasons, "allow one on both sides that both hosts have, as `fabric-ray doctor` lists them"))]
    Unreachable { peer: String, reasons: String },

    #[error("{what} is stale: {cause}; {remedy}")]
    Stale { what: String, cause: String, remedy: &'static str },

    #[error("peer {peer} refused the {op}: {}", advised(.cause, "ask its owner what it lets you do, and for a fresh descriptor"))]
    Refused { peer: String, op: &'static str, cause: String },

    /// A file failed; the cause names it.
    #[error("the {op} with {peer} failed at a file: {cause}; its bytes may have arrived in part, and were not counted: mend the file or its disk, then send again")]
    Storage { peer: String, op: &'static str, cause: String },

    /// `peer` is empty if no peer is known; `missing` counts the writes that an expectation lacks.
    #[error("{op}{with} did not finish within {after:?}{lack}{hint}", with = with(.peer), lack = missing_text(*.missing), hint = or_longer(.hint))]
    Timeout {
        op: &'static str,
        peer: String,
        missing: u64,
        after: Duration,
        quiesced: bool,
        /// Advice, after a separator; if empty, the text advises a longer timeout.
        hint: &'static str,
    },

    #[error("{what} is not quiesced after {after:?}: {cause}; the engine keeps its memory until the peer acknowledges or dies")]
    NotQuiesced { what: String, after: Duration, cause: String },

    #[error("the engine is closed; open a new one")]
    Closed,

    #[error("the engine is being drained: it ends what it has begun and takes nothing new; open another one")]
    Draining,

    #[error("this engine belongs to process {owner}, this is process {here}; open one engine per process, after fork")]
    Forked { owner: u32, here: u32 },

    #[error("handshake with {peer} failed: {}", advised(.cause, "run versions that know each other, with the same token, on both sides"))]
    Handshake { peer: String, cause: String },

    #[error("no {wanted} transport can be used here: {reasons}; run `fabric-ray doctor` for what this machine has, or require another")]
    TransportUnavailable { wanted: String, reasons: String },

    #[error("{call} failed: {cause}; {hint}")]
    Resource { call: &'static str, cause: String, hint: String },

    #[error("cannot decode {what}: {}", advised(.cause, "fetch it anew from its owner"))]
    Decode { what: &'static str, cause: String },

    #[error("the {what} was cancelled: {}", advised(.cause, "begin it anew if it is still wanted"))]
    Cancelled { what: &'static str, cause: String },
}

/// Facts of a lost link, for programs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LostLink {
    /// The error of the system call, if one failed.
    pub errno: Option<rustix::io::Errno>,
    /// The number of the local rail.
    pub rail: Option<u8>,
    /// The peer's incarnation: an engine's id as hex, or a rank's number.
    pub incarnation: Option<String>,
}

fn with(peer: &str) -> String {
    if peer.is_empty() {
        return String::new();
    }
    format!(" with {peer}")
}

/// Appends `remedy` to a cause that has no advice of its own.
fn advised(cause: &str, remedy: &str) -> String {
    match cause.contains("; ") {
        true => cause.to_owned(),
        false => format!("{cause}; {remedy}"),
    }
}

fn or_longer(hint: &str) -> &str {
    match hint {
        "" => "; see whether the peer is overloaded, or give it longer",
        hint => hint,
    }
}

fn on(nic: &str) -> String {
    match nic {
        "" => String::new(),
        nic => format!("{nic}: "),
    }
}

fn missing_text(missing: u64) -> String {
    match missing {
        0 => String::new(),
        1 => ": 1 write is missing".into(),
        n => format!(": {n} writes are missing"),
    }
}

impl EngineError {
    /// One error of each kind, with typical fields, for code that must handle all kinds.
    #[doc(hidden)]
    pub fn one_of_each() -> Vec<Self> {
        let peer = || "rank-3#5f0c".to_owned();
        let (transport, nic) = (|| "verbs".to_owned(), || "mlx5_1".to_owned());
        let cause = || "the link broke".to_owned();
        let link = || {
            Box::new(LostLink {
                errno: Some(rustix::io::Errno::CONNRESET),
                rail: Some(1),
                incarnation: Some("5f0c".into()),
            })
        };
        let after = Duration::from_secs(2);
        let timeout = |hint| Self::Timeout {
            op: "write",
            peer: peer(),
            missing: 3,
            after,
            quiesced: true,
            hint,
        };
        vec![
            Self::Invalid("a read of zero bytes does nothing; name how many".into()),
            Self::OutOfBounds { what: "source".into(), offset: 8, len: 9, limit: 16 },
            Self::PeerLost {
                peer: peer(),
                transport: transport(),
                nic: nic(),
                cause: cause(),
                link: link(),
            },
            Self::RailLost {
                peer: peer(),
                transport: transport(),
                nic: nic(),
                cause: cause(),
                link: link(),
            },
            Self::Unreachable { peer: peer(), reasons: "verbs: no such NIC".into() },
            Self::Stale {
                what: "region 5".into(),
                cause: "it was deregistered".into(),
                remedy: "fetch a fresh descriptor from its owner",
            },
            Self::Refused { peer: peer(), op: "write", cause: "its grant has ended".into() },
            Self::Storage { peer: peer(), op: "write", cause: "/kv: the disk is full".into() },
            timeout(""),
            timeout(": there is no connection to it yet; explain() says what was tried"),
            Self::NotQuiesced { what: "region 5".into(), after, cause: "2 writes".into() },
            Self::Closed,
            Self::Draining,
            Self::Forked { owner: 1, here: 2 },
            Self::Handshake { peer: peer(), cause: "its token is another".into() },
            Self::TransportUnavailable {
                wanted: "rdma".into(),
                reasons: "verbs: there is no NIC".into(),
            },
            Self::resource("mmap", rustix::io::Errno::NOMEM),
            Self::Decode { what: "a region", cause: "3 bytes, truncated".into() },
            Self::Cancelled { what: "write", cause: "as was asked".into() },
        ]
    }

    /// Whether a call failed because of a limit of this process.
    pub(crate) fn is_limit(errno: rustix::io::Errno) -> bool {
        use rustix::io::Errno;
        matches!(errno, Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS | Errno::FBIG)
    }

    /// The error, as one of operation `i` of a batch.
    pub(crate) fn in_operation(self, i: usize) -> Self {
        match self {
            Self::Invalid(text) => Self::Invalid(format!("operation {i} of the batch: {text}")),
            Self::OutOfBounds { what, offset, len, limit } => {
                let what = format!("operation {i} of the batch, {what}");
                Self::OutOfBounds { what, offset, len, limit }
            }
            other => other,
        }
    }

    /// The error of a system call that failed for lack of a resource.
    pub(crate) fn resource(call: &'static str, errno: rustix::io::Errno) -> Self {
        use rustix::io::Errno;
        let hint = match errno {
            Errno::MFILE => {
                let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
                let now = limit.map_or("unlimited".to_owned(), |n| n.to_string());
                let hint = format!("raise the open-file limit of this process (ulimit -n: {now})");
                return Self::Resource { call, cause: errno.to_string(), hint };
            }
            Errno::NFILE => "raise the open-file limit of this machine (sysctl fs.file-max)",
            Errno::NOMEM | Errno::NOBUFS => {
                "free memory, or raise the memory limit of this container"
            }
            Errno::NOSPC => "free space on the file system or the memory behind it",
            Errno::PERM | Errno::ACCESS => "grant the permission named by the call",
            Errno::AGAIN => "lower the number of threads or processes, or raise their limit",
            Errno::FBIG => {
                "raise the file-size limit of this process (ulimit -f): shared memory counts as files"
            }
            _ => "see the errno for the cause",
        };
        Self::Resource { call, cause: errno.to_string(), hint: hint.into() }
    }
}

/// The error of a domain.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum DomainError {
    #[error("{0}")]
    LinkDown(String),
    /// As `LinkDown`, and the peer is lost: it closed its engine, or was silent for the peer
    /// timeout.
    #[error("{0}")]
    Gone(String),
    #[error("{0}")]
    Stale(String),
    #[error("{0}")]
    Refused(String),
    #[error("{0}")]
    Handshake(String),
    #[error("{call}: {errno}")]
    Io { call: &'static str, errno: rustix::io::Errno },
    #[error("{0}")]
    Unavailable(String),
    /// The configured ports are not available; the text names them.
    #[error("{0}")]
    Ports(String),
    /// Reading or writing a file failed; the text names it.
    #[error("{0}")]
    Storage(String),
}

impl DomainError {
    /// Whether it reports a lost link, and not a fault of the work.
    pub(crate) fn is_loss(&self) -> bool {
        matches!(self, Self::LinkDown(_) | Self::Gone(_) | Self::Io { .. })
    }

    pub(crate) fn io(call: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |errno| Self::Io { call, errno }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::HashSet;

    use rustix::io::Errno;

    use super::*;

    #[test]
    fn every_kind_of_error_is_among_those_that_are_shown() {
        let (_, rest) = include_str!("error.rs").split_once("pub enum EngineError {").unwrap();
        let kinds = rest.split_once("\n}\n").unwrap().0.matches("#[error(").count();
        let shown: HashSet<_> =
            EngineError::one_of_each().iter().map(std::mem::discriminant).collect();
        assert_eq!(shown.len(), kinds);
    }

    #[test]
    fn every_error_says_what_to_do_next() {
        let limits = [Errno::MFILE, Errno::NFILE, Errno::NOSPC, Errno::PERM, Errno::AGAIN];
        let limits = limits.map(|errno| EngineError::resource("open", errno));
        for error in EngineError::one_of_each().into_iter().chain(limits) {
            let text = error.to_string();
            let remedy = text.rsplit_once("; ").map_or("", |(_, remedy)| remedy);
            assert!(remedy.len() > 8 && !text.ends_with('.'), "{text}");
            assert!(text.starts_with(|c: char| c.is_lowercase()), "{text}");
        }
    }

    #[test]
    fn a_cause_with_advice_of_its_own_gets_no_other() {
        assert_eq!(advised("no room; drop some", "wait"), "no room; drop some");
        assert_eq!(advised("no room", "wait"), "no room; wait");
    }
}

pub type Result<T, E = EngineError> = std::result::Result<T, E>;
