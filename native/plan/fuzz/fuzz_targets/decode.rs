//! Decodes arbitrary plan bytes: each is refused, or the plan is safe to use.
#![no_main]

use fabric_plan::{Plan, Role};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = Plan::from_bytes(bytes);
    // The body is decoded on its own, because the digest would reject nearly every input.
    let Ok(plan) = Plan::from_body(bytes) else { return };
    let _ = plan.balance();
    let _ = plan.explain(None, None);
    for rank in &plan.source().ranks {
        let _ = plan.for_source(*rank).map(|copies| copies.map(|c| c.copy.pages()).sum::<u64>());
    }
    for rank in &plan.target().ranks {
        let _ = plan.expected_pages(*rank);
        let _ = plan.explain(None, Some(*rank));
        let _ = plan.target().local_containers(Role::Target, *rank);
    }
    // The bytes may differ: numbers have more than one encoding.
    let again = Plan::from_bytes(&plan.to_bytes()).expect("what is encoded must decode");
    assert_eq!(again, plan);
});
