//! What failed: for the user, with whom and what to do next; between the layers, what a domain could not do.
//!
//! Each variant of [`EngineError`] maps one to one onto a Python exception under `FabricError`.

use std::time::Duration;

/// Why a call or a transfer of the engine failed.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum EngineError {
    #[error("{0}")]
    Invalid(String),

    #[error("{what}: bytes {offset}..{end} lie outside its {limit} bytes", end = .offset.saturating_add(*.len))]
    OutOfBounds { what: String, offset: u64, len: u64, limit: u64 },

    #[error(
        "peer {peer} was lost over {transport}: {cause}; reconnect to its new address or drop it"
    )]
    PeerLost { peer: String, transport: String, cause: String },

    /// One NIC of several: the peer is still there.
    #[error(
        "a rail of {transport} to peer {peer} was lost: {cause}; others still reach it: send again, with a fresh counter if it was counted, for its count may have arrived"
    )]
    RailLost { peer: String, transport: String, cause: String },

    #[error("no transport reaches peer {peer}: {reasons}")]
    Unreachable { peer: String, reasons: String },

    #[error("{what} is stale: {cause}; {remedy}")]
    Stale { what: String, cause: String, remedy: &'static str },

    #[error("peer {peer} refused the {op}: {cause}")]
    Refused { peer: String, op: &'static str, cause: String },

    /// The cause names the file.
    #[error("the {op} with {peer} failed at a file: {cause}; its bytes may have arrived in part, and were not counted: mend the file or its disk, then send again")]
    Storage { peer: String, op: &'static str, cause: String },

    /// `peer` is empty where nobody is named; `missing` counts the writes that an expectation lacks.
    #[error("{op}{with} did not finish within {after:?}{lack}{hint}", with = with(.peer), lack = lack(*.missing))]
    Timeout {
        op: &'static str,
        peer: String,
        missing: u64,
        after: Duration,
        quiesced: bool,
        /// What to look at, or to mind, after a separator; may be empty.
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

    #[error("handshake with {peer} failed: {cause}")]
    Handshake { peer: String, cause: String },

    #[error("no {wanted} transport can be used here: {reasons}")]
    TransportUnavailable { wanted: String, reasons: String },

    #[error("{call} failed: {cause}; {hint}")]
    Resource { call: &'static str, cause: String, hint: String },

    #[error("cannot decode {what}: {cause}")]
    Decode { what: &'static str, cause: String },

    #[error("the {what} was cancelled: {cause}")]
    Cancelled { what: &'static str, cause: String },
}

fn with(peer: &str) -> String {
    if peer.is_empty() {
        return String::new();
    }
    format!(" with {peer}")
}

fn lack(missing: u64) -> String {
    match missing {
        0 => String::new(),
        1 => ": 1 write is missing".into(),
        n => format!(": {n} writes are missing"),
    }
}

impl EngineError {
    /// Whether a call failed for a limit of this process rather than for what it asked.
    pub(crate) fn is_limit(errno: rustix::io::Errno) -> bool {
        use rustix::io::Errno;
        matches!(errno, Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS | Errno::FBIG)
    }

    /// The same, said of one operation of a batch.
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

    /// An operating-system call that failed for want of something the user can raise.
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

/// Why a domain could not do something.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum DomainError {
    #[error("{0}")]
    LinkDown(String),
    /// As `LinkDown`, and another attempt would find nobody: the peer said goodbye, or hasn't been heard
    /// for as long as a peer may be silent.
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
    /// A file could not be read or written; the text names it.
    #[error("{0}")]
    Storage(String),
}

impl DomainError {
    /// Whether it says that a link was lost, and nothing against what it carried.
    pub(crate) fn is_loss(&self) -> bool {
        matches!(self, Self::LinkDown(_) | Self::Gone(_) | Self::Io { .. })
    }

    pub(crate) fn io(call: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |errno| Self::Io { call, errno }
    }
}

pub type Result<T, E = EngineError> = std::result::Result<T, E>;
