//! Damaged plan bytes give an error: no panic, no wrong plan, no unbounded memory.

use std::fs;
use std::path::Path;

use crate::cases;
use crate::common::scenario::scenario;
use fabric_plan::{plan, Extra, Options, Plan, PlanError, Role, Side, SideSpec};
use proptest::prelude::*;

const HEADER: usize = 26;

fn encoded(tape: &[u32]) -> Vec<u8> {
    let s = scenario(tape);
    let source = Side::from_spec(Role::Source, s.source).unwrap();
    let target = Side::from_spec(Role::Target, s.target).unwrap();
    let options = Options { extra: Extra::Ignore, min_split_bytes: 8 };
    plan(source, target, options).unwrap().to_bytes()
}

fn is_decode_error(bytes: &[u8]) -> bool {
    matches!(Plan::from_bytes(bytes), Err(PlanError::Decode { .. }))
}

/// Uses every method of a decoded plan: none may panic.
fn use_it(plan: &Plan) {
    let _ = plan.balance();
    let _ = plan.explain(None, None);
    for &rank in &plan.source().ranks {
        let _: u64 = plan.for_source(rank).unwrap().map(|t| t.copy.pages()).sum();
        let _ = plan.source().local_containers(Role::Source, rank);
    }
    for &rank in &plan.target().ranks {
        let _ = plan.expected_pages(rank).unwrap();
        let _ = plan.explain(None, Some(rank));
    }
    let _ = plan.to_bytes();
}

proptest! {
    #![proptest_config(cases(2000))]

    #[test]
    fn a_changed_byte_is_noticed(
        tape in prop::collection::vec(any::<u32>(), 0..80),
        at in any::<prop::sample::Index>(),
        flip in 1u8..,
    ) {
        let mut bytes = encoded(&tape);
        let at = at.index(bytes.len());
        bytes[at] ^= flip;
        prop_assert!(is_decode_error(&bytes));
    }

    #[test]
    fn truncated_bytes_are_noticed(
        tape in prop::collection::vec(any::<u32>(), 0..80),
        at in any::<prop::sample::Index>(),
    ) {
        let bytes = encoded(&tape);
        prop_assert!(is_decode_error(&bytes[..at.index(bytes.len())]));
    }

    #[test]
    fn a_forged_body_is_refused_or_harmless(
        tape in prop::collection::vec(any::<u32>(), 0..80),
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut body = encoded(&tape).split_off(HEADER);
        for (at, value) in edits {
            let at = at.index(body.len());
            body[at] = value;
        }
        if let Ok(plan) = Plan::from_body(&body) {
            use_it(&plan);
        }
    }

    #[test]
    fn garbage_is_refused_or_harmless(body in prop::collection::vec(any::<u8>(), 0..400)) {
        prop_assert!(is_decode_error(&body));
        if let Ok(plan) = Plan::from_body(&body) {
            use_it(&plan);
        }
    }
}

#[test]
fn announced_lengths_do_not_reserve_memory() {
    // A list that claims 2^60 elements, then nothing.
    let mut body = vec![0xFF; 8];
    body.push(0x0F);
    assert!(matches!(Plan::from_body(&body), Err(PlanError::Decode { .. })));
}

#[test]
fn other_versions_are_named() {
    let mut bytes = encoded(&[]);
    bytes[8] = 9;
    let text = Plan::from_bytes(&bytes).unwrap_err().to_string();
    assert!(text.contains("got version 9"), "{text}");
}

/// Seeds must be valid in today's format; fuzzing from invalid seeds finds little.
#[test]
fn the_seeds_of_the_fuzzers_are_plans_and_layouts() {
    let seeds = |target: &str| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds").join(target);
        let files =
            fs::read_dir(folder).unwrap().map(|file| fs::read(file.unwrap().path()).unwrap());
        files.collect::<Vec<_>>()
    };
    for body in seeds("decode") {
        use_it(&Plan::from_body(&body).unwrap());
    }
    for layouts in seeds("sides") {
        let (head, rest) = layouts.split_first_chunk::<2>().unwrap();
        let (source, target) = rest.split_at(usize::from(u16::from_le_bytes(*head)));
        let side = |role, bytes: &[u8]| {
            Side::from_spec(role, SideSpec::from_msgpack(role, bytes).unwrap()).unwrap()
        };
        let options = Options { extra: Extra::Ignore, min_split_bytes: 1 };
        plan(side(Role::Source, source), side(Role::Target, target), options).unwrap();
    }
    assert_eq!((seeds("decode").len(), seeds("sides").len()), (4, 4));
}
