//! Reports of measurements, for every program that makes some.

pub mod report;
