//! When the memory of a transfer may be used again.

/// Whether bytes of a transfer may still land (MR-1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quiescence {
    /// Bytes are under way.
    InFlight,
    /// No byte can land any more, and no memory of the transfer is in use.
    Quiesced,
    /// The links that carried it are lost, and the peers have not confirmed that they are down.
    Unknown,
}
