//! The span of a request: a number that all its flight records have, on all engines.

/// Identifies a request in the flight records of all engines that take part. Every process computes
/// the same number from the user's text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span(pub u64);

impl Span {
    /// The span of work without a request.
    pub const NONE: Self = Self(0);

    /// The span of a name: 64-bit FNV-1a of its bytes.
    pub fn named(name: &str) -> Self {
        const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
        const PRIME: u64 = 0x0000_0100_0000_01b3;
        let hash = name.bytes().fold(BASIS, |h, b| (h ^ u64::from(b)).wrapping_mul(PRIME));
        Self(hash.max(1))
    }

    pub fn is_none(self) -> bool {
        self == Self::NONE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_the_same_span_everywhere() {
        // Test vectors of FNV-1a.
        assert_eq!(Span::named("a").0, 0xaf63_dc4c_8601_ec8c);
        assert_eq!(Span::named("foobar").0, 0x8594_4171_f739_67e8);
        assert!(!Span::named("").is_none());
    }
}
