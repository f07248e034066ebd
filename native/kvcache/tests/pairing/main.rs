//! Which bytes go where between two instances' caches.

mod bytes;
mod caches;
mod counts;
mod layouts;
mod refusals;
mod replay;
mod requests;
mod sizes;
mod spread;
mod stages;

use proptest::prelude::ProptestConfig;

/// How many examples a property is tried with: `all`, or a part where `FABRIC_RAY_EXAMPLES_DIVISOR`
/// asks for one.
fn cases(all: u32) -> ProptestConfig {
    let divisor = std::env::var("FABRIC_RAY_EXAMPLES_DIVISOR").map_or(1, |v| v.parse().unwrap());
    ProptestConfig { cases: all.div_ceil(divisor), ..ProptestConfig::default() }
}
