//! Errors of the planner: each names tensor, container and rank.

use crate::common::{container, dtype, leaf, mesh, tensor};
use fabric_plan::Placement::{Partial, Replicate, Shard, StridedShard};
use fabric_plan::{plan, ContainerSpec, Extra, Layout, Options, PlanError, Role, Side, SideSpec};

fn side(ranks: &[u32], containers: Vec<ContainerSpec>) -> SideSpec {
    SideSpec { ranks: ranks.to_vec(), containers }
}

fn refused(source: SideSpec, target: SideSpec) -> PlanError {
    let planned = Side::from_spec(Role::Source, source)
        .and_then(|s| plan(s, Side::from_spec(Role::Target, target)?, Options::default()));
    planned.expect_err("the planner must refuse this")
}

fn whole(name: &str, shape: &[u64]) -> ContainerSpec {
    container(name, leaf(&tensor(name, shape, 2), &mesh(&[0], &[1]), &[Replicate]))
}

#[track_caller]
fn assert_error(error: &PlanError, kind: &str, words: &[&str]) {
    let text = error.to_string();
    assert_eq!(error.kind(), kind, "{text}");
    for word in words {
        assert!(text.contains(word), "`{word}` is not in: {text}");
    }
}

#[test]
fn a_tensor_without_a_source() {
    let error = refused(
        side(&[0], vec![whole("a", &[2])]),
        side(&[0], vec![whole("a", &[2]), whole("b", &[2]), whole("c", &[2])]),
    );
    assert_error(&error, "missing_tensors", &["`b`", "container `b`", "rank 0", "1 more"]);
}

#[test]
fn a_tensor_without_a_target_unless_extra_tensors_are_ignored() {
    let source = side(&[0], vec![whole("a", &[2]), whole("b", &[2])]);
    let target = side(&[0], vec![whole("a", &[2])]);
    assert_error(
        &refused(source.clone(), target.clone()),
        "extra_tensors",
        &["`b`", "add a container"],
    );
    let options = Options { extra: Extra::Ignore, ..Options::default() };
    let source = Side::from_spec(Role::Source, source).unwrap();
    let target = Side::from_spec(Role::Target, target).unwrap();
    assert_eq!(plan(source, target, options).unwrap().balance().total, 4);
}

#[test]
fn dtypes_and_shapes_that_differ_between_sides() {
    let half = side(&[0], vec![whole("a", &[2])]);
    let t = tensor("a", &[2], 4);
    let single = side(&[0], vec![container("x", leaf(&t, &mesh(&[0], &[1]), &[Replicate]))]);
    assert_error(&refused(half.clone(), single), "dtype_mismatch", &["`a`", "b2", "b4", "`x`"]);
    let other = side(&[0], vec![whole("a", &[3])]);
    assert_error(&refused(half, other), "shape_mismatch", &["`a`", "[2]", "[3]"]);
}

#[test]
fn one_tensor_with_two_descriptions() {
    let twice = |shape: &[u64], size| {
        let t = tensor("a", shape, size);
        side(
            &[0],
            vec![whole("a", &[2]), container("x", leaf(&t, &mesh(&[0], &[1]), &[Replicate]))],
        )
    };
    let target = side(&[0], vec![whole("a", &[2])]);
    assert_error(&refused(twice(&[2], 4), target.clone()), "dtype_mismatch", &["`x`", "`a`"]);
    assert_error(&refused(twice(&[5], 2), target), "shape_mismatch", &["`x`", "container `a`"]);
}

#[test]
fn a_container_of_another_dtype_than_its_tensor() {
    let mut wrong = whole("a", &[2]);
    wrong.dtype = dtype(8);
    let error = refused(side(&[0], vec![wrong]), side(&[0], vec![whole("a", &[2])]));
    assert_error(&error, "dtype_mismatch", &["container `a`", "tensor `a`", "b2", "b8"]);
}

#[test]
fn a_box_that_no_source_rank_holds() {
    let t = tensor("a", &[8, 4], 2);
    let mut held = container("a", leaf(&t, &mesh(&[0, 1, 2, 3], &[4]), &[Shard { dim: 0 }]));
    held.ranks = Some(vec![0, 1, 3]);
    let wanted = container("x", leaf(&t, &mesh(&[7], &[1]), &[Replicate]));
    let error = refused(side(&[0, 1, 2, 3], vec![held]), side(&[7], vec![wanted.clone()]));
    assert_error(&error, "uncovered", &["`a`", "`x`", "rank 7", "[4:6, 0:4]"]);

    let part = |rows: (u64, u64), columns: (u64, u64)| Layout::Leaf {
        tensor: t.clone(),
        mesh: mesh(&[0], &[1]),
        placements: vec![Replicate],
        slice: Some(vec![rows, columns]),
    };
    let held = vec![
        container("upper", part((0, 3), (0, 4))),
        container("lower left", part((3, 5), (0, 2))),
        container("lower right", part((4, 4), (2, 2))),
    ];
    let error = refused(side(&[0], held), side(&[7], vec![wanted]));
    assert_error(&error, "uncovered", &["`a`", "`x`", "rank 7", "[3:4, 2:4]"]);
}

#[test]
fn partial_sums() {
    let t = tensor("a", &[4], 2);
    let partial = container("grad", leaf(&t, &mesh(&[0, 1], &[2]), &[Partial]));
    let error = refused(side(&[0, 1], vec![partial]), side(&[0], vec![whole("a", &[4])]));
    assert_error(&error, "partial", &["`grad`", "`a`", "reduce"]);
}

#[test]
fn ranks_outside_the_side_or_listed_twice() {
    let t = tensor("a", &[4], 2);
    let on = |ranks: &[u32]| {
        container("a", leaf(&t, &mesh(ranks, &[ranks.len() as u32]), &[Shard { dim: 0 }]))
    };
    let target = side(&[0], vec![whole("a", &[4])]);
    let error = refused(side(&[0, 1], vec![on(&[0, 9])]), target.clone());
    assert_error(&error, "invalid", &["rank 9", "mesh"]);
    let error = refused(side(&[0, 1], vec![on(&[1, 1])]), target.clone());
    assert_error(&error, "invalid", &["rank 1", "twice"]);
    let error = refused(side(&[0, 1, 0], vec![on(&[0, 1])]), target.clone());
    assert_error(&error, "invalid", &["rank 0", "twice"]);
    let error = refused(side(&[0], vec![on(&[0]), on(&[0])]), target);
    assert_error(&error, "invalid", &["container `a`", "rank 0", "twice"]);
}

#[test]
fn elements_that_share_bytes() {
    let mut expanded = whole("a", &[4, 4]);
    expanded.strides = Some(vec![2, 2]);
    let error = refused(side(&[0], vec![whole("a", &[4, 4])]), side(&[0], vec![expanded]));
    assert_error(&error, "overlap", &["target container `a`", "rank 0", "[4, 4]", "[2, 2]"]);
}

#[test]
fn empty_and_overflowing_tensors() {
    let empty = || side(&[0], vec![whole("a", &[4, 0])]);
    assert_error(&refused(empty(), empty()), "invalid", &["`a`", "dimension 1", "size 0"]);
    let huge = || side(&[0], vec![whole("a", &[1 << 63, 1 << 63])]);
    assert_error(&refused(huge(), huge()), "too_large", &["`a`", "2^64"]);
    let half = |ranks: &[u32]| {
        let t = tensor("a", &[1 << 62], 2);
        let held = container("a", leaf(&t, &mesh(ranks, &[ranks.len() as u32]), &[Replicate]));
        side(ranks, vec![held])
    };
    assert_error(&refused(half(&[0]), half(&[0, 1])), "too_large", &["target side", "2^64"]);
}

#[test]
fn sizes_near_two_to_the_63_are_planned_without_overflow() {
    let t = tensor("a", &[1 << 63], 1);
    let held = container("a", leaf(&t, &mesh(&[0, 1, 2], &[3]), &[Shard { dim: 0 }]));
    let source = Side::from_spec(Role::Source, side(&[0, 1, 2], vec![held])).unwrap();
    let wanted = container("a", leaf(&t, &mesh(&[0], &[1]), &[Replicate]));
    let target = Side::from_spec(Role::Target, side(&[0], vec![wanted])).unwrap();
    let plan = plan(source, target, Options::default()).unwrap();
    assert_eq!(plan.balance().total, 1 << 63);
    assert_eq!(fabric_plan::Plan::from_bytes(&plan.to_bytes()).unwrap(), plan);
}

#[test]
fn parts_of_different_shapes() {
    let (a, b) = (tensor("a", &[4, 4], 2), tensor("b", &[4, 6], 2));
    let parts = [&a, &b].map(|t| leaf(t, &mesh(&[0], &[1]), &[Replicate])).to_vec();
    let source = || side(&[0], vec![whole("a", &[4, 4]), whole("b", &[4, 6])]);
    let joined = container("x", Layout::Concat { axis: 0, parts: parts.clone() });
    let error = refused(source(), side(&[0], vec![joined]));
    assert_error(&error, "shape_mismatch", &["`x`", "rank 0", "[4, 6]", "[4, 4]"]);
    let stacked = container("x", Layout::Stack { parts: parts.clone() });
    assert_error(
        &refused(source(), side(&[0], vec![stacked])),
        "shape_mismatch",
        &["`x`", "rank 0"],
    );
    let small = container("x", Layout::Pad { part: Box::new(parts[1].clone()), shape: vec![4, 4] });
    assert_error(&refused(source(), side(&[0], vec![small])), "shape_mismatch", &["`x`", "rank 0"]);
    let axis = container("x", Layout::Concat { axis: 2, parts: vec![parts[0].clone()] });
    assert_error(&refused(source(), side(&[0], vec![axis])), "invalid", &["`x`", "axis 2"]);
}

#[test]
fn invalid_placements_and_slices() {
    let t = tensor("a", &[4], 2);
    let placed = |placements: &[fabric_plan::Placement]| {
        side(&[0], vec![container("x", leaf(&t, &mesh(&[0], &[1]), placements))])
    };
    let target = || side(&[0], vec![whole("a", &[4])]);
    assert_error(
        &refused(placed(&[Shard { dim: 1 }]), target()),
        "invalid",
        &["`a`", "`x`", "dimension 1"],
    );
    assert_error(&refused(placed(&[]), target()), "invalid", &["`a`", "`x`", "0 placements"]);
    let zero = [StridedShard { dim: 0, split_factor: 0 }];
    assert_error(&refused(placed(&zero), target()), "invalid", &["`a`", "split factor 0"]);
    let cut = |start, len| {
        let layout = Layout::Leaf {
            tensor: t.clone(),
            mesh: mesh(&[0], &[1]),
            placements: vec![Replicate],
            slice: Some(vec![(start, len)]),
        };
        side(&[0], vec![container("x", layout)])
    };
    for (start, len) in [(3, 2), (0, 0), (u64::MAX, 2)] {
        assert_error(&refused(cut(start, len), target()), "invalid", &["`x`", "`a`", "slice"]);
    }
}

#[test]
fn unbounded_nesting() {
    let mut bytes = vec![0x92, 0x91, 0x00, 0x91, 0x95, 0xA1, b'x', 0x92, 0xA1, b'f', 0x02];
    for _ in 0..100_000 {
        bytes.extend_from_slice(&[0x92, 0xA5, b's', b't', b'a', b'c', b'k', 0x91]);
    }
    let error = SideSpec::from_msgpack(Role::Source, &bytes).unwrap_err();
    assert_error(&error, "invalid", &["source side"]);
}
