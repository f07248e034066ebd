//! Errors of planning, decoding and executing.

use std::fmt;

/// Which of the two layouts an error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Source,
    Target,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Source => "source",
            Role::Target => "target",
        })
    }
}

/// An error of planning, decoding or executing. Each names tensor, container and rank.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// An invalid side, mesh or layout expression.
    #[error("{role} {subject}: {problem}")]
    Invalid { role: Role, subject: String, problem: String },

    #[error(
        "{role} container `{container}`: tensor `{tensor}` is partial over mesh dimension \
         {mesh_dim}; reduce it before planning"
    )]
    Partial { role: Role, container: String, tensor: String, mesh_dim: usize },

    #[error(
        "{subject}: dtype is {found} but {expected} is needed{place}; cast it on the source first"
    )]
    DtypeMismatch { subject: String, found: String, expected: String, place: String },

    #[error("{subject}: shape is {found:?} but {expected:?} is needed{place}; {advice}")]
    ShapeMismatch {
        subject: String,
        found: Vec<u64>,
        expected: Vec<u64>,
        place: String,
        advice: String,
    },

    #[error(
        "no source container holds tensor `{tensor}`, which target container `{container}` on \
         rank {rank} needs{}; add it to the source or drop it from the target",
        and_more(*.count)
    )]
    MissingTensors { tensor: String, container: String, rank: u32, count: usize },

    #[error(
        "no target container needs tensor `{tensor}` of source container `{container}`{}; drop it \
         from the source, or add a container for it",
        and_more(*.count)
    )]
    ExtraTensors { tensor: String, container: String, count: usize },

    #[error(
        "target container `{container}` on rank {rank}: no source holds tensor `{tensor}` box \
         {region}; report every rank that holds a part of it"
    )]
    Uncovered { tensor: String, container: String, rank: u32, region: String },

    #[error(
        "{role} container `{container}` on rank {rank}: strides {strides:?} let elements of shape \
         {shape:?} overlap; give strides under which every element has its own bytes"
    )]
    Overlap { role: Role, container: String, rank: u32, shape: Vec<u64>, strides: Vec<u64> },

    #[error("{subject}: {what} exceeds {limit}; split the side into smaller plans")]
    TooLarge { subject: String, what: String, limit: String },

    #[error("plan bytes: {problem}; ask the planner to send the plan again")]
    Decode { problem: String },

    #[error("rank {rank}: {problem}; pass the ranks of the {role} side")]
    UnknownRank { role: Role, rank: u32, problem: String },

    #[error(
        "{role} container `{container}` on rank {rank}: buffer holds {found} bytes but the plan \
         reaches {needed}; pass the buffer the layout describes"
    )]
    Buffer { role: Role, container: String, rank: u32, found: u64, needed: u64 },
}

fn and_more(count: usize) -> String {
    match count {
        0 | 1 => String::new(),
        _ => format!(", and {} more like it", count - 1),
    }
}

impl PlanError {
    /// A stable word for the kind of error; the Python classes are named after it.
    pub fn kind(&self) -> &'static str {
        match self {
            PlanError::Invalid { .. } => "invalid",
            PlanError::Partial { .. } => "partial",
            PlanError::DtypeMismatch { .. } => "dtype_mismatch",
            PlanError::ShapeMismatch { .. } => "shape_mismatch",
            PlanError::MissingTensors { .. } => "missing_tensors",
            PlanError::ExtraTensors { .. } => "extra_tensors",
            PlanError::Uncovered { .. } => "uncovered",
            PlanError::Overlap { .. } => "overlap",
            PlanError::TooLarge { .. } => "too_large",
            PlanError::Decode { .. } => "decode",
            PlanError::UnknownRank { .. } => "unknown_rank",
            PlanError::Buffer { .. } => "buffer",
        }
    }

    pub(crate) fn invalid(
        role: Role,
        subject: impl Into<String>,
        problem: impl Into<String>,
    ) -> Self {
        PlanError::Invalid { role, subject: subject.into(), problem: problem.into() }
    }

    pub(crate) fn decode(problem: impl Into<String>) -> Self {
        PlanError::Decode { problem: problem.into() }
    }

    pub(crate) fn too_large(
        subject: impl Into<String>,
        what: impl Into<String>,
        limit: impl Into<String>,
    ) -> Self {
        PlanError::TooLarge { subject: subject.into(), what: what.into(), limit: limit.into() }
    }
}

pub type Result<T> = std::result::Result<T, PlanError>;
