//! Groups of ranks that hold the same bytes.

use crate::common::{container, leaf, mesh, tensor};
use fabric_plan::Placement::{Replicate, Shard};
use fabric_plan::{ContainerSpec, Role, Side, SideSpec};

fn holders(ranks: u32, containers: Vec<ContainerSpec>) -> fabric_plan::Holders {
    let spec = SideSpec { ranks: (0..ranks).collect(), containers };
    Side::from_spec(Role::Target, spec).unwrap().holders(Role::Target).unwrap()
}

#[test]
fn ranks_of_equal_engines_are_replicas() {
    let (w, norm) = (tensor("w", &[8, 4], 2), tensor("norm", &[4], 2));
    let engines = mesh(&[0, 1, 2, 3], &[2, 2]);
    let found = holders(
        4,
        vec![
            container("w", leaf(&w, &engines, &[Replicate, Shard { dim: 0 }])),
            container("norm", leaf(&norm, &engines, &[Replicate, Replicate])),
        ],
    );
    assert_eq!(found.replicas, [[0, 2], [1, 3]]);
    assert_eq!(found.by_container, [[0, 1, 2, 3], [0, 1, 2, 3]]);
}

#[test]
fn a_rank_with_one_more_container_is_no_replica() {
    let (w, head) = (tensor("w", &[8, 4], 2), tensor("head", &[2, 4], 2));
    let found = holders(
        3,
        vec![
            container("w", leaf(&w, &mesh(&[0, 1, 2], &[3]), &[Replicate])),
            container("head", leaf(&head, &mesh(&[2, 1], &[2]), &[Replicate])),
        ],
    );
    assert_eq!(found.replicas, [vec![0], vec![1, 2]]);
    assert_eq!(found.by_container, [vec![0, 1, 2], vec![1, 2]]);
}

#[test]
fn empty_shards_hold_nothing() {
    let w = tensor("w", &[2, 4], 2);
    let all = mesh(&[0, 1, 2, 3], &[4]);
    let found = holders(4, vec![container("w", leaf(&w, &all, &[Shard { dim: 0 }]))]);
    assert_eq!(found.replicas, [[0], [1]]);
    assert_eq!(found.by_container, [[0, 1]]);
}
