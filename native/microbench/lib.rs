//! Benchmarks of criterion: `cargo bench -p fabric-microbench --bench overhead`.
