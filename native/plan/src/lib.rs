//! Reshard planning: source layout × target layout → strided copies.
//!
//! Pure functions on numbers: no addresses, no I/O, no clocks, no randomness. A [`SideSpec`] says
//! which rank holds which box of which tensor at which byte; [`plan`] intersects two of them and
//! balances the load over replicas; the resulting [`Plan`] is exact, deterministic and
//! serialisable, and [`apply`] executes it on byte slices.
#![forbid(unsafe_code)]

mod apply;
mod assign;
mod balance;
mod coalesce;
mod cuts;
pub mod delta;
mod emit;
mod error;
mod evaluate;
mod explain;
mod layout;
mod local;
mod matching;
mod model;
mod order;
mod overlap;
mod placer;
mod plan;
mod planner;
mod regions;
mod replicas;
mod shape;
mod side;
mod spec;
mod store;
mod wire;

pub use apply::{apply, BufferKey};
pub use error::{PlanError, Result, Role};
pub use local::LocalContainer;
pub use model::{
    Container, DType, Extra, LeafExpr, Mesh, Node, Options, Placement, Side, Tensor, MAX_DIMS,
};
pub use order::{Balance, Transfer};
pub use plan::{Copy, LinkTotal, Plan, Row};
pub use planner::plan;
pub use replicas::Holders;
pub use shape::{Loop, MAX_LOOPS};
pub use spec::{ContainerSpec, Layout, SideSpec, TensorSpec};
