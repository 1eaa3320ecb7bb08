mod clusters;
mod examples;
mod naive;
pub(crate) mod world;
