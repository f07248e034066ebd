//! The group's decisions: pure functions from a snapshot to a decision.
//!
//! | question | file |
//! |---|---|
//! | how large are the slices of a request | [`size`] |
//! | how fast is a rail | [`estimate`] |
//! | which rail takes the next slice | [`score`] |
//! | has a rail stalled | [`stall`] |
//! | is a rail fit for use | [`breaker`] |
//! | may a slice be posted now | [`admit`] |
//! | which part of a NIC's window has this engine, if others of the host use the NIC too | [`divide`] |
//!
//! No function reads a clock, holds a lock or knows a link. State between decisions (an estimate, a
//! turn, a breaker) is a plain value that the group keeps.
//! The mechanisms follow TENT ("A Declarative Slice Spraying Engine for Performant and Resilient
//! Data Movement in Disaggregated LLM Serving"); each file names the section and what differs.

pub mod admit;
pub mod breaker;
pub mod classes;
pub mod divide;
pub mod estimate;
pub mod score;
pub mod size;
pub mod stall;
