//! Plans: of small cases, of drawn ones, and what no plan is made of.

mod balance;
mod common;
mod decoding;
mod delta;
mod examples;
mod properties;
mod refusals;
mod replicas;

use proptest::prelude::ProptestConfig;

/// How many examples a property is tried with: `all`, or a part where `FABRIC_RAY_EXAMPLES_DIVISOR`
/// asks for one.
fn cases(all: u32) -> ProptestConfig {
    let divisor = std::env::var("FABRIC_RAY_EXAMPLES_DIVISOR").map_or(1, |v| v.parse().unwrap());
    ProptestConfig { cases: all.div_ceil(divisor), ..ProptestConfig::default() }
}
