use serde::{Deserialize, Serialize};

/// The kinds of link that an engine can use. On the wire they are numbers, in this order: new kinds go at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "u32", into = "u32")]
#[non_exhaustive]
pub enum TransportKind {
    Shm,
    Tcp,
    Sim,
    Null,
    Verbs,
    Libfabric,
    CudaIpc,
    /// From an engine to itself: between its memory and its files.
    File,
    /// One that peers of a later build have, by its number. It keeps its place among their endpoints, and nothing
    /// here uses it.
    Unknown(u32),
}

impl From<u32> for TransportKind {
    fn from(number: u32) -> Self {
        Self::ALL.get(number as usize).copied().unwrap_or(Self::Unknown(number))
    }
}

impl From<TransportKind> for u32 {
    fn from(kind: TransportKind) -> Self {
        match kind {
            TransportKind::Shm => 0,
            TransportKind::Tcp => 1,
            TransportKind::Sim => 2,
            TransportKind::Null => 3,
            TransportKind::Verbs => 4,
            TransportKind::Libfabric => 5,
            TransportKind::CudaIpc => 6,
            TransportKind::File => 7,
            TransportKind::Unknown(number) => number,
        }
    }
}

impl TransportKind {
    /// By their numbers.
    const ALL: [Self; 8] = [
        Self::Shm,
        Self::Tcp,
        Self::Sim,
        Self::Null,
        Self::Verbs,
        Self::Libfabric,
        Self::CudaIpc,
        Self::File,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Sim => "sim",
            Self::Null => "null",
            Self::Verbs => "verbs",
            Self::Libfabric => "libfabric",
            Self::CudaIpc => "cuda_ipc",
            Self::File => "file",
            Self::Unknown(_) => "one that is unknown here",
        }
    }

    /// Whether it drives NICs that place bytes by themselves, several of them side by side.
    pub fn has_nics(self) -> bool {
        matches!(self, Self::Verbs | Self::Libfabric)
    }
}

impl std::fmt::Display for TransportKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for TransportKind {
    type Err = crate::EngineError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|k| k.name() == s).ok_or_else(|| {
            crate::EngineError::Invalid(format!(
                "unknown transport {s:?}: use shm, tcp, verbs, libfabric, cuda_ipc or file"
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_wire() {
        for (number, kind) in (0..).zip(TransportKind::ALL) {
            assert_eq!((u32::from(kind), TransportKind::from(number)), (number, kind));
        }
        let later = TransportKind::from(8);
        assert_eq!((later, u32::from(later)), (TransportKind::Unknown(8), 8));
    }
}
