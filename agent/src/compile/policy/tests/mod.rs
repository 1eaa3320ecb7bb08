mod clusters;
mod domains;
mod examples;
mod naive;
pub(crate) mod world;
