//! Bytes that claim to be a plan: refused, or safe to use.
#![no_main]

use fabric_plan::{Plan, Role};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = Plan::from_bytes(bytes);
    // The digest would turn away nearly everything, so the body is tried on its own.
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
    // Not the same bytes: numbers can be written in more ways than ours.
    let again = Plan::from_bytes(&plan.to_bytes()).expect("what is encoded must decode");
    assert_eq!(again, plan);
});
