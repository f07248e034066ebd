//! Plans: of small cases, of drawn ones, and what no plan is made of.

mod balance;
mod common;
mod decoding;
mod delta;
mod examples;
mod properties;
mod refusals;
mod replicas;
