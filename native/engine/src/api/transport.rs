use serde::{Deserialize, Serialize};

/// Properties of a transport, whatever its link is. The group and the engine ask for these and name
/// no transport.
#[derive(Clone, Copy)]
struct Traits {
    /// Position among the transports that an engine tries when its configuration names none.
    default_order: Option<u8>,
    /// Whether it drives RDMA NICs, several at a time.
    nics: bool,
    /// Whether it connects an engine to itself only.
    loopback: bool,
    /// Whether it is left out if both sides have NICs, unless the configuration names it (RS-2).
    fallback: bool,
    /// Whether its listeners accept connections on the addresses of `bind`.
    listens: bool,
    /// Many machines lack it: if it does not open, only the debug log says so.
    optional: bool,
    /// Whether only tests and measurements use it: errors don't propose it.
    internal: bool,
}

const PLAIN: Traits = Traits {
    default_order: None,
    nics: false,
    loopback: false,
    fallback: false,
    listens: false,
    optional: false,
    internal: false,
};

/// A row for each transport: its number on the wire, its name and its traits. `transport::open`
/// opens it.
macro_rules! transports {
    ($($(#[$doc:meta])* $kind:ident = $number:literal, $name:literal, $traits:expr;)*) => {
        /// The kinds of link that an engine can use. On the wire they are numbers: new kinds go at
        /// the end.
        #[derive(
            Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
        )]
        #[serde(from = "u32", into = "u32")]
        #[non_exhaustive]
        pub enum TransportKind {
            $($(#[$doc])* $kind,)*
            /// A transport of a later build, by its number. It keeps its position among the peer's
            /// endpoints; this build does not use it.
            Unknown(u32),
        }

        impl From<u32> for TransportKind {
            fn from(number: u32) -> Self {
                match number {
                    $($number => Self::$kind,)*
                    _ => Self::Unknown(number),
                }
            }
        }

        impl From<TransportKind> for u32 {
            fn from(kind: TransportKind) -> Self {
                match kind {
                    $(TransportKind::$kind => $number,)*
                    TransportKind::Unknown(number) => number,
                }
            }
        }

        impl TransportKind {
            /// By their numbers.
            const ALL: &[Self] = &[$(Self::$kind),*];

            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$kind => $name,)*
                    Self::Unknown(_) => "one that is unknown here",
                }
            }

            fn traits(self) -> Traits {
                match self {
                    $(Self::$kind => $traits,)*
                    Self::Unknown(_) => PLAIN,
                }
            }
        }
    };
}

transports! {
    Shm = 0, "shm", Traits { default_order: Some(1), ..PLAIN };
    Tcp = 1, "tcp", Traits {
        default_order: Some(4), fallback: true, listens: true, ..PLAIN
    };
    Sim = 2, "sim", Traits { internal: true, ..PLAIN };
    Null = 3, "null", Traits { internal: true, ..PLAIN };
    Verbs = 4, "verbs", Traits {
        default_order: Some(2), nics: true, listens: true, optional: true, ..PLAIN
    };
    Libfabric = 5, "libfabric", Traits {
        default_order: Some(3), nics: true, optional: true, ..PLAIN
    };
    CudaIpc = 6, "cuda_ipc", Traits { default_order: Some(0), optional: true, ..PLAIN };
    /// From an engine to itself: between its memory and its files.
    File = 7, "file", Traits { loopback: true, ..PLAIN };
}

impl TransportKind {
    /// Transports that an engine tries when its configuration names none, in this order: same host
    /// first, then NICs, then sockets.
    pub(crate) fn defaults() -> Vec<Self> {
        let order = |kind: &Self| kind.traits().default_order;
        let mut kinds: Vec<_> = Self::ALL.iter().copied().filter(|k| order(k).is_some()).collect();
        kinds.sort_by_key(order);
        kinds
    }

    /// The transports from an engine to itself: every engine has them.
    pub(crate) fn loopbacks() -> impl Iterator<Item = Self> {
        Self::ALL.iter().copied().filter(|kind| kind.is_loopback())
    }

    /// Whether it drives NICs that place bytes by themselves, several of them side by side.
    pub fn has_nics(self) -> bool {
        self.traits().nics
    }

    /// Whether it connects an engine to itself only.
    pub fn is_loopback(self) -> bool {
        self.traits().loopback
    }

    /// Whether it is left out where both sides have NICs, unless the configuration names it (RS-2).
    pub(crate) fn is_fallback(self) -> bool {
        self.traits().fallback
    }

    pub(crate) fn listens(self) -> bool {
        self.traits().listens
    }

    /// Whether many machines lack it.
    pub(crate) fn is_optional(self) -> bool {
        self.traits().optional
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
        Self::ALL.iter().copied().find(|k| k.name() == s).ok_or_else(|| {
            let known = Self::ALL.iter().filter(|k| !k.traits().internal).map(|k| k.name());
            let known = known.collect::<Vec<_>>().join(", ");
            crate::EngineError::Invalid(format!("unknown transport {s:?}: use one of {known}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_wire() {
        for (number, kind) in (0..).zip(TransportKind::ALL.iter().copied()) {
            assert_eq!((u32::from(kind), TransportKind::from(number)), (number, kind));
        }
        let number = TransportKind::ALL.len() as u32;
        let later = TransportKind::from(number);
        assert_eq!((later, u32::from(later)), (TransportKind::Unknown(number), number));
    }

    #[test]
    fn an_unknown_name_is_answered_with_those_of_users() {
        let error = "sharedmem".parse::<TransportKind>().unwrap_err().to_string();
        let known = ["shm", "tcp", "verbs", "libfabric", "cuda_ipc", "file"];
        assert!(known.iter().all(|name| error.contains(name)), "{error}");
        assert!(!["sim", "null"].iter().any(|name| error.contains(name)), "{error}");
    }

    #[test]
    fn an_engine_tries_the_same_host_first_then_nics_then_sockets() {
        use TransportKind::{CudaIpc, File, Libfabric, Shm, Tcp, Verbs};
        assert_eq!(TransportKind::defaults(), [CudaIpc, Shm, Verbs, Libfabric, Tcp]);
        assert_eq!(TransportKind::loopbacks().collect::<Vec<_>>(), [File]);
    }
}
