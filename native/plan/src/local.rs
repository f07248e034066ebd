//! The buffers that one rank must provide.

use crate::cuts::CutsTable;
use crate::error::{PlanError, Result, Role};
use crate::evaluate::leaf_nodes;
use crate::layout::Evaluated;
use crate::model::Side;
use crate::placer::Placer;

/// A container as one rank has it; callers bind buffers of this form to a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalContainer {
    pub index: u32,
    pub shape: Vec<u64>,
    /// Bytes between neighbours, per dimension.
    pub strides: Vec<u64>,
    /// Bytes from the first to past the last element.
    pub bytes: u64,
}

impl Side {
    /// The non-empty containers of a rank, in order.
    pub fn local_containers(&self, role: Role, rank: u32) -> Result<Vec<LocalContainer>> {
        if !self.ranks.contains(&rank) {
            let problem = format!("the {role} side has no such rank");
            return Err(PlanError::UnknownRank { role, rank, problem });
        }
        let mut cuts = CutsTable::default();
        let evaluated = Evaluated::new(role, self, &mut cuts)?;
        let mut found = Vec::new();
        let mut first_leaf = 0;
        let dense = evaluated.dense[&rank];
        for (index, container) in self.containers.iter().enumerate() {
            let has = container.ranks.as_ref().is_none_or(|only| only.contains(&rank));
            if has {
                let mut placer = Placer::new(role, self, container);
                let footprint = evaluated.evaluate(&mut placer, first_leaf, dense, &cuts)?;
                if let Some(f) = footprint.filter(|f| f.bytes > 0) {
                    found.push(LocalContainer {
                        index: index as u32,
                        shape: f.shape.to_vec(),
                        strides: f.strides.to_vec(),
                        bytes: f.bytes,
                    });
                }
            }
            first_leaf += leaf_nodes(container).count() as u32;
        }
        Ok(found)
    }
}
